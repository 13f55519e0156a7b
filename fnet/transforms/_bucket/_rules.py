"""What each primitive does to arrays with padding.

A rule gets the padded inputs of an equation, whose true part is in front along each axis, and
returns its outputs in the same form. Whatever reads more than one position of a padded axis gets a
mask before it, so that no number in the padding reaches the true part, not even NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import jaxpr
from fnet.jaxpr import POINTWISE
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import (
    Lengths,
    NoRule,
    highest,
    lowest,
    resized,
    shifted,
    window,
)

RULES: dict[str, Callable] = {}
"""{primitive: rule(call) -> outputs}"""


class Call:
    """An equation with padded inputs.

    Attributes:
        eqn: the equation, with open sizes.
        arrays: its padded inputs.
        options: its parameters, as the record of its primitive.
        lengths: the `Lengths` of the call.
        evaluate: evaluates a closed jaxpr on padded arrays.
    """

    def __init__(
        self, eqn: Any, arrays: list, lengths: Lengths, note: Callable, evaluate: Callable
    ):
        self.eqn, self.arrays, self.lengths = eqn, arrays, lengths
        self._note, self.evaluate = note, evaluate

    @functools.cached_property
    def options(self) -> Any:
        return jaxpr.options(self.eqn)

    def shape(self, i: int) -> tuple:
        """The true shape of an input."""
        return tuple(self.eqn.invars[i].aval.shape)

    def result(self, i: int = 0) -> tuple:
        """The true shape of an output."""
        return tuple(self.eqn.outvars[i].aval.shape)

    def padded(self, sizes: Sequence) -> tuple[int, ...]:
        return self.lengths.shape(sizes)

    def note(self, text: str, sizes: Sequence = ()) -> None:
        named = ", ".join(dict.fromkeys(str(size) for size in sizes))
        self._note(self.eqn, text.replace("{}", named))

    def masked(self, i: int, axes: Sequence[int], fill: Any, why: str) -> Any:
        """Returns an input with `fill` after its true part along some axes."""
        shape = self.shape(i)
        axes = [axis for axis in axes if _sizes.is_open(shape[axis])]
        if axes:
            self.note(f"{why}, over {{}}", [shape[axis] for axis in axes])
        return self.lengths.masked(self.arrays[i], shape, axes, fill)

    def again(self, arrays: Sequence, **changes: Any) -> list:
        """Evaluates the primitive on padded arrays, with some parameters changed."""
        return [value.x for value in jaxpr.bind(self.eqn, list(arrays), **changes)]


def rule(*names: str) -> Callable:
    def register(f: Callable) -> Callable:
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


@rule(*POINTWISE, "threefry2x32", "random_fold_in", "random_clone", "erf_inv", "random_seed")
def _pointwise(call: Call) -> list:
    shapes = [call.shape(i) for i in range(len(call.arrays))]
    if not all(_fits(shape, call.result()) for shape in shapes):
        raise NoRule("its operands have different shapes")
    return call.again(call.arrays)


def _fits(shape: tuple, result: tuple) -> bool:
    alike = (a == 1 or _same(a, b) for a, b in zip(shape, result))
    return not shape or (len(shape) == len(result) and all(alike))


@rule("random_wrap", "random_unwrap", "bitcast_convert_type")
def _trailing(call: Call) -> list:
    """The last axis belongs to the elements, those before it stay."""
    if any(_sizes.is_open(n) for n in (*call.shape(0)[-1:], *call.result()[-1:])):
        if call.shape(0) != call.result():
            raise NoRule("its last axis is padded")
    return call.again(call.arrays)


@rule("dim_as_value")
def _dimension(call: Call) -> list:
    dtype = call.eqn.outvars[0].aval.dtype
    return [jnp.asarray(call.lengths.true(call.options.dim), dtype)]


@rule("broadcast_in_dim")
def _broadcast(call: Call) -> list:
    shape, axes = call.padded(call.result()), call.options.broadcast_dimensions
    return [lax.broadcast_in_dim(call.arrays[0], shape, axes)]


@rule("iota")
def _iota(call: Call) -> list:
    shape = call.padded(call.result())
    return [lax.broadcasted_iota(call.eqn.outvars[0].aval.dtype, shape, call.options.dimension)]


@rule("transpose")
def _transpose(call: Call) -> list:
    return call.again(call.arrays)


def _ones(dtype: Any) -> Any:
    return True if jnp.issubdtype(dtype, jnp.bool_) else np.asarray(-1).astype(dtype)


_IDENTITY: dict[str, Callable] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "and": _ones,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logsumexp": lowest,
}


@rule(*(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or", "xor")))
def _reduce(call: Call) -> list:
    kind = call.eqn.primitive.name.removeprefix("reduce_")
    fill = _IDENTITY[kind](call.arrays[0].dtype)
    x = call.masked(0, call.options.axes, fill, f"masked with {_text(fill)} before the {kind}")
    return call.again([x])


@rule("argmax", "argmin")
def _arg(call: Call) -> list:
    fill = (lowest if call.eqn.primitive.name == "argmax" else highest)(call.arrays[0].dtype)
    x = call.masked(0, call.options.axes, fill, f"masked with {_text(fill)} before the search")
    return call.again([x])


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(call: Call) -> list:
    (x,), axis = call.arrays, call.options.axis
    if call.options.reverse:
        kind = call.eqn.primitive.name.removeprefix("cum")
        fill = _IDENTITY[kind](x.dtype)
        x = call.masked(0, [axis], fill, f"masked with {_text(fill)}, as it runs backwards")
    return call.again([x])


@rule("sort")
def _sort(call: Call) -> list:
    axis, shape = call.options.dimension, call.shape(0)
    if not _sizes.is_open(shape[axis]):
        return call.again(call.arrays)
    call.note("sorted with the padding at the end, along {}", [shape[axis]])
    inside = call.lengths.inside(call.arrays[0].shape, shape, [axis])
    return call.again([~inside, *call.arrays], num_keys=call.options.num_keys + 1)[1:]


@rule("top_k")
def _top_k(call: Call) -> list:
    axis = call.options.axis
    fill = lowest(call.arrays[0].dtype)
    x = call.masked(0, [axis], fill, f"masked with {_text(fill)} before the choice")
    return call.again([x], k=call.lengths.padded(call.options.k))


@rule("dot_general")
def _dot(call: Call) -> list:
    contracted, _ = call.options.dimension_numbers
    why = "masked with 0 before the product"
    return call.again([call.masked(i, contracted[i], 0, why) for i in range(2)])


@rule("reshape")
def _reshape(call: Call) -> list:
    (x,) = call.arrays
    if call.options.dimensions is not None:
        raise NoRule("it permutes axes")
    before, after = call.shape(0), call.result()
    done: list[int] = []
    for old, new in _groups(before, after):
        rest = x.shape[len(done) + len(old) :]
        x = _regrouped(call, x, len(done), old, new)
        done += call.padded(new)
        x = x.reshape((*done, *rest))
    return [x]


def _groups(before: Sequence, after: Sequence) -> list[tuple[list, list]]:
    """Cuts two shapes into the smallest groups with the same numbers of elements."""
    before, after, groups, last = list(before), list(after), [], []
    while before and after and _same(before[-1], after[-1]):
        last.append(([before.pop()], [after.pop()]))
    while before or after:
        old, new = _first_group(before, after)
        groups.append((before[:old], after[:new]))
        before, after = before[old:], after[new:]
    return [*groups, *reversed(last)]


def _first_group(before: list, after: list) -> tuple[int, int]:
    for total in range(1, len(before) + len(after) + 1):
        for old in range(max(0, total - len(after)), min(total, len(before)) + 1):
            new = total - old
            if _same(math.prod(before[:old]), math.prod(after[:new])):
                return old, new
    return len(before), len(after)


def _same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _regrouped(call: Call, x: Any, axis: int, old: list, new: list) -> Any:
    """Returns `x` with the axes `old`, from `axis` on, as one axis whose elements have the order
    of the axes `new`."""
    lead, rest = x.shape[:axis], x.shape[axis + len(old) :]
    before, after = x.shape[axis : axis + len(old)], call.padded(new)
    flat = x.reshape((*lead, math.prod(before), *rest))
    if _leads(old) and _leads(new):
        return resized(flat, axis, math.prod(after))
    call.note("moved to other positions, as {} is not the first of the axes", _open(old + new))
    return jnp.take(flat, _positions(call, old, before, new, after), axis=axis, mode="clip")


def _open(sizes: Sequence) -> list:
    return [size for size in sizes if _sizes.is_open(size)]


def _leads(sizes: Sequence) -> bool:
    """Whether only the major axis of a group is padded, so that its true part is in front in
    memory, too."""
    long = [size for size in sizes if _sizes.is_open(size) or size != 1]
    return not any(map(_sizes.is_open, long[1:]))


def _positions(call: Call, old: list, before: tuple, new: list, after: tuple) -> Any:
    """Returns, for each position of the new axes, the position in the old ones of the element with
    the same number."""
    number = _numbers(call, new, after)
    position, step = jnp.zeros((), jnp.int32), 1
    for size, padded in zip(reversed(old), reversed(before)):
        true = jnp.maximum(call.lengths.true(size), 1)
        position = position + (number % true) * step
        number, step = number // true, step * padded
    return position


def _numbers(call: Call, sizes: Sequence, padded: Sequence[int]) -> Any:
    """Returns the number of each element of a padded array within its true part, flat."""
    number, step = jnp.zeros(tuple(padded), jnp.int32), jnp.ones((), jnp.int32)
    for axis in reversed(range(len(sizes))):
        number = number + lax.broadcasted_iota(jnp.int32, tuple(padded), axis) * step
        step = step * call.lengths.true(sizes[axis])
    return number.reshape(-1)


@rule("concatenate")
def _concatenate(call: Call) -> list:
    axis = call.options.dimension
    sizes = [call.shape(i)[axis] for i in range(len(call.arrays))]
    size = call.lengths.padded(call.result()[axis])
    if not any(map(_sizes.is_open, sizes[:-1])):
        return [resized(lax.concatenate(call.arrays, axis), axis, size)]
    call.note("put behind the true part of {}", _open(sizes[:-1]))
    total = sum(x.shape[axis] for x in call.arrays)
    whole, offset = resized(call.arrays[0], axis, total), call.lengths.true(sizes[0])
    for x, length in zip(call.arrays[1:], sizes[1:]):
        whole = lax.dynamic_update_slice_in_dim(whole, x, jnp.asarray(offset, jnp.int32), axis)
        offset = offset + call.lengths.true(length)
    return [resized(whole, axis, size)]


@rule("pad")
def _pad(call: Call) -> list:
    x, fill = call.arrays
    for axis, (low, high, inner) in enumerate(call.options.padding_config):
        before, after = call.shape(0)[axis], call.result()[axis]
        if not any(map(_sizes.is_open, (low, high, before, after))):
            x = _pad_axis(x, fill, axis, low, high, inner)
            continue
        if _sizes.is_open(before):
            call.note("filled from the true end of {} on", [before])
            x = call.lengths.masked(x, call.shape(0), [axis], fill)
        x = _pad_axis(x, fill, axis, 0, 0, inner)
        if _sizes.is_open(low):
            most = max(0, call.lengths.padded(low)) + x.shape[axis]
            x = shifted(x, axis, call.lengths.true(low), most, fill)
        else:
            x = _pad_axis(x, fill, axis, low, max(0, -low - x.shape[axis]), 0)
        x = resized(x, axis, call.lengths.padded(after), fill)
    return [x]


def _pad_axis(x: Any, fill: Any, axis: int, low: int, high: int, inner: int) -> Any:
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (int(low), int(high), int(inner))
    return x if padding[axis] == (0, 0, 0) else lax.pad(x, fill, padding)


@rule("rev")
def _reverse(call: Call) -> list:
    (x,) = call.arrays
    for axis in call.options.dimensions:
        x = lax.rev(x, (axis,))
        if _sizes.is_open(size := call.shape(0)[axis]):
            call.note("reversed from the true end of {}", [size])
            x = window(x, axis, x.shape[axis] - call.lengths.true(size), x.shape[axis])
    return [x]


@rule("random_bits")
def _random_bits(call: Call) -> list:
    shape = tuple(call.options.shape)
    _check_threefry(call)
    if not any(map(_sizes.is_open, shape[1:])):
        return call.again(call.arrays, shape=call.padded(shape))
    # The bits of an element depend on the key and on its number in the flat array alone.
    call.note("drawn flat, since a draw depends on the position in {}", _open(shape))
    count, padded = call.lengths.padded(math.prod(shape)), call.padded(shape)
    (bits,) = call.again(call.arrays, shape=(count,))
    lead = bits.ndim - 1
    taken = jnp.take(bits, _numbers(call, shape, padded), axis=lead, mode="clip")
    return [taken.reshape((*bits.shape[:lead], *padded))]


@rule("random_split")
def _random_split(call: Call) -> list:
    shape = tuple(call.options.shape)
    if any(map(_sizes.is_open, shape[1:])):
        raise NoRule("it splits a key along several axes")
    _check_threefry(call)
    return call.again(call.arrays, shape=call.padded(shape))


def _check_threefry(call: Call) -> None:
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    partitionable = getattr(jax.config, "jax_threefry_partitionable", True)
    if call.arrays[0].dtype != threefry or not partitionable:
        raise NoRule(
            "its numbers depend on the size of the whole array; use a threefry key, "
            "jax.random.key(seed, impl='threefry2x32')"
        )


@rule("cholesky", "eigh", "eig", "svd", "qr", "geqrf", "householder_product", "lu", "fft",
      "triangular_solve", "tridiagonal_solve", "lu_pivots_to_permutation")  # fmt: skip
def _matrices(call: Call) -> list:
    """Only axes before those of the matrices are padded."""
    name, first = call.eqn.primitive.name, call.shape(0)
    own = len(call.options.fft_lengths) if name == "fft" else _OWN_AXES.get(name, 2)
    shapes = [call.shape(i) for i in range(len(call.arrays))]
    shapes += [call.result(i) for i in range(len(call.eqn.outvars))]
    if any(_sizes.is_open(size) for shape in shapes for size in shape[len(first) - own :]):
        raise NoRule("it is computed over the whole axis")
    return call.again(call.arrays)


_OWN_AXES = {"tridiagonal_solve": 1, "lu_pivots_to_permutation": 1}


def _text(fill: Any) -> str:
    number = np.asarray(fill)
    if number.dtype == bool or number.dtype.kind in "iu":
        extreme = number.dtype.kind in "iu" and int(number) in (
            np.iinfo(number.dtype).min,
            np.iinfo(number.dtype).max,
        )
        return "the extreme of its dtype" if extreme and int(number) else str(number.item())
    return str(number.astype(np.float32).item())
