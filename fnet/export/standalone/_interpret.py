"""Runs an exported program with NumPy.

This module evaluates the stable form of a program, which is a description of the program as JSON
data that does not depend on the version of JAX. Every bundle (file of an exported model) contains a
copy of this module as interpret.py.

This module uses NumPy instead of JAX. Therefore, the module can run a program that the installed
version of JAX cannot read. If JAX can read a program, the results of this module can be compared
with those of JAX. This module is slow.
"""

import functools
import math

import numpy as np

if __package__:
    from fnet.export.standalone._sizes import size
else:
    from sizes import size

try:  # bfloat16 and the 8-bit floating-point types, which JAX installs
    import ml_dtypes  # noqa: F401
except ImportError:
    pass


def run(program, constants, inputs, sizes, around=None):
    """Evaluates a program.

    Args:
        program: the stable form of the program, a dict that was read from JSON.
        constants, inputs: the values of the constants and of the inputs, two lists of arrays in the
            order of the lists "constants" and "inputs" in `program`.
        sizes: the values of the size variables (symbolic sizes), {name: integer}.
        around: a function (name of an operation, its function of arrays, the arrays, types of the
            results) that is called in place of the operation's function, see rounding.py. Default
            None: the function itself is called.

    Returns:
        The list of outputs.
    """
    known = dict(zip(program["constants"], map(np.asarray, constants)))
    with np.errstate(all="ignore"):
        return _Run(program["values"], known, sizes, around).body(
            program, [np.asarray(x) for x in inputs]
        )


class _Run:
    def __init__(self, values, known, sizes, around=None):
        self.values, self.known, self.sizes, self.around = values, known, sizes, around

    def body(self, body, inputs):
        values = {**self.known, **dict(zip(body["inputs"], inputs))}
        for operation, ins, outs, options, path in body["equations"]:
            arrays = [
                np.asarray(_number(a[1]), a[0]) if isinstance(a, list) else values[a] for a in ins
            ]
            types = [(np.dtype(self.values[i][0]), self.shape(self.values[i][1])) for i in outs]
            if operation not in OPERATIONS:
                raise NotImplementedError(
                    f"unknown operation {operation!r} at {path!r}: this file was written by a "
                    "later version of fnet"
                )
            compute = functools.partial(OPERATIONS[operation], self, options, types)
            results = (
                compute(*arrays)
                if self.around is None
                else self.around(operation, compute, arrays, types)
            )
            for i, x, (dtype, shape) in zip(outs, results, types):
                x = np.asarray(x)
                if x.shape != shape:
                    raise ValueError(
                        f"{operation!r} at {path!r} computed the shape {x.shape}, expected {shape}"
                    )
                values[i] = x.astype(dtype, copy=False)
        return [
            np.asarray(_number(a[1]), a[0]) if isinstance(a, list) else values[a]
            for a in body["outputs"]
        ]

    def shape(self, shape):
        return tuple(size(n, self.sizes) for n in shape)


def _number(x):
    return float(x) if isinstance(x, str) else x


def _narrow(dtype):
    """Whether a dtype is a floating-point type of fewer than 32 bits."""
    return dtype.kind in "fV" and dtype.itemsize < 4


def _flushed(x):
    """Replaces subnormal numbers by zeros of the same sign, as XLA does on CPUs wherever it
    computes with numbers, but not where it moves, negates or selects them. Numbers of float16 are
    computed in float32, where none is subnormal."""
    smallest = _SMALLEST.get(x.dtype.name)
    if smallest is None:
        return x
    subnormal = np.abs(x) < x.dtype.type(smallest)
    return np.where(subnormal, x * x.dtype.type(0), x) if subnormal.any() else x


_SMALLEST = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float64": 2.0**-1022}


def _computed(function):
    """Returns a function that flushes subnormal operands and results."""
    return lambda *arrays: _flushed(np.asarray(function(*map(_flushed, arrays))))


def _each(function):
    return lambda run, options, types, *arrays: [function(*arrays)]


