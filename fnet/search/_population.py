"""Populations: n models are trained by the same step, each with its own hyperparameters and random
key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.search import _methods
from fnet.search._members import Population
from fnet.search._methods import METHODS, Step

AXIS = "members"


def population(
    init: Callable,
    step: Callable,
    *,
    method: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    own_batches: bool = False,
) -> tuple[Callable, Step]:
    """Turns one training run into a population of n runs with different hyperparameters and keys.

        def init(key, hyper):
            params, _ = model.init(key, x)
            return tr.TrainState.create(params, optax.sgd(hyper["learning_rate"]))

        def step(state, batch, hyper):
            loss, grads = jax.value_and_grad(objective)(state.params, batch)
            return state.apply(optax.sgd(hyper["learning_rate"]), grads), {"loss": loss}

        init_n, step_n = search.population(init, step)
        state = init_n(jax.random.key(0), {"learning_rate": jnp.logspace(-3, 0, 16)})
        state = tr.fit(step_n, state, batches, steps=1000, workdir="runs/population")

    Each run is a member. Up to rounding, member i ends where a single run would that starts from
    `init(jax.random.fold_in(key, i), h)` with its hyperparameters h. These may be anything that can
    be a traced array: the learning rate, the weight decay, the label smoothing, the strength of
    augmentation, the dropout rate (`nn.Dropout()(scope, x, rate=hyper["dropout"])`) or a seed.

    There are three methods to run the members: "vmap" runs the step under `jax.vmap`; "split" does,
    too, but computes convolutions whose kernels differ between the members one by one; "loop" runs
    one compiled program for one member after another. Which is fastest depends on the model and the
    device: with convolutions on a CPU, "vmap" is several times slower than "loop". So the first
    call of `step_n` times the methods on copies of the state ("split" only if there are
    convolutions), and keeps the fastest. `ft.explain(step_n, state, batch)` shows the times, and
    `tr.fit` stores the choice in its checkpoints, for resumed runs.

    A member with a NaN or infinite metric is marked in `state.diverged`, and its later metrics are
    ignored. The others are not affected, and `tr.fit` goes on.

    Args:
      init: initializes one member, `init(key, hyper) -> state`.
      step: the training step of one member, `step(state, batch, hyper) -> (state, metrics)`.
      method: "auto" (the fastest), "vmap", "split" or "loop". Default "auto".
      devices: the devices over which the members are distributed; there must be as many members on
        each. Default None: all members on the default device.
      own_batches: whether each member has its own batch: the leaves of a batch are then [n, ...].
        Default False: all get the same.

    Returns:
      Two functions, (init_n, step_n). `init_n(key, hyper)` returns a `Population`, from
      hyperparameters whose leaves have a leading axis [n]. `step_n(state, batch)` returns (state,
      metrics). It is compiled on its first call, and donates the state. Each metric is a
      `tr.MemberMean`, whose `result()` is an array [n].

    Raises:
      TypeError: init or step is not a function.
      ValueError: the method is unknown, or the leaves of hyper have different lengths.

    >>> def init(key, hyper):
    ...     return {"w": jnp.zeros(())}
    >>> def step(state, batch, hyper):
    ...     error = state["w"] - batch
    ...     return {"w": state["w"] - hyper["rate"] * error}, {"error": jnp.abs(error)}
    >>> init_n, step_n = search.population(init, step, method="vmap")
    >>> state = init_n(jax.random.key(0), {"rate": jnp.array([0.0, 0.5, 1.0])})
    >>> state, metrics = step_n(state, jnp.array(2.0))
    >>> state.members["w"].tolist()
    [0.0, 1.0, 2.0]
    """
    for name, function in (("init", init), ("step", step)):
        if not callable(function):
            raise TypeError(
                f"population(init, step): {name} is a function; got a {type(function).__name__}"
            )
    if method != "auto" and method not in METHODS:
        raise ValueError(
            f"population(method={method!r}): expected 'auto' or one of {', '.join(METHODS)}"
        )
    mesh = None if devices is None else Mesh(np.array(devices), (AXIS,))
    return _init(init, mesh), Step(step, method, mesh, own_batches)


def _init(init, mesh):
    def all_members(keys, hyper):
        members = jax.vmap(init)(keys, hyper)
        n = len(jax.tree.leaves(hyper)[0])
        return Population(
            jnp.zeros((), jnp.int32), members, jax.tree.map(jnp.asarray, hyper), jnp.zeros(n, bool)
        )

    @functools.wraps(init)
    def init_n(key, hyper):
        n = members_of(hyper)
        if mesh is not None and n % mesh.size:
            raise ValueError(
                f"population: {n} members cannot be divided evenly among {mesh.size} devices; use "
                f"a multiple of {mesh.size} members"
            )
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
        if mesh is None:
            return jax.jit(all_members)(keys, hyper)
        shapes = jax.eval_shape(all_members, keys, hyper)
        return jax.jit(all_members, out_shardings=placement(shapes, mesh))(keys, hyper)

    return init_n


def placement(shapes: Population, mesh: Mesh) -> Population:
    """Returns the shardings of a population: the members are sharded over devices, the step counter
    is replicated."""
    place = lambda tree: jax.tree.map(lambda x: NamedSharding(mesh, P(AXIS)), tree)
    return Population(
        NamedSharding(mesh, P()), place(shapes.members), place(shapes.hyper), place(shapes.diverged)
    )


def members_of(hyper: Any) -> int:
    """Returns the number of members of a population, which is the length of each leaf of its
    hyperparameters.

    Raises:
      ValueError: the tree has no leaves, a leaf has no axis, or the leaves have different lengths.
    """
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf)[:1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(hyper)
    }
    if not sizes or len(set(sizes.values())) > 1 or not all(sizes.values()):
        known = (
            ", ".join(f"'{name}': {list(size) or 'a number'}" for name, size in sizes.items())
            or "no array"
        )
        raise ValueError(
            "population: expected hyperparameters with one value for each member, arrays of the "
            f"same length; got {known}"
        )
    return int(next(iter(sizes.values()))[0])


def member(state: Population, index: int) -> Any:
    """Returns the state of one member of a population, for example of the best.

    >>> init_n, step_n = population(lambda key, hyper: {"w": 2 * hyper}, lambda state, batch, hyper: (state, {}))
    >>> float(search.member(init_n(jax.random.key(0), jnp.array([1.0, 3.0])), 1)["w"])
    6.0
    """
    n = len(state.diverged)
    if not -n <= index < n:
        raise IndexError(f"member {index}: the population has {n} members")
    return jax.tree.map(lambda x: x[index], state.members)


def take(state: Population, indices: Any) -> Population:
    """Returns a population of some members of another, with their states and hyperparameters.

    Args:
      state: a population.
      indices: the members to take, an integer array [m]. An index may be repeated.

    >>> init_n, step_n = population(lambda key, hyper: {"w": 2 * hyper}, lambda state, batch, hyper: (state, {}))
    >>> search.take(init_n(jax.random.key(0), jnp.array([1.0, 3.0])), [1, 1]).members["w"].tolist()
    [6.0, 6.0]
    """
    rows = jnp.asarray(indices, jnp.int32)
    chosen = lambda tree: jax.tree.map(lambda x: x[rows], tree)
    return state.replace(
        members=chosen(state.members), hyper=chosen(state.hyper), diverged=state.diverged[rows]
    )


def each_member(measure: Callable) -> Callable:
    """Returns a function that applies `measure` to each member of a population, for `tr.evaluator`.

        evaluate = {"validation": tr.evaluator(search.each_member(measure), data, 500)}
        tr.fit(step_n, state, batches, steps=1000, evaluate=evaluate, best="validation/accuracy/max", ...)

    Args:
      measure: a function of the state of one member, `measure(state, batch) -> metrics`.

    Returns:
      A function of a `Population` and a batch. Each `tr.mean` becomes a `tr.MemberMean`, which is
      logged as name/mean, name/max, name/min and name/0, name/1, ... Other results of `measure`
      have the shape [n, ...], one row for each of the n members.

    >>> measure = search.each_member(lambda state, batch: {"error": tr.mean(jnp.abs(state["w"] - batch))})
    >>> init_n, step_n = population(lambda key, hyper: {"w": hyper}, lambda state, batch, hyper: (state, {}))
    >>> measure(init_n(jax.random.key(0), jnp.array([1.0, 3.0])), jnp.ones(5))["error"].result().tolist()
    [0.0, 2.0]
    """

    @functools.wraps(measure)
    def measured(state, batch):
        run = jax.vmap(_methods.split_convolutions(measure), in_axes=(0, None))
        return _methods.as_members(run(state.members, batch))

    return measured
