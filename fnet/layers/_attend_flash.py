"""Attention kernels that never store the attention weights: cuDNN's on NVIDIA GPUs, splash
attention on TPUs.

If a kernel does not support the arguments, `refusal` returns the reason, and XLA compiles the
operations of `_attend_xla` instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.layers._attend_xla import Form, alike, cast
from fnet.layers._sizes import sized

AMPERE, HOPPER = 8.0, 9.0


def refusal(
    platform: str, form: Form, compute: Any, q: jax.Array, k: jax.Array, partitioning: str = "whole"
) -> str | None:
    """Returns why a platform's kernel does not support an attention, or None if the kernel supports
    the attention.

    Args:
        platform: "cuda" or "tpu".
        form: a `Form` with the options of the attention, such as `causal` and `window`.
        compute: the dtype of the operands of the matrix products.
        q, k: query and key; only their shapes are used.
        partitioning: as in `fnet._jax.kernels.partitioning`.
    """
    t, s, d = q.shape[1], k.shape[1], q.shape[3]
    if platform not in ("cuda", "tpu"):
        return f"there is no kernel for {platform}"
    if partitioning == "portable":
        return "a program that is exported or lowered for several platforms must not depend on a kernel's library"
    if not sized(*q.shape, *k.shape):
        return "a kernel needs concrete sizes, and these are symbolic"
    if partitioning == "unknown" or (partitioning == "split" and platform == "tpu"):
        return "XLA cannot partition a kernel"
    if form.precision is not None:
        return f"a kernel has no precision {form.precision!r}"
    if form.softcap is not None:
        return "a kernel does not limit the logits (softcap)"
    if "starts" in form.given:
        return "a kernel does not support a different first query in each example"
    if not t or not s:
        return "an axis has length 0"
    return (_cudnn if platform == "cuda" else _splash)(form, compute, t, s, d)


def _cudnn(form: Form, compute: Any, t: int, s: int, d: int) -> str | None:
    capability, version = _nvidia()
    largest = 256 if capability >= HOPPER and version >= 90500 else 128
    if compute not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN's flash kernels need a 16-bit dtype, not {compute}"
    if capability < AMPERE:
        return f"cuDNN's flash kernels need compute capability 8.0, not {capability}"
    if version < 80904:
        return "cuDNN 8.9.4 or later is not installed"
    if d % 8 or d > largest:
        return f"cuDNN's flash kernels need a head_dim that is a multiple of 8 up to {largest}, not {d}"
    if form.causal and t != s:
        return f"cuDNN's causal mask needs equal numbers of queries and keys, not {t} and {s}"
    if form.window is not None and (not form.causal or form.given or version < 90200):
        return "cuDNN's sliding window needs cuDNN 9.2 and causal=True, without lengths, segments or mask"
    if not {"mask", "segments"}.isdisjoint(form.given) and (t % 2 or s % 2):
        return f"cuDNN's masks need even times, not {t} and {s}"
    return None


def _splash(form: Form, compute: Any, t: int, s: int, d: int) -> str | None:
    if compute not in (jnp.bfloat16, jnp.float32):
        return f"the TPU's kernel needs bfloat16 or float32, not {compute}"
    if "mask" in form.given:
        return (
            "the TPU's kernel supports causal=, window=, lengths= and segments=, but no other mask"
        )
    if t % 128 or s % 128 or min(t, s) < 512:
        return f"the TPU's kernel needs times >= 512 that are multiples of 128, not {t} and {s}"
    if d > 256:
        return f"the TPU's kernel needs head_dim <= 256, not {d}"
    if form.window is not None and t > s:
        return "the TPU's kernel does not support a window with more queries than keys"
    return None


@functools.cache
def _nvidia() -> tuple[float, int]:
    """Returns (compute capability, cuDNN version). On a machine without a GPU, returns the compute
    capability of Ampere GPUs and the version number of cuDNN 9.5."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return AMPERE, 90500
    return float(device.compute_capability), _jax.kernels.cudnn_version() or 0


def forward(
    platform: str,
    form: Form,
    compute: Any,
    residuals: bool,
    partitioning: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *where: jax.Array,
) -> list:
    """Returns [out], where `out` is the output of the attention.

    If `residuals` is True, returns [out, peak, total]. The arrays `peak` and `total` [b, h, t]
    define the attention weights, which are exp(logits - peak) / total. The kernels compute `peak`
    as the logsumexp of each row of logits, so exp(logits - peak) is already normalized, and the
    divisor `total` is 1 everywhere.
    """
    arrays, kinds, hidden = _operands(platform, form, compute, q, k, v, where)
    results = ("bthd", "bht") if residuals else ("bthd",)
    out, *sums = _split(_KERNELS[platform][0], form, tuple(kinds), results, partitioning)(*arrays)
    out = _silent(_blind(form, hidden), out)
    return [out, *sums, *(jnp.ones_like(x) for x in sums)]


