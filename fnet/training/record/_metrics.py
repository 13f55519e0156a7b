"""Metrics: small pytrees that are summed on the device and fetched when they are logged."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.jaxpr import pack
from fnet.training._carried import unchanged
from fnet.training.data._arrays import as_arrays, rows_of
from fnet.training.loop._signals import poll


@struct.dataclass
class Mean:
    """A weighted mean, `total / count`: two float32 scalars (float64 for values in float64).

    `total` is the weighted sum of the values, and `count` the sum of the weights. `+` combines the
    means of two sets of examples into that of both. It adds in the dtype of its operands: in
    float32 on a device, as `fit` does between two logs, and in float64 for means that were fetched
    as NumPy float64, as `evaluator` does for a data set of any size.

    >>> average = tr.mean(jnp.array([1.0, 2.0])) + tr.mean(jnp.array([6.0]))
    >>> float(average.total / average.count)
    3.0
    """

    total: jax.Array
    count: jax.Array

    def __add__(self, other: Mean) -> Mean:
        return type(self)(self.total + other.total, self.count + other.count)

    def result(self) -> Any:
        """Returns the mean, or NaN if `count` is 0."""
        if isinstance(self.total, jax.Array):
            return self.total / self.count
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.divide(self.total, self.count)


@struct.dataclass
class MemberMean(Mean):
    """The mean of a metric for each member of a population: `total / count`, arrays [members].

    A `MemberMean` that a step returns as `name` is logged as name/0, name/1, and so on, with the
    mean, minimum and maximum over the members as name/mean, name/min and name/max. A diverged
    member is logged as NaN and left out of these three.

    >>> means = tr.MemberMean(jnp.array([2.0, 6.0]), jnp.array([2.0, 2.0]))
    >>> (means + means).result().tolist()
    [1.0, 3.0]
    """

    def values(self, name: str) -> dict[str, float]:
        """Returns a dict {logged name: value} for the metric `name`."""
        values = np.asarray(self.result(), np.float64)
        known = values[~np.isnan(values)]
        known = known if len(known) else np.full(1, np.nan)
        return {
            f"{name}/mean": float(known.mean()),
            f"{name}/min": float(known.min()),
            f"{name}/max": float(known.max()),
            **{f"{name}/{i}": float(x) for i, x in enumerate(values)},
        }


def logged_names(metrics: Mapping[str, Any]) -> list[str]:
    """Returns the names under which metrics are logged."""
    return [
        each
        for name, metric in metrics.items()
        for each in (
            [f"{name}/{kind}" for kind in ("mean", "min", "max", *range(metric.total.shape[0]))]
            if isinstance(metric, MemberMean)
            else [name]
        )
    ]


@struct.dataclass
class Total:
    """An array of any shape, `total`, that is summed over all batches, such as a confusion matrix.

    `+` adds two of them. Bools, 8-bit and 16-bit numbers are added in 32 bits.

    >>> both = tr.confusion(jnp.array([0]), jnp.array([1]), 2) + tr.confusion(jnp.array([1]), jnp.array([1]), 2)
    >>> both.total.tolist()
    [[0, 1], [0, 1]]
    """

    total: jax.Array

    def __add__(self, other: Total) -> Total:
        return Total(_at_least_32_bits(self.total) + _at_least_32_bits(other.total))

    def result(self) -> Any:
        return self.total


def mean(values: jax.Array, weight: jax.Array | None = None) -> Mean:
    """Returns the mean of `values` over examples, as a `Mean`.

        sum_i weight_i values_i / sum_i weight_i

    The sum of the `Mean`s of several batches is the exact mean over all of their examples.

    Args:
      values: numbers or bools, of any shape.
      weight: weights with the shape of `values`. Values of weight 0, such as padding, have no
        effect, even if they are NaN. Default None: every weight is 1.

    Raises:
      ValueError: the shapes differ.

    Example:
      >>> halves = mean(jnp.array([1.0, 2.0])) + mean(jnp.array([6.0]))
      >>> float(halves.result())
      3.0
    """
    values = jnp.asarray(values)
    values = values if values.dtype == jnp.float64 else values.astype(jnp.float32)
    if weight is None:
        return Mean(values.sum(), jnp.asarray(values.size, values.dtype))
    weight = jnp.asarray(weight).astype(values.dtype)
    if weight.shape != values.shape:
        raise ValueError(
            f"mean needs one weight per value: values {values.shape}, weight {weight.shape}"
        )
    return Mean(jnp.where(weight != 0, values * weight, 0.0).sum(), weight.sum())


def confusion(
    label: jax.Array, prediction: jax.Array, classes: int, weight: jax.Array | None = None
) -> Total:
    """Counts how often each pair (label, prediction) occurs: a `Total` [classes, classes].

    Rows are labels, columns predictions. A pair with a class outside [0, classes) is not counted,
    such as the label -1 or 255 of an example without a class.

    Args:
      label: the true classes, integers or bools of any shape, usually [batch].
      prediction: the predicted classes, integers or bools with the shape of `label`.
      classes: the number of classes.
      weight: the weight of each example, numbers or bools with the shape of `label`. The counts are
        int32 for integers and bools, float32 otherwise. Default None: every weight is 1.

    Raises:
      TypeError: `label` or `prediction` is not an array of integers or bools.
      ValueError: the shapes differ, or `classes` is less than 1.

    >>> tr.confusion(jnp.array([0, 1, 1, -1]), jnp.array([0, 1, 0, 0]), classes=2).total.tolist()
    [[1, 0], [1, 1]]
    """
    if classes < 1:
        raise ValueError(f"confusion(classes={classes}): expected at least one class")
    label, prediction = _classes("label", label), _classes("prediction", prediction)
    weight = jnp.ones(label.shape, jnp.int32) if weight is None else jnp.asarray(weight)
    if not label.shape == prediction.shape == weight.shape:
        raise ValueError(
            f"confusion: expected labels, predictions and weights of one shape, got {label.shape}, "
            f"{prediction.shape} and {weight.shape}"
        )
    counted = (label >= 0) & (label < classes) & (prediction >= 0) & (prediction < classes)
    whole = jnp.issubdtype(weight.dtype, jnp.integer) or weight.dtype == jnp.bool_
    weight = weight.astype(jnp.int32 if whole else jnp.float32)
    weight = jnp.where(counted, weight, jnp.zeros_like(weight))  # a weight of padding may be NaN
    rows, columns = jnp.where(counted, label, 0), jnp.where(counted, prediction, 0)
    return Total(jnp.zeros((classes, classes), weight.dtype).at[rows, columns].add(weight))


def _classes(name: str, values: Any) -> jax.Array:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) and values.dtype != jnp.bool_:
        raise TypeError(
            f"confusion: expected {name} to be integers, the indices of classes, got "
            f"{values.dtype}: for example logits.argmax(-1)"
        )
    return (
        values if values.dtype in (jnp.int64, jnp.uint64, jnp.uint32) else values.astype(jnp.int32)
    )


def _at_least_32_bits(values: Any) -> Any:
    if not hasattr(values, "dtype") or values.dtype.itemsize >= 4:
        return values
    whole = jnp.issubdtype(values.dtype, jnp.integer) or values.dtype == jnp.bool_
    return values.astype(jnp.int32 if whole else jnp.float32)


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Converts plain scalars in a dict of metrics to `Mean`s, which are then averaged over the
    steps. `Mean`s and `Total`s are not changed. A scalar in place of a dict is the loss."""
    if not isinstance(metrics, Mapping) and real(metrics) and jnp.ndim(metrics) == 0:
        metrics = {"loss": metrics}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"step(state, batch) must return (state, metrics) with a dict of metrics; got a "
            f"{type(metrics).__name__} in its place"
        )
    out = {}
    for name, value in metrics.items():
        if not isinstance(value, Mean | Total):
            if not real(value):
                raise TypeError(
                    f"step(state, batch): the metric '{name}' is {described(value)}: return a real "
                    "number, or training.mean(values, weight) for a mean over examples"
                )
            if jnp.ndim(value) != 0:
                raise ValueError(
                    f"metric '{name}' has shape {jnp.shape(value)}: return a scalar, or "
                    "training.mean(values, weight) for a mean over examples"
                )
            value = mean(value)
        out[name] = jax.tree.map(_at_least_32_bits, value)
    return out


