"""Calls JAX's attention kernels directly, without JAX's differentiable functions for them. Imported
on first use."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from fnet._jax._features import Missing, private
from fnet._jax._tracing import kernels_in_exports

_PARTITIONED = "attention kernels of partitioned programs"
_dispatch = private("jax._src.dispatch", _PARTITIONED)
_ShardingContext = private("jax._src.sharding_impls.ShardingContext", _PARTITIONED)
_SPMDAxisContext = private("jax._src.sharding_impls.SPMDAxisContext", _PARTITIONED)
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"


@functools.cache
def _cudnn() -> Any:
    return private("jax._src.cudnn.fused_attention_stablehlo", "cuDNN's attention")


@functools.cache
def _splash() -> tuple:
    """Returns JAX's splash attention. Its import loads Pallas."""
    return tuple(
        private(name, "splash attention")
        for name in (_SPLASH, f"{_SPLASH}.splash_attention_kernel", "jax._src.config._check_vma")
    )


def unavailable(platform: str) -> str | None:
    """Returns the reason why this version of JAX has no attention kernel for `platform` ("cuda" or
    "tpu"), or None if it has a kernel."""
    modules = (_cudnn(),) if platform == "cuda" else _splash()
    return next(
        (
            f"JAX {jax.__version__} has no {module._path}"
            for module in modules
            if isinstance(module, Missing)
        ),
        None,
    )


def tell_devices(*primitives: Any) -> None:
    """Makes JAX pass the devices of a program to the lowering rules of `primitives`.

    If a program contains any of the `primitives`, JAX requires that the program uses a single mesh.
    The lowering rule of an attention kernel needs the devices of the program only if the kernel
    runs on several GPUs. Attention kernels on GPUs require JAX's CUDA plugin, so `tell_devices` has
    no effect without this plugin.
    """
    if _cuda_versions():
        _dispatch.prim_requires_devices_during_lowering.update(primitives)


def _cuda_versions() -> Any:
    """Returns JAX's module with the versions of the CUDA libraries, or None without JAX's CUDA
    plugin."""
    return private("jax._src.lib.cuda_versions", "cuDNN's attention")


CUSTOM_CALLS = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "tpu_custom_call",
)
"""The names by which compiled programs call the attention kernels."""


def partitioning(ctx: Any) -> str:
    """Returns a string, such as "whole", that states how XLA distributes an equation over devices.
    `ctx` is the context that JAX passes to the lowering rule of the equation.

    Returns:
        "portable": the program is exported, or lowered for several platforms, so the platform is
        not known. "whole": the equation runs on one device, or on the shards of a shard_map.
        "split": XLA partitions the equation.
        "unknown": XLA partitions the equation, but the devices are not known yet.
    """
    for_export = ctx.module_context.lowering_parameters.for_export and not kernels_in_exports.value
    if for_export or len(ctx.module_context.platforms) > 1:
        return "portable"
    context = ctx.module_context.axis_context
    if isinstance(context, _ShardingContext):
        return (
            "whole"
            if context.num_devices == 1
            else "unknown"
            if context.device_assignment is None
            else "split"
        )
    if isinstance(context, _SPMDAxisContext):
        return "whole" if set(context.manual_axes) == set(context.mesh.axis_names) else "split"
    return "whole"


def cudnn_version() -> int | None:
    """Returns the version of cuDNN that JAX uses, such as 90100 for 9.1.0, or None if there is no
    cuDNN."""
    versions = _cuda_versions()
    return versions.cudnn_get_version() if versions else None


