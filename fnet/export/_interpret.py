"""Runs an exported program with NumPy.

This module evaluates the stable form of a program, which is a description of the program as JSON data that does not
depend on the version of JAX. Every bundle (file of an exported model) contains a copy of this module as interpret.py.

This module uses NumPy instead of JAX. Therefore, the module can run a program that the installed version of JAX cannot
read. If JAX can read a program, the results of this module can be compared with those of JAX. This module is slow.
"""

import math

import numpy as np

if __package__:
    from fnet.export._sizes import size
else:
    from sizes import size

try:    # bfloat16 and the 8-bit floating-point types, which JAX installs
    import ml_dtypes  # noqa: F401
except ImportError:
    pass


def run(program, constants, inputs, sizes):
    """Evaluates a program.

    Args:
        program: the stable form of the program, a dict that was read from JSON.
        constants, inputs: the values of the constants and of the inputs, two lists of arrays in the order of the lists
            "constants" and "inputs" in `program`.
        sizes: the values of the size variables (symbolic sizes), {name: integer}.

    Returns:
        The list of outputs.
    """
    known = dict(zip(program["constants"], map(np.asarray, constants)))
    with np.errstate(all="ignore"):
        return _Run(program["values"], known, sizes).body(program, [np.asarray(x) for x in inputs])


class _Run:
    def __init__(self, values, known, sizes):
        self.values, self.known, self.sizes = values, known, sizes

    def body(self, body, inputs):
        values = {**self.known, **dict(zip(body["inputs"], inputs))}
        for operation, ins, outs, options, path in body["equations"]:
            arrays = [np.asarray(_number(a[1]), a[0]) if isinstance(a, list) else values[a] for a in ins]
            types = [(np.dtype(self.values[i][0]), self.shape(self.values[i][1])) for i in outs]
            if operation not in OPERATIONS:
                raise NotImplementedError(f"unknown operation {operation!r} at {path!r}: this file was written by a "
                                          "later version of fnet")
            results = OPERATIONS[operation](self, options, types, *arrays)
            for i, x, (dtype, shape) in zip(outs, results, types):
                x = np.asarray(x)
                if x.shape != shape:
                    raise ValueError(f"{operation!r} at {path!r} computed the shape {x.shape}, expected {shape}")
                values[i] = x.astype(dtype, copy=False)
        return [np.asarray(_number(a[1]), a[0]) if isinstance(a, list) else values[a] for a in body["outputs"]]

    def shape(self, shape):
        return tuple(size(n, self.sizes) for n in shape)


def _number(x):
    return float(x) if isinstance(x, str) else x


def _wide(x):
    """Converts floating-point arrays of fewer than 32 bits to float32, in which their matrix products, convolutions and
    sums are computed."""
    return x.astype(np.float32) if x.dtype.kind in "fV" and x.dtype.itemsize < 4 else x


def _each(function):
    return lambda run, options, types, *arrays: [function(*arrays)]


def _scalar(function):
    """Returns an operation that applies a function of one number to each element of an array."""
    table = np.vectorize(function, otypes=[np.float64])
    return lambda run, options, types, x: [table(np.asarray(x, np.float64)) if x.size else x]


def _divide(x, y):
    if x.dtype.kind not in "iu":
        return x / y
    quotient = np.abs(x) // np.maximum(np.abs(y), 1)
    return np.where(y == 0, -1, np.where((x < 0) != (y < 0), -quotient, quotient))


def _shift(x, n):
    unsigned = x.view(f"u{x.itemsize}")
    return (unsigned >> n.astype(unsigned.dtype)).view(x.dtype)


