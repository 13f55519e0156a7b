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
    """Converts one training run to a population of n training runs with different hyperparameters
    and initial values.

        def init(key, hyper):
            params, _ = model.init(key, x)
            return tr.TrainState.create(params, optax.sgd(hyper["learning_rate"]))

        def step(state, batch, hyper):
            loss, grads = jax.value_and_grad(objective)(state.params, batch)
            return state.apply(optax.sgd(hyper["learning_rate"]), grads), {"loss": loss}

        init_n, step_n = search.population(init, step)
        state = init_n(jax.random.key(0), {"learning_rate": jnp.logspace(-3, 0, 16)})
        state = tr.fit(step_n, state, batches, steps=1000, workdir="runs/population")

    Each training run of the population is a member. `hyper` may contain any hyperparameter that can
    be a traced array: the learning rate, the weight decay, the label smoothing, the strength of
    augmentation, the dropout rate (`nn.Dropout()(scope, x, rate=hyper["dropout"])`) or a seed. Up
    to rounding, member i has the same results as a single training run that starts from
    `init(jax.random.fold_in(key, i), h)`, where h contains the i-th value of each hyperparameter.

    There are three methods to run the members (training runs) of a population: "vmap", "split" and
    "loop". The method "vmap" runs the step under `jax.vmap`. The method "split" also uses
    `jax.vmap`, but if each training run has its own convolution kernel, a separate convolution is
    computed for each training run. The method "loop" runs one compiled program for one training run
    after another.

    Which of the methods vmap, split and loop is the fastest depends on the model and the device.
    For example, if each member of the population has its own convolution kernels, `vmap` on a CPU
    is several times slower than `loop`. With the method "auto", the first call of `step_n` measures
    the times of the methods on copies of the state ("split" only if the step contains
    convolutions), and selects the fastest method. `ft.explain(step_n, state, batch)` shows the
    measured times of the methods. `tr.fit` stores the selected method in its checkpoints, so a
    resumed run uses the same method.

    If a metric of a member of the population is NaN or infinite, the member is marked in
    `state.diverged`, and its later metrics are ignored. A member of the population with NaN or
    infinite metrics does not affect the other members, and `tr.fit` continues.

    Args:
      init: the function that initializes one member of the population, `init(key, hyper) -> state`.
      step: the training step of one member of the population, `step(state, batch, hyper) -> (state,
          metrics)`.
      method: "auto" (the fastest method), "vmap", "split" or "loop".
      devices: the devices over which the members (training runs) of the population are distributed.
        The number of members of the population must be a multiple of the number of devices. If
        `devices` is None, the whole population runs on the default device.
      own_batches: whether each member of the population receives its own batch. If `own_batches` is
        True, the leaves of a batch must have the shape [n, ...], where n is the number of members
        of the population. If `own_batches` is False, all members of the population receive the same
        batch.

    Returns:
      Two functions, (init_n, step_n). `init_n(key, hyper)` returns a `Population`. The leaves of
      `hyper` must have a leading axis [n]. `step_n(state, batch)` returns (state, metrics). The
      function `step_n` is compiled on its first call, and donates the state. Each metric that
      `step_n` returns is a `tr.MemberMean`, whose `result()` is an array [n].

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
                f"a "
                f"multiple of {mesh.size} members"
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
            f"population: expected hyperparameters with one value for each member, arrays of the "
            f"same "
            f"length; got {known}"
        )
    return int(next(iter(sizes.values()))[0])


def member(state: Population, index: int) -> Any:
    """Returns the state of one member of a population, for example of the best member.

    >>> init_n, step_n = population(lambda key, hyper: {"w": 2 * hyper}, lambda state, batch, hyper: (state, {}))
    >>> float(search.member(init_n(jax.random.key(0), jnp.array([1.0, 3.0])), 1)["w"])
    6.0
    """
    n = len(state.diverged)
    if not -n <= index < n:
        raise IndexError(f"member {index}: the population has {n} members")
    return jax.tree.map(lambda x: x[index], state.members)


def take(state: Population, indices: Any) -> Population:
    """Returns a population of selected members of a given population, with their states and
    hyperparameters.

    Args:
      state: a population.
      indices: the indices of the selected members of the population, an integer array [m]. An index
          may be repeated.

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
    """Returns a function that applies `measure` to each member of a population. The returned
    function can be
    passed to `tr.evaluator`.

        evaluate = {"validation": tr.evaluator(search.each_member(measure), data, 500)}
        tr.fit(step_n, state, batches, steps=1000, evaluate=evaluate, best="validation/accuracy/max", ...)

    Args:
      measure: a function of the state of one member of the population, `measure(state, batch) ->
          metrics`.

    Returns:
      A function of a `Population` and a batch. Each `tr.mean` in the metrics becomes a
      `tr.MemberMean`, which is logged as name/mean, name/max, name/min and name/0, name/1, ...
      Results of `measure` that are not a `tr.mean` have the shape [n, ...], where n is the number
      of members of the population.

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
