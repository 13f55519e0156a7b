"""Statistics of inputs, and what follows from them: scales of activations, GPTQ."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import compress, models
from fnet import layers as nn
from fnet import transforms as ft
from fnet.compress._gptq import gptq

RNG = np.random.default_rng(0)
W = RNG.normal(size=(6, 4)).astype(np.float32)
X = RNG.normal(size=(50, 6)).astype(np.float32)
MIXED = (RNG.normal(size=(48, 8)) @ RNG.normal(size=(8, 8))).astype(np.float32)  # correlated inputs
VALUES = np.append(RNG.normal(size=29_999), 50.0).astype(np.float32).reshape(-1, 2)
IMAGE = RNG.normal(size=(2, 5, 5, 3)).astype(np.float32)


def only(stats):
    (found,) = stats.values()
    return found


def product(params, x):
    return jnp.tanh(x) @ params["w"]


def test_statistics_are_those_of_numpy():
    inputs = np.tanh(X)
    stats = only(compress.calibrate(product, {"w": jnp.asarray(W)}, [X[:20], X[20:]]))
    assert stats.rows == 50 and stats.axes == (-2,) and not stats.conflict
    np.testing.assert_allclose(stats.largest, np.abs(inputs).max(), rtol=1e-6)
    np.testing.assert_allclose(stats.magnitude, np.abs(inputs).mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.gram, inputs.T @ inputs, rtol=1e-5, atol=1e-5)
    counted, _ = np.histogram(np.abs(inputs), [0, *stats.bounds])
    assert np.abs(counted - stats.histogram).sum() <= 4  # values at the bounds of bins


def test_ranges_of_activations():
    """Against numpy's percentile, and against the error of each bound on the values."""
    x = VALUES
    stats = only(compress.calibrate(lambda p, x: x @ p["w"], {"w": jnp.ones((2, 3))}, [x]))
    assert stats.bound("absmax") == 50
    np.testing.assert_allclose(
        stats.bound("percentile"), np.percentile(np.abs(x), 99.99), rtol=0.03
    )
    error = lambda c: np.mean((np.clip(np.round(x / (c / 127)), -127, 127) * (c / 127) - x) ** 2)
    best = min(map(error, np.linspace(1, 50, 400)))
    assert error(float(stats.bound("mse"))) <= 1.05 * best


def stacked(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]


def over_time(p, x):
    """The kernel is a constant of the scan."""
    return lax.scan(
        lambda h, x: (jnp.tanh(x + h @ p["w"]), None), jnp.zeros((2, 8)), x.reshape(-1, 2, 8)
    )[0]


def layers_over_time(p, x):
    """The inner scan is the one over the stack."""
    return lax.scan(lambda h, x: (stacked(p, h + x), None), jnp.zeros((2, 8)), x.reshape(-1, 2, 8))[
        0
    ]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("f", "shape", "axes"),
    [
        (stacked, (3, 8, 8), -2),
        (over_time, (8, 8), -2),
        (layers_over_time, (3, 8, 8), -2),
        (lambda p, x: jax.vmap(lambda w, x: x @ w)(p["w"], x.reshape(3, -1, 8)), (3, 8, 8), -2),
        (lambda p, x: jax.vmap(lambda x: x @ p["w"])(x), (8, 8), -2),
        (lambda p, x: jax.checkpoint(stacked)(p, x), (3, 8, 8), -2),
        (
            lambda p, x: jnp.einsum("bi,oi->bo", x, p["w"].astype(jnp.bfloat16).astype(x.dtype)),
            (8, 8),
            -1,
        ),
    ],
)
def test_the_correction_minimizes_the_error_of_the_products(f, shape, axes):
    """The sum of squares of x (w - q) from the recorded x^T x; rounding to the nearest code has a
    larger one."""
    params = {"w": jax.random.normal(jax.random.key(1), shape)}
    stats = compress.calibrate(f, params, [MIXED])
    gram = np.broadcast_to(only(stats).gram, (*shape[:-2], 8, 8))
    assert only(stats).gram.shape == (*shape[:-2], 8, 8) and np.all(
        np.linalg.eigvalsh(gram) > -1e-3
    )

    def error(**options):
        q = compress.quantize(params, {"w": compress.Int4(None, axes=axes)}, **options)["w"]
        wrong = np.asarray(params["w"] - q.materialize())
        wrong = wrong if axes == -2 else np.swapaxes(wrong, -1, -2)
        return np.einsum("...ij,...io,...jo->...", gram, wrong, wrong).sum()

    assert error(stats=stats) < 0.97 * error()


