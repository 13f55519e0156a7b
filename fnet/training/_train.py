"""`train`: supervised training, which creates a training step and an evaluation for `fit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import transforms as ft
from fnet.layers import Layer
from fnet.layers._scope import quote
from fnet.layers._spec import leaves
from fnet.training._nnx_model import NnxModel, is_nnx
from fnet.training._state import TrainState
from fnet.training.data._arrays import as_arrays
from fnet.training.loop._fit import fit
from fnet.training.record._metrics import evaluator, mean

WEIGHT = "weight"


def train(
    model: Layer,
    data: Callable[[int], Any],
    loss: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    validation: Any = None,
    metrics: Mapping[str, Callable[[Any, Any], jax.Array]] | None = None,
    inputs: str = "x",
    targets: str = "y",
    params: Any = None,
    state: Any = None,
    seed: int = 0,
    ema: float | None = None,
    every: int | None = None,
    **options: Any,
) -> Any:
    """Trains a model to map inputs to targets, with `fit` and all of its options.

    The step minimizes the mean of loss(model(params, x), y) over the examples of a batch, or the
    weighted mean, if each example has a weight w:

        sum_i w_i loss(model(params, x)_i, y_i) / sum_i w_i

    The logged metrics and the evaluations are weighted, too. An example of weight 0 has no
    influence on any of them, nor on the gradient, as long as its loss is finite; a batch whose
    weights are all 0 has the gradient 0. Only layers that combine the examples of a batch, such as
    `BatchNorm`, do not know the weights. For any other objective, write your own step and call
    `fit`.

    Args:
      model: a layer, called as `model(params, x, state=, key=, train=)`, in evaluations without
        `key` and `train`; or a flax.nnx module, called as `model(x)` in train or eval mode, which
        begins with its own arrays and has the trained ones at the end.
      data: a function from the number of a step to a batch, such as a `Batches` or the result of
        `from_iterator`. A batch is a tuple (x, y) or (x, y, weight), or a dict in which `inputs`
        and `targets` are the keys of x and y, and "weight" that of the weights, if any. Weights are
        numbers >= 0 or bools, [batch].
      loss: a function of the outputs and the targets with one value for each example, such as
        `optax.softmax_cross_entropy_with_integer_labels`. Several values for an example, such as
        one for each token, count by their mean.
      optimizer: an Optax gradient transformation. One of `tr.optimizer` learns the axes of the
        parameters from the model, except inside of another transformation, such as `optax.chain`;
        pass it `axes=` then.
      epochs, steps: the length of the training. Pass one of them.
      validation: the data set for evaluations, in one of the forms of a batch, also with weights.
        The results are logged as "validation/loss" and "validation/NAME" for each of the `metrics`.
        Default None: no evaluations.
      metrics: functions by name, which map outputs and targets to one value for each example, as
        `loss` does: {"accuracy": lambda logits, y: logits.argmax(-1) == y}. Default None: only the
        loss.
      inputs, targets: the keys of batches that are dicts. Default "x" and "y".
      params, state: the arrays to start from, such as those of `pretrained.load`. `train` copies
        them. A run that continues in its workdir starts from its checkpoint instead. Default None:
        `model.init` with the `seed`. Parameters of a model that has state, such as the statistics
        of `BatchNorm`, need their `state`.
      seed: the seed of the initial parameters and of dropout. Default 0.
      ema: the decay of a moving average of the parameters, with which the evaluation then works.
        Default None: no average.
      every: steps between evaluations. Default None: one epoch, or the whole run if the length of
        an epoch is unknown.
      **options: more arguments of `fit`, such as workdir, early_stop, restore_best, progress and
        config.

    Returns:
      The last `TrainState`, or with `restore_best=True` the best.

    Raises:
      TypeError: `model` has no `init`, `data` is not a function of the step, a batch lacks inputs
        or targets, or it contains an array that `train` does not use.
      ValueError: `epochs` and `steps` are both given or both missing; `epochs` is given for data
        whose epoch has no known length; the loss or a metric returns less than one value for each
        example; weights have another shape, are negative or not finite; or `params` and `state` do
        not match the model.
      Other errors: those of `fit`.

    Example:
      >>> import numpy as np
      >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
      >>> batches = fnet.training.Batches((x, x @ np.array([[2.0], [3.0]], np.float32)), 16)
      >>> state = train(fnet.layers.Dense(1), batches, optax.squared_error, optax.sgd(0.1), epochs=50)
      >>> state.params["kernel"].round(2).tolist()
      [[2.0], [3.0]]
    """
    module = NnxModel(model) if is_nnx(model) else None
    if module is not None:
        if params is not None or state is not None:
            raise TypeError(
                "train: a flax.nnx module holds its arrays: write them into it with "
                "nn.update_nnx(module, params, state) in place of params= and state="
            )
        model = module
    if not hasattr(model, "init"):
        raise TypeError(
            f"train: model is a layer with init, got a {type(model).__name__}: write a step for "
            f"tr.fit"
        )
    if not callable(data):
        raise TypeError(
            f"train: data is a function of the step, got a {type(data).__name__}: pass "
            "tr.Batches(data, batch_size)"
        )
    data = _Checked(data, inputs, targets)
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"train: give epochs or steps, one of the two; got epochs={epochs}, steps={steps}"
        )
    functions = {"loss": loss, **(metrics or {})}
    key = jax.random.key(seed)

    def measured(outputs, y, weight):
        return {
            name: mean(_per_example(name, function(outputs, y), y).astype(jnp.float32), weight)
            for name, function in functions.items()
        }

    def step(state, batch):
        x, y, weight = _parts(batch, inputs, targets)

        def objective(params):
            outputs, new = model(
                params, x, state=state.state, key=jax.random.fold_in(key, state.step), train=True
            )
            return _weighted_mean(_per_example("loss", loss(outputs, y), y), weight), (outputs, new)

        (_, (outputs, new)), grads = ft.value_and_grad(objective, has_aux=True)(state.params)
        return state.apply(optimizer, grads, state=new), measured(outputs, y, weight)

    def measure(state, batch):
        x, y, *weights = batch
        outputs, _ = model(state.averaged, x, state=state.state)
        return measured(
            outputs, y, functools.reduce(jnp.multiply, [w.astype(jnp.float32) for w in weights])
        )

    x, *_ = _parts(data(0), inputs, targets)
    if getattr(optimizer, "with_axes", None) is not None and module is None:
        optimizer = optimizer.with_axes(model.spec(x))
    params, variables = _initial(model, key, x, params, state)
    start = TrainState.create(params, optimizer, state=variables, ema=ema)
    if steps is None and (steps := _steps(data, epochs)) is None:
        raise ValueError(
            "train: the number of batches of an epoch is not known: give steps instead of epochs"
        )
    every = every or min(_steps(data, 1) or steps, steps)  # an epoch may be endless
    if validation is not None:
        *validation, weight = _parts(as_arrays(validation, "train: validation")[0], inputs, targets)
        _check_weight("validation", weight)
        validation = tuple(validation) if weight is None else (*validation, weight)
        held_out = evaluator(measure, validation, getattr(data, "batch_size", 256))
        options["evaluate"] = {"validation": held_out, **options.get("evaluate", {})}
    last = fit(step, start, data, steps=steps, every=every, **options)
    if module is not None:
        module.update(last.params, last.state)
    return last


def _initial(model, key, x, params, state) -> tuple[Any, Any]:
    """Returns the parameters and the state with which a run begins."""
    if params is None:
        params, fresh = model.init(key, x)
        state = fresh if state is None else state
    elif state is None:
        state = {}
        if names := [quote(path) for path, _ in leaves(model.spec(x)[1])]:
            raise ValueError(
                f"train: got params without state, but the model has the state "
                f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: pass the state "
                "that belongs to the params, such as the last result of pretrained.load, or a new "
                "one, model.init(key, x)[1]"
            )
    model.check(params, x, state=state)
    return params, state


class _Checked:
    """The batches of `train`, whose weights are checked before they are used. It has the attributes
    of the data."""

    def __init__(self, data, inputs, targets):
        self._data, self._names = data, (inputs, targets)

    def __call__(self, step):
        batch = self._data(step)
        _check_weight(f"batch {step}", _parts(batch, *self._names)[2])
        return batch

    def __getattr__(self, name):
        return getattr(self._data, name)


def _steps(data: Callable, epochs: float) -> int | None:
    """Returns the number of batches in `epochs` epochs, or None if the length of an epoch is
    unknown."""
    try:
        return data.steps(epochs)
    except (AttributeError, TypeError):  # a function; an iterable without a length
        return None


def _parts(batch: Any, inputs: str, targets: str) -> tuple[Any, Any, Any]:
    """Returns the inputs, the targets, and the weights or None."""
    if isinstance(batch, Mapping):
        if not {inputs, targets} <= batch.keys():
            raise TypeError(
                f"train: expected batches with '{inputs}' and '{targets}', got {sorted(batch)}: "
                "pass inputs= and targets=, their names"
            )
        if unused := sorted(batch.keys() - {inputs, targets, WEIGHT}):
            raise TypeError(
                f"train: the batches have {unused}, which train does not use: leave them out, or "
                f"write a step for tr.fit. train uses '{inputs}', '{targets}' and '{WEIGHT}'"
            )
        return batch[inputs], batch[targets], batch.get(WEIGHT)
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        count = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise TypeError(
            f"train: expected batches (x, y) or (x, y, weight), or dicts with '{inputs}' and "
            f"'{targets}', got a {type(batch).__name__}{count}"
        )
    x, y, weight = (*batch, None)[:3]
    return x, y, weight


def _check_weight(what: str, weight: Any) -> None:
    if weight is None or np.size(weight) == 0:
        return
    weight = np.asarray(weight).astype(np.float64)
    if not (np.isfinite(weight).all() and weight.min() >= 0):
        wrong = weight[~(weight >= 0) | ~np.isfinite(weight)].flat[0]
        raise ValueError(
            f"train: {what} has an example of weight {wrong:g}: expected numbers from 0 up"
        )


def _per_example(name: str, values: jax.Array, y: Any) -> jax.Array:
    """Returns one floating-point value for each example [batch], at least in float32."""
    rows = len(jax.tree.leaves(y)[0])
    if not values.shape or values.shape[0] != rows:
        raise ValueError(
            f"train: '{name}' must return one value for each of {rows} examples, got shape "
            f"{values.shape}: leave out its mean"
        )
    dtype = values.dtype if values.dtype in (jnp.float32, jnp.float64) else jnp.float32
    return values.astype(dtype).reshape(rows, -1).mean(1)


def _weighted_mean(values: jax.Array, weight: Any) -> jax.Array:
    if weight is None:
        return values.mean()
    if jnp.shape(weight) != values.shape:
        raise ValueError(
            f"train: expected a weight for each of {len(values)} examples, got shape "
            f"{jnp.shape(weight)}"
        )
    weight = jnp.asarray(weight).astype(values.dtype)
    total = weight.sum()
    return jnp.where(weight != 0, values * weight, 0.0).sum() / jnp.where(total == 0, 1.0, total)
