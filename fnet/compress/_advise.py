"""Recommends quantization formats for parameters, based on the time of each matrix product or
convolution on a chip."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_map_with_path

from fnet import cost
from fnet import hardware as hw
from fnet._util._text_table import aligned
from fnet._util._timing import timings
from fnet._util._units import si
from fnet.compress._formats import METHODS, Format, Int4, Int8
from fnet.compress._products import Product, by_parameter, grouped, leaves_by_path, products
from fnet.compress._quantize import Quantized, quantize, size
from fnet.cost._roofline import seconds_text
from fnet.jaxpr import is_implicit
from fnet.transforms import use_implicit_arrays

_GAIN = 0.97  # a format is selected if it takes at most this fraction of the original time
_ORIGINAL = "original"  # the name of the parameter's own dtype among the names of formats
# A measurement reads 2**25 bytes of parameters, but computes at most 2e9 FLOPs.
_COLD, _WORK = (2**25, 2e9)


@dataclasses.dataclass(frozen=True)
class Advised:
    """The advice about one parameter.

    >>> from fnet import compress
    >>> row = compress.Advised("w", "[8, 4] x [4, 2]", {"original": 32}, {"original": 1e-6}, None, "the first product")
    >>> row.format is None
    True

    Attributes:
        path: the path of the parameter.
        product: the matrix products or convolutions that use it, their number and shapes, as text.
        bytes: its size in each format that can represent it, {name of the format: bytes}; the name
            "original" means its own dtype.
        seconds: the time of these products in each format, with the same names.
        format: the advised format, or None: do not quantize.
        reason: why.
    """

    path: str
    product: str
    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    format: Format | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Advice(Mapping):
    """The result of `advise`: a mapping {pattern: format}, which `quantize` takes as its recipe,
    and which `print` shows as a table.

    >>> from fnet import compress
    >>> params = {"k1": jnp.ones((8, 8)), "k2": jnp.ones((8, 8)), "k3": jnp.ones((8, 8))}
    >>> f = lambda params, x: x @ params["k1"] @ params["k2"] @ params["k3"]
    >>> advice = compress.advise(f, params, jax.ShapeDtypeStruct((1, 8), "float32"), chip="TPU v5e")
    >>> [row.path for row in advice.rows], advice.measured
    (['k1', 'k2', 'k3'], False)

    Attributes:
        chip: the chip for which the formats are advised.
        measured: True if times were measured on the chip, False if they are estimated from its peak
            rates.
        rows: an `Advised` for each parameter that is an operand of a matrix product or convolution.
        formats: the formats that were considered, {name: format}.
        before: the time of the function with the original parameters, in seconds; None if unknown.
        after: the same with the parameters quantized as advised.
    """

    chip: hw.Chip
    measured: bool
    rows: tuple[Advised, ...]
    formats: Mapping[str, Format]
    before: float | None

    def _recipe(self) -> dict[str, Format]:
        return {re.escape(row.path): row.format for row in self.rows if row.format is not None}

    def __getitem__(self, pattern: str) -> Format:
        return self._recipe()[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipe())

    def __len__(self) -> int:
        return len(self._recipe())

    @property
    def after(self) -> float | None:
        return self._total(
            {row.path: label(row.format) for row in self.rows if row.format is not None}
        )

    def predict(self, params: Any) -> float | None:
        """Predicts the time of the function with other parameters, such as a result of `quantize`,
        in seconds.

        Raises:
            ValueError: a parameter has a format that `advise` did not compare.
        """
        formats = {}
        for path, leaf in leaves_by_path(params).items():
            if isinstance(leaf, Quantized) and any(row.path == path for row in self.rows):
                formats[path] = label(leaf.format)
                if formats[path] not in self.formats:
                    raise ValueError(
                        f"Advice.predict: {path} has the format {formats[path]}; the advice "
                        f"considered {', '.join(self.formats)}; pass advise(..., formats=)"
                    )
        return self._total(formats)

    def _total(self, formats):
        """Predicts the time of the function with quantized parameters, in seconds. `formats` is
        {path of a parameter: name of its format}. Only the time of matrix products and convolutions
        is assumed to depend on the formats."""
        if self.before is None:
            return None
        old = sum(row.seconds[_ORIGINAL] for row in self.rows)
        new = sum(row.seconds[formats.get(row.path, _ORIGINAL)] for row in self.rows)
        # The sum of separate products may take longer than the function, which is then assumed to
        # have only products.
        return self.before - old + new if old <= self.before else self.before * new / old

    def __str__(self) -> str:
        return _text(self)


def advise(
    f: Callable,
    params: Any,
    *args: Any,
    chip: Any = None,
    formats: Sequence[Format] | None = None,
    measure: bool | None = None,
) -> Advice:
    """Advises which parameters to quantize, and in which formats, so that a function runs faster on
    a chip.

        advice = compress.advise(model, params, tokens)
        print(advice)
        small = compress.quantize(params, advice)

    On the local chip, it measures each matrix product or convolution with a parameter in each
    format: among elementwise operations, with which XLA fuses rounding and scaling, and on several
    copies of the parameter, so that none is read from a cache. It also times the whole function
    with all parameters in each format, and scales the times of that format's products by one factor
    until they agree with it, since XLA may fuse differently there. For other chips, the time is
    estimated as max(FLOPs / peak rate, bytes / bandwidth), plus that of dequantizing the parameter
    and quantizing the activations.

    The fastest format is advised if it takes at most 97 % of the original time. Accuracy is not
    considered, so measure it yourself (`calibrate` can improve it), except in one way: of more than
    two products, the parameters of the first and the last stay, because rounding these affects the
    outputs most.

    Args:
        f: `f(params, *args)`, a model of any library.
        params: the parameters of f. Biases, norm scales and implicit arrays (such as `Quantized`)
            are ignored.
        *args: the other arguments of f. With `jax.ShapeDtypeStruct`s, nothing is measured.
        chip: a `hardware.Chip`, a device or a device kind. Default: the first local device.
        formats: the formats to consider. Default: Int8(), Int8(activations="dynamic") and
            Int4(group=32).
        measure: whether to measure times. Default: True if the arguments are arrays and `chip` is
            the local chip.

    Returns:
        An `Advice`, a mapping {pattern of parameter paths: format}, which `quantize` takes.

    Raises:
        ValueError: no matrix product or convolution in f has a parameter, or `measure=True` is
            passed without arrays.
        TypeError: a format is none of `Int8`, `Int4`, `NF4` and `Float8`.

    >>> from fnet import compress
    >>> params = {"k1": jnp.ones((8, 256)), "k2": jnp.ones((256, 4096)), "k3": jnp.ones((4096, 8))}
    >>> f = lambda params, x: x @ params["k1"] @ params["k2"] @ params["k3"]
    >>> advice = compress.advise(f, params, jax.ShapeDtypeStruct((4, 8), "float32"), chip="TPU v5e")
    >>> dict(advice), advice.rows[0].reason
    ({'k2': Int4(group=32, axes=None)}, 'the first product')
    """
    formats = (Int8(), Int8(activations="dynamic"), Int4()) if formats is None else tuple(formats)
    for format in formats:
        if not isinstance(format, Format):
            raise TypeError(f"advise: expected formats such as compress.Int8(); got {format!r}")
    here = hw.detect()
    chip = here if chip is None else hw.detect(chip)
    leaves = jax.tree.leaves((params, args))
    arrays = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    if measure and not arrays:
        raise ValueError(
            "advise: measure=True needs arrays, got jax.ShapeDtypeStructs; pass arrays, or "
            "measure=False"
        )
    if measure is None:
        measure = arrays and (chip.name, chip.kind) == (here.name, here.kind)
    found, f = products(f, params, *args), use_implicit_arrays(f)
    if not found:
        raise ValueError(
            "advise: the function has no product with a kernel or a table among its parameters"
        )

    named = {label(format): format for format in formats}
    times = _times(found, named, chip, measure=measure)
    rows = _rows(params, named, found, times, chip)
    if measure:
        # The times of single products are scaled until they explain the times of the function.
        before, factors = _measured(f, params, args, rows, named, found)
        for i, name in times:
            times[i, name] *= factors.get((found[i].path, name), 1)
        rows = _rows(params, named, found, times, chip)
    elif any(_ORIGINAL not in row.seconds for row in rows):
        before = None
    else:
        before = cost.roofline(f, params, *args, chip=chip, measure=False).total.seconds
    return Advice(chip, bool(measure), tuple(rows), named, before)


def _times(
    found: list[Product], named: Mapping[str, Format], chip: hw.Chip, *, measure: bool
) -> dict[tuple[int, str], float]:
    """Returns {(index of a product, label of a format): seconds}, measured or estimated. Equal
    products are measured once."""
    times: dict[tuple[int, str], float] = {}
    for group in grouped(found):
        first = group[0]
        candidates = {}
        for name, format in named.items():
            fitted = _fitted(format, first)
            if fitted is not None:
                candidates[name] = fitted
        if measure:
            seconds = _probed(first, candidates, returned=found[-1] in group)
        else:
            seconds = _estimated(first, candidates, chip)
        for product in group:
            for name, each in seconds.items():
                times[found.index(product), name] = product.count * each
    return times


def _rows(params, named, found, times, chip) -> list[Advised]:
    leaves = leaves_by_path(params)
    return [
        _row(path, leaves[path], of_path, named, found, times, chip)
        for path, of_path in by_parameter(found).items()
    ]


def label(format: Format) -> str:
    """Returns the name of a format in a table, such as "Int8 dynamic", without the axes and the
    group of the format."""
    activations = getattr(format, "activations", None)
    return type(format).__name__ + ("" if activations is None else f" {activations}")


def _uncalibrated(format: Format) -> tuple[Format, bool]:
    """Returns a format that needs no statistics of activations, and whether it differs from the
    given format."""
    calibrated = getattr(format, "activations", None) in METHODS
    return (
        dataclasses.replace(format, activations="dynamic") if calibrated else format
    ), calibrated


def _fitted(format, product) -> Format | None:
    """Sets the axes of a quantization format to the contracted axes of a parameter, and `group` (if
    set) to a divisor of the size of the last contracted axis. Returns None if the format cannot
    represent the parameter."""
    n, group = product.w.shape[product.axes[-1]], format.group
    if format.bits == 4 and n % 2:
        return None
    if group is not None and n % group:
        group = math.gcd(n, group)
        if format.bits == 4 and group % 2:
            return None
    return dataclasses.replace(format, group=group, axes=product.axes)


def _row(path, leaf, used, named, found, times, chip) -> Advised:
    first = used[0]
    options = {name: _fitted(format, first) for name, format in named.items()}
    seconds = {
        name: sum(times[found.index(product), name] for product in used)
        for name in (_ORIGINAL, *options)
        if all((found.index(product), name) in times for product in used)
    }
    bytes_of = {_ORIGINAL: math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize}
    bytes_of |= {name: _bytes(leaf, options[name]) for name in options if options[name] is not None}
    total = sum(product.count for product in used)
    text = (
        f"{total} x {list(first.x.shape)} {'*' if first.convolution else 'x'} {list(first.w.shape)}"
    )
    format, reason = _decision(path, used, options, seconds, found, chip)
    if format is not None and format.axes == _default_axes(leaf):
        format = dataclasses.replace(format, axes=None)
    return Advised(path, text, bytes_of, seconds, format, reason)


def _decision(path, used, options, seconds, found, chip) -> tuple[Format | None, str]:
    paths = list(dict.fromkeys(product.path for product in found))
    if len(paths) > 2 and path in (paths[0], found[-1].path):
        return None, f"the {'first' if path == paths[0] else 'last'} product"
    if len({product.axes for product in used}) > 1:
        return None, "products contract it over different axes"
    before = seconds.get(_ORIGINAL)
    ratios = {name: seconds[name] / before for name in options if name in seconds} if before else {}
    if not ratios:
        return None, f"no format fits, or a peak or the bandwidth of {chip.name} is unknown"
    best = min(ratios, key=ratios.__getitem__)
    if ratios[best] > _GAIN:
        return None, f"the fastest format, {best}, takes {ratios[best]:.2f} of the time"
    return options[best], f"{ratios[best]:.2f} of the time"


def _default_axes(leaf) -> tuple[int, ...]:
    return (-2,) if len(leaf.shape) < 4 else tuple(range(-len(leaf.shape), -1))


def _bytes(leaf, format) -> int:
    """Returns the number of bytes of a quantized parameter: its codes (numbers of few bits) and
    scales."""
    stored, _ = _uncalibrated(format)
    shape = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
    return size(jax.eval_shape(lambda w: quantize({"kernel": w}, {"kernel": stored}), shape))


# Measured times.


def _probed(
    product: Product, candidates: Mapping[str, Format], *, returned: bool
) -> dict[str, float]:
    """Measures the seconds of one matrix product or convolution, for the original parameter and
    each candidate format. In a network, XLA fuses the rounding of inputs and the scaling of outputs
    with neighboring elementwise operations. Therefore, the measured program applies a relu before
    the matrix product. A relu is also applied to the result of the matrix product, unless the
    user's function returns this result (`returned` is True)."""
    one = product.w.size * product.w.dtype.itemsize
    copies = max(1, min(64, math.ceil(_COLD / one), int(_WORK / product.flops)))
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (copies, *product.x.shape)).astype(product.x.dtype)
    w = 0.1 * jax.random.normal(keys[1], (copies, *product.w.shape))
    trees = {_ORIGINAL: w.astype(product.w.dtype)}
    trees |= {name: _encoded(w, format, 1) for name, format in candidates.items()}
    after = (lambda y: y) if returned else jax.nn.relu
    one = jax.jit(lambda x, w: after(product.function(jax.nn.relu(x), w)))
    if (
        product.sliced
    ):  # x is scanned, too, because XLA moves the rounding of a constant x out of the loop
        run = jax.jit(lambda x, w: lax.scan(lambda _, pair: (None, one(*pair)), None, (x, w))[1])
        calls = {name: lambda tree=tree: run(x, tree) for name, tree in trees.items()}
    else:
        pairs = {
            name: [jax.tree.map(lambda a, i=i: a[i], (x, tree)) for i in range(copies)]
            for name, tree in trees.items()
        }
        calls = {name: lambda pairs=pairs[name]: [one(*pair) for pair in pairs] for name in trees}
    for call in calls.values():
        jax.block_until_ready(call())
    return {
        name: sorted(each)[len(each) // 2] / copies
        for name, each in timings(calls, time.perf_counter).items()
    }


def _encoded(w, format, layers: int) -> Quantized:
    """Quantizes `w` to `format` for time measurements. The first `layers` axes of `w` are those of
    a stack of layers. If the format needs statistics of activations, the scale of the activations
    is an arbitrary constant."""
    stored, calibrated = _uncalibrated(format)
    array = quantize({"kernel": w}, {"kernel": stored})["kernel"]
    if calibrated:
        inputs = jnp.full((*w.shape[:layers], *(1,) * (w.ndim - layers)), 0.03)
        array = dataclasses.replace(
            array,
            format=dataclasses.replace(array.format, activations=format.activations),
            inputs=inputs,
        )
    return array


def _measured(f, params, args, rows, named, found) -> tuple[float, dict[tuple[str, str], float]]:
    """Returns the time of f in seconds, and factors {(path of a parameter, name of a format):
    factor} for the times of single products. With the factors, `Advice._total` returns measured
    times of f, unless a factor is raised to 0.1."""
    ends = {found[0].path, found[-1].path} if len(rows) > 2 else set()
    within = {
        name: [row for row in rows if name in row.seconds and row.path not in ends]
        for name in named
    }
    within = {name: some for name, some in within.items() if some}
    trees = {
        name: _in_format(params, named[name], {row.path for row in some}, found)
        for name, some in within.items()
    }
    whole = _seconds(jax.jit(f), {_ORIGINAL: params, **trees}, args)
    before, old, factors = whole[_ORIGINAL], sum(row.seconds[_ORIGINAL] for row in rows), {}
    for name, some in within.items():  # the inverse of Advice._total
        wanted = whole[name] - before + old if old <= before else whole[name] * old / before
        wanted -= old - sum(row.seconds[_ORIGINAL] for row in some)
        factor = max(wanted / sum(row.seconds[name] for row in some), 0.1)
        factors |= {(row.path, name): factor for row in some}
    return before, factors


def _seconds(run, trees, args) -> dict[str, float]:
    """Returns the median time of a function for each tree of parameters."""
    calls = {name: lambda tree=tree: run(tree, *args) for name, tree in trees.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    return {
        name: sorted(each)[len(each) // 2]
        for name, each in timings(calls, time.perf_counter).items()
    }


def _in_format(params, format, paths, found) -> Any:
    """Returns the tree `params`, in which the parameters at the paths `paths` are quantized to the
    format `format`."""
    first = {product.path: product for product in reversed(found)}

    def change(path, leaf):
        name = keystr(path, simple=True, separator="/")
        if name not in paths:
            return leaf
        product = first[name]
        return _encoded(leaf, _fitted(format, product), len(leaf.shape) - len(product.w.shape))

    return tree_map_with_path(change, params, is_leaf=is_implicit)


# Estimates.


def _estimated(
    product: Product, candidates: Mapping[str, Format], chip: hw.Chip
) -> dict[str, float]:
    """Estimates the seconds of one matrix product or convolution, with the original parameter and
    in each format of `candidates`. The result lacks formats for which the peak rate of the chip is
    unknown."""
    moved = product.x.size * product.x.dtype.itemsize + product.y.size * product.y.dtype.itemsize
    vector = chip.peaks.get("fp32", math.inf)  # not in the catalog for TPUs
    seconds = {}
    for name, format in {_ORIGINAL: None, **candidates}.items():
        integers = (
            format is not None and getattr(format, "activations", None) and not product.convolution
        )
        peak = chip.peak("int8" if integers else product.x.dtype)
        if peak is None or not chip.bandwidth:
            continue
        stored = _bytes(product.w, format) if format else product.w.size * product.w.dtype.itemsize
        decoded = (
            0 if format is None or integers else product.w.size * (1 if format.bits == 8 else 4)
        )
        rounded = (
            3 * product.x.size if format is not None and getattr(format, "activations", None) else 0
        )
        bound = max(product.flops / peak.flops, (moved + stored) / chip.bandwidth)
        seconds[name] = bound + (decoded + rounded) / vector
    return seconds


# The table.


def _text(advice: Advice) -> str:
    kind = "measured" if advice.measured else "estimate"
    names = list(advice.formats)
    rows = [
        (
            "parameter",
            "products",
            "MB",
            f"time ({kind})",
            *(f"{name}: MB, time" for name in names),
            "advice",
        )
    ]
    for row in advice.rows:
        before = row.seconds.get(_ORIGINAL)
        cells = []
        for name in names:
            known = name in row.seconds and before
            cells.append(
                f"{row.bytes[name] / 1e6:.3g}, x{row.seconds[name] / before:.2f}" if known else "-"
            )
        chosen = "keep" if row.format is None else label(row.format)
        rows.append(
            (
                row.path,
                row.product,
                f"{row.bytes[_ORIGINAL] / 1e6:.3g}",
                seconds_text(before),
                *cells,
                f"{chosen}: {row.reason}",
            )
        )
    lines = [
        f"{advice.chip.name}: "
        + (
            "every product timed on this machine"
            if advice.measured
            else "estimates from peak rates and bandwidth, not measured"
        ),
        "",
    ]
    lines += aligned(rows, left=(0, 1, len(rows[0]) - 1))
    saved = sum(
        row.bytes[_ORIGINAL] - row.bytes[label(row.format)]
        for row in advice.rows
        if row.format is not None
    )
    lines += [
        "",
        f"{len(advice)} of {len(advice.rows)} parameters: {si(saved)}B saved; the function takes "
        f"{seconds_text(advice.after)} instead of {seconds_text(advice.before)} ({kind})",
    ]
    return "\n".join(lines)
