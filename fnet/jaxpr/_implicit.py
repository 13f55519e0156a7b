"""Defines `ImplicitArray` and `View`, two classes for parameters that are computed from several arrays, such as a
quantized matrix from codes and scales.

`ImplicitArray` is the base class of parameters that are computed from several arrays. A `View` represents an implicit
array (such as a quantized matrix) that a program has cast, transposed or reshaped. A `View` only records the casts,
transposes and reshapes, so that the array need not be computed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A convolution of a program, as a function of its input x and a plain kernel.

    Attributes:
        function: a function `function(x, kernel)` that computes the convolution.
        batch: the batch axis of x.
        kernel_axis, out_axis: the axis of output channels in the kernel and in the result.
        groups: the number of groups of channels.
    """

    function: Callable
    batch: int
    kernel_axis: int
    out_axis: int
    groups: int

    def __call__(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        return self.function(x, kernel)


class ImplicitArray:
    """A parameter that is computed from several arrays. For example, a quantized matrix is computed from codes and
    scales.

    A subclass must be a registered pytree whose leaves are plain arrays, and must have the properties `shape` and
    `dtype`. The constructor of a subclass must not validate the leaves, because JAX also calls the constructor with
    placeholders. `ft.use_implicit_arrays(f)` evaluates f with implicit arrays (such as quantized arrays) as parameters.
    If an operation of f reads an implicit array, `use_implicit_arrays` calls the method `dot`, `convolve` or `lookup`
    of the array. If `dot`, `convolve` or `lookup` returns `NotImplemented`, `use_implicit_arrays` calls the method
    `materialize` instead.

    Attributes:
        shape, dtype: the shape and dtype of the array that the object represents.
        beside: {name of a field: name of another field}. In each pair of `beside`, the first field contains one element
            for each block of elements of the second field, for example the scale of each block of codes.
            `parallel.plan` splits the two fields of a pair in `beside` along the same axes.

    >>> params = compress.quantize({"kernel": jnp.ones((64, 4))}, {"kernel": compress.Int8()})
    >>> isinstance(params["kernel"], compress.ImplicitArray), params["kernel"].materialize().shape
    (True, (64, 4))
    """

    beside: ClassVar[Mapping[str, str]] = {}

    if TYPE_CHECKING:    # subclasses may define them as properties or fields
        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> Any: ...

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def materialize(self) -> jax.Array:
        """Returns the array that this object represents."""
        raise NotImplementedError

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        """Returns the product of x and this array, contracted over `axes` of this array.

        The result is an array [..., *the other axes of this array].

        Args:
            x: the other operand, an array [..., *contracted axes]. The last axes of x correspond to `axes`, in this
                order.
            axes: the positions of the contracted axes of this array.
            dot: a function `dot(x, w, axes)` that computes the same product for a plain array w, with the precision of
                the program.
        """
        return NotImplemented

    def convolve(self, x: jax.Array, convolution: Convolution) -> Any:
        """Returns the convolution of x with this array as the kernel. For a plain array `kernel`, the result is
        `convolution(x, kernel)`."""
        return NotImplemented

    def lookup(self, take: Callable) -> Any:
        """Returns rows (slices of axis 0) of this array.

        Args:
            take: a function. `take(a)` performs the program's lookup in a plain array `a` that has the same number of
                rows as this array. For indices out of range, `take` returns NaN if the program's lookup returns NaN. If
                `a` contains integers, `take` clips the indices.
        """
        return NotImplemented

    @property
    def has_leading_axis(self) -> bool:
        """Whether axis 0 is also axis 0 of every leaf, so that slices of the leaves represent slices of the array."""
        leaves = jax.tree.leaves(self)
        return bool(self.shape) and all(jnp.ndim(a) and jnp.shape(a)[0] == self.shape[0] for a in leaves)


Part = tuple[int, int, int]    # (axis, size, stride): the indices stride * i of an axis, for i < size


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base"], meta_fields=["groups", "dtype"])
@dataclasses.dataclass(frozen=True)
class View:
    """An implicit array (such as a quantized array) after casts, transposes and reshapes.

    Attributes:
        base: the implicit array.
        groups: for each axis of the view, the parts of axes of `base` that form the axis, from major to minor.
        dtype: the dtype after casts.
    """

    base: ImplicitArray
    groups: tuple[tuple[Part, ...], ...]
    dtype: Any

    @classmethod
    def of(cls, base: ImplicitArray, dtype: Any = None) -> View:
        groups = tuple(((i, n, 1),) if n != 1 else () for i, n in enumerate(base.shape))
        return cls(base, groups, jnp.dtype(base.dtype if dtype is None else dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(_size(group) for group in self.groups)

    @property
    def ndim(self) -> int:
        return len(self.groups)

    @property
    def whole(self) -> bool:
        """Whether the view has the same axes as its base (the implicit array)."""
        return self.groups == View.of(self.base).groups

    def astype(self, dtype: Any) -> View:
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def transpose(self, permutation: tuple[int, ...]) -> View:
        return dataclasses.replace(self, groups=tuple(self.groups[i] for i in permutation))

    def reshape(self, shape: tuple[int, ...]) -> View | None:
        """Returns the view in another shape, or None if the new axes cannot be formed from parts of the base's axes."""
        parts, groups = [part for group in self.groups for part in group], []
        for size in shape:
            group, missing = [], size
            while missing != 1:
                if not parts:
                    return None
                axis, n, stride = parts.pop(0)
                if missing % n == 0:
                    group.append((axis, n, stride))
                    missing //= n
                elif n % missing == 0:
                    group.append((axis, missing, stride * (n // missing)))
                    parts.insert(0, (axis, n // missing, stride))
                    missing = 1
                else:
                    return None
            groups.append(_merged(group))
        return dataclasses.replace(self, groups=tuple(groups)) if not parts else None

    def part(self, leaves: Callable) -> View | None:
        """Returns a view of the base with the function `leaves` applied to each leaf.

        Returns None if the axes of the view are not those of the base, or if a leaf of the base lacks the leading axis.
        """
        if not self.whole or not self.base.has_leading_axis:
            return None
        return View.of(jax.tree.map(leaves, self.base), self.dtype)

    def materialize(self) -> jax.Array:
        parts = [part for group in self.groups for part in group]
        split = sorted(parts, key=lambda part: (part[0], -part[2]))
        array = self.base.materialize().reshape([n for _, n, _ in split])
        return array.transpose([split.index(part) for part in parts]).reshape(self.shape).astype(self.dtype)

    def dot(self, x: jax.Array, contracted: tuple[int, ...], batch: int, dot: Callable) -> Any:
        """Returns the product of x and this view, contracted over axes of this view.

        Returns `NotImplemented` if the base (the implicit array) does not support the product.

        Args:
            x: the other operand, an array [*batch axes, ..., *contracted axes].
            contracted: axes of this view.
            batch: the number of leading axes of this view and of x that are batch axes.
            dot: a function `dot(x, w, axes)` for plain arrays, as for `ImplicitArray.dot`.

        Returns:
            An array [*batch axes, ..., *the other axes of this view].
        """
        if batch:
            return self._batched(x, contracted, batch, dot)
        parts = [part for i in contracted for part in self.groups[i]]
        free = [i for i in range(self.ndim) if i not in contracted]
        axes = list(dict.fromkeys(axis for axis, _, _ in parts))
        rest = [axis for axis in range(self.base.ndim) if axis not in axes]
        # Parts of one axis must be adjacent, from major to minor, so that together they are the axis.
        if parts != [part for axis in axes for part in self._parts(axis)] or any(
                axis in axes for i in free for axis, _, _ in self.groups[i]):
            return NotImplemented
        lead = x.shape[:x.ndim - len(contracted)]
        y = self.base.dot(x.reshape(*lead, *(self.base.shape[axis] for axis in axes)), tuple(axes), dot)
        if y is NotImplemented:
            return y
        split = [part for axis in rest for part in self._parts(axis)]
        order = [split.index(part) for i in free for part in self.groups[i]]
        y = y.reshape(*lead, *(n for _, n, _ in split))
        y = y.transpose(*range(len(lead)), *(len(lead) + i for i in order))
        return y.reshape(*lead, *(self.shape[i] for i in free))

    def _batched(self, x, contracted, batch, dot):
        first = ((0, self.base.shape[0], 1),) if self.base.shape[0] != 1 else ()
        if not self.base.has_leading_axis or self.groups[0] != first:
            return NotImplemented
        groups = tuple(tuple((axis - 1, n, stride) for axis, n, stride in group) for group in self.groups[1:])

        found = []

        def one(base, x):
            inner = View(base, groups, self.dtype)
            found.append(inner.dot(x, tuple(i - 1 for i in contracted), batch - 1, dot))
            return x if found[-1] is NotImplemented else found[-1]

        y = jax.vmap(one)(self.base, x)
        return NotImplemented if found[-1] is NotImplemented else y

    def _parts(self, axis):
        parts = [part for group in self.groups for part in group if part[0] == axis]
        return sorted(parts, key=lambda part: -part[2])


def plain_dot(precision: Any, preferred: Any) -> Callable:
    """Returns the function `dot(x, w, axes)` for plain arrays, which contracts the last axes of x with `axes` of w."""

    def dot(x, w, axes):
        contracted = tuple(range(x.ndim - len(axes), x.ndim))
        return lax.dot_general(x, w, ((contracted, tuple(axes)), ((), ())), precision=precision,
                               preferred_element_type=preferred)

    return dot


def implicit_dot(w: Any, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
    """Computes `dot(x, w, axes)` for an implicit or a plain array w."""
    return w.dot(x, axes, dot) if isinstance(w, ImplicitArray) else dot(x, w.astype(x.dtype), axes)


def materialize(x: Any) -> Any:
    """Returns the array that an implicit array (such as a quantized array) represents. Returns a plain array
    unchanged."""
    return x.materialize() if isinstance(x, ImplicitArray) else x


def is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def _size(group):
    return math.prod(n for _, n, _ in group)


def _merged(group):
    """Joins adjacent parts of the same axis in `group`, a list of parts of axes."""
    merged = []
    for axis, n, stride in group:
        if merged and merged[-1][0] == axis and merged[-1][2] == n * stride:
            axis, outer, _ = merged.pop()
            n *= outer
        merged.append((axis, n, stride))
    return tuple(merged)
