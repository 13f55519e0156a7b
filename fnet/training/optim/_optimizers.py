"""Optax's optimizers and learning-rate schedules, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from fnet.training._axes import Axes
from fnet.training._by_layer import each_layer
from fnet.training._decays import decays
from fnet.training._meaning import meaning
from fnet.training.optim._averaging import widened

Schedule = Callable[[Any], Any]

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "nesterov": partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": optax.adamw,
    "nadamw": optax.nadamw,
    "adafactor": optax.adafactor,
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
    """Returns a schedule that evaluates `function` with standard dtype promotion. Optax's schedules
    divide integers by floats, which is an error under strict dtype promotion."""

    def rate(count):
        with jax.numpy_dtype_promotion("standard"):
            return function(count)

    return rate


def schedule(
    name: str, peak: float, steps: int, *, warmup: float = 0.0, final: float = 0.0
) -> Schedule:
    """Returns a learning-rate schedule by its name, for a run of a known number of steps.

    With t = step / steps, and s rising linearly from 0 at the end of the warm-up to 1 at the end of
    the run, the learning rate is:

        constant    peak
        cosine      peak (final + (1 - final) (1 + cos(pi s)) / 2)
        linear      peak (1 + (final - 1) s)
        step        peak; peak / 10 from t = 1/2; peak / 100 from t = 3/4
        one_cycle   a cosine rise over the first 30 % and a cosine fall (Smith & Topin 2018)

    During the warm-up, it rises linearly from 0 to `peak`.

    Args:
      name: one of `SCHEDULES`.
      peak: the largest learning rate.
      steps: the number of updates in the whole run.
      warmup: the length of the warm-up, as a fraction of the run in [0, 1). one_cycle ignores it.
        Default 0.
      final: the learning rate at the end, as a fraction of `peak`, for cosine and linear only.
        Default 0.

    Returns:
      A function of the number of a step, for `optimizer` or any Optax optimizer.

    Raises:
      ValueError: the name is unknown, `warmup` is outside [0, 1), or `steps` is less than 1.

    Example:
      >>> rate = schedule("linear", 1.0, 10, warmup=0.2)
      >>> [round(float(rate(i)), 2) for i in (0, 1, 2, 6, 10)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if not 0 <= warmup < 1:
        raise ValueError(
            f"warmup={warmup}: expected the fraction of the run in which the rate rises, in [0, 1)"
        )
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


class NamedOptimizer(optax.GradientTransformationExtraArgs):
    """The transformation that `optimizer` returns.

    Attributes:
        with_axes: a function that returns the same optimizer with another argument `axes`, or None
            if `axes` was given.

    >>> tr.optimizer("muon", 0.02).with_axes(nn.Dense(3).spec(jnp.ones((1, 2)))).with_axes is None
    True
    """

    with_axes: Callable[[Any], NamedOptimizer] | None


def optimizer(
    name: str,
    learning_rate: float | Schedule,
    *,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    clip: float | None = None,
    adaptive_clip: float | None = None,
    axes: Any = None,
    **options: Any,
) -> NamedOptimizer:
    """Returns an Optax optimizer by its name, with optional weight decay and gradient clipping.

    Muon, LAMB, LARS, Adafactor and adaptive clipping treat each layer by itself. A stack of layers
    is one array, so they must know which of its axes are layers, inputs and outputs: pass
    `axes=model.spec(x)` for a layer of fnet (`train` does it for you), or name the axes of another
    library's parameters:

        tr.optimizer("muon", 0.02, axes={"layers/.*/kernel": "layers in out", ".*/bias": "layers out",
                                         "embed/.*": "vocab out", "head/kernel": "in logits"})

    Muon orthogonalizes the matrices between hidden features, among them the kernels of convolutions
    as [height * width * in, out]. Adam updates all other parameters: biases, scales, embeddings,
    and kernels whose outputs are logits.

    Args:
      name: one of `OPTIMIZERS`. "momentum" and "nesterov" are SGD with momentum 0.9.
      learning_rate: a number, or a schedule (a function of the number of the step).
      weight_decay: the coefficient of the weight decay. adamw, nadamw, lion, lamb and muon decouple
        it from the gradient (Loshchilov & Hutter 2019), muon for the orthogonalized matrices only;
        so does adafactor, without the factor of the learning rate. The others, such as sgd, add
        `weight_decay` times the parameters to the gradient, which is L2 regularization. Default 0.
      decay_all: decay biases and norm scales, too (see `decays`). Default False.
      clip: the largest global norm of the gradient, to which a larger one is scaled down. Default
        None.
      adaptive_clip: the largest ratio of the norm of the gradient to the norm of the parameters,
        for each output of a matrix, and for each bias or scale as a whole (Brock et al. 2021).
        Default None.
      axes: what the axes of the parameters are, as in `by_layer`. Default None.
      **options: keyword arguments of the Optax optimizer, such as `b1=`, `momentum=` or `eps=`.

    Raises:
      ValueError: the name is unknown, the optimizer does not have one of the `options`, or "adam"
        gets a `weight_decay`, which it does not have. `init` of the result raises it if the
        optimizer must know the axes of a parameter, or whether it is a bias, and does not.

    Example:
      >>> tx = optimizer("adamw", schedule("cosine", 1e-3, 1000, warmup=0.05), weight_decay=0.01)
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"no optimizer is called '{name}'; there are {', '.join(OPTIMIZERS)}")
    if name == "adam" and weight_decay:
        raise ValueError("adam has no weight decay: use adamw, or weight_decay=0")
    known = inspect.signature(OPTIMIZERS[name]).parameters
    for option in options:
        if option not in known or option == "learning_rate":
            raise ValueError(f"{name} has no option '{option}'; it has {', '.join(known)}")
    if name == "muon" and "weight_decay_mask" in options:
        raise ValueError(
            "muon: expected no weight_decay_mask, because weight decay applies to the "
            "orthogonalized matrices; choose them with axes="
        )
    rebuilt = partial(
        optimizer,
        name,
        learning_rate,
        weight_decay=weight_decay,
        decay_all=decay_all,
        clip=clip,
        adaptive_clip=adaptive_clip,
        **options,
    )

    masked = not decay_all and not (isinstance(weight_decay, int | float) and weight_decay == 0)
    mask = (lambda params: decays(params, axes)) if masked else None
    chain = [optax.clip_by_global_norm(clip)] if clip is not None else []
    if adaptive_clip is not None:
        chain.append(_adaptive_clip(adaptive_clip, Axes(axes, "adaptive_clip")))
    decay = {"weight_decay", "weight_decay_rate"} & known.keys()
    for option in decay:
        options |= {option: weight_decay}
        options.setdefault("mask" if "mask" in known else "weight_decay_mask", mask or True)
    if weight_decay and not decay:
        chain.append(optax.add_decayed_weights(weight_decay, mask))
    make = _BY_LAYER[name](Axes(axes, name)) if name in _BY_LAYER else OPTIMIZERS[name]
    made = optax.chain(*chain, make(learning_rate, **options), meaning(name, axes, masked))
    result = NamedOptimizer(made.init, made.update)
    result.with_axes = (lambda axes: rebuilt(axes=axes)) if axes is None else None
    return result


def _adaptive_clip(clip: float, axes: Axes) -> optax.GradientTransformation:
    def build(layouts):
        # Not the default axis of Optax, which depends on the number of axes and on axes of size 1.
        rows = jax.tree.map(lambda layout: "vector" if layout.rank == 1 else "matrix", layouts)
        return optax.partition(
            {
                "matrix": optax.adaptive_grad_clip(clip, axis=0),
                "vector": optax.adaptive_grad_clip(clip, axis=(0,)),
            },
            rows,
        )

    return each_layer(build, axes)


def _muon(axes: Axes) -> Callable[..., optax.GradientTransformation]:
    def make(learning_rate, *, muon_weight_dimension_numbers=None, weight_decay_mask, **options):
        if muon_weight_dimension_numbers is not None:
            if options.get("adaptive"):
                raise ValueError(
                    "muon: adaptive=True needs axes= instead of muon_weight_dimension_numbers=, "
                    "because Optax would multiply all matrices of a stack by one number"
                )
            return optax.contrib.muon(
                learning_rate,
                muon_weight_dimension_numbers=muon_weight_dimension_numbers,
                **options,
            )

        def build(layouts):
            numbers = jax.tree.map(lambda layout: _MATRIX if layout.matrix else None, layouts)
            return optax.contrib.muon(
                learning_rate, muon_weight_dimension_numbers=numbers, **options
            )

        return each_layer(build, axes)

    return make


def _lamb(axes: Axes) -> Callable[..., optax.GradientTransformation]:
    def make(learning_rate, b1=0.9, b2=0.999, eps=1e-6, eps_root=0.0, weight_decay=0.0, mask=None):
        return optax.chain(
            optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root),
            optax.add_decayed_weights(weight_decay, mask),
            each_layer(lambda _: optax.scale_by_trust_ratio(), axes, matrices=False),
            optax.scale_by_learning_rate(learning_rate),
        )

    return make


def _lars(axes: Axes) -> Callable[..., optax.GradientTransformation]:
    def make(
        learning_rate,
        weight_decay=0.0,
        weight_decay_mask=True,
        trust_coefficient=0.001,
        eps=0.0,
        trust_ratio_mask=True,
        momentum=0.9,
        nesterov=False,
    ):
        ratio = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
        return optax.chain(
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.masked(each_layer(lambda _: ratio, axes, matrices=False), trust_ratio_mask),
            optax.scale_by_learning_rate(learning_rate),
            optax.trace(decay=momentum, nesterov=nesterov),
        )

    return make


def _adafactor(axes: Axes) -> Callable[..., optax.GradientTransformation]:
    def make(learning_rate, *, weight_decay_rate, weight_decay_mask, **options):
        inner = each_layer(lambda _: optax.adafactor(learning_rate, **options), axes)
        if not isinstance(weight_decay_rate, jax.Array) and weight_decay_rate == 0:
            return inner
        return optax.chain(inner, optax.add_decayed_weights(-weight_decay_rate, weight_decay_mask))

    return make


_MATRIX = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)
_BY_LAYER = {"muon": _muon, "lamb": _lamb, "lars": _lars, "adafactor": _adafactor}


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


def lookahead(
    optimizer: optax.GradientTransformation, *, period: int = 5, rate: float = 0.5
) -> optax.GradientTransformation:
    """Returns a Lookahead optimizer that stores the slow weights in its state.

        slow = slow + rate (w - slow),        w = slow          (every period steps)

    Here w are the parameters. Unlike `optax.lookahead`, it leaves them in the structure of the
    model, and stores the slow weights of 16-bit parameters in float32.

    Args:
        optimizer: the Optax optimizer that updates w in each step.
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
        return LookaheadState(
            jax.tree.map(widened, params), inner.init(optax.LookaheadParams(params, None))
        )

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("lookahead: call update(grads, state, params)")
        with jax.numpy_dtype_promotion("standard"):  # Optax multiplies a bool by floats
            updates, new = inner.update(
                updates, state.inner, optax.LookaheadParams(params, state.slow)
            )
        return updates.fast, LookaheadState(optax.apply_updates(state.slow, updates.slow), new)

    return optax.GradientTransformation(init, update)
