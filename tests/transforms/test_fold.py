"""ft.fold against the unfolded function: fnet's models, other libraries' modules, and programs that
must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax import lax

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

DRAW = np.random.default_rng(0)


def random(*shape, dtype=jnp.float32):
    return jnp.asarray(DRAW.normal(size=shape), dtype)


def varied(tree):
    """Parameters and statistics as after training: no scale is 1, no mean is 0, variances are
    positive."""
    return jax.tree.map(
        lambda x: jnp.asarray(DRAW.uniform(0.5, 1.5, x.shape) if x.ndim == 1 else x, x.dtype), tree
    )


IMAGES = {
    "CNN": models.CNN(3, (4, 6)),
    "ResNet": models.ResNet((1, 1), bottleneck=False, classes=3, width=4),
    "MobileNetV2": models.MobileNetV2(classes=3, width=0.25),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["CNN", "ResNet", "MobileNetV2"])
def test_batch_norm_becomes_a_part_of_the_convolution(name):
    model, x = IMAGES[name], random(2, 33, 32, 3)
    params, state = map(varied, model.init(jax.random.key(0), x))
    predict = ft.fold(model, params, state)
    close(predict(x), model(params, x, state=state)[0], 1e-5)
    rows = ft.explain(predict, x).rows
    norms = sum(
        "var" in jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(state)
    )
    assert len(rows) == norms
    assert {row.primitive for row in rows} == {"conv_general_dilated"}
    small = x[:1, :32]
    close(
        jax.jit(predict)(small), model(params, small, state=state)[0], 1e-5
    )  # another shape, inside jit


S, B = random(6), random(6)
X2, K2 = random(2, 8, 8, 3), random(3, 3, 3, 6)
NHWC = dict(window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

# name: (f(params, x), params, x, how many products absorb an affine map)
PROGRAMS = {
    "dense, scale and shift": (
        lambda p, x: (x @ p["w"]) * p["s"][None] + p["b"][None],
        {"w": random(4, 6), "s": S, "b": B},
        random(5, 4),
        1,
    ),
    "division and negation": (
        lambda p, x: -((p["b"][None] - x @ p["w"]) / p["s"][None]) - 2.0,
        {"w": random(4, 6), "s": S, "b": B},
        random(5, 4),
        1,
    ),
    "division by the product": (
        lambda p, x: p["s"][None] / (3.0 + jnp.square(x @ p["w"])),
        {"w": random(4, 6), "s": S},
        random(5, 4),
        0,
    ),
    "kernel on the left": (
        lambda p, x: (p["w"].T @ x) * p["s"][:, None],
        {"w": random(4, 6), "s": S},
        random(4, 5),
        1,
    ),
    "a scale for each position": (
        lambda p, x: (x @ p["w"]) * p["s"],
        {"w": random(4, 6), "s": random(5, 6)},
        random(5, 4),
        0,
    ),
    "two uses of the product": (
        lambda p, x: (lambda y: y * p["s"][None] + y)(x @ p["w"]),
        {"w": random(4, 6), "s": S},
        random(5, 4),
        0,
    ),
    "an output that is also scaled": (
        lambda p, x: (lambda y: (y, y * p["s"][None]))(x @ p["w"]),
        {"w": random(4, 6), "s": S},
        random(5, 4),
        0,
    ),
    "batched kernels": (
        lambda p, x: jnp.einsum("bij,bjk->bik", x, p["w"]) * p["s"][None, None],
        {"w": random(2, 4, 6), "s": S},
        random(2, 5, 4),
        1,
    ),
    "several kernel axes": (
        lambda p, x: jnp.einsum("bi,ihd->bhd", x, p["w"]) * p["s"][None],
        {"w": random(4, 2, 6), "s": random(2, 6)},
        random(5, 4),
        1,
    ),
    "convolution, channels first": (
        lambda p, x: (
            lax.conv_general_dilated(
                x,
                p["k"],
                (2, 1),
                "SAME",
                feature_group_count=2,
                rhs_dilation=(1, 2),
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )
            * p["s"][None, :, None, None]
        ),
        {"k": random(6, 2, 3, 3), "s": S},
        random(2, 4, 8, 9),
        1,
    ),
    "transposed convolution": (
        lambda p, x: lax.conv_transpose(x, p["k"], (2, 2), "SAME") * p["s"][None, None, None] + 1.0,
        {"k": K2, "s": S},
        X2,
        1,
    ),
    "one axis of space": (
        lambda p, x: (
            lax.conv_general_dilated(
                x, p["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            * p["s"][None, None]
        ),
        {"k": random(3, 4, 6), "s": S},
        random(2, 9, 4),
        1,
    ),
    "a kernel that is computed": (
        lambda p, x: (
            lax.conv_general_dilated(
                x,
                (p["k"] - p["k"].mean((0, 1, 2), keepdims=True))
                / p["k"].std((0, 1, 2), keepdims=True),
                **NHWC,
            )
            * p["s"][None, None, None]
        ),
        {"k": K2, "s": S},
        X2,
        1,
    ),
    "inside a scan": (
        lambda p, x: lax.scan(lambda c, w: (jnp.tanh(c @ w * p["s"][None]), None), x, p["w"])[0],
        {"w": random(3, 6, 6), "s": S},
        random(5, 6),
        0,
    ),
    "between branches": (
        lambda p, x: lax.cond(x.sum() > 0, lambda: (x @ p["w"]) * p["s"][None], lambda: x @ p["w"]),
        {"w": random(4, 6), "s": S},
        random(5, 4),
        0,
    ),
    "bfloat16": (
        lambda p, x: (x @ p["w"]) * p["s"][None],
        {"w": random(4, 6, dtype=jnp.bfloat16), "s": S.astype(jnp.bfloat16)},
        random(5, 4, dtype=jnp.bfloat16),
        0,
    ),
    "no input": (lambda p, x: p["w"] * 2 + x.sum() * 0, {"w": random(4, 6)}, random(5, 4), 0),
    "NumPy": (
        lambda p, x: (x @ p["w"]) * p["s"][None] + p["s"][None],
        {"w": np.asarray(random(4, 6)), "s": np.asarray(S)},
        np.asarray(random(5, 4)),
        1,
    ),
}


@pytest.mark.quick_cases(
    "division by the product",
    "two uses of the product",
    "an output that is also scaled",
    "between branches",
    "bfloat16",
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    f, params, x, folds = PROGRAMS[name]
    g = ft.fold(f, params)
    close(g(x), jax.jit(f)(params, x), 1e-5)
    close(g(2 * x), jax.jit(f)(params, 2 * x), 1e-5)
    assert len(ft.explain(g, x).rows) == folds


# (affine map of y = x @ w, factor of w, factor of x). Merged into the kernel, most of them would be
# NaN, 0 or infinite where the result is not.
EXTREME = {
    "division by 0": (lambda y, c: y / c(0, 1, 2), 1, 1.0),
    "infinite scale": (lambda y, c: y * c(jnp.inf, 1, 2), 1, 1.0),
    "division by a subnormal": (lambda y, c: y / c(1e-39, 1, 2), 1, 1.0),
    "scales that overflow together": (
        lambda y, c: y * c(1e30, 1, 2) * c(1e30, 1, 1) * c(1e-30, 1, 1),
        1,
        1.0,
    ),
    "scales that underflow together": (lambda y, c: y * c(1e-20, 1, 1) * c(1e-20, 1, 2), 1, 1e30),
    "a kernel that underflows": (lambda y, c: y * c(1e-30, 1, 2), 1e-12, 1e30),
    "a kernel that overflows": (lambda y, c: y * c(1e38, 1, 2), 20, 1e-30),
    "shifts that overflow together": (lambda y, c: y + c(3e38, 0, 0) + c(3e38, 0, 0), 1, -1e38),
    "infinite shift": (lambda y, c: 2 * (c(0, 1, 2) - (y + c(-jnp.inf, 0, 1))), 1, 1.0),
    "infinite shift times 0": (lambda y, c: (y + c(jnp.inf, 0, 1)) * c(0, 0, 1), 1, 1.0),
    "NaN": (lambda y, c: y * c(jnp.nan, 1, 1) + c(0, jnp.nan, 1), 1, 1.0),
}


@pytest.mark.parametrize("name", EXTREME)
def test_constants_of_any_size(name):
    change, w_factor, x_factor = EXTREME[name]
    f = lambda p, x: change(x @ p["w"], lambda *values: jnp.asarray(values, jnp.float32)[None])
    signs = jnp.array([1, 1, 1, -0.1])[:, None]
    params = {"w": w_factor * jnp.abs(random(4, 3)) * signs}
    x = jnp.abs(random(5, 4)) * jnp.float32(x_factor)
    for inputs in (x, x.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2].set(0)):
        np.testing.assert_allclose(ft.fold(f, params)(inputs), f(params, inputs), rtol=2e-5, atol=0)


def test_what_a_number_multiplies_is_computed_once():
    """A number in the program is a constant, too, so the kernel 2 * w + 1 is."""
    predict = ft.fold(lambda p, x: x @ (2.0 * p["w"] + 1.0), {"w": jnp.ones((4, 3))})
    text = str(jax.make_jaxpr(predict)(jnp.ones((2, 4))))
    assert "dot_general" in text and "mul" not in text and "add" not in text


@pytest.mark.exhaustive
def test_other_libraries_modules():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.BatchNorm(use_running_average=True)(linen.Conv(6, (3, 3))(x)))
            return linen.Dense(3)(
                linen.BatchNorm(use_running_average=True)(linen.Conv(4, (1, 1))(x)).mean((1, 2))
            )

    x = random(2, 8, 8, 3)
    with jax.numpy_rank_promotion("allow"):
        variables = varied(Block().init(jax.random.key(0), x))
        predict = ft.fold(Block().apply, variables)
        close(predict(x), Block().apply(variables, x), 1e-5)
        assert len(ft.explain(predict, x).rows) == 2


def test_derivatives_and_batching():
    model, x = nn.Sequential(nn.Conv(4, 3), nn.BatchNorm(), jax.nn.relu), random(3, 6, 6, 2)
    params, state = map(varied, model.init(jax.random.key(0), x))
    predict = ft.fold(model, params, state)
    plain = lambda x: model(params, x, state=state)[0]
    close(
        jax.grad(lambda x: jnp.square(predict(x)).sum())(x),
        jax.grad(lambda x: jnp.square(plain(x)).sum())(x),
        1e-5,
    )
    close(jax.vmap(lambda row: predict(row[None])[0])(x), plain(x), 1e-5)
    close(ft.tune(predict)(x), plain(x), 1e-5)


@pytest.mark.exhaustive
def test_arguments_that_are_no_arrays():
    def f(params, x, activation, *, scale=1.0, name="relu"):
        return activation((x @ params["w"]) * params["s"][None]) * scale if name == "relu" else x

    params, x = {"w": random(4, 6), "s": S}, random(5, 4)
    g = ft.fold(f, params)
    for options in ({}, {"scale": 2.0}, {"scale": 3.0}, {"name": "none"}):
        close(g(x, jnp.tanh, **options), f(params, x, jnp.tanh, **options), 1e-5)
    close(g(x, jnp.sin), f(params, x, jnp.sin), 1e-5)


@pytest.mark.exhaustive
def test_float64():
    with jax.enable_x64(True):
        f, params = PROGRAMS["dense, scale and shift"][:2]
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        x = random(5, 4, dtype=jnp.float64)
        close(ft.fold(f, params)(x), f(params, x), 1e-14)


def test_errors():
    with pytest.raises(TypeError, match=r"fold\(f, params\): expected a function, got a dict"):
        ft.fold({}, {})
    with pytest.raises(
        TypeError,
        match=r"expected fixed parameters, but \['w'\] is traced; call fold outside of jit",
    ):
        jax.jit(lambda w: ft.fold(lambda p, x: x @ p["w"], {"w": w})(jnp.ones((2, 3))))(
            jnp.ones((3, 3))
        )


def test_equations_without_results_stay():
    seen = []

    def f(params, x):
        y = x @ params
        jax.debug.callback(seen.append, y)
        return y + 1.0

    params, x = random(4, 6), random(5, 4)
    close(ft.fold(f, params)(x), x @ params + 1.0, 1e-5)
    jax.effects_barrier()
    assert len(seen) == 1