def _erf_inv(x):
    """Computes the inverse error function by Newton's method."""
    if abs(x) >= 1:
        return math.copysign(math.inf, x) if abs(x) == 1 else math.nan
    logarithm = math.log(1 - x * x)
    half = 2 / (math.pi * 0.147) + logarithm / 2
    y = math.copysign(math.sqrt(math.sqrt(half * half - logarithm / 0.147) - half), x)
    for _ in range(4):
        y -= (math.erf(y) - x) / (2 / math.sqrt(math.pi) * math.exp(-y * y))
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
    """Pads each axis of x by [low, high, interior] elements, like `lax.pad`. Negative padding removes elements."""
    shape = [n + max(n - 1, 0) * inside for n, (_, _, inside) in zip(x.shape, padding)]
    y = np.full([n + max(low, 0) + max(high, 0) for n, (low, high, _) in zip(shape, padding)], value, x.dtype)
    y[tuple(slice(max(low, 0), max(low, 0) + n, inside + 1) for n, (low, _, inside) in zip(shape, padding))] = x
    return y[tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(y.shape, padding))]


def _slice(run, options, types, x):
    start, stop = (run.shape(options[name]) for name in ("start", "stop"))
    return [x[tuple(map(slice, start, stop, options["step"] or (1,) * x.ndim))]]


def _starts(x, sizes, starts):
    return tuple(slice(at := min(max(int(start), 0), n - length), at + length)
                 for start, n, length in zip(starts, x.shape, sizes))


def _dynamic_slice(run, options, types, x, *starts):
    return [x[_starts(x, types[0][1], starts)]]


def _dynamic_update_slice(run, options, types, x, update, *starts):
    y = x.copy()
    y[_starts(x, update.shape, starts)] = update
    return [y]


def _where(options, shape, indices, sizes, dropped):
    """Returns the positions of the elements that a gather or scatter accesses, and whether its windows are in bounds.

    The first result is a tuple with one index array for each axis of the operand. The index arrays broadcast to
    [*batch, *window]. The second result states for each window (block of elements) whether it lies inside the operand.
    """
    batch = indices.shape[:-1]
    windows = [axis for axis in range(len(shape)) if axis not in dropped and axis not in options["batch"]]
    inside, where = np.ones(batch, bool), []
    for axis, n in enumerate(shape):
        start = np.zeros(batch, np.int64)
        if axis in options["indexed"]:
            start = indices[..., options["indexed"].index(axis)].astype(np.int64)
            inside &= (start >= 0) & (start <= n - sizes[axis])
            start = np.clip(start, 0, n - sizes[axis])
        elif axis in options["batch"]:
            along = options["index_batch"][options["batch"].index(axis)]
            start = np.arange(n).reshape([n if i == along else 1 for i in range(len(batch))])
        start = start.reshape(start.shape + (1,) * len(windows))
        if axis in windows:
            start = start + np.arange(sizes[axis]).reshape([-1 if axis == other else 1 for other in windows])
        where.append(start)
    return tuple(where), inside.reshape(batch + (1,) * len(windows))


def _gather(run, options, types, x, indices):
    sizes = run.shape(options["sizes"])
    where, inside = _where(options, x.shape, indices, sizes, options["collapsed"])
    y = np.broadcast_to(x[where], [size for size in np.broadcast_shapes(*(w.shape for w in where))] if where else [])
    if options["fill"] is not None:
        y = np.where(inside, y, np.asarray(_number(options["fill"]), x.dtype))
    count, offset = indices.ndim - 1, options["offset"]
    rest = iter(range(count))
    return [y.transpose([count + offset.index(i) if i in offset else next(rest) for i in range(y.ndim)])]


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
    else:
        combine = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[options["kind"]]
        combine.at(y, at, updates[chosen])
    return [y]


