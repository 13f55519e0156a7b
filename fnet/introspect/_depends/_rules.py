"""What each primitive does to the positions that elements depend on.

Most primitives follow from `fnet.axes`: elements of the operands and the result that have the same
letters belong together, and over the other letters everything is combined. The rules here say more,
where an operation moves elements, accumulates them, looks at windows of them, or multiplies by
zeros.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.axes import axis_map
from fnet.introspect._depends import _known
from fnet.introspect._depends._conditions import Assumptions
from fnet.introspect._depends._reach import (
    FAR,
    Reach,
    also,
    container,
    everything,
    made,
    nothing,
    over,
    reshaped,
    uniform,
    union,
)
from fnet.jaxpr import CONVOLUTION, POINTWISE, builtin, options, product, sorted_axis, traits

Rule = Callable[[Any, Sequence[Reach], Assumptions], list[Reach] | None]


def results(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """Returns a `Reach` for each result of an equation, or None if its primitive has no rule."""
    name = eqn.primitive.name
    if operands and all(map(_blank, operands)):
        return [nothing(v.aval.shape) for v in eqn.outvars]
    if not builtin(eqn.primitive):
        return None
    rule = _RULES.get(name)
    found = product(eqn)
    if found is not None:
        rule = (
            _convolution
            if found.op is CONVOLUTION
            else _dot
            if found.op.name == "dot_general"
            else None
        )
    elif rule is None and name in POINTWISE:
        rule = _pointwise
    elif rule is None and traits(name).kind == "alias" and _unchanged(eqn):
        return [operands[0]]
    if rule is not None and (done := rule(eqn, operands, assumed)) is not None:
        return done
    return by_letters(eqn, operands)


def _blank(reach: Reach) -> bool:
    """Whether nothing is known of a value that depends on nothing, such as a parameter."""
    if reach.value is not None or reach.below is not None:
        return False
    return reach.low.size == 1 and reach.low.flat[0] > reach.high.flat[0]


def _unchanged(eqn: Any) -> bool:
    """Whether an equation's result has the shape of its only operand."""
    shapes = [getattr(v.aval, "shape", None) for v in (*eqn.invars, *eqn.outvars)]
    return len(shapes) == 2 and shapes[0] == shapes[1]


def by_letters(eqn: Any, operands: Sequence[Reach]) -> list[Reach] | None:
    """The rule for every primitive whose axes `fnet.axes` describes. A letter whose size is fixed
    for a reason, such as "sorted", may combine all elements along it."""
    axes = axis_map(eqn)
    if axes is None or any(not isinstance(size, int) for size in axes.sizes.values()):
        return None
    sides = []
    for reach, letters in zip(operands, axes.operands):
        split = [axes.sizes[letter] for axis in letters for letter in axis]
        flat = [letter for axis in letters for letter in axis]
        if math.prod(split) != math.prod(reach.shape) or len(set(flat)) != len(flat):
            return None
        sides.append((reach, split, flat))
    done = []
    for v, letters in zip(eqn.outvars, axes.results):
        wanted = [letter for axis in letters for letter in axis]
        if len(set(wanted)) != len(wanted):
            return None
        equal = {letter for letter in wanted if letter not in axes.fixed}
        low = np.full((1,) * len(wanted), FAR, np.int32)
        high = np.full((1,) * len(wanted), -1, np.int32)
        for reach, split, flat in sides:
            one = _arranged(reach.low, reach.shape, split, flat, wanted, equal, np.min)
            other = _arranged(reach.high, reach.shape, split, flat, wanted, equal, np.max)
            low, high = np.minimum(low, one), np.maximum(high, other)
        sizes = [axes.sizes[letter] for letter in wanted]
        shape = tuple(v.aval.shape)
        done.append(made(shape, reshaped(low, sizes, shape), reshaped(high, sizes, shape)))
    return done


def _arranged(
    array: np.ndarray,
    shape: Sequence[int],
    split: Sequence[int],
    flat: Sequence[Any],
    wanted: Sequence[Any],
    equal: set,
    combine: Callable,
) -> np.ndarray:
    """An array with one axis for each letter of the result, combined over all other letters."""
    array = reshaped(array, shape, split)
    gone = tuple(i for i, letter in enumerate(flat) if letter not in equal)
    if gone:
        initial = FAR if combine is np.min else -1
        array = combine(array, axis=gone, keepdims=True, initial=initial)
    kept = [i for i, letter in enumerate(flat) if letter in equal]
    array = array.transpose([*kept, *gone]).reshape([array.shape[i] for i in kept])
    position = {flat[i]: n for n, i in enumerate(kept)}
    array = array.transpose([position[letter] for letter in wanted if letter in position])
    sizes = iter(array.shape)
    return array.reshape([next(sizes) if letter in position else 1 for letter in wanted])


# Elementwise operations.


