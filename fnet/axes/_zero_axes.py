"""Determines at which indices the values of a program are zero if its parameters are zero at some
indices.

Indices along an axis, for example channels, may be removed from the arrays of a program if this has
the same effect as setting the parameters to zero at these indices. If the program sums over an
axis, indices of this axis may be removed only if the removed summands are zero. If a reshape splits
an axis of size 12 into axes of sizes 3 and 4, this module treats the factors 3 and 4 as separate
axes, which are called atoms (see `Atoms`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fnet import _jax
from fnet.axes._atoms import Atoms, Axis
from fnet.axes._axis_map import AxisMap
from fnet.axes._ties import Frame
from fnet.jaxpr._calls import scan
from fnet.jaxpr._equations import product
from fnet.jaxpr._primitives import POINTWISE
from fnet.jaxpr._records import options

ALWAYS = None  # the value is zero everywhere
Zero = frozenset | None

_LIKE_FIRST = frozenset(
    """
    neg abs sign floor ceil round tanh erf sin tan asin atan sinh asinh atanh sqrt cbrt square expm1 log1p
    convert_element_type copy copy_p stop_gradient reduce_precision real imag conj name pvary device_put site div
    rem transpose reshape squeeze expand_dims slice split unstack tile gather dynamic_slice reduce_max reduce_min
    reduce_window_sum reduce_window_max reduce_window_min cumsum
