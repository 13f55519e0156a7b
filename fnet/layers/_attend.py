"""Dot-product attention as a primitive, which becomes what the chip at hand runs fast when the program is compiled.

Three primitives: attention itself; its slope, linear in the slopes of query, key and value, which is what attention's
JVP emits; and the transpose of that, which is what a backward pass runs. Derivatives of the latter two are those of
the ordinary operations that they stand for.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.layers import _attend_flash as flash
from fnet.layers import _attend_xla as xla
from fnet.layers._attend_xla import Form, Products
from fnet.layers._sizes import sized


def dot_product_attention(query, key, value, *, mask=None, lengths=None, starts=None, causal=False, window=None,
                          scale=None) -> jax.Array:
    """Scaled dot-product attention.

        out[t, h] = sum_s softmax_s(scale query[t, h] . key[s, g] + mask[t, s]) value[s, g],  g = h // (heads / groups)

    On a CPU, blocks of keys that causal= or window= hide from a block of queries are skipped, forward and backward;
    elsewhere it is what XLA makes of the formula. `transforms.explain` names which. It is differentiable both ways and
    any number of times; a backward pass keeps query, key, value and output, under the name "attention" for
    `jax.checkpoint_policies.save_only_these_names`, and computes the weights again.

    Glossary: b batch, t time of the queries, s time of the keys, h heads, g key/value heads, d head_dim.

    Args:
        query: [b, t, h, d].
        key, value: [b, s, g, d], each shared by h / g query heads (Ainslie et al., 2023), in the query's dtype.
        mask: True where a query may see a key: [t, s], [b, t, s] or [b, h, t, s], any of which may be 1.
        lengths: integers [b], how many of each row's keys are real; the rest is not seen.
        starts: integers [b], where among its row's keys the first query stands, for causal and window; None: 0.
        causal: a query sees no later key.
        window: with causal, a query sees the last `window` keys, its own included; without, keys less than `window`
            away (Beltagy et al., 2020).
        scale: None: 1 / sqrt(d).

    Returns:
        [b, t, h, d] in the query's dtype; 0 for a query that sees no key. The softmax is taken in float32 at least. A
        NaN in a key or value reaches the queries that see it; whether it reaches others depends on the form.

    Raises:
        ValueError: for shapes that do not fit each other.
        TypeError: for dtypes that do not.

    Source: Vaswani et al. (2017), Attention Is All You Need, section 3.2.

    >>> q = k = v = jnp.ones((2, 8, 4, 16))
    >>> dot_product_attention(q, k, v, causal=True).shape
    (2, 8, 4, 16)
    """
    query, key, value = map(jnp.asarray, (query, key, value))
    _check(query, key, value)
    (b, t, h, _), s = query.shape, key.shape[1]
    if mask is not None:
        mask = mask_of(mask, (b, h, t, s), "dot_product_attention: a mask")
    lengths, starts = (None if x is None else _integers(x, b, name) for x, name in ((lengths, "lengths"),
                                                                                   (starts, "starts")))
    if window is not None and window < 1:
        raise ValueError(f"dot_product_attention: a window holds the query's own place at least; got {window}")
    return attend(query, key, value, mask=mask, lengths=lengths, starts=starts, causal=causal, window=window,
                  scale=scale)


def attend(query, key, value, *, mask=None, lengths=None, starts=None, causal, window, scale=None) -> jax.Array:
    """`dot_product_attention` of checked arguments; the mask has four axes."""
    where = {"mask": mask, "lengths": lengths, "starts": starts}
    given = tuple(name for name, x in where.items() if x is not None)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    form = Form(bool(causal), window, scale, given, jax.config.jax_default_matmul_precision)
    _jax.kernels.tell_devices(attention_p, backward_p)
    arrays = _jax.vary_alike(query, key, value, *(where[name] for name in given))
    return attention_p.bind(*arrays, form=form, compute=query.dtype, outs=(query.dtype,), residuals=False)[0]


def mask_of(mask, shape, what) -> jax.Array:
    """The mask with four axes; `what` begins the message where it does not fit."""
    mask = jnp.asarray(mask)
    full = (mask.shape[0], 1, *mask.shape[1:]) if mask.ndim == 3 else (1,) * (4 - mask.ndim) + mask.shape
    fits = 2 <= mask.ndim <= 4 and all(have in (1, need) for have, need in zip(full, shape))
    if not fits or mask.dtype != jnp.bool_:
        raise ValueError(f"{what} is boolean, True where a query may see a key, and [t, s], [b, t, s] or [b, h, t, s] "
                         f"of {shape}; got {mask.dtype}{list(mask.shape)}")
    return mask.reshape(full)


def _check(query, key, value):
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not all(x.ndim == 4 for x in (query, key, value)) or key.shape != value.shape or (
            query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3]):
        raise ValueError("dot_product_attention needs query [batch, time, heads, head_dim] and key and value [batch, "
                         f"keys, key/value heads, head_dim] of the same batch and head_dim; got {shapes}")
    if not key.shape[2] or query.shape[2] % key.shape[2]:
        raise ValueError(f"dot_product_attention: {key.shape[2]} key/value heads do not divide {query.shape[2]} heads")
    if not query.dtype == key.dtype == value.dtype or not jnp.issubdtype(query.dtype, jnp.floating):
        raise TypeError("dot_product_attention takes floating-point query, key and value of one dtype; got "
                        f"{query.dtype}, {key.dtype} and {value.dtype}")


def _integers(x, batch, name):
    x = jnp.asarray(x)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"dot_product_attention: {name} are integers [batch] ({batch},); got {x.dtype}{list(x.shape)}")
    return x


# The primitives. Operands: query, key, value, what `form.given` names, and what the docstrings add. `compute` is the
# dtype that operands of products are rounded to, `outs` those of the results: autocast sets both.

attention_p = Primitive("attention")
"""-> out; with `residuals` also peak and total, the statistics of the softmax that a backward pass goes by. They are
nobody's result: no derivative goes through them, nor through the out that a backward pass is given."""