def backward(
    platform: str,
    form: Form,
    compute: Any,
    partitioning: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> list:
    """Returns the cotangents of q, k and v. `rest` contains the optional arrays (mask, lengths,
    segments), the results of `forward` (out, peak, total), and the cotangent of the output."""
    *where, out, peak, _, gradient = rest
    arrays, kinds, hidden = _operands(platform, form, compute, q, k, v, where)
    blind = _blind(form, hidden)
    kinds = (*kinds, "bht", "bthd", "bthd")
    run = _split(_KERNELS[platform][1], form, kinds, ("bthd", "bsgd", "bsgd"), partitioning)
    gradient = _silent(blind, gradient)
    of_q, of_k, of_v = run(*arrays, peak, cast(out, compute), cast(gradient, compute))
    if hidden.lengths is not None:
        # The cotangents of padding keys are 0, but kernels return arbitrary values.
        real = _real(hidden.lengths, k)[:, :, None, None]
        of_k, of_v = (jnp.where(real, x, 0) for x in (of_k, of_v))
    return [_silent(blind, of_q), of_k, of_v]


class _Hidden(NamedTuple):
    """The arrays by which a kernel hides keys from queries, or None."""

    mask: jax.Array | None
    lengths: jax.Array | None
    segments: jax.Array | None


def _operands(
    platform: str,
    form: Form,
    compute: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    where: Iterable,
) -> tuple[list, Any, _Hidden]:
    """Returns (the operands of a kernel, the axes of each operand, what the kernel hides).

    If the caller passed both a mask and lengths, they are combined into one mask. cuDNN's kernels
    do not know segments, which become a mask there.
    """
    given = dict(zip(form.given, where))
    mask, lengths, segments = map(given.get, _Hidden._fields)
    if segments is not None and platform == "cuda":
        together = alike(segments, segments)
        mask = together if mask is None else mask & together
        segments = None
    arrays, kinds = [cast(x, compute) for x in (q, k, v)], ["bthd", "bsgd", "bsgd"]
    if mask is not None:
        if lengths is not None:
            mask, lengths = mask & _real(lengths, k)[:, None, None], None
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], q.shape[1], k.shape[1]))
        # The largest magnitude for which cuDNN correctly subtracts two numbers of this magnitude.
        lowest = -(2 << 40) if compute == jnp.bfloat16 else -(2 << 14)
        arrays.append(jnp.where(mask, jnp.zeros((), compute), jnp.array(lowest, compute)))
        kinds.append("".join(c if n > 1 else c.upper() for c, n in zip("bh", mask.shape)) + "ts")
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
        arrays.append(lengths)
        kinds.append("b")
    if segments is not None:
        arrays.append(segments.astype(jnp.int32))
        kinds.append("bt")
    return arrays, kinds, _Hidden(mask, lengths, segments)


def _real(lengths: jax.Array, k: jax.Array) -> jax.Array:
    """Returns booleans [b, s] that are True for keys that are not padding."""
    return jnp.arange(k.shape[1], dtype=lengths.dtype)[None] < lengths[:, None]


def _blind(form: Form, hidden: _Hidden) -> jax.Array | None:
    """Returns booleans, broadcastable to [b, h, t], that are True for queries that attend to no
    key.

    Returns None if no array hides keys, because every query then attends to at least one key.
    """
    mask, lengths, segments = hidden
    if segments is not None:  # every other query attends at least to its own key
        return (segments == 0)[:, None]
    if mask is None:
        return None if lengths is None else (lengths <= 0)[:, None, None]
    if form.causal:
        t, s = mask.shape[2:]
        mask = mask & jnp.tril(jnp.ones((t, s), bool))[None, None]
    return ~mask.any(-1)


