"""Constant folding: values that depend only on constants are computed once.

A dot_general or convolution with a constant kernel is merged with a following affine map (a scale
and a shift) whose coefficients are constants.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax
from fnet.jaxpr._equations import CONVOLUTION, DOT, product
from fnet.jaxpr._flatten import inlined
from fnet.jaxpr._primitives import POINTWISE
from fnet.jaxpr._records import options
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._scopes import TOP, in_jaxpr
from fnet.jaxpr._values import Value, arrays_of


class Fold(NamedTuple):
    """A dot_general or convolution that was merged with a following affine map (a scale and a
    shift).

    Attributes:
        path: the path of the named scope of the dot_general or convolution.
        primitive: the name of the primitive, "dot_general" or "conv_general_dilated".
        folded: the names of the primitives that were merged into the dot_general or convolution,
            such as ("mul", "add").
    """

    path: str
    primitive: str
    folded: tuple[str, ...]


@dataclasses.dataclass
class _Known:
    """A value that depends only on constants: the array `small`, broadcast to the shape `shape`."""

    small: Any
    shape: tuple

    def array(self):
        return (
            self.small
            if self.small.shape == self.shape
            else jnp.broadcast_to(self.small, self.shape)
        )


@dataclasses.dataclass
class _Pending:
    """A value y * scale + shift that is not computed yet. y is a dot_general or convolution with a
    constant kernel.

    `scale` and `shift` are None, or arrays of the result's rank. `scale` and `shift` vary only
    along the axes that the result has in common with the kernel (see `axes`), and have length 1
    along all other axes.
    """

    eqn: Any
    at: Any
    operands: list
    kernel: int  # the index of the operand that is the kernel
    axes: dict  # {axis of the result: axis of the kernel}
    largest: Any  # the largest magnitude in the kernel, for each index along these axes, of the result's rank
    scale: Any = None
    shift: Any = None
    folded: tuple = ()

    def result(self):
        operands = list(self.operands)
        if self.scale is not None:
            with jax.ensure_compile_time_eval():
                operands[self.kernel] = operands[self.kernel] * self._in_kernel(
                    operands[self.kernel]
                )
        (y,) = _jax.bind_again(self.eqn, operands)
        if self.shift is None:
            return y
        return y + jnp.broadcast_to(self.shift, y.shape)

    def _in_kernel(self, kernel):
        """Returns `scale` in a shape in which it can be multiplied with the kernel."""
        shape = [1] * kernel.ndim
        for axis, ours in self.axes.items():
            shape[ours] = self.scale.shape[axis]
        order = sorted(self.axes, key=self.axes.get)
        moved = jnp.transpose(
            self.scale, (*order, *(i for i in range(self.scale.ndim) if i not in self.axes))
        )
        return moved.reshape(shape)


class Folder:
    """Evaluates a closed jaxpr with constant folding: values that depend only on constants are
    computed once.

    Attributes:
        folds: a `Fold` for each dot_general or convolution that was merged with a following affine
            map.
    """

    def __init__(self):
        self.folds: list[Fold] = []

    def __call__(self, closed: Any, arrays: list) -> list:
        closed = inlined(closed)
        jaxpr = closed.jaxpr
        uses = collections.Counter(
            v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)
        )
        uses.update(v for v in jaxpr.outvars if not isinstance(v, _jax.Literal))
        env = {
            v: _Known(x, jnp.shape(x)) if _concrete(x) else x
            for v, x in zip(jaxpr.constvars, closed.consts)
        }
        env.update(zip(jaxpr.invars, arrays))
        scope_of, names = in_jaxpr(jaxpr, TOP), _jax.current_names()

        def read(v):
            return _literal(v) if isinstance(v, _jax.Literal) else env[v]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            with _jax.equation_context(eqn, names):
                outputs = self._equation(eqn, scope_of(eqn), inputs)
            for v, y in zip(eqn.outvars, outputs):
                env[v] = self._computed(y) if isinstance(y, _Pending) and uses[v] != 1 else y
        return [self._computed(read(v)) for v in jaxpr.outvars]

    @staticmethod
    def program(closed: Any) -> Callable:
        """Returns a closed jaxpr as a function of its constants and inputs. The compiled function
        does not contain the constants."""

        def run(consts, arrays):
            return arrays_of(Interpreter().evaluate(closed.jaxpr, consts, list(map(Value, arrays))))

        return run

    def _equation(self, eqn, at, inputs):
        if all(isinstance(x, _Known) for x in inputs) and not eqn.effects:
            return _evaluated(eqn, inputs)
        if product(eqn) is not None:
            inputs = [self._computed(x) if isinstance(x, _Pending) else x for x in inputs]
        pending = _pending(eqn, at, inputs) or _absorbed(eqn, inputs)
        if pending is not None:
            return [pending]
        return _jax.bind_again(eqn, [self._computed(x) for x in inputs])

    def _computed(self, x):
        """Returns a value as an array. Computes a `_Pending` value, such as a dot_general that is
        not computed yet."""
        if isinstance(x, _Known):
            return x.array()
        if not isinstance(x, _Pending):
            return x
        if x.scale is not None or len(x.folded) > 1:  # merging only a bias saves nothing
            self.folds.append(Fold(x.at.path, x.eqn.primitive.name, x.folded))
        return x.result()


def _literal(v):
    with (
        jax.ensure_compile_time_eval()
    ):  # else, a trace would record it, and all that is computed from it
        return _Known(jnp.asarray(v.val), ())


def _concrete(x):
    return not isinstance(x, jax.core.Tracer | jax.Ref)


def _evaluated(eqn, inputs):
    """Computes the outputs of an equation whose inputs depend only on constants."""
    with jax.ensure_compile_time_eval():
        shape = getattr(eqn.outvars[0].aval, "shape", ())
        if eqn.primitive.name == "broadcast_in_dim" and all(isinstance(n, int) for n in shape):
            (x, *_), axes = inputs, options(eqn).broadcast_dimensions
            small = [1] * len(shape)
            for ours, axis in enumerate(axes):
                small[axis] = x.small.shape[ours]
            return [_Known(jnp.reshape(x.small, small), tuple(shape))]
        if eqn.primitive.name in POINTWISE and all(x.shape == tuple(shape) for x in inputs):
            common = jnp.broadcast_shapes(*(x.small.shape for x in inputs))
            arrays = [jnp.broadcast_to(x.small, common) for x in inputs]
            return [_Known(y, tuple(shape)) for y in _jax.bind_again(eqn, arrays)]
        outputs = _jax.bind_again(eqn, [x.array() for x in inputs])
        return [_Known(y, jnp.shape(y)) for y in outputs]


def _pending(eqn, at, inputs):
    """Returns a `_Pending` (a value that is not computed yet) for a dot_general or convolution in
    float32 or float64 that has exactly one constant operand. Returns None for other equations."""
    made = product(eqn)
    if made is None or made.op is not eqn.primitive or len(eqn.outvars) != 1:
        return None
    known = [i for i, x in enumerate(inputs) if isinstance(x, _Known)]
    wide = (jnp.float32, jnp.float64)
    if len(known) != 1 or any(v.aval.dtype not in wide for v in (*eqn.invars, *eqn.outvars)):
        return None
    (kernel,) = known
    if made.op is CONVOLUTION and kernel == 1 and made.groups[1] == 1:
        axes = {made.dimensions.out_spec[1]: made.dimensions.rhs_spec[0]}
    elif made.op is DOT:
        (contracted, batch), rank = made.dimensions, len(eqn.outvars[0].aval.shape)
        free = [
            i
            for i in range(len(inputs[kernel].shape))
            if i not in (*contracted[kernel], *batch[kernel])
        ]
        first = len(batch[0]) if kernel == 0 else rank - len(free)
        axes = {first + i: axis for i, axis in enumerate(free)}
    else:
        return None
    with jax.ensure_compile_time_eval():
        operands = [x.array() if isinstance(x, _Known) else x for x in inputs]
        largest = _largest(operands[kernel], axes, len(eqn.outvars[0].aval.shape))
    return _Pending(eqn, at, operands, kernel, axes, largest)


def _largest(kernel, axes, rank):
    """Returns the largest magnitudes in the parts of a kernel that give one element of the result."""
    found = jnp.abs(kernel).max(
        tuple(i for i in range(kernel.ndim) if i not in axes.values()), initial=0
    )
    ours = sorted(axes, key=axes.get)  # the axes of the result, in the order of the kernel
    found = found.transpose([ours.index(axis) for axis in sorted(axes)])
    shape = [1] * rank
    for axis, size in zip(sorted(axes), found.shape):
        shape[axis] = size
    return found.reshape(shape)


def _fits(old, change, scale):
    """Whether a kernel times `scale` has the values of the products times the old scale and
    `change`.

    A finite product times infinity is infinite, and the sum of a kernel that is infinite may be
    NaN. Where scales or kernels become too small for their dtype, the products may not have been.
    """
    info = jnp.finfo(scale.dtype)
    before = jnp.ones_like(change) if old.scale is None else old.scale
    lost = (change != 0) & (before != 0) & (jnp.abs(scale) < info.tiny)
    # An element that is smaller by 1 / epsilon is a rounding error of the sum.
    size = old.largest * jnp.abs(scale)
    small = (size < info.tiny / info.eps) & (old.largest > 0) & (scale != 0)
    return bool((jnp.isfinite(scale) & ~lost).all() & (jnp.isfinite(size) & ~small).all())


def _absorbed(eqn, inputs):
    """Merges an elementwise operation, such as the addition of a constant, into a `_Pending` (an
    operand that is not computed yet). Returns the new `_Pending`, or None if the elementwise
    operation cannot be merged, for example because neither of its operands is constant, or because
    the merged kernel would overflow or underflow."""
    if len(eqn.outvars) != 1:  # such as a callback
        return None
    name, y = eqn.primitive.name, eqn.outvars[0].aval
    which = [i for i, x in enumerate(inputs) if isinstance(x, _Pending)]
    if len(which) != 1:
        return None
    (i,) = which
    old = inputs[i]
    if y.dtype != old.eqn.outvars[0].aval.dtype:
        return None
    if name in ("copy", "convert_element_type"):
        return old
    with jax.ensure_compile_time_eval(), np.errstate(all="ignore"):
        if name == "neg":
            new = _scaled(old, jnp.full((1,) * y.ndim, -1, y.dtype))
        elif name in ("add", "sub", "mul", "div") and isinstance(inputs[1 - i], _Known):
            constant = _along(inputs[1 - i], old, y.ndim)
            new = None if constant is None else _combined(name, i, old, constant)
        else:
            return None
    return new and dataclasses.replace(new, folded=(*old.folded, name))


def _combined(name, i, old, constant):
    """Returns `old`, operand i of an arithmetic operation, combined with the other operand."""
    if name == "add":
        return _shifted(old, constant)
    if name == "sub" and i == 0:
        return _shifted(old, -constant)
    if name == "sub":  # c - y = -y + c
        minus = jnp.full((1,) * constant.ndim, -1, constant.dtype)
        scale = minus if old.scale is None else -old.scale
        shift = None if old.shift is None else -old.shift
        return _shifted(dataclasses.replace(old, scale=scale, shift=shift), constant)
    if name == "mul":
        return _scaled(old, constant)
    return _scaled(old, 1 / constant) if i == 0 else None  # c / y is not linear


def _shifted(old, change):
    if old.shift is None:
        return dataclasses.replace(old, shift=change)
    total = old.shift + change
    overflows = jnp.isinf(total) & jnp.isfinite(old.shift) & jnp.isfinite(change)
    return None if bool(overflows.any()) else dataclasses.replace(old, shift=total)


def _scaled(old, change):
    scale = change if old.scale is None else old.scale * change
    shift = None if old.shift is None else old.shift * change
    if not _fits(old, change, scale):
        return None
    return dataclasses.replace(old, scale=scale, shift=shift)


def _along(known, pending, rank):
    """Returns the constant `known` as an array that broadcasts to the result of a dot_general or
    convolution.

    Returns None if the constant varies along an axis that the kernel does not have, such as the
    batch axis.
    """
    small = known.small if known.small.ndim == rank else jnp.reshape(known.small, (1,) * rank)
    if any(n != 1 and axis not in pending.axes for axis, n in enumerate(small.shape)):
        return None
    return small