slope_p = Primitive("attention_slope")
"""..., out, peak, total, the slopes of those of query, key and value that `moving` names -> the slope of out."""

backward_p = Primitive("attention_backward")
"""..., out, peak, total, the gradient of out -> the gradients of query, key and value."""


def _attention(blocks, products, *args, form, compute, outs, residuals):
    out, *statistics = xla.forward(form, products, blocks, *args)
    return [out.astype(outs[0]), *statistics][:3 if residuals else 1]


def _slope(blocks, products, *args, form, compute, outs, moving):
    where, slopes = args[3:3 + len(form.given)], args[6 + len(form.given):]
    return [xla.tangent(form, products, blocks, moving, *args[:3], *where, *slopes).astype(outs[0])]


def _backward(blocks, products, *args, form, compute, outs):
    gradients = xla.backward(form, products, blocks, *args)
    return [x.astype(dtype) for x, dtype in zip(gradients, outs)]


def _whole(f, *args, **params):
    """As ordinary operations, the same on every platform. Derivatives of derivatives come from these, and where those
    of a narrow dtype would be products that XLA:CPU does not have, they are in float32."""
    form, compute = params["form"], params["compute"]
    products = Products(compute, xla.widened(compute), form.precision)
    return f([xla.Span(0, args[0].shape[1], 0, args[1].shape[1])], products, *args, **params)


def _by_xla(f, *args, **params):
    form, compute = params["form"], params["compute"]
    products = Products(compute, compute, form.precision)
    return f([xla.Span(0, args[0].shape[1], 0, args[1].shape[1])], products, *args, **params)


def _on_cpu(f, *args, **params):
    # XLA:CPU has fast products of bfloat16 with float32 sums in two forms only, and fails at run time where it makes
    # another one of them: see transforms/_lowered.py.
    form, compute = params["form"], params["compute"]
    products = Products(compute, compute, form.precision, barred=compute == jnp.bfloat16)
    return f(xla.spans(form, args[0].shape[1], args[1].shape[1]), products, *args, **params)


def _by_kernel(platform, primitive, f):
    """The lowering rule for a platform that has kernels."""
    def rule(ctx, *values, form, compute, outs, **params):
        partitioning = _jax.kernels.partitioning(ctx)
        run = functools.partial(_by_xla, f, form=form, compute=compute, outs=outs, **params)
        if flash.refusal(platform, form, compute, *ctx.avals_in[:2], partitioning) is None:
            kernel = flash.forward if primitive is attention_p else flash.backward

            def run(*args):
                results = kernel(platform, form, compute, *params.values(), partitioning, *args)
                return [*(x.astype(dtype) for x, dtype in zip(results, outs)), *results[len(outs):]]

        return mlir.lower_fun(run, multiple_results=True)(ctx, *values)

    return rule


def _explain(primitive, query, key, *_, form, compute, **params) -> str:
    """Which form an equation takes on this machine, in words."""
    platform = jax.default_backend()
    if platform == "cpu":
        if len(xla.spans(form, query.shape[1], key.shape[1])) > 1:
            return "keys that the mask hides from a block of queries are skipped"
        if not form.causal and form.window is None:
            return "plain XLA, for no key is hidden from all"
        if not sized(query.shape[1], key.shape[1]):
            return "plain XLA, for symbolic times cannot be split into blocks"
        return "plain XLA, for " + ("what is hidden is known at run time only" if "starts" in form.given
                                    else "so few queries make one block")
    if platform == "gpu":
        platform = "rocm" if "rocm" in jax.devices()[0].client.platform_version else "cuda"
    refused = ("there is no kernel for slopes" if primitive is slope_p
               else flash.refusal(platform, form, compute, query, key))
    if refused:
        return f"plain XLA, for {refused}"
    if platform == "cuda":
        return "cuDNN's flash attention"
    return "splash attention, a Pallas kernel, on one device or inside shard_map; plain XLA where XLA splits it"


