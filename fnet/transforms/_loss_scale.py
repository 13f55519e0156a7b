"""Dynamic loss scaling for float16, as an Optax transformation and the gradient of a scaled loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.hardware import Policy
from fnet.jaxpr import wraps


class LossScaleState(NamedTuple):
    """The state of `loss_scale`; plain arrays, part of the optimizer's state.

    Attributes:
        scale: float32 [], what the next loss is multiplied by.
        good_steps: int32 [], finite steps since the scale last changed.
        skipped: int32 [], steps that were skipped so far.
        inner: the state of the optimizer inside.
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
    skipped step is counted and the scale falls. Everything that is to see true gradients (clipping, weight decay, all
    groups of `optax.multi_transform`) belongs inside. Keep parameters in float32: the unscaled gradient has its
    parameter's dtype, and in float16 the small ones are lost again.

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

    Raises:
        TypeError: where `inner` is no Optax transformation or `policy` no `hardware.Policy`.
        ValueError: for constants that make no sense together.

    Source: Micikevicius et al. (2018), Mixed Precision Training, section 3.2; the constants are PyTorch's and Keras'.
    """
    import optax

    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(f"loss_scale wraps an Optax transformation, such as optax.adamw(1e-3); got {inner!r}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"loss_scale: policy is a hardware.Policy or None; got {policy!r}: "
                        "hardware.policy(...) makes one")
    if policy is not None and policy.loss_scale is None:
        return inner
    if initial is None:
        initial = 2.0**15 if policy is None else policy.loss_scale
    if not (0 < minimum <= initial <= maximum < 2.0**128 and growth >= 1 and 0 < backoff < 1
            and isinstance(interval, int) and interval >= 1):
        raise ValueError("loss_scale needs 0 < minimum <= initial <= maximum < 2^128, growth >= 1, 0 < backoff < 1 and "
                         f"a whole interval >= 1; got minimum={minimum}, initial={initial}, maximum={maximum}, "
                         f"growth={growth}, backoff={backoff}, interval={interval}")
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return LossScaleState(jnp.float32(initial), jnp.int32(0), jnp.int32(0), inner.init(params))

    def update(grads, state, params=None, **extra):
        grads = jax.tree.map(lambda g: _unscaled(g, state.scale), grads)
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


def _unscaled(gradient, scale):
    wide = _wide(gradient.dtype)
    return (gradient.astype(wide) / scale.astype(wide)).astype(gradient.dtype)


def _wide(dtype):
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def loss_scale_state(opt_state) -> LossScaleState | None:
    """The `LossScaleState` somewhere in an optimizer's state; None where there is none.

    Raises:
        ValueError: where there are several.
    """
    found = _states(opt_state)
    if len(found) > 1:
        raise ValueError(f"the optimizer's state holds {len(found)} loss scales, and one loss has one scale: wrap the "
                         "whole optimizer in loss_scale, once")
    return found[0] if found else None


def _states(tree) -> list[LossScaleState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaleState))
    outer = [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
    return outer + [inside for state in outer for inside in _states(state.inner)]


def scaled_value_and_grad(loss: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False) -> Callable:
    """Like `jax.value_and_grad`, with the gradient of the loss times the scale that `opt_state` holds.

        value, grads = scaled_value_and_grad(loss)(opt_state, params, batch)

    The value is the loss itself, in float32 (float64 stays); the gradients are scaled, and `loss_scale`'s update
    divides them. Without a scale in `opt_state` it is `jax.value_and_grad`, so that one step serves every precision.

    Args:
        loss: `loss(*args) -> scalar`, or (scalar, aux) with `has_aux`.
        argnums, has_aux: as in `jax.value_and_grad`; argnums count the loss's own arguments.

    Raises:
        TypeError: where the loss is no floating-point scalar, or no pair with `has_aux`.
        ValueError: where `opt_state` holds several scales.
    """

    @wraps(loss, signature=False)    # which lacks opt_state
    def scaled(opt_state, *args, **kwargs):
        state = loss_scale_state(opt_state)
        if state is None:
            return jax.value_and_grad(loss, argnums, has_aux=has_aux)(*args, **kwargs)

        def multiplied(*args, **kwargs):
            output = loss(*args, **kwargs)
            if has_aux and not (isinstance(output, tuple) and len(output) == 2):
                raise TypeError("scaled_value_and_grad: with has_aux the loss has to return a pair (scalar, aux)")
            value, aux = output if has_aux else (output, None)
            kind = jnp.result_type(value) if isinstance(value, (jax.Array, float)) else None
            if kind is None or not jnp.issubdtype(kind, jnp.floating) or jnp.shape(value):
                what = f"{kind}{list(jnp.shape(value))}" if kind else f"a {type(value).__name__}"
                raise TypeError(f"scaled_value_and_grad: the loss has to be a floating-point scalar; it is {what}")
            value = jnp.asarray(value, _wide(kind))
            return value * state.scale.astype(value.dtype), (value, aux)

        (_, (value, aux)), grads = jax.value_and_grad(multiplied, argnums, has_aux=True)(*args, **kwargs)
        return ((value, aux) if has_aux else value), grads

    return scaled
