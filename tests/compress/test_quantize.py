"""Quantized parameters: values against NumPy, sizes, checkpoints, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft

W = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)


def quantized(w, format):
    return compress.quantize({"w": jnp.asarray(w)}, {"w": format})["w"]


def test_int8_is_the_formula_of_numpy():
    scale = np.abs(W).max(0, keepdims=True) / 127
    codes = np.clip(np.round(W / scale), -127, 127).astype(np.int8)
    q = quantized(W, compress.Int8())
    np.testing.assert_array_equal(q.codes, codes)
    np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
    np.testing.assert_allclose(q.materialize(), codes * scale, rtol=1e-6)


def test_int4_in_groups_is_the_formula_of_numpy():
    grouped = W.reshape(3, 2, 4)
    scale = np.abs(grouped).max(1, keepdims=True) / 7
    want = (np.clip(np.round(grouped / scale), -7, 7) * scale).reshape(6, 4)
    q = quantized(W, compress.Int4(group=2))
    assert q.codes.shape == (3, 4) and q.codes.dtype == jnp.uint8 and q.shape == (6, 4)
    np.testing.assert_allclose(q.materialize(), want, rtol=1e-6, atol=1e-7)


def test_nf4_takes_the_nearest_of_its_values():
    levels = np.asarray(compress.NF4().decode(jnp.arange(16), jnp.float32))
    scale = np.abs(W).max(0, keepdims=True)
    want = levels[np.abs((W / scale)[..., None] - levels).argmin(-1)] * scale
    np.testing.assert_allclose(
        quantized(W, compress.NF4(None)).materialize(), want, rtol=1e-6, atol=1e-7
    )


def test_float8_rounds_to_nearest():
    import ml_dtypes

    scale = np.abs(W).max(0, keepdims=True) / 448
    want = (W / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_allclose(quantized(W, compress.Float8()).materialize(), want, rtol=1e-6)


@pytest.mark.exhaustive
def test_integer_products_are_exact():
    """Against int32 sums of NumPy."""
    q = quantized(W, compress.Int8(activations="dynamic"))
    rows = np.abs(X).max(1, keepdims=True) / np.float32(127)
    codes = np.clip(np.round(X / rows), -127, 127).astype(np.int32)
    want = (codes @ np.asarray(q.codes, np.int32)).astype(np.float32) * rows * np.asarray(q.scale)
    got = ft.use_implicit_arrays(lambda p, x: x @ p["w"])({"w": q}, jnp.asarray(X))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jaxpr = jax.make_jaxpr(lambda x: q.dot(x, (0,), None))(X)
    call = next(eqn for eqn in jaxpr.eqns if "call_jaxpr" in eqn.params)
    product = next(
        eqn for eqn in call.params["call_jaxpr"].jaxpr.eqns if eqn.primitive.name == "dot_general"
    )
    assert product.outvars[0].aval.dtype == jnp.int32


def test_derivatives_ignore_the_rounding_of_activations():
    f = ft.use_implicit_arrays(lambda p, x: (x @ p["w"]).sum())
    rounded, exact = (
        jax.grad(f, 1)({"w": quantized(W, compress.Int8(activations=on))}, jnp.asarray(X))
        for on in ("dynamic", None)
    )
    np.testing.assert_allclose(rounded, exact, rtol=1e-6)


def test_zeros_and_constant_blocks():
    for format in (compress.Int8(), compress.Int4(2), compress.NF4(None), compress.Float8()):
        assert not quantized(np.zeros((4, 2), np.float32), format).materialize().any()
        np.testing.assert_allclose(
            quantized(np.full((4, 2), 3.0, np.float32), format).materialize(), 3, rtol=1e-6
        )


@pytest.mark.exhaustive
def test_what_is_quantized():
    params = {
        "fc": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)},
        "blocks": {
            "bias": jnp.ones((3, 2)),
            "norm": {"scale": jnp.ones((3, 2))},
            "kernel": jnp.ones((3, 4, 2), jnp.bfloat16),
        },
        "ids": jnp.ones((2, 2), int),
    }
    q = compress.quantize(params, {"blocks": compress.Int4(None), ".*": compress.Int8()})
    is_quantized = lambda x: isinstance(x, compress.Quantized)
    kinds = jax.tree.map(lambda x: x.format if is_quantized(x) else None, q, is_leaf=is_quantized)
    assert kinds == {
        "fc": {"kernel": compress.Int8(), "bias": None},
        "ids": None,
        "blocks": {"bias": None, "norm": {"scale": None}, "kernel": compress.Int4(None)},
    }
    assert q["blocks"]["kernel"].materialize().dtype == jnp.bfloat16 and q["blocks"][
        "kernel"
    ].scale.shape == (3, 1, 2)
    assert compress.size(q["blocks"]["kernel"]) == 3 * 2 * 2 + 3 * 2 * 4


def test_a_checkpoint_restores_quantized_parameters(tmp_path):
    params = compress.quantize({"a": {"kernel": jnp.asarray(W)}}, {"a": compress.Int4(2)})
    params["b"] = compress.lora(jax.random.key(0), {"kernel": jnp.asarray(W)}, {"kernel": 2})
    with tr.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"params": params})
    with tr.Checkpoints(tmp_path / "run") as checkpoints:
        restored = checkpoints.restore({"params": jax.tree.map(jnp.zeros_like, params)})["params"]
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: compress.quantize(p, {"fd": compress.Int8()}),
            ValueError,
            "quantize: the pattern 'fd' matches no kernel or table; nearest: 'fc/kernel'",
        ),
        (
            lambda p: compress.quantize(p, {".*": compress.Int8(), "fc": compress.Int4(2)}),
            ValueError,
            "quantize: the pattern 'fc' is not used, because all that it matches .'fc/kernel'. matches "
            "the earlier '.*': move 'fc' up, or remove it",
        ),
        (
            lambda p: compress.quantize(p, {"fc": 8}),
            TypeError,
            r"quantize: expected compress.Int8\(\), Int4\(\), NF4\(\) or Float8\(\) for 'fc'; got "
            r"8",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int4(3)}),
            ValueError,
            "Int4: group must be even",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int4(4)}),
            ValueError,
            r"quantize: fc/kernel has 6 values along axis -2, which cannot be divided into groups "
            r"of 4; use group=None or a ",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int8(axes=3)}),
            ValueError,
            r"quantize: fc/kernel has 2 axes; got axes=3",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int8(axes=(0, -2))}),
            ValueError,
            r"quantize: axes=\(0, -2\) name an axis of fc/kernel twice",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int8(axes="0")}),
            ValueError,
            "has 2 axes; got axes='0'",
        ),
        (
            lambda p: compress.quantize({"w": jnp.ones((0, 4))}, {"w": compress.Int8()}),
            ValueError,
            r"quantize: w has no values, its shape is \(0, 4\); exclude it from the recipe",
        ),
        (
            lambda p: compress.quantize(p, {"fc": compress.Int8()}, stats=[1]),
            TypeError,
            r"quantize: expected stats from compress.calibrate\(...\), a mapping by path; got list",
        ),
        (
            lambda p: compress.quantize(
                compress.quantize(p, {"fc": compress.Int8()}), {"fc": compress.Int4()}
            ),
            ValueError,
            "quantize: 'fc/kernel', which the pattern 'fc' matches, is a Quantized already; remove "
            "the pattern",
        ),
        (
            lambda p: compress.lora(
                jax.random.key(0), compress.lora(jax.random.key(0), p, {"fc": 2}), {"fc": 2}
            ),
            ValueError,
            "lora: 'fc/kernel', which the pattern 'fc' matches, is a LowRank already",
        ),
        (
            lambda p: compress.lora(jax.random.key(0), p, {"fc": 2}, alpha="16"),
            TypeError,
            "lora: expected a number or None as alpha; got '16'",
        ),
        (
            lambda p: compress.quantize(p, {"(": compress.Int8()}),
            ValueError,
            "is not a regular expression",
        ),
        (
            lambda p: compress.quantize(p, compress.Int8()),
            TypeError,
            r"quantize: expected rules \{pattern: option\}",
        ),
        (
            lambda p: compress.lora(jax.random.key(0), p, {"fc": 0}),
            ValueError,
            "lora: expected a positive integer as rank for 'fc'; got 0",
        ),
        (
            lambda p: compress.lora(jax.random.key(0), p, 8),
            TypeError,
            r"lora: expected rules \{pattern: option\}",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call({"fc": {"kernel": jnp.asarray(W), "bias": jnp.zeros(4)}})


def test_an_odd_axis_cannot_be_packed():
    with pytest.raises(ValueError, match="w has 3 values along axis -2; Int4 needs an even number"):
        quantized(np.ones((3, 2), np.float32), compress.Int4(None))


def test_lora_changes_nothing_at_first_and_merges():
    model = nn.Dense(4)
    params = model.init(jax.random.key(0), X)[0]
    adapted = compress.lora(jax.random.key(1), params, {"kernel": 2}, alpha=8)
    assert adapted["kernel"].scale == 4 and jnp.abs(adapted["kernel"].a).max() <= 1 / np.sqrt(6)
    f = ft.use_implicit_arrays(model)
    np.testing.assert_array_equal(f(adapted, X), model(params, X))
    trained = jax.tree.map(lambda x: x + 0.5, adapted)
    kernel = np.asarray(trained["kernel"].base) + 4 * np.asarray(trained["kernel"].a) @ np.asarray(
        trained["kernel"].b
    )
    want = X @ kernel + np.asarray(trained["bias"])
    np.testing.assert_allclose(f(trained, X), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(compress.merge(trained)["kernel"], kernel, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_gradients_keep_only_the_factors():
    """The compiled gradient holds no dense gradient of the frozen base."""
    params = compress.quantize({"w": jnp.ones((64, 64))}, {"w": compress.Int8()})
    params = compress.lora(jax.random.key(1), params, {"w": 2})
    trainable, frozen = nn.partition(params, ".*/[ab]")
    f = lambda t, x: ft.use_implicit_arrays(lambda p, x: jnp.tanh(x @ p["w"]).sum())(
        nn.combine(t, frozen), x
    )
    jaxpr = jax.make_jaxpr(jax.grad(f))(trainable, jnp.ones((3, 64)))
    dense = [
        eqn
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == (64, 64)
    ]
    assert not dense and {leaf.aval.shape for leaf in jaxpr.jaxpr.outvars} == {(64, 2), (2, 64)}
