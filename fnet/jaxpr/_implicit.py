"""`ImplicitArray`, the base class of parameters that are computed from several arrays, such as a
quantized matrix from codes and scales, and `View`, one after casts, transposes and reshapes that
have not computed its elements."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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
    """A parameter that is computed from several arrays, such as a matrix from codes and scales.

    >>> params = compress.quantize({"kernel": jnp.ones((64, 4))}, {"kernel": compress.Int8()})
    >>> isinstance(params["kernel"], compress.ImplicitArray), params["kernel"].materialize().shape
    (True, (64, 4))

    Where a program f reads it, `ft.use_implicit_arrays(f)` calls its method `dot`, `convolve` or
    `lookup`, and `materialize` if that returns `NotImplemented`. A subclass must be a registered
    pytree whose leaves are plain arrays, with the properties `shape` and `dtype`. Its constructor
    must not validate the leaves, because JAX also calls it with placeholders.

    Attributes:
        shape, dtype: of the array that the object represents.
        beside: a dict such as {"scale": "codes"}: the field `scale` has one element for each block
            of elements of `codes`, so `parallel.plan` shards both along the same axes if possible.
    """

    beside: ClassVar[Mapping[str, str]] = {}

    if TYPE_CHECKING:  # subclasses may define them as properties or fields

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
        """Returns the matrix product of x and this array, contracted over `axes` of this array.

        As in `numpy.tensordot`, the result has the uncontracted axes of x, followed by those of
        this array.

        Args:
            x: a plain array of shape [..., *contracted axes], the left operand of the matrix
                product. Its last axes correspond to `axes`, in this order.
            axes: the positions of the contracted axes of this array.
            dot: a function `dot(x, w, axes)` that contracts the last axes of x with `axes` of an
                ordinary `jax.Array` w, with the `precision` of the matrix product in the program.
        """
        return NotImplemented

    def convolve(self, x: jax.Array, convolution: Convolution) -> Any:
        """Returns the convolution of x with this array as the kernel. For a plain array `kernel`,
        that is `convolution(x, kernel)`."""
        return NotImplemented

    def lookup(self, take: Callable) -> Any:
        """Returns rows (slices of axis 0) of this array.

        Args:
            take: a function `take(a)` that returns the rows `a[indices]` of a plain array `a` with
                as many rows as this one, for the indices that the program looks up. For indices out
                of range, it returns NaN if the program's lookup does, and clips the indices if `a`
                contains integers.
        """
        return NotImplemented

    only_observes: ClassVar[bool] = False
    """Whether the array records how a program uses it. It is then followed through casts that round
    its values."""

    @property
    def has_leading_axis(self) -> bool:
        """Whether a slice of axis 0 is one of axis 0 of each leaf, such as the scales. Default
        False.

        If True, scans over the array, slices of axis 0 and matrix products with batch axis 0 read
        slices of the leaves, and do not materialize the array. A subclass returns True if axis 0 is
        an axis of each leaf, for example because its arrays are those of a stack of layers. Sizes
        cannot tell: in a low-rank change of rank 8 to a kernel [8, out], axis 0 of each factor has
        the size 8, too.
        """
        return False


class Part(NamedTuple):
    """The indices stride * i of an axis, for i < size."""

    axis: int
    size: int
    stride: int

    def split(self, size: int) -> tuple[Part, Part]:
        """Splits the axis into a major axis of `size` elements, and the rest."""
        rest = self.size // size
        return Part(self.axis, size, self.stride * rest), Part(self.axis, rest, self.stride)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["base"], meta_fields=["groups", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class View:
    """An implicit array after casts, transposes and reshapes.

    Attributes:
        base: the implicit array.
        groups: for each axis of this `View`, a tuple of the `Part`s that are merged into the axis,
            from major to minor. A `Part` is an axis of `base` (for example a quantized matrix), or
            one of the smaller axes into which a reshape has split such an axis. For example, a
            reshape can split an axis of size 12 into axes of sizes 3 and 4.
        dtype: the dtype after casts.
    """

    base: ImplicitArray
    groups: tuple[tuple[Part, ...], ...]
    dtype: Any

    @classmethod
    def of(cls, base: ImplicitArray, dtype: Any = None) -> View:
        groups = tuple((Part(i, n, 1),) if n != 1 else () for i, n in enumerate(base.shape))
        return cls(base, groups, jnp.dtype(base.dtype if dtype is None else dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(_size(group) for group in self.groups)

    @property
    def ndim(self) -> int:
        return len(self.groups)

    @property
    def whole(self) -> bool:
        """Whether this `View` has the same axes as `base` (for example a quantized matrix), in the
        same order."""
        return self.groups == View.of(self.base).groups

    def astype(self, dtype: Any) -> View:
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def transpose(self, permutation: tuple[int, ...]) -> View:
        return dataclasses.replace(self, groups=tuple(self.groups[i] for i in permutation))

    def reshape(self, shape: tuple[int, ...]) -> View | None:
        """Returns the reshaped view, or None if splitting and then merging adjacent axes cannot
        give the new shape."""
        parts = [part for group in self.groups for part in group]
        groups = []
        for size in shape:
            group: list[Part] = []
            missing = size
            while missing != 1:
                if not parts:
                    return None
                part = parts.pop(0)
                if missing % part.size == 0:
                    group.append(part)
                    missing //= part.size
                elif part.size % missing == 0:
                    outer, inner = part.split(missing)
                    group.append(outer)
                    parts.insert(0, inner)
                    missing = 1
                else:
                    return None
            groups.append(_merged(group))
        return dataclasses.replace(self, groups=tuple(groups)) if not parts else None

    def part(self, leaves: Callable) -> View | None:
        """Applies a function to each stored array of `base`, such as the codes and scales of a
        quantized matrix.

        `leaves` is a function of one array that slices or reshapes axis 0. Returns a `View` of the
        new implicit array, or None if this `View` transposes or reshapes its own, or if the stored
        arrays cannot be sliced along axis 0.
        """
        if not self.whole or not self.base.has_leading_axis:
            return None
        return View.of(jax.tree.map(leaves, self.base), self.dtype)

    def materialize(self) -> jax.Array:
        parts = [part for group in self.groups for part in group]
        by_axis = sorted(parts, key=lambda part: (part.axis, -part.stride))
        array = self.base.materialize().reshape([part.size for part in by_axis])
        array = array.transpose([by_axis.index(part) for part in parts])
        return array.reshape(self.shape).astype(self.dtype)

    def dot(self, x: jax.Array, contracted: tuple[int, ...], batch: int, dot: Callable) -> Any:
        """Returns the matrix product of x and this `View`, or `NotImplemented` if the array must be
        materialized first.

        Args:
            x: a plain array of shape [*batch axes, ..., *contracted axes], the left operand of the
                matrix product.
            contracted: the contracted axes of this `View`.
            batch: the number of batch axes. The batch axes are the first axes of x and of this
                `View`.
            dot: a function `dot(x, w, axes)` that contracts the last axes of x with `axes` of a
                plain array w.

        Returns:
            An array of shape [*batch axes, *free axes of x, *free axes of this `View`], where free
            axes are neither batch axes nor contracted axes.
        """
        if batch:
            return self._batched(x, contracted, batch, dot)
        axes = self._whole_axes(contracted)
        if axes is None:
            return NotImplemented
        lead = x.shape[: x.ndim - len(contracted)]
        x = x.reshape(*lead, *(self.base.shape[axis] for axis in axes))
        y = self.base.dot(x, axes, dot)  # [*lead, *the other axes of base]
        if y is NotImplemented:
            return y
        others = [axis for axis in range(self.base.ndim) if axis not in axes]
        free = [i for i in range(self.ndim) if i not in contracted]
        parts = [part for axis in others for part in self._parts(axis)]
        order = [parts.index(part) for i in free for part in self.groups[i]]
        y = y.reshape(*lead, *(part.size for part in parts))
        y = y.transpose(*range(len(lead)), *(len(lead) + i for i in order))
        return y.reshape(*lead, *(self.shape[i] for i in free))

    def _whole_axes(self, contracted: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the axes of `base` of which some axes of this `View` consist, or None if these
        contain only parts of an axis, or the parts of an axis in another order."""
        parts = [part for i in contracted for part in self.groups[i]]
        axes = tuple(dict.fromkeys(part.axis for part in parts))
        whole = [part for axis in axes for part in self._parts(axis)]
        return axes if parts == whole else None

    def _batched(self, x: jax.Array, contracted: tuple[int, ...], batch: int, dot: Callable) -> Any:
        size = self.base.shape[0]
        first = (Part(0, size, 1),) if size != 1 else ()
        if not self.base.has_leading_axis or self.groups[0] != first:
            return NotImplemented
        # Without axis 0, each axis of `base` has a smaller index.
        groups = tuple(
            tuple(part._replace(axis=part.axis - 1) for part in group) for group in self.groups[1:]
        )
        inner_contracted = tuple(i - 1 for i in contracted)
        implemented = True

        def one(base: ImplicitArray, x: jax.Array) -> Any:
            nonlocal implemented
            y = View(base, groups, self.dtype).dot(x, inner_contracted, batch - 1, dot)
            implemented = y is not NotImplemented
            return y if implemented else x  # jax.vmap needs an array

        y = jax.vmap(one)(self.base, x)
        return y if implemented else NotImplemented

    def _parts(self, axis: int) -> list[Part]:
        """Returns the parts of an axis of `base`, from major to minor."""
        parts = [part for group in self.groups for part in group if part.axis == axis]
        return sorted(parts, key=lambda part: -part.stride)


