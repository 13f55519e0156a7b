"""With jax_custom_vjp3 and its siblings, JAX traces a construct to one opaque primitive. The values,
the derivatives, the rules and the counts of a program are those without the switches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax
from jax.experimental import hijax

from fnet import _jax, cost
from fnet import transforms as ft
from fnet.jaxpr import equations
from fnet.parallel import plan

SWITCHES = [
    name
    for name in ("jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3", "jax_scan3")
    if hasattr(jax.config, name)  # jax 0.10 has no jax_custom_jvp3
]
HiPrim = getattr(hijax, "HiPrim", None)
newer = pytest.mark.skipif(HiPrim is None, reason="jax.experimental.hijax.HiPrim is newer")


@pytest.fixture(params=SWITCHES)
def switched(request):
    """Turns a switch on, and returns a function that evaluates something with all switches off."""
    before = {name: getattr(jax.config, name) for name in SWITCHES}

    def classic(f, *args):
        jax.config.update(request.param, False)
        try:
            return f(*args)
        finally:
            jax.config.update(request.param, True)

    jax.config.update(request.param, True)
    yield classic
    for name, value in before.items():
        jax.config.update(name, value)


X = np.asarray(jax.random.normal(jax.random.key(0), (4, 8)))
W = np.asarray(jax.random.normal(jax.random.key(1), (8, 8))) / 3


def programs():
    """Functions of (w, x) that return a scalar. They are built anew for each test, because
    jax.custom_vjp of jax 0.10 reads the switches when it decorates."""

    @jax.custom_vjp
    def scaled(w, x):
        return jnp.sin(x @ w)

    def backward(saved, c):
        w, x = saved
        return 3.0 * (x.T @ c), 2.0 * (c @ w.T)

    scaled.defvjp(lambda w, x: (scaled(w, x), (w, x)), backward)

    @jax.custom_jvp
    def doubled(w, x):
        return x @ w

    @doubled.defjvp
    def _(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return doubled(w, x), 5.0 * (x @ dw) + 7.0 * (dx @ w)

    def looped(w, x):
        carried, stacked = lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, length=3)
        return carried.sum() + stacked.sum()

    block = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    saved = jax.checkpoint(
        lambda w, x: jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "h")),
        policy=jax.checkpoint_policies.save_only_these_names("h"),
    )
    return {
        "custom_vjp": lambda w, x: scaled(w, x).sum(),
        "custom_jvp": lambda w, x: doubled(w, x).sum() + jax.nn.silu(x @ w).sum(),
        "checkpoint": lambda w, x: (saved(w, block(w, x)) ** 2).sum(),
        "scan": looped,
        "nested": lambda w, x: looped(w, jax.jit(scaled)(w, block(w, x))),
    }


def no_rule(primitive, scope, inputs, equation):
    return NotImplemented


TRANSFORMS = {
    "rewrite": lambda f: ft.rewrite(f, no_rule),
    "tune": ft.tune,
    "autocast": lambda f: ft.autocast(f, "bfloat16"),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "checkpoint", "scan", "nested"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_are_those_without_the_switch(switched, name, transform):
    apply = TRANSFORMS[transform]
    inside = lambda: jax.value_and_grad(apply(programs()[name]), (0, 1))(W, X)
    around = lambda: apply(jax.value_and_grad(programs()[name], (0, 1)))(W, X)
    same(inside(), switched(inside))
    same(around(), switched(around))


@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "checkpoint", "nested"])
def test_autocast_reaches_the_products_inside(switched, name):
    explain = lambda: ft.explain(ft.autocast(programs()[name], "bfloat16"), W, X).rows
    rows = explain()
    assert {row.dtype for row in rows if row.primitive == "dot_general"} == {"bfloat16"}
    assert rows == switched(explain)


def test_counts_and_plans_are_those_without_the_switch(switched):
    step = jax.value_and_grad(programs()["nested"])
    count = lambda: cost.count(jax.value_and_grad(programs()["nested"]), W, X)
    counted, expected = count(), switched(count)
    assert counted.matmuls == expected.matmuls
    if HiPrim:  # jax 0.10 decorates with remat3, whose program has other casts
        assert counted == expected
    closed = _jax.make_jaxpr(step)(W, X)
    assert not {"call_hi_primitive"} & {e.primitive.name for e in equations(closed.jaxpr)}

    def init(key):
        return jnp.asarray(W)

    def train(w, batch):
        loss, gradient = jax.value_and_grad(programs()["nested"])(w, batch["x"])
        return w - 0.1 * gradient, loss

    batch = {"x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
    planned = lambda: str(plan(train, init, batch, devices=jax.devices()[:2], compile=False))
    assert planned() == switched(planned)


class Scaled(HiPrim or object):
    """x @ w, whose tangents are scaled by 2 and 3, so that no other derivative passes."""

    def __init__(self, x, w):
        self.in_avals, self.out_aval = (x, w), jax.typeof(jnp.zeros((x.shape[0], w.shape[1])))
        self.params = {}
        super().__init__()

    def expand(self, x, w):
        return x @ w


class Forward(Scaled):
    def jvp(self, primals, tangents):
        (x, w), (dx, dw) = primals, map(hijax.instantiate_zeros, tangents)
        return self(x, w), 2.0 * (dx @ w) + 3.0 * (x @ dw)

    if HiPrim:
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin


class Linear(Scaled):
    def lin(self, nonzero, x, w):
        return self(x, w), (x, w)

    def linearized(self, saved, dx, dw):
        (x, w), dx, dw = saved, hijax.instantiate_zeros(dx), hijax.instantiate_zeros(dw)
        return 2.0 * (dx @ w) + 3.0 * (x @ dw)

    if HiPrim:
        jvp = hijax.jvp_from_lin
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin


class Backward(Scaled):
    def vjp_fwd(self, nonzero, x, w):
        return self(x, w), (x, w)

    def vjp_bwd_retval(self, saved, c):
        x, w = saved
        return 2.0 * (c @ w.T), 3.0 * (x.T @ c)


class Accumulated(Backward):
    def vjp_bwd(self, saved, c, dx, dw):
        x, w = saved
        dx.accum(2.0 * (c @ w.T))
        dw.accum(3.0 * (x.T @ c))


@newer
@pytest.mark.parametrize("kind", [Forward, Linear, Backward, Accumulated])
def test_a_hiprim_is_opened_and_keeps_its_derivative(kind):
    def f(w, x):
        return jnp.tanh(kind(jax.typeof(x), jax.typeof(w))(x, w)).sum()

    plain = jax.grad(f, (0, 1))(W, X)
    close(jax.grad(ft.rewrite(f, no_rule), (0, 1))(W, X), plain)
    close(ft.rewrite(jax.grad(f, (0, 1)), no_rule)(W, X), plain)
    close(ft.tune(jax.grad(f, (0, 1)))(W, X), plain)
    if kind in (Forward, Linear):
        tangents = (np.ones_like(W), np.ones_like(X))
        close(jax.jvp(ft.rewrite(f, no_rule), (W, X), tangents), jax.jvp(f, (W, X), tangents))
    doubled = lambda primitive, scope, inputs, equation: (
        [2 * jnp.matmul(*inputs)] if primitive == "dot_general" else NotImplemented
    )
    y = X @ W
    close(ft.rewrite(f, doubled)(W, X), jnp.tanh(2 * y).sum())
    assert cost.count(f, W, X).total.matmul == 2 * 4 * 8 * 8
    half = ft.explain(ft.autocast(jax.grad(f), "bfloat16"), W, X).rows
    assert {row.dtype for row in half if row.primitive == "dot_general"} == {"bfloat16"}


def test_the_products_of_a_custom_root_are_reached():
    """lax.custom_root is a HiPrim of jax 0.12 without any switch."""

    def solved(w, x):
        return lax.custom_root(
            lambda z: z + 0.1 * (z @ w) - x,
            jnp.zeros_like(x),
            lambda f, z: lax.fori_loop(0, 30, lambda i, z: z - f(z), z),
            lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y),
        ).sum()

    rows = ft.explain(ft.autocast(solved, "bfloat16"), W, X[0]).rows
    assert {row.dtype for row in rows if row.primitive == "dot_general"} == {"bfloat16"}
    close(jax.grad(ft.tune(solved))(W, X[0]), jax.grad(solved)(W, X[0]))
    assert "root" not in "".join(cost.count(solved, W, X[0]).notes).lower()
