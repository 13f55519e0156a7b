"""State under every transform: functional state of other libraries, `jax.Ref`s, and effects of callbacks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax
from jax.experimental import io_callback

from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")


def rewrite(f):
    return ft.rewrite(f, lambda *_: NotImplemented)


TRANSFORMS = {
    "rewrite": rewrite, "autocast": lambda f: ft.autocast(f, "bfloat16"), "tune": lambda f: ft.tune(f, "cpu"),
    "rematerialize": ft.rematerialize,
    "all, jitted": lambda f: jax.jit(rewrite(ft.rematerialize(ft.tune(f, "cpu")))),
}
each_transform = pytest.mark.parametrize("transform", TRANSFORMS)


# Functional state: a step takes it and returns it.

def batch(step, features=4):
    return jax.random.normal(jax.random.key(step), (8, features)) + 3


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def equinox():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        dense: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        calls: eqx.nn.StateIndex

        def __init__(self, key):
            self.dense = eqx.nn.Linear(4, 3, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
            self.calls = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

        def __call__(self, x, state):
            y, state = self.norm(self.dense(x), state)
            return y, state.set(self.calls, state.get(self.calls) + 1)

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, state, x):
        run = jax.vmap(eqx.combine(params, static), in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        y, state = run(x, state)
        return jnp.square(y - 1).mean(), state

    def step(carried, x):
        params, state = carried
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x)
        return (sgd(params, grads), state), value

    return step, (params, state), lambda carried: carried[1].get(model.calls)


def haiku():
    hk = pytest.importorskip("haiku")

    def net(x):
        y = hk.BatchNorm(True, True, 0.9)(hk.Linear(3, with_bias=False)(x), is_training=True)
        return hk.dropout(hk.next_rng_key(), 0.5, y)

    net = hk.transform_with_state(net)
    params, state = net.init(jax.random.key(0), batch(0))

    def loss(params, state, key, x):
        y, state = net.apply(params, state, key, x)
        return jnp.square(y - 1).mean(), state

    def step(carried, x):
        params, state, key = carried
        key, now = jax.random.split(key)
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, now, x)
        return (sgd(params, grads), state, key), value

    def calls(carried):
        return carried[1]["batch_norm/~/mean_ema"]["counter"]

    return step, (params, state, jax.random.key(1)), calls


def flax():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            calls = self.variable("batch_stats", "calls", lambda: jnp.zeros((), jnp.int32))
            calls.value += 1
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3, use_bias=False)(x))
            return linen.Dropout(0.5, deterministic=False)(x)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = Net().init(keys, batch(0))
    variables["batch_stats"]["calls"] = jnp.zeros((), jnp.int32)    # init has called it once

    def loss(params, stats, key, x):
        y, stats = Net().apply({"params": params, **stats}, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.square(y - 1).mean(), stats

    def step(carried, x):
        params, stats, key = carried
        key, now = jax.random.split(key)
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, now, x)
        return (sgd(params, grads), stats, key), value

    stats = {"batch_stats": variables["batch_stats"]}
    return step, (variables["params"], stats, keys["dropout"]), lambda carried: carried[1]["batch_stats"]["calls"]


def trained(step, carried, steps=3):
    values = []
    for i in range(steps):
        carried, value = step(carried, batch(i))
        values.append(value)
    return carried, values


def data(tree):
    """Random keys, and what is a Python number without jit, as arrays."""
    key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if key(x) else x, jax.tree.map(jnp.asarray, tree))


@pytest.mark.parametrize("library", [equinox, haiku, flax])
@each_transform
def test_a_step_carries_its_state(library, transform):
    with jax.numpy_dtype_promotion("standard"):    # Haiku's dropout needs it
        step, carried, calls = library()
        want, got = trained(jax.jit(step), carried), trained(TRANSFORMS[transform](step), carried)
    assert calls(got[0]) == 3 and jax.tree.structure(got[0]) == jax.tree.structure(carried)
    close(data(got), data(want), 3e-2 if transform == "autocast" else 1e-5)


def test_microbatch_averages_statistics_and_adds_up_counts():
    step, (params, stats, key), _ = flax()

    def statistics(stats, x):
        return step((params, stats, key), x)[0][1]["batch_stats"]

    for i in range(2):
        want, got = statistics(stats, batch(i)), ft.microbatch(statistics, 2)(stats, batch(i))
        close(got["BatchNorm_0"]["mean"], want["BatchNorm_0"]["mean"])
        assert (got["calls"], want["calls"]) == (2, 1)


# jax.Ref: as an argument `r`, closed over `c`, and created inside.

def at_the_top(c, r, x):
    r[...] = r[...] + x
    c[1:] += 2 * r[1:]
    jax.ref.addupdate(c, (slice(None),), x)
    return jnp.sin(x) * r[...]


def created(c, r, x):
    s = jax.new_ref(x)
    s[...] *= c[...] + 1
    s[0] = 9.0
    return s[...] * 2, jax.freeze(jax.new_ref(x))


def in_a_product(c, r, x):
    r[...] += jnp.ones((4, 4)) @ x
    return r[...] @ x


def in_a_scan(c, r, x):
    def body(total, y):
        c[...] += y * r[...]
        r[0] = total
        s = jax.new_ref(total)
        s[...] += y
        return s[...], c[1]
    return lax.scan(body, 0.0, x)


def in_a_while(c, r, x):
    def body(carried):
        i, y = carried
        r[...] += y
        c[i] = y[0]
        return i + 1, y * 2
    return lax.while_loop(lambda carried: carried[0] < 3, body, (0, x))[1]


def in_a_branch(c, r, x):
    def changes(x):
        r[...] += x
        return x + c[...]
    return lax.cond(x.sum() > 15, changes, lambda x: 2 * x, x)


def in_a_jit(c, r, x):
    @jax.jit
    def double(r, x):
        r[...] += x
        c[0] += 1
        return 2 * x
    return double(r, x) + double(r, 2 * x)


def in_remat(c, r, x):
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jnp.sin(x) * r[...])
    r[...] += x
    return layer(x)


def in_vmap(c, r, x):
    def one(r, y):
        r[...] += y
        return r[...] * y
    return jax.vmap(one)(r, x)


def in_a_gradient(c, r, x):
    def loss(w):
        def body(h, y):
            h = jnp.sin(jnp.sin(h * w) + y)
            c[0] += lax.stop_gradient(h)
            return h, h * h
        return lax.scan(body, 1.0, x)[1].sum()
    return jax.value_and_grad(loss)(2.0)


def in_a_gradient_of_what_is_created(c, r, x):
    def loss(x):
        s = jax.new_ref(x)
        s[...] = jnp.sin(s[...])
        return (s[...] ** 2).sum()
    return jax.grad(loss)(x)


def in_a_backward_pass(c, r, x):
    @jax.custom_vjp
    def tap(x, r):
        return x

    def backward(r, g):
        r[...] = g
        return g, None

    tap.defvjp(lambda x, r: (x, r), backward)
    return jax.grad(lambda x: jnp.sin(tap(x * x, r)).sum())(x)


REFS = [at_the_top, created, in_a_product, in_a_scan, in_a_while, in_a_branch, in_a_jit, in_remat, in_vmap,
        in_a_gradient, in_a_gradient_of_what_is_created, in_a_backward_pass]
X = jnp.arange(1.0, 5.0)


def twice(f, transform):
    """The results and contents of both Refs after two calls."""
    c, r = jax.new_ref(jnp.ones(4)), jax.new_ref(jnp.zeros(4))
    run = transform(lambda r, x: f(c, r, x))
    return [[run(r, x), jnp.copy(r[...]), jnp.copy(c[...])] for x in (X, 2 * X)]


@pytest.mark.parametrize("f", REFS)
@each_transform
def test_refs_change_as_without_a_transform(f, transform):
    close(twice(f, TRANSFORMS[transform]), twice(f, lambda f: f), 1e-2 if transform == "autocast" else 1e-5)


def test_a_rule_may_write_to_a_ref():
    for wrap in (lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: lax.cond(x > 0, f, f, x),
                 lambda f: lambda x: lax.fori_loop(0, 1, lambda i, y: f(y), x)):
        count = jax.new_ref(jnp.int32(0))

        def rule(primitive, scope, inputs, equation, count=count):
            if primitive == "sin":
                count[...] += 1
            return NotImplemented

        g = ft.rewrite(wrap(jnp.sin), rule)
        same([g(0.5), jax.jit(g)(1.5)], [jnp.sin(0.5), jnp.sin(1.5)])
        assert count[...] == 2


def test_microbatch_updates_a_ref_for_each_slice():
    for outer in (lambda f: f, jax.jit):
        total, count = jax.new_ref(jnp.float32(0)), jax.new_ref(jnp.int32(0))

        def f(scale, seen, x, count=count):
            seen[...] += x.sum()
            count[...] += 1
            return (scale * x).mean()

        step = outer(ft.microbatch(f, 2, argnums=2))
        same([step(2.0, total, X), step(2.0, total, 3 * X)], [jnp.float32(5), jnp.float32(15)])
        assert (total[...], count[...]) == (40, 4)


def test_a_weighted_microbatch_closes_over_a_ref():
    def f(x):
        seen = jax.new_ref(jnp.float32(0))

        def ratio(scale, x):
            seen[...] += x.sum()
            return (scale * x * x).sum() / x.sum()

        return ft.microbatch(ratio, 2, weight=lambda scale, x: x.sum())(2.0, x), seen[...]

    close(jax.jit(f)(X), f(X))
    close(f(X), (2 * (X * X).sum() / 10, jnp.float32(10)))
    close(jax.grad(lambda x: f(x)[0])(X), jax.grad(lambda x: 2 * (x * x).sum() / x.sum())(X))


def test_recomputation_beside_a_ref_of_the_backward_pass():
    @jax.custom_vjp
    def wave(x):
        return jnp.sin(x)

    def backward(x, g):
        total = jax.new_ref(g)
        slope = jnp.cos(x)    # of a value that is computed again
        total[...] *= slope
        return (total[...],)

    wave.defvjp(lambda x: (jnp.sin(x), x), backward)

    def loss(w):
        h = jnp.ones((8, 8))
        for _ in range(8):
            h = wave(jnp.exp(-jnp.square(jnp.tanh(h @ w))))
        return h.sum()

    w, step = jnp.full((8, 8), 0.1), ft.rematerialize(jax.grad(loss))
    assert "optimization_barrier" in str(jax.make_jaxpr(step)(w))
    close(step(w), jax.grad(loss)(w))


def returned(r, x):
    r[...] += x
    return r, x


ERRORS = {
    "an argument is returned": (returned, lambda r: (r, X), "mutable array references cannot be returned"),
    "a new one is returned": (lambda r, x: jax.new_ref(x), lambda r: (r, X), "mutable array references cannot be re"),
    "one is passed twice": (lambda r, s, x: r[...] + s[...], lambda r: (r, r, X),
                            "only one reference to a mutable array may be passed"),
}


@pytest.mark.parametrize("name", ERRORS)
@each_transform
def test_misuse_of_refs_is_jaxs_error_at_the_users_function(name, transform):
    f, arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as error:
        TRANSFORMS[transform](f)(*arguments(jax.new_ref(jnp.zeros(4))))
    assert f"{f.__name__} at {__file__}" in str(error.value)


def test_microbatch_refuses_a_ref_as_batch_and_effects_of_weights():
    message = ("microbatch: argument 1['x'] is a jax.Ref, which has no slices; expected arrays. Pass "
               "ref[...], or exclude this argument from argnums=")
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        ft.microbatch(lambda p, d: p * d["x"][...].sum(), 2)(1.0, {"x": jax.new_ref(X)})

    def weight(p, x):
        jax.debug.callback(lambda x: None, x)
        return x.sum()

    message = ("microbatch: weight= must not have side effects, since it is evaluated twice for each slice; got "
               "DebugEffect. Move callbacks and uses of a jax.Ref into the function itself")
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        ft.microbatch(lambda p, x: p * x.mean(), 2, weight=weight)(1.0, X)


# Callbacks.

LOGS = [], []    # one for each effect: JAX orders callbacks of the same effect only


def ordered(x):
    jax.debug.callback(lambda x: LOGS[0].append(float(x)), x, ordered=True)


def answered(x):
    def answer(x):
        LOGS[1].append(float(x))
        return np.float32(len(LOGS[1]))
    return io_callback(answer, jax.ShapeDtypeStruct((), "float32"), x, ordered=True)


def straight(x):
    ordered(x.sum())
    jax.jit(ordered)(2 * x.sum())    # without a result
    return answered(3 * x.sum()) + answered(x[0])


def loops(x):
    def body(total, y):
        total = lax.cond(y > 2, lambda t: t + answered(t), lambda t: t + y, total)
        return jax.jit(lambda t: (ordered(-t), t)[1])(total), total

    def test(carried):
        ordered(carried[0])
        return carried[0] < 3

    return lax.scan(body, 0.0, x), lax.while_loop(test, lambda c: (c[0] + 1, c[1] + answered(c[1])), (0.0, x[0]))


def told(x):
    """sin(x), of an equation that both calls back and has results."""
    return lax.cond(x.sum() > -100, lambda x: (ordered(x.sum()), jnp.sin(x))[1], jnp.cos, x)


def gradient_of_a_scan(x):
    def loss(w):
        def body(h, y):
            d = told(jnp.tanh(h @ w))
            return h + jnp.exp(-jnp.sin(d) * jnp.cos(d)) * y, None
        return lax.scan(body, jnp.ones((4, 4)), x)[0].sum()
    return jax.grad(loss)(jnp.eye(4))


def gradient_of_straight_code(x):
    def loss(w):
        h = jnp.ones((4, 4)) * x[:, None]
        for i in range(8):
            h = jnp.tanh(jnp.sin(jnp.exp(-jnp.square(h @ w))))
            if i % 4 == 3:
                h = told(h)
                changed = jax.new_ref(h)
                changed[0] = jnp.sin(h[1])
                h = jax.freeze(changed)
        return h.sum()
    return jax.grad(loss)(jnp.eye(4))


def gradient_of_remat(x):
    @jax.checkpoint
    def layer(x):
        ordered(x.sum())
        return jnp.sin(jnp.sin(x))
    return jax.grad(lambda x: layer(x).sum())(x)


def custom_rules(x):
    @jax.custom_jvp
    def tangent(x):
        ordered(x)
        return jnp.sin(x)

    @tangent.defjvp
    def _(primals, tangents):
        ordered(2 * primals[0])
        return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]

    @jax.custom_vjp
    def cotangent(x):
        ordered(x)
        return jnp.sin(x)

    def backward(x, g):
        ordered(4 * x)
        return (g * jnp.cos(x),)

    cotangent.defvjp(lambda x: (ordered(3 * x), (jnp.sin(x), x))[1], backward)
    both = lambda x: cotangent(tangent(x))
    return both(x[0]), jax.grad(both)(x[1])


EFFECTS = [straight, loops, gradient_of_a_scan, gradient_of_straight_code, gradient_of_remat, custom_rules]


def logged(f):
    for log in LOGS:
        log.clear()
    jax.block_until_ready([f(X), f(2 * X)])
    jax.effects_barrier()
    return [list(log) for log in LOGS]


@pytest.mark.parametrize("f", EFFECTS)
@each_transform
def test_callbacks_happen_as_often_and_in_the_same_order(f, transform):
    want = logged(f)
    assert len(want[0]) >= 4
    if transform == "rematerialize" and f is gradient_of_straight_code:
        assert "rematted_computation" in str(jax.jit(TRANSFORMS[transform](f)).lower(X).as_text(debug_info=True))
    for log, expected in zip(logged(TRANSFORMS[transform](f)), want, strict=True):
        np.testing.assert_allclose(log, expected, 5e-2 if transform == "autocast" else 1e-5, strict=True)
