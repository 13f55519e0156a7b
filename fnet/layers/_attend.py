"""Dot-product attention as a primitive whose implementation is selected when the program is
compiled.

There are three primitives. `attention` computes the output. `attention_tangent` computes the
tangent of the output, and is used by the JVP of `attention`. The primitive `attention_tangent` is
linear in the tangents of query, key and value. The transpose of `attention_tangent` is
`attention_backward`, which computes the cotangents in a backward pass. `attention_tangent` and
`attention_backward` are differentiated by JAX: their derivatives are those of equivalent operations
of `jax.lax`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.jaxpr import automatic
from fnet.layers import _attend_flash as flash
from fnet.layers import _attend_packed as packed
from fnet.layers import _attend_xla as xla
from fnet.layers._attend_xla import Form, Products
from fnet.layers._explicit import like
from fnet.layers._segments import numbered, padded
from fnet.layers._sizes import integers, sized


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
    segments: jax.Array | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Scaled dot-product attention.

        out[t, h] = sum_s softmax_s(scale query[t, h] . key[s, g] + mask[t, s]) value[s, g],  g = h // (heads / groups)

    >>> q = k = v = jnp.ones((2, 8, 4, 16))
    >>> dot_product_attention(q, k, v, causal=True).shape
    (2, 8, 4, 16)

    A CPU processes the queries in blocks, and skips keys that `causal`, `window` or `segments`
    hides from a whole block. A GPU or TPU runs a flash attention kernel if it supports the
    arguments, and what XLA makes of the formula if not; `transforms.explain` reports which. For the
    backward pass, query, key, value and output are stored, and the attention weights recomputed.
    The stored output has the name "attention", by which
    `jax.checkpoint_policies.save_only_these_names` can select it. Forward-mode and reverse-mode
    derivatives of any order are supported.

    Glossary: b batch, t time of the queries, s time of the keys, h query heads (`heads` in the
    formula), g key/value heads (`groups`), d head_dim.

    Args:
        query: [b, t, h, d].
        key, value: [b, s, g, d] in the query's dtype. h / g query heads share one key/value head
            (Ainslie et al., 2023).
        mask: boolean, True if a query may attend to a key: [t, s], [b, t, s] or [b, h, t, s]. Any
            axis may have length 1. In the formula, True is 0 and False minus infinity. Default
            None: no mask.
        lengths: integers [b], the number of valid keys at the start of each example; the others
            (padding) are ignored. Default None: all are valid.
        starts: integers [b], the position of the first query of each example, counted from the
            example's first key, for `causal` and `window`. Default None: 0.
        segments: integers [b, t], for texts that are packed into one row, where t = s: the number
            of the text of each token, or 0 for padding. A query attends only to keys of its own
            text, and padding to none. Default None: one text in each row.
        causal: whether a query attends only to its own and earlier positions. Default False.
        window: the size of a sliding window (Beltagy et al., 2020). With `causal`, a query attends
            to the last `window` keys, its own included; without, to all keys less than `window`
            positions away. Default None: no limit.
        scale: the factor by which the logits are multiplied. Default None: 1 / sqrt(d).
        softcap: a bound on the logits: softcap * tanh(logits / softcap) replaces the scaled logits,
            as in Gemma 2. Default None: no bound.

    Returns:
        [b, t, h, d] in the query's dtype, 0 for a query that attends to no key. The softmax is
        computed in float32, or in float64 for float64 inputs. A NaN in a key or value makes the
        outputs of all queries that attend to it NaN, and depending on the implementation also
        those of other queries.

    Raises:
        ValueError: the shapes do not match, `window` is less than 1, `softcap` is not positive, or
            `segments` and `starts` are combined.
        TypeError: the dtypes differ or are not floating-point.

    Source: Vaswani et al. (2017), Attention Is All You Need, section 3.2.
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    _check(query, key, value)
    (b, t, h, _), s = query.shape, key.shape[1]
    if mask is not None:
        mask = mask_of(mask, (b, h, t, s), "dot_product_attention: mask")
    lengths, starts = (
        None if x is None else integers(x, b, f"dot_product_attention: {name}")
        for x, name in ((lengths, "lengths"), (starts, "starts"))
    )
    if segments is not None:
        segments = _segments_of(segments, starts, b, t, s)
        if lengths is not None:
            segments, lengths = padded(segments, lengths), None
    if window is not None and window < 1:
        raise ValueError(f"dot_product_attention: window must be >= 1; got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"dot_product_attention: softcap must be above 0; got {softcap}")
    return attend(
        query,
        key,
        value,
        mask=mask,
        lengths=lengths,
        starts=starts,
        segments=segments,
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
    )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    lengths: jax.Array | None = None,
    starts: jax.Array | None = None,
    segments: jax.Array | None = None,
    causal: bool,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes `dot_product_attention` for arguments that are already validated; the mask has four
    axes."""
    where = where_seen(mask, lengths, starts, segments)
    given = tuple(where)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    form = Form(
        bool(causal),
        window,
        scale,
        given,
        jax.config.jax_default_matmul_precision,
        None if softcap is None else float(softcap),
    )
    _jax.kernels.tell_devices(attention_p, backward_p)
    arrays = _jax.vary_alike(query, key, value, *where.values())
    return attention_p.bind(
        *arrays, form=form, compute=query.dtype, outs=(query.dtype,), residuals=False
    )[0]


