"""`shrink` on small programs: which axes it cuts, values and derivatives, and the reasons for those
that it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import compress

DRAW = np.random.default_rng(0)
H = 8
X = DRAW.normal(size=(4, 6)).astype(np.float32)
IMAGES = DRAW.normal(size=(2, 6, 6, 3)).astype(np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")


def draw(**shapes):
    return {
        name: jnp.asarray(DRAW.normal(size=shape), jnp.float32) for name, shape in shapes.items()
    }


def checkpointed(p, x):
    return jax.jit(jax.checkpoint(lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"]))(p, x)


def called_twice(p, x):
    """One jaxpr, at two sizes."""
    dense = jax.jit(lambda w, x: jax.nn.silu(x @ w))
    return dense(p["b"], dense(p["a"], x)) @ p["c"]


def branches(p, x):
    hidden = x @ p["a"]
    return lax.cond(x.sum() > 0, lambda h: jnp.tanh(h) @ p["b"], lambda h: h @ p["c"], hidden)


def recurrent(p, x):
    def step(h, row):
        h = jnp.tanh(row @ p["a"] + h @ p["h"])
        return h, h @ p["b"]

    return lax.scan(step, jnp.zeros(p["a"].shape[1]), x)[1]


def heads(p, x):
    y = (x @ p["a"]).reshape(2, 2, -1, 4)  # [batch, time, heads, 4]
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", y, y) / 2)
    return jnp.einsum("bhts,bshd->bthd", weights, y).reshape(4, -1) @ p["b"]


def gated(p, x):
    a, b = jnp.split(x @ p["a"], 2, axis=-1)
    return (a * jax.nn.sigmoid(b)) @ p["b"]


def joined(p, x):
    return jnp.concatenate([x @ p["a"], jnp.tanh(x @ p["b"])], -1) @ p["c"]


def looked_up(p, x):
    return jnp.take(p["a"], jnp.array([0, 2, 2]), axis=0) @ p["b"]


def gram(p, x):
    hidden = x @ p["a"]
    return jnp.square(hidden.T @ hidden).sum()


def mapped(p, x):
    return jax.vmap(lambda row: jnp.maximum(row @ p["a"], 0) @ p["b"])(x)


def images(p, x):
    x = lax.conv_general_dilated(x, p["a"], (1, 1), "SAME", dimension_numbers=NHWC)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = lax.conv_transpose(x, p["b"], (2, 2), "SAME", dimension_numbers=NHWC)
    return x.reshape(2, -1) @ p["c"].reshape(-1, 3)


def residual(p, x):
    x = x @ p["a"]
    x = x + jax.nn.gelu(x @ p["b"]) @ p["c"]
    return jnp.pad(x, ((0, 1), (0, 0))) @ p["d"]


# name -> f, parameters, input, shapes at fraction 0.5; f works with parameters of these shapes, too
CASES = {
    f.__name__: (f, params, x, shapes)
    for f, params, x, shapes in [
        (checkpointed, draw(a=(6, H), b=(H, 3)), X, {"a": (6, 4), "b": (4, 3)}),
        (
            called_twice,
            draw(a=(6, H), b=(H, 12), c=(12, 3)),
            X,
            {"a": (6, 4), "b": (4, 6), "c": (6, 3)},
        ),
        (branches, draw(a=(6, H), b=(H, 3), c=(H, 3)), X, {"a": (6, 4), "b": (4, 3), "c": (4, 3)}),
        (recurrent, draw(a=(6, H), h=(H, H), b=(H, 3)), X, {"a": (6, 4), "h": (4, 4), "b": (4, 3)}),
        (heads, draw(a=(6, 16), b=(16, 3)), X, {"a": (6, 8), "b": (8, 3)}),
        (gated, draw(a=(6, 2 * H), b=(H, 3)), X, {"a": (6, H), "b": (4, 3)}),
        (
            joined,
            draw(a=(6, H), b=(6, H), c=(2 * H, 3)),
            X,
            {"a": (6, 4), "b": (6, 4), "c": (H, 3)},
        ),
        (looked_up, draw(a=(5, H), b=(H, 3)), X, {"a": (5, 4), "b": (4, 3)}),
        (gram, draw(a=(6, H)), X, {"a": (6, 4)}),
        (mapped, draw(a=(6, H), b=(H, 3)), X, {"a": (6, 4), "b": (4, 3)}),
        (
            images,
            draw(a=(3, 3, 3, H), b=(3, 3, H, 4), c=(36, 4, 3)),
            IMAGES,
            {"a": (3, 3, 3, 4), "b": (3, 3, 4, 2), "c": (36, 2, 3)},
        ),
        (
            residual,
            draw(a=(6, H), b=(H, 10), c=(10, H), d=(H, 3)),
            X,
            {"a": (6, 4), "b": (4, 5), "c": (5, 4), "d": (4, 3)},
        ),
    ]
}


@pytest.mark.quick_cases(
    "checkpointed", "recurrent", "gated", "joined", "looked_up", "gram", "images", "residual"
)
@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives_are_those_of_the_smaller_program(name):
    f, params, x, shapes = CASES[name]
    shrunk = compress.shrink(f, params, x, fraction=0.5)
    assert jax.tree.map(jnp.shape, shrunk.params) == shapes
    loss = lambda f: jax.jit(jax.value_and_grad(lambda p: jnp.sin(f(p, x)).sum()))(shrunk.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), loss(f), loss(shrunk.f)
    )


def averaged(p, x):
    return jnp.tanh(x @ p["a"]).mean(-1)


def weighted(p, x):
    """By a constant array, and by positions."""
    return (x @ p["a"] * np.arange(1.0, 9, dtype=np.float32)[None] * jnp.arange(8.0)[None]) @ p["b"]


@pytest.mark.parametrize(
    ("f", "params"), [(averaged, draw(a=(6, H))), (weighted, draw(a=(6, H), b=(H, 3)))]
)
def test_the_constants_of_a_program_remain_those_of_the_original(f, params):
    shrunk = compress.shrink(f, params, X, fraction=0.5)
    assert shrunk.params["a"].shape == (6, 4)
    masked = jax.tree.map(lambda x, kept: jnp.where(np.isin(x, kept), x, 0), params, shrunk.params)
    np.testing.assert_allclose(shrunk.f(shrunk.params, X), f(masked, X), rtol=1e-5, atol=1e-5)


@jax.custom_vjp
def custom(x):
    return jnp.tanh(x)


custom.defvjp(lambda x: (custom(x), x), lambda x, t: (t,))
HIDDEN = draw(a=(6, H), b=(H, 3))


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (jax.nn.softmax, "the maximum over it is taken"),
        (
            lambda h: h * jax.nn.sigmoid(h).sum(-1, keepdims=True),
            "summed over where it is not zero",
        ),
        (
            lambda h: (jnp.exp(h)[:, :, None] * h[:, None, :]).sum(1),
            "summed over where it is not zero",
        ),
        (lambda h: lax.fori_loop(0, x_steps(h), lambda i, h: h / 2, h), "a while loop"),
        (custom, "a custom_vjp"),
        (lambda h: jnp.cumsum(h, -1), "accumulated"),
        (lambda h: jnp.sort(h, -1), "sorted"),
        (lambda h: h[:, ::-1], "reversed"),
        (lambda h: jnp.concatenate([h[:, :3], h[:, 3:]], -1), "sliced"),
        (lambda h: h.at[:, 1].set(0), "updated by index"),
        (lambda h: jnp.linalg.qr(h.T)[0].T, r"an operation without a rule \("),
    ],
)
def test_reasons(between, reason):
    with pytest.raises(ValueError, match=rf"no axis can be cut: .*a \(1\): {reason}"):
        compress.shrink(lambda p, x: between(x @ p["a"]) @ p["b"], HIDDEN, X, fraction=0.5)


def x_steps(h):
    return jnp.int32(h.sum())
