"""Traces the step of a plan: for one device, or, on a mesh with explicit axes, with the types that
state its shardings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax, jaxpr
from fnet.cost._count import Count, count_jaxpr
from fnet.parallel import _check, _mesh
from fnet.parallel._estimate import Followed, Split
from fnet.parallel._plan import rows_over
from fnet.parallel._shardings import scanned_leaves
from fnet.parallel._strategies import Strategy, parse


class Traced:
    """The jaxprs of a step for several strategies. Each jaxpr is traced only once.

    Attributes:
        state, batch: trees of shapes. If `typed`, the shapes have shardings.
        typed: whether the step and `init` state their shardings themselves.
        plain: the same step with other dtypes, or itself.
    """

    def __init__(self, step, state, batch, mesh=None, *, typed=False, plain=None):
        self.plain: Traced = plain or self
        self._followed: dict[Any, Followed] = {}
        self._proportional: dict[Any, bool] = {}
        self.step, self.state, self.batch, self.mesh = step, state, batch, mesh
        self.typed = typed
        with _mesh.tracing(mesh, typed):
            closed, self.out = _jax.make_jaxpr(step, return_shape=True)(state, batch)
        _check.state(state, self.out)
        self._programs: dict[Any, Any] = {(False, 1): closed}
        self._counts: dict[Any, Count] = {}
        leaves = [path for path, _ in jax.tree.leaves_with_path(state)]
        self.scanned = scanned_leaves(closed.jaxpr, leaves)
        self.unused = _check.unused(closed.jaxpr.invars[len(leaves) :], closed.jaxpr, batch)
        # XLA removes the arguments that the step does not read.
        self.complete = not self.unused and not _check.unused(
            closed.jaxpr.invars[: len(leaves)], closed.jaxpr, state
        )

    def program(self, option: Strategy) -> Any:
        """Returns the jaxpr of the step with a strategy."""
        key = option.remat, option.slices
        if key not in self._programs:
            with _mesh.tracing(self.mesh, self.typed):
                closed = _jax.make_jaxpr(option.applied(self.step))(self.state, self.batch)
            self._programs[key] = closed
        return self._programs[key]

    def count(self, option: Strategy) -> Count:
        """Returns the FLOPs and bytes of the step with a strategy."""
        key = option.remat, option.slices
        if key not in self._counts:
            self._counts[key] = count_jaxpr(self.program(option))
        return self._counts[key]

    def followed(
        self, option: Strategy, splits: tuple[Split, ...], axes: Mapping[str, int], **options
    ) -> Followed:
        """Follows the arrays of the step through a mesh. The arguments are those of `Followed`."""
        key = (
            option.remat,
            option.slices,
            splits,
            tuple(axes.items()),
            tuple(options.items()),
        )
        if key not in self._followed:
            self._followed[key] = Followed(
                self.program(option), list(splits), dict(axes), **options
            )
        return self._followed[key]

    def proportional(self, option: Strategy, times: float, batch: Any) -> bool:
        """Whether the memory of the step's values follows from their rows, for up to `times` as
        many rows as were traced: whether a trace with `batch`, which has so many, needs as much. A
        step may divide larger batches into pieces, for example.

        Recomputation and the dtypes of chips do not change whether a step does so."""
        if self.plain is not self:
            return self.plain.proportional(option, times, batch)
        plain = Strategy("data", microbatches=option.slices)
        key = plain, times
        if key not in self._proportional:
            splits = [Split()] * len(jax.tree.leaves(self.state))
            splits += [Split(0 if x.ndim else None) for x in jax.tree.leaves(batch)]
            alone = {"whole": False, "kernels": None, "casts": False}  # as for a CPU
            traced = self.followed(plain, tuple(splits), {"data": 1}, **alone)
            larger = Followed(self.resized(plain, batch), splits, {"data": 1}, **alone)
            expected, needed = traced.estimate(times).peak, larger.estimate().peak
            self._proportional[key] = abs(expected / needed - 1) < 0.01
        return self._proportional[key]

    def resized(self, option: Strategy, batch: Any) -> Any:
        """Returns the jaxpr of the step for a batch with another number of rows."""
        key = option, tuple(x.shape for x in jax.tree.leaves(batch))
        if key not in self._programs:
            if self.typed:
                batch = split_rows(batch, self.mesh)
            with _mesh.tracing(self.mesh, self.typed):
                self._programs[key] = _jax.make_jaxpr(option.applied(self.step))(self.state, batch)
        return self._programs[key]


def traced(
    step: Callable,
    init: Callable,
    batch: Any,
    mesh: Mesh | AbstractMesh,
    strategy: str,
    *,
    ruled: bool,
) -> Traced:
    """Traces a step and the state that `init` creates.

    On a mesh with explicit axes, the step states its own shardings if the strategy is "explicit",
    if the types of the state that `init` creates on the mesh state some, or if the step or `init`
    can be traced only on the mesh.

    Args:
        ruled: whether there are rules for the shardings of parameters.

    Raises:
        ValueError: a strategy or rules were given for a step that states its own shardings, or the
            strategy is "explicit" and the mesh has no explicit axes.
    """
    option = parse(strategy)
    asked = option is not None and option.state == "explicit"
    if not _mesh.explicit(mesh):
        if asked:
            raise ValueError(
                "plan: strategy 'explicit' is for a mesh with explicit axes; pass one, such as "
                "mesh=jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))"
            )
        return Traced(step, _state(init, mesh, typed=False), batch, mesh)

    alone = None
    if asked:
        why = "the strategy is 'explicit'"
    elif _states_shardings(init, mesh):
        why = "the types of the state that init returns state shardings"
    else:
        try:
            return Traced(step, _state(init, mesh, typed=False), batch, mesh)
        except Exception as error:
            alone = error
        why = f"it cannot be traced for one device ({type(alone).__name__})"
    try:
        found = Traced(
            step, _state(init, mesh, typed=True), split_rows(batch, mesh), mesh, typed=True
        )
    except Exception as error:
        raise error from alone
    if option is not None and not asked:
        raise ValueError(
            f"plan: strategy {strategy!r} is for a step written for one device; this step states "
            f"its own shardings, because {why}. Use strategy='explicit' or 'auto'"
        ) from alone
    if ruled:
        raise ValueError(
            "plan: rules= are for a step written for one device; this step states its own "
            f"shardings, because {why}. Let init return parameters with these shardings, for "
            "example with jax.sharding.reshard"
        ) from alone
    return found


def _states_shardings(init: Callable, mesh: Mesh | AbstractMesh) -> bool:
    """Whether the types of the state that `init` creates on a mesh split one of its leaves."""
    try:
        return any(map(jaxpr.explicit, jax.tree.leaves(_state(init, mesh, typed=True))))
    except Exception:  # may be an init for one device
        return False


def _state(init: Callable, mesh: Mesh | AbstractMesh, *, typed: bool) -> Any:
    with _mesh.tracing(mesh, typed):
        state = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    if not typed:
        return state
    abstract = _mesh.abstract(mesh)
    place = lambda x: NamedSharding(abstract, P(*jaxpr.split_over(x)))
    return with_types(state, jax.tree.map(place, state))


def split_rows(batch: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns the shapes of a batch with types that state that its rows are split."""
    abstract, rows = _mesh.abstract(mesh), rows_over(mesh)
    place = lambda x: NamedSharding(abstract, P(rows) if x.ndim else P())
    return with_types(batch, jax.tree.map(place, batch))


def with_types(shapes: Any, places: Any) -> Any:
    """Returns a tree of shapes with the shardings `places` on the abstract mesh."""

    def typed(x, place):
        place = NamedSharding(_mesh.abstract(place.mesh), place.spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_mesh.in_types(place))

    return jax.tree.map(typed, shapes, places)