def cudnn_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    lengths: Any,
    *rest: Any,
    scale: Any,
    causal: Any,
    window: Any,
    residuals: Any = True,
) -> list:
    """Computes cuDNN's flash attention. The inputs q [b, t, h, d] and k, v [b, s, g, d] have a
    16-bit dtype.

    If the arguments `rest` are not passed, the function computes the forward pass of attention. The
    forward pass returns the output and, if `residuals` is true, the logsumexp of the attention
    logits, [b, h, t]. If the arguments `rest` are passed, the function computes the backward pass
    of attention, which returns the gradients of q, k and v. For the backward pass, the arguments
    `rest` are, in this order, the logsumexp of the attention logits, the output, and the gradient
    of the output.
    """
    fused = _cudnn()
    name = "dot_product_attention_bwd" if rest else "dot_product_attention_fwd"
    kinds = fused.MaskType
    kind = ((kinds.NO_MASK, kinds.CAUSAL), (kinds.PADDING, kinds.PADDING_CAUSAL))[
        lengths is not None
    ][causal]
    given = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),
        "mask_type": kind,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
        "is_training": residuals,
    }
    # A later version of JAX may add parameters. They are optional, and None disables them.
    rule = inspect.signature(getattr(fused, f"_{name}_cuda_lowering")).parameters.values()
    operands = {
        "ctx",
        "query",
        "key",
        "value",
        "bias",
        "q_seqlen",
        "kv_seqlen",
        "q_offsets",
        "kv_offsets",
        "page_table_k",
        "page_table_v",
        "activation",
        "fwd_output",
        "grad_output",
    }
    params = {
        p.name: given.get(p.name)
        for p in rule
        if p.name not in operands and p.kind is not p.VAR_POSITIONAL
    }
    none = jnp.zeros(0, q.dtype)
    queries = none if lengths is None else jnp.full(q.shape[0], q.shape[1], jnp.int32)
    return getattr(fused, f"_{name}_p").bind(
        q,
        k,
        v,
        none if bias is None else bias,
        queries,
        none if lengths is None else lengths,
        none,
        none,
        none,
        none,
        *rest,
        **params,
    )


def splash_attention(
    q: Any,
    k: Any,
    v: Any,
    ids: Any,
    *rest: Any,
    causal: Any,
    window: Any,
    block: Any,
    residuals: Any = True,
    interpret: Any = False,
) -> Any:
    """Computes splash attention on TPUs with its Pallas kernels, for one row of a batch: q [h, t,
    d] and k, v [g, s, d]. A query attends only to keys with its own number in `ids`, None or
    integers ([t], [s]). The function does not scale the attention logits, so the caller must pass
    scaled queries q.

    If the arguments `rest` are not passed, the function computes the forward pass of attention. The
    forward pass returns the output and, if `residuals` is true, the logsumexp of the attention
    logits, [h, t]. If the arguments `rest` are passed, the function computes the backward pass of
    attention, which returns the gradients of q, k and v. For the backward pass, the arguments
    `rest` are, in this order, the output, the logsumexp of the attention logits, and the gradient
    of the output.
    """
    splash, kernels, check_vma = _splash()
    shape = q.shape[1], k.shape[1]
    mask = (
        splash.LocalMask(shape, (window - 1, 0 if causal else window - 1), 0)
        if window is not None
        else splash.CausalMask(shape)
        if causal
        else splash.FullMask(shape)
    )
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[0]),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=residuals and not rest,
        interpret=interpret,
    )
    ids = ids and splash.SegmentIds(*ids)
    with check_vma(False):  # the kernels do not state over which mesh axes results vary
        return _run(kernels, kernel, q, k, v, ids, *rest)


def _run(kernels: Any, kernel: Any, q: Any, k: Any, v: Any, ids: Any, *rest: Any) -> Any:
    if not rest:
        results = kernel(q, k, v, ids)
        return (results[0], *results[1]) if kernel.kwargs["save_residuals"] else (results,)
    out, logsumexp, gradient = rest
    options = dict(kernel.kwargs)
    args = [
        options[name]
        for name in inspect.signature(kernels._splash_attention_bwd).parameters
        if name in options
    ]
    kept = q, k, v, ids, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info
    return tuple(kernels._splash_attention_bwd(*args, kept, gradient)[3:6])