def _sort(run, options, types, *arrays):
    axis = options["axis"]
    order = np.lexsort(arrays[:options["keys"]][::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in arrays]


def _top_k(run, options, types, x):
    axis = options["axis"] if options["axis"] is not None else -1
    moved = np.moveaxis(x, axis, -1)
    order = (x.shape[axis] - 1 - np.argsort(moved[..., ::-1], -1, kind="stable")[..., ::-1])[..., :options["k"]]
    return [np.moveaxis(np.take_along_axis(moved, order, -1), -1, axis), np.moveaxis(order, -1, axis)]


def _cumulative(function):
    def cumulative(run, options, types, x):
        axis = options["axis"]
        x = np.flip(x, axis) if options["reverse"] else x
        y = function.accumulate(x, axis, dtype=x.dtype)
        return [np.flip(y, axis) if options["reverse"] else y]
    return cumulative


def _reduce(function):
    return lambda run, options, types, x: [function.reduce(_wide(x), tuple(options["axes"]), dtype=_wide(x).dtype)]


def _dot(run, options, types, x, y):
    wide = types[0][0] if types[0][0].kind in "iu" else None
    x, y = (a.astype(wide) if wide else _wide(a) for a in (x, y))
    (cx, cy), (bx, by) = options["contract"], options["batch"]
    fx, fy = ([i for i in range(a.ndim) if i not in (*c, *b)] for a, c, b in ((x, cx, bx), (y, cy, by)))
    count = lambda a, axes: math.prod(a.shape[i] for i in axes)
    left = x.transpose([*bx, *fx, *cx]).reshape([x.shape[i] for i in bx] + [count(x, fx), count(x, cx)])
    right = y.transpose([*by, *cy, *fy]).reshape([y.shape[i] for i in by] + [count(y, cy), count(y, fy)])
    return [np.matmul(left, right).reshape(types[0][1])]


def _taps(x, options, window):
    """Yields (position, slices) for each position in the window of a pooling or convolution. x[slices] contains one
    element of each window, the element at this position. x must already be padded and dilated."""
    for at in np.ndindex(*window):
        stops = [i * d + (n - (w - 1) * d - 1) // s * s + 1 for i, d, n, w, s in
                 zip(at, options["dilation"], x.shape, window, options["strides"])]
        yield at, tuple(slice(i * d, max(stop, 0), s)
                        for i, d, stop, s in zip(at, options["dilation"], stops, options["strides"]))


def _spaced(options, run):
    return [[size(low, run.sizes), size(high, run.sizes), dilation - 1]
            for (low, high), dilation in zip(options["padding"], options["input_dilation"])]


def _convolution(run, options, types, x, kernel):
    x, kernel = _wide(x), _wide(kernel)
    x, kernel = x.transpose(options["input"]), kernel.transpose(options["kernel"])    # [b, i, *space], [o, i, *window]
    x = padded(x, [[0, 0, 0], [0, 0, 0], *_spaced(options, run)], 0)
    groups, batches = options["groups"], options["batch_groups"]
    parts = []
    for group in range(max(groups, batches)):
        k = np.split(kernel, max(groups, batches))[group]
        part = np.split(x, groups, 1)[group] if groups > 1 else np.split(x, batches)[group]
        space, total = np.moveaxis(part, 1, -1), 0                                    # [b, *space, i]
        view = {**options, "dilation": options["dilation"], "strides": options["strides"]}
        for at, tap in _taps(np.empty(space.shape[1:-1], bool), view, k.shape[2:]):
            total = total + space[(slice(None), *tap)] @ k[(slice(None), slice(None), *at)].T
        parts.append(total)
    y = np.moveaxis(np.concatenate(parts, -1), -1, 1)                                 # [b, o, *space]
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
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).min, dtype)
    return np.asarray(dtype.kind == "b" and False if dtype.kind == "b" else -np.inf, dtype)


def _highest(dtype):
    if dtype.kind in "iu":
        return np.asarray(np.iinfo(dtype).max, dtype)
    return np.asarray(True if dtype.kind == "b" else np.inf, dtype)


def _window_select_add(run, options, types, source, x):
    largest = options["largest"]
    x = padded(x, _spaced(options, run), (_lowest if largest else _highest)(x.dtype))
    taps = [tap for _, tap in _taps(x, options, options["window"])]
    values = np.stack([x[tap] for tap in taps])
    chosen = values.argmax(0) if largest else values.argmin(0)
    total = np.zeros(x.shape, source.dtype)
    for i, tap in enumerate(taps):
        total[tap] += np.where(chosen == i, source, 0)
    return [padded(total, [[-low, -high, 0] for low, high, _ in _spaced(options, run)], 0)]


