"""`train`: supervised training, which creates a training step and an evaluation for `fit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from fnet import transforms as ft
from fnet.layers import Layer
from fnet.training._metrics import Mean, evaluator, mean
from fnet.training._state import TrainState
from fnet.training.loop._fit import fit


def train(model: Layer, data: Callable[[int], Any], loss: Callable[[Any, Any], jax.Array],
          optimizer: optax.GradientTransformation, *, epochs: float | None = None, steps: int | None = None,
          validation: Any = None, metrics: Mapping[str, Callable[[Any, Any], jax.Array]] | None = None,
          inputs: str = "x", targets: str = "y", seed: int = 0, ema: float | None = None, every: int | None = None,
          **options: Any) -> Any:
    """Trains a model to map inputs to targets, with `fit` and all of its options.

    `train` minimizes the mean of loss(model(params, x), y) over the examples. For any other objective, write your own
    step and call `fit`.

    Args:
      model: a layer. `train` initializes the parameters with the layer's method `init` and the random seed `seed`, and
        calls the layer as `model(params, x, state=, key=, train=)`, in evaluations without `key` and `train`.
      data: a function that maps the number of a step to a batch, such as a `Batches` object, the result of
        `from_iterator`, or your own function. A batch is a tuple (x, y), or a dict. If a batch is a dict, `inputs` and
        `targets` are the keys of x and y in the dict.
      loss: a function of the model's outputs and the targets that returns one value for each example, such as
        `optax.softmax_cross_entropy_with_integer_labels`.
      optimizer: an Optax gradient transformation.
      epochs, steps: the length of the training, in epochs or in steps. Pass either `epochs` or `steps`.
      validation: the data set for evaluations, with the same structure as a batch. The results of the evaluations are
        logged as "validation/loss" and, for each of the `metrics`, as "validation/NAME". Default None: no evaluations.
      metrics: a dict {name: function} of metrics. Like `loss`, each function maps the outputs and the targets to one
        value for each example. An example of `metrics` is {"accuracy": lambda logits, y: logits.argmax(-1) == y}.
        Default None: only the loss.
      inputs, targets: the keys of the inputs and the targets, if batches are dicts. Default "x" and "y".
      seed: the seed of the random keys for the initial parameters and for dropout. Default 0.
      ema: the decay of a moving average of the parameters. If `ema` is given, the evaluation uses the moving average
        instead of the parameters. Default None (no average).
      every: the number of steps between two evaluations. Default None: one epoch, or the whole run if the length of an
        epoch is unknown.
      **options: further arguments for `fit`, such as workdir, early_stop, restore_best, progress and config.

    Returns:
      The last `TrainState`, or with `restore_best=True`, the best `TrainState`.

    Raises:
      TypeError: `model` has no `init`, `data` is not a function of the step, or a batch does not contain both inputs
        and targets.
      ValueError: `epochs` and `steps` are both given or both missing, or `epochs` is given but the length of an epoch
        is unknown. A ValueError is also raised if the loss or a metric does not return one value for each example.
      Other errors: `train` also raises the errors of `fit`.

    Example:
      >>> import numpy as np
      >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
      >>> batches = fnet.training.Batches((x, x @ np.array([[2.0], [3.0]], np.float32)), 16)
      >>> state = train(fnet.layers.Dense(1), batches, optax.squared_error, optax.sgd(0.1), epochs=50)
      >>> state.params["kernel"].round(2).tolist()
      [[2.0], [3.0]]
    """
    if not hasattr(model, "init"):
        raise TypeError(f"train: model is a layer with init, got a {type(model).__name__}: write a step for tr.fit")
    if not callable(data):
        raise TypeError(f"train: data is a function of the step, got a {type(data).__name__}: pass "
                        "tr.Batches(data, batch_size)")
    if (epochs is None) == (steps is None):
        raise ValueError(f"train: give epochs or steps, one of the two; got epochs={epochs}, steps={steps}")
    functions = {"loss": loss, **(metrics or {})}
    key = jax.random.key(seed)

    def parts(batch):
        if isinstance(batch, Mapping):
            if not {inputs, targets} <= batch.keys():
                raise TypeError(f"train: expected batches with '{inputs}' and '{targets}', got {sorted(batch)}: pass "
                                "inputs= and targets=, their names")
            return batch[inputs], batch[targets], batch.get("weight")
        if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
            count = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise TypeError(f"train: expected batches (x, y), or dicts with '{inputs}' and '{targets}', got a "
                            f"{type(batch).__name__}{count}")
        return (*batch, None)[:3]

    def measured(outputs, y, weight=None):
        return {name: _per_example(name, function(outputs, y), y, weight) for name, function in functions.items()}

    def step(state, batch):
        x, y, _ = parts(batch)

        def objective(params):
            outputs, new = model(params, x, state=state.state, key=jax.random.fold_in(key, state.step), train=True)
            return loss(outputs, y).mean(), (outputs, new)

        (_, (outputs, new)), grads = ft.value_and_grad(objective, has_aux=True)(state.params)
        return state.apply(optimizer, grads, state=new), measured(outputs, y)

    def measure(state, batch):
        x, y, weight = parts(batch)
        outputs, _ = model(state.averaged, x, state=state.state)
        return measured(outputs, y, weight)

    params, variables = model.init(key, parts(data(0))[0])
    state = TrainState.create(params, optimizer, state=variables, ema=ema)
    if steps is None and (steps := _steps(data, epochs)) is None:
        raise ValueError("train: the number of batches of an epoch is not known: give steps instead of epochs")
    every = every or min(_steps(data, 1) or steps, steps)      # an epoch may be endless
    if validation is not None:
        held_out = evaluator(measure, validation, getattr(data, "batch_size", 256))
        options["evaluate"] = {"validation": held_out, **options.get("evaluate", {})}
    return fit(step, state, data, steps=steps, every=every, **options)


def _steps(data: Callable, epochs: float) -> int | None:
    """Returns the number of batches in `epochs` epochs, or None if the length of an epoch is unknown."""
    try:
        return data.steps(epochs)
    except (AttributeError, TypeError):                    # a function; an iterable without a length
        return None


def _per_example(name: str, values: jax.Array, y: Any, weight: jax.Array | None) -> Mean:
    rows = len(jax.tree.leaves(y)[0])
    if not values.shape or values.shape[0] != rows:
        raise ValueError(f"train: '{name}' must return one value for each of {rows} examples, got shape "
                         f"{values.shape}: leave out its mean")
    return mean(values.reshape(rows, -1).astype("float32").mean(1), weight)