def _pointwise(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    shape = tuple(eqn.outvars[0].aval.shape)
    if len(eqn.outvars) != 1:
        return None
    name = eqn.primitive.name
    ranked = [_to_rank(each, shape) for each in operands]
    merged = union(shape, ranked)
    low, high = merged.low, merged.high
    value = known = below = None
    facts = [_known.fold(eqn, ranked), _known.logic(eqn, ranked)]
    if known_facts := [each for each in facts if each is not None]:
        value, known = known_facts[0]
        for more_value, more_known in known_facts[1:]:
            value, known = np.where(known, value, more_value), known | more_known
    elif name in ("sub", "xor") and eqn.invars[0] is eqn.invars[1]:
        if np.dtype(merged_dtype := eqn.outvars[0].aval.dtype).kind in "biu":
            one = (1,) * len(shape)
            value, known = np.zeros(one, merged_dtype), np.ones(one, bool)
    special = _SPECIAL.get(name) if assumed.allowed else None
    if special is not None:
        more = special(eqn, ranked, assumed)
        if more is not None:
            new_value, new_known, below = more
            if new_value is not None:
                if value is None or known is None:
                    value, known = new_value, new_known
                else:
                    value = np.where(known, value, new_value)
                    known = known | new_known
    elif name in _KEEPS_BOUND and assumed.allowed and (bound := ranked[0].bound()) is not None:
        below = np.where(bound < 0, 0.99 * bound, np.inf)  # which may be rounded
    if str(eqn.outvars[0].aval.dtype) not in _WITH_INFINITY:
        below = None  # it wraps, or becomes NaN
    return [made(shape, low, high, value, known, below)]


_KEEPS_BOUND = ("stop_gradient", "copy", "convert_element_type")
_WITH_INFINITY = ("float16", "bfloat16", "float32", "float64")


def mind_zeros(eqn: Any, assumed: Assumptions) -> None:
    """Assumes that no operand is 0 whose sign the result shows. A product with a zero of a mask is
    +0 or -0, depending on what is masked."""
    if not assumed.allowed:
        return
    for i, v in enumerate(eqn.invars):
        dtype = getattr(v.aval, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and _shows_sign(eqn, i):
            assumed.nonzero(eqn, i)


def _shows_sign(eqn: Any, operand: int) -> bool:
    """Whether the sign of a zero changes more of a result than the sign of a zero."""
    name = eqn.primitive.name
    if any(jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in eqn.outvars if _typed(v)):
        return True  # functions of complex numbers have cuts
    if not builtin(eqn.primitive):
        return True
    if name == "div":
        return operand == 1
    if name == "integer_pow":
        return options(eqn).y < 0
    if name == "scatter":
        return options(eqn).update_jaxpr is not None  # a function of the user
    return name not in _BLIND and product(eqn) is None


def _typed(v: Any) -> bool:
    return hasattr(v.aval, "dtype")


_BLIND = frozenset(
    """abs acos acosh add add_any argmax argmin asin asinh atan atanh broadcast_in_dim cbrt ceil clamp
    concatenate convert_element_type copy copy_p cos cosh cumlogsumexp cummax cummin cumprod cumsum
    device_put dynamic_slice dynamic_update_slice eq erf erf_inv erfc exp exp2 expand_dims expm1 floor
    gather ge gt is_finite layout_constraint le log log1p log2 logistic lt max min mul name ne neg
    one_minus_square optimization_barrier pad polynomial pvary reduce_max reduce_min reduce_precision
    reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum rem reshape reshard rev round
    scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter_add select_n
    sharding_constraint sign sin sinh slice split sqrt square squeeze stack stop_gradient sub tan tanh
    tile transpose unstack""".split()
)
"""Operations of real numbers in which -0 and 0 give the same, or -0 and 0."""


def _to_rank(reach: Reach, shape: Sequence[int]) -> Reach:
    """A scalar operand of an elementwise operation, as an array with axes of size 1."""
    if len(reach.shape) == len(shape):
        return reach
    one = (1,) * len(shape)
    return reach.mapped(one, lambda array, fill: array.reshape(one))


Special = tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]  # value, known, below


def _times(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> Special | None:
    """0 times a finite number is 0. A positive factor scales a bound."""
    zeros = value = None
    for i, each in enumerate(operands):
        if each.value is not None and each.known is not None:
            here = each.known & (each.value == 0)
            if here.any() and assumed.finite(eqn, 1 - i):
                zeros = here if zeros is None else zeros | here
    if zeros is not None:
        value = np.zeros((1,) * zeros.ndim, _container(eqn))
    below = None
    for i, each in enumerate(operands):
        factor, bound = operands[1 - i], each.bound()
        if bound is not None and factor.all_known() and (factor.value > 0).all():
            scaled = 0.99 * bound * factor.value.astype(np.float64)
            below = np.where(bound < 0, scaled, np.inf)  # which may be rounded
    return value, zeros, below


def _quotient(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> Special | None:
    """0 divided by what is neither 0 nor NaN is 0."""
    top, bottom = operands
    value = zeros = below = None
    if top.value is not None and top.known is not None and top.value.dtype.kind == "f":
        here = top.known & (top.value == 0)
        if here.any() and assumed.nonzero(eqn, 1):
            value, zeros = np.zeros((1,) * here.ndim, _container(eqn)), here
    bound = top.bound()
    if bound is not None and bottom.all_known() and (bottom.value > 0).all():
        scaled = 0.99 * bound / bottom.value.astype(np.float64)
        below = np.where(bound < 0, scaled, np.inf)
    return value, zeros, below


def _sum(
    eqn: Any, operands: Sequence[Reach], assumed: Assumptions, *, negated: bool = False
) -> Special | None:
    """A mask that adds a large negative number, to scores that are smaller. `negated` is for a
    difference, whose right operand is negated here and not in the equation."""
    value = known = below = None
    for i, each in enumerate(operands):
        bound = each.bound()
        if bound is None:
            continue
        if each.value is not None and each.known is not None and each.value.dtype.kind == "f":
            infinite = each.known & np.isneginf(each.value)
            if infinite.any() and assumed.finite(eqn, 1 - i):
                value = np.full((1,) * infinite.ndim, -np.inf, _container(eqn))
                known = infinite
        far = (bound <= _FAR_BELOW) & np.isfinite(bound)
        if not far.any():
            continue
        least = float(bound[far].max())
        if negated and i == 0:
            small = assumed.at_least(eqn, 1, least / 2)
        else:
            small = assumed.at_most(eqn, 1 - i, -least / 2)
        if small:
            here = np.where(far, 0.99 * (bound + -least / 2), np.inf)
            below = here if below is None else np.minimum(below, here)
    return value, known, below


def _difference(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> Special | None:
    """Scores minus their largest, as in softmax, or minus a mask."""
    left, right = operands
    if right.value is not None and right.known is not None and right.value.dtype.kind == "f":
        negative = dataclasses.replace(right, value=-right.value, below=None)
        if (negative.bound() <= _FAR_BELOW).any():  # type: ignore[operator]
            return _sum(eqn, [left, negative], assumed, negated=True)
    value = known = below = None
    bound = left.bound()
    if bound is None or right.all_known():
        return None
    if left.value is not None and left.known is not None and left.value.dtype.kind == "f":
        infinite = left.known & np.isneginf(left.value)
        if infinite.any() and assumed.finite(eqn, 1):
            value = np.full((1,) * infinite.ndim, -np.inf, _container(eqn))
            known = infinite
    far = (bound <= _FAR_BELOW) & np.isfinite(bound)
    if far.any():
        least = float(bound[far].max())
        if assumed.at_least(eqn, 1, least / 2):
            below = np.where(far, bound - least / 2, np.inf)
    return value, known, below


_FAR_BELOW = -3100.0  # a mask adds at most this; two halves of it make exp vanish


def _exponential(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> Special | None:
    bound = operands[0].bound()
    if bound is None or not assumed.allowed:
        return None
    gone = _known.vanishes(bound, eqn.primitive.name)
    return np.zeros((1,) * gone.ndim, _container(eqn)), gone, None


def _chosen(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """Where it is known which operand is selected, the others do not matter."""
    shape = tuple(eqn.outvars[0].aval.shape)
    which, *cases = (_to_rank(each, shape) for each in operands)
    low, high = which.low, which.high
    index = None
    if which.value is not None and which.known is not None:
        index = np.where(which.known, which.value.astype(np.int64), -1)
        index = np.minimum(index, len(cases) - 1)  # as XLA does
    value = known = below = None
    parts = []
    for i, case in enumerate(cases):
        maybe = np.ones((1,) * len(shape), bool) if index is None else (index == i) | (index < 0)
        low = np.minimum(low, np.where(maybe, case.low, FAR))
        high = np.maximum(high, np.where(maybe, case.high, -1))
        parts.append((maybe, case))
    dtype = _container(eqn)
    if dtype is not None and any(case.value is not None for _, case in parts):
        if index is not None:
            for i, case in enumerate(cases):
                if case.value is None or case.known is None:
                    continue
                here = (index == i) & case.known
                value = np.where(here, case.value, 0 if value is None else value).astype(dtype)
                known = here if known is None else known | here
    floats = str(eqn.outvars[0].aval.dtype) in _WITH_INFINITY
    bounds = [case.bound() for _, case in parts] if assumed.allowed and floats else []
    if any(bound is not None for bound in bounds):
        below = np.full((1,) * len(shape), -np.inf)
        for (maybe, _), bound in zip(parts, bounds):
            here = np.inf if bound is None else bound
            below = np.maximum(below, np.where(maybe, here, -np.inf))
    return [made(shape, low, high, value, known, below)]


def _larger(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> Special | None:
    """max(-inf, x) is x: what is known does not change, and a bound is the larger one."""
    bounds = [each.bound() for each in operands]
    if any(bound is None for bound in bounds):
        return None
    return None, None, np.maximum(*bounds)


_SPECIAL: dict[str, Callable[[Any, Sequence[Reach], Assumptions], Special | None]] = {
    "mul": _times,
    "div": _quotient,
    "add": _sum,
    "add_any": _sum,
    "sub": _difference,
    "exp": _exponential,
    "exp2": _exponential,
    "logistic": _exponential,
    "max": _larger,
}


def _container(eqn: Any) -> Any:
    return container(eqn.outvars[0].aval.dtype)


# Operations that move elements.


def _moved(move: Callable[[Any, np.ndarray, Any], np.ndarray]) -> Rule:
    def rule(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
        shape = tuple(eqn.outvars[0].aval.shape)
        return [operands[0].mapped(shape, lambda array, fill: move(eqn, array, fill))]

    return rule


def _reshape(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    before, after = operands[0].shape, tuple(eqn.outvars[0].aval.shape)
    if options(eqn).dimensions is not None or 0 in before:
        return None
    return [operands[0].mapped(after, lambda array, fill: reshaped(array, before, after))]


def _broadcast(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    shape = tuple(eqn.outvars[0].aval.shape)
    where = options(eqn).broadcast_dimensions

    def move(array: np.ndarray, fill: Any) -> np.ndarray:
        size = [1] * len(shape)
        for i, axis in enumerate(where):
            size[axis] = array.shape[i]
        return array.reshape(size)

    return [operands[0].mapped(shape, move)]


def _sliced(array: np.ndarray, axis: int, start: int, stop: int, step: int) -> np.ndarray:
    if array.shape[axis] == 1:
        return array
    index: list[Any] = [slice(None)] * array.ndim
    index[axis] = slice(start, stop, step)
    return array[tuple(index)]


def _slice(eqn: Any, array: np.ndarray, fill: Any) -> np.ndarray:
    piece = options(eqn)
    strides = piece.strides or (1,) * array.ndim
    for axis, cut in enumerate(zip(piece.start_indices, piece.limit_indices, strides)):
        array = _sliced(array, axis, *cut)
    return array


def _split(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    axis, sizes = options(eqn)
    done, start = [], 0
    for v, size in zip(eqn.outvars, sizes):
        stop = start + size
        move = lambda array, fill, start=start, stop=stop: _sliced(array, axis, start, stop, 1)
        done.append(operands[0].mapped(v.aval.shape, move))
        start = stop
    return done


def _unstack(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    axis = options(eqn).axis

    def move(i: int) -> Callable:
        return lambda array, fill: array.take(min(i, array.shape[axis] - 1), axis)

    return [operands[0].mapped(v.aval.shape, move(i)) for i, v in enumerate(eqn.outvars)]


def _concatenate(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    return [_joined(eqn, operands, options(eqn).dimension)]


def _stack(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    axis = options(eqn).axis
    longer = []
    for each in operands:
        shape = (*each.shape[:axis], 1, *each.shape[axis:])
        longer.append(each.mapped(shape, lambda array, fill: np.expand_dims(array, axis)))
    return [_joined(eqn, longer, axis)]


def _joined(eqn: Any, operands: Sequence[Reach], axis: int) -> Reach:
    shape = tuple(eqn.outvars[0].aval.shape)

    def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
        common = np.broadcast_shapes(*(_without_axis(array.shape, axis) for array in arrays))
        full = []
        for array, each in zip(arrays, operands):
            wanted = list(common)
            wanted[axis] = each.shape[axis]
            full.append(np.broadcast_to(array, wanted))
        return np.concatenate(full, axis)

    low = join([each.low for each in operands])
    high = join([each.high for each in operands])
    value = known = below = None
    held = [each.value for each in operands if each.value is not None]
    if held and all(each.dtype == held[0].dtype for each in held):
        one = np.zeros((1,) * len(shape), held[0].dtype)
        value = join([one if each.value is None else each.value for each in operands])
        no = np.zeros((1,) * len(shape), bool)
        known = join([no if each.known is None else each.known for each in operands])
    if any(each.below is not None for each in operands):
        far = np.full((1,) * len(shape), np.inf)
        below = join([far if each.below is None else each.below for each in operands])
    return made(shape, low, high, value, known, below)


def _without_axis(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis + 1 :])


def _tile(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    reps, shape = options(eqn).reps, tuple(eqn.outvars[0].aval.shape)

    def move(array: np.ndarray, fill: Any) -> np.ndarray:
        return np.tile(array, [n if size > 1 else 1 for n, size in zip(reps, array.shape)])

    return [operands[0].mapped(shape, move)]


def _pad(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    array, padding = operands
    shape = tuple(eqn.outvars[0].aval.shape)
    config = options(eqn).padding_config
    number = _to_rank(padding, shape)

    def place(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
        outer = np.asarray(outer)
        for axis, (low, high, between) in enumerate(config):
            if (low, high, between) == (0, 0, 0):
                continue
            n = array.shape[axis]
            inner = np.broadcast_to(inner, (*inner.shape[:axis], n, *inner.shape[axis + 1 :]))
            spread = n + max(n - 1, 0) * between
            size = [*inner.shape]
            size[axis] = spread
            wide = np.full(size, outer.reshape(-1)[0], inner.dtype)
            index: list[Any] = [slice(None)] * inner.ndim
            index[axis] = slice(0, spread, between + 1)
            wide[tuple(index)] = inner
            size[axis] = max(low, 0) + spread + max(high, 0)
            padded = np.full(size, outer.reshape(-1)[0], inner.dtype)
            index[axis] = slice(max(low, 0), max(low, 0) + spread)
            padded[tuple(index)] = wide
            index[axis] = slice(max(-low, 0), padded.shape[axis] - max(-high, 0))
            inner = padded[tuple(index)]
        return inner

    low, high = place(array.low, number.low), place(array.high, number.high)
    value = known = below = None
    if array.value is not None or number.value is not None:
        held = array.value if array.value is not None else number.value
        zero, no = np.zeros((1,) * len(shape), held.dtype), np.zeros((1,) * len(shape), bool)
        pick = lambda x, default: default if x is None else x
        if number.value is None or array.value is None or number.value.dtype == held.dtype:
            value = place(pick(array.value, zero), pick(number.value, zero))
            known = place(pick(array.known, no), pick(number.known, no))
    return [made(shape, low, high, value, known, below)]


def _iota(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    shape = tuple(eqn.outvars[0].aval.shape)
    dtype = _container(eqn)
    if dtype is None or operands:
        return [nothing(shape)]
    axis = options(eqn).dimension
    size = [1] * len(shape)
    size[axis] = shape[axis]
    value = np.arange(shape[axis]).reshape(size)
    few = True
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        few = shape[axis] <= _known.largest_exact(eqn)  # larger numbers are rounded
    return [_counted(shape, value, dtype) if few else nothing(shape)]


def _counted(shape: Sequence[int], value: np.ndarray, dtype: np.dtype) -> Reach:
    base = nothing(shape)
    known = np.ones((1,) * len(shape), bool)
    return made(shape, base.low, base.high, value.astype(dtype), known)


# Lookups and updates at computed positions.


def _dynamic_slice(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    array, *starts = operands
    shape = tuple(eqn.outvars[0].aval.shape)
    by = everything(starts)
    moving = [i for i, (n, m) in enumerate(zip(array.shape, shape)) if n != m]
    for axis in tuple(moving):
        if starts[axis].all_known() and _start(starts[axis]) < 2**31:
            start = _start(starts[axis])
            start = min(max(start, 0), array.shape[axis] - shape[axis])
            cut = lambda x, fill, a=axis, s=start: _sliced(x, a, s, s + shape[a], 1)
            size = list(array.shape)
            size[axis] = shape[axis]
            array = array.mapped(size, cut)
            moving.remove(axis)
    if moving:
        bound = array.bound()
        if bound is not None:
            bound = bound.max(tuple(moving), keepdims=True)
        wide = over(array, moving)
        array = made(shape, wide.low, wide.high, below=bound)
    return [also(Reach(shape, array.low, array.high, array.value, array.known, array.below), by)]


def _start(reach: Reach) -> int:
    return int(np.asarray(reach.value).reshape(-1)[0])


def _dynamic_update(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    array, update, *starts = operands
    shape = array.shape
    moving = [i for i, (n, m) in enumerate(zip(shape, update.shape)) if n != m]
    known = all(starts[i].all_known() and _start(starts[i]) < 2**31 for i in moving)
    by = everything([starts[i] for i in moving])
    if not moving:
        return [Reach(shape, update.low, update.high, update.value, update.known, update.below)]
    if known:
        begin = {i: min(max(_start(starts[i]), 0), shape[i] - update.shape[i]) for i in moving}

        def place(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
            size = [
                shape[i] if i in begin else max(outer.shape[i], inner.shape[i])
                for i in range(len(shape))
            ]
            new = np.broadcast_to(outer, size).copy()
            index: list[Any] = [slice(None)] * len(shape)
            for i, start in begin.items():
                index[i] = slice(start, start + update.shape[i])
            new[tuple(index)] = inner
            return new

        return [_merged(shape, array, update, place)]
    # the update lands somewhere along these axes
    wide = over(update, moving)
    low, high = np.minimum(array.low, wide.low), np.maximum(array.high, wide.high)
    return [also(made(shape, low, high), by)]


def _merged(
    shape: Sequence[int],
    array: Reach,
    update: Reach,
    place: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Reach:
    """An array of which a part is replaced."""
    low, high = place(array.low, update.low), place(array.high, update.high)
    value = known = below = None
    held = [each.value for each in (array, update) if each.value is not None]
    if held and all(each.dtype == held[0].dtype for each in held):
        zero, no = np.zeros((1,) * len(shape), held[0].dtype), np.zeros((1,) * len(shape), bool)
        pick = lambda x, default: default if x is None else x
        value = place(pick(array.value, zero), pick(update.value, zero))
        known = place(pick(array.known, no), pick(update.known, no))
    if array.below is not None or update.below is not None:
        far = np.full((1,) * len(shape), np.inf)
        pick = lambda x, default: default if x is None else x
        below = place(pick(array.below, far), pick(update.below, far))
    return made(shape, low, high, value, known, below)


def _gather(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """Where indices are known, the elements that are looked up; where they are not, any along the
    axis."""
    array, indices = operands
    shape = tuple(eqn.outvars[0].aval.shape)
    numbers, sizes = options(eqn).dimension_numbers, options(eqn).slice_sizes
    mode = str(options(eqn).mode).lower()
    if "one_hot" in mode:
        return _everything(eqn, operands, assumed)
    if 0 in shape or 0 in array.shape:
        return None
    rank = len(shape)
    grid = np.indices(shape, sparse=True)
    batch_axes = [i for i in range(rank) if i not in numbers.offset_dims]
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(array.shape)) if i not in removed]
    index: list[np.ndarray] = []
    inside = np.ones((1,) * rank, bool)
    filled = False
    unknown = []
    for axis, size in enumerate(array.shape):
        position = np.zeros((1,) * rank, np.int64)
        if axis in numbers.operand_batching_dims:
            which = numbers.operand_batching_dims.index(axis)
            position = position + grid[batch_axes[numbers.start_indices_batching_dims[which]]]
        elif axis in numbers.start_index_map:
            start = _column(indices, numbers.start_index_map.index(axis), batch_axes, rank)
            most = size - sizes[axis]
            if "fill" in mode and start is not None:
                inside = inside & (start >= 0) & (start <= most)
            elif "fill" in mode:
                filled = True  # perhaps
            if most == 0:
                start = position
            if start is None or ("clip" not in mode and "fill" not in mode and most):
                if start is None or (start < 0).any() or (start > most).any():
                    unknown.append(axis)
                    start = position
            position = position + np.clip(start, 0, most)
        if axis in kept and axis not in unknown:
            position = position + grid[numbers.offset_dims[kept.index(axis)]]
        index.append(position)
    if unknown:
        array = over(array, unknown)
    varies = [p for p, n in zip(index, array.low.shape) if n > 1]
    if math.prod(np.broadcast_shapes(*(p.shape for p in varies), inside.shape)) > 2**22:
        return None

    def move(x: np.ndarray, fill: Any) -> np.ndarray:
        nowhere = np.zeros((1,) * rank, np.int64)
        at = tuple(nowhere if n == 1 else i for i, n in zip(index, x.shape))
        return np.where(inside, x[at], np.asarray(fill, x.dtype))

    moved = array.mapped(shape, move)
    if filled or not inside.all():
        moved = moved.forgotten()
    return [_with_indices(moved, indices, batch_axes, unknown)]


def _column(indices: Reach, column: int, batch_axes: Sequence[int], rank: int) -> np.ndarray | None:
    """One component of all indices of a gather or scatter, for the axes of its result or updates,
    or None if it is not known."""
    if indices.value is None or indices.known is None:
        return None
    pick = lambda x: x[..., min(column, x.shape[-1] - 1)]
    if not pick(np.broadcast_to(indices.known, indices.shape)).all():
        return None
    if (pick(indices.value) >= 2**31).any():
        return None
    value = pick(indices.value).astype(np.int64)
    size = [1] * rank
    for axis, n in zip(batch_axes, value.shape):
        size[axis] = n
    return value.reshape(size)


def _with_indices(
    reach: Reach, indices: Reach, batch_axes: Sequence[int], unknown: Sequence[int]
) -> Reach:
    """Adds what the indices depend on that are not known."""
    low, high = indices.low.min(-1, initial=FAR), indices.high.max(-1, initial=-1)
    if not unknown and (low > high).all():
        return reach

    def placed(array: np.ndarray) -> np.ndarray:
        size = [1] * len(reach.shape)
        for axis, n in zip(batch_axes, array.shape):
            size[axis] = n
        return array.reshape(size)

    low, high = np.minimum(reach.low, placed(low)), np.maximum(reach.high, placed(high))
    return made(reach.shape, low.astype(np.int32), high.astype(np.int32))


def _scatter(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """By letters, and everything that an index depends on."""
    array, indices, updates = operands
    if indices.shape and indices.shape[-1] == 0:
        return [uniform(array.shape, *everything(operands))]  # XLA:CPU reads such indices otherwise
    if (exact := _scattered(eqn, operands)) is not None:
        return [exact]
    given = by_letters(eqn, [nothing(array.shape), indices, updates])
    if given is None:
        return None
    return [union(array.shape, [array.forgotten(), given[0]])]  # the rest stays where it is


def _scattered(eqn: Any, operands: Sequence[Reach]) -> Reach | None:
    """Where indices are known, the elements that are written, of which those of the operand may
    remain; where they are not, all along the axis."""
    array, indices, updates = operands
    numbers = options(eqn).dimension_numbers
    if max(math.prod(array.shape), math.prod(updates.shape)) > 2**20 or not array.shape:
        return None
    if 0 in array.shape or 0 in updates.shape:
        return None
    rank = len(updates.shape)
    rows = [i for i in range(rank) if i not in numbers.update_window_dims]
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(array.shape)) if i not in removed]
    grid = np.indices(updates.shape, sparse=True)
    index, landing = [], list(array.shape)
    inside = np.ones((1,) * rank, bool)
    for axis, size in enumerate(array.shape):
        position = np.zeros((1,) * rank, np.int64)
        if axis in numbers.operand_batching_dims:
            which = numbers.operand_batching_dims.index(axis)
            position = position + grid[rows[numbers.scatter_indices_batching_dims[which]]]
        elif axis in numbers.scatter_dims_to_operand_dims:
            column = numbers.scatter_dims_to_operand_dims.index(axis)
            start = _column(indices, column, rows, rank)
            if start is None:
                landing[axis] = 1
                index.append(position)
                continue
            position = position + start
        if axis in kept:
            position = position + grid[numbers.update_window_dims[kept.index(axis)]]
        inside = inside & (position >= 0) & (position < size)
        index.append(position)
    if not inside.all():
        return None
    given = _with_indices(updates.forgotten(), indices, rows, ())
    low = np.full(landing, FAR, np.int32)
    high = np.full(landing, -1, np.int32)
    where = tuple(np.broadcast_arrays(*index, np.zeros(updates.shape, np.int64))[:-1])
    np.minimum.at(low, where, np.broadcast_to(given.low, updates.shape))
    np.maximum.at(high, where, np.broadcast_to(given.high, updates.shape))
    kept_low, kept_high = array.low, array.high
    replaces = eqn.primitive.name == "scatter" and options(eqn).update_jaxpr is None
    if replaces and landing == list(array.shape):
        gone = np.zeros(array.shape, bool)  # these elements are overwritten
        gone[where] = True
        kept_low, kept_high = np.where(gone, FAR, kept_low), np.where(gone, -1, kept_high)
    return made(array.shape, np.minimum(kept_low, low), np.maximum(kept_high, high))


# Accumulations, reductions, windows.


def _cumulative(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    x = operands[0]
    axis, backward = options(eqn).axis, options(eqn).reverse

    def run(f: Any, array: np.ndarray) -> np.ndarray:
        if array.shape[axis] == 1:
            return array
        if backward:
            return np.flip(f.accumulate(np.flip(array, axis), axis), axis)
        return f.accumulate(array, axis)

    return [made(x.shape, run(np.minimum, x.low), run(np.maximum, x.high))]


def _reduce_max(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """The largest of some scores is not one that a mask has put far below."""
    x, axes = operands[0], tuple(options(eqn).axes)
    shape = tuple(eqn.outvars[0].aval.shape)
    if x.below is None or not axes:
        return None
    low_enough = x.below <= _FAR_BELOW / 2
    far = low_enough if x.known is None else low_enough & ~x.known
    if not far.any():
        return None
    most = float(np.broadcast_to(x.below, far.shape)[far].max())
    if not assumed.result_above(eqn, most):
        return None
    low = np.where(far, FAR, x.low).min(axes)
    high = np.where(far, -1, x.high).max(axes)
    return [made(shape, low.astype(np.int32), high.astype(np.int32))]


def _dot(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """What is multiplied by 0 does not matter, if it is finite."""
    left, right = operands[:2]
    zeros = [_zeros(each) for each in (left, right)]
    if all(each is None for each in zeros) or len(operands) > 2:
        return None
    if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating):
        return None  # functions of it show the signs of its zeros
    found = product(eqn)
    assert found is not None
    (cl, cr), (bl, br) = found.dimensions
    shape = tuple(eqn.outvars[0].aval.shape)
    for i in (0, 1):
        if zeros[i] is not None and not _harmless(eqn, 1 - i, assumed):
            zeros[i] = None
    if all(each is None for each in zeros):
        return None

    free_l = [i for i in range(len(left.shape)) if i not in (*cl, *bl)]
    free_r = [i for i in range(len(right.shape)) if i not in (*cr, *br)]

    def put(array: np.ndarray, batch: Any, free: Any, contract: Any, is_left: bool) -> np.ndarray:
        array = array.transpose([*batch, *free, *contract])
        b, f = len(batch), len(free)
        other = len(free_r) if is_left else len(free_l)
        s = array.shape
        middle = (s[b : b + f], (1,) * other) if is_left else ((1,) * other, s[b : b + f])
        return array.reshape((*s[:b], *middle[0], *middle[1], *s[b + f :]))

    def side(array: np.ndarray, is_left: bool) -> np.ndarray:
        return put(array, bl, free_l, cl, True) if is_left else put(array, br, free_r, cr, False)

    gone = np.zeros((1,), bool)
    for each, is_left in zip(zeros, (True, False)):
        if each is not None:
            gone = gone | side(each, is_left)
    low = np.minimum(side(left.low, True), side(right.low, False))
    high = np.maximum(side(left.high, True), side(right.high, False))
    axes = tuple(range(len(shape), low.ndim))
    low = np.where(gone, FAR, low).min(axes) if axes else np.where(gone, FAR, low)
    high = np.where(gone, -1, high).max(axes) if axes else np.where(gone, -1, high)
    return [made(shape, low.astype(np.int32), high.astype(np.int32))]


def _harmless(eqn: Any, operand: int, assumed: Assumptions) -> bool:
    """Whether 0 times an operand is 0: for integers, and for numbers that stay finite in each dtype
    to which the operand may be rounded, which includes bfloat16, as on TPUs."""
    dtypes = [v.aval.dtype for v in (*eqn.invars[:2], *eqn.outvars)]
    if all(np.dtype(each).kind in "biu" for each in dtypes):
        return True
    found = product(eqn)
    assert found is not None
    algorithm = found.precision
    if not found.default_precision and not _is_precision(algorithm):
        if "F8" in str(algorithm).upper():
            return False
        dtypes.append(jnp.float16)
    dtypes += [found.dtype, jnp.bfloat16]
    floats = [each for each in dtypes if jnp.issubdtype(each, jnp.floating)]
    return assumed.within(eqn, operand, 0.99 * min(float(jnp.finfo(each).max) for each in floats))


def _is_precision(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, lax.Precision) for each in values)


def _zeros(reach: Reach) -> np.ndarray | None:
    if reach.value is None or reach.known is None:
        return None
    zeros = reach.known & (reach.value == 0)
    return zeros if zeros.any() else None


def _convolution(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """Along space, the elements in the window; over input channels, all; in the batch, the same."""
    data, kernel = operands[:2]
    found = product(eqn)
    assert found is not None
    spec, (_, batch_groups) = found.dimensions, found.groups
    if batch_groups != 1 or len(operands) > 2:
        return None
    shape = tuple(eqn.outvars[0].aval.shape)
    strides, padding, spread, dilation = found.window
    x = over(data, [spec.lhs_spec[1]])
    w = over(kernel, range(len(kernel.shape)))
    low, high = x.low, x.high
    for n, axis in enumerate(spec.lhs_spec[2:]):
        window = kernel.shape[spec.rhs_spec[2 + n]]
        count = shape[spec.out_spec[2 + n]]
        where = (count, window, strides[n], padding[n][0], spread[n], dilation[n])
        low = _windowed(low, axis, data.shape[axis], where, np.minimum, FAR)
        high = _windowed(high, axis, data.shape[axis], where, np.maximum, -1)
    order = [0] * len(shape)
    for i, axis in zip(spec.out_spec, spec.lhs_spec):
        order[i] = axis
    low, high = low.transpose(order), high.transpose(order)
    low, high = np.minimum(low, w.low.item()), np.maximum(high, w.high.item())
    return [made(shape, low.astype(np.int32), high.astype(np.int32))]


def _windowed(
    array: np.ndarray,
    axis: int,
    size: int,
    where: tuple[int, int, int, int, int, int],
    combine: Any,
    fill: int,
) -> np.ndarray:
    """Combines the elements in each window along an axis."""
    count, window, stride, before, spread, dilation = where
    if array.shape[axis] == 1:
        return array
    result = None
    for k in range(window):
        at = np.arange(count) * stride + k * dilation - before
        hit = (at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)
        taken = array.take(np.where(hit, at // spread, 0), axis)
        shape = [1] * array.ndim
        shape[axis] = count
        taken = np.where(hit.reshape(shape), taken, fill)
        result = taken if result is None else combine(result, taken)
    assert result is not None
    return result


def _pooling(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    x, window = operands[0], options(eqn)
    shape = tuple(eqn.outvars[0].aval.shape)
    low, high = x.low, x.high
    for axis, size in enumerate(x.shape):
        where = (
            shape[axis],
            window.window_dimensions[axis],
            window.window_strides[axis],
            window.padding[axis][0],
            window.base_dilation[axis],
            window.window_dilation[axis],
        )
        low = _windowed(low, axis, size, where, np.minimum, FAR)
        high = _windowed(high, axis, size, where, np.maximum, -1)
    return [made(shape, low.astype(np.int32), high.astype(np.int32))]


# Operations over whole axes.


def _last_axes(count: int) -> Rule:
    """The last axes are combined in full; those before them are a batch."""

    def rule(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
        done = []
        ranks = {len(each.shape) for each in operands}
        if len(ranks) != 1:
            return None
        (rank,) = ranks
        lead = rank - count
        if any(each.shape[:lead] != operands[0].shape[:lead] for each in operands):
            return None
        wide = [over(each, range(lead, rank)) for each in operands]
        low = np.minimum.reduce(np.broadcast_arrays(*(each.low for each in wide)))
        high = np.maximum.reduce(np.broadcast_arrays(*(each.high for each in wide)))
        for v in eqn.outvars:
            shape = tuple(v.aval.shape)
            if shape[:lead] != operands[0].shape[:lead] or len(shape) < lead:
                return None
            rest = (1,) * (len(shape) - lead)
            fitted = [array.reshape((*array.shape[:lead], *rest)) for array in (low, high)]
            done.append(made(shape, *fitted))
        return done

    return rule


def _top_k(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    axis = sorted_axis(eqn)
    wide = over(operands[0], (axis,))
    return [Reach(tuple(v.aval.shape), wide.low, wide.high) for v in eqn.outvars]


def _separate_keys(eqn: Any) -> bool:
    """Whether the keys of an equation are used one by one. Other generators than JAX's default make
    the numbers of a batch from its first key."""
    dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
    keys = [each for each in dtypes if jax.dtypes.issubdtype(each, jax.dtypes.prng_key)]
    return all(each == _threefry() for each in keys)


@functools.cache
def _threefry() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def _of_separate_keys(rule: Rule) -> Rule:
    def checked(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
        if _separate_keys(eqn):
            return rule(eqn, operands, assumed)
        return _everything(eqn, operands, assumed)

    return checked


def _random_bits(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    """The numbers of each key depend on it alone."""
    keys = operands[0]
    shape = tuple(eqn.outvars[0].aval.shape)
    rest = (1,) * (len(shape) - len(keys.shape))
    longer = keys.mapped(shape, lambda array, fill: array.reshape((*array.shape, *rest)))
    return [longer.forgotten()]


def _last_words(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    """Keys of raw words, whose last axes are words, or words of keys."""
    x, shape = operands[0].forgotten(), tuple(eqn.outvars[0].aval.shape)
    if len(x.shape) > len(shape):
        x = over(x, range(len(shape), len(x.shape)))
        return [x.mapped(shape, lambda array, fill: array.reshape(array.shape[: len(shape)]))]
    rest = (1,) * (len(shape) - len(x.shape))
    return [x.mapped(shape, lambda array, fill: array.reshape((*array.shape, *rest)))]


def _every(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach] | None:
    """Results at a position depend on the operands at the position."""
    shape = tuple(eqn.outvars[0].aval.shape)
    if any(each.shape not in (shape, ()) for each in operands):
        return None
    merged = union(shape, [_to_rank(each, shape).forgotten() for each in operands])
    return [merged] * len(eqn.outvars)


def _selected_and_added(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    """The gradient of a pooling: along pooled axes, everything."""
    source, operand, *rest = operands
    shape = operand.shape
    window = options(eqn)
    each_axis = zip(window.window_dimensions, window.window_strides, window.padding)
    still = 1, 1, (0, 0)
    pooled = [i for i, (n, by, pads) in enumerate(each_axis) if (n, by, tuple(pads)) != still]
    parts = [over(each, pooled) for each in (source, operand)]
    return [union(shape, [*parts, *(_to_rank(each, shape) for each in rest)])]


def _fft(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    x, count = operands[0], len(options(eqn).fft_lengths)
    shape, rank = tuple(eqn.outvars[0].aval.shape), len(operands[0].shape)
    wide = over(x, range(rank - count, rank))
    return [Reach(shape, wide.low, wide.high)]


def _everything(eqn: Any, operands: Sequence[Reach], assumed: Assumptions) -> list[Reach]:
    return [uniform(tuple(v.aval.shape), *everything(operands)) for v in eqn.outvars]


_RULES: dict[str, Rule] = {
    "select_n": _chosen,
    "iota": _iota,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _moved(lambda eqn, array, fill: np.squeeze(array, tuple(options(eqn).dimensions))),
    "expand_dims": _moved(lambda eqn, x, fill: np.expand_dims(x, tuple(options(eqn).dimensions))),
    "transpose": _moved(lambda eqn, array, fill: array.transpose(options(eqn).permutation)),
    "rev": _moved(lambda eqn, array, fill: np.flip(array, tuple(options(eqn).dimensions))),
    "device_put": lambda eqn, operands, assumed: list(operands),
    **dict.fromkeys(
        ("name", "pvary", "sharding_constraint", "copy_p", "reshard"),
        _moved(lambda eqn, array, fill: array),
    ),
    "slice": _moved(_slice),
    "split": _split,
    "unstack": _unstack,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "gather": _gather,
    **{f"scatter{name}": _scatter for name in ("", "-add", "-sub", "-mul", "-min", "-max")},
    **{f"cum{name}": _cumulative for name in ("sum", "prod", "max", "min", "logsumexp")},
    "reduce_max": _reduce_max,
    **{f"reduce_window{name}": _pooling for name in ("_sum", "_max", "_min")},
    "random_bits": _of_separate_keys(_random_bits),
    "random_wrap": _of_separate_keys(_last_words),
    "random_unwrap": _of_separate_keys(_last_words),
    "random_seed": _of_separate_keys(_every),
    "random_fold_in": _of_separate_keys(_every),
    "random_split": _of_separate_keys(_last_words),
    "random_gamma": _of_separate_keys(_every),
    "threefry2x32": _every,
    "select_and_scatter_add": _selected_and_added,
    "lu_pivots_to_permutation": _last_axes(1),
    "top_k": _top_k,
    "cholesky": _last_axes(2),
    "lu": _last_axes(2),
    "qr": _last_axes(2),
    "svd": _last_axes(2),
    "eigh": _last_axes(2),
    "triangular_solve": _last_axes(2),
    "fft": _fft,
}
if jax.__version_info__ < (0, 12):
    # All elements are iterated until the last one has converged, and those that had go on changing.
    _RULES["regularized_incomplete_beta"] = _everything
