"""fold: treats the parameters of a function as constants, and precomputes the values that depend on
no other input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fnet import _jax, jaxpr
from fnet.jaxpr import Structure, Traced, check_function
from fnet.transforms._folding import Fold, Folder
from fnet.transforms._tune._tune import tune


class Folded:
    """The result of `fold`: a function whose parameters are constants."""

    def __init__(self, f: Callable, params: Any, state: Any):
        self._f, self._params, self._state = f, params, state
        self._programs: dict = {}
        self.__name__ = f"folded {getattr(f, '__name__', type(f).__name__)}"

    def __call__(self, *args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._traced(args, kwargs)
        arrays = [leaf for leaf in leaves if jaxpr.is_array(leaf)]
        key = Structure((args, kwargs)), tuple(jax.typeof(x) for x in arrays)
        if key not in self._programs:
            self._programs[key] = self._compiled(leaves, structure)
        run, weights, restore = self._programs[key]
        return restore(run(weights, arrays))

    def _traced(self, args, kwargs, folder=None):
        traced = Traced(self._applied, args, kwargs)
        return traced.result((folder or Folder())(traced.closed, traced.arrays))

    def _applied(self, *args, **kwargs):
        if self._state is None:
            return self._f(self._params, *args, **kwargs)
        return self._f(self._params, *args, state=self._state, **kwargs)[0]

    def _compiled(self, leaves, structure):
        """Returns (run, weights, restore). `run(weights, arrays)` is the compiled program, and
        `restore` converts its result to the result of f."""
        args, kwargs = jax.tree.unflatten(structure, leaves)
        traced = Traced(self._applied, args, kwargs)
        closed = _jax.make_jaxpr(lambda *arrays: Folder()(traced.closed, list(arrays)))(
            *traced.arrays
        )
        return tune(jax.jit(Folder.program(closed))), closed.consts, traced.result

    def explained(self, *args, **kwargs) -> Folds:
        """Returns a `Folds` object, which lists the matrix products and convolutions that `fold`
        changed."""
        folder = Folder()
        jax.eval_shape(lambda: self._traced(args, kwargs, folder))
        return Folds(tuple(folder.folds))


@dataclasses.dataclass(frozen=True)
class Folds:
    """The result of `ft.explain` for a folded function: the matrix products and convolutions that
    `fold` changed. `str()` returns a table.

    Attributes:
        rows: one `Fold` object for each changed matrix product or convolution. A `Fold` describes a
            matrix product or convolution by the fields `path` (its named scope), `primitive`, and
            `folded` (the primitives of the operations that were merged into it).
    """

    rows: tuple[Fold, ...]

    def __str__(self):
        width = max((len(row.path or "(no scope)") for row in self.rows), default=0)
        lines = [f"{len(self.rows)} products with folded affine maps"]
        return "\n".join(
            [
                *lines,
                *(
                    f"{row.path or '(no scope)':<{width}}  {row.primitive}: {', '.join(row.folded)}"
                    for row in self.rows
                ),
            ]
        )


def fold(f: Callable, params: Any, state: Any = None) -> Callable:
    """Treats the parameters of f as constants. Values that depend only on the parameters are
    computed once. Constant scales and shifts after a matrix product or convolution are merged into
    its kernel and bias.

        predict = ft.fold(model, params, state)
        logits = predict(x)                         # model(params, x, state=state)[0]

    A matrix product or convolution with a constant kernel is often followed by additions and
    multiplications with constants for each output feature, such as biases, scales, and the running
    statistics of BatchNorm. `fold` multiplies the kernel by the scale factors, and combines all
    additions into one, for example for a matrix product:

        ((x @ kernel) - mean) * rate + bias  =  x @ (kernel * rate) + (bias - mean * rate)

    `ft.explain(predict, x)` lists the matrix products and convolutions that `fold` changed. `fold`
    does not change 16-bit matrix products and convolutions, because the new kernels would have to
    be rounded to 16 bits. Matrix products and convolutions inside loops also stay unchanged, and so
    does a product whose new kernel or bias would overflow or underflow where the product and the
    constants do not, for example after a division by 0. The folded function returns the results of
    f up to rounding, about 1e-6.

    Args:
        f: any function `f(params, *args, **kwargs)`, such as a model of any library.
        params: the parameters of f, a tree of arrays.
        state: the state of f, a tree of arrays. If `state` is passed, f must return (output, state)
            when it is called as `f(params, *args, state=state, **kwargs)`. Default None.

    Returns:
        A function of the other arguments (`*args` and `**kwargs`) that returns the output of f.
        This function is already jitted. The folded function can be differentiated with respect to
        its arguments, batched, and called inside other functions.

    Source: Jacob et al. (2018), Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, section 3.2 (folding of batch normalization).

    >>> from fnet import layers as nn
    >>> model, x = nn.Sequential(nn.Conv(4, 3), nn.BatchNorm(), jax.nn.relu), jax.numpy.ones((2, 8, 8, 3))
    >>> params, state = model.init(jax.random.key(0), x)
    >>> predict = fold(model, params, state)
    >>> predict(x).shape
    (2, 8, 8, 4)
    >>> from fnet import transforms as ft
    >>> print(ft.explain(predict, x))
    1 products with folded affine maps
    0  conv_general_dilated: add, sub, mul, add
    """
    check_function("fold(f, params)", f)
    for path, leaf in jax.tree_util.tree_leaves_with_path((params, state)):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"fold: expected fixed parameters, but {jax.tree_util.keystr(path[1:])} is traced; "
                f"call "
                "fold outside of jit, grad and vmap"
            )
    return Folded(f, params, state)
