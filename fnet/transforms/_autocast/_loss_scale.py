"""Dynamic loss scaling for float16: an Optax transformation, and a function for the gradient of a
scaled loss."""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.hardware import Policy
from fnet.jaxpr import has_modules, mutable, wraps

if TYPE_CHECKING:
    import optax


class LossScaleState(NamedTuple):
    """The state of `loss_scale`, a part of the optimizer's state. Its fields are arrays.

    Attributes:
        scale: float32 [], the factor by which the next loss is multiplied.
        good_steps: int32 [], the number of steps with finite gradients since `scale` last changed.
        skipped: int32 [], the number of steps skipped so far.
        inner: the state of the wrapped optimizer.

    >>> tx = ft.loss_scale(optax.sgd(0.1), hw.policy("Tesla T4"))
    >>> state = tx.init({"w": jnp.ones(3)})
    >>> float(state.scale), int(state.good_steps), int(state.skipped)
    (32768.0, 0, 0)
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    inner: Any


def loss_scale(
    inner: optax.GradientTransformation,
    policy: Policy | None = None,
    *,
    initial: float | None = None,
    growth: float = 2.0,
    interval: int = 2000,
    backoff: float = 0.5,
    minimum: float = 2.0**-14,
    maximum: float = 2.0**24,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for gradients of a loss that is multiplied by a dynamic scale.

        policy = hw.policy()
        tx = ft.loss_scale(optax.adamw(1e-3), policy)            # optax.adamw itself if the policy needs no scale

        def step(params, opt_state, batch):
            value, grads = ft.scaled_value_and_grad(loss)(opt_state, params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

    The gradients are divided by the scale before `inner` sees them. If one of them is not finite,
    the step is skipped and counted: the update is zero, the state of `inner` does not change, and
    the scale shrinks. After `interval` consecutive steps with finite gradients, it grows.

    Put everything that needs unscaled gradients into `inner`, such as clipping and weight decay,
    and a complete `optax.multi_transform` rather than one of its groups. Keep the parameters in
    float32: an unscaled gradient has the dtype of its parameter, and small ones would underflow
    again in float16.

    Args:
        inner: an Optax transformation.
        policy: a `hardware.Policy`, or None (default). A policy whose field `loss_scale` is None
            returns `inner` unchanged; otherwise, `inner` is wrapped.
        initial: the first scale. Default None: the `loss_scale` of the policy, or 2^15 without a
            policy.
        growth: the factor by which the scale is multiplied after `interval` steps with finite
            gradients. Default 2.
        interval: the number of consecutive steps with finite gradients after which the scale grows.
            Default 2,000.
        backoff: the factor by which the scale is multiplied after a step whose gradients are not
            finite. Default 0.5.
        minimum, maximum: bounds of the scale. Defaults 2^-14 and 2^24.
        axis_name: the name of a mapped axis, or several names. A step is skipped if the gradients
            of any device along it are not finite. Default None.

    Returns:
        An `optax.GradientTransformationExtraArgs`, whose state is a `LossScaleState`.

    Raises:
        TypeError: `inner` is not an Optax transformation, or `policy` is not a `hardware.Policy`.
        ValueError: an option such as `initial` or `growth` is out of range.

    Source: Micikevicius et al. (2018), Mixed Precision Training, section 3.2. `growth`, `interval`
    and `backoff` default to those of PyTorch's GradScaler, the initial scale of 2^15 to that of
    Keras's LossScaleOptimizer.

    >>> tx = ft.loss_scale(optax.sgd(0.1), hw.policy("Tesla T4"))
    >>> float(ft.loss_scale_state(tx.init({"w": jnp.ones(3)})).scale)
    32768.0
    """
    import optax

    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"loss_scale: expected an Optax transformation, such as optax.adamw(1e-3); got "
            f"{inner!r}"
        )
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(
            f"loss_scale: expected a hardware.Policy or None; got {policy!r}. "
            "hardware.policy(chip) returns a Policy"
        )
    if policy is not None and policy.loss_scale is None:
        return inner
    if initial is None:
        initial = 2.0**15 if policy is None else policy.loss_scale
    for name, value in {
        "initial": initial,
        "minimum": minimum,
        "maximum": maximum,
        "growth": growth,
        "backoff": backoff,
    }.items():
        if not isinstance(value, (numbers.Real, jax.Array)):
            raise TypeError(
                f"loss_scale: expected a number as {name}, got {value!r}; pass a float, such as "
                f"2.0**15"
            )
    if not (
        0 < minimum <= initial <= maximum < 2.0**128
        and growth >= 1
        and 0 < backoff < 1
        and isinstance(interval, int)
        and interval >= 1
    ):
        raise ValueError(
            "loss_scale needs 0 < minimum <= initial <= maximum < 2^128, growth >= 1, 0 < backoff "
            f"< 1 and an integer interval >= 1; got minimum={minimum}, initial={initial}, "
            f"maximum={maximum}, growth={growth}, backoff={backoff}, interval={interval}"
        )
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
        return updates, LossScaleState(
            scale, good, state.skipped + (~finite).astype(jnp.int32), after
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _unscaled(gradient, scale):
    wide = _wide(gradient.dtype)
    return (gradient.astype(wide) / scale.astype(wide)).astype(gradient.dtype)


def _wide(dtype):
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


def loss_scale_state(opt_state: Any) -> LossScaleState | None:
    """Returns the `LossScaleState` in an optimizer's state, or None if there is none.

    Raises:
        ValueError: the optimizer's state contains several `LossScaleState`s.

    >>> tx = ft.loss_scale(optax.sgd(0.1), hw.policy("Tesla T4"))
    >>> int(ft.loss_scale_state(tx.init({"w": jnp.ones(3)})).skipped)
    0
    """
    found = _states(opt_state)
    if len(found) > 1:
        raise ValueError(
            f"expected one loss scale in the optimizer state; got {len(found)}. Wrap the complete "
            "optimizer in loss_scale once"
        )
    return found[0] if found else None


def _states(tree) -> list[LossScaleState]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, LossScaleState))
    outer = [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
    return outer + [inside for state in outer for inside in _states(state.inner)]


def scaled_value_and_grad(
    loss: Callable, argnums: int | tuple[int, ...] = 0, *, has_aux: bool = False
) -> Callable:
    """Returns a function that computes a loss, and its gradients multiplied by the loss scale.

        value, grads = scaled_value_and_grad(loss)(opt_state, params, batch)

    The scale is the one in `opt_state`, and the update function of `loss_scale` divides by it
    again. The value is the unscaled loss, in float32 (or float64). Without a scale in `opt_state`,
    you get `jax.value_and_grad(loss)(params, batch)`, so the same training step works in every
    precision.

    For a module of flax.nnx or an Equinox model, it is the `value_and_grad` of that library.

    Args:
        loss: `loss(*args) -> scalar`, or (scalar, aux) with `has_aux`.
        argnums, has_aux: as in `jax.value_and_grad`. `argnums` counts the arguments of the loss,
            without `opt_state`. Default 0 and False.

    Returns:
        A function of (opt_state, *args).

    Raises:
        TypeError: the loss is not a floating-point scalar, or with `has_aux`, the result is not a
            pair.
        ValueError: `opt_state` contains several scales.

    >>> tx = ft.loss_scale(optax.sgd(0.1), hw.policy("Tesla T4"))
    >>> value, grads = ft.scaled_value_and_grad(lambda w: jnp.sum(w ** 2))(tx.init(jnp.ones(3)), jnp.ones(3))
    >>> float(value), float(grads[0])
    (3.0, 65536.0)
    """

    @wraps(
        loss, "scaled_value_and_grad", signature=False
    )  # the result has the additional argument opt_state
    def scaled(opt_state, *args, **kwargs):
        state = loss_scale_state(opt_state)
        value_and_grad = _value_and_grad(args, argnums)
        if state is None:
            return value_and_grad(loss, has_aux=has_aux)(*args, **kwargs)

        def multiplied(*args, **kwargs):
            output = loss(*args, **kwargs)
            if has_aux and not (isinstance(output, tuple) and len(output) == 2):
                raise TypeError(
                    "scaled_value_and_grad: with has_aux=True the loss must return a pair (scalar, "
                    "aux)"
                )
            value, aux = output if has_aux else (output, None)
            kind = jnp.result_type(value) if isinstance(value, (jax.Array, float)) else None
            if kind is None or not jnp.issubdtype(kind, jnp.floating) or jnp.shape(value):
                what = f"{kind}{list(jnp.shape(value))}" if kind else f"a {type(value).__name__}"
                raise TypeError(
                    f"scaled_value_and_grad: the loss must be a floating-point scalar; got {what}"
                )
            value = jnp.asarray(value, _wide(kind))
            return value * state.scale.astype(value.dtype), (value, aux)

        (_, (value, aux)), grads = value_and_grad(multiplied, has_aux=True)(*args, **kwargs)
        return ((value, aux) if has_aux else value), grads

    return scaled


def _value_and_grad(args: tuple, argnums: Any) -> Callable:
    """Returns the `value_and_grad` of the library whose modules are differentiated."""
    positions = (argnums,) if isinstance(argnums, int) else argnums
    wanted = [args[i] for i in positions if i < len(args)]
    if mutable.extract(wanted)[2]:
        return functools.partial(sys.modules["flax.nnx"].value_and_grad, argnums=argnums)
    if not has_modules(wanted):
        return functools.partial(jax.value_and_grad, argnums=argnums)
    if argnums != 0 or "equinox" not in sys.modules:
        raise TypeError(
            f"scaled_value_and_grad: argument {argnums} has leaves that are not arrays; only for "
            "an Equinox model as the first argument (argnums=0) are its floating-point arrays known"
        )
    return sys.modules["equinox"].filter_value_and_grad
