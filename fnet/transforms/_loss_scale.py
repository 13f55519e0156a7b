"""Dynamic loss scaling for float16, as an Optax transformation and the gradient of a scaled loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class LossScaleState(NamedTuple):
    """The state of `loss_scale`; plain arrays, part of the optimiser's state.

    Attributes:
        scale: float32 [], what the next loss is multiplied by.
        good_steps: int32 [], finite steps since the scale last changed.
        skipped: int32 [], steps that were skipped so far.
        inner: the state of the optimiser inside.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: Any


def loss_scale(inner, policy=None, *, initial: float | None = None, growth: float = 2.0, interval: int = 2000,
               backoff: float = 0.5, minimum: float = 2.0**-14, maximum: float = 2.0**24, axis_name=None):
    """`inner`, for gradients of a loss that was multiplied by a scale which is found while training.

    The gradients are divided by the scale that they were made with. Where all are finite `inner` updates, and after
    `interval` such steps in a row the scale grows; otherwise the update is zero, `inner`'s state stays as it is, the
    skipped step is counted and the scale falls.

        policy = hw.policy()
        tx = ft.loss_scale(optax.adamw(1e-3), policy)            # optax.adamw itself where the policy needs no scale

        def step(params, opt_state, batch):
            value, grads = ft.scaled_value_and_grad(loss)(opt_state, params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    Args:
        inner: an Optax transformation.
        policy: a `hardware.Policy`: without a `loss_scale` of its own, `inner` comes back unchanged. None: scale.
        initial: the first scale; None: the policy's, or 2^15.
        growth, interval: the scale grows by this factor after so many finite steps in a row.
        backoff: the scale falls by this factor at a step that is not finite.
        minimum, maximum: bounds of the scale.
        axis_name: a mapped axis (or several) over which all have to agree that a step is finite.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a `LossScaleState`.

    Source: Micikevicius et al. (2018), Mixed Precision Training, section 3.2; the constants are PyTorch's and Keras'.
    """
    import optax

    if policy is not None and policy.loss_scale is None:
        return inner
    if initial is None:
        initial = 2.0**15 if policy is None else policy.loss_scale
    if not 0 < minimum <= initial <= maximum or growth < 1 or not 0 < backoff < 1 or interval < 1:
        raise ValueError("loss_scale needs 0 < minimum <= initial <= maximum, growth >= 1, 0 < backoff < 1 and interval "
                         f">= 1; got minimum={minimum}, initial={initial}, maximum={maximum}, growth={growth}, "
                         f"backoff={backoff}, interval={interval}")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return LossScaleState(jnp.float32(initial), jnp.int32(0), jnp.int32(0), inner.init(params))

    def update(grads, state, params=None, **extra):
        grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / state.scale).astype(g.dtype), grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        if axis_name is not None:
            finite = lax.pmin(finite.astype(jnp.int32), axis_name) > 0
        sound = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), grads)
        updates, after = inner.update(sound, state.inner, params, **extra)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, jnp.zeros_like(u)), updates)
        after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state.inner)
        good = jnp.where(finite, state.good_steps + 1, 0)
        grown = jnp.where(good >= interval, state.scale * growth, state.scale)
        scale = jnp.clip(jnp.where(finite, grown, state.scale * backoff), minimum, maximum)
        good = jnp.where(good >= interval, 0, good)
        return updates, LossScaleState(scale, good, state.skipped + (~finite).astype(jnp.int32), after)

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale_state(opt_state) -> LossScaleState | None:
    """The `LossScaleState` somewhere in an optimiser's state; None where there is none."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, LossScaleState))
    found = [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
    if len(found) > 1:
        raise ValueError(f"the optimiser's state holds {len(found)} loss scales; one loss has one scale")
    return found[0] if found else None


def scaled_value_and_grad(loss: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable:
    """Like `jax.value_and_grad`, with the gradient of the loss times the scale that `opt_state` holds.

        value, grads = scaled_value_and_grad(loss)(opt_state, params, batch)

    The value is the loss itself, in float32; the gradients are scaled, and `loss_scale`'s update divides them. Without
    a scale in `opt_state` it is `jax.value_and_grad`, so that one step serves every precision.

    Args:
        loss: `loss(*args) -> scalar`, or (scalar, aux) with `has_aux`.
        argnums, has_aux: as in `jax.value_and_grad`; argnums count the loss's own arguments.
    """

    @functools.wraps(loss)
    def scaled(opt_state, *args, **kwargs):
        state = loss_scale_state(opt_state)
        if state is None:
            return jax.value_and_grad(loss, argnums, has_aux=has_aux)(*args, **kwargs)

        def multiplied(*args, **kwargs):
            value, aux = loss(*args, **kwargs) if has_aux else (loss(*args, **kwargs), None)
            value = jnp.asarray(value).astype(jnp.float32)
            return value * state.scale, (value, aux)

        (_, (value, aux)), grads = jax.value_and_grad(multiplied, argnums, has_aux=True)(*args, **kwargs)
        return ((value, aux) if has_aux else value), grads

    return scaled
