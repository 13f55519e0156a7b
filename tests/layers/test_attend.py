"""dot_product_attention against the formula and jax.nn's own, in every direction that a derivative
can be taken in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import hardware as hw
from fnet import transforms as ft
from fnet.layers import _attend_xla as xla
from fnet.layers import dot_product_attention

SEGMENTS = np.repeat([[1, 2, 3, 0], [0, 4, 2, 6]], [20, 1, 40, 9], axis=1)
MASK = np.random.default_rng(0).integers(0, 2, (2, 4, 70, 70)).astype(bool)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), dtype)


def formula(
    q,
    k,
    v,
    *,
    mask=None,
    lengths=None,
    starts=None,
    segments=None,
    causal=False,
    window=None,
    scale=None,
):
    """As it stands in the docstring, with every weight written out."""
    (b, t, h, d), s = q.shape, k.shape[1]
    k, v = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k, v))
    rows, keys = jnp.arange(t, dtype=jnp.int32), jnp.arange(s, dtype=jnp.int32)
    first = jnp.zeros(b, jnp.int32) if starts is None else starts
    ahead = (first[:, None, None] + rows[None, :, None] - keys[None, None])[:, None]
    seen = jnp.full((b, 1, t, s), True)
    if causal:
        seen &= ahead >= 0
    if window is not None:
        seen &= (ahead if causal else jnp.abs(ahead)) < window
    if lengths is not None:
        seen &= (keys[None] < lengths[:, None])[:, None, None]
    if segments is not None:
        seen &= ((segments[:, :, None] == segments[:, None]) & (segments != 0)[:, None])[:, None]
    if mask is not None:
        seen = seen & mask
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * (d**-0.5 if scale is None else scale)
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, logits, -1e30)), 0)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


# (batch, time of the queries, of the keys, heads, key/value heads, head_dim), options
CASES = {
    "plain": ((2, 5, 7, 4, 2, 6), {}),
    "causal": ((2, 70, 70, 4, 2, 4), {"causal": True}),
    "causal of few keys": ((1, 70, 41, 2, 2, 4), {"causal": True}),
    "causal of many keys": ((1, 65, 80, 2, 1, 4), {"causal": True, "scale": 0.3}),
    "window": ((1, 101, 101, 2, 1, 4), {"window": 9}),
    "causal window": ((2, 101, 101, 2, 2, 4), {"causal": True, "window": 9}),
    "window past the keys": ((1, 140, 20, 2, 2, 4), {"causal": True, "window": 3}),
    "lengths": ((2, 70, 70, 2, 1, 4), {"lengths": np.array([0, 33], np.int32)}),
    "causal lengths": (
        (2, 70, 70, 2, 2, 4),
        {"causal": True, "lengths": np.array([3, 70], np.int32)},
    ),
    "mask": ((2, 70, 70, 4, 2, 4), {"causal": True, "mask": MASK}),
    "mask of keys": ((2, 70, 70, 4, 2, 4), {"window": 20, "mask": MASK[:1, :1, :1]}),
    "segments": ((2, 70, 70, 4, 2, 4), {"segments": SEGMENTS}),
    "causal segments": ((2, 70, 70, 2, 1, 4), {"causal": True, "segments": SEGMENTS}),
    "segments, window and mask": (
        (2, 70, 70, 4, 2, 4),
        {"causal": True, "window": 9, "segments": SEGMENTS, "mask": MASK},
    ),
    "starts": ((2, 4, 30, 2, 2, 4), {"causal": True, "starts": np.array([0, 20], np.int32)}),
}


def problem(name, dtype):
    (b, t, s, h, g, d), options = CASES[name]
    queries, keys = (
        [normal(*shape, seed=i, dtype=dtype) for i in range(4)]
        for shape in ((b, t, h, d), (b, s, g, d))
    )
    arrays = queries[0], keys[0], keys[1]
    along = queries[1], keys[2], keys[3]
    return arrays, along, queries[2], options


def every_derivative(attention, arrays, along, weight, options):
    attend = functools.partial(attention, **options)
    loss = lambda *x: (attend(*x) * weight).sum()
    gradient = jax.grad(loss, (0, 1, 2))
    square = lambda *x: sum(jnp.square(g).sum() for g in gradient(*x))
    slope = lambda *x: (jax.jvp(attend, x, along)[1] * weight).sum()
    return {
        "tangent": jax.jvp(attend, arrays, along),
        "gradient": gradient(*arrays),
        "forward over reverse": jax.jvp(gradient, arrays, along)[1],
        "reverse over reverse": jax.grad(square, (0, 1, 2))(*arrays),
        "reverse over forward": jax.grad(slope, (0, 1, 2))(*arrays),
    }


def one_sided_derivatives(attention, arrays, along, weight, options):
    attend = functools.partial(attention, **options)
    loss = lambda *x: (attend(*x) * weight).sum()
    return {
        "one argument": (
            jax.grad(loss, 2)(*arrays),
            jax.jvp(lambda k: attend(arrays[0], k, arrays[2]), arrays[1:2], along[1:2])[1],
        ),
        "transposed twice": jax.linear_transpose(jax.vjp(attend, *arrays)[1], weight)(along)[0],
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_is_the_formula_and_its_derivatives(name):
    with jax.enable_x64(True):
        arrays, along, weight, options = problem(name, jnp.float64)
        ours, theirs = (
            jax.jit(functools.partial(every_derivative, f, options=options))(arrays, along, weight)
            for f in (dot_product_attention, formula)
        )
        close(ours, theirs, 1e-12)


def test_derivatives_of_some_arguments_and_of_the_gradient_by_the_tangent():
    with jax.enable_x64(True):
        arrays, along, weight, options = problem("causal of few keys", jnp.float64)
        close(
            *(
                jax.jit(functools.partial(one_sided_derivatives, f, options=options))(
                    arrays, along, weight
                )
                for f in (dot_product_attention, formula)
            ),
            1e-12,
        )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["causal", "window", "lengths", "mask"])
def test_float32(name):
    arrays, _, weight, options = problem(name, jnp.float32)

    def run(attention, *x):
        y, pull = jax.vjp(functools.partial(attention, **options), *x)
        return y, pull(weight)

    close(*(jax.jit(functools.partial(run, f))(*arrays) for f in (dot_product_attention, formula)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({"causal": True}, {"is_causal": True}),
        ({"causal": True, "window": 5}, {"is_causal": True, "local_window_size": (4, 0)}),
        ({"lengths": jnp.array([4, 60])}, {"key_value_seq_lengths": jnp.array([4, 60])}),
    ],
)
def test_is_jax_nn_s(options, theirs):
    q, k, v = normal(2, 66, 4, 8), normal(2, 66, 2, 8), normal(2, 66, 2, 8, seed=1)
    close(
        dot_product_attention(q, k, v, **options), jax.nn.dot_product_attention(q, k, v, **theirs)
    )


def test_jacobians_forward_and_reverse_agree():
    with jax.enable_x64(True):
        q = normal(1, 6, 2, 3, dtype=jnp.float64)
        f = lambda q: dot_product_attention(q, q, 2 * q, causal=True)
        of = jax.jit(lambda q: (jax.jacfwd(f)(q), jax.jacrev(f)(q)))
        close(*of(q), 1e-12)
        g = lambda q: jnp.sin(f(q)).sum()
        of = jax.jit(lambda q: (jax.hessian(g)(q), jax.jacrev(jax.jacrev(g))(q)))
        close(*of(q), 1e-12)


@pytest.mark.exhaustive
def test_eager_is_compiled():
    arrays, _, weight, options = problem("causal", jnp.float32)
    loss = lambda *x: (dot_product_attention(*x, **options) * weight).sum()
    close(
        jax.value_and_grad(loss, (0, 1, 2))(*arrays),
        jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays),
    )


# Batches and devices


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("axes", "shared"),
    [
        ((0, 0, 0, 0), True),
        ((1, None, None, None), True),
        ((None, 2, 4, None), False),
        ((None, None, None, 0), False),
        ((None, None, None, 0), True),
        ((3, None, 0, 1), False),
    ],
)
def test_vmap_is_one_by_one(axes, shared):
    q, k, v = normal(3, 2, 5, 4, 2), normal(3, 2, 6, 2, 2), normal(3, 2, 6, 2, 2, seed=1)
    mask = normal(3, 1 if shared else 2, 1, 5, 6) > 0
    single = [x[0] if axis is None else x for x, axis in zip((q, k, v, mask), axes)]
    moved = [x if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip(single, axes)]
    f = jax.value_and_grad(
        lambda q, k, v, m: jnp.square(dot_product_attention(q, k, v, mask=m)).sum(), (0, 1, 2)
    )
    rows = [f(*(x if axis is None else x[i] for x, axis in zip(single, axes))) for i in range(3)]
    close(jax.jit(jax.vmap(f, axes))(*moved), jax.tree.map(lambda *x: jnp.stack(x), *rows))


def train(q, k, v, **options):
    return jax.value_and_grad(
        lambda *x: jnp.sin(dot_product_attention(*x, causal=True, **options)).sum(), (0, 1, 2)
    )(q, k, v)


def rows():
    return normal(8, 70, 4, 4), normal(8, 70, 2, 4), normal(8, 70, 2, 4, seed=1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ["jit", "jit heads", "shard_map", "pmap"])
def test_devices_agree_with_one(how):
    arrays = rows()
    want = jax.jit(train)(*arrays)
    mesh = Mesh(
        np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    spec = P("data", None, "model") if how == "jit heads" else P(("data", "model"))
    if how.startswith("jit"):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
        got = jax.jit(train)(*placed)
        assert all(g.sharding.is_equivalent_to(x.sharding, 4) for g, x in zip(got[1], placed))
    elif how == "shard_map":
        one = lambda *x: jax.tree.map(lambda a: a[None] if a.ndim == 0 else a, train(*x))
        got = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))(*arrays)
        got = got[0].sum(), got[1]
    else:
        got = jax.pmap(train)(*(x[:, None] for x in arrays))
        got = got[0].sum(), tuple(x[:, 0] for x in got[1])
    close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want), 2e-5)


@pytest.mark.exhaustive
def test_keys_of_all_devices_have_the_sum_of_their_gradients():
    q, k, v = rows()
    k, v = k[:1], v[:1]
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    def loss(q, k, v):
        return jax.lax.psum(jnp.sin(dot_product_attention(q, k, v, causal=True)).sum(), "data")

    wide = lambda q, k, v: jnp.sin(
        dot_product_attention(q, *(jnp.repeat(x, 8, 0) for x in (k, v)), causal=True)
    ).sum()
    close(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v), jax.jit(jax.grad(wide, (0, 1, 2)))(q, k, v))


# What a backward pass keeps


def residuals(f, *args):
    return [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(f, *x)[1], *args))]


def test_keeps_output_and_statistics_and_no_weights():
    arrays = rows()
    kept = residuals(lambda *x: dot_product_attention(*x, causal=True), *arrays)
    assert sorted(kept) == sorted(
        [x.shape for x in arrays] + [(8, 70, 4, 4), (8, 4, 70), (8, 4, 70)]
    )


@pytest.mark.exhaustive
def test_a_policy_keeps_it_by_name():
    arrays = rows()
    f = lambda *x: jnp.sin(dot_product_attention(*(jnp.cos(a) for a in x), causal=True)).sum()
    only = jax.checkpoint_policies.save_only_these_names("attention")
    counts = [
        str(jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(*arrays)).count(
            " attention["
        )
        for policy in (None, only)
    ]
    assert counts == [2, 1]
    close(*(jax.jit(jax.grad(g))(*arrays) for g in (jax.checkpoint(f, policy=only), f)))


# Blocks


@pytest.mark.exhaustive
def test_blocks_cover_what_is_seen_and_little_more():
    for (t, s), options in [
        ((256, 256), {"causal": True}),
        ((1000, 1000), {"causal": True}),
        ((33, 33), {"window": 3}),
        ((4096, 4096), {"causal": True, "window": 200}),
        ((300, 100), {"causal": True}),
        ((100, 300), {"window": 5}),
        ((1, 9), {"causal": True}),
        ((0, 4), {}),
        ((70, 70), {}),
    ]:
        form = xla.Form(options.get("causal", False), options.get("window"), 1.0)
        blocks = xla.spans(form, t, s)
        assert [at.start for at in blocks] == [0, *(at.stop for at in blocks[:-1])] and blocks[
            -1
        ].stop == t
        whole = xla.seen(form, xla.Span(0, t, 0, s), (t, s), ())
        for at in blocks:
            outside = np.ones(s, bool)
            outside[at.low : at.high] = False
            assert (
                whole is None or not np.asarray(whole)[0, 0, at.start : at.stop, outside].any()
            ), (t, s, options, at)
        if t >= 256 and t == s:
            work = sum((at.stop - at.start) * (at.high - at.low) for at in blocks) / (t * s)
            assert work <= 0.63, (t, options, work)


@pytest.mark.exhaustive
def test_a_causal_step_on_a_cpu_does_less():
    arrays = [jax.ShapeDtypeStruct((2, 256, 4, 16), jnp.float32)] * 3
    flops = {}
    for causal in (False, True):
        step = jax.grad(lambda *x: dot_product_attention(*x, causal=causal).sum(), (0, 1, 2))  # noqa: B023
        flops[causal] = jax.jit(step).lower(*arrays).compile().cost_analysis()["flops"]
    assert flops[True] < 0.7 * flops[False]


def test_counts_as_the_formula_does_and_moves_its_operands():
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.float32) for heads in (4, 2))
    f = functools.partial(dot_product_attention, causal=True)
    one = hw.count(f, q, k, k)
    assert one.flops > one.model_flops == one.total.matmul == 2 * (2 * 2 * 4 * 64 * 64 * 16)
    assert one.total.transcendental == 2 * 4 * 64 * 64
    assert (
        one.total.bytes == one.total.fused_bytes == 4 * (2 * 2 * 64 * 4 * 16 + 2 * 2 * 64 * 2 * 16)
    )
    gradient = jax.grad(lambda *x: f(*x).sum(), (0, 1, 2))
    train = hw.count(ft.autocast(gradient, "bfloat16"), q, k, k)
    assert (
        train.model_flops == 3 * one.model_flops and train.total.recomputed == one.model_flops // 2
    )
    assert len(train.matmuls) == 7 and train.dtype == "bfloat16" and not train.notes


@pytest.mark.exhaustive
def test_nan_reaches_those_who_see_it():
    q, k, v = rows()
    for i, arrays in enumerate(
        [
            (q.at[0, 40, 1].set(jnp.nan), k, v),
            (q, k.at[0, 40, 1].set(jnp.nan), v),
            (q, k, v.at[0, 40, 1, 2].set(jnp.inf)),
        ]
    ):
        out = dot_product_attention(*arrays, causal=True)
        bad = ~np.isfinite(out).all(-1)  # [batch, time, heads]
        want = np.zeros_like(bad)
        want[0, slice(40, 41) if i == 0 else slice(40, None), 1 if i == 0 else slice(2, None)] = (
            True
        )
        assert bad[want].all()
        assert not bad[1:].any() and not bad[0, :32].any()


# 16 bits


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype):
    arrays, along, weight, options = problem("causal", dtype)
    f = functools.partial(dot_product_attention, **options)

    def run(arrays, along, weight):
        gradient = lambda *x: jax.vjp(f, *x)[1](weight)
        return jax.jvp(f, arrays, along), jax.jvp(gradient, arrays, along)

    low, high = (
        jax.jit(run)(*jax.tree.map(lambda x: x.astype(d), (arrays, along, weight)))  # noqa: B023
        for d in (dtype, jnp.float32)
    )
    assert all(x.dtype == dtype for x in jax.tree.leaves(low))
    close(
        jax.tree.map(lambda x: x.astype(jnp.float32), low),
        high,
        4e-2 if dtype == jnp.bfloat16 else 6e-3,
    )


@pytest.mark.exhaustive
def test_small_gradients_of_float16_survive():
    q, k, v = (x.astype(jnp.float16) for x in rows())
    gradient = jax.grad(
        lambda v: (dot_product_attention(0 * q, k, v).astype(jnp.float32) * 1e-5).sum()
    )(v)
    np.testing.assert_allclose(
        np.asarray(gradient, np.float32), 2e-5, rtol=0.02
    )  # 2 query heads to a key head


# Invalid arguments

Q, K = jnp.ones((2, 5, 4, 3)), jnp.ones((2, 7, 2, 3))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: dot_product_attention(Q[0], K, K),
            ValueError,
            "dot_product_attention: expected query [batch, time, heads, head_dim], and key and "
            "value [batch, keys, key/value heads, head_dim] with equal batch and head_dim; got "
            "query (5, 4, 3), key (2, 7, 2, 3), value (2, 7, 2, 3)",
        ),
        (
            lambda: dot_product_attention(Q, K[:, :, :1].repeat(3, 2), K[:, :, :1].repeat(3, 2)),
            ValueError,
            "dot_product_attention: 4 heads must be a multiple of 3 key/value heads",
        ),
        (
            lambda: dot_product_attention(Q, K, K.astype(jnp.bfloat16)),
            TypeError,
            "dot_product_attention: query, key and value must have one floating-point dtype; got "
            "float32, float32 and bfloat16",
        ),
        (
            lambda: dot_product_attention(Q, K, K, mask=jnp.ones((5, 5), bool)),
            ValueError,
            "dot_product_attention: mask must be boolean (True: attend) with shape [t, s], [b, t, "
            "s] or [b, h, t, s] of (2, 4, 5, 7); got bool[5, 5]",
        ),
        (
            lambda: dot_product_attention(Q, K, K, lengths=jnp.ones(3, jnp.int32)),
            ValueError,
            "dot_product_attention: lengths must be integers [batch] (2,); got int32[3]",
        ),
        (
            lambda: dot_product_attention(Q, K, K, starts=jnp.ones(2)),
            ValueError,
            "dot_product_attention: starts must be integers [batch] (2,); got float32[2]",
        ),
        (
            lambda: dot_product_attention(Q, K, K, window=0),
            ValueError,
            "dot_product_attention: window must be >= 1; got 0",
        ),
    ],
    ids=["rank", "heads", "dtype", "mask", "lengths", "starts", "window"],
)
def test_errors_say_what_is_needed(call, error, text):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == text


def test_softcap():
    """Values and gradients of limited logits, with hidden keys, against the plain formula."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, y = (
        3 * jax.random.normal(key, (2, 9, heads, 4)) for key, heads in zip(keys, (4, 2, 2, 4))
    )

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
        logits = 1.5 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) * 0.7 / 1.5)
        order = jnp.arange(9)
        seen = (order[:, None] >= order[None]) & (order[:, None] - order[None] < 4)
        weights = jax.nn.softmax(jnp.where(seen[None, None], logits, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    limited = lambda q, k, v: dot_product_attention(
        q, k, v, causal=True, window=4, scale=0.7, softcap=1.5
    )
    gradients = lambda f: jax.grad(lambda *x: (f(*x) * y).sum(), (0, 1, 2))
    got, expected = (
        jax.jit(lambda *x, f=f: (f(*x), *gradients(f)(*x)))(q, k, v) for f in (limited, plain)
    )
    for result, want in zip(got, expected, strict=True):
        assert jnp.abs(result - want).max() <= 1e-5 * jnp.abs(want).max()
    with pytest.raises(ValueError, match="softcap must be above 0; got 0"):
        dot_product_attention(q, k, v, softcap=0)
