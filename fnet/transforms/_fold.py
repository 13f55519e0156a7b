"""fold: treats the parameters of a function as constants, and precomputes what depends on nothing
else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fnet import _jax, jaxpr
from fnet.jaxpr import Structure, Traced, check_function, pack
from fnet.transforms._folding import Fold, Folder
from fnet.transforms._tune._tune import tune


class Folded:
    """The result of `fold`: a function whose parameters are constants."""

    def __init__(self, f: Callable, params: Any, state: Any):
        self._f, self._stateful = f, state is not None
        self._arrays, self._form = pack((params, state))
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
        trees = self._arrays if self._form is None else self._form.unpack(self._arrays)
        params, state = trees
        if self._stateful:
            result, _ = self._f(params, *args, state=state, **kwargs)
        else:
            result = self._f(params, *args, **kwargs)
        if self._form is not None and (lost := self._form.lost(trees, self._arrays)):
            names = [path.partition("/")[2] for path in lost]
            raise ValueError(
                f"fold: the function changes {', '.join(names[:3])}{', ...' * (len(names) > 3)} of "
                "a module, whose arrays are constants here. Call model.eval() before, for "
                "inference mode"
            )
        return result

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
    """What `fold` changed, as `ft.explain` reports it. `str()` returns a table.

    Attributes:
        rows: one `Fold` for each changed matrix product or convolution, with the fields `path` (its
            named scope), `primitive`, and `folded` (the primitives of the operations that were
            merged into it).
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
    """Fixes the parameters of f, for faster inference: what depends only on them is computed once,
    and BatchNorm disappears into the kernel before it.

        predict = ft.fold(model, params, state)
        logits = predict(x)                         # model(params, x, state=state)[0]

    A matrix product or convolution is often followed by constant scales and shifts for each output
    feature, such as the running statistics of BatchNorm. `fold` multiplies the kernel by the scales
    and combines the shifts into one. For a matrix product:

        ((x @ kernel) - mean) * rate + bias  =  x @ (kernel * rate) + (bias - mean * rate)

    The results are those of f up to rounding, about 1e-6. Some products keep their kernels: 16-bit
    ones, since new kernels would have to be rounded to 16 bits; those inside loops; and those whose
    new kernel or bias would overflow or underflow where the product and the constants do not, for
    example after a division by 0. `ft.explain(predict, x)` lists those that changed.

    Args:
        f: any function `f(params, *args, **kwargs)`, such as a model of any library.
        params: the parameters of f, a tree of arrays.
        state: the state of f, a tree of arrays. With a state, f must return (output, state) when it
            is called as `f(params, *args, state=state, **kwargs)`. Default None.

    Returns:
        A function of the other arguments that returns the output of f. It is already jitted, and
        can be differentiated with respect to its arguments, batched, and called inside other
        functions.

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
                "call fold outside of jit, grad and vmap"
            )
    return Folded(f, params, state)
