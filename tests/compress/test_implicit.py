"""use_implicit_arrays: programs that read implicit arrays equal the same programs on the
materialized arrays."""

import dataclasses
import functools

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import compress, models
from fnet import layers as nn
from fnet import transforms as ft

K = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(K[0], (3, 8))
W = {
    "w": jax.random.normal(K[1], (8, 8)),
    "stack": jax.random.normal(K[2], (4, 8, 8)),
    "heads": jax.random.normal(K[3], (8, 2, 4)),
    "kernel": jax.random.normal(K[4], (3, 3, 4, 6)),
    "table": jax.random.normal(K[5], (10, 8)),
}
IMAGE = jax.random.normal(K[6], (2, 5, 5, 4))
IDS = jnp.array([[1, 9, 0], [3, -1, 12]])
KINDS = {
    "int8": lambda p: compress.quantize(p, {".*": compress.Int8()}),
    "int4 in groups": lambda p: compress.quantize(p, {".*": compress.Int4(group=2, axes=-2)}),
    "nf4, last axis": lambda p: compress.quantize(p, {".*": compress.NF4(None, axes=-1)}),
    "float8": lambda p: compress.quantize(p, {".*": compress.Float8()}),
    "lora": lambda p: _filled(compress.lora(K[7], p, {".*": 2})),
    "lora on int4": lambda p: _filled(
        compress.lora(K[7], compress.quantize(p, {".*": compress.Int4(None)}), {".*": 2})
    ),
}


def _filled(params):
    """b, which is zero at first, with values."""
    return jax.tree.map(
        lambda w: dataclasses.replace(w, b=0.1 + jax.random.normal(K[7], w.b.shape)),
        params,
        is_leaf=lambda x: isinstance(x, compress.LowRank),
    )


def close(got, want, bound=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(jnp.isnan(a), jnp.isnan(b))
        error = jnp.abs(
            jnp.nan_to_num(a.astype(jnp.float32)) - jnp.nan_to_num(b.astype(jnp.float32))
        ).max()
        assert error <= bound * (jnp.nan_to_num(jnp.abs(b.astype(jnp.float32))).max() + 1e-6)


def scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, p["stack"])


def nested_scan(p, x):
    stack = p["stack"].reshape(2, 2, 8, 8)
    return lax.scan(lambda x, ws: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws), x, stack)[
        0
    ]


def loop(p, x):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"]), x)


def until(p, x):
    return lax.while_loop(
        lambda c: (c[1] < 4) & (jnp.abs(p["w"]).max() < 100),
        lambda c: (jnp.tanh(c[0] @ p["w"]), c[1] + 1),
        (x, 0),
    )[0]


def indexed(p, x):
    for i in range(4):
        x = jnp.tanh(x @ p["stack"][i])
    return x


@jax.custom_vjp
def own(x, w):
    return x @ w