def where_seen(
    mask: jax.Array | None,
    lengths: jax.Array | None,
    starts: jax.Array | None,
    segments: jax.Array | None,
) -> dict[str, jax.Array]:
    """Returns the optional arrays of an attention that are not None, by name, in the order of
    `Form.given`."""
    where = {"mask": mask, "lengths": lengths, "starts": starts, "segments": segments}
    return {name: x for name, x in where.items() if x is not None}


def _segments_of(
    segments: jax.Array, starts: jax.Array | None, b: int, t: int, s: int
) -> jax.Array:
    who = "dot_product_attention: segments"
    if starts is not None:
        raise ValueError(f"{who} cannot be combined with starts: packed rows begin at position 0")
    if t != s:
        raise ValueError(f"{who} need as many keys as queries; got {t} queries and {s} keys")
    return numbered(segments, (b, t), who)


def mask_of(mask: jax.Array, shape: tuple[int, ...], what: str) -> jax.Array:
    """Checks a mask, and returns it with four axes. `what` is the beginning of the error message."""
    mask = jnp.asarray(mask)
    full = (
        (mask.shape[0], 1, *mask.shape[1:])
        if mask.ndim == 3
        else (1,) * (4 - mask.ndim) + mask.shape
    )
    fits = 2 <= mask.ndim <= 4 and all(have in (1, need) for have, need in zip(full, shape))
    if not fits or mask.dtype != jnp.bool_:
        raise ValueError(
            f"{what} must be boolean (True: attend) with shape [t, s], [b, t, s] or [b, h, t, s] "
            f"of {shape}; got {mask.dtype}{list(mask.shape)}"
        )
    return mask.reshape(full)


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if (
        not all(x.ndim == 4 for x in (query, key, value))
        or key.shape != value.shape
        or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
    ):
        raise ValueError(
            "dot_product_attention: expected query [batch, time, heads, head_dim], and key and "
            "value [batch, keys, key/value heads, head_dim] with equal batch and head_dim; got "
            f"{shapes}"
        )
    if not key.shape[2] or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"dot_product_attention: {query.shape[2]} heads must be a multiple of {key.shape[2]} "
            "key/value heads"
        )
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError(
            "dot_product_attention: query, key and value must have one floating-point dtype; got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )


# The primitives. The operands are query, key and value, then the arrays named in `form.given`, then
# the operands listed in the docstrings below. The parameter `compute` is the dtype to which
# operands of products are rounded, and `outs` contains the dtypes of the results. Autocast sets
# both.

attention_p = Primitive("attention")
"""Result: out. With `residuals`, the results are out, peak and total. Peak and total are the
softmax statistics that a backward pass needs. They have no derivatives: when the other two
primitives are differentiated, out, peak and total are recomputed from query, key and value."""

tangent_p = Primitive("attention_tangent")
"""Operands: ..., out, peak, total, then the tangents of those of query, key and value for which
`moving` is True. Result: the tangent of out."""

backward_p = Primitive("attention_backward")
"""Operands: ..., out, peak, total, the cotangent of out. Results: the cotangents of query, key and
value."""


def _attention(
    blocks: list[xla.Span] | None,
    products: Products,
    *args: Any,
    form: Form,
    compute: Any,
    outs: tuple,
    residuals: bool,
) -> Any:
    count = 3 if residuals else 1

    def run(*args: Any) -> list:
        if blocks is None:
            out, *statistics = packed.forward(form, products, *args)
        else:
            out, *statistics = xla.forward(form, products, blocks, *args)
        return [out.astype(outs[0]), *statistics][:count]

    statistics = like(args[0], 0, 2, 1)
    return automatic(run, [like(args[0], 0, 1, 2, 3), statistics, statistics][:count])(*args)


def _tangent(
    blocks: list[xla.Span],
    products: Products,
    *args: Any,
    form: Form,
    compute: Any,
    outs: tuple,
    moving: tuple[bool, ...],
) -> list:
    run = functools.partial(xla.tangent, form, products, blocks, moving)
    where, tangents = args[3 : 3 + len(form.given)], args[6 + len(form.given) :]
    return [automatic(run, like(args[0], 0, 1, 2, 3))(*args[:3], *where, *tangents).astype(outs[0])]


def _backward(
    blocks: list[xla.Span] | None,
    products: Products,
    *args: Any,
    form: Form,
    compute: Any,
    outs: tuple,
) -> list:
    run = (
        functools.partial(packed.backward, form, products)
        if blocks is None
        else functools.partial(xla.backward, form, products, blocks)
    )
    gradients = automatic(run, _cotangents(args))(*args)
    return [x.astype(dtype) for x, dtype in zip(gradients, outs)]


def _cotangents(args: tuple) -> tuple:
    return tuple(like(x, 0, 1, 2, 3) for x in args[:3])


def _in_one_block(operand: Callable, f: Callable[..., list], *args: Any, **params: Any) -> list:
    """Evaluates the attention function `f` on all queries and keys at once. The function `operand`
    maps the dtype `compute` to the dtype of the operands of the matrix products."""
    form, compute = params["form"], params["compute"]
    products = Products(compute, operand(compute), form.precision)
    return f([xla.Span(0, args[0].shape[1], 0, args[1].shape[1])], products, *args, **params)


_by_xla = functools.partial(_in_one_block, lambda compute: compute)
# The operations are the same on every platform. JAX differentiates them to compute higher
# derivatives. The operands of products are float32 instead of a 16-bit dtype, because XLA:CPU does
# not support all 16-bit products.
_whole = functools.partial(_in_one_block, xla.widened)


def _on_cpu(primitive: Any, f: Callable) -> Any:
    """Returns the lowering rule for CPUs."""

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        form, (q, k) = params["form"], ctx.avals_in[:2]
        # A loop over rows needs all rows on one device.
        skips = primitive is not tangent_p and packed.suits(form, q.shape[1], k.shape[1])
        skips = skips and _jax.kernels.partitioning(ctx) == "whole"
        run = functools.partial(_in_blocks, skips, f, **params)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    return rule


def _in_blocks(skips: bool, f: Callable[..., list], *args: Any, **params: Any) -> list:
    """Evaluates an attention function on a CPU. `skips`: whether blocks without a common text are
    skipped when the program runs."""
    # XLA:CPU supports bfloat16 products with float32 sums in two forms only. A program with another
    # form fails at run time: see transforms/_lowered.py.
    form, compute = params["form"], params["compute"]
    products = Products(compute, compute, form.precision, barred=compute == jnp.bfloat16)
    blocks = None if skips else xla.spans(form, args[0].shape[1], args[1].shape[1])
    return f(blocks, products, *args, **params)


def _by_kernel(platform: str, primitive: Any, f: Callable) -> Any:
    """Returns the lowering rule for a platform that has attention kernels."""

    def rule(ctx: Any, *values: Any, form: Form, compute: Any, outs: tuple, **params: Any) -> Any:
        partitioning = _jax.kernels.partitioning(ctx)
        kernel = flash.forward if primitive is attention_p else flash.backward

        def by_kernel(*args: Any) -> list:
            results = kernel(platform, form, compute, *params.values(), partitioning, *args)
            casted = [x.astype(dtype) for x, dtype in zip(results, outs)]
            return [*casted, *results[len(outs) :]]

        def by_xla(*args: Any) -> list:
            return _by_xla(f, *args, form=form, compute=compute, outs=outs, **params)

        q, k = ctx.avals_in[:2]
        refusal = flash.refusal(platform, form, compute, q, k, partitioning)
        run = by_kernel if refusal is None else by_xla
        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    return rule


def _explain(
    primitive: Any, query: jax.Array, key: Any, *_: Any, form: Form, compute: Any, **params: Any
) -> str:
    """Describes how an equation with an attention primitive is implemented on this machine."""
    platform = jax.default_backend()
    if platform == "cpu":
        if primitive is not tangent_p and packed.suits(form, query.shape[1], key.shape[1]):
            return "blocks of queries and keys without a common text are skipped, on one device"
        if len(xla.spans(form, query.shape[1], key.shape[1])) > 1:
            return "keys that are hidden from a whole block of queries are skipped"
        if not form.causal and form.window is None:
            return "plain XLA, because no key is hidden from all queries"
        if not sized(query.shape[1], key.shape[1]):
            return "plain XLA, because symbolic times cannot be split into blocks"
        return "plain XLA, because " + (
            "the hidden keys are only known at run time"
            if "starts" in form.given
            else "so few queries fit into one block"
        )
    if platform == "gpu":
        platform = "rocm" if "rocm" in jax.devices()[0].client.platform_version else "cuda"
    refused = (
        "there is no kernel for tangents"
        if primitive is tangent_p
        else flash.refusal(platform, form, compute, query, key)
    )
    if refused:
        return f"plain XLA, because {refused}"
    if platform == "cuda":
        return "cuDNN's flash attention"
    return "splash attention, a Pallas kernel, on one device or inside shard_map; plain XLA if XLA partitions it"


def _refusal(primitive: Any, platform: str, eqn: Any) -> str | None:
    """Returns why no kernel implements an equation on "cuda" or "tpu", or None if a kernel
    implements it."""
    if primitive is tangent_p:
        return "there is no kernel for tangents"
    return flash.refusal(platform, *_form(**eqn.params), *(v.aval for v in eqn.invars[:2]))


def _form(*, form: Form, compute: Any, **_: Any) -> tuple:
    return form, compute


def _weights(eqn: Any, arrays: list) -> Any:
    """Recomputes the attention weights [b, h, t, s], which no implementation stores."""
    form, compute = _form(**eqn.params)
    where = arrays[3 : 3 + len(form.given)]
    return xla.weights(
        form, Products(compute, xla.widened(compute), form.precision), *arrays[:2], *where
    )


def _reweighted(eqn: Any, arrays: list, weights: jax.Array) -> list:
    """Returns the outputs of an equation with the attention primitive, computed with the given
    attention weights."""
    form, compute = _form(**eqn.params)
    y = xla.mixed(Products(compute, xla.widened(compute), form.precision), weights, arrays[2])
    return [y.astype(eqn.outvars[0].aval.dtype)]


def _axes(eqn: Any) -> tuple:
    """Describes the axes of the inputs and outputs of an attention primitive (see
    `jaxpr.Description.axes`).

    The letters b, t, s, g and d stand for the same axes as in the docstring of
    `dot_product_attention`, such as b for batch. The letter "o" stands for an axis of length 1. The
    axis of the h query heads is written "gr", because each of the g key/value heads serves r query
    heads. Only the sizes of the head axes g and r may change.
    """
    (b, t, h, d), (_, s, g, _) = (v.aval.shape for v in eqn.invars[:2])
    sizes = {"b": b, "t": t, "s": s, "g": g, "r": h // g, "d": d, "o": 1}
    names = {"lengths": "b", "starts": "b", "segments": "b t"}
    if "mask" in (given := _form(**eqn.params)[0].given):
        shape = eqn.invars[3 + given.index("mask")].aval.shape
        names["mask"] = " ".join(
            name if n > 1 else "o" for name, n in zip(("b", "gr", "t", "s"), shape)
        )
    return (
        sizes,
        "gr",
        ["b t gr d", "b s g d", "b s g d", *(names[name] for name in given)],
        ["b t gr d"],
    )


def _lower(params: dict, compute: Any, out: Any) -> dict | None:
    """Returns the dtypes that autocast sets, or None if the user has set a precision."""
    if params["compute"] != jnp.float32 or params["form"].precision is not None:
        return None
    return {"compute": compute, "outs": (out,) * len(params["outs"])}


@functools.lru_cache(1024)
def _types(f: Callable, types: Any, params: Any) -> Any:
    """Returns the types of the results, including their shardings and varying mesh axes."""
    return _jax.make_jaxpr(functools.partial(_whole, f, **dict(params)))(*types).out_avals


def _define(primitive: Any, f: Callable) -> None:
    primitive.multiple_results = True
    run = jax.jit(
        lambda *args, params: primitive.bind(*args, **dict(params)), static_argnames="params"
    )
    primitive.def_impl(lambda *args, **params: run(*args, params=tuple(params.items())))
    primitive.def_abstract_eval(
        lambda *types, **params: list(_types(f, types, tuple(params.items())))
    )
    jaxpr.describe(
        primitive,
        jaxpr.Description(
            jaxpr.Traits("product", memory="heavy"),
            lower=_lower,
            explain=functools.partial(_explain, primitive),
            plain=lambda eqn: (
                _jax.make_jaxpr(functools.partial(_by_xla, f, **eqn.params))(
                    *(v.aval for v in eqn.invars)
                ).jaxpr
            ),
            refusal=functools.partial(_refusal, primitive),
            batch_first=True,
            inside={"weights": jaxpr.Inside(_weights, _reweighted)}
            if primitive is attention_p
            else {},
            axes=_axes if primitive is attention_p else None,
        ),
    )
    anywhere = mlir.lower_fun(functools.partial(_by_xla, f), multiple_results=True)
    mlir.register_lowering(primitive, anywhere)
    mlir.register_lowering(primitive, _on_cpu(primitive, f), "cpu")
    if primitive is not tangent_p:
        for platform in ("cuda", "tpu"):
            mlir.register_lowering(primitive, _by_kernel(platform, primitive, f), platform)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)


def _batch(primitive: Any, args: tuple, axes: tuple, *, form: Form, **params: Any) -> tuple:
    """Batching rule: merges the new axis with the batch axis."""
    size = next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)
    batch = args[0].shape[1 if axes[0] == 0 else 0]
    masks = [3 + i for i, name in enumerate(form.given) if name == "mask"]
    folded = []
    for i, (x, axis) in enumerate(zip(args, axes)):
        if axis is not None:
            x = jnp.moveaxis(x, axis, 0)
        elif i in masks and x.shape[0] == 1:
            folded.append(x)
            continue
        else:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        if x.shape[1] != batch:  # a mask shared by all examples
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        folded.append(x.reshape(size * batch, *x.shape[2:]))
    results = primitive.bind(*folded, form=form, **params)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)


