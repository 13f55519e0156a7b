"""What each primitive does to each axis: one rule per primitive, asked by every analysis of axes.

A rule is a function `rule(eqn, new)` that returns (operands, results): the axes of each operand and
of each result of the equation, as letters (see `AxisMap`). The argument `new` is a `Drawing`, which
makes the letters and records why the size of a letter cannot change.

If the parameters of a primitive contain sizes, the table has a second function
`resized(eqn, axes)`, which returns the parameters that are different for other sizes of the
letters. The argument `axes` is the `AxisMap` of the equation with the new sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from fnet.axes._axis_map import Array, AxisMap, Drawing, Letter, Letters
from fnet.jaxpr._equations import BILINEAR, Product, product
from fnet.jaxpr._primitives import POINTWISE, description
from fnet.jaxpr._records import options

Sides = tuple[Sequence[Array], Sequence[Array]]  # operands, results
Rule = Callable[[Any, Drawing], Sides]
Resized = Callable[[Any, AxisMap], dict[str, Any]]


def axis_map(eqn: Any) -> AxisMap | None:
    """Returns the axes of an equation by letters, or None if its primitive has no rule.

    Calls, loops and branches have no rule: an analysis visits the equations inside them.
    """
    if (describe := description(eqn.primitive).axes) is not None:
        described = _described(eqn.primitive.name, *describe(eqn))
        return described if len(described.results) == len(eqn.outvars) else None
    rule = _rule(eqn)
    if rule is None:
        return None
    new = Drawing()
    operands, results = rule(eqn, new)
    return AxisMap(new.sizes, operands, results, new.fixed)


def _rule(eqn: Any) -> Rule | None:
    found = product(eqn)
    if found is not None and found.op.name in BILINEAR:
        return functools.partial(_multiply, found)
    return _pointwise if eqn.primitive.name in POINTWISE else _RULES.get(eqn.primitive.name)


def resized(eqn: Any, axes: AxisMap) -> dict[str, Any] | None:
    """Returns the parameters of an equation that are different for the sizes in `axes`, or None if
    its primitive has no parameters that depend on sizes."""
    change = _RESIZED.get(eqn.primitive.name)
    return change(eqn, axes) if change is not None else None


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _without(axes: Array, removed: Sequence[int]) -> Array:
    return tuple(axis for i, axis in enumerate(axes) if i not in removed)


def _with(axes: Array, at: int, axis: Letters) -> Array:
    """Returns the axes of an array with another axis at the position `at`."""
    return (*axes[:at], axis, *axes[at + 1 :])


def _described(
    name: str, sizes: dict, free: str, operands: Sequence[str], results: Sequence[str]
) -> AxisMap:
    """Translates the description of one of fnet's own primitives (`Description.axes`)."""
    why = f"an axis of {name} other than heads"
    read = lambda texts: [tuple(map(tuple, text.split())) for text in texts]
    fixed = {letter: why for letter in sizes if letter not in free}
    return AxisMap(sizes, read(operands), read(results), fixed)


def _same(eqn: Any, new: Drawing) -> Sides:
    arrays = new.arrays(eqn.invars)
    return arrays, arrays


def _fixed(why: str) -> Rule:
    def rule(eqn: Any, new: Drawing) -> Sides:
        return new.arrays(eqn.invars, why), new.arrays(eqn.outvars, why)

    return rule


def _created(eqn: Any, new: Drawing) -> Sides:
    return new.arrays(eqn.invars), new.arrays(eqn.outvars)


def _random_bits(eqn: Any, new: Drawing) -> Sides:
    (keys,) = new.arrays(eqn.invars, _KEYS)
    numbers = _shape(eqn.outvars[0])[len(keys) :]
    return [keys], [(*keys, *map(new.axis, numbers))]


