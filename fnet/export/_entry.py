"""An entry point of a program: a traced function, and its export for the platforms of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import export

from fnet import _jax, jaxpr

PLATFORMS = "cpu", "cuda", "tpu"
_EVALUATOR = jaxpr.Evaluator(lambda eqn, arrays: NotImplemented)  # changes nothing


class Entry:
    """A traced function of a program.

    Attributes:
        closed: the closed jaxpr of the traced function. The arguments of the jaxpr are the weights,
            in the order of `weights`, and the leaves of the inputs. The results of the jaxpr are
            the leaves of the tree that the traced function returns.
        weights: the names of the weights that the function uses. An array that the function closes
            over is also a weight. The name of a closed-over array is constants/DIGEST, where DIGEST
            is a hash of the array.
        inputs: the descriptions of the inputs, [(name, tree of {"dtype", "shape"})].
        output: the description of the output, a tree of {"dtype", "shape"}.
        constraints: the constraints on the symbolic sizes, a list of strings.
        types: the leaves of the inputs, as `jax.ShapeDtypeStruct`s.
    """

    def __init__(self, closed, weights, inputs, output, constraints, types):
        self.closed, self.weights, self.inputs, self.output = closed, weights, inputs, output
        self.constraints, self.types = constraints, types

    @functools.cached_property
    def portable(self) -> export.Exported:
        """The program, exported for all platforms. The arguments of the exported function are the
        weights, {name: array}, and the list of inputs. The result of the exported function is the
        list of outputs."""
        return self.exported(PLATFORMS)

    @functools.cached_property
    def compiled(self) -> Callable:
        """The portable program as a function that JAX compiles once for each choice of sizes."""
        return jax.jit(self.portable.call)

    def exported(self, platforms: tuple[str, ...]) -> export.Exported:
        def run(weights, inputs):
            return _EVALUATOR(self.closed, *(weights[name] for name in self.weights), *inputs)

        types = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype)
            for name, a in zip(self.weights, self.closed.in_avals)
        }
        allowed = (
            ()
            if len(platforms) > 1
            else tuple(map(export.DisabledSafetyCheck.custom_call, _jax.kernels.CUSTOM_CALLS))
        )
        with _jax.without_locations():
            return export.export(jax.jit(run), platforms=platforms, disabled_checks=allowed)(
                types, self.types
            )
