"""Averages of parameters: the dtypes in which they are stored, and stochastic weight averaging."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


def averages(leaf: Any) -> bool:
    """Whether an average of a leaf has a meaning: whether it is floating-point or complex, not a
    counter or a key."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def widened(leaf: Any) -> jax.Array:
    """Returns a copy of a leaf in the dtype in which averages are stored: float32 for a narrower
    floating-point dtype.

    An average moves by a small fraction of a difference in each step. In bfloat16, an addition of
    less than 1/512 is rounded away, so that the average would never move."""
    if (
        jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        and jnp.finfo(jnp.result_type(leaf)).bits < 32
    ):
        return jnp.asarray(leaf).astype(jnp.float32)
    return jnp.copy(leaf)


def narrowed(mean: Any, params: Any) -> Any:
    """Returns averaged parameters in the dtypes of `params`."""
    leaves, structure = jax.tree.flatten(mean)
    pairs = list(zip(leaves, jax.tree.leaves(params), strict=True))
    if all(x.dtype == param.dtype for x, param in pairs):
        return mean
    return structure.unflatten([x.astype(param.dtype) for x, param in pairs])


class AverageState(NamedTuple):
    """The state of `average_weights`.

    Attributes:
        step: the number of updates, an int32 scalar.
        count: how many trees of parameters have been averaged so far, an int32 scalar.
        mean: their mean; zeros if `count` is 0. The mean of 16-bit parameters is in float32. Leaves
          without a mean, such as counters and keys, are the newest ones.

    >>> tr.average_weights(start=2).init({"w": jnp.ones(3)}).mean["w"].tolist()
    [0.0, 0.0, 0.0]
    """

    step: jax.Array
    count: jax.Array
    mean: Any


def average_weights(*, start: int, every: int = 1) -> optax.GradientTransformation:
    """Returns an Optax transformation that averages the parameters of several steps (stochastic
    weight averaging).

        tx = optax.chain(optax.sgd(0.05), tr.average_weights(start=1000, every=100))    # the last of the chain
        params = tr.averaged_weights(state.opt_state)
        stats = tr.batch_statistics(model, params, state.state, batches)

    The average is the mean of the parameters after the updates `start`, `start + every`,
    `start + 2 * every` and so on, counted from 1. The updates themselves pass unchanged. The
    average of 16-bit parameters is computed and returned in float32.

    Args:
        start: the update after which the parameters are averaged for the first time.
        every: the updates from one time to the next, usually those of an epoch, or of a cycle of
          the learning-rate schedule. Default 1.

    Raises:
        ValueError: `start` or `every` is less than 1.

    Source: Izmailov et al. (2018), Averaging Weights Leads to Wider Optima and Better
    Generalization, algorithm 1.

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
        raise ValueError(
            f"average_weights: expected start >= 1 and every >= 1; got {start} and {every}"
        )

    def init(params):
        zeros = lambda x: jnp.zeros_like(widened(x)) if averages(x) else jnp.copy(x)
        return AverageState(jnp.int32(0), jnp.int32(0), jax.tree.map(zeros, params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "average_weights: call update(grads, state, params) with the parameters"
            )
        step = state.step + 1
        take = (step >= start) & ((step - start) % every == 0)
        count = state.count + take.astype(jnp.int32)

        def moved(mean, old, new):
            if not averages(old):
                return jnp.where(take, new, mean)
            share = take.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
            return mean + share.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

        with jax.numpy_dtype_promotion("standard"):  # updates may be float32 for 16-bit parameters
            new = optax.apply_updates(params, updates)
        return updates, AverageState(step, count, jax.tree.map(moved, state.mean, params, new))

    return optax.GradientTransformation(init, update)


def averaged_weights(opt_state: Any) -> Any:
    """Returns the averaged parameters from the state of an optimizer with `average_weights`.

    The average of 16-bit parameters has the dtype float32.

    Raises:
        ValueError: the optimizer does not contain exactly one `average_weights`, or there were
          fewer than `start` updates, so that nothing has been averaged yet.

    >>> tx = tr.average_weights(start=1)
    >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), jnp.zeros(2))
    >>> tr.averaged_weights(state).tolist()
    [1.0, 1.0]
    """
    is_average = lambda node: isinstance(node, AverageState)
    found = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=is_average) if is_average(leaf)]
    if len(found) != 1:
        raise ValueError(
            f"averaged_weights: expected one average_weights in the optimizer; got {len(found)}"
        )
    if not isinstance(found[0].count, jax.core.Tracer) and not int(found[0].count):
        raise ValueError(
            f"averaged_weights: nothing was averaged in {int(found[0].step)} updates; train up to "
            f"`start`"
        )
    return found[0].mean