def _derivative(
    primitive: Any, f: Callable, primals: tuple, tangents: tuple, **params: Any
) -> tuple:
    """JVP rule of a primitive: differentiates `f`, which computes the primitive's results with
    `jax.lax` operations."""
    moving = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def of(*moved: Any) -> Any:
        args = list(primals)
        for i, x in zip(moving, moved):
            args[i] = x
        return _whole(f, *args, **params)

    out_tangents = jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return primitive.bind(*primals, **params), out_tangents


def _attention_jvp(primals: tuple, tangents: tuple, *, residuals: bool, **params: Any) -> tuple:
    results = attention_p.bind(*primals, residuals=True, **params)
    out, peak, total = (checkpoint_name(x, "attention") for x in results)
    moving = tuple(not isinstance(x, ad.Zero) for x in tangents[:3])
    results, zeros = [out, peak, total], [ad.Zero(jax.typeof(x)) for x in (out, peak, total)]
    if any(moving):
        nonzero = itertools.compress(tangents, moving)
        zeros[0] = tangent_p.bind(*primals, out, peak, total, *nonzero, moving=moving, **params)[0]
    count = 3 if residuals else 1
    return results[:count], zeros[:count]


def _tangent_transpose(
    cotangents: tuple, *args: Any, form: Form, compute: Any, outs: tuple, moving: tuple[bool, ...]
) -> Any:
    count = len(args) - sum(moving)
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(args)
    outs = tuple(x.dtype for x in args[:3])
    gradients = backward_p.bind(*args[:count], cotangents[0], form=form, compute=compute, outs=outs)
    return [*[None] * count, *itertools.compress(gradients, moving)]


