"""Stochastic weight averaging, and BatchNorm statistics for averaged parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AverageState(NamedTuple):
    """The state of `average_weights`.

    Attributes:
        step: the number of updates, an int32 scalar.
        count: the number of parameter trees that have been averaged so far, an int32 scalar.
        mean: the mean of the parameter trees that have been averaged so far; zeros if `count` is 0.

    >>> tr.average_weights(start=2).init({"w": jnp.ones(3)}).mean["w"].tolist()
    [0.0, 0.0, 0.0]
    """

    step: jax.Array
    count: jax.Array
    mean: Any


def average_weights(*, start: int, every: int = 1) -> optax.GradientTransformation:
    """Returns an Optax transformation that averages the parameters of several steps (stochastic weight averaging).

        tx = optax.chain(optax.sgd(0.05), tr.average_weights(start=1000, every=100))    # the last of the chain
        params = tr.averaged_weights(state.opt_state)
        stats = tr.batch_statistics(model, params, state.state, batches)

    The updates of the parameters are numbered from 1. The average is the mean of the parameters after the updates
    `start`, `start + every`, `start + 2 * every` and so on. The transformation returns the updates of the optimizer
    unchanged.

    Args:
        start: the number of the update after which the parameters are averaged for the first time.
        every: the interval, in updates, at which the parameters are added to the average. Usually, `every` is the
            number of updates in an epoch, or in a cycle of the learning-rate schedule. Default 1.

    Raises:
        ValueError: `start` or `every` is less than 1.

    Source: Izmailov et al. (2018), Averaging Weights Leads to Wider Optima and Better Generalization, algorithm 1.

    >>> tx = optax.chain(optax.sgd(1.0), tr.average_weights(start=1))
    >>> params = jnp.array(0.0)
    >>> state = tx.init(params)
    >>> for gradient in (-1.0, -2.0):    # the parameters are 1 and 3
    ...     updates, state = tx.update(jnp.array(gradient), state, params)
    ...     params = params + updates
    >>> float(tr.averaged_weights(state))
    2.0
    """
    if start < 1 or every < 1:
        raise ValueError(f"average_weights: expected start >= 1 and every >= 1; got {start} and {every}")

    def init(params):
        return AverageState(jnp.int32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("average_weights: call update(grads, state, params) with the parameters")
        step = state.step + 1
        take = (step >= start) & ((step - start) % every == 0)
        count = state.count + take.astype(jnp.int32)

        def moved(mean, param, delta):
            share = take.astype(mean.dtype) / jnp.maximum(count, 1).astype(mean.dtype)
            return mean + share * (param + delta.astype(param.dtype) - mean)

        return updates, AverageState(step, count, jax.tree.map(moved, state.mean, params, updates))

    return optax.GradientTransformation(init, update)


def averaged_weights(opt_state: Any) -> Any:
    """Returns the averaged parameters from the state of an optimizer that contains `average_weights`.

    Raises:
        ValueError: the optimizer does not contain exactly one `average_weights`, or no parameters have been averaged
            yet, because there were fewer than `start` updates.

    >>> tx = tr.average_weights(start=1)
    >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), jnp.zeros(2))
    >>> tr.averaged_weights(state).tolist()
    [1.0, 1.0]
    """
    is_average = lambda node: isinstance(node, AverageState)
    found = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_average) if is_average(leaf)]
    if len(found) != 1:
        raise ValueError(f"averaged_weights: expected one average_weights in the optimizer; got {len(found)}")
    if not isinstance(found[0].count, jax.core.Tracer) and not int(found[0].count):
        raise ValueError(f"averaged_weights: nothing was averaged in {int(found[0].step)} updates; train up to `start`")
    return found[0].mean


def batch_statistics(f: Callable, params: Any, state: Any, batches: Iterable[Any], *, key: Any = None) -> Any:
    """Recomputes the running statistics of a model, such as those of BatchNorm, from the given batches.

    The running statistics of BatchNorm are valid only for the parameters with which they were computed. Therefore,
    recompute the statistics after you average, prune or quantize the parameters. Each statistic, such as the mean of an
    activation, is computed for each of the given batches, and the new running statistic is the mean of the results.

    The function works for any model whose state contains running averages `new = m * old + (1 - m) * statistic`.

    Args:
        f: the model, a function that is called as `f(params, *batch, state=state, key=key, train=True)` and returns
            (output, new state).
        params: the parameters.
        state: the state of the model, for example from the training run. The old values of the running averages in
            `state` are not used. Leaves of `state` that are not running averages, such as counters, are returned
            unchanged.
        batches: the batches, all of the same size. A batch is a tuple of the arguments of f after `params`. If f has
            only one argument after `params`, a batch may be this argument itself instead of a tuple of length 1.
        key: a PRNG key for f. Default None.

    Returns:
        The state of the model with the new statistics.

    Raises:
        ValueError: `batches` is empty.

    Source: Izmailov et al. (2018), section 3.2; PyTorch's `torch.optim.swa_utils.update_bn`.

    >>> model = nn.BatchNorm()
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 1)))
    >>> batches = [jnp.array([[1.0], [3.0]]), jnp.array([[5.0], [7.0]])]
    >>> tr.batch_statistics(model, params, state, batches)["mean"].round(3).tolist()
    [4.0]
    """
    options = {} if key is None else {"key": key}
    floating = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating)
    filled = lambda value: jax.tree.map(lambda x: jnp.full_like(x, value) if floating(x) else x, state)

    @jax.jit
    def collected(params, old, batch):
        return f(params, *batch, state=old, train=True, **options)[1]

    total, count, momentum = None, 0, None
    for batch in batches:
        batch = batch if isinstance(batch, tuple) else (batch,)
        zero = collected(params, filled(0.0), batch)
        if momentum is None:
            one = collected(params, filled(1.0), batch)
            momentum = jax.tree.map(lambda a, b: b - a if floating(a) else a, zero, one)
        total = zero if total is None else jax.tree.map(jnp.add, total, zero)
        count += 1
    if not count:
        raise ValueError("batch_statistics: expected at least one batch; got none")

    def finished(old, sums, weight):
        if not floating(old) or bool((jnp.abs(weight - weight.ravel()[0]) > 1e-3).any()) or weight.ravel()[0] > 0.9999:
            return old
        return (sums / (count * (1 - weight.ravel()[0]))).astype(old.dtype)

    return jax.tree.map(finished, state, total, momentum)