""".split()
)
_EITHER = frozenset(("mul", "and"))
_BOTH = frozenset(("add", "sub", "add_any", "or", "concatenate", "stack", "dynamic_update_slice"))


def freeze_nonzero_sums(frame: Frame, inputs: Sequence[Zero], atoms: Atoms) -> list[Zero]:
    """Marks axes whose size must not change, because a jaxpr sums over them and removing an index
    may change the sum.

    Args:
        frame: a `Frame`, which contains the jaxpr and the axes of each of its variables.
        inputs: for each input of the jaxpr, the set of the axes along which zeros in the parameters
            cause zeros in the input. An axis is in this set if the input is zero at an index of the
            axis whenever all parameters are zero at the same index. For example, if the input is
            zero in channel 3 whenever all parameters are zero in channel 3, the set contains the
            channel axis. If the input is zero everywhere, the constant `ALWAYS` replaces the set.
        atoms: an `Atoms` with all axes of the program. `freeze_nonzero_sums` calls `atoms.freeze`
            for each axis whose size must not change.

    Returns:
        A list that describes where each output of the jaxpr is zero, in the format of the argument
        `inputs`.
    """
    jaxpr = frame.jaxpr
    zero: dict[Any, Zero] = dict(zip(jaxpr.invars, inputs))
    zero.update(dict.fromkeys(jaxpr.constvars, frozenset()))
    read = lambda v: (
        (ALWAYS if v.val == 0 else frozenset()) if isinstance(v, _jax.Literal) else zero[v]
    )
    for eqn in jaxpr.eqns:
        found = _zero(frame, eqn, list(map(read, eqn.invars)), atoms)
        zero.update(
            (v, x if x is ALWAYS else x & _atoms_of(frame.of(v), atoms))
            for v, x in zip(eqn.outvars, found)
        )
    return list(map(read, jaxpr.outvars))


def _atoms_of(axes: Iterable[Axis], atoms: Atoms) -> frozenset[int]:
    return frozenset(atom for axis in axes for atom in atoms.expand(axis))


def _either(zeros: Sequence[Zero]) -> Zero:
    some = [x for x in zeros if x is not ALWAYS]
    return ALWAYS if len(some) < len(zeros) else frozenset().union(*some)


def _both(zeros: Sequence[Zero]) -> Zero:
    some = [x for x in zeros if x is not ALWAYS]
    return frozenset.intersection(*some) if some else ALWAYS


def _zero(frame: Frame, eqn: Any, ins: list[Zero], atoms: Atoms) -> list[Zero]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    inner = frame.inner.get(id(eqn), ())
    if name in POINTWISE:
        ins = [_broadcast(frame, eqn, v, x, atoms) for v, x in zip(eqn.invars, ins)]
    if name == "scan":
        return _scanned(inner[0], eqn, ins, atoms)
    if name == "cond":
        branches = [freeze_nonzero_sums(each, ins[1:], atoms) for each in inner]
        return [_both(each) for each in zip(*branches)]
    if inner:
        return freeze_nonzero_sums(inner[0], ins, atoms)
    if name in _LIKE_FIRST or (name == "integer_pow" and options(eqn).y > 0):
        return [ins[0]] * count
    if name in _EITHER:
        return [_either(ins)]
    if name in _BOTH:
        return [_both(ins)]
    if name == "optimization_barrier":
        return ins
    if name == "select_n":
        return [_both(ins[1:])]
    if name in ("max", "min", "clamp"):
        return [_bounded(eqn, name, ins)]
    if name == "broadcast_in_dim":
        new = [
            axis
            for i, axis in enumerate(frame.of(eqn.outvars[0]))
            if i not in options(eqn).broadcast_dimensions
        ]
        return [ALWAYS if ins[0] is ALWAYS else ins[0] - _atoms_of(new, atoms)]
    if name == "reduce_sum":
        axes = [frame.of(eqn.invars[0])[i] for i in options(eqn).axes]
        _summed(
            axes,
            ins[0],
            atoms,
            "summed over where it is not zero, as in the mean of a normalization",
        )
        return [ins[0]]
    if product(eqn) is not None and id(eqn) in frame.maps:
        return [_multiplied(frame.maps[id(eqn)], ins, atoms)]
    return [frozenset()] * count


def _broadcast(frame: Frame, eqn: Any, v: Any, zero: Zero, atoms: Atoms) -> Zero:
    """Returns the axes in the set `zero`, except the axes along which the equation broadcasts its
    operand `v`."""
    if not zero:
        return zero
    pairs = zip(frame.of(v), frame.of(eqn.outvars[0]))
    return zero - _atoms_of([out for axis, out in pairs if not atoms.expand(axis)], atoms)


def _summed(axes: Iterable[Axis], zero: Zero, atoms: Atoms, why: str) -> None:
    for atom in frozenset() if zero is ALWAYS else _atoms_of(axes, atoms) - zero:
        atoms.freeze(why, (atom,))


def _bounded(eqn: Any, name: str, ins: Sequence[Zero]) -> Zero:
    """max(x, c) for c <= 0, min(x, c) for c >= 0, and clamp(a, x, b) for a <= 0 <= b are zero
    wherever x is zero."""
    value = lambda v: v.val if isinstance(v, _jax.Literal) else None
    if name == "clamp":
        low, _, high = map(value, eqn.invars)
        return ins[1] if low is not None and high is not None and low <= 0 <= high else frozenset()
    for x, v in zip(ins, reversed(eqn.invars)):
        if (c := value(v)) is not None and (c <= 0 if name == "max" else c >= 0):
            return x
    return _both(ins)


def _multiplied(axes: AxisMap, ins: Sequence[Zero], atoms: Atoms) -> Zero:
    """Returns the axes along which zeros in the parameters imply zeros in a matrix product or
    convolution.

    In the matrix product einsum("bij,bjk->bik", x, y), the result is zero at each index b of the
    batch axis at which x or y is zero. The result of einsum("bij,bjk->bik", x, y) is also zero at
    each index i at which x is zero, and at each index k at which y is zero. The groups of a
    convolution are treated like a batch axis.

    In a matrix product such as x @ x.T, the rows and the columns of the result are the same axis of
    the program. Row i of the result is zero if row i of the left operand is zero, and column i of
    the result is zero if column i of the right operand is zero. Therefore, the returned set
    contains this axis only if the sets of both operands contain it.
    """
    left, right, result = (
        frozenset(letter for axis in array for letter in axis)
        for array in (*axes.operands[:2], axes.results[0])
    )
    # The letters of the map are atoms, which later equations may have joined or split.
    current = lambda letters: frozenset(atoms.expand(tuple(letters)))
    lhs, rhs = ins[:2]
    either = _either((lhs, rhs))
    _summed([tuple((left & right) - result)], either, atoms, "multiplied by itself and summed over")
    if lhs is ALWAYS or rhs is ALWAYS or either is ALWAYS:
        return ALWAYS
    shared = current(left & right & result)
    only_left, only_right = current((left - right) & result), current((right - left) & result)
    found = either & (shared | only_left | only_right)
    return found - (only_left - lhs) - (only_right - rhs)


def _scanned(inner: Frame, eqn: Any, ins: Sequence[Zero], atoms: Atoms) -> list[Zero]:
    parts = scan(eqn)
    consts, carry, slices = parts.split(ins)
    while True:
        outs = freeze_nonzero_sums(inner, [*consts, *carry, *slices], atoms)
        joined = [_both(pair) for pair in zip(carry, outs)]
        if joined == carry:
            return [*carry, *outs[parts.carry :]]
        carry = joined