def _silent(blind: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns x [b, t, h, d], set to 0 for queries that attend to no key."""
    if blind is None:
        return x
    return jnp.where(blind.swapaxes(1, 2)[..., None], jnp.zeros((), x.dtype), x)


def _named(kinds: tuple[str, ...], arrays: Any) -> tuple:
    """Splits `arrays` into (bias, lengths, segments, list of the other arrays).

    `arrays` contains the operands that follow query, key and value. `bias`, `lengths` and
    `segments` are None if they were not passed.
    """
    rest = list(arrays)
    bias = rest.pop(0) if len(kinds) > 3 and kinds[3].endswith("ts") else None
    lengths = rest.pop(0) if "b" in kinds else None
    segments = rest.pop(0) if "bt" in kinds else None
    return bias, lengths, segments, rest


def _cudnn_attention(
    form: Form,
    kinds: tuple[str, ...],
    results: tuple,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple:
    bias, lengths, _, rest = _named(kinds, rest)
    return tuple(
        _jax.kernels.cudnn_attention(
            q,
            k,
            v,
            bias,
            lengths,
            *rest,
            scale=form.scale,
            causal=form.causal,
            window=form.window,
            residuals=len(results) > 1,
        )
    )


def _splash_forward(
    form: Form,
    kinds: tuple[str, ...],
    results: tuple,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple:
    _, lengths, segments, _ = _named(kinds, rest)
    how = dict(
        causal=form.causal, window=form.window, block=_block(q, k), residuals=len(results) > 1
    )
    kernel = lambda q, k, v, ids: _jax.kernels.splash_attention(q, k, v, ids, **how)
    ids = _segment_ids(lengths, segments, q, k)
    q = cast(q.astype(jnp.float32) * form.scale, q.dtype)
    out, *sums = jax.vmap(kernel)(*map(_heads_first, (q, k, v)), ids)
    return _heads_first(out), *sums


def _splash_backward(
    form: Form,
    kinds: tuple[str, ...],
    results: tuple,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple:
    _, lengths, segments, (peak, out, gradient) = _named(kinds, rest)
    how = dict(causal=form.causal, window=form.window, block=_block(q, k))
    kernel = lambda q, k, v, ids, *rest: _jax.kernels.splash_attention(q, k, v, ids, *rest, **how)
    ids = _segment_ids(lengths, segments, q, k)
    q = cast(q.astype(jnp.float32) * form.scale, q.dtype)
    q, k, v, out, gradient = map(_heads_first, (q, k, v, out, gradient))
    gradients = jax.vmap(kernel)(q, k, v, ids, out, peak, gradient)
    of_q, of_k, of_v = map(_heads_first, gradients)
    return cast(of_q.astype(jnp.float32) * form.scale, of_q.dtype), of_k, of_v


def _segment_ids(
    lengths: jax.Array | None, segments: jax.Array | None, q: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Returns two integer arrays, [b, t] and [b, s]: a query attends to keys with its own number."""
    if segments is not None:
        return segments, segments
    if lengths is None:
        return None
    return jnp.ones(q.shape[:2], jnp.int32), _real(lengths, k).astype(jnp.int32)


def _heads_first(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2)


def _block(q: jax.Array, k: jax.Array) -> int:
    return next(n for n in (512, 256, 128) if q.shape[1] % n == k.shape[1] % n == 0)


_KERNELS = {
    "cuda": (_cudnn_attention, _cudnn_attention),
    "tpu": (_splash_forward, _splash_backward),
}


def _split(kernel: Callable, form: Form, operands: tuple, results: tuple, partitioning: str) -> Any:
    """Returns `kernel(form, operands, results, *arrays)` as a function of `*arrays`, which XLA may
    partition along the batch and the heads.

    The axes are letters, such as "bthd": batch, time (t, s), heads (h, g) and head_dim. B and H are
    axes of length 1. If `partitioning` is "whole", XLA does not partition the program.
    """
    if partitioning == "whole":
        return functools.partial(kernel, form, operands, results)
    return _splitting(kernel, form, operands, results)


@functools.lru_cache(256)
def _splitting(kernel: Callable, form: Form, operands: tuple, results: tuple) -> Any:
    from jax.experimental.custom_partitioning import custom_partitioning

    f = functools.partial(kernel, form, operands, results)
    split = custom_partitioning(f)

    def places(mesh: Any, args: Any) -> tuple:
        spec: Any = getattr(args[0].sharding, "spec", None) or ()
        batch, _, heads, _ = list(spec) + [None] * (4 - len(spec))
        if args[0].shape[0] % _parts(mesh, batch):
            batch = None
        if args[1].shape[2] % _parts(mesh, heads):
            heads = None
        along = {"b": batch, "h": heads, "g": heads}
        place = lambda axes: NamedSharding(mesh, P(*(along.get(axis) for axis in axes)))
        return tuple(map(place, operands)), tuple(map(place, results))

    def partition(mesh: Any, args: Any, _: Any) -> tuple:
        taken, given = places(mesh, args)
        return mesh, f, given, taken

    rule = f"{', '.join(map(_letters, operands))} -> {', '.join(map(_letters, results))}"
    # In the order of the sharding rule.
    gathered = tuple(c for c in dict.fromkeys("".join(operands)) if c in "tsd")
    split.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, args, _: places(mesh, args)[1],
        sharding_rule=rule,
        need_replication_factors=gathered,
    )
    return split


def _letters(axes: str) -> str:
    return " ".join({"B": "p", "H": "r"}.get(axis, axis) for axis in axes)


def _parts(mesh: Any, axes: Any) -> int:
    """Returns into how many parts the mesh axes `axes` (a name, several names or None) split an
    array."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