def _keys(eqn: Any, new: Drawing) -> Sides:
    """Seeds and the words of raw keys begin with the axes of the keys; a number that is folded into
    all keys does not."""
    arrays = (*eqn.invars, *eqn.outvars)
    keys = next(v for v in arrays if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key))
    shared = new.array(keys, _KEYS)

    def array(v: Any) -> Array:
        if _shape(v)[: len(shared)] != _shape(keys):
            return new.array(v, _KEYS)
        return (*shared, *(new.axis(size, _KEYS) for size in _shape(v)[len(shared) :]))

    return list(map(array, eqn.invars)), list(map(array, eqn.outvars))


_KEYS = "an axis of random keys"


def _bitcast(eqn: Any, new: Drawing) -> Sides:
    if _shape(eqn.outvars[0]) == _shape(eqn.invars[0]):
        return _same(eqn, new)
    return _fixed("converted to another number of values")(eqn, new)


def _pointwise(eqn: Any, new: Drawing) -> Sides:
    """An axis of size 1 in an operand is broadcast, and a scalar operand has no axes."""
    out = new.array(eqn.outvars[0])
    operands = []
    for v in eqn.invars:
        sizes = zip(_shape(v), out)
        operands.append(tuple(x if n == new.sizes[x[0]] else new.axis(n) for n, x in sizes))
    return operands, [out] * len(eqn.outvars)


def _broadcast(eqn: Any, new: Drawing) -> Sides:
    x, out = new.array(eqn.invars[0]), list(new.array(eqn.outvars[0]))
    for axis, at in zip(x, options(eqn).broadcast_dimensions):
        if new.sizes[axis[0]] == new.sizes[out[at][0]]:
            out[at] = axis
    sizes = new.arrays(eqn.invars[1:])  # symbolic sizes are operands
    return [x, *sizes], [tuple(out)]


def _transpose(eqn: Any, new: Drawing) -> Sides:
    x = new.array(eqn.invars[0])
    return [x], [tuple(x[i] for i in options(eqn).permutation)]


def _squeeze(eqn: Any, new: Drawing) -> Sides:
    x = new.array(eqn.invars[0])
    return [x], [_without(x, options(eqn).dimensions)]


def _expand(eqn: Any, new: Drawing) -> Sides:
    x = new.array(eqn.invars[0])
    out = list(x)
    for i in sorted(options(eqn).dimensions):
        out.insert(i, ())
    return [x], [tuple(out)]


