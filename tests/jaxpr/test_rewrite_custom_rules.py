"""rewrite and custom derivatives: what a user's rule is told, what its traces leave behind, and
what results are."""

import functools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import checking_leaks, close, same, sampled
from jax import lax

from fnet import transforms as ft

IDENTITY = lambda *_: NotImplemented
X = jnp.arange(1.0, 4.0)


def product(seen):
    """x * y * i with a rule that notes which inputs are differentiated and which cotangents are
    zeros."""

    @jax.custom_vjp
    def f(x, y, i):
        return x * y * i, x + y

    def forward(x, y, i):
        seen.append((x.perturbed, y.perturbed, i.perturbed))
        return (x.value * y.value * i.value, x.value + y.value), (x.value, y.value, i.value)

    def backward(residuals, cotangents):
        x, y, i = residuals
        seen.append(tuple(isinstance(c, jax.custom_derivatives.SymbolicZero) for c in cotangents))
        g, h = (
            jnp.zeros(()) if isinstance(c, jax.custom_derivatives.SymbolicZero) else c
            for c in cotangents
        )
        return g * y * i + h, g * x * i + h, None

    f.defvjp(forward, backward, symbolic_zeros=True)
    return f


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("argnums", "output"), [(0, 0), (1, 0), ((0, 1), 0), (0, 1), ((0, 1), 1)])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"]
)
def test_a_rule_with_symbolic_zeros_learns_what_is_differentiated(argnums, output, wrap):
    seen, plain = [], []
    of = lambda seen: lambda x, y: product(seen)(x, y, 3)[output]
    got = jax.grad(ft.rewrite(wrap(of(seen)), IDENTITY), argnums)(2.0, 5.0)
    same(got, jax.grad(wrap(of(plain)), argnums)(2.0, 5.0))
    assert set(seen) == set(plain)


@jax.custom_jvp
def scaled(x, y, i):
    return x * y * i


@functools.partial(scaled.defjvp, symbolic_zeros=True)
def _(primals, tangents):  # the tangent shows which inputs have one
    (x, y, i), (dx, dy, _) = primals, tangents
    zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
    slope = (0.0 if zero[0] else dx * y * i) + (0.0 if zero[1] else x * dy * i)
    return scaled(x, y, i), slope * (1.0 + 10 * zero[0] + 100 * zero[1] + 1000 * zero[2])


@pytest.mark.quick_cases("remat-1", "vmap-argnums2")
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: ft.tune(f, "cpu"),
        lambda f: lambda x, y: jax.vmap(f)(x[None], y[None])[0],
    ],
    ids=["plain", "jit", "remat", "tune", "vmap"],
)
def test_a_jvp_with_symbolic_zeros_learns_which_tangents_are_zero(argnums, wrap):
    f, at = wrap(lambda x, y: scaled(x, y, 3)), (jnp.float32(2), jnp.float32(5))
    same(
        jax.grad(ft.rewrite(f, IDENTITY), argnums)(*at),
        jax.grad(wrap(lambda x, y: scaled(x, y, 3)), argnums)(*at),
    )
    same(
        jax.jvp(ft.rewrite(lambda x: f(x, at[1]), IDENTITY), at[:1], at[:1]),
        jax.jvp(lambda x: scaled(x, at[1], 3), at[:1], at[:1]),
    )


@pytest.mark.exhaustive
def test_a_rule_with_symbolic_zeros_under_vmap_and_scan():
    f = lambda x: lax.scan(lambda c, s: (product([])(c, s, 2)[0], c), 1.0, x)[0]
    g = ft.rewrite(f, IDENTITY)
    close(jax.vmap(jax.grad(g))(jnp.ones((2, 3))), jax.vmap(jax.grad(f))(jnp.ones((2, 3))))


LOOPED = {
    "rewrite": lambda f: ft.rewrite(f, IDENTITY),
    "tune": lambda f: ft.tune(f, "cpu"),
    "autocast": lambda f: ft.autocast(f, "bfloat16", rules={"": "float32"}),
}


@pytest.mark.parametrize("name", sampled(LOOPED, ["tune"]))
def test_a_checkpointed_while_loop(name):
    transform = LOOPED[name]

    def f(x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) * jnp.float32(1.1))
        return eqxi.while_loop(
            lambda c: c[0] < 5, step, (jnp.int32(0), x), max_steps=8, kind="checkpointed"
        )[1].sum()

    close(jax.grad(transform(f))(X), jax.grad(f)(X))
    close(transform(jax.grad(f))(X), jax.grad(f)(X))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sampled(["relu", "custom_vjp", "softmax"], ["custom_vjp"]))
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: ft.rewrite(f, IDENTITY),
        lambda f: ft.autocast(f, "bfloat16"),
        lambda f: ft.tune(f, "cpu"),
    ],
    ids=["rewrite", "autocast", "tune"],
)
def test_no_tracers_leak(name, transform):
    square = jax.custom_vjp(lambda x: x * x)
    square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))
    g = {"relu": jax.nn.relu, "custom_vjp": square, "softmax": jax.nn.softmax}[name]
    f = lambda x: lax.scan(lambda c, t: (g(c) * t, c), x, jnp.arange(1.0, 4.0))[0].sum()
    with checking_leaks():
        got = (
            jax.jit(jax.grad(transform(f)))(X),
            jax.vmap(transform(f))(X[None]),
            transform(jax.grad(f))(X),
        )
    for a, b in zip(got, (jax.grad(f)(X), f(X)[None], jax.grad(f)(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2)


def test_results_that_are_no_arrays_stay_what_they_are():
    def f(x):
        return {
            "int": 3,
            "float": 2.5,
            "bool": True,
            "name": "big",
            "call": jnp.sin,
            "numpy": np.arange(2),
            "none": None,
            "shape": x.shape,
            "same": x,
            "twice": (x, x),
            "constant": jnp.ones(2),
        }

    got, want = ft.rewrite(f, IDENTITY)(X), f(X)
    assert got.keys() == want.keys()
    for name in want:
        assert type(got[name]) is type(want[name]), name
    for name in ("int", "float", "bool", "name", "call", "none", "shape"):
        assert got[name] == want[name] and type(got[name]) is type(want[name])
    same((got["same"], got["twice"], got["numpy"]), (want["same"], want["twice"], want["numpy"]))
    assert (
        ft.rewrite(lambda: 3, IDENTITY)() == 3
        and type(ft.rewrite(lambda x: x.ndim, IDENTITY)(X)) is int
    )
    assert jax.grad(ft.rewrite(lambda x: (x.sum(), 7), IDENTITY), has_aux=True)(X)[1] == 7