@pytest.mark.quick_cases("5")
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_layers_are_told_apart_by_the_parameter_not_by_the_lengths_of_scans(steps):
    """An outer scan may be as long as the stack, which is the inner one. The layers multiply by 2,
    3 and 5."""

    def f(p, x):
        stack = lambda x: lax.scan(lambda h, w: (h @ w, None), x, p["w"])[0]
        both = lambda x: stack(
            lax.scan(lambda h, w: (h @ w, None), x, p["w"][:2])[0]
        )  # a part of the stack, too
        return lax.scan(lambda c, x: (c, both(x)), 0.0, x)[1]

    scale = np.array([2, 3, 5], np.float32)
    x = np.random.default_rng(1).normal(size=(steps, 5, 4)).astype(np.float32)
    stats = only(
        compress.calibrate(
            f, {"w": jnp.asarray(scale[:, None, None] * np.eye(4, dtype=np.float32))}, [x]
        )
    )
    inputs = [[1, 6], [2, 12], [36]]  # the factors of the inputs of each layer
    np.testing.assert_allclose(
        stats.largest, [max(each) * np.abs(x).max() for each in inputs], rtol=1e-5
    )
    np.testing.assert_array_equal(stats.rows, [5 * steps * len(each) for each in inputs])
    gram = np.einsum("sbi,sbj->ij", x, x)
    np.testing.assert_allclose(
        stats.gram, [sum(n * n for n in each) * gram for each in inputs], rtol=1e-4, atol=1e-2
    )


@pytest.mark.exhaustive
def test_the_correction_of_a_singular_sum_rounds_to_the_nearest_code():
    """Without a finite inverse, codes would be those of NaN, which are finite numbers."""
    w = jnp.asarray(W)[None]
    got = gptq(compress.Int4().rounded, w, jnp.full_like(w, 0.3), jnp.full((1, 6, 6), 1e38))
    np.testing.assert_array_equal(got[0], np.clip(np.round(W / np.float32(0.3)), -8, 7))


def sequential(w, scale, gram):
    """GPTQ by elimination in the inverse of x^T x (Frantar and Alistarh 2022, algorithm 1, in a
    fixed order)."""
    n = len(w)
    gram = gram + 0.01 * np.diag(gram).mean() * np.eye(n)
    inverse, w, codes = np.linalg.inv(gram), w.astype(np.float64).copy(), np.zeros_like(w)
    for i in np.argsort(-np.diag(gram)):
        codes[i] = np.clip(np.round(w[i] / scale[0]), -8, 7)
        w -= np.outer(inverse[:, i] / inverse[i, i], w[i] - codes[i] * scale[0])
        inverse = inverse - np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1  # eliminated; its row is not read again
    return codes


