"""Records statistics of the activations that are multiplied by parameters, on example batches."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from fnet.compress._rules import is_kernel
from fnet.compress._wrapped import Wrapped
from fnet.jaxpr import automatic, is_implicit, tag, typed
from fnet.transforms import capture, sites, use_implicit_arrays

# The histogram has 32 bins for each factor of two, so that a bound read from it is at most 2.2 %
# too large.
_BINS, _PER_OCTAVE, _LOWEST = 1920, 32, -30
_NAME = re.compile(r"(?:.*/)?input of (?P<leaf>\d+), (?P<lead>\d+), (?P<axes>[-\d ]+)(?:#\d+)?")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "largest", "magnitude", "histogram", "gram"],
    meta_fields=["axes", "conflict"],
)
@dataclasses.dataclass(frozen=True)
class InputStatistics:
    """What `calibrate` records about the activations that are multiplied by one parameter.

    In a matrix product, activations are rows of n elements, where n is how many the product sums
    over. In a convolution, each element counts as a row of its own (n = 1). Layers of a scan have
    separate statistics; `lead` stands for the sizes of the axes of the parameter that the scan
    iterates over.

    >>> from fnet import compress
    >>> x, params = jnp.array([[1.0, -3.0]]), {"kernel": jnp.ones((2, 3))}
    >>> found = compress.calibrate(lambda params, x: x @ params["kernel"], params, [x])["kernel"]
    >>> found.magnitude.tolist(), float(found.bound("absmax"))
    ([1.0, 3.0], 3.0)

    Attributes:
        rows: the number of recorded rows, [*lead].
        largest: the largest magnitude of all elements, [*lead].
        magnitude: the mean magnitude of each of the n elements of a row, [*lead, n].
        histogram: the number of elements whose magnitude is in each bin, [*lead, 1920]. `bounds`
            has the upper bounds of the bins.
        gram: the sum of x^T x over all rows x, [*lead, n, n]. None for convolutions, and if
            `calibrate` was called with `gram=False`.
        axes: the axes of the parameter over which products or convolutions sum, counted from the
            end (negative).
        conflict: "" if all matrix products with the parameter sum over the same axes. Otherwise an
            error message, and the statistics describe only the products that sum over `axes`.
    """

    rows: Any
    largest: Any
    magnitude: Any
    histogram: Any
    gram: Any
    axes: tuple[int, ...]
    conflict: str = ""

    @property
    def bounds(self) -> np.ndarray:
        """The upper bounds of the bins of the histogram, [1920]."""
        return 2.0 ** (_LOWEST + np.arange(1, _BINS + 1) / _PER_OCTAVE)

    def bound(self, method: str) -> np.ndarray:
        """Returns where to clip inputs that are rounded to 8 bits, [*lead]. An input at the bound
        gets the largest code, 127.

        Args:
            method: "absmax": the largest recorded magnitude. "percentile": the bound below which
                99.99 % of the magnitudes are. "mse": the bound with the least mean squared error of
                rounding and clipping.
        """
        largest, counts, bounds = (
            np.asarray(self.largest),
            np.asarray(self.histogram, float),
            self.bounds,
        )
        if method == "percentile":
            below = np.cumsum(counts, -1)
            found = bounds[(below >= 0.9999 * below[..., -1:]).argmax(-1)]
        elif method == "mse":
            value = bounds * 2 ** (-0.5 / _PER_OCTAVE)  # the middle of each bin
            step = bounds[:, None] / 127  # the step of codes for each candidate bound
            rounded = np.clip(np.round(value / step), -127, 127) * step
            # The error varies within the bin.
            within_bin = (step < value / _PER_OCTAVE) & (value < bounds[:, None])
            error = np.where(within_bin, step**2 / 12, (rounded - value) ** 2)  # [candidate, bin]
            found = bounds[(counts @ error.T).argmin(-1)]
        else:
            return largest
        return np.minimum(found, largest).astype(np.float32)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "rows"],
    meta_fields=["leaf", "original", "gram"],
)
@dataclasses.dataclass(frozen=True)
class _Observed(Wrapped):
    """A wrapper of a parameter that computes statistics of the activations that are multiplied by
    the parameter. `tag` gives the statistics a name, so that `ft.capture` can record them.

    Attributes:
        rows: an integer array with the number of each row (along the last axis) of the whole
            parameter. A scan slices it together with the parameter, so it tells which layer the
            parameter is.
        leaf: the index of the parameter among the leaves of the tree.
        original: the number of axes of the whole parameter, before a scan slices it. Inside a scan
            over stacked layers, the wrapped parameter has fewer axes, because it lacks the axes
            over which the scan iterates.
        gram: whether to compute x^T x.
    """

    rows: Any
    leaf: int
    original: int
    gram: bool

    @property
    def has_leading_axis(self) -> bool:
        return bool(jnp.shape(self.rows))

    def dot(self, x, axes, dot):
        self._record(x, math.prod(x.shape[x.ndim - len(axes) :]), axes, self.gram)
        return dot(x, self.array, axes)

    def convolve(self, x, convolution):
        others = tuple(i for i in range(self.ndim) if i != convolution.kernel_axis)
        self._record(x, 1, others, False)
        return convolution(x, self.array)

    def _record(self, x, width, axes, gram):
        place = typed(jax.typeof(x))
        if place is not None:  # every device gets the statistics
            place = NamedSharding(place.mesh, PartitionSpec())
        measured = automatic(functools.partial(_measured, width=width, gram=gram), place)
        found = {"row": self.rows.ravel()[0], **measured(x)}
        negative = " ".join(str(i - self.ndim) for i in sorted(axes))
        tag(found, f"input of {self.leaf}, {self.original - self.ndim}, {negative}")


def _measured(x, width, gram):
    """Returns the statistics of an activation, whose last axes are the `width` elements of its
    rows."""
    x = x.reshape(-1, width).astype(jnp.float32)
    size, bins = jnp.abs(x), _LOWEST * _PER_OCTAVE
    at = jnp.floor(jnp.log2(jnp.maximum(size, 2.0**_LOWEST)) * _PER_OCTAVE).astype(int) - bins
    found = {
        "largest": size.max(),
        "magnitude": size.sum(0),
        "histogram": jnp.zeros(_BINS).at[jnp.clip(at, 0, _BINS - 1)].add(1),
    }
    if gram:
        found["gram"] = jnp.matmul(x.T, x, precision="highest")
    return found


def calibrate(
    f: Callable, params: Any, batches: Iterable[Any], *, gram: bool = True
) -> dict[str, InputStatistics]:
    """Runs a function on example batches, and records statistics of the activations that are
    multiplied by its parameters.

        stats = compress.calibrate(model, params, [tokens1, tokens2])
        params = compress.quantize(params, {"blocks": compress.Int4()}, stats=stats)

    Args:
        f: `f(params, *batch)`, a model of any library, or a loss.
        params: a tree of arrays. Parameters with fewer than two axes or named bias, scale, b or
            offset have no statistics, and neither have implicit arrays.
        batches: an iterable of batches, each a tuple of the other arguments of f, or an array if
            there is only one. A few hundred rows of activations in total are enough for scales of
            activations. To correct rounding errors (`gram=True`), pass more rows than a row has
            elements.
        gram: whether to record the sum of x^T x over the rows x, with which `quantize` corrects
            rounding errors. It has n^2 elements for rows of n. Default True.

    Returns:
        {path of a parameter: `InputStatistics`}, for the parameters that f uses in matrix products
        or convolutions. Those inside while loops and branches of `lax.cond` are not recorded.

    Raises:
        ValueError: `batches` is empty, f has no matrix product or convolution with a parameter, or
            a recorded activation, or a sum of x^T x, is NaN or infinite.

    >>> from fnet import compress
    >>> params = {"kernel": jnp.ones((2, 3))}
    >>> stats = compress.calibrate(lambda params, x: x @ params["kernel"], params, [jnp.array([[1.0, -4.0]])])
    >>> float(stats["kernel"].largest), stats["kernel"].gram.tolist()
    (4.0, [[1.0, -4.0], [-4.0, 16.0]])
    """
    paths = [
        (keystr(path, simple=True, separator="/"), x)
        for path, x in tree_flatten_with_path(params, is_leaf=is_implicit)[0]
    ]
    count = itertools.count()

    def observe(path, x):
        number = next(count)
        if not is_kernel(path, x) or is_implicit(x):
            return x
        rows = jnp.arange(math.prod(x.shape[:-1]), dtype=jnp.int32).reshape(x.shape[:-1])
        return _Observed(jnp.asarray(x), rows, number, jnp.ndim(x), gram)

    observed = tree_map_with_path(observe, params, is_leaf=is_implicit)
    evaluate, compiled, total = use_implicit_arrays(f), {}, {}
    for number, batch in enumerate(batches):
        batch = batch if isinstance(batch, tuple) else (batch,)
        leaves, structure = jax.tree.flatten(batch)
        key = structure, tuple(map(jax.typeof, leaves))
        if key not in compiled:
            names = [
                site.name
                for site in sites(evaluate)(observed, *batch)
                if _NAME.fullmatch(site.name) and site.inside is None
            ]
            compiled[key] = jax.jit(_recorder(evaluate, names))
        for name, found in compiled[key](observed, *batch).items():
            _add(total, paths, _NAME.fullmatch(name), jax.device_get(found), number)
    if not compiled:
        raise ValueError("calibrate: expected at least one batch; got none")
    if not total:
        raise ValueError(
            f"calibrate: the function has no product with any of the {len(paths)} parameters"
        )
    return {path: _finished(**found) for path, found in total.items()}


def _finished(magnitude, histogram, **found):
    rows = histogram.sum(-1) / magnitude.shape[-1]
    return InputStatistics(
        rows=rows,
        magnitude=magnitude / np.maximum(rows, 1)[..., None],
        histogram=histogram,
        **found,
    )


def _recorder(evaluate, names):
    if not names:
        return lambda *arguments: {}
    captured = capture(evaluate, names)
    return lambda *arguments: captured(*arguments)[1]


def _add(total, paths, match, found, number) -> None:
    """Adds the statistics of one matrix product or convolution on batch `number` to `total`, {path
    of a parameter: statistics}."""
    path, leaf = paths[int(match["leaf"])]
    if wrong := [name for name, x in found.items() if not np.isfinite(x).all()]:
        what = "the sum of x^T x over the inputs x" if wrong == ["gram"] else "an input"
        raise ValueError(
            f"calibrate: batch {number}: {what} of {path} is NaN or infinite; pass batches on "
            "which the function is finite"
        )
    count = int(match["lead"])
    lead, inside = leaf.shape[:count], math.prod(leaf.shape[count:-1])
    axes = tuple(map(int, match["axes"].split()))
    layers = np.asarray(found.pop("row")) // inside  # for each iteration of the enclosing scans
    found = {
        name: _reduced(x, layers, lead, np.maximum if name == "largest" else np.add)
        for name, x in found.items()
    }
    old = total.setdefault(
        path, {**dict.fromkeys(found, 0), "axes": axes, "gram": 0 if "gram" in found else None}
    )
    if old["axes"] != axes:
        old["conflict"] = f"products contract it over axes {old['axes']} and over axes {axes}"
        return
    for name, x in found.items():
        old[name] = np.maximum(old[name], x) if name == "largest" else old[name] + x


def _reduced(x, layers, lead, operation):
    """Combines captured statistics x [*iterations, ...] of one layer by `operation`. The result is
    [*lead, ...].

    `layers` [*iterations] is the layer of the parameter that each iteration used. The sizes of
    scans do not tell: a scan over time steps may be as long as the scan over layers inside it.
    """
    x = np.asarray(x, np.float32 if operation is np.maximum else np.float64)
    trailing = x.shape[layers.ndim :]
    result = np.zeros((math.prod(lead), *trailing), x.dtype)
    for layer, own in zip(layers.ravel(), x.reshape(-1, *trailing)):
        result[layer] = operation(result[layer], own)
    return result.reshape((*lead, *trailing))