def _scalar(function, *, flushes=True):
    """Returns an operation that applies a function of one number to each element of an array.
    `flushes` states whether it counts a subnormal number as zero."""
    table = np.vectorize(function, otypes=[np.float64])

    def operation(run, options, types, x):
        read = _flushed(x) if flushes else np.asarray(x)
        return [_flushed(table(read.astype(np.float64)).astype(x.dtype) if x.size else x)]

    return operation


def _divide(x, y):
    if x.dtype.kind not in "iu":
        return x / y
    divisor = np.where(y == 0, 1, y).astype(y.dtype)
    quotient = x // divisor
    towards_zero = (quotient < 0) & (quotient * divisor != x)
    return np.where(y == 0, np.asarray(-1).astype(x.dtype), quotient + towards_zero.astype(x.dtype))


def _remainder(x, y):
    if x.dtype.kind not in "iu":
        return np.fmod(x, _flushed(y))
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype)))


_add, _subtract, _multiply = _computed(np.add), _computed(np.subtract), _computed(np.multiply)


def _maximum(x, y):
    """NaN if one is NaN; the zero 0.0 is larger than -0.0."""
    if x.dtype.kind in "iub":
        return np.maximum(x, y)
    x, y = _flushed(x), _flushed(y)
    return np.where((x == 0) & (y == 0), x + y, np.maximum(x, y))


def _minimum(x, y):
    return np.minimum(x, y) if x.dtype.kind in "iub" else -_maximum(-x, -y)


def _sign(x):
    x = _flushed(x)
    return np.where(x == 0, x, np.sign(x))


def _next_after(x, y):
    return np.where(_flushed(x) == _flushed(y), y, np.nextafter(x, y))


def _unsigned(x):
    return x.view(f"u{x.itemsize}")


def _shifted(function):
    """Returns a function that shifts integers. All bits are shifted out if the distance, read as an
    unsigned number, is as large as the number of bits."""

    def shift(x, n):
        distance, bits = _unsigned(n), 8 * x.itemsize
        kept = function(x, np.minimum(distance, distance.dtype.type(bits - 1)))
        beyond = np.where(x.view(f"i{x.itemsize}") < 0, -1, 0) if function is _arithmetically else 0
        return np.where(distance < bits, kept, np.asarray(beyond).astype(x.dtype))

    return shift


def _arithmetically(x, n):
    return (x.view(f"i{x.itemsize}") >> n.view(f"i{n.itemsize}")).view(x.dtype)


def _logically(x, n):
    return (_unsigned(x) >> n).view(x.dtype)


def _left(x, n):
    return (_unsigned(x) << n).view(x.dtype)


def _round_away(x):
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(x.dtype.type(1), x), whole)


def _converted(run, options, types, x):
    dtype = types[0][0]
    number = x.dtype.kind in "fV"
    if dtype.kind == "b":
        return [_flushed(x) != 0]
    if dtype == np.float64 and number:
        x = _flushed(x)
    if not number or dtype.kind not in "iu":
        return [x.astype(dtype)]
    # The nearest integer of the dtype towards zero; 0 for NaN.
    wide, info = (
        np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)),
        np.iinfo(dtype),
    )
    high, low = wide >= float(info.max) + 1 - (info.bits < 64), wide <= float(info.min)
    middle = np.where(high | low, 0, wide).astype(dtype)
    return [np.where(high, dtype.type(info.max), np.where(low, dtype.type(info.min), middle))]


def _lgamma(x):
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    try:
        return math.lgamma(x)
    except OverflowError:
        return math.inf


def _digamma(run, options, types, x):
    """Computes the derivative of lgamma from Lanczos' approximation of the gamma function (g = 7),
    and where x < 0.5 from digamma(x) = digamma(1 - x) - pi / tan(pi x)."""
    number = np.asarray(_flushed(x), np.float64)
    reflected = number < 0.5
    z = np.where(reflected, -number, number - 1)
    places = z[..., None] + np.arange(1, len(LANCZOS))
    terms = np.array(LANCZOS[1:]) / places
    y = np.log(z + 7.5) - (terms / places).sum(-1) / (LANCZOS[0] + terms.sum(-1)) - 7 / (z + 7.5)
    angle = np.pi * (number - np.floor(number + 0.5))
    y = np.where(reflected, y - np.pi * np.cos(angle) / np.sin(angle), y)
    pole = (number < 0) & (number == np.floor(number))
    y = np.where(pole, np.nan, y)
    return [np.where(number == 0, -np.inf, y).astype(x.dtype)]  # NaN before jax 0.11


