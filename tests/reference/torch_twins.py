"""PyTorch's layers as functions of parameters and inputs in fnet's layout: batch first, channels
last.

Every function permutes what it is given into PyTorch's layout, calls PyTorch, and permutes the
result back. Autograd goes through the permutations, so gradients come out in fnet's layout without
a conversion of their own.
"""

import torch
import torch.nn.functional as F

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
GLOBAL_POOL = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def each(value, dims):
    return [value] * dims if isinstance(value, int) else list(value)


def first(x):
    """[batch, *space, channels] to [batch, channels, *space]."""
    return x.movedim(-1, 1)


def last(x):
    """[batch, channels, *space] to [batch, *space, channels]."""
    return x.movedim(1, -1)


def pairs(padding, size, window, strides, dilation):
    """(before, after) for each dimension. "SAME" is ceil(size / stride) windows, the odd row of
    padding behind."""
    if padding == "VALID":
        return [(0, 0)] * len(window)
    if padding == "CAUSAL":
        return [(d * (k - 1), 0) for k, d in zip(window, dilation)]
    if padding == "SAME":
        totals = [
            max((-(-n // s) - 1) * s + d * (k - 1) + 1 - n, 0)
            for n, k, s, d in zip(size, window, strides, dilation)
        ]
        return [(total // 2, total - total // 2) for total in totals]
    return [
        (pad, pad) if isinstance(pad, int) else tuple(pad) for pad in each(padding, len(window))
    ]


def pad(x, padding, value=0.0):
    """Pads the space of [batch, channels, *space]; F.pad takes the last dimension first."""
    return F.pad(x, [number for pair in reversed(padding) for number in pair], value=value)


def symmetric(padding):
    return all(low == high for low, high in padding)


def dense(p, x):
    return {"y": F.linear(x, p["kernel"].T, p.get("bias"))}


def conv(p, x, *, kernel_size, strides=1, padding="SAME", dilation=1, groups=1):
    dims = x.ndim - 2
    window, strides, dilation = (each(value, dims) for value in (kernel_size, strides, dilation))
    weight = p["kernel"].movedim((-1, -2), (0, 1))  # [features, in // groups, *window]
    options = dict(stride=strides, dilation=dilation, groups=groups)
    if padding == "SAME" and strides == [1] * dims:
        y = CONV[dims](first(x), weight, p.get("bias"), padding="same", **options)
    else:
        padding = pairs(padding, x.shape[1:-1], window, strides, dilation)
        if symmetric(padding):
            y = CONV[dims](
                first(x), weight, p.get("bias"), padding=[low for low, _ in padding], **options
            )
        else:
            y = CONV[dims](pad(first(x), padding), weight, p.get("bias"), **options)
    return {"y": last(y)}


def depthwise_conv(p, x, **options):
    return conv(p, x, groups=x.shape[-1], **options)


def conv_transpose(
    p, x, *, kernel_size, strides=1, padding="SAME", output_padding=0, dilation=1, groups=1
):
    """fnet's kernel is PyTorch's weight with its axes moved: no flip in space, the groups along the
    features.

    "SAME" (which PyTorch lacks) gives size * stride: the full transpose, cut by what the
    convolution that it transposes would have padded, max(reach - stride, 0) with the odd row
    behind, or filled up to size * stride.
    """
    dims = x.ndim - 2
    window, strides, dilation = (each(value, dims) for value in (kernel_size, strides, dilation))
    *_, within, features = p["kernel"].shape
    weight = p["kernel"].reshape(*window, within, groups, features // groups)
    weight = weight.movedim((-2, -3, -1), (0, 1, 2)).reshape(
        groups * within, features // groups, *window
    )
    options = dict(stride=strides, dilation=dilation, groups=groups)
    if padding != "SAME":
        padding = pairs(padding, x.shape[1:-1], window, strides, dilation)
        if symmetric(padding):
            y = CONV_TRANSPOSE[dims](
                first(x),
                weight,
                p.get("bias"),
                padding=[low for low, _ in padding],
                output_padding=output_padding,
                **options,
            )
            return {"y": last(y)}
    assert output_padding == 0
    y = CONV_TRANSPOSE[dims](first(x), weight, **options)
    for axis, (k, s, d) in enumerate(zip(window, strides, dilation)):
        reach = d * (k - 1) + 1
        low, high = padding[axis] if padding != "SAME" else divmod_pair(reach - s)
        y = y.movedim(axis + 2, -1)
        y = F.pad(y, (-low, -high)).movedim(-1, axis + 2)
    y = last(y)
    return {"y": y + p["bias"] if "bias" in p else y}


def divmod_pair(total):
    """What to cut before and after; a negative total is filled up behind."""
    return (total // 2, total - total // 2) if total > 0 else (0, total)


def embed(p, tokens):
    return {"y": F.embedding(tokens, p["embedding"])}


def attend(p, x):
    return {"y": F.linear(x, p["embedding"])}


def tied(p, tokens):
    """A language model of nothing but its table: logits of what follows each token."""
    return {"y": F.linear(torch.tanh(F.embedding(tokens, p["embedding"])), p["embedding"])}


def layer_norm(p, x, *, epsilon=1e-5):
    return {"y": F.layer_norm(x, x.shape[-1:], p.get("scale"), p.get("bias"), epsilon)}


def rms_norm(p, x, *, epsilon=1e-6):
    y = F.rms_norm(x, x.shape[-1:], p.get("scale"), epsilon)
    return {"y": y + p["bias"] if "bias" in p else y}


def group_norm(p, x, *, groups, epsilon=1e-5):
    scale = p.get(
        "scale", x.new_ones(x.shape[-1])
    )  # a bias without a scale breaks PyTorch's backward pass
    return {"y": last(F.group_norm(first(x), groups, scale, p.get("bias"), epsilon))}


def batch_norm(p, x, *, momentum=0.9, epsilon=1e-5, train, mean, var):
    """One step for each x[i], the running statistics carried from one to the next.

    PyTorch's momentum is 1 minus fnet's. PyTorch's running variance averages the unbiased variances
    (divided by
    n - 1), fnet's, like Flax's and Keras', the biased ones (by n) that both normalize with. The
    update is linear, so the difference comes out in closed form: after k steps `var = m^k * first +
    (running_var - m^k * first) * (n-1)/n`. The fixture holds both: `state/var`, and PyTorch's own
    as `torch/running_var`.
    """
    running_mean, running_var, first_var = mean.clone(), var.clone(), var
    ys = [
        last(
            F.batch_norm(
                first(step),
                running_mean,
                running_var,
                p.get("scale"),
                p.get("bias"),
                train,
                1 - momentum,
                epsilon,
            )
        )
        for step in x
    ]
    count = x[0][..., 0].numel()
    kept = momentum ** len(x) * first_var if train else running_var
    return {
        "y": torch.stack(ys),
        "state/mean": running_mean,
        "torch/running_var": running_var,
        "state/var": kept + (running_var - kept) * (count - 1) / count,
    }


def max_pool(p, x, *, window, strides=None, padding="VALID"):
    dims = x.ndim - 2
    window, strides = each(window, dims), each(window if strides is None else strides, dims)
    padding = pairs(padding, x.shape[1:-1], window, strides, [1] * dims)
    if symmetric(padding) and all(2 * low <= k for (low, _), k in zip(padding, window)):
        return {"y": last(MAX_POOL[dims](first(x), window, strides, [low for low, _ in padding]))}
    return {"y": last(MAX_POOL[dims](pad(first(x), padding, -torch.inf), window, strides))}


def avg_pool(p, x, *, window, strides=None, padding="VALID", count_padding=False):
    dims = x.ndim - 2
    window, strides = each(window, dims), each(window if strides is None else strides, dims)
    padding = pairs(padding, x.shape[1:-1], window, strides, [1] * dims)
    if symmetric(padding):
        return {
            "y": last(
                AVG_POOL[dims](
                    first(x),
                    window,
                    strides,
                    [low for low, _ in padding],
                    count_include_pad=count_padding,
                )
            )
        }
    y = AVG_POOL[dims](pad(first(x), padding), window, strides)
    if (
        not count_padding
    ):  # the mean over the window, padding and all, over the part of the window that is inside
        y = y / AVG_POOL[dims](pad(torch.ones_like(first(x)), padding), window, strides)
    return {"y": last(y)}


def global_avg_pool(p, x):
    return {"y": GLOBAL_POOL[x.ndim - 2](first(x), 1).flatten(1)}


def projections(p, *, use_bias):
    """PyTorch's [out, in] weights, and biases or None, of query, key, value and out."""
    names = "query", "key", "value", "out"
    return (
        {name: p[f"{name}/kernel"].T for name in names},
        {name: p[f"{name}/bias"] if use_bias else None for name in names},
    )


def multihead_attention(
    p, x, context=None, mask=None, lengths=None, *, heads, causal=False, use_bias=True
):
    """`torch.nn.MultiheadAttention`, whose masks are True where a query may *not* see a key."""
    source = x if context is None else context
    features, t, s = x.shape[-1], x.shape[1], source.shape[1]
    weights, biases = projections(p, use_bias=use_bias)
    same = source.shape[-1] == features
    module = torch.nn.MultiheadAttention(
        features,
        heads,
        bias=use_bias,
        kdim=source.shape[-1],
        vdim=source.shape[-1],
        batch_first=True,
        dtype=x.dtype,
    )
    arrays = {"out_proj.weight": weights["out"]}
    if same:
        arrays["in_proj_weight"] = torch.cat([weights[name] for name in ("query", "key", "value")])
    else:
        arrays |= {f"{name[0]}_proj_weight": weights[name] for name in ("query", "key", "value")}
    if use_bias:
        arrays["in_proj_bias"] = torch.cat([biases[name] for name in ("query", "key", "value")])
        arrays["out_proj.bias"] = biases["out"]
    assert arrays.keys() == dict(module.named_parameters()).keys()
    hidden = torch.ones(t, s, dtype=torch.bool).triu(1) if causal else None
    if mask is not None:
        mask = ~mask.broadcast_to(len(x), heads, t, s) if mask.ndim == 4 else ~mask
        if mask.ndim > 2:
            mask = (
                mask.reshape(-1, t, s) if mask.ndim == 4 else mask.repeat_interleave(heads, 0)
            )  # [b heads, t, s]
        hidden = mask if hidden is None else mask | hidden
    padding = None if lengths is None else torch.arange(s)[None] >= lengths[:, None]
    y, _ = torch.func.functional_call(
        module,
        arrays,
        (x, source, source),
        dict(attn_mask=hidden, key_padding_mask=padding, need_weights=False),
    )
    return {"y": y}


def grouped_attention(
    p,
    x,
    mask=None,
    lengths=None,
    positions=None,
    *,
    heads,
    kv_heads=None,
    head_dim=None,
    causal=False,
    rotary=None,
    window=None,
    use_bias=True,
):
    """`scaled_dot_product_attention` with grouped heads, between four linear maps.

    A window is that of Mistral 7B (Jiang et al., 2023) where causal: query i sees the keys j with i
    - window < j <= i; else the same on both sides.
    """
    (b, t, features), groups = x.shape, kv_heads or heads
    dim = head_dim or features // heads
    weights, biases = projections(p, use_bias=use_bias)
    q, k, v = (
        F.linear(x, weights[name], biases[name]).reshape(b, t, count, dim)
        for name, count in (("query", heads), ("key", groups), ("value", groups))
    )
    if rotary is not None:
        positions = torch.arange(t) if positions is None else positions
        q, k = (rotate(None, y, positions, **rotary)["y"] for y in (q, k))
    ahead = torch.arange(t)[:, None] - torch.arange(t)[None]
    seen = torch.ones(1, 1, t, t, dtype=torch.bool)
    if causal:
        seen = seen & (ahead >= 0)
    if window is not None:
        seen = seen & (ahead.abs() < window)
    if lengths is not None:
        seen = seen & (torch.arange(t)[None] < lengths[:, None])[:, None, None]
    if mask is not None:
        seen = seen & (mask[:, None] if mask.ndim == 3 else mask)
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        enable_gqa=groups != heads,
    )
    y = y.transpose(1, 2).reshape(b, t, heads * dim)
    return {"y": F.linear(y, weights["out"], biases["out"])}


def rotate(p, x, positions, *, base=10000.0, interleaved=False):
    """The rotary embedding as a multiplication of complex numbers (Su et al., 2021, eq. 13, made of
    d/2 planes).

    x [batch, time, heads, head_dim], positions [batch, time] or [time]. Pairs of features are
    neighbors in the
    paper; GPT-NeoX and its heirs pair feature i with i + head_dim / 2.
    """
    dim = x.shape[-1]
    rates = base ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    angles = positions.double()[..., None] * rates  # [.., time, head_dim / 2]
    turn = torch.polar(torch.ones_like(angles), angles)[..., None, :]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return {"y": (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)}


def recurrent(
    p,
    x,
    lengths=None,
    *,
    layer,
    features,
    bidirectional=False,
    use_bias=True,
    activation="tanh",
    outputs_only=False,
    **carry,
):
    """`torch.nn.RNN`, `LSTM` or `GRU`; ragged batches go through `pack_padded_sequence`.

    The gates are in the same order here and there. PyTorch adds two biases where fnet has one: each
    gets a part of
    it. The GRU's new gate needs both, fnet's bias and recurrent_bias. Final states come back as
    `carry/...`.
    """
    options = {"nonlinearity": activation} if layer == "RNN" else {}
    module = getattr(torch.nn, layer)(
        x.shape[-1],
        features,
        bias=use_bias,
        batch_first=True,
        dtype=x.dtype,
        bidirectional=bidirectional,
        **options,
    )
    places = {"forward/": "", "backward/": "_reverse"} if bidirectional else {"": ""}
    arrays = {}
    for place, suffix in places.items():
        arrays[f"weight_ih_l0{suffix}"] = p[f"{place}kernel"].T
        arrays[f"weight_hh_l0{suffix}"] = p[f"{place}recurrent_kernel"].T
        if use_bias:
            bias = p[f"{place}bias"]
            ours, other = 0.75 * bias, 0.25 * bias
            if layer == "GRU":
                ours = torch.cat([ours[:-features], bias[-features:]])
                other = torch.cat([other[:-features], p[f"{place}recurrent_bias"]])
            arrays |= {f"bias_ih_l0{suffix}": ours, f"bias_hh_l0{suffix}": other}
    assert arrays.keys() == dict(module.named_parameters()).keys()

    kinds = ("hidden", "cell") if layer == "LSTM" else ("hidden",)
    time, begin = x.shape[1], None
    if carry:
        begin = tuple(
            torch.stack([carry[f"carry/{place}{kind}"] for place in places]) for kind in kinds
        )
        begin = begin if layer == "LSTM" else begin[0]
    if lengths is not None:
        x = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
    y, after = torch.func.functional_call(module, arrays, (x, begin))
    if lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=time)
    if outputs_only:
        return {"y": y}
    after = after if layer == "LSTM" else (after,)  # each [directions, batch, features]
    return {"y": y} | {
        f"carry/{place}{kind}": state[i]
        for kind, state in zip(kinds, after)
        for i, place in enumerate(places)
    }
