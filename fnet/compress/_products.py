"""Lists the matrix products and convolutions that a function computes with its parameters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from fnet import _jax
from fnet.compress._rules import is_kernel
from fnet.compress._wrapped import Wrapped
from fnet.jaxpr import implicit_dot, is_implicit, tag
from fnet.transforms import sites, use_implicit_arrays

_NAME = re.compile(r"(?:.*/)?operand (\d+)(?:#\d+)?")


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution of an activation with a parameter, or with one layer of a
    stacked parameter.

    Attributes:
        path: the path of the parameter.
        x, w, y: the shapes and dtypes of the other operand (x), the parameter (w) and the result
            (y).
        axes: the contracted axes of the parameter, counted from the end, in increasing order.
        function: the function (x, w) -> y that computes the matrix product or convolution. w can be
            an ordinary array, or an object that represents an array, such as a quantized array.
        convolution: True for a convolution, False for a matrix product.
        count: the number of times that the matrix product or convolution is computed. Each
            enclosing scan multiplies `count` by its number of iterations, and each enclosing vmap
            multiplies `count` by its batch size.
        sliced: whether w is a slice of the parameter, as in a scan over stacked layers. XLA then
            copies the slice.
    """

    path: str
    x: jax.ShapeDtypeStruct
    w: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct
    axes: tuple[int, ...]
    function: Callable
    convolution: bool
    count: int = 1
    sliced: bool = False

    @property
    def flops(self) -> int:
        """The FLOPs of one computation of the matrix product or convolution."""
        return 2 * self.y.size * math.prod(self.w.shape[i] for i in self.axes)

    @property
    def key(self) -> tuple:
        """The key by which `grouped` groups operations. The key is a tuple that contains the jaxpr
        of the operation, and the shapes and dtypes of the operands."""
        program = _jax.make_jaxpr(self.function)(self.x, self.w)
        return self.x.shape, str(self.x.dtype), self.w.shape, self.axes, self.sliced, str(program)


class _Log(list):
    """A list of `Product`s, hashed and compared by identity, because JAX hashes and compares pytree
    metadata."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["path", "log"]
)
@dataclasses.dataclass(frozen=True)
class _Recorded(Wrapped):
    """A wrapper of a parameter that appends a `Product` to the list `log` for each matrix product
    or convolution with the parameter. The wrapper also tags the activation that is multiplied by
    the parameter, with a name that contains the index of the `Product` in `log`."""

    path: str
    log: _Log

    def dot(self, x, axes, dot):
        return self._record(x, axes, lambda x, w: implicit_dot(w, x, axes, dot))

    def convolve(self, x, convolution):
        axes = tuple(i for i in range(self.ndim) if i != convolution.kernel_axis)
        return self._record(
            x,
            axes,
            lambda x, w: (
                w.convolve(x, convolution) if is_implicit(w) else convolution(x, w.astype(x.dtype))
            ),
            True,
        )

    def _record(self, x, axes, function, convolution=False):
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, self.array)]
        tag(x, f"operand {len(self.log)}")
        self.log.append(
            Product(
                self.path,
                *types,
                jax.eval_shape(function, *types),
                tuple(sorted(i - self.ndim for i in axes)),
                function,
                convolution,
            )
        )
        return function(x, self.array)


def products(f: Callable, params: Any, *args: Any) -> list[Product]:
    """Lists the matrix products and convolutions in f(params, *args) that use a kernel or an
    embedding table.

    The list has the order of the computation. Arguments may be `jax.ShapeDtypeStruct`s. The list
    omits operations whose parameter is a bias, a norm scale or an implicit array (such as a
    quantized parameter). A matrix product or convolution inside a while loop or a branch of cond is
    counted once.
    """
    log, leaves = _Log(), leaves_by_path(params)

    def recorded(path, leaf):
        name = keystr(path, simple=True, separator="/")
        return (
            _Recorded(leaf, name, log) if not is_implicit(leaf) and is_kernel(path, leaf) else leaf
        )

    observed = tree_map_with_path(recorded, params, is_leaf=is_implicit)
    found = []
    for site in sites(use_implicit_arrays(f))(observed, *args):
        if match := _NAME.fullmatch(site.name):
            product = log[int(match[1])]
            times = math.prod(site.value.shape) // max(product.x.size, 1)
            sliced = len(leaves[product.path].shape) > len(product.w.shape)
            found.append(dataclasses.replace(product, count=max(times, 1), sliced=sliced))
    return found


def by_parameter(found: list[Product]) -> dict[str, list[Product]]:
    """Groups matrix products and convolutions by parameter: {path of the parameter: list of
    `Product`s}."""
    paths = dict.fromkeys(product.path for product in found)
    return {path: [product for product in found if product.path == path] for path in paths}


def leaves_by_path(params: Any) -> dict[str, Any]:
    """Returns {path: leaf} of a tree, in which implicit arrays (such as `Quantized`) are leaves."""
    return {
        keystr(path, simple=True, separator="/"): leaf
        for path, leaf in tree_flatten_with_path(params, is_leaf=is_implicit)[0]
    }


def grouped(found: list[Product]) -> list[list[Product]]:
    """Groups matrix products and convolutions that compute the same operation on equal shapes and
    dtypes."""
    key = lambda pair: pair[0]
    keyed = sorted(
        ((product.key, i) for i, product in enumerate(found)),
        key=lambda pair: (repr(pair[0]), pair[1]),
    )
    return [[found[i] for _, i in group] for _, group in itertools.groupby(keyed, key)]