# Lanczos (1964), A precision approximation of the gamma function, with g = 7 and n = 9.
LANCZOS = (
    0.99999999999980993227684700473478,
    676.520368121885098567009190444019,
    -1259.13921672240287047156078755283,
    771.3234287776530788486528258894,
    -176.61502916214059906584551354,
    12.507343278686904814458936853,
    -0.13857109526572011689554707,
    9.984369578019570859563e-6,
    1.50563273514931155834e-7,
)


def _log_add_exp(x, y):
    distance = np.abs(x - y)
    finite = _maximum(x, y) + np.log1p(np.exp(-distance))
    return np.where(np.isnan(distance), x + y, finite).astype(x.dtype)


def _in_total_order(x):
    """Returns integers in the order of XLA's total order: -NaN, -inf, ..., -0.0, 0.0, ..., NaN."""
    if x.dtype.kind not in "fV":
        return x
    bits = np.ascontiguousarray(x).view(f"i{x.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _erf_inv(x):
    """Computes the inverse error function by Newton's method, near 1 and -1 that of erfc."""
    if x == 0 or x != x:
        return x
    if abs(x) >= 1:
        return math.copysign(math.inf, x) if abs(x) == 1 else math.nan
    logarithm = math.log(1 - x * x)
    half = 2 / (math.pi * 0.147) + logarithm / 2
    y = math.copysign(math.sqrt(math.sqrt(half * half - logarithm / 0.147) - half), x)
    for _ in range(4):
        excess = math.erf(y) - x
        if abs(x) > 0.5:
            excess = math.copysign(1, x) * (1 - abs(x) - math.erfc(abs(y)))
        y -= excess / (2 / math.sqrt(math.pi) * math.exp(-y * y))
    return y


def _select(run, options, types, which, *cases):
    if which.dtype == bool:
        return [np.where(which, cases[1], cases[0])]
    return [np.select([which == i for i in range(len(cases))], cases)]


def _broadcast(run, options, types, x):
    shape = types[0][1]
    where = [1] * len(shape)
    for axis, n in zip(options["axes"], x.shape):
        where[axis] = n
    return [np.broadcast_to(x.reshape(where), shape)]


def _iota(run, options, types):
    (dtype, shape), axis = types[0], options["axis"]
    where = [1] * len(shape)
    where[axis] = shape[axis]
    return [np.broadcast_to(np.arange(shape[axis]).astype(dtype).reshape(where), shape)]


def _pad(run, options, types, x, value):
    padding = [[size(n, run.sizes) for n in axis] for axis in options["padding"]]
    return [padded(x, padding, value)]


def padded(x, padding, value):
    """Pads each axis of x by [low, high, interior] elements, like `lax.pad`. Negative padding
    removes elements."""
    shape = [n + max(n - 1, 0) * inside for n, (_, _, inside) in zip(x.shape, padding)]
    y = np.full(
        [n + max(low, 0) + max(high, 0) for n, (low, high, _) in zip(shape, padding)],
        value,
        x.dtype,
    )
    y[
        tuple(
            slice(max(low, 0), max(low, 0) + n, inside + 1)
            for n, (low, _, inside) in zip(shape, padding)
        )
    ] = x
    return y[
        tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(y.shape, padding))
    ]


def _slice(run, options, types, x):
    start, stop = (run.shape(options[name]) for name in ("start", "stop"))
    return [x[tuple(map(slice, start, stop, options["step"] or (1,) * x.ndim))]]


def _starts(x, sizes, starts):
    return tuple(
        slice(at := min(max(int(start), 0), n - length), at + length)
        for start, n, length in zip(starts, x.shape, sizes)
    )


def _dynamic_slice(run, options, types, x, *starts):
    return [x[_starts(x, types[0][1], starts)]]


