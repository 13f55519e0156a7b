"""With jax_custom_vjp3 and its siblings, JAX traces a construct to one opaque primitive. The values,
the derivatives, the rules and the counts of a program are those without the switches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax
from jax.experimental import hijax

from fnet import _jax, compress, cost
from fnet import layers as nn
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


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "checkpoint", "scan", "nested"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_and_gradients_are_those_without_the_switch(switched, name, transform):
    apply = TRANSFORMS[transform]
    inside = lambda: jax.value_and_grad(apply(programs()[name]), (0, 1))(W, X)
    around = lambda: apply(jax.value_and_grad(programs()[name], (0, 1)))(W, X)
    if transform == "autocast" and jax.config.jax_remat3 and not HiPrim:
        # jax 0.10 decorates with a custom_vjp here, which adds the rounded cotangents in another
        # order: as near to float32 as without the switch, but not the same bits.
        exact = switched(lambda: jax.value_and_grad(programs()[name], (0, 1))(W, X))
        leaves = map(jax.tree.leaves, (inside(), switched(inside), exact))
        for got, classic, want in zip(*leaves):
            assert np.abs(got - want).max() <= 1.5 * np.abs(classic - want).max()
    else:
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


class Quiet(Scaled):
    """Its second output has no tangent, whatever its cotangent."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), (x, x), {}
        HiPrim.__init__(self)

    def expand(self, x):
        return jnp.sin(x), jnp.cos(x)

    def vjp_fwd(self, nonzero, x):
        return self(x), x, (True, False)

    def vjp_bwd_retval(self, x, cotangents):
        first, second = cotangents
        wrong = 0 if isinstance(second, hijax.Zero) else 10 * second
        return (first * jnp.cos(x) - wrong,)


class Transposed(Scaled):
    """Linear, with a transpose rule that is not that of what it computes."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x,), x, {}
        HiPrim.__init__(self)

    def expand(self, x):
        return 3.0 * x

    def jvp(self, primals, tangents):
        return self(*primals), self(hijax.instantiate_zeros(tangents[0]))

    def transpose(self, cotangent, accumulator):
        accumulator.accum(50.0 * hijax.instantiate_zeros(cotangent))

    if HiPrim:
        lin, linearized = hijax.linearize_from_jvp
        vjp_fwd, vjp_bwd_retval = hijax.vjp_from_lin


@newer
@pytest.mark.parametrize("kind", [Quiet, Transposed])
def test_what_a_class_says_about_its_derivative_holds(kind):
    def f(x):
        outputs = kind(jax.typeof(x))(x)
        return (outputs[0] * outputs[1] if kind is Quiet else jnp.tanh(outputs)).sum()

    x = jnp.asarray(X)
    close(jax.grad(ft.rewrite(f, no_rule))(x), jax.grad(f)(x))
    close(ft.rewrite(jax.grad(f), no_rule)(x), jax.grad(f)(x))
    close(jax.grad(ft.tune(f))(x), jax.grad(f)(x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functions_of_jax_that_are_hiprims_keep_all_their_derivatives(transform):
    apply, x = TRANSFORMS[transform], jnp.asarray(X[0])
    points, values = jnp.linspace(-2.0, 2.0, 9), jnp.linspace(0.0, 1.0, 9) ** 2
    interpolated = lambda x: (jnp.interp(x, points, values) ** 2).sum()
    close(jax.hessian(apply(interpolated))(x), jax.hessian(interpolated)(x))
    found = lambda x: x * jnp.searchsorted(points, x).astype(x.dtype)
    close(jax.jacfwd(apply(found))(x), jax.jacfwd(found)(x))
    shifted = lambda x: jnp.ldexp(x, 2).sum()
    close(jax.grad(apply(shifted))(x), jax.grad(shifted)(x))

    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("i")
    local = jax.shard_map(
        lambda x: x * jnp.searchsorted(jnp.sort(x), 1.1 * x).astype(x.dtype),
        mesh=mesh,
        in_specs=split,
        out_specs=split,
    )
    close(apply(local)(x), local(x))


@pytest.mark.quick_cases(1)
def test_scans_of_the_transforms_themselves_have_gradients(switched):
    layer = nn.Sequential(h=nn.Dense(8))

    def loss(w, x):
        params = {"h": {"kernel": w, "bias": jnp.zeros(8)}}
        block = lambda c, _: (jax.nn.silu(layer(params, c)), None)
        h, _ = lax.scan(block, jnp.asarray(x), None, length=2)
        return (h**2).mean()

    step = lambda: jax.value_and_grad(loss)
    for f in (
        lambda: ft.tune(step())(W, X),
        lambda: ft.capture(step(), "h")(W, X),
        lambda: jax.grad(ft.microbatch(lambda w, x: loss(w, x), 2))(W, X),
    ):
        close(f(), switched(f))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["shrink", "use_implicit_arrays"])
def test_evaluated_programs_are_those_without_the_switch(switched, name):
    """JAX has no gradient of a scan with jax_scan3, and jit removes it if only its carry is used."""

    def f(params, x):
        step = lambda h, _: (jnp.tanh(h @ params["v"] @ params["w"]), None)
        return lax.scan(step, x, length=3)[0]

    params = {"v": W, "w": W.T}
    if name == "shrink":
        smaller = compress.shrink(f, params, X, fraction=0.5)
        g, params = smaller.f, smaller.params
    else:
        g, params = ft.use_implicit_arrays(f), compress.quantize(params, {".*": compress.Int8()})
    gradient = lambda: jax.jit(jax.value_and_grad(lambda x: g(params, x).sum()))(X)
    same(gradient(), switched(gradient))


@pytest.mark.skipif(
    not hasattr(jax.custom_vjp, "defremat"), reason="jax.custom_vjp.defremat is newer"
)
def test_what_exists_only_with_a_switch_is_traced_with_it():
    before = jax.config.jax_custom_vjp3
    jax.config.update("jax_custom_vjp3", True)
    try:
        only = jax.custom_vjp(jnp.sin)
        only.defremat(
            lambda x: (jnp.sin(x), x),
            lambda saved, x: (jnp.sin(x), x),
            lambda x, c: (2.0 * c * jnp.cos(x),),
        )
        outer = jax.custom_vjp(lambda x: 2 * only(x))
        outer.defvjp(lambda x: (2 * only(x), only(x)), lambda saved, c: (c * saved,))
        for f in (only, outer):
            total = lambda x, f=f: f(x).sum()
            close(jax.grad(ft.rewrite(total, no_rule))(X), jax.grad(total)(X))
    finally:
        jax.config.update("jax_custom_vjp3", before)


def test_an_error_of_the_function_is_raised_once(switched):
    calls = []

    def f(x):
        calls.append(x)
        raise NotImplementedError("not on Sundays, not even with jax_custom_vjp3")

    with pytest.raises(NotImplementedError, match="not on Sundays") as raised:
        ft.rewrite(f, no_rule)(X)
    assert len(calls) == 1 and raised.value.__context__ is None
