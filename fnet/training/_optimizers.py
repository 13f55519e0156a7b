"""Optax's optimizers and learning-rate schedules, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[Any], Any]

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "nesterov": partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "nadamw": optax.nadamw,
    "adagrad": optax.adagrad,
    "rmsprop": optax.rmsprop,
    "lion": optax.lion,
    "lamb": optax.lamb,
    "lars": optax.lars,
    "adabelief": optax.adabelief,
    "amsgrad": optax.amsgrad,
    "muon": optax.contrib.muon,
    "radam": optax.radam,
    "yogi": optax.yogi,
}
SCHEDULES = ("constant", "cosine", "linear", "step", "one_cycle")


def _usual_promotion(function: Schedule) -> Schedule:
    """Returns a schedule that evaluates `function` with standard dtype promotion. Optax's schedules divide integers by
    floats, which is an error under strict dtype promotion."""

    def rate(count):
        with jax.numpy_dtype_promotion("standard"):
            return function(count)

    return rate


def schedule(
    name: str, peak: float, steps: int, *, warmup: float = 0.0, final: float = 0.0
) -> Schedule:
    """Returns the learning-rate schedule with a given name, for a run with a given number of steps.

    At the beginning of the run, the learning rate rises linearly from 0 to `peak` (warm-up). The length of the warm-up
    is the fraction `warmup` of the run. After the warm-up, the learning rate of each schedule is:

        constant    peak
        cosine      peak (final + (1 - final) (1 + cos(pi s)) / 2)
        linear      peak (1 + (final - 1) s)
        step        peak; peak / 10 from t = 1/2; peak / 100 from t = 3/4
        one_cycle   a cosine rise over the first 30 % and a cosine fall (Smith & Topin 2018)

    In the formulas of the schedules, t is step / steps, and s rises linearly from 0 at the end of the warm-up to 1 at
    the end of the run.

    Args:
      name: one of `SCHEDULES`.
      peak: the largest learning rate.
      steps: the number of updates in the whole run.
      warmup: the length of the warm-up, as a fraction of the run in [0, 1). one_cycle ignores `warmup`. Default 0.
      final: the learning rate at the end of the run, as a fraction of `peak`. Only the schedules cosine and linear use
        `final`. Default 0.

    Returns:
      A function that maps the number of a step to the learning rate. Pass this schedule to `optimizer` or to any Optax
      optimizer.

    Raises:
      ValueError: the name is unknown, `warmup` is outside [0, 1), or `steps` is less than 1.

    Example:
      >>> rate = schedule("linear", 1.0, 10, warmup=0.2)
      >>> [round(float(rate(i)), 2) for i in (0, 1, 2, 6, 10)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup={warmup}: expected the fraction of the run in which the rate rises, in [0, 1)")
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs the run's length, at least 1")
    rise = round(warmup * steps)
    rest = max(steps - rise, 1)
    match name:
        case "constant":
            body = optax.constant_schedule(peak)
        case "cosine":
            body = optax.cosine_decay_schedule(peak, rest, alpha=final)
        case "linear":
            body = optax.linear_schedule(peak, final * peak, rest)
        case "step":
            drops = {max(round(f * steps) - rise, 1): 0.1 for f in (0.5, 0.75)}
            body = optax.piecewise_constant_schedule(peak, drops)
        case "one_cycle":
            return _usual_promotion(optax.cosine_onecycle_schedule(steps, peak))
        case _:
            raise ValueError(f"no schedule is called '{name}'; there are {', '.join(SCHEDULES)}")
    if rise:
        body = optax.join_schedules([optax.linear_schedule(0.0, peak, rise), body], [rise])
    return _usual_promotion(body)


def decays(params: Any) -> Any:
    """Returns a tree of bools that states to which leaves of `params` weight decay applies.

    The result is False for a leaf that is named `bias` or `scale`, or that has fewer than two axes. For all other
    leaves of `params`, the result is True. The number of axes alone does not identify biases and normalization scales,
    because these parameters have two axes if the parameters of several layers are stacked.

    >>> tr.decays({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
    {'bias': False, 'kernel': True}
    """

    def wanted(path, leaf) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        return name not in ("bias", "scale") and jnp.ndim(leaf) > 1

    return jax.tree_util.tree_map_with_path(wanted, params)


def optimizer(
    name: str,
    learning_rate: float | Schedule,
    *,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    clip: float | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """Returns the Optax optimizer with a given name, with optional weight decay and gradient clipping.

    Args:
      name: one of `OPTIMIZERS`. "momentum" and "nesterov" are SGD with momentum 0.9.
      learning_rate: a number, or a schedule (a function of the number of the step).
      weight_decay: the coefficient of the weight decay. adamw, nadamw, lion, lamb and muon decouple the decay from the
        gradient (Loshchilov & Hutter 2019). Optimizers that do not decouple the decay, such as sgd, add `weight_decay`
        times the parameters to the gradient, which is L2 regularization. Default 0.
      decay_all: whether weight decay also applies to biases and norm scales (see `decays`). Default False.
      clip: the largest global norm of the gradient. If the global norm of the gradient is larger than `clip`, the
        gradient is scaled down to the norm `clip`. Default None: no clipping.
      **options: keyword arguments of the Optax optimizer, such as `b1=`, `momentum=` or `eps=`.

    Raises:
      ValueError: the name is unknown, or `options` contains an argument that the optimizer does not have. A ValueError
        is also raised for "adam" with a `weight_decay` other than 0.

    Example:
      >>> tx = optimizer("adamw", schedule("cosine", 1e-3, 1000, warmup=0.05), weight_decay=0.01)
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called '{name}'; there are {', '.join(OPTIMIZERS)}")
    if name == "adam" and weight_decay:
        raise ValueError("adam has no weight decay: use adamw, or weight_decay=0")
    make = OPTIMIZERS[name]
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known or option == "learning_rate":
            raise ValueError(f"{name} has no option '{option}'; it has {', '.join(known)}")
    mask = None if decay_all else decays
    chain = [optax.clip_by_global_norm(clip)] if clip is not None else []
    if "weight_decay" in known:
        options |= {"weight_decay": weight_decay}
        options |= {"weight_decay_mask" if "weight_decay_mask" in known else "mask": mask or True}
    elif weight_decay:
        chain.append(optax.add_decayed_weights(weight_decay, mask))
    return optax.chain(*chain, make(learning_rate, **options))


class LookaheadState(NamedTuple):
    """The state of `lookahead`.

    Attributes:
        slow: the slow weights.
        inner: the state of Optax's lookahead.

    >>> tr.lookahead(optax.sgd(0.1)).init({"w": jnp.ones(2)}).slow["w"].tolist()
    [1.0, 1.0]
    """

    slow: Any
    inner: Any


def lookahead(optimizer: optax.GradientTransformation, *, period: int = 5,
              rate: float = 0.5) -> optax.GradientTransformation:
    """Returns a Lookahead optimizer that stores the slow weights in its state.

    The optimizer equals `optax.lookahead`, except that `optax.lookahead` stores the slow weights together with the
    parameters. Let w be the parameters. Every `period` steps, the slow weights move toward the parameters w, and w is
    set to the slow weights:

        slow = slow + rate (w - slow),        w = slow

    Args:
        optimizer: the Optax optimizer that updates the parameters w in each step.
        period: the number of steps between two updates of the slow weights. Default 5.
        rate: the step size of the slow weights. Default 0.5.

    Source: Zhang et al. (2019), Lookahead Optimizer: k Steps Forward, 1 Step Back.

    >>> tx, w = tr.lookahead(optax.sgd(1.0), period=2), jnp.float32(0)
    >>> state = tx.init(w)
    >>> for _ in range(2):
    ...     updates, state = tx.update(jnp.float32(-1), state, w)
    ...     w = w + updates
    >>> float(w), float(state.slow)                     # 2 steps of 1, of which half is kept
    (1.0, 1.0)
    """
    inner = optax.lookahead(optimizer, period, rate)

    def init(params):
        slow = jax.tree.map(jnp.copy, params)
        return LookaheadState(slow, inner.init(optax.LookaheadParams(params, slow)))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("lookahead: call update(grads, state, params)")
        with jax.numpy_dtype_promotion("standard"):        # Optax multiplies a bool by floats
            updates, new = inner.update(updates, state.inner, optax.LookaheadParams(params, state.slow))
        return updates.fast, LookaheadState(optax.apply_updates(state.slow, updates.slow), new)

    return optax.GradientTransformation(init, update)
