"""The state of a population, in combined arrays of all members or in separate arrays for each
member."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

_FIELDS = ("step", "members", "hyper", "diverged")


class Population:
    """The state of a population of n members: immutable, and a state for `tr.fit`.

    With the method "loop" (see `population`), a step leaves the state of each member in arrays of
    its own. Reading `members` or the leaves, for example for an evaluation or a checkpoint, copies
    them into new arrays, as `jnp.stack` does.

    Fields:
      step: the number of completed steps, an int32 scalar.
      members: the states of all members in one tree, whose leaves are [n, ...].
      hyper: the hyperparameters, a tree of arrays [n, ...].
      diverged: a bool array [n], True for each member that has had a NaN or infinite metric.

    >>> init = lambda key, hyper: {"w": jax.random.normal(key, (3,))}
    >>> init_n, step_n = search.population(init, lambda state, batch, hyper: (state, {}))
    >>> init_n(jax.random.key(0), {"rate": jnp.ones(4)}).members["w"].shape
    (4, 3)
    """

    __slots__ = ("_members", "diverged", "hyper", "step")

    def __init__(self, step: Any, members: Any, hyper: Any, diverged: Any):
        for name, value in (
            ("step", step),
            ("_members", members),
            ("hyper", hyper),
            ("diverged", diverged),
        ):
            object.__setattr__(self, name, value)

    @property
    def members(self) -> Any:
        return self._members.together() if isinstance(self._members, Separate) else self._members

    def replace(self, **changes: Any) -> Population:
        """Returns a copy in which the given fields have other values."""
        if unknown := changes.keys() - set(_FIELDS):
            raise TypeError(
                f"Population has no field {', '.join(sorted(unknown))}; it has {', '.join(_FIELDS)}"
            )
        return Population(
            **{
                "step": self.step,
                "members": self._members,
                "hyper": self.hyper,
                "diverged": self.diverged,
            }
            | changes
        )

    def __setattr__(self, name, value):
        raise AttributeError(f"a Population is immutable: use state.replace({name}=...)")

    def __repr__(self):
        return f"Population({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


def _fields(population):
    return [getattr(population, name) for name in _FIELDS], None


def _named(population):
    return [(GetAttrKey(name), getattr(population, name)) for name in _FIELDS], None


jax.tree_util.register_pytree_with_keys(
    Population, _named, lambda _, fields: Population(*fields), _fields
)


class Separate:
    """The states of the members of a population, in separate arrays for each member.

    Attributes:
      states: the training states, a sequence with one tree for each member of the population.
      hypers: the hyperparameters, a sequence with one tree for each member of the population.
      hyper: the hyperparameters of all n members of the population in one tree, whose leaves have
          the shape [n, ...].
      mesh: the mesh of the devices over which the members of the population are distributed, or
        None if the whole population is on one device.
    """

    def __init__(self, states: Sequence[Any], hypers: Sequence[Any], hyper: Any, mesh: Mesh | None):
        self.states, self.hypers, self.hyper, self.mesh = states, hypers, hyper, mesh
        self._together = None

    def together(self) -> Any:
        if self._together is None:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.states)):
                return self.states  # the arrays were donated to a step that failed
            self._together = stacked(self.states, self.mesh)
        return self._together

    def forget(self) -> None:
        self._together = None


def separate(population: Population, mesh: Mesh | None) -> Separate:
    """Copies the state of each member (training run) from the combined arrays of a population to
    separate arrays, and deletes the combined arrays."""
    found, hyper, n = population._members, population.hyper, population.diverged.shape[0]
    if not isinstance(found, Separate):
        states, hypers = zip(*parts((found, hyper), n, mesh))
        kept = {id(leaf) for leaf in jax.tree.leaves(hyper)}
        for leaf in jax.tree.leaves(found):
            if isinstance(leaf, jax.Array) and id(leaf) not in kept:
                leaf.delete()
        return Separate(states, hypers, hyper, mesh)
    if found.hyper is not hyper:
        found = Separate(found.states, parts(hyper, n, mesh), hyper, mesh)
    found.forget()
    return found


def parts(tree: Any, n: int, mesh: Mesh | None) -> list[Any]:
    """Splits a tree of arrays [n, ...], where n is the number of members of a population, into one
    tree for each member. The arrays of a member's tree are on the device that trains this
    member."""
    if mesh is None:
        return _parts(tree, n)
    tree = jax.device_put(tree, NamedSharding(mesh, P(mesh.axis_names[0])))
    on = lambda device: jax.tree.map(
        lambda x: next(s.data for s in x.addressable_shards if s.device == device), tree
    )
    return [part for device in mesh.local_devices for part in _parts(on(device), n // mesh.size)]


def stacked(parts: Sequence[Any], mesh: Mesh | None) -> Any:
    """Combines the trees of the n members of a population into one tree, whose leaves have the
    shape [n, ...]. `stacked` is the inverse of `parts`."""
    if mesh is None:
        return _stacked(parts)
    each, place = len(parts) // len(mesh.local_devices), NamedSharding(mesh, P(mesh.axis_names[0]))
    local = [_stacked(parts[i : i + each]) for i in range(0, len(parts), each)]
    return jax.tree.map(
        lambda *x: jax.make_array_from_single_device_arrays(
            (each * mesh.size, *x[0].shape[1:]), place, list(x)
        ),
        *local,
    )


@jax.jit
def _stacked(parts):
    return jax.tree.map(lambda *each: jnp.stack(each), *parts)


@partial(jax.jit, static_argnums=1)
def _parts(tree, n):
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(n)]