def real(value: Any) -> bool:
    """Whether a value is a real number or a bool, or an array of real numbers or bools."""
    try:
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
    except ValueError:  # a list of rows of different lengths
        return False
    return any(jnp.issubdtype(dtype, kind) for kind in (np.floating, np.integer, np.bool_))


def described(value: Any) -> str:
    """Describes an invalid value for an error message: an array by its dtype and shape, any other
    value by its type and the start of its repr."""
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__} {repr(value)[:60]}"


def add(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Adds two dicts of metrics, name by name.

    Raises:
      ValueError: the names in the two dicts differ.
    """
    if left.keys() != right.keys():
        raise ValueError(
            f"the metrics {sorted(left)} became {sorted(right)}: return the same ones for each "
            f"batch"
        )
    return {name: left[name] + right[name] for name in left}


def zeros(shapes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of metrics with the given shapes, filled with zeros, as the initial value for
    sums of metrics."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), dict(shapes))


def results(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Fetches the values of a dict of metrics: floats for scalars, NumPy arrays for other shapes.

    The function waits until the device has computed the metrics.
    """
    out = {}
    for name, metric in jax.device_get(dict(metrics)).items():
        if isinstance(metric, MemberMean):
            out |= metric.values(name)
            continue
        value = np.asarray(metric.result())
        out[name] = float(value) if value.ndim == 0 else value
    return out


def evaluator(
    metrics: Callable[[Any, Mapping[str, jax.Array]], Mapping[str, Any]],
    data: Any,
    batch_size: int,
) -> Callable[[Any], dict[str, Any]]:
    """Returns a function that computes the metrics of a state on a whole data set, each example
    once.

    All batches have the same size, so the evaluation is compiled once: the last one is padded, and
    every batch has an array of weights [batch], 1.0 for examples and 0.0 for padding. The metrics
    are added on the host in float64 and int64, so counts are exact for data of any size. Of a state
    on several devices by a plan (see `parallel.plan`), each device evaluates a part.

    Args:
      metrics: a pure function, `metrics(state, batch) -> dict` of `Mean`s or `Total`s that ignore
        the padding, such as `mean(values, batch["weight"])`. A plain scalar is an error, because
        its mean would include the padding.
      data: the arrays, in one of the structures of `Batches`. A dict gives batches that are dicts
        with the key "weight", too; a tuple (x, y) gives (x, y, weight), and an array x gives (x,
        weight).
      batch_size: the number of examples in a batch, rounded up to a multiple of the number of
        devices.

    Returns:
      A function `evaluate(state)`, which returns the metrics as a dict of floats and NumPy arrays.

    Raises:
      ValueError: the arrays have different lengths, an array is named "weight", `batch_size` is
        less than 1, or a metric is a plain scalar.
      TypeError: `data` contains missing values, or values that are not numbers.

    >>> def measure(state, batch):
    ...     return {"error": tr.mean(jnp.abs(state - batch["x"]), batch["weight"])}
    >>> tr.evaluator(measure, {"x": np.arange(6.0, dtype=np.float32)}, batch_size=4)(jnp.float32(2))
    {'error': 1.5}
    """
    data, length = as_arrays(data, "evaluator")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: a batch needs at least one example")
    if isinstance(data, Mapping) and "weight" in data:
        raise ValueError(
            "evaluator: 'weight' is the name of the weights that mark padding: rename that array"
        )

    def measured(form, arrays, batch):
        state = arrays if form is None else form.unpack(arrays)
        values = metrics(state, batch)
        if form is not None:
            unchanged("evaluator: the function of metrics", form.lost(state, arrays))
        for name, value in values.items():
            if not isinstance(value, Mean | Total):
                raise ValueError(
                    f"evaluation metric '{name}' is a plain value, in which padding counts: "
                    "return training.mean(values, batch['weight'])"
                )
        return dict(values)

    @functools.cache
    def steps(form, whole):
        compiled = functools.partial(measured, form)
        if whole is not None and AxisType.Explicit in whole.mesh.axis_types:
            divided = jax.sharding.auto_axes(
                compiled, axes=whole.mesh.axis_names, out_sharding=whole
            )
            return jax.jit(divided)
        return jax.jit(compiled, out_shardings=whole)

    def batches(chips):
        size = -(-min(batch_size, length) // chips) * chips
        for start in range(0, length, size):
            rows = np.arange(start, start + size)
            batch = rows_of(data, np.minimum(rows, length - 1), "evaluator")
            yield _weighted(batch, (rows < length).astype(np.float32))

    def evaluate(state):
        arrays, form = pack(state)
        total, place = None, _rows(arrays)
        if place is not None and AxisType.Explicit in place.mesh.axis_types:
            try:  # metrics that state their own shardings
                jax.eval_shape(functools.partial(measured, form), arrays, next(batches(1)))
                place = None
            except Exception:  # metrics for one device; if they are wrong, they fail again
                pass
        one = steps(form, None if place is None else NamedSharding(place.mesh, P()))
        in_flight: collections.deque = collections.deque()

        def fetch(total):
            values = jax.tree.map(_wide, jax.device_get(in_flight.popleft()))
            return values if total is None else add(total, values)

        for batch in batches(
            1 if place is None else place.mesh.size // place.shard_shape((place.mesh.size,))[0]
        ):
            poll()
            in_flight.append(one(arrays, placed(batch, place)))
            if len(in_flight) > 2:  # otherwise, a signal would have to wait for all of the data
                total = fetch(total)
        while in_flight:
            total = fetch(total)
        return results(total)

    def names(state):
        """Returns the names of the metrics that `evaluate(state)` would return, without running it."""
        arrays, form = pack(state)
        compiled = functools.partial(measured, form)
        return logged_names(jax.eval_shape(compiled, arrays, next(batches(1))))

    evaluate.names = names
    return evaluate


def _wide(values: np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.int64 if values.dtype.kind in "iub" else np.float64)


def _weighted(batch: Any, weight: np.ndarray) -> Any:
    """Adds the weights of the examples to a batch, in the structure that the docstring of
    `evaluator` describes."""
    if isinstance(batch, Mapping):
        return {**batch, "weight": weight}
    return (*batch, weight) if isinstance(batch, tuple) else (batch, weight)


def _rows(state: Any) -> NamedSharding | None:
    """Returns the sharding with which a batch is split over the devices of a state. Returns None if
    the state is on one device, or if its mesh has no axis for the batch."""
    for x in jax.tree.leaves(state):
        place = getattr(x, "sharding", None)
        if isinstance(place, NamedSharding) and place.mesh.size > 1:
            axes = tuple(name for name in ("slice", "data") if place.mesh.shape.get(name, 1) > 1)
            return NamedSharding(place.mesh, P(axes)) if axes else None
    return None


def placed(tree: Any, place: NamedSharding | None) -> Any:
    """Returns a copy of a tree of arrays with the sharding `place`, or the tree itself if `place`
    is None."""
    if place is None:
        return tree
    put = lambda x: jax.make_array_from_callback(
        np.shape(x), place, lambda index: np.asarray(x)[index]
    )
    return jax.tree.map(put, tree)
