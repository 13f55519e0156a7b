"""Converts matrix products, convolutions, poolings, gathers, scatters, loops and branches to ONNX."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from fnet.export.onnx._functions import chosen, index
from fnet.export.onnx._graph import INT64, added, product, same, scaled

_LONGEST_WINDOW = 512  # elements of a window along an axis that are combined one after the other


def dot(e):
    (x_type, xs), (y_type, ys) = e.in_types
    (cx, cy), (bx, by) = e.options["contract"], e.options["batch"]
    if 0 in xs or 0 in ys:  # onnxruntime's MatMul refuses some empty operands
        return [e.g.expand(e.number(0), e.shape)]
    x, y = e.x(0), e.x(1)
    fx, fy = (
        [i for i in range(len(s)) if i not in (*c, *b)] for s, c, b in ((xs, cx, bx), (ys, cy, by))
    )
    x = e.g.transpose(x, [*bx, *fx, *cx])
    y = e.g.transpose(y, [*by, *cy, *fy])
    of = lambda shape, axes: [shape[i] for i in axes]
    batch = of(xs, bx)
    # MatMul broadcasts over leading axes, so without batch axes the left operand keeps its free
    # axes.
    keep = not bx and len(cx) == 1 and len(fx) >= 1
    left = of(xs, fx) if keep else [*batch, product(of(xs, fx))]
    x = e.g.reshape(x, [*batch, *of(xs, fx), *of(xs, cx)], [*left, product(of(xs, cx))])
    y = e.g.reshape(
        y, [*batch, *of(ys, cy), *of(ys, fy)], [*batch, product(of(ys, cy)), product(of(ys, fy))]
    )
    if x_type in (np.int8, np.uint8) and y_type in (np.int8, np.uint8) and e.dtype == np.int32:
        z = e.g.op("MatMulInteger", x, y)
    else:
        compute = np.dtype(np.float32) if e.dtype.kind in "fV" and e.dtype.itemsize < 4 else e.dtype
        x, y = (a if t == compute else e.g.cast(a, compute) for a, t in ((x, x_type), (y, y_type)))
        z = e.g.op("MatMul", x, y)
        z = z if compute == e.dtype else e.g.cast(z, e.dtype)
    return [e.g.reshape(z, [*left, product(of(ys, fy))], e.shape)]


def convolution(e):
    options, rank = e.options, len(e.shape) - 2
    if options["batch_groups"] != 1:
        raise NotImplementedError(
            "a convolution with groups of the batch, as in gradients of grouped convolutions"
        )
    x = e.g.transpose(e.x(0), options["input"])  # [b, i, *space]
    shape = [e.in_types[0][1][i] for i in options["input"]]
    kernel = e.g.transpose(e.x(1), options["kernel"])  # [o, i, *window]
    window = [e.in_types[1][1][i] for i in options["kernel"]][2:]
    padding = options["padding"]
    dynamic = any(not isinstance(n, int) or n < 0 for pair in padding for n in pair)
    if dynamic or any(d != 1 for d in options["input_dilation"]):
        spaced = [[low, high, d - 1] for (low, high), d in zip(padding, options["input_dilation"])]
        x, shape = e.g.pad(x, shape, [[0, 0, 0], [0, 0, 0], *spaced], e.number(0))
        padding = [[0, 0]] * rank
    pads = [low for low, _ in padding] + [high for _, high in padding]
    known = {"kernel_shape": window} if all(isinstance(n, int) for n in window) else {}
    y = e.g.op(
        "Conv",
        x,
        kernel,
        strides=options["strides"],
        pads=pads,
        dilations=options["dilation"],
        group=options["groups"],
        **known,
    )
    return [e.g.transpose(y, list(map(int, np.argsort(options["output"]))))]


def _fits_pooling(e) -> bool:
    """Whether onnxruntime has a pooling for the window: of 1 to 3 axes of a floating-point array."""
    options = e.options
    axes = [
        i
        for i, (w, s, p) in enumerate(
            zip(options["window"], options["strides"], options["padding"])
        )
        if w != 1 or s != 1 or p != [0, 0]
    ]
    return 1 <= len(axes) <= 3 and e.dtype in (np.float32, np.float16)


def _pooled(e, x, start, kind: str, **attributes):
    """Converts a pooling. ONNX pools the last axes of arrays [batch, channels, *space], so axes
    that are not pooled are moved to the front."""
    options, shape = e.options, e.in_types[0][1]
    padding = options["padding"]
    if _explicit(options):
        spaced = [[low, high, d - 1] for (low, high), d in zip(padding, options["input_dilation"])]
        x, shape = e.g.pad(x, shape, spaced, e.number(start))
        padding = [[0, 0]] * len(shape)
    space = [
        i
        for i in range(len(shape))
        if options["window"][i] != 1 or options["strides"][i] != 1 or padding[i] != [0, 0]
    ]
    rest = [i for i in range(len(shape)) if i not in space]
    order = [*rest, *space]
    moved = [shape[i] for i in order]
    flat = (
        moved
        if len(rest) == 2
        else [product([shape[i] for i in rest]), 1, *(shape[i] for i in space)]
    )
    x = e.g.reshape(e.g.transpose(x, order), moved, flat)
    pick = lambda values: [values[i] for i in space]
    pads = [low for low, _ in pick(padding)] + [high for _, high in pick(padding)]
    y = e.g.op(
        kind,
        x,
        kernel_shape=pick(options["window"]),
        strides=pick(options["strides"]),
        pads=pads,
        **(
            {"dilations": pick(options["dilation"])}
            if set(pick(options["dilation"])) != {1}
            else {}
        ),
        **attributes,
    )
    result = [e.shape[i] for i in order]
    after = result if len(rest) == 2 else [flat[0], 1, *(e.shape[i] for i in space)]
    return e.g.transpose(e.g.reshape(y, after, result), list(map(int, np.argsort(order))))


def _explicit(options) -> bool:
    """Whether the input must be padded by a Pad, as padding that is symbolic, negative or as long
    as the window."""
    return any(
        not isinstance(n, int) or n < 0 or n >= w
        for pair, w in zip(options["padding"], options["window"])
        for n in pair
    ) or any(d != 1 for d in options["input_dilation"])


def _combined(e, x, start, kind: str):
    """Combines the elements of windows axis by axis, by an operator of two arrays."""
    options, shape = e.options, e.in_types[0][1]
    if 0 in e.shape:
        return e.g.expand(e.number(start), e.shape)
    if max(options["window"]) > _LONGEST_WINDOW:
        raise NotImplementedError(f"a window of {max(options['window'])} elements of {e.dtype}")
    spaced = [
        [low, high, d - 1] for (low, high), d in zip(options["padding"], options["input_dilation"])
    ]
    x, _ = e.g.pad(x, shape, spaced, e.number(start))
    for axis, (window, step, dilation, n) in enumerate(
        zip(options["window"], options["strides"], options["dilation"], e.shape)
    ):
        total = None
        for i in range(window) if window > 1 or step > 1 else ():
            tap = e.g.slice(
                x, i * dilation, added(scaled(n, step), i * dilation - step + 1), axis, step
            )
            total = tap if total is None else e.g.op(kind, total, tap)
        x = x if total is None else total
    sums = kind == "Add" and e.dtype.kind == "f" and max(options["window"]) > 1
    return e.g.without_negative_zeros(x) if sums else x


def _ends(e):
    """Returns the smallest and the largest number of the dtype."""
    if e.dtype.kind == "b":
        return False, True
    if e.dtype.kind == "f":
        return -np.inf, np.inf
    return np.iinfo(e.dtype).min, np.iinfo(e.dtype).max


def window_max(e):
    return _window_extreme(e, "Max", "Or", _ends(e)[0], lambda x: _pooled(e, x, -np.inf, "MaxPool"))


def window_min(e):
    return _window_extreme(
        e,
        "Min",
        "And",
        _ends(e)[1],
        lambda x: e.g.op("Neg", _pooled(e, e.g.op("Neg", x), -np.inf, "MaxPool")),
    )


def _window_extreme(e, kind, boolean, start, pool):
    """MaxPool overlooks some NaN, and returns the lowest finite number for windows of -inf, so it
    is used for finite arrays only. The sum of absolute values states whether an array is finite."""
    x = e.x(0)
    combined = lambda: [_combined(e, x, start, boolean if e.dtype.kind == "b" else kind)]
    if not _fits_pooling(e) or 0 in (*e.shape, *e.in_types[0][1]):
        return combined()
    total = e.g.op("ReduceL1", x, keepdims=0)
    finite = e.g.op("Less", total, e.number(np.inf))
    # A window of padding only.
    alone = any(
        n >= w
        for pair, w in zip(e.options["padding"], e.options["window"])
        for n in pair
        if isinstance(n, int)
    )
    return combined() if alone else e.branch(finite, lambda: [pool(x)], combined)


def window_sum(e):
    x, count = e.x(0), int(np.prod(e.options["window"]))
    dilated = any(d != 1 for d in e.options["dilation"])
    if (
        not _fits_pooling(e)
        or 0 in (*e.shape, *e.in_types[0][1])
        or (dilated and e.model.opset < 19)
        or count > 4096
    ):
        return [_combined(e, x, 0, "Add")]
    mean = _pooled(e, x, 0, "AveragePool", count_include_pad=1)
    return [e.g.op("Mul", mean, e.number(count))]


def window_select_add(e):
    """Converts the gradient of a max-pooling or min-pooling.

    Each element of the source (the gradient of the pooled array) belongs to a window, and is added
    at the position of the largest (or smallest) element of this window. Like XLA, the search
    through a window keeps the selected element while it is at least (at most) the next one: the
    first of several equal elements, and the element after a NaN.
    """
    options = e.options
    (_, out), (_, shape) = e.in_types[0], e.in_types[1]
    source, zero = e.x(0), e.number(0)
    keeps = "GreaterOrEqual" if options["largest"] else "LessOrEqual"
    spaced = [[low, high, 0] for low, high in options["padding"]]
    x, wide = e.g.pad(e.x(1), shape, spaced, e.number(_ends(e)[0 if options["largest"] else 1]))

    def tapped(at):
        tap = x
        for axis, (i, s, n) in enumerate(zip(at, options["strides"], out)):
            if options["window"][axis] > 1 or s > 1:
                tap = e.g.slice(tap, i, added(scaled(n, s), i - s + 1), axis, s)
        return tap

    places = list(itertools.product(*map(range, options["window"])))
    best, place = tapped(places[0]), e.g.constant(0, INT64)
    for i, at in enumerate(places[1:], 1):
        tap = tapped(at)
        keep = e.g.op(keeps, best, tap)
        best = e.g.op("Where", keep, best, tap)
        place = e.g.op("Where", keep, place, e.g.constant(i, INT64))
    total = None
    for i, at in enumerate(places):
        here = e.g.op("Equal", place, e.g.constant(i, INT64))
        part, size = e.g.op("Where", here, source, zero), out
        for axis, s in enumerate(options["strides"]):
            part, size = e.g.dilate(part, size, axis, s, zero)
        rest = [
            added(n, f"-({m}) - {i}")
            if not isinstance(n, int) or not isinstance(m, int)
            else n - m - i
            for n, m, i in zip(wide, size, at)
        ]
        part, _ = e.g.pad(part, size, [[i, n, 0] for i, n in zip(at, rest)], zero)
        total = part if total is None else e.g.op("Add", total, part)
    for axis, ((low, high), n) in enumerate(zip(options["padding"], wide)):
        if low != 0 or high != 0:
            stop = n - high if isinstance(n, int) and isinstance(high, int) else f"({n}) - ({high})"
            total = e.g.slice(total, low, stop, axis)
    return [total]


def _indices(e, shape, sizes, dropped):
    """Computes the index array of a gather or scatter that accesses windows (blocks of elements) of
    its operand.

    `sizes` contains the size of a window along each axis of the operand. The function returns a
    tuple of four values, `indices`, `inside`, `axes` and `windows`. `axes` is the list of the
    operand's axes along which ONNX selects elements by index. `indices` is the index array,
    [*batch, *windows, len(axes)]. Each vector along the last axis of `indices` contains one index
    into the operand for each axis in `axes`. `inside` is a Boolean array that states which windows
    lie inside the operand, or None if no window can lie outside. `windows` is the list of the
    operand's axes along which the size of a window is greater than 1 and less than the size of the
    axis.
    """
    options, indices = e.options, e.x(1)
    index_dtype, index_shape = e.in_types[1]
    batch = len(index_shape) - 1
    partial = [a for a in range(len(shape)) if not same(sizes[a], shape[a])]
    apart = {*dropped, *options["batch"]}
    windows = [a for a in partial if a not in apart and sizes[a] != 1]
    selected = [a for a in options["indexed"] if a in partial or sizes[a] == 1]
    axes = sorted({*options["batch"], *windows, *selected})
    flat = batch + len(windows)
    where = [*index_shape[:-1], *(sizes[a] for a in windows)]

    parts, inside = [], None
    for a in axes:
        if a in options["indexed"]:
            column = e.g.constant(options["indexed"].index(a), INT64)
            start = index(e, e.g.op("Gather", indices, column, axis=-1), index_dtype)
            last = e.g.op("Sub", e.g.size(shape[a]), e.g.size(sizes[a]))
            ok = _between(e, start, last)
            inside = ok if inside is None else e.g.op("And", inside, ok)
            start = e.g.op("Max", e.g.op("Min", start, last), e.g.integers(0))
            if windows and batch:
                start = e.g.unsqueeze(start, *range(batch, flat))
        elif a in options["batch"]:
            along = options["index_batch"][options["batch"].index(a)]
            start = _range(e, shape[a], along, flat)
        else:
            start = e.g.integers(0)
        if a in windows:
            start = e.g.op("Add", start, _range(e, sizes[a], batch + windows.index(a), flat))
        start = e.g.expand(start, where) if where else e.g.op("Squeeze", start)
        parts.append(e.g.unsqueeze(start, len(where)))
    if inside is not None and not batch:
        inside = e.g.op("Squeeze", inside)
    if inside is not None and windows:
        inside = e.g.unsqueeze(inside, *range(batch, flat))
    together = e.g.op("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]
    return together, inside, axes, windows


def _between(e, x, last):
    """Returns a Boolean array: whether 0 <= x <= last."""
    return e.g.op(
        "And",
        e.g.op("GreaterOrEqual", x, e.g.integers(0)),
        e.g.op("LessOrEqual", x, last),
    )


def _range(e, n, axis, rank):
    """Returns the integers 0, 1, ..., n - 1 along one axis of an array with `rank` axes. The other
    axes of the array have size 1."""
    if isinstance(n, int):
        numbers = e.g.constant(np.arange(n), INT64)
    else:
        zero, one = e.g.constant(0, INT64), e.g.constant(1, INT64)
        numbers = e.g.op("Range", zero, e.g.op("Squeeze", e.g.size(n)), one)
    return e.g.reshape(numbers, [n], [n if i == axis else 1 for i in range(rank)])


def gather(e):
    options, (_, shape), batch = e.options, e.in_types[0], e.in_types[1][1][:-1]
    sizes, offset = options["sizes"], options["offset"]
    # An axis of the result is named by the axis of x from which it comes, or ("b", i) for axis i
    # of the batch of indices.
    batch_axes = [("b", i) for i in range(len(batch))]
    if _takes_rows(e):
        (axis,) = options["indexed"]
        y, inside = _rows(e, axis, shape, batch)
        windows = []
        rest = [a for a in range(len(shape)) if a != axis]
        order = [*rest[:axis], *batch_axes, *rest[axis:]]
    else:
        indices, inside, axes, windows = _indices(e, shape, sizes, options["collapsed"])
        rest = [a for a in range(len(shape)) if a not in axes]
        y = e.g.op("GatherND", e.g.transpose(e.x(0), [*axes, *rest]), indices)
        order = [*batch_axes, *windows, *rest]

    if options["fill"] is not None and inside is not None:
        mask = inside
        if batch:
            lengths = [batch[a[1]] if a in batch_axes else 1 for a in order]
            mask = e.g.reshape(inside, [*batch, *[1] * len(windows)], lengths)
        y = chosen(e, e.g.opposite(mask), e.number(options["fill"]), y)

    apart = {*options["collapsed"], *options["batch"]}
    kept = [a for a in range(len(shape)) if a not in apart]
    free = iter(batch_axes)
    wanted = [kept[offset.index(i)] if i in offset else next(free) for i in range(len(e.shape))]
    present = [a for a in wanted if a in order]  # the others are indexed windows of size 1
    y = e.g.transpose(y, [order.index(a) for a in present])
    sizes_of = {a: sizes[a] for a in kept} | dict(zip(batch_axes, batch))
    return [e.g.reshape(y, [sizes_of[a] for a in present], e.shape)]


def _takes_rows(e) -> bool:
    """Whether a gather selects whole rows of one axis, such as embeddings."""
    options, (_, shape) = e.options, e.in_types[0]
    indexed = options["indexed"]
    if len(indexed) != 1 or options["collapsed"] != indexed or options["batch"]:
        return False
    return all(same(options["sizes"][a], n) for a, n in enumerate(shape) if a != indexed[0])


def _rows(e, axis, shape, batch):
    """Returns the rows of a gather that selects whole rows, and which of the indices are in range."""
    x = e.x(0)
    index_dtype, index_shape = e.in_types[1]
    last = e.g.op("Sub", e.g.size(shape[axis]), e.g.integers(1))
    row = index(e, e.g.reshape(e.x(1), index_shape, batch), index_dtype)
    inside = _between(e, row, last)
    row = e.g.op("Max", e.g.op("Min", row, last), e.g.integers(0))
    y = e.g.op("Gather", x, row if batch else e.g.reshape(row, [1], []), axis=axis)
    return y, inside


def scatter(e):
    options, (_, shape), (_, update_shape) = e.options, e.in_types[0], e.in_types[2]
    kept = [
        a for a in range(len(shape)) if a not in options["inserted"] and a not in options["batch"]
    ]
    sizes = [1] * len(shape)
    for a, at in zip(kept, options["window"]):
        sizes[a] = update_shape[at]
    indices, inside, axes, windows = _indices(e, shape, sizes, options["inserted"])
    rest = [a for a in range(len(shape)) if a not in axes]
    at = dict(zip(kept, options["window"]))
    batch = [i for i in range(len(update_shape)) if i not in options["window"]]
    ones = [a for a in kept if a not in windows and a not in rest]
    order = [*batch, *(at[a] for a in windows), *(at[a] for a in rest), *(at[a] for a in ones)]
    moved = [update_shape[i] for i in order]
    updates = e.g.reshape(e.g.transpose(e.x(2), order), moved, moved[: len(moved) - len(ones)])
    x, n = e.g.transpose(e.x(0), [*axes, *rest]), None
    if (
        inside is not None and not options["clip"]
    ):  # an update that is dropped goes to an additional row
        n = shape[axes[0]]
        row = [1, *(shape[a] for a in (*axes, *rest)[1:])]
        x = e.g.op("Concat", x, e.g.expand(e.number(0), row), axis=0)
        beyond = e.g.size(n)
        if len(axes) > 1:
            beyond = e.g.op("Concat", beyond, e.g.integers(*[0] * (len(axes) - 1)), axis=0)
        indices = e.g.op("Where", e.g.unsqueeze(inside, len(batch) + len(windows)), indices, beyond)
    y = _scattered(e, x, indices, updates)
    y = y if n is None else e.g.slice(y, 0, n, 0)
    return [e.g.transpose(y, list(map(int, np.argsort([*axes, *rest]))))]


def _scattered(e, x, indices, updates):
    kind = {"replace": "none"}.get(e.options["kind"], e.options["kind"])
    scattered = lambda x, updates, kind: e.g.op("ScatterND", x, indices, updates, reduction=kind)
    if kind == "none":
        return scattered(x, updates, kind)
    wide = {"bool": "uint8", "float16": "float32"}.get(e.dtype.name)
    if wide is None:
        y = scattered(x, updates, kind)
    else:
        wide = np.dtype(wide)
        y = e.g.cast(scattered(e.g.cast(x, wide), e.g.cast(updates, wide), kind), e.dtype)
    if kind in ("min", "max") and e.dtype.kind == "f":  # ScatterND overlooks NaN
        flags = [e.g.cast(e.g.op("IsNaN", a), np.int32) for a in (x, updates)]
        nan = e.g.cast(scattered(*flags, "max"), bool)
        y = e.g.op("Where", nan, e.number(np.nan), y)
    return y


def scan(e):
    options = e.options
    a, b = options["consts"], options["consts"] + options["carry"]
    length, reverse = options["length"], options["reverse"]
    names = [e.x(i) for i in range(len(e.ins))]
    graph = e.g.inner()
    index, test = e.model.unique("iteration"), e.model.unique("condition")
    carries = [e.model.unique("carry") for _ in range(a, b)]
    graph.inputs = [
        (index, (INT64, [])),
        (test, (np.dtype(bool), [])),
        *zip(carries, e.in_types[a:b]),
    ]
    at = index
    if reverse:
        at = graph.op(
            "Sub", graph.op("Squeeze", graph.op("Sub", e.g.size(length), e.g.integers(1))), index
        )
    slices = [graph.op("Gather", x, at, axis=0) for x in names[b:]]
    outputs = e.body(graph, options["body"], [*names[:a], *carries, *slices])
    graph.outputs = [graph.op("Identity", test), *(graph.op("Identity", y) for y in outputs)]
    trips = e.g.op("Squeeze", e.g.size(length))
    count = len(e.out_types)
    results = e.g.op("Loop", trips, "", *names[a:b], outputs=count, body=graph.proto("scan"))
    results = [results] if count == 1 else results
    carried, stacked = results[: b - a], results[b - a :]
    if not isinstance(length, int):  # after no iteration, onnxruntime does not know the other sizes
        stacked = [
            e.g.op("Reshape", y, e.g.shape(shape), allowzero=1)
            for y, (_, shape) in zip(stacked, e.out_types[b - a :])
        ]
    if reverse:
        lowest = np.iinfo(np.int64).min
        stacked = [
            e.g.op(
                "Slice",
                y,
                e.g.integers(-1),
                e.g.integers(lowest),
                e.g.integers(0),
                e.g.integers(-1),
            )
            for y in stacked
        ]
    return [*carried, *stacked]


def while_loop(e):
    options = e.options
    a, b = options["test_consts"], options["test_consts"] + options["body_consts"]
    names = [e.x(i) for i in range(len(e.ins))]
    (start,) = e.body(e.g, options["test"], [*names[:a], *names[b:]])
    graph = e.g.inner()
    index, test = e.model.unique("iteration"), e.model.unique("condition")
    carries = [e.model.unique("carry") for _ in names[b:]]
    graph.inputs = [
        (index, (INT64, [])),
        (test, (np.dtype(bool), [])),
        *zip(carries, e.in_types[b:]),
    ]
    outputs = e.body(graph, options["body"], [*names[a:b], *carries])
    (again,) = e.body(graph, options["test"], [*names[:a], *outputs])
    graph.outputs = [graph.op("Identity", y) for y in (again, *outputs)]
    count = len(e.out_types)
    results = e.g.op("Loop", "", start, *names[b:], outputs=count, body=graph.proto("while"))
    return [results] if count == 1 else results


def cond(e):
    branches = e.options["branches"]
    names = [e.x(i) for i in range(1, len(e.ins))]
    index = e.x(0)

    def chosen(graph, i):
        """Adds ONNX nodes that select and compute one of the branches i, i + 1, and so on. Returns
        the names of the outputs. If `index` is at most i, the nodes select branch i. If `index` is
        greater than the number of the last branch, the nodes select the last branch. Otherwise, the
        nodes select the branch with the number `index`."""
        if i == len(branches) - 1:
            return e.body(graph, branches[i], names)
        first, rest = graph.inner(), graph.inner()
        first.outputs = [first.op("Identity", y) for y in e.body(first, branches[i], names)]
        rest.outputs = [rest.op("Identity", y) for y in chosen(rest, i + 1)]
        test = graph.op("LessOrEqual", graph.cast(index, INT64), graph.constant(i, INT64))
        count = len(e.out_types)
        results = graph.op(
            "If",
            test,
            outputs=count,
            then_branch=first.proto("then"),
            else_branch=rest.proto("else"),
        )
        return [results] if count == 1 else results

    return chosen(e.g, 0)


OPERATIONS: dict[str, Callable] = {
    "dot": dot,
    "convolution": convolution,
    "window_max": window_max,
    "window_min": window_min,
    "window_sum": window_sum,
    "window_select_add": window_select_add,
    "gather": gather,
    "scatter": scatter,
    "scan": scan,
    "while": while_loop,
    "cond": cond,
}
