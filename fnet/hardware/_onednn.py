"""The compiler option with which XLA on CPUs uses oneDNN's bfloat16 convolutions (in jaxlib 0.12
and later)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fnet.hardware._cpu import BFLOAT16, read_cpu

ONEDNN = {"xla_cpu_experimental_onednn_custom_call": True}


@functools.cache
def onednn() -> bool:
    """Whether the installed XLA can run bfloat16 convolutions with oneDNN. Returns False on CPUs
    without instructions for bfloat16 arithmetic (AMX or AVX-512), because oneDNN was not timed on
    such CPUs."""
    if BFLOAT16.isdisjoint(read_cpu().flags):
        return False
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 8, 8, 16), (3, 3, 16, 16)))
    f = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    try:
        return (
            "__onednn$convolution"
            in jax.jit(f).lower(x, w).compile(compiler_options=ONEDNN).as_text()
        )
    except jax.errors.JaxRuntimeError:  # the installed XLA does not have this option
        return False