def _reshape(eqn: Any, new: Drawing) -> Sides:
    """In a reshape, a group of adjacent axes of the operand corresponds to a group of adjacent axes
    of the result if the products of their sizes are equal. Each group is split into the factors that
    both sides have in common."""
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if 0 in before:
        return _fixed("reshaped without values")(eqn, new)
    order = tuple(options(eqn).dimensions or range(len(before)))
    before = tuple(before[i] for i in order)
    x = [_Factors(size) for size in before]
    out = [_Factors(size) for size in after]
    for left, right in _groups(before, after):
        _match(x[left], out[right], new)
    read = [axis.letters(new) for axis in x]
    operand = tuple(read[order.index(i)] for i in range(len(before)))
    others = new.arrays(eqn.invars[1:])  # symbolic sizes are operands
    return [operand, *others], [tuple(axis.letters(new) for axis in out)]


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yields the smallest slices of the axes whose sizes have equal products."""
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (m := math.prod(before[i0:i])) != (n := math.prod(after[j0:j])):
            known = isinstance(m, int) and isinstance(n, int)  # other sizes are symbolic
            if _divides(m, n) or (known and m < n):
                i += 1
            else:
                j += 1
        yield slice(i0, i), slice(j0, j)


def _divides(m: int, n: int) -> bool:
    return m != 0 and n % m == 0


class _Factors:
    """The factors of an axis that have been found so far: some major ones, some minor ones, and
    the size that is left between them."""

    def __init__(self, size: int):
        self.left = size
        self.major: list[Letter] = []
        self.minor: list[Letter] = []

    def letters(self, new: Drawing) -> Letters:
        rest = [] if self.left == 1 else [new.letter(self.left, _UNEVEN)]
        return (*self.major, *rest, *self.minor)


_UNEVEN = "reshaped to sizes that are not factors of it"


def _match(x: list[_Factors], out: list[_Factors], new: Drawing) -> None:
    """Gives the common factors of two groups of axes the same letters. Factors are taken from the
    minor end; what does not divide there is tried from the major end."""
    for end in (-1, 0):
        while (left := _unmatched(x)) and (right := _unmatched(out)):
            a, b = left[end], right[end]
            if _divides(a.left, b.left):
                factor = a.left
            elif _divides(b.left, a.left):
                factor = b.left
            else:
                break
            letter = new.letter(factor)
            for axis in (a, b):
                axis.left = axis.left // factor
                if end:
                    axis.minor.insert(0, letter)
                else:
                    axis.major.append(letter)


def _unmatched(axes: list[_Factors]) -> list[_Factors]:
    return [axis for axis in axes if not axis.left == 1]


def _reduced(over: str | None) -> Rule:
    """Returns the rule of a reduction. `over` states why the size of a reduced axis cannot change,
    such as "the maximum over it is taken". It is None for a sum, because zeros may be left out of
    a sum."""

    def rule(eqn: Any, new: Drawing) -> Sides:
        arrays, axes = new.arrays(eqn.invars), options(eqn).axes
        if over:
            for array in arrays:
                new.fix(over, *(array[i] for i in axes))
        kept = [_without(array, axes) for array in arrays]
        return arrays, kept[: len(eqn.outvars)]

    return rule


def _along(parameter: str, why: str) -> Rule:
    """Returns the rule of an operation that keeps shapes and works along the axes in the parameter
    `parameter`, such as a cumulative sum. The text `why` is the reason why their sizes cannot
    change."""

    def rule(eqn: Any, new: Drawing) -> Sides:
        array, axes = new.array(eqn.invars[0]), getattr(options(eqn), parameter)
        for i in axes if isinstance(axes, (tuple, list)) else (axes,):
            new.fix(why, array[i])
        return [array] * len(eqn.invars), [array] * len(eqn.outvars)

    return rule


def _multiply(found: Product, eqn: Any, new: Drawing) -> Sides:
    lhs, right, *others = new.arrays(eqn.invars)
    if found.op.name != "dot_general":
        data, kernel, out = _convolve(eqn, found, new)
        return [data, kernel, *others], [out]
    contract, batch = found.dimensions
    rhs = list(right)
    for a, b in (*zip(*contract), *zip(*batch)):
        rhs[b] = lhs[a]
    own_left = _without(lhs, (*contract[0], *batch[0]))
    own_right = _without(rhs, (*contract[1], *batch[1]))
    result = (*(lhs[i] for i in batch[0]), *own_left, *own_right)
    return [lhs, rhs, *others], [result]


def _convolve(eqn: Any, found: Product, new: Drawing) -> tuple[Array, Array, Array]:
    """The channels of a convolution with groups are "(g i)" in the data, "i" and "(g o)" in the
    kernel, and "(g o)" in the result."""
    spec, (groups, batch_groups) = found.dimensions, found.groups
    data, kernel = eqn.invars[:2]
    if batch_groups > 1:
        why = "a convolution with groups of examples"
        return new.array(data, why), new.array(kernel, why), new.array(eqn.outvars[0], why)
    arrays = []
    for v, order, why in (
        (data, spec.lhs_spec, "space"),
        (kernel, spec.rhs_spec, "the window of a convolution"),
        (eqn.outvars[0], spec.out_spec, "space"),
    ):
        array: list[Letters] = [()] * len(order)
        for i in order[2:]:
            array[i] = new.axis(_shape(v)[i], why)
        arrays.append(array)
    lhs, rhs, out = arrays
    batch = new.axis(_shape(data)[spec.lhs_spec[0]])
    # Only JAX's own convolution has a parameter that follows the number of groups.
    own = eqn.primitive.name == "conv_general_dilated"
    foreign = None if own else "the groups of a convolution that is no primitive of JAX"
    group = () if groups == 1 else new.axis(groups, foreign)
    inputs = new.axis(_shape(kernel)[spec.rhs_spec[1]])
    outputs = new.axis(_shape(kernel)[spec.rhs_spec[0]] // groups)
    lhs[spec.lhs_spec[0]] = out[spec.out_spec[0]] = batch
    lhs[spec.lhs_spec[1]] = (*group, *inputs)
    rhs[spec.rhs_spec[1]] = inputs
    rhs[spec.rhs_spec[0]] = out[spec.out_spec[1]] = (*group, *outputs)
    return tuple(lhs), tuple(rhs), tuple(out)


def _window(eqn: Any, new: Drawing) -> Sides:
    window, operands, results = options(eqn), new.arrays(eqn.invars), []
    per_axis = list(zip(window.window_dimensions, window.window_strides, window.padding))
    for v, array in zip(eqn.outvars, operands):
        out = []
        for axis, size, (width, stride, padding) in zip(array, _shape(v), per_axis):
            if (width, stride, *padding) == (1, 1, 0, 0) and size == new.sizes[axis[0]]:
                out.append(axis)
            else:
                new.fix("space", axis)
                out.append(new.axis(size, "space"))
        results.append(tuple(out))
    return operands, results


def _slice(eqn: Any, new: Drawing) -> Sides:
    """A slice of an axis that consists of parts of the slice's size is one of these parts."""
    piece, sizes, wanted = options(eqn), _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    strides = piece.strides or (1,) * len(sizes)
    operand, out = [], []
    for n, m, start, stride in zip(sizes, wanted, piece.start_indices, strides):
        if m == n:
            operand.append(new.axis(n))
            out.append(operand[-1])
        elif m and stride == 1 and n % m == 0 and start % m == 0:
            out.append(new.axis(m))
            operand.append((new.letter(n // m, "sliced into parts"), *out[-1]))
        else:
            operand.append(new.axis(n, "sliced"))
            out.append(new.axis(m, "sliced"))
    return [tuple(operand)], [tuple(out)]


def _split(eqn: Any, new: Drawing) -> Sides:
    (at, sizes), array = options(eqn), new.array(eqn.invars[0])
    if len(set(sizes)) == 1 and sizes[0]:
        part = new.axis(sizes[0])
        whole = (new.letter(len(sizes), "split into parts"), *part)
        return [_with(array, at, whole)], [_with(array, at, part)] * len(sizes)
    why = "split into unequal parts"
    new.fix(why, array[at])
    return [array], [_with(array, at, new.axis(size, why)) for size in sizes]


def _concatenate(eqn: Any, new: Drawing) -> Sides:
    at, first = options(eqn).dimension, new.array(eqn.invars[0])
    sizes = [_shape(v)[at] for v in eqn.invars]
    if len(set(sizes)) == 1:
        count = new.letter(len(sizes), "concatenated")
        return [first] * len(sizes), [_with(first, at, (count, *first[at]))]
    why = "concatenated with an axis of another size"
    operands = [_with(first, at, new.axis(size, why)) for size in sizes]
    return operands, [_with(first, at, new.axis(sum(sizes), why))]


def _stack(eqn: Any, new: Drawing) -> Sides:
    at, first = options(eqn).axis, new.array(eqn.invars[0])
    count = new.axis(len(eqn.invars), "stacked")
    return [first] * len(eqn.invars), [(*first[:at], count, *first[at:])]


def _unstack(eqn: Any, new: Drawing) -> Sides:
    at, array = options(eqn).axis, new.array(eqn.invars[0])
    new.fix("unstacked", array[at])
    return [array], [_without(array, (at,))] * len(eqn.outvars)


def _tile(eqn: Any, new: Drawing) -> Sides:
    array = new.array(eqn.invars[0])
    counts = [new.axis(count, "tiled") for count in options(eqn).reps]
    return [array], [tuple((*count, *axis) for count, axis in zip(counts, array))]


def _changed(eqn: Any, new: Drawing, why: str, changed: Callable[[int], bool]) -> Sides:
    """Returns the axes of an operation that keeps an axis i of its first operand, or else, if
    `changed(i)`, makes an axis of a fixed size from it."""
    array, out = new.array(eqn.invars[0]), list(new.array(eqn.outvars[0]))
    for i, axis in enumerate(array):
        if changed(i):
            new.fix(why, axis, out[i])
        else:
            out[i] = axis
    return [array, *new.arrays(eqn.invars[1:])], [tuple(out)]


def _pad(eqn: Any, new: Drawing) -> Sides:
    padding = options(eqn).padding_config
    return _changed(eqn, new, "padded", lambda i: padding[i] != (0, 0, 0))


def _dynamic_slice(eqn: Any, new: Drawing) -> Sides:
    before, after = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    why = "sliced at a computed position"
    return _changed(eqn, new, why, lambda i: before[i] != after[i])


def _dynamic_update_slice(eqn: Any, new: Drawing) -> Sides:
    array, given, *starts = new.arrays(eqn.invars)
    update = list(given)
    for i, axis in enumerate(array):
        if new.sizes[axis[0]] == new.sizes[update[i][0]]:
            update[i] = axis
        else:
            new.fix("updated at a computed position", axis, update[i])
    return [array, update, *starts], [array]


def _tie_batches(
    array: Array, batching: Sequence[int], indices: Array, at_indices: Sequence[int]
) -> list[Letters]:
    """Returns the axes of the operand of a gather or scatter, of which those in `batching` are batch
    axes of the indices."""
    tied = list(array)
    for i, j in zip(batching, at_indices):
        tied[i] = indices[j]
    return tied


def _windows(rank: int, positions: Sequence[int], removed: Sequence[int]) -> dict[int, int]:
    """Returns {axis of the operand: its position in each window} for a gather or scatter."""
    kept = [i for i in range(rank) if i not in removed]
    return dict(zip(kept, positions))


def _gather(eqn: Any, new: Drawing) -> Sides:
    numbers, sizes = options(eqn).dimension_numbers, options(eqn).slice_sizes
    shape, batching = _shape(eqn.invars[0]), numbers.operand_batching_dims
    operand, indices = new.arrays(eqn.invars)
    array = _tie_batches(operand, batching, indices, numbers.start_indices_batching_dims)
    new.fix("indices", indices[-1])

    result = list(new.array(eqn.outvars[0]))
    rows = [i for i in range(len(result)) if i not in numbers.offset_dims]
    for i, axis in zip(rows, indices):
        result[i] = axis
    removed = (*numbers.collapsed_slice_dims, *batching)
    windows = _windows(len(array), numbers.offset_dims, removed)
    for i, axis in enumerate(array):
        whole = sizes[i] == shape[i] and i not in numbers.start_index_map
        if i in windows and whole:
            result[windows[i]] = axis
        elif i in windows:
            new.fix("looked up by index", axis, result[windows[i]])
        elif i not in batching:
            new.fix("looked up by index", axis)
    return [array, indices], [result]


def _scatter(eqn: Any, new: Drawing) -> Sides:
    numbers = options(eqn).dimension_numbers
    shape, wanted = _shape(eqn.invars[0]), _shape(eqn.invars[2])
    batching = numbers.operand_batching_dims
    operand, indices, given = new.arrays(eqn.invars)
    array = _tie_batches(operand, batching, indices, numbers.scatter_indices_batching_dims)
    new.fix("indices", indices[-1])

    updates = list(given)
    rows = [i for i in range(len(updates)) if i not in numbers.update_window_dims]
    for i, axis in zip(rows, indices):
        updates[i] = axis
        if axis not in array:  # an update that is left out leaves the operand's value
            new.fix("updated by index", axis)
    removed = (*numbers.inserted_window_dims, *batching)
    windows = _windows(len(array), numbers.update_window_dims, removed)
    for i, axis in enumerate(array):
        moved = i in numbers.scatter_dims_to_operand_dims
        if i in windows and not moved and wanted[windows[i]] == shape[i]:
            updates[windows[i]] = axis
        elif i in windows:
            new.fix("updated by index", axis, updates[windows[i]])
        elif i not in batching:
            new.fix("updated by index", axis)
    return [array, indices, updates], [array]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("name", "optimization_barrier", "pvary", "pbroadcast", "device_put", "copy_p", "site"),
        _same,
    ),
    **dict.fromkeys(("iota", "empty"), _created),
    "random_bits": _random_bits,
    **{f"random_{name}": _keys for name in ("seed", "wrap", "unwrap", "fold_in")},
    "reduce_sum": _reduced(None),
    **{
        f"reduce_{name}": _reduced(f"the {what} over it is taken")
        for name, what in (
            ("max", "maximum"),
            ("min", "minimum"),
            ("prod", "product"),
            ("and", "conjunction"),
            ("or", "disjunction"),
            ("xor", "exclusive disjunction"),
        )
    },
    **{
        f"arg{name}": _reduced(f"the position of the {name}imum is taken")
        for name in ("max", "min")
    },
    **{
        f"cum{name}": _along("axis", "accumulated")
        for name in ("sum", "prod", "max", "min", "logsumexp")
    },
    **{f"reduce_window{name}": _window for name in ("_sum", "_max", "_min")},
    "bitcast_convert_type": _bitcast,
    "sort": _along("dimension", "sorted"),
    "rev": _along("dimensions", "reversed"),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "reshape": _reshape,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "pad": _pad,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    **{f"scatter{name}": _scatter for name in ("", "-add", "-sub", "-mul", "-min", "-max")},
}


def _shape_of_result(name: str) -> Resized:
    return lambda eqn, axes: {name: axes.shape(axes.results[0])}


def _resized_slice(eqn: Any, axes: AxisMap) -> dict[str, Any]:
    """A slice that is one of several equal parts of an axis is the same part of the smaller axis."""
    piece, before, after = options(eqn), _shape(eqn.invars[0]), axes.shape(axes.operands[0])

    def scaled(positions: Sequence[int]) -> tuple[int, ...]:
        return tuple(at * n // m if m else at for at, m, n in zip(positions, before, after))

    return {
        "start_indices": scaled(piece.start_indices),
        "limit_indices": scaled(piece.limit_indices),
    }


def _resized_split(eqn: Any, axes: AxisMap) -> dict[str, Any]:
    at = options(eqn).axis
    return {"sizes": tuple(axes.size(part[at]) for part in axes.results)}


def _resized_window(eqn: Any, axes: AxisMap) -> dict[str, Any]:
    """A window that covers a whole axis also covers the smaller axis."""
    sizes = zip(options(eqn).slice_sizes, _shape(eqn.invars[0]), axes.shape(axes.operands[0]))
    return {"slice_sizes": tuple(n if size == m else size for size, m, n in sizes)}


def _resized_groups(eqn: Any, axes: AxisMap) -> dict[str, Any]:
    channels = axes.operands[0][options(eqn).dimension_numbers.lhs_spec[1]]
    groups = channels[:-1]  # none, if all channels are one group
    return {"feature_group_count": axes.size(groups)}


_RESIZED: dict[str, Resized] = {
    "broadcast_in_dim": _shape_of_result("shape"),
    "reshape": _shape_of_result("new_sizes"),
    "empty": _shape_of_result("shape"),
    "slice": _resized_slice,
    "split": _resized_split,
    "gather": _resized_window,
    "dynamic_slice": _resized_window,
    "conv_general_dilated": _resized_groups,
}