def _dynamic_update_slice(run, options, types, x, update, *starts):
    y = x.copy()
    y[_starts(x, update.shape, starts)] = update
    return [y]


def _signed(indices):
    most = np.iinfo(np.int64).max
    return (np.minimum(indices, most) if indices.dtype == np.uint64 else indices).astype(np.int64)


def _where(options, shape, indices, sizes, dropped):
    """Returns the positions of the elements that a gather or scatter accesses, and whether its
    windows are in bounds.

    The first result is a tuple with one index array for each axis of the operand. The index arrays
    broadcast to [*batch, *window]. The second result states for each window (block of elements)
    whether it lies inside the operand.
    """
    batch, indices = indices.shape[:-1], _signed(indices)
    windows = [
        axis for axis in range(len(shape)) if axis not in dropped and axis not in options["batch"]
    ]
    inside, where = np.ones(batch, bool), []
    for axis, n in enumerate(shape):
        start = np.zeros(batch, np.int64)
        if axis in options["indexed"]:
            start = indices[..., options["indexed"].index(axis)]
            inside &= (start >= 0) & (start <= n - sizes[axis])
            start = np.clip(start, 0, n - sizes[axis])
        elif axis in options["batch"]:
            along = options["index_batch"][options["batch"].index(axis)]
            start = np.arange(n).reshape([n if i == along else 1 for i in range(len(batch))])
        start = start.reshape(start.shape + (1,) * len(windows))
        if axis in windows:
            start = start + np.arange(sizes[axis]).reshape(
                [-1 if axis == other else 1 for other in windows]
            )
        where.append(start)
    return tuple(where), inside.reshape(batch + (1,) * len(windows))


def _gather(run, options, types, x, indices):
    sizes = run.shape(options["sizes"])
    where, inside = _where(options, x.shape, indices, sizes, options["collapsed"])
    y = np.broadcast_to(
        x[where], [size for size in np.broadcast_shapes(*(w.shape for w in where))] if where else []
    )
    if options["fill"] is not None:
        y = np.where(inside, y, np.asarray(_number(options["fill"]), x.dtype))
    count, offset = indices.ndim - 1, options["offset"]
    rest = iter(range(count))
    return [
        y.transpose([count + offset.index(i) if i in offset else next(rest) for i in range(y.ndim)])
    ]


def _scatter(run, options, types, x, indices, updates):
    dropped, window = options["inserted"], options["window"]
    kept = [axis for axis in range(x.ndim) if axis not in dropped and axis not in options["batch"]]
    sizes = [1] * x.ndim
    for axis, at in zip(kept, window):
        sizes[axis] = updates.shape[at]
    updates = updates.transpose([i for i in range(updates.ndim) if i not in window] + window)
    where, inside = _where(options, x.shape, indices, sizes, dropped)
    where = [np.broadcast_to(w, updates.shape) for w in where]
    chosen = np.broadcast_to(inside | options["clip"], updates.shape)
    y = x.copy()
    at = tuple(w[chosen] for w in where)
    if options["kind"] == "replace":
        y[at] = updates[chosen]
    elif options["kind"] == "apply":
        for position in zip(*at):  # one after another, because a position may occur several times
            y[position] = run.body(options["body"], [y[position], y[position]])[0]
    else:
        combine = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[
            options["kind"]
        ]
        y[at] = _flushed(y[at])
        combine.at(y, at, _flushed(updates[chosen]))
        y[at] = _flushed(y[at])
    return [y]