own.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
PROGRAMS = {
    "product": ("w", lambda p, x: x @ p["w"]),
    "transposed": ("w", lambda p, x: x @ p["w"].T),
    "left": ("w", lambda p, x: p["w"] @ x.T),
    "einsum": ("w", lambda p, x: jnp.einsum("bi,oi->ob", x, p["w"])),
    "batched": ("stack", lambda p, x: jnp.einsum("nbi,nio->nbo", jnp.stack([x] * 4), p["stack"])),
    "batched, last": ("stack", lambda p, x: jnp.einsum("bi,nio->bno", x, p["stack"])),
    "heads": ("heads", lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["heads"])),
    "heads, merged": ("heads", lambda p, x: x @ p["heads"].reshape(8, 8)),
    "heads, contracted": (
        "heads",
        lambda p, x: jnp.einsum("bhd,ihd->bi", x.reshape(3, 2, 4), p["heads"]),
    ),
    "heads, contracted in another order": (
        "heads",
        lambda p, x: jnp.einsum("bdh,ihd->bi", x.reshape(3, 4, 2), p["heads"]),
    ),
    "one head": ("heads", lambda p, x: jnp.einsum("bh,ihd->bid", x[:, :2], p["heads"])),
    "split": ("w", lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["w"].reshape(8, 2, 4))),
    "split, contracted": (
        "w",
        lambda p, x: jnp.einsum("bhd,ohd->bo", x.reshape(3, 2, 4), p["w"].T.reshape(8, 2, 4)),
    ),
    "bfloat16": ("w", lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)),
    "wide sums": (
        "w",
        lambda p, x: jnp.dot(
            x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16), preferred_element_type=jnp.float32
        ),
    ),
    "both operands": ("w", lambda p, x: p["w"] @ p["w"]),
    "elementwise": ("w", lambda p, x: x @ (p["w"] ** 2) + jnp.sum(p["w"])),
    "integer cast": ("w", lambda p, x: x + p["w"].astype(jnp.int32).sum().astype(x.dtype)),
    "jit": ("w", lambda p, x: jax.jit(lambda w, x: jnp.tanh(x @ w))(p["w"], x)),
    "jit that transposes": ("w", lambda p, x: x @ jax.jit(jnp.transpose)(p["w"])),
    "jit with donation": (
        "w",
        lambda p, x: jax.jit(lambda w, x: x @ w, donate_argnums=1)(p["w"], x + 0),
    ),
    "remat": ("w", lambda p, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["w"], x)),
    "scan": ("stack", scanned),
    "nested scan": ("stack", nested_scan),
    "loop": ("w", loop),
    "while": ("w", until),
    "remat in scan": (
        "stack",
        lambda p, x: lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["stack"])[
            0
        ],
    ),
    "carry": (
        "w",
        lambda p, x: lax.scan(lambda w, _: (w + 1, (x @ w).sum()), p["w"], None, length=2),
    ),
    "indexed": ("stack", indexed),
    "dynamic index": (
        "stack",
        lambda p, x: lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ p["stack"][i]), x),
    ),
    "slice": ("stack", lambda p, x: jnp.einsum("bi,nio->nbo", x, p["stack"][1:3])),
    "cond": ("w", lambda p, x: lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x - w[:3], p["w"])),
    "vmap": ("stack", lambda p, x: jax.vmap(lambda w: x @ w)(p["stack"])),
    "vmap over x": ("w", lambda p, x: jax.vmap(lambda x: p["w"] @ x)(x)),
    "custom_vjp": ("w", lambda p, x: own(x, p["w"])),
    "custom_jvp": ("w", lambda p, x: x @ jax.nn.relu(p["w"])),
    "shard_map": (
        "w",
        lambda p, x: jax.shard_map(
            lambda w, x: x @ w, mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d")
        )(p["w"], x),
    ),
    "convolution": (
        "kernel",
        lambda p, x: lax.conv_general_dilated(
            IMAGE, p["kernel"], (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
    "convolution, channels first": (
        "kernel",
        lambda p, x: lax.conv_general_dilated(
            IMAGE.transpose(0, 3, 1, 2),
            p["kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NCHW", "HWIO", "NCHW"),
        ),
    ),
    "convolution, transposed kernel": (
        "kernel",
        lambda p, x: lax.conv_general_dilated(
            IMAGE,
            p["kernel"].transpose(3, 2, 0, 1),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        ),
    ),
    "depthwise": (
        "kernel",
        lambda p, x: lax.conv_general_dilated(
            IMAGE,
            p["kernel"][:, :, :1, :4],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        ),
    ),
    "rounded": ("w", lambda p, x: x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32)),
    "rounded to 8 bits": (
        "w",
        lambda p, x: x @ p["w"].astype(jnp.float8_e4m3fn).astype(jnp.float32),
    ),
    "rounded to fewer bits": ("w", lambda p, x: x @ lax.reduce_precision(p["w"], 5, 2)),
    "rounded twice": (
        "w",
        lambda p, x: (
            x.astype(jnp.float16) @ p["w"].astype(jnp.bfloat16).astype(jnp.float16)
        ).astype(jnp.float32),
    ),
    "lookup": ("table", lambda p, x: p["table"][IDS]),
    "lookup, clipped": ("table", lambda p, x: jnp.take(p["table"], IDS, 0, mode="clip")),
    "lookup, filled": ("table", lambda p, x: jnp.take(p["table"], IDS, 0)),
    "lookup of columns": ("table", lambda p, x: jnp.take(p["table"], jnp.array([0, 2]), 1)),
    "lookup, filled with 1": (
        "table",
        lambda p, x: p["table"].at[IDS].get(mode="fill", fill_value=1.0),
    ),
    "tied": ("table", lambda p, x: p["table"][IDS] @ p["table"].T),
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("int8", "lora on int4")
        else pytest.param(kind, marks=pytest.mark.exhaustive)
        for kind in KINDS
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, kind):
    leaf, f = PROGRAMS[name]
    params = KINDS[kind]({leaf: W[leaf]})
    close(
        jax.jit(ft.use_implicit_arrays(f))(params, X),
        jax.jit(f)(compress.materialize(params), X),
        1e-2 if ("bfloat16" in name or "wide" in name) else 2e-6,
    )


@pytest.mark.parametrize("name", ["rounded", "rounded to 8 bits", "rounded to fewer bits"])
def test_rounding_is_not_dropped(name):
    f, params = PROGRAMS[name][1], KINDS["int8"]({"w": W["w"]})
    exact, w = X @ compress.materialize(params)["w"], compress.materialize(params)
    expected = jax.jit(f)(w, X)
    assert jnp.abs(expected - exact).max() > 1e-3
    np.testing.assert_allclose(
        jax.jit(ft.use_implicit_arrays(f))(params, X), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.quick_cases("format1")
@pytest.mark.parametrize("format", [compress.Int8(), compress.Float8()])
def test_float16_sums_of_codes_do_not_overflow(format):
    params, image = (
        compress.quantize({"w": jnp.ones((3, 3, 64, 2))}, {"w": format}),
        jnp.ones((1, 3, 3, 64), "float16"),
    )
    conv = lambda p, x: lax.conv_general_dilated(
        x, p["w"].astype(x.dtype), (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(ft.use_implicit_arrays(conv)(params, image).ravel(), [576, 576])
    params = compress.quantize({"w": jnp.ones((1024, 2))}, {"w": format})
    f = ft.use_implicit_arrays(lambda p, x: x @ p["w"].astype(x.dtype))
    np.testing.assert_allclose(f(params, jnp.ones((1, 1024), "float16")), [[1024, 1024]])


OWN_FORM = [
    "product",
    "transposed",
    "left",
    "einsum",
    "batched",
    "heads",
    "heads, merged",
    "split",
    "bfloat16",
    "jit",
    "remat",
    "jit that transposes",
    "scan",
    "nested scan",
    "loop",
    "remat in scan",
    "indexed",
    "dynamic index",
    "slice",
    "cond",
    "vmap",
    "vmap over x",
    "convolution",
    "convolution, channels first",
    "lookup",
    "lookup, clipped",
    "tied",
]


@pytest.mark.parametrize("name", OWN_FORM)
def test_what_is_not_materialized(name):
    leaf, f = PROGRAMS[name]
    params = KINDS["int8"]({leaf: W[leaf]})
    uses = ft.explain(ft.use_implicit_arrays(f), params, X)
    assert uses.uses and all(use.leaf == leaf for use in uses.uses)
    assert [use.primitive for use in uses.materialized] == (["slice"] if name == "cond" else [])


@pytest.mark.quick_cases("while", "tied")
@pytest.mark.parametrize(
    "name",
    [
        "scan",
        "remat in scan",
        "product",
        "while",
        "convolution",
        "tied",
        "jit",
        "cond",
        "shard_map",
    ],
)
def test_gradients_with_respect_to_low_rank_factors(name):
    leaf, f = PROGRAMS[name]
    params = KINDS["lora on int4"]({leaf: W[leaf]})
    trainable, frozen = nn.partition(params, ".*/[ab]")

    def loss(g, trainable):
        return sum(jnp.square(y).mean() for y in jax.tree.leaves(g(nn.combine(trainable, frozen))))

    if name == "while":  # has no reverse mode
        tangents = [
            jax.jvp(functools.partial(loss, g), (trainable,), (trainable,))
            for g in (
                lambda p: ft.use_implicit_arrays(f)(p, X),
                lambda p: f(compress.materialize(p), X),
            )
        ]
        return close(*tangents, 1e-5)
    implicit = jax.grad(
        functools.partial(loss, lambda p: ft.use_implicit_arrays(f)(p, jnp.abs(X)))
    )(trainable)
    merged = jax.grad(functools.partial(loss, lambda p: f(compress.materialize(p), jnp.abs(X))))(
        trainable
    )
    close(implicit, merged, 3e-5)  # float32 sums in another order: 1.2e-5 on a CPU with AVX-512


# Other libraries' modules.


@pytest.mark.exhaustive
def test_linen_modules():
    model = linen.Sequential(
        [linen.Dense(16), linen.relu, linen.MultiHeadDotProductAttention(2, decode=False)]
    )
    x = jax.random.normal(K[0], (2, 5, 8))
    params = model.init(K[1], x)
    params = compress.quantize(params, {".*/kernel": compress.Int8()})
    g = ft.use_implicit_arrays(model.apply)
    close(g(params, x), model.apply(compress.materialize(params), x))
    uses = ft.explain(g, params, x)
    assert len(uses.uses) == 5 and not uses.materialized


@pytest.mark.exhaustive
def test_equinox_modules():
    model = eqx.nn.MLP(8, 4, 16, 2, key=K[0])
    quantized = compress.quantize(model, {"layers/.*/weight": compress.Int8(axes=-1)})
    f = lambda model, x: jax.vmap(model)(x)
    close(ft.use_implicit_arrays(f)(quantized, X), f(compress.materialize(quantized), X))
    uses = ft.explain(ft.use_implicit_arrays(f), quantized, X)
    assert len(uses.uses) == 3 and not uses.materialized
    assert uses.uses[0].leaf.endswith("layers/0/weight")


@pytest.mark.exhaustive
def test_haiku_functions():
    f = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 4])(x)))
    params = compress.quantize(f.init(K[0], X), {".*": compress.Int4(4)})
    close(ft.use_implicit_arrays(f.apply)(params, X), f.apply(compress.materialize(params), X))