def _refusal(primitive, platform, eqn) -> str | None:
    """Why there is no kernel for an equation on "cuda" or "tpu"; None if there is one."""
    if primitive is slope_p:
        return "there is no kernel for tangents"
    return flash.refusal(platform, *_form(**eqn.params), *(v.aval for v in eqn.invars[:2]))


def _form(*, form, compute, **_):
    return form, compute


def _lower(params, compute, out) -> dict | None:
    """The parameters that change where autocast sets the dtypes; None where the author has set them."""
    if params["compute"] != jnp.float32 or params["form"].precision is not None:
        return None
    return {"compute": compute, "outs": (out,) * len(params["outs"])}


@functools.lru_cache(1024)
def _types(f, types, params):
    """The types of the results, from the ordinary operations, which know shardings and what varies over a mesh."""
    return jax.make_jaxpr(functools.partial(_whole, f, **dict(params)))(*types).out_avals


def _define(primitive, f):
    primitive.multiple_results = True
    run = jax.jit(lambda *args, params: primitive.bind(*args, **dict(params)), static_argnames="params")
    primitive.def_impl(lambda *args, **params: run(*args, params=tuple(params.items())))
    primitive.def_abstract_eval(lambda *types, **params: list(_types(f, types, tuple(params.items()))))
    jaxpr.describe(primitive, jaxpr.Description(
        jaxpr.Traits("product", memory="heavy"), lower=_lower, explain=functools.partial(_explain, primitive),
        plain=lambda eqn: jax.make_jaxpr(functools.partial(_by_xla, f, **eqn.params))(
            *(v.aval for v in eqn.invars)).jaxpr,
        refusal=functools.partial(_refusal, primitive), batch_first=True))
    for platform, form in ((None, _by_xla), ("cpu", _on_cpu)):
        mlir.register_lowering(primitive, mlir.lower_fun(functools.partial(form, f), multiple_results=True), platform)
    if primitive is not slope_p:
        for platform in ("cuda", "tpu"):
            mlir.register_lowering(primitive, _by_kernel(platform, primitive, f), platform)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)


def _batch(primitive, args, axes, *, form, **params):
    """The new axis is folded into the batch."""
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
        if x.shape[1] != batch:    # a mask for all rows
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        folded.append(x.reshape(size * batch, *x.shape[2:]))
    results = primitive.bind(*folded, form=form, **params)
    return [x.reshape(size, batch, *x.shape[1:]) for x in results], [0] * len(results)


def _derivative(primitive, f, primals, tangents, **params):
    """The JVP of a primitive, from `f`, ordinary operations of the same value."""
    moving = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def of(*moved):
        args = list(primals)
        for i, x in zip(moving, moved):
            args[i] = x
        return _whole(f, *args, **params)

    slopes = jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])[1]
    return primitive.bind(*primals, **params), slopes


def _attention_jvp(primals, tangents, *, residuals, **params):
    results = attention_p.bind(*primals, residuals=True, **params)
    out, peak, total = (checkpoint_name(x, "attention") for x in results)
    slopes = [x for x in tangents[:3] if not isinstance(x, ad.Zero)]
    moving = tuple(not isinstance(x, ad.Zero) for x in tangents[:3])
    results, zeros = [out, peak, total], [ad.Zero(jax.typeof(x)) for x in (out, peak, total)]
    if slopes:
        zeros[0] = slope_p.bind(*primals, out, peak, total, *slopes, moving=moving, **params)[0]
    count = 3 if residuals else 1
    return results[:count], zeros[:count]


def _slope_transpose(cotangents, *args, form, compute, outs, moving):
    count = len(args) - sum(moving)
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(args)
    outs = tuple(x.dtype for x in args[:3])
    gradients = backward_p.bind(*args[:count], cotangents[0], form=form, compute=compute, outs=outs)
    return [None] * count + [x for x, moves in zip(gradients, moving) if moves]


def _backward_transpose(cotangents, *args, form, compute, outs):
    moving = tuple(not isinstance(x, ad.Zero) for x in cotangents)
    if not any(moving):
        return [None] * len(args)
    slopes = [x for x in cotangents if not isinstance(x, ad.Zero)]
    outs = args[-1].aval.dtype,
    slope = slope_p.bind(*args[:-1], *slopes, form=form, compute=compute, outs=outs, moving=moving)
    return [None] * (len(args) - 1) + slope


def _backward_by_definition(blocks, products, *args, form, compute, outs):
    """`_backward` of query, key, value and the gradient alone, of which out, peak and total are functions."""
    where = args[3:3 + len(form.given)]
    pull = jax.vjp(lambda q, k, v: xla.forward(form, products, blocks, q, k, v, *where)[0], *args[:3])[1]
    return [x.astype(dtype) for x, dtype in zip(pull(args[-1].astype(products.wide)), outs)]


_define(attention_p, _attention)
_define(slope_p, _slope)
_define(backward_p, _backward)
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[slope_p] = functools.partial(_derivative, slope_p, _slope)
ad.primitive_jvps[backward_p] = functools.partial(_derivative, backward_p, _backward_by_definition)
ad.primitive_transposes[slope_p] = _slope_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