def _sort(run, options, types, *arrays):
    axis, keys = options["axis"], []
    for x in arrays[: options["keys"]]:
        if x.dtype.kind in "fV":  # 0.0 and -0.0 are equal, as are all NaN, which are the largest
            x = _flushed(x).astype(
                np.promote_types(np.float32, x.dtype) if x.dtype.kind == "f" else np.float32
            )
            keys += [np.isnan(x), np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)]
        else:
            keys.append(x)
    order = np.lexsort(keys[::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in arrays]


def _total_order(x):
    """Returns integers in the order of the elements, where -NaN < -inf, -0.0 < 0.0, and inf < NaN."""
    if x.dtype.kind not in "fV":
        return x
    bits = x.view(f"i{x.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def _top_k(run, options, types, x):
    axis = options["axis"] if options["axis"] is not None else -1
    moved = np.moveaxis(x, axis, -1)
    keys = _total_order(np.ascontiguousarray(moved))
    order = (x.shape[axis] - 1 - np.argsort(keys[..., ::-1], -1, kind="stable")[..., ::-1])[
        ..., : options["k"]
    ]
    return [
        np.moveaxis(np.take_along_axis(moved, order, -1), -1, axis),
        np.moveaxis(order, -1, axis),
    ]


def _cumulative(function, start):
    """Combines the elements in the order of XLA, which first combines them within columns of 16
    elements. Where numbers overflow or are rounded, the order changes the results."""

    def within(x, value, reverse):
        y, n = np.full_like(x, value), len(x)
        for i in range(n):
            if reverse:
                y[: n - i] = function(y[: n - i], x[i:])
            else:
                y[i:] = function(y[i:], x[i])
        return y

    def scan(x, value, reverse):
        n, columns = len(x), -(-len(x) // _COLUMN)
        if columns <= 1:
            return within(x, value, reverse)
        x = np.concatenate([x, np.full((columns * _COLUMN - n, *x.shape[1:]), value, x.dtype)])
        inner = within(np.moveaxis(x.reshape(columns, _COLUMN, *x.shape[1:]), 1, 0), value, reverse)
        totals = scan(inner[0 if reverse else -1], value, reverse)
        before = np.full_like(totals, value)  # of the columns before (after) each column
        if reverse:
            before[:-1] = totals[1:]
        else:
            before[1:] = totals[:-1]
        return np.moveaxis(function(inner, before[None]), 0, 1).reshape(x.shape)[:n]

    def cumulative(run, options, types, x):
        moved = np.moveaxis(x, options["axis"], 0)
        return [np.moveaxis(scan(moved, start(x.dtype), options["reverse"]), 0, options["axis"])]

    return cumulative


_COLUMN = 16


def _reduce(function, start):
    """Combines the elements one after another in the order of XLA, which first combines blocks of
    32 elements of long axes. Where numbers overflow or are rounded, the order changes the results:
    numbers of float16 and bfloat16 are rounded in each step."""

    def reduce(run, options, types, x):
        axes, value = options["axes"], start(x.dtype)
        if not axes:
            return [x]
        kept = [i for i in range(x.ndim) if i not in axes]
        shape = [x.shape[i] for i in kept]
        x = x.transpose([*axes, *kept])
        if max(x.shape[: len(axes)], default=0) > _BLOCK:
            for i in range(len(axes)):
                n, block = x.shape[2 * i], min(max(x.shape[2 * i], 1), _BLOCK)
                more = -n % block
                padding = [[0, 0, 0]] * x.ndim
                padding[2 * i] = [more // 2, more - more // 2, 0]
                x = padded(x, padding, value)
                x = x.reshape(*x.shape[: 2 * i], -1, block, *x.shape[2 * i + 1 :])
            inner, outer = range(1, 2 * len(axes), 2), range(0, 2 * len(axes), 2)
            x = x.transpose([*inner, *outer, *range(2 * len(axes), x.ndim)])
            x = fold(x.reshape(-1, *x.shape[len(axes) :]), value)
        return [fold(x.reshape(-1, *shape), value)]

    def fold(x, total):
        total = np.full(x.shape[1:], total, x.dtype)
        for part in x:
            total = function(total, part)
        return total

    return reduce


_BLOCK = 32


def _reduce_exactly(function, start):
    return lambda run, options, types, x: [
        function.reduce(x, tuple(options["axes"]), dtype=x.dtype, initial=start(x.dtype))
    ]


def _by_kind(numbers, integers):
    """Returns an operation that evaluates `integers` for integers and booleans, whose results
    depend on no order."""
    return lambda run, options, types, x: (integers if x.dtype.kind in "iub" else numbers)(
        run, options, types, x
    )


def _operands(options, types, *arrays):
    """Converts the operands of a product to the dtype in which it is computed."""
    result, precision = types[0][0], options.get("precision")
    if isinstance(precision, str) and precision.startswith("bf16_bf16") and "_x" not in precision:
        arrays = [x.astype("bfloat16") for x in arrays]
    return [x.astype(np.float32 if _narrow(result) else result) for x in arrays]


def _dot(run, options, types, x, y):
    x, y = _operands(options, types, x, y)
    (cx, cy), (bx, by) = options["contract"], options["batch"]
    fx, fy = (
        [i for i in range(a.ndim) if i not in (*c, *b)] for a, c, b in ((x, cx, bx), (y, cy, by))
    )
    count = lambda a, axes: math.prod(a.shape[i] for i in axes)
    left = x.transpose([*bx, *fx, *cx]).reshape(
        [x.shape[i] for i in bx] + [count(x, fx), count(x, cx)]
    )
    right = y.transpose([*by, *cy, *fy]).reshape(
        [y.shape[i] for i in by] + [count(y, cy), count(y, fy)]
    )
    product = np.matmul(left, right) if cx else left * right
    return [product.reshape(types[0][1])]


def _taps(x, options, window):
    """Yields (position, slices) for each position in the window of a pooling or convolution.
    x[slices] contains one element of each window, the element at this position. x must already be
    padded and dilated."""
    for at in np.ndindex(*window):
        stops = [
            i * d + (n - (w - 1) * d - 1) // s * s + 1
            for i, d, n, w, s in zip(at, options["dilation"], x.shape, window, options["strides"])
        ]
        yield (
            at,
            tuple(
                slice(i * d, max(stop, 0), s)
                for i, d, stop, s in zip(at, options["dilation"], stops, options["strides"])
            ),
        )


def _spaced(options, run):
    return [
        [size(low, run.sizes), size(high, run.sizes), dilation - 1]
        for (low, high), dilation in zip(options["padding"], options["input_dilation"])
    ]


def _convolution(run, options, types, x, kernel):
    x, kernel = _operands(options, types, x, kernel)
    # [b, i, *space], [o, i, *window]
    x, kernel = (x.transpose(options["input"]), kernel.transpose(options["kernel"]))
    x = padded(x, [[0, 0, 0], [0, 0, 0], *_spaced(options, run)], 0)
    groups, batches = options["groups"], options["batch_groups"]
    parts = []
    for group in range(max(groups, batches)):
        k = np.split(kernel, max(groups, batches))[group]
        part = np.split(x, groups, 1)[group] if groups > 1 else np.split(x, batches)[group]
        space, total = np.moveaxis(part, 1, -1), x.dtype.type(0)  # [b, *space, i]
        for at, tap in _taps(np.empty(space.shape[1:-1], bool), options, k.shape[2:]):
            total = total + space[(slice(None), *tap)] @ k[(slice(None), slice(None), *at)].T
        parts.append(total)
    y = np.moveaxis(np.concatenate(parts, -1), -1, 1)  # [b, o, *space]
    return [y.transpose(np.argsort(options["output"]))]


def _window(function, start):
    def reduce(run, options, types, x):
        value = start(x.dtype)
        x, total = padded(x, _spaced(options, run), value), value
        for _, tap in _taps(x, options, options["window"]):
            total = function(total, x[tap])
        return [total]

    return reduce


def _lowest(dtype):
    if dtype.kind == "b":
        return np.asarray(False)
    return np.asarray(np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf, dtype)


def _highest(dtype):
    if dtype.kind == "b":
        return np.asarray(True)
    return np.asarray(np.iinfo(dtype).max if dtype.kind in "iu" else np.inf, dtype)


def _zero(dtype):
    return np.zeros((), dtype)


def _one(dtype):
    return np.ones((), dtype)


def _window_select_add(run, options, types, source, x):
    """Adds each element of `source` to the element of its window that is selected: an element
    replaces the selected one if that is not at least (at most) as large, so that NaN is replaced by
    the next element and replaces any other."""
    keeps = np.greater_equal if options["largest"] else np.less_equal
    spaced = _spaced(options, run)
    x_padded = padded(_flushed(x), spaced, (_lowest if options["largest"] else _highest)(x.dtype))
    position = padded(np.arange(x.size).reshape(x.shape), spaced, -1)
    selected = value = None
    for _, tap in _taps(x_padded, options, options["window"]):
        if value is None:
            value, selected = x_padded[tap], position[tap]
            continue
        kept = keeps(value, x_padded[tap])
        value, selected = (
            np.where(kept, value, x_padded[tap]),
            np.where(kept, selected, position[tap]),
        )
    total = np.zeros(x.size, source.dtype)
    inside = selected >= 0  # JAX pads on CPUs, and drops what is added to the padding
    np.add.at(total, selected[inside], source[inside])
    return [total.reshape(x.shape)]


def _scan(run, options, types, *arrays):
    count = options["consts"], options["consts"] + options["carry"]
    consts, carry, slices = (
        arrays[: count[0]],
        list(arrays[count[0] : count[1]]),
        arrays[count[1] :],
    )
    length = size(options["length"], run.sizes)
    stacked = [np.empty(shape, dtype) for dtype, shape in types[len(carry) :]]
    for i in range(length - 1, -1, -1) if options["reverse"] else range(length):
        results = run.body(options["body"], [*consts, *carry, *(x[i] for x in slices)])
        carry = results[: len(carry)]
        for y, result in zip(stacked, results[len(carry) :]):
            y[i] = result
    return [*carry, *stacked]


def _while(run, options, types, *arrays):
    tests, steps = options["test_consts"], options["test_consts"] + options["body_consts"]
    carry = list(arrays[steps:])
    while run.body(options["test"], [*arrays[:tests], *carry])[0]:
        carry = run.body(options["body"], [*arrays[tests:steps], *carry])
    return carry


def _cond(run, options, types, index, *arrays):
    branches = options["branches"]
    return run.body(branches[min(max(int(index), 0), len(branches) - 1)], arrays)


def _power_of(run, options, types, x):
    """Multiplies in the order of JAX, by repeated squaring."""
    exponent, y = abs(options["exponent"]), None
    while exponent:
        if exponent & 1:
            y = x if y is None else _multiply(y, x)
        exponent >>= 1
        x = _multiply(x, x) if exponent else x
    y = np.ones_like(x) if y is None else y
    return [y if options["exponent"] >= 0 else _computed(np.divide)(x.dtype.type(1), y)]


def _reduce_precision(run, options, types, x):
    """Rounds to the nearest number with fewer bits, of two equally near ones to the even one. Too
    large numbers become infinite, too small ones zero."""
    exponent, mantissa = {
        "float16": (5, 10),
        "bfloat16": (8, 7),
        "float32": (8, 23),
        "float64": (11, 52),
    }[x.dtype.name]
    bits = _unsigned(np.ascontiguousarray(x))
    number = bits.dtype.type
    sign, magnitude = (
        bits & number(1 << (8 * x.itemsize - 1)),
        bits & number((1 << (8 * x.itemsize - 1)) - 1),
    )
    infinite = number(((1 << exponent) - 1) << mantissa)
    dropped = mantissa - options["mantissa"]
    rounded = magnitude
    if dropped > 0:
        last = (magnitude >> number(dropped)) & number(1)
        rounded = (magnitude + last + number((1 << (dropped - 1)) - 1)) & ~number(
            (1 << dropped) - 1
        )
    if options["exponent"] < exponent:
        bias, most = (1 << (exponent - 1)) - 1, (1 << (options["exponent"] - 1)) - 1
        field = rounded >> number(mantissa)
        rounded = np.where(
            field > bias + most, infinite, np.where(field <= bias - most, number(0), rounded)
        )
    rounded = np.where(magnitude > infinite, magnitude, np.minimum(rounded, infinite))
    return [(rounded | sign).view(x.dtype)]


_COMPUTED = {
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "exp2": lambda x: np.exp(x * x.dtype.type(math.log(2))),  # JAX's definition, which is inexact
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "cos": np.cos,
    "acos": np.arccos,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "pow": lambda x, y: np.power(x, y).astype(x.dtype),
    "atan2": np.arctan2,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_FUNCTIONS_OF_ARRAYS = {
    **{name: _computed(function) for name, function in _COMPUTED.items()},
    "expm1": np.expm1,
    "sin": np.sin,
    "tan": np.tan,
    "asin": np.arcsin,
    "atan": np.arctan,
    "rem": _remainder,
    "tanh": lambda x: np.tanh(_flushed(x) if x.dtype == np.float64 else x),
    "neg": np.negative,
    "sign": _sign,
    "is_finite": np.isfinite,
    "abs": np.abs,
    "not": np.invert,
    "max": _maximum,
    "min": _minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "nextafter": _next_after,
    "shift_left": _shifted(_left),
    "shift_right_logical": _shifted(_logically),
    "shift_right_arithmetic": _shifted(_arithmetically),
    "clamp": lambda low, x, high: _minimum(_maximum(x, low), high),
    "population_count": lambda x: np.bitwise_count(_unsigned(x)),
    "real": np.real,
    "imag": np.imag,
}
OPERATIONS = {
    **{name: _each(function) for name, function in _FUNCTIONS_OF_ARRAYS.items()},
    "erf": _scalar(math.erf),
    "erfc": _scalar(math.erfc),
    "erf_inv": _scalar(_erf_inv),
    "lgamma": _scalar(_lgamma, flushes=False),  # XLA flushed subnormals before jax 0.11
    "digamma": _digamma,
    "total_lt": lambda run, options, types, x, y: [_in_total_order(x) < _in_total_order(y)],
    "total_le": lambda run, options, types, x, y: [_in_total_order(x) <= _in_total_order(y)],
    "reduce_sum": _by_kind(_reduce(_add, _zero), _reduce_exactly(np.add, _zero)),
    "reduce_prod": _by_kind(_reduce(_multiply, _one), _reduce_exactly(np.multiply, _one)),
    "reduce_max": _by_kind(_reduce(_maximum, _lowest), _reduce_exactly(np.maximum, _lowest)),
    "reduce_min": _by_kind(_reduce(_minimum, _highest), _reduce_exactly(np.minimum, _highest)),
    "reduce_and": _reduce_exactly(np.bitwise_and, lambda dtype: np.invert(np.zeros((), dtype))),
    "reduce_or": _reduce_exactly(np.bitwise_or, _zero),
    "reduce_xor": _reduce_exactly(np.bitwise_xor, _zero),
    "argmax": lambda run, options, types, x: [_flushed(x).argmax(options["axes"][0])],
    "argmin": lambda run, options, types, x: [_flushed(x).argmin(options["axes"][0])],
    "cumsum": _cumulative(_add, _zero),
    "cumprod": _cumulative(_multiply, _one),
    "cummax": _cumulative(_maximum, _lowest),
    "cummin": _cumulative(_minimum, _highest),
    "cumlogsumexp": _cumulative(_computed(_log_add_exp), _lowest),
    "select": _select,
    "power": _power_of,
    "reduce_precision": _reduce_precision,
    "round": lambda run, options, types, x: [
        (np.rint if options["even"] else _round_away)(_flushed(x))
    ],
    "convert": _converted,
    "broadcast": _broadcast,
    "reshape": lambda run, options, types, x: [x.reshape(types[0][1])],
    "iota": _iota,
    "transpose": lambda run, options, types, x: [x.transpose(options["axes"])],
    "reverse": lambda run, options, types, x: [np.flip(x, options["axes"])],
    "concatenate": lambda run, options, types, *arrays: [np.concatenate(arrays, options["axis"])],
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_apply": _scatter,
    "sort": _sort,
    "top_k": _top_k,
    "dot": _dot,
    "convolution": _convolution,
    "window_max": _window(_maximum, _lowest),
    "window_min": _window(_minimum, _highest),
    "window_sum": _window(_add, _zero),
    "window_select_add": _window_select_add,
    "size": lambda run, options, types: [np.asarray(size(options["value"], run.sizes))],
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