# Composition with other transforms.

MODEL = models.GPT(vocab_size=32, width=16, depth=2, heads=2, context=8)
TOKENS = jax.random.randint(K[0], (2, 8), 0, 32)


@functools.cache
def gpt():
    params = MODEL.init(K[1], TOKENS)[0]
    return compress.quantize(params, {"blocks": compress.Int4(8), "embed": compress.Int8(axes=-1)})


def loss(model):
    return lambda params: jnp.square(model(params, TOKENS)).mean()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "order",
    [
        lambda f: ft.autocast(ft.use_implicit_arrays(f), "bfloat16"),
        lambda f: ft.use_implicit_arrays(ft.autocast(f, "bfloat16")),
    ],
)
def test_autocast(order):
    got, want = order(MODEL)(gpt(), TOKENS), MODEL(compress.materialize(gpt()), TOKENS)
    assert jnp.linalg.norm(got - want) < 2e-2 * jnp.linalg.norm(want)


@pytest.mark.exhaustive
def test_tune_vmap_and_microbatch():
    f, params = ft.use_implicit_arrays(MODEL), gpt()
    want = MODEL(compress.materialize(params), TOKENS)
    close(ft.tune(f, "cpu")(params, TOKENS), want, 1e-5)
    close(jax.vmap(f, (None, 0))(params, TOKENS[:, None])[:, 0], want, 1e-5)
    ensemble = jax.tree.map(lambda a: jnp.stack([a, a]), params)
    close(jax.vmap(f, (0, None))(ensemble, TOKENS)[1], want, 1e-5)