def _scan(run, options, types, *arrays):
    count = options["consts"], options["consts"] + options["carry"]
    consts, carry, slices = arrays[:count[0]], list(arrays[count[0]:count[1]]), arrays[count[1]:]
    length = size(options["length"], run.sizes)
    stacked = [np.empty(shape, dtype) for dtype, shape in types[len(carry):]]
    for i in (range(length - 1, -1, -1) if options["reverse"] else range(length)):
        results = run.body(options["body"], [*consts, *carry, *(x[i] for x in slices)])
        carry = results[:len(carry)]
        for y, result in zip(stacked, results[len(carry):]):
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
    y = np.ones_like(x)
    for _ in range(abs(options["exponent"])):
        y = y * x
    return [y if options["exponent"] >= 0 else 1 / y]


def _reduce_precision(run, options, types, x):
    kinds = {(5, 10): np.float16, (8, 7): "bfloat16", (8, 23): np.float32, (11, 52): np.float64}
    return [x.astype(np.dtype(kinds[options["exponent"], options["mantissa"]]))]


_FUNCTIONS_OF_ARRAYS = {
    "neg": np.negative, "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "is_finite": np.isfinite, "abs": np.abs,
    "not": np.invert, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "logistic": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh,
    "acosh": np.arccosh, "atanh": np.arctanh, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "rem": np.fmod, "max": np.maximum,
    "min": np.minimum, "pow": np.power, "atan2": np.arctan2, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "nextafter": np.nextafter, "shift_left": np.left_shift, "shift_right_logical": _shift,
    "shift_right_arithmetic": np.right_shift, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "population_count": lambda x: np.bitwise_count(x), "real": np.real, "imag": np.imag,
}
OPERATIONS = {
    **{name: _each(function) for name, function in _FUNCTIONS_OF_ARRAYS.items()},
    "erf": _scalar(math.erf), "erfc": _scalar(math.erfc), "erf_inv": _scalar(_erf_inv), "lgamma": _scalar(math.lgamma),
    "reduce_sum": _reduce(np.add), "reduce_prod": _reduce(np.multiply), "reduce_max": _reduce(np.maximum),
    "reduce_min": _reduce(np.minimum), "reduce_and": _reduce(np.bitwise_and), "reduce_or": _reduce(np.bitwise_or),
    "reduce_xor": _reduce(np.bitwise_xor),
    "argmax": lambda run, options, types, x: [x.argmax(options["axes"][0])],
    "argmin": lambda run, options, types, x: [x.argmin(options["axes"][0])],
    "cumsum": _cumulative(np.add), "cumprod": _cumulative(np.multiply), "cummax": _cumulative(np.maximum),
    "cummin": _cumulative(np.minimum),
    "select": _select, "power": _power_of, "reduce_precision": _reduce_precision,
    "round": lambda run, options, types, x: [np.rint(x) if options["even"] else np.trunc(x + np.copysign(0.5, x))],
    "convert": lambda run, options, types, x: [x.astype(types[0][0])],
    "broadcast": _broadcast, "reshape": lambda run, options, types, x: [x.reshape(types[0][1])], "iota": _iota,
    "transpose": lambda run, options, types, x: [x.transpose(options["axes"])],
    "reverse": lambda run, options, types, x: [np.flip(x, options["axes"])],
    "concatenate": lambda run, options, types, *arrays: [np.concatenate(arrays, options["axis"])],
    "pad": _pad, "slice": _slice, "dynamic_slice": _dynamic_slice, "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather, "scatter": _scatter, "sort": _sort, "top_k": _top_k, "dot": _dot, "convolution": _convolution,
    "window_max": _window(np.maximum, _lowest), "window_min": _window(np.minimum, _highest),
    "window_sum": _window(np.add, lambda dtype: np.zeros((), dtype)), "window_select_add": _window_select_add,
    "size": lambda run, options, types: [np.asarray(size(options["value"], run.sizes))],
    "scan": _scan, "while": _while, "cond": _cond,
}
