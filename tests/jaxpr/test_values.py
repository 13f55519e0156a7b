"""A scalar constant of the traced function is an array for whoever calls the transformed function,
as under jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress
from fnet import transforms as ft


def constants(x):
    return (
        jnp.asarray(3.0),
        jnp.float32(2),
        jnp.asarray(True),
        jnp.bfloat16(1.5),
        jnp.asarray(2),
        jnp.uint8(3),
        jnp.asarray(1 + 2j),
        x.sum(),
    )


def _quantized(f):
    params = compress.quantize({"kernel": jnp.ones((4, 4))}, {"kernel": compress.Int8()})
    g = ft.use_implicit_arrays(lambda params, x: f(x + 0 * (jnp.ones(4) @ params["kernel"])[:2]))
    return lambda x: g(params, x)


def _shrunk(f):
    params = {"up": jnp.ones((2, 4)), "down": jnp.ones((4, 2))}
    shrunk = compress.shrink(
        lambda p, x: f(x + 0 * (x @ p["up"] @ p["down"])), params, jnp.ones(2), fraction=0.5
    )
    return lambda x: shrunk.f(shrunk.params, x)


TRANSFORMS = {
    "rewrite": lambda f: ft.rewrite(f, lambda *a: NotImplemented),
    "rematerialize": ft.rematerialize,
    "tune": ft.tune,
    "fold": lambda f: ft.fold(lambda params, x: f(x), {}),
    "intervene": lambda f: ft.intervene(f, {}),
    "capture": lambda f: lambda x: ft.capture(lambda x: f(ft.tag(x, "x")), "x")(x)[0],
    "autocast": lambda f: ft.autocast(f, "bfloat16"),
    "use_implicit_arrays": _quantized,
    "shrink": _shrunk,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("traced", (False, True), ids=("eager", "traced"))
def test_constant_results_are_arrays(name, traced):
    x, found = jnp.array([1.0, 2.0]), []
    expected, transformed = jax.jit(constants)(x), TRANSFORMS[name](constants)

    def call(x):
        found[:] = transformed(x)
        return found

    results = jax.jit(call)(x) if traced else call(x)
    assert all(
        isinstance(y, jax.Array) for y in found
    )  # a Python number has no .shape, .at or .sum
    for y, result in zip(expected, results):
        assert (result.dtype, result.weak_type) == (y.dtype, y.weak_type)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(y))


def test_rules_and_captured_constants_are_arrays():
    seen = []
    ft.rewrite(
        lambda x: x * 2.0 + jnp.float32(3),
        lambda name, scope, inputs, eqn: seen.extend(inputs) or NotImplemented,
    )(jnp.ones(2))
    assert len(seen) == 4 and all(isinstance(x, jax.Array) for x in seen)
    captured = ft.capture(lambda x: x * ft.tag(jnp.asarray(2.0), "scale"), "scale")(jnp.ones(2))[1][
        "scale"
    ]
    assert isinstance(captured, jax.Array) and captured == 2
    changed = ft.intervene(
        lambda x: x * ft.tag(jnp.asarray(2.0), "scale"), {"scale": lambda x, index: x.at[()].add(1)}
    )
    np.testing.assert_array_equal(changed(jnp.ones(2)), [3.0, 3.0])


def test_a_constant_loss_is_a_scalar():
    loss, slopes = ft.capture_cotangents(lambda x: (ft.tag(x, "x"), jnp.asarray(2.0))[1], "x")(
        jnp.ones(2)
    )
    assert isinstance(loss, jax.Array) and loss == 2
    np.testing.assert_array_equal(slopes["x"], [0.0, 0.0])
