"""Transforms: functions of functions. JAX's own are handed on unchanged; fnet's stand beside them.

    from fnet import transforms as ft

    step = ft.jit(ft.microbatch(ft.value_and_grad(loss), 4))
"""

from jax import (
    checkpoint,
    custom_jvp,
    custom_vjp,
    grad,
    hessian,
    jacobian,
    jit,
    pmap,
    value_and_grad,
    vmap,
)

from fnet.transforms._derivatives import hvp, per_example
from fnet.transforms._microbatch import microbatch
from fnet.transforms._rewrite import rewrite

__all__ = [
    "checkpoint", "custom_jvp", "custom_vjp", "grad", "hessian", "hvp", "jacobian", "jit", "microbatch", "per_example",
    "pmap", "rewrite", "value_and_grad", "vmap",
]
