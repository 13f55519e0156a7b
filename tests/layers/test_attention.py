"""Attention against jax.nn's own, its masks by what they hide, its cache against the whole sequence
at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same

from fnet import layers as nn

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)


def made(x=X, **options):
    layer = nn.Attention(4, **options)
    params, _ = layer.init(KEY, x)
    return layer, jax.tree.map(lambda a: a + 0.1, params)


def reach(layer, params, x=X, **options):
    """[batch, query, key]: whether an output depends on an input."""
    jacobian = jax.jit(jax.jacobian(lambda x: layer(params, x, **options)))(x)  # [b, t, f, b, s, f]
    own = jnp.stack([jacobian[i, :, :, i] for i in range(len(x))])
    return np.asarray(jnp.abs(own).sum((2, 4)) > 1e-9)


def by_jax(params, x, heads, groups, **options):
    """jax.nn.dot_product_attention between the same projections."""
    q, k, v = (
        nn.Dense(params[name]["bias"].size)(params[name], x).reshape(*x.shape[:2], n, -1)
        for name, n in (("query", heads), ("key", groups), ("value", groups))
    )
    y = jax.nn.dot_product_attention(q, k, v, **options)
    return nn.Dense(x.shape[-1])(params["out"], y.reshape(*x.shape[:2], -1))


MASK = (
    np.random.default_rng(1).integers(0, 2, (2, 4, 6, 6)).astype(bool)
    | np.eye(6, dtype=bool)[None, None]
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("options", "theirs", "call"),
    [
        ({}, {}, {}),
        ({"causal": True}, {"is_causal": True}, {}),
        ({"kv_heads": 2, "causal": True}, {"is_causal": True}, {}),
        ({"kv_heads": 1, "head_dim": 4}, {}, {}),
        ({"causal": True, "window": 3}, {"is_causal": True, "local_window_size": (2, 0)}, {}),
        ({"window": 3}, {"local_window_size": (2, 2)}, {}),
        ({}, {"mask": MASK}, {"mask": MASK}),
        ({}, {"key_value_seq_lengths": jnp.array([4, 6])}, {"lengths": jnp.array([4, 6])}),
    ],
    ids=["plain", "causal", "grouped", "one_group", "causal_window", "window", "mask", "lengths"],
)
def test_is_jax_nn_s_attention(options, theirs, call):
    layer, params = made(**options)
    close(
        jax.jit(lambda p, x: layer(p, x, **call))(params, X),
        by_jax(params, X, 4, options.get("kv_heads", 4), **theirs),
    )


def test_masks_hide_what_they_say():
    t, s = np.arange(6)[:, None], np.arange(6)[None]
    for options, call, seen in [
        ({"causal": True}, {}, s <= t),
        ({"causal": True, "window": 2}, {}, (s <= t) & (t - s < 2)),
        ({"window": 2}, {}, abs(t - s) < 2),
        (
            {},
            {"mask": jnp.asarray(s != 3)},
            (s != 3) | (s == t),
        ),  # a position sees itself as its own query
        ({}, {"lengths": jnp.array([4, 4])}, (s < 4) | (s == t)),
    ]:
        layer, params = made(**options)
        np.testing.assert_array_equal(
            reach(layer, params, **call), np.broadcast_to(seen, (2, 6, 6)), str(options)
        )


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "shape", [(6, 6), (2, 6, 6), (2, 1, 6, 6), (2, 4, 6, 6), (1, 6), (2, 1, 6)]
)
def test_mask_shapes(shape):
    layer, params = made()
    mask = (
        jnp.asarray(np.random.default_rng(2).integers(0, 2, shape).astype(bool))
        .at[..., 0]
        .set(True)
    )
    full = mask[:, None] if mask.ndim == 3 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    close(layer(params, X, mask=mask), layer(params, X, mask=jnp.broadcast_to(full, (2, 4, 6, 6))))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "call", [{"mask": jnp.zeros((6, 6), bool)}, {"lengths": jnp.array([0, 0])}]
)
def test_query_that_sees_no_key_gives_zero_without_nan(call):
    layer, params = made()
    bias = params["out"]["bias"]
    y, grad = jax.value_and_grad(lambda p: layer(p, X, **call).sum())(params)
    close(layer(params, X, **call), jnp.broadcast_to(bias, X.shape))
    assert jnp.isfinite(y)
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves(grad))


@pytest.mark.exhaustive
def test_lengths_with_causal_equal_the_short_row():
    layer, params = made(causal=True, rotary=nn.Rotary())
    y = layer(params, X, lengths=jnp.array([4, 6]))
    close(y[:1, :4], layer(params, X[:1, :4]))
    close(y[1:], layer(params, X[1:]))


def test_rotary_knows_only_distances():
    layer, params = made(rotary=nn.Rotary())
    y = layer(params, X)
    close(layer(params, X, positions=jnp.arange(6) + 100), y, 1e-4)
    close(layer(params, X, positions=jnp.broadcast_to(jnp.arange(6)[None], (2, 6))), y)
    assert jnp.abs(layer(params, X, positions=2 * jnp.arange(6)) - y).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_complex_rotation(interleaved):
    x, positions = X.reshape(2, 6, 1, 8), jnp.array([[0, 1, 2, 3, 4, 5], [7, 7, 0, 1, 90, 2]])
    angle = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(4) / 4)
    turn = np.exp(1j * angle)[:, :, None]
    a = np.asarray(x, np.float64)
    a, b = (a[..., 0::2], a[..., 1::2]) if interleaved else (a[..., :4], a[..., 4:])
    turned = (a + 1j * b) * turn
    pair = (
        np.stack([turned.real, turned.imag], -1).reshape(x.shape)
        if interleaved
        else np.concatenate([turned.real, turned.imag], -1)
    )
    close(nn.Rotary(interleaved=interleaved)(x, positions), jnp.asarray(pair, jnp.float32))


def test_grouped_queries_are_repeated_keys():
    layer, params = made(kv_heads=2)
    repeat = lambda a: jnp.repeat(a.reshape(*a.shape[:-1], 2, 2), 2, axis=-2).reshape(
        *a.shape[:-1], 8
    )
    full = {
        name: jax.tree.map(repeat, tree) if name in ("key", "value") else tree
        for name, tree in params.items()
    }
    close(layer(params, X), nn.Attention(4)(full, X))


@pytest.mark.exhaustive
def test_dropout_drops_attention_weights():
    layer, params = made(dropout=0.5)
    y = layer(params, X)
    same(layer(params, X, key=KEY), y)
    dropped = layer(params, X, key=KEY, train=True)
    assert (dropped != y).any()
    many = jax.jit(jax.vmap(lambda key: layer(params, X, key=key, train=True)))(
        jax.random.split(KEY, 4000)
    )
    np.testing.assert_allclose(many.mean(0), y, atol=0.05)


# Cache


def cached(layer, params, x, steps, **options):
    """The outputs, fed to a cache of 6 positions in pieces of `steps`."""
    state, outputs, at = layer.cache(jax.ShapeDtypeStruct((len(x), 6, x.shape[-1]), x.dtype)), [], 0
    run = jax.jit(lambda params, piece, state: layer(params, piece, state=state, **options))
    for step in steps:
        y, state = run(params, x[:, at : at + step], state)
        outputs.append(y)
        at += step
    return jnp.concatenate(outputs, 1), state


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param((1,) * 6, marks=pytest.mark.exhaustive),
        (4, 1, 1),
        pytest.param((2, 4), marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"rotary": nn.Rotary(), "kv_heads": 2}, {"window": 2}],
    ids=["plain", "rotary_grouped", "window"],
)
def test_cache_equals_the_whole_sequence(options, steps):
    layer, params = made(causal=True, **options)
    y, state = cached(layer, params, X, steps)
    close(y, layer(params, X))
    assert state["index"].tolist() == [6, 6]


@pytest.mark.exhaustive
def test_cache_with_prompts_of_unequal_length():
    layer, params = made(causal=True, rotary=nn.Rotary())
    state = layer.cache(X)
    run = jax.jit(layer)
    prompt, state = run(params, X[:, :4], lengths=jnp.array([2, 4]), state=state)
    assert state["index"].tolist() == [2, 4]
    following = jnp.stack([X[0, 2:4], X[1, 4:6]])
    y, state = run(params, following, state=state)
    whole = run(params, X)
    close(prompt[0, :2], whole[0, :2])
    close(prompt[1], whole[1, :4])
    close(y, jnp.stack([whole[0, 2:4], whole[1, 4:6]]))


@pytest.mark.exhaustive
def test_row_that_outgrows_its_cache_is_nan():
    layer, params = made(causal=True)
    state = layer.cache(X) | {"index": jnp.array([6, 5], jnp.int32)}
    y, state = layer(params, X[:, :1], state=state)
    assert jnp.isnan(y[0]).all()
    assert jnp.isfinite(y[1]).all()


@pytest.mark.exhaustive
def test_cache_is_stacked_is_a_scan_carry_and_merges_with_state():
    model = nn.Stack(nn.Residual(nn.Sequential(nn.BatchNorm(), nn.Attention(4, causal=True))), 3)
    params, stats = model.init(KEY, X)
    cache = model.cache(X)
    assert jax.tree.leaves(cache)[0].shape[:2] == (3, 2)
    assert "cached_key" not in str(stats)
    merged = {"0": {**stats["0"], **cache["0"]}}

    def step(state, x):
        y, state = model(params, x[:, None], state=state)
        return state, y[:, 0]

    final, y = jax.lax.scan(step, merged, X.swapaxes(0, 1))
    close(y.swapaxes(0, 1), model(params, X, state=stats)[0])
    same(final["0"]["0"], stats["0"]["0"])


@pytest.mark.exhaustive
def test_cache_keeps_its_own_dtype():
    layer, params = made(causal=True)
    narrow = X.astype(jnp.bfloat16)
    y, state = layer(params, narrow[:, :2], state=layer.cache(X))
    assert y.dtype == jnp.bfloat16
    assert state["cached_key"].dtype == jnp.float32
    assert layer.cache(narrow)["cached_key"].dtype == jnp.bfloat16


def test_without_a_cache_state_stays_empty():
    layer, params = made(causal=True)
    y, state = layer(params, X, state={})
    assert state == {}
    same(y, layer(params, X))


def test_softmax_is_taken_in_float32():
    # Logits of some thousands: their bfloat16 neighbors differ by 16, their float16 ones overflow
    # soon.
    layer, params = made()
    params = params | {"query": jax.tree.map(lambda a: 60 * a, params["query"])}
    for dtype in (jnp.bfloat16, jnp.float16):
        text = jax.jit(layer).lower(params, X.astype(dtype)).as_text()
        lines = [line for line in text.splitlines() if "stablehlo.exponential" in line]
        assert lines
        assert all("xf32>" in line for line in lines)
        assert jnp.isfinite(layer(params, X.astype(dtype))).all()
