"""Primitives with a kernel in C++, which are JAX's own operations wherever it cannot be called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.native._library import library


def define(name: str, portable: Callable[..., list], kernel: Callable[..., list]) -> Any:
    """Returns a primitive whose results are a list.

    The kernel is called in programs for one CPU, and on each device inside `shard_map`. A program
    that is exported, differentiated, mapped or divided over devices contains `portable` instead.

    Args:
        name: the name of the primitive.
        portable: `portable(*arrays, **params)` computes the results by JAX's operations.
        kernel: `kernel(types, *arrays, **params)` computes them by a call of the library. `types`
            are those of the results.
    """
    primitive: Any = Primitive(name)
    primitive.multiple_results = True
    run = jax.jit(
        lambda *arrays, params: primitive.bind(*arrays, **dict(params)), static_argnames="params"
    )

    @functools.lru_cache(1024)
    def traced(types: tuple, params: tuple) -> Any:
        return _jax.make_jaxpr(functools.partial(portable, **dict(params)))(*types)

    @primitive.def_impl
    def _(*arrays: Any, **params: Any) -> list:
        with jax.disable_jit(False):  # there is no implementation outside of jit
            return run(*arrays, params=tuple(params.items()))

    @primitive.def_abstract_eval
    def _(*types: Any, **params: Any) -> list:
        return list(traced(types, tuple(params.items())).out_avals)

    def derivative(primals: Any, tangents: Any, **params: Any) -> Any:
        moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def moved(*inputs: Any) -> list:
            arrays = list(primals)
            for i, x in zip(moving, inputs):
                arrays[i] = x
            return portable(*arrays, **params)

        return jax.jvp(moved, [primals[i] for i in moving], [tangents[i] for i in moving])

    def batch(arrays: Any, axes: Any, **params: Any) -> Any:
        mapped = jax.vmap(functools.partial(portable, **params), in_axes=tuple(axes))
        results = mapped(*arrays)
        return results, [0] * len(results)

    def lower_on_cpu(ctx: Any, *values: Any, **params: Any) -> Any:
        called = portable
        if _jax.kernels.partitioning(ctx) == "whole" and library():
            called = functools.partial(kernel, ctx.avals_out)
        return mlir.lower_fun(functools.partial(called, **params))(ctx, *values)

    def plain(eqn: Any) -> Any:
        return traced(tuple(v.aval for v in eqn.invars), items(**eqn.params)).jaxpr

    def items(**params: Any) -> tuple:
        return tuple(params.items())

    def explain(*avals: Any, **params: Any) -> str:
        kernels = library()
        return "fnet's kernel for CPUs" if kernels else f"by XLA: {kernels.reason}"

    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(portable))
    mlir.register_lowering(primitive, lower_on_cpu, platform="cpu")
    traits = jaxpr.Traits("product", memory="heavy")
    jaxpr.describe(primitive, jaxpr.Description(traits, plain=plain, explain=explain))
    return primitive