def _backward_transpose(
    cotangents: tuple, *args: Any, form: Form, compute: Any, outs: tuple
) -> Any:
    moving = tuple(not isinstance(x, ad.Zero) for x in cotangents)
    if not any(moving):
        return [None] * len(args)
    out_tangent = tangent_p.bind(
        *args[:-1],
        *itertools.compress(cotangents, moving),
        form=form,
        compute=compute,
        outs=(args[-1].aval.dtype,),
        moving=moving,
    )
    return [None] * (len(args) - 1) + out_tangent


def _backward_by_definition(
    blocks: list[xla.Span], products: Products, *args: Any, form: Form, compute: Any, outs: tuple
) -> list:
    """Computes the same cotangents of query, key and value as `_backward`, but with `jax.vjp` of
    the forward pass."""
    where = args[3 : 3 + len(form.given)]

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, *where: jax.Array
    ) -> tuple:
        return jax.vjp(
            lambda q, k, v: xla.forward(form, products, blocks, q, k, v, *where)[0], q, k, v
        )[1](cotangent)

    gradients = automatic(run, _cotangents(args))(*args[:3], args[-1].astype(products.wide), *where)
    return [x.astype(dtype) for x, dtype in zip(gradients, outs)]


_define(attention_p, _attention)
_define(tangent_p, _tangent)
_define(backward_p, _backward)
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[tangent_p] = functools.partial(_derivative, tangent_p, _tangent)
ad.primitive_jvps[backward_p] = functools.partial(_derivative, backward_p, _backward_by_definition)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