@pytest.mark.exhaustive
def test_gradient_with_respect_to_the_input():
    f = lambda w, x: jnp.square(x @ w["w"]).sum()
    params = KINDS["int8"]({"w": W["w"]})
    close(
        jax.grad(ft.use_implicit_arrays(f), 1)(params, X),
        jax.grad(f, 1)(compress.materialize(params), X),
    )
    close(
        ft.use_implicit_arrays(jax.grad(f, 1))(params, X),
        jax.grad(f, 1)(compress.materialize(params), X),
    )


def test_lowered_for_other_platforms_and_a_symbolic_batch():
    (batch,) = jax.export.symbolic_shape("b")
    for platforms in (["cpu"], ["cuda"], ["tpu"]):
        exported = jax.export.export(
            jax.jit(ft.use_implicit_arrays(lambda p, x: x @ p["w"])), platforms=platforms
        )(KINDS["int4 in groups"]({"w": W["w"]}), jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    assert exported.platforms == ("tpu",)


# Calls.


def test_arguments_and_results():
    f = ft.use_implicit_arrays(
        lambda params, x, scale, *, name: (params, name, x @ params["w"] * scale)
    )
    params = KINDS["int8"]({"w": W["w"]})
    returned, name, _ = f(params, X, 2, name="n")
    assert (
        name == "n"
        and isinstance(returned["w"], compress.Quantized)
        and returned["w"].codes is params["w"].codes
    )
    close(
        f(params, X[:1], 1.5, name="n")[2], 1.5 * X[:1] @ params["w"].materialize()
    )  # another shape and value
    close(f({"w": W["w"]}, X, 1, name="n")[2], X @ W["w"])  # without implicit arrays
    assert f.__name__ == "<lambda>" and not hasattr(
        ft.use_implicit_arrays(jax.jit(jnp.sin)), "lower"
    )


def test_explain():
    params = KINDS["int8"]({"w": W["w"]})
    f = ft.use_implicit_arrays(lambda p, x: jnp.sin(p["w"]).sum() + x @ p["w"].T)
    assert str(ft.explain(jax.jit(f), params, X)).splitlines() == [
        "2 uses of implicit arrays, 1 materialized",
        "",
        "array  scope       use",
        "w      (no scope)  1 sin: materialized: no form for this operation",
        "w      (no scope)  1 dot_general: in its own form",
    ]
    assert str(ft.explain(f, {"w": W["w"]}, X)) == "no implicit array is used"


def test_a_model_without_the_transform_is_an_error():
    params = KINDS["int8"]({"kernel": W["w"]})
    with pytest.raises(
        TypeError, match=r"'kernel': a Quantized array; call ft\.use_implicit_arrays\(model\)"
    ):
        nn.Dense(8, use_bias=False)(params, X)
