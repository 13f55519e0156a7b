"""Transforms: functions that take a function and return a function. The transforms of JAX are
re-exported unchanged.

Transforms compose:

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
    value_and_grad,
    vmap,
)

from fnet.jaxpr import rewrite, tag
from fnet.transforms._autocast._autocast import autocast, full_precision
from fnet.transforms._autocast._loss_scale import (
    LossScaleState,
    loss_scale,
    loss_scale_state,
    scaled_value_and_grad,
)
from fnet.transforms._bucket._bucket import bucket
from fnet.transforms._capture._capture import (
    SiteInfo,
    Sites,
    capture,
    capture_cotangents,
    intervene,
    sites,
)
from fnet.transforms._capture._name_scopes import name_scopes
from fnet.transforms._derivatives import hvp, per_example
from fnet.transforms._explain import explain
from fnet.transforms._fold import fold
from fnet.transforms._implicit import use_implicit_arrays
from fnet.transforms._invariant._invariant import invariant
from fnet.transforms._microbatch import microbatch
from fnet.transforms._pack._pack import pack
from fnet.transforms._pmap import pmap, replicate, shard, unreplicate
from fnet.transforms._rematerialize import rematerialize
from fnet.transforms._tune._tune import tune

__all__ = [
    "LossScaleState",
    "SiteInfo",
    "Sites",
    "autocast",
    "bucket",
    "capture",
    "capture_cotangents",
    "checkpoint",
    "custom_jvp",
    "custom_vjp",
    "explain",
    "fold",
    "full_precision",
    "grad",
    "hessian",
    "hvp",
    "intervene",
    "invariant",
    "jacobian",
    "jit",
    "loss_scale",
    "loss_scale_state",
    "microbatch",
    "name_scopes",
    "pack",
    "per_example",
    "pmap",
    "rematerialize",
    "replicate",
    "rewrite",
    "scaled_value_and_grad",
    "shard",
    "sites",
    "tag",
    "tune",
    "unreplicate",
    "use_implicit_arrays",
    "value_and_grad",
    "vmap",
]