def plain_dot(precision: Any, preferred: Any) -> Callable:
    """Returns the function `dot(x, w, axes)` for plain arrays, which contracts the last axes of x
    with `axes` of w."""

    def dot(x: jax.Array, w: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        contracted = tuple(range(x.ndim - len(axes), x.ndim))
        return lax.dot_general(
            x,
            w,
            ((contracted, tuple(axes)), ((), ())),
            precision=precision,
            preferred_element_type=preferred,
        )

    return dot


def implicit_dot(w: Any, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
    """Computes `dot(x, w, axes)` for an implicit or a plain array w."""
    return w.dot(x, axes, dot) if isinstance(w, ImplicitArray) else dot(x, w.astype(x.dtype), axes)


def materialize(x: Any) -> Any:
    """Returns the array that an implicit array represents, and a plain array unchanged."""
    return x.materialize() if isinstance(x, ImplicitArray) else x


def is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def _size(group: tuple[Part, ...]) -> int:
    return math.prod(part.size for part in group)


def _merged(group: list[Part]) -> tuple[Part, ...]:
    """Merges adjacent parts of a split axis. For example, if an axis of size 3 * 4 was split into
    axes of sizes 3 and 4, these are merged into one axis of size 12."""
    merged: list[Part] = []
    for part in group:
        if merged and merged[-1].axis == part.axis and merged[-1].stride == part.size * part.stride:
            outer = merged.pop()
            part = Part(part.axis, outer.size * part.size, part.stride)
        merged.append(part)
    return tuple(merged)
