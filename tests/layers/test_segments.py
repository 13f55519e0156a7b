"""Texts that are packed into rows: attention, rotary positions, positions and labels of each are
those of the text alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, sampled

from fnet import export, introspect, parallel
from fnet import layers as nn
from fnet import transforms as ft
from fnet.models import DynamicScaling, LongScaling

LENGTHS = ((5, 40, 1, 20), (30, 33))  # of the texts in each row
TIME = 70
SHORT, ROWS = 40, 6


def packed(texts, time=TIME, gap=0):
    """Arrays [t, ...], row by row, as arrays [b, time, ...], and their segments [b, time]. `gap` is
    the padding before each text."""
    rows, segments = [], []
    for row in texts:
        parts = [np.pad(text, ((gap, 0), *[(0, 0)] * (text.ndim - 1))) for text in row]
        numbers = [np.pad(np.full(len(text), i + 1), (gap, 0)) for i, text in enumerate(row)]
        whole, ids = np.concatenate(parts), np.concatenate(numbers).astype(np.int32)
        rows.append(np.pad(whole, ((0, time - len(whole)), *[(0, 0)] * (whole.ndim - 1))))
        segments.append(np.pad(ids, (0, time - len(ids))))
    return np.stack(rows), np.stack(segments)


def texts_of(features, seed=0):
    draw = np.random.default_rng(seed)
    return [[draw.normal(size=(n, features)) for n in row] for row in LENGTHS]


def apart(texts):
    """One row for each text, and the lengths."""
    flat = [text for row in texts for text in row]
    pad = lambda text: np.pad(text, ((0, SHORT - len(text)), *[(0, 0)] * (text.ndim - 1)))
    return np.stack([pad(text) for text in flat]), np.array([len(text) for text in flat], np.int32)


def of_texts(y, segments):
    """The parts [t, ...] of packed results [b, time, ...], as one row for each text."""
    return apart(
        [[row[ids == i] for i in range(1, ids.max() + 1)] for row, ids in zip(y, segments)]
    )[0]


def cleared(gradients):
    """Gradients without rounding errors. That of the keys' bias is 0 in exact arithmetic, unless
    the keys are rotated."""
    return jax.tree.map(lambda g: np.where(np.abs(g) < 1e-12, 0, g), gradients)


LAYERS = {
    "plain": (nn.Attention(4), {}),
    "causal": (nn.Attention(4, causal=True), {}),
    "grouped": (nn.Attention(4, kv_heads=2, causal=True), {}),
    "rotary": (nn.Attention(4, causal=True, rotary=nn.Rotary()), {}),
    "interleaved rotary of some features": (
        nn.Attention(2, rotary=nn.Rotary(100.0, interleaved=True, features=4)),
        {},
    ),
    "window": (nn.Attention(4, window=7), {}),
    "causal window": (nn.Attention(4, causal=True, window=7, rotary=nn.Rotary()), {}),
    "softcap": (nn.Attention(4, causal=True, softcap=2.0, scale=0.7), {}),
    "qk norm": (nn.Attention(4, causal=True, qk_norm=nn.RMSNorm(), rotary=nn.Rotary()), {}),
    "dynamic rotary": (
        nn.Attention(2, rotary=nn.Rotary(scaling=DynamicScaling(2.0, original_context=8))),
        {},
    ),
    "long rotary": (
        nn.Attention(
            2, causal=True, rotary=nn.Rotary(scaling=LongScaling((1.0, 1.5), (2.0, 9.0), 8))
        ),
        {},
    ),
    "padding between": (nn.Attention(4, causal=True, rotary=nn.Rotary()), {"gap": 2}),
    "positions": (nn.Attention(4, causal=True, rotary=nn.Rotary()), {"positions": True}),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_attention_is_that_of_each_text(name):
    layer, options = LAYERS[name]
    with jax.enable_x64(True):
        texts, weights = texts_of(8), texts_of(8, seed=1)
        time = TIME + 8 * bool(options.get("gap"))
        x, segments = packed(texts, time, options.get("gap", 0))
        weight = packed(weights, time, options.get("gap", 0))[0]
        (short, lengths), short_weight = apart(texts), apart(weights)[0]
        params = jax.tree.map(
            lambda p: p.astype(jnp.float64), layer.init(jax.random.key(0), jnp.ones((1, 4, 8)))[0]
        )
        more = {"positions": nn.segment_positions(segments)} if "positions" in options else {}

        @jax.jit
        def together(params, x):
            y, pull = jax.vjp(lambda *a: layer(*a, segments=segments, **more), params, x)
            return y, pull(jnp.asarray(weight))

        @jax.jit
        def separate(params, x):
            valid = (np.arange(SHORT)[None] < lengths[:, None])[..., None]
            alone = lambda *a: jnp.where(valid, layer(*a, lengths=lengths), 0)
            y, pull = jax.vjp(alone, params, x)
            return y, pull(jnp.asarray(short_weight))

        y, (of_params, of_x) = together(params, x)
        want, (params_alone, x_alone) = separate(params, short)
        close(of_texts(y, segments), np.asarray(want), 1e-6)
        close(of_texts(of_x, segments), np.asarray(x_alone), 1e-6)
        padding = segments == 0
        assert not np.asarray(of_x)[padding].any()
        assert np.ptp(np.asarray(y)[padding], 0).max() == 0  # the output's bias
        close(cleared(of_params), cleared(params_alone), 1e-6)


def test_each_text_alone():
    """As above, without padding of any kind."""
    layer = nn.Attention(2, causal=True, rotary=nn.Rotary())
    texts = texts_of(4)
    x, segments = packed(texts)
    x = jnp.asarray(x, jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    y = layer(params, x, segments=segments)
    for row, ids, whole in zip(y, segments, x):
        for i in range(1, ids.max() + 1):
            close(row[ids == i], layer(params, whole[ids == i][None])[0], 1e-5)


def test_lengths_and_masks_hide_more():
    layer = nn.Attention(2, causal=True)
    x, segments = (jnp.asarray(a) for a in packed(texts_of(4)))
    x = x.astype(jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    lengths = jnp.array([30, 63])
    shorter = jnp.where(jnp.arange(TIME)[None] < lengths[:, None], segments, 0)
    want = layer(params, x, segments=shorter)
    close(layer(params, x, segments=segments, lengths=lengths), want)
    q = x.reshape(*x.shape[:2], 2, 2)
    close(
        nn.dot_product_attention(q, q, q, segments=segments, lengths=lengths, causal=True),
        nn.dot_product_attention(q, q, q, segments=shorter, causal=True),
    )
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (2, TIME, TIME))
    same = (segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None]
    close(layer(params, x, segments=segments, mask=mask), layer(params, x, mask=mask & same), 1e-5)


def test_dropout_of_packed_texts():
    """With dropout, the weights are computed by another path: all of them are those of one text."""
    layer = nn.Attention(2, causal=True, dropout=0.5)
    x, segments = (jnp.asarray(a) for a in packed(texts_of(4)))
    x = x.astype(jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    run = functools.partial(layer, params, key=jax.random.key(1), train=True, segments=segments)
    changed = x.at[0, 5:45].add(1.0)  # the second text
    a, b = (run(x, state={})[0], run(changed, state={})[0])
    other = np.asarray(segments != 2) | (np.arange(2)[:, None] == 1)
    np.testing.assert_array_equal(np.asarray(a)[other], np.asarray(b)[other])
    assert np.abs(np.asarray(a - b))[~other].max() > 0.01


def numbers_of(kind, b=3, t=512):
    draw = np.random.default_rng(1)
    ids = {
        "in order": np.sort(draw.integers(1, 9, (b, t)), 1),
        "in reverse, then padding": np.sort(draw.integers(0, 5, (b, t)), 1)[:, ::-1],
        "padding first": np.sort(draw.integers(0, 3, (b, t)), 1),
        "scattered": draw.integers(0, 4, (b, t)),
    }[kind].astype(np.int32)
    ids[0, 300:], ids[1] = 0, 0
    return ids


BLOCKS = {
    "all": ({}, "in order"),
    "causal": ({"causal": True}, "in order"),
    "causal, in reverse": ({"causal": True}, "in reverse, then padding"),
    "scattered": ({"causal": True}, "scattered"),
    "window": ({"window": 200}, "padding first"),
    "causal window": ({"causal": True, "window": 130, "softcap": 2.0}, "in order"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", sampled(BLOCKS, ["causal", "window"]))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_skipped_blocks_change_nothing(name, dtype):
    """On a CPU, blocks without a common text are skipped. A mask takes the other way."""
    options, kind = BLOCKS[name]
    draw, ids = np.random.default_rng(0), numbers_of(kind)
    q, k, v, cotangent = (
        jnp.asarray(draw.normal(size=(*ids.shape, n, 8)), dtype) for n in (4, 2, 2, 4)
    )
    same = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]

    def both(where, *arrays):
        attention = functools.partial(nn.dot_product_attention, **where, **options)
        y, pull = jax.vjp(attention, *arrays)
        return y, *pull(cotangent)

    run = jax.jit(functools.partial(both, {"segments": ids}))
    assert " while(" in run.lower(q, k, v).compile().as_text()
    got, want = run(q, k, v), jax.jit(functools.partial(both, {"mask": same}))(q, k, v)
    wide = lambda arrays: [x.astype(jnp.float32) for x in arrays]
    close(wide(got), wide(want), 1e-5 if dtype == jnp.float32 else 2e-2)


def test_what_is_skipped_is_explained():
    q, ids = jnp.ones((1, 512, 1, 8)), jnp.ones((1, 512), jnp.int32)
    f = lambda q, ids: nn.dot_product_attention(q, q, q, segments=ids)
    told = str(ft.explain(ft.autocast(f, "bfloat16"), q, ids))
    assert "blocks of queries and keys without a common text are skipped" in told
    short = str(ft.explain(ft.autocast(f, "bfloat16"), q[:, :200], ids[:, :200]))
    assert "skipped" not in short


def test_vmap():
    layer = nn.Attention(2, causal=True, rotary=nn.Rotary())
    x, segments = (jnp.asarray(a) for a in packed(texts_of(4)))
    x = x.astype(jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    want = layer(params, x, segments=segments)
    each = jax.vmap(lambda x, ids: layer(params, x[None], segments=ids[None])[0])
    close(each(x, segments), want)
    shared = jax.vmap(lambda x: layer(params, x, segments=segments))(jnp.stack([x, 2 * x]))
    close(shared[0], want)


PROVED = {
    "attention": nn.Attention(2, causal=True, rotary=nn.Rotary()),
    "window": nn.Attention(2, window=3, rotary=nn.Rotary()),
    "dynamic": nn.Attention(
        1, causal=True, rotary=nn.Rotary(scaling=DynamicScaling(2.0, original_context=2))
    ),
}
IDS = np.asarray([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1], [0, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("name", sampled(PROVED, ["attention", "dynamic"]))
def test_no_text_sees_another(name):
    layer, x = PROVED[name], np.ones((4, 6, 4), np.float32)
    params, _ = layer.init(jax.random.key(0), x)
    f = lambda x, segments: layer(params, x, segments=segments)
    report = introspect.depends(f, x, IDS, axes={"b": 0, "t": 1})
    report.check(independent="b", segments="segments", assume="finite")
    if name == "attention":  # dynamic angles depend on where the text ends
        report.check(causal="t", assume="finite")
    leaky = lambda x, segments: layer(params, x, segments=jnp.minimum(segments, 1))
    verdict = introspect.depends(leaky, x, IDS, axes={"b": 0, "t": 1}).verdict(
        "segments", "segments"
    )
    assert verdict.status == "refuted"


def test_labels_of_packed_texts():
    """The losses are those of each text alone, as a mean over tokens and over texts."""
    draw = np.random.default_rng(0)
    texts = [[draw.integers(1, 50, n) for n in row] for row in LENGTHS]
    tokens, segments = packed(texts)
    logits = draw.normal(size=(50, 50))
    losses_of = lambda tokens, labels: -jax.nn.log_softmax(logits)[tokens, labels]
    alone = [losses_of(text[:-1], text[1:]) for row in texts for text in row]
    labels, weights = nn.next_tokens(tokens, segments)
    assert labels.shape == weights.shape == tokens.shape and weights.dtype == jnp.float32
    losses = losses_of(tokens, labels)
    close((losses * weights).sum() / weights.sum(), np.concatenate(alone).mean(dtype="float32"))
    weights = nn.next_tokens(tokens, segments, per="text")[1]
    several = [each.mean() for each in alone if len(each)]  # a text of one token predicts nothing
    close((losses * weights).sum() / weights.sum(), np.mean(several).astype(np.float32))


def test_autocast_and_plan():
    layer = nn.Attention(2, causal=True, rotary=nn.Rotary())
    x, segments = (jnp.asarray(a) for a in packed(texts_of(4)))
    x = x.astype(jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    want = layer(params, x, segments=segments)
    cast = ft.autocast(layer, "bfloat16")
    close(jax.jit(cast)(params, x, segments=segments), want, 3e-2)
    loss = lambda params, batch: jnp.square(layer(params, *batch[:1], segments=batch[1])).mean()

    def step(params, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - g, params, gradient), value

    batch = jnp.tile(x, (4, 1, 1)), jnp.tile(segments, (4, 1))  # a row for each device
    plan = parallel.plan(step, lambda key: params, batch, devices="local")
    after = plan.jit(step)(plan.init(jax.random.key(0)), batch)
    close(after, jax.jit(step)(params, batch))


def test_exports(tmp_path):
    layer = nn.Attention(1, causal=True, rotary=nn.Rotary(scaling=DynamicScaling(2.0, 8)))
    x, segments = (jnp.asarray(a) for a in packed(texts_of(4)))
    x = x.astype(jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    f = lambda params, x, segments: layer(params, x, segments=segments)
    program = export.program(
        f,
        params,
        x=export.spec("b, t, 4", "float32"),
        segments=export.spec("b, t", "int32"),
    )
    want = f(params, x, segments)
    close(program.call("predict", x, segments)[0], want)
    onnxruntime = pytest.importorskip("onnxruntime")
    program.onnx(tmp_path / "packed.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "packed.onnx")
    feeds = {"x": np.asarray(x), "segments": np.asarray(segments)}
    close(session.run(None, feeds)[0], np.asarray(want), 1e-5)


X, NUMBERS = jnp.ones((2, 6, 4)), jnp.ones((2, 6), jnp.int32)
Q = jnp.ones((2, 6, 2, 2))
CAUSAL = nn.Attention(2, causal=True)
ERRORS = {
    "shape": (
        lambda: CAUSAL.init(jax.random.key(0), X, segments=NUMBERS[0]),
        r"Attention at the root: segments must be integers \[batch, time\] \(2, 6\); got int32\[6\]",
    ),
    "dtype": (
        lambda: CAUSAL.init(jax.random.key(0), X, segments=jnp.ones((2, 6))),
        r"segments must be integers \[batch, time\] \(2, 6\); got float32\[2, 6\]",
    ),
    "context": (
        lambda: CAUSAL.init(jax.random.key(0), X, X, segments=NUMBERS),
        "segments= needs self-attention; pass mask= with context=",
    ),
    "cache": (
        lambda: CAUSAL(
            CAUSAL.init(jax.random.key(0), X)[0], X, state=CAUSAL.cache(X), segments=NUMBERS
        ),
        "segments= cannot be combined with a cache; give each text a row of its own",
    ),
    "starts": (
        lambda: nn.dot_product_attention(Q, Q, Q, segments=NUMBERS, starts=jnp.zeros(2, int)),
        "segments cannot be combined with starts: packed rows begin at position 0",
    ),
    "keys": (
        lambda: nn.dot_product_attention(Q, Q[:, :5], Q[:, :5], segments=NUMBERS),
        "segments need as many keys as queries; got 6 queries and 5 keys",
    ),
    "positions of one row": (
        lambda: nn.segment_positions(NUMBERS[0]),
        r"segment_positions: segments must be \[batch, time\]; got \[6\]",
    ),
    "tokens": (
        lambda: nn.next_tokens(NUMBERS[:, :5], NUMBERS),
        r"next_tokens: tokens must be integers \[batch, time\] \(2, 6\); got int32\[2, 5\]",
    ),
    "per": (
        lambda: nn.next_tokens(NUMBERS, NUMBERS, per="row"),
        "next_tokens: per must be 'token' or 'text'; got 'row'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()