@pytest.mark.exhaustive
def test_gptq_equals_elimination():
    f = lambda p, x: x @ p["w"]
    stats = compress.calibrate(f, {"w": jnp.asarray(W)}, [MIXED[:, :6]])
    q = compress.quantize({"w": jnp.asarray(W)}, {"w": compress.Int4(None)}, stats=stats)["w"]
    want = sequential(W, np.asarray(q.scale), np.asarray(stats["w"].gram, np.float64))
    np.testing.assert_allclose(q.materialize(), want * np.asarray(q.scale), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_scales_have_the_least_error():
    """A search over scales, weighted with the second moments of the inputs."""
    stats = compress.calibrate(lambda p, x: x @ p["w"], {"w": jnp.asarray(W)}, [MIXED[:, :6]])
    q = compress.quantize({"w": jnp.asarray(W)}, {"w": compress.Int4(2)}, stats=stats)["w"]
    moments = np.diag(stats["w"].gram)

    def error(block, weights, scale):
        return (
            weights[:, None] * (block - np.clip(np.round(block / scale), -8, 7) * scale) ** 2
        ).sum(0)

    for i in range(3):
        block, weights = W[2 * i : 2 * i + 2], moments[2 * i : 2 * i + 2]
        largest = np.abs(block).max(0) / 7
        errors = np.stack(
            [
                error(block, weights, largest * factor)
                for factor in np.linspace(-1, 1, 400)
                if abs(factor) > 0.54
            ]
        )
        assert (
            error(block, weights, np.asarray(q.scale)[i])
            <= 1.2 * errors.min(0) + 1e-3 * errors.max(0)
        ).all()
        assert (
            error(block, weights, np.asarray(q.scale)[i]) <= error(block, weights, largest) * 1.0001
        ).all()


def test_known_scales_of_activations():
    params = {"w": jnp.asarray(W)}
    f = lambda p, x: x @ p["w"]
    stats = compress.calibrate(f, params, [X])
    q = compress.quantize(params, {"w": compress.Int8(activations="absmax")}, stats=stats)
    step = np.abs(X).max() / 127
    codes = np.clip(np.round(2 * X / step), -127, 127)  # half of the range is clipped
    want = codes @ np.asarray(q["w"].codes, float) * step * np.asarray(q["w"].scale)
    np.testing.assert_allclose(ft.use_implicit_arrays(f)(q, 2 * X), want, rtol=1e-5)


@pytest.mark.parametrize("method", ["dynamic", "mse"])
def test_convolutions_round_their_inputs(method):
    x = jnp.asarray(IMAGE)
    layer = nn.Conv(4, 3)
    params = layer.init(jax.random.key(0), x)[0]
    stats = compress.calibrate(layer, params, [x])
    q = compress.quantize(params, {"kernel": compress.Int8(activations=method)}, stats=stats)
    step = (
        np.abs(x).max((1, 2, 3), keepdims=True) / 127
        if method == "dynamic"
        else stats["kernel"].bound("mse") / 127
    )
    rounded = jnp.clip(jnp.round(x / step), -127, 127) * step
    want = layer({**params, "kernel": q["kernel"].materialize()}, rounded)
    np.testing.assert_allclose(ft.use_implicit_arrays(layer)(q, x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_models():
    """The blocks of a GPT under its scan, and the same values as those of its layers one by one; a
    Flax model."""
    model = models.GPT(vocab_size=32, width=16, depth=2, heads=2, context=8)
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, 32)
    params = model.init(jax.random.key(0), tokens)[0]
    stats = compress.calibrate(model, params, [tokens])
    assert set(stats) == {
        *(f"blocks/attention/{name}/kernel" for name in ("query", "key", "value", "out")),
        "blocks/fc/kernel",
        "blocks/proj/kernel",
        "embed/embedding",
    }
    inputs = ft.capture(model, "blocks/norm2")(params, tokens)[1]["blocks/norm2"]
    want = np.einsum("dbti,dbtj->dij", inputs, inputs)
    np.testing.assert_allclose(stats["blocks/fc/kernel"].gram, want, rtol=1e-4, atol=1e-4)
    for recipe in ({"blocks": compress.Int4(8)}, {"blocks": compress.Int8(activations="mse")}):
        f = ft.use_implicit_arrays(model)
        got = f(compress.quantize(params, recipe, stats=stats), tokens)
        assert jnp.abs(got - model(params, tokens)).max() < 0.1 * jnp.abs(got).max()
    quantized = compress.quantize(params, {"blocks/fc": compress.Int8()})
    assert set(compress.calibrate(model, quantized, [tokens])) == set(stats) - {"blocks/fc/kernel"}
    flax = linen.Dense(4)
    params = flax.init(jax.random.key(0), X)
    assert set(compress.calibrate(flax.apply, params, [X])) == {"params/kernel"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda p: compress.calibrate(product, p, []),
            "calibrate: expected at least one batch; got none",
        ),
        (
            lambda p: compress.calibrate(lambda p, x: x, p, [X]),
            "has no product with any of the 1 parameters",
        ),
        (
            lambda p: compress.quantize(p, {"w": compress.Int8(activations="mse")}),
            "quantize: w needs statistics of its inputs for activations='mse'; pass "
            "stats=compress.calibrate",
        ),
        (
            lambda p: compress.quantize(
                p, {"w": compress.Int4(None, axes=-1)}, stats=compress.calibrate(product, p, [X])
            ),
            r"w has scales for axes \(-1,\), but products contract it over axes \(-2,\); set "
            r"`axes`",
        ),
        (
            lambda p: compress.quantize(
                p,
                {"w": compress.Int8()},
                stats=compress.calibrate(lambda p, x: x @ p["w"] @ p["w"].T, p, [X]),
            ),
            r"products contract it over axes \(-[12],\) and over axes",
        ),
        (
            lambda p: compress.quantize(
                p,
                {"w": compress.Int8(activations="mse")},
                stats=compress.calibrate(lambda p, x: x @ p["w"] @ p["w"].T, p, [X], gram=False),
            ),
            "w has no single scale for its inputs: products",
        ),
        (
            lambda p: compress.quantize(
                {"w": jnp.ones((3, 2, 2))},
                {"w": compress.Int8(activations="mse")},
                stats=compress.calibrate(
                    lambda p, x: lax.scan(lambda h, w: (h @ w, None), x, p["w"][:2])[0],
                    {"w": jnp.ones((3, 2, 2))},
                    [X[:, :2]],
                ),
            ),
            "w: no inputs of some of its layers were recorded",
        ),
        (
            lambda p: compress.calibrate(
                lambda p, x: x @ p["w"], p, [X, np.where(X == X[0, 0], np.nan, X)]
            ),
            "calibrate: batch 1: an input of w is NaN or infinite",
        ),
        (
            lambda p: compress.calibrate(lambda p, x: x @ p["w"], p, [1e25 * X]),
            r"calibrate: batch 0: the sum of x\^T x over the inputs x of w is NaN or infinite",
        ),
        (
            lambda p: compress.Int8(activations="max"),
            "Int8: activations must be None, 'dynamic', 'absmax'",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call({"w": jnp.asarray(W)})
