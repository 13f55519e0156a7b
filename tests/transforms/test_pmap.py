"""pmap beside jax.pmap, what JAX's lacks, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same
from jax import lax

from fnet import transforms as ft

N = 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 2)), jnp.float32)


def loss(w, x):
    return lax.pmean(jnp.square(jnp.tanh(x @ w)).mean(), "i")


# name -> (function, options of pmap, arguments)
CASES = {
    "elementwise": (jnp.sin, {}, (X,)),
    "psum": (lambda x: lax.psum(x, "i"), {}, (X,)),
    "index": (lambda x: x + lax.axis_index("i").astype(jnp.float32), {}, (X,)),
    "whole argument": (lambda w, x: x @ w, dict(in_axes=(None, 0)), (W, X)),
    "other axes": (lambda x, y: x + y.T, dict(in_axes=(1, 2), out_axes=1), (X.swapaxes(0, 1), X.transpose(2, 1, 0))),
    "trees": (lambda t, s: {"a": t["x"] * s, "b": (t["y"], t["x"].sum())},
              dict(in_axes=({"x": 0, "y": None}, None), out_axes={"a": 1, "b": 0}), ({"x": X, "y": W}, jnp.float32(2))),
    "grad": (jax.grad(lambda w, x: jnp.square(x @ w).mean()), dict(in_axes=(None, 0)), (W, X)),
    "grad of pmean": (jax.grad(loss), dict(in_axes=(None, 0)), (W, X)),
    "vmap inside": (jax.vmap(lambda x: lax.all_gather(x.sum(), "i")), {}, (X,)),
    "keys": (lambda key: jax.random.normal(key, (2,)), {}, (jax.random.split(jax.random.key(0), N),)),
    "groups": (lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]), {}, (X,)),
    "constant result": (lambda x: 3.0, {}, (X,)),
    "static": (lambda x, n: x ** n, dict(static=1), (X, 2)),
    "static first": (lambda n, x: x ** n, dict(static=0, in_axes=(None, 0)), (2, X)),
}


@pytest.mark.parametrize("name", CASES)
def test_is_jax_pmap(name):
    f, options, args = CASES[name]
    options = dict(options)
    static = options.pop("static", ())
    want = jax.pmap(f, axis_name="i", static_broadcasted_argnums=static, **options)(*args)
    mapped = ft.pmap(f, "i", static_argnums=static, **options)
    got = mapped(*args)
    same(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    if static == ():
        same(jax.jit(mapped)(*args), want)


def test_negative_axes():
    same(ft.pmap(lambda x: x[None] * 2, in_axes=-1, out_axes=-1)(X.transpose(1, 2, 0)), 2 * X.transpose(1, 2, 0)[None])


def test_keyword_arguments_are_spread():
    same(ft.pmap(lambda x, *, y: x + y)(X, y=X), 2 * X)


def test_a_replicated_result_stands_once():
    f = lambda w, x: w - lax.pmean(jax.grad(lambda w: jnp.square(x @ w).mean())(w), "devices")
    got = ft.pmap(f, in_axes=(None, 0), out_axes=None)(W, X)
    close(got, W - jax.grad(lambda w: jnp.square(X @ w).mean())(W), 1e-6)
    assert got.sharding.is_fully_replicated and len(got.sharding.device_set) == N
    mixed = ft.pmap(lambda x: (x, lax.psum(x, "devices")), out_axes=(0, None))(X)
    close(mixed, (X, X.sum(0)), 1e-6)


def test_a_training_loop_where_nothing_moves():
    @functools.partial(ft.pmap, in_axes=(None, 0), out_axes=(None, None), donate_argnums=0)
    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.square(x @ w).mean())(w)
        return w - 0.1 * lax.pmean(grad, "devices"), lax.pmean(value, "devices")

    w, batch = W, ft.shard(np.asarray(X).reshape(-1, 4))
    expected = W
    for _ in range(3):
        given = w
        w, value = step(w, batch)
        want, grad = jax.value_and_grad(lambda w: jnp.square(X @ w).mean())(expected)
        expected = expected - 0.1 * grad
        close(value, want, 1e-5)
        assert given is W or given.is_deleted()
    close(w, expected, 1e-5)
    assert not W.is_deleted()    # one device's copy of it shared its memory, had it been put there without a copy


def test_donation():
    step = ft.pmap(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(X, jax.tree.leaves(step(X))[0].sharding)
    y = step(x)
    assert x.is_deleted() and not y.is_deleted()


def test_arrays_that_were_put_elsewhere():
    third = jax.devices()[3]
    got = ft.pmap(lambda w, x, *, b: x @ w + b[None], in_axes=(None, 0))(
        jax.device_put(W, third), X, b=jax.device_put(jnp.ones((N, 2)), jax.devices()[1]))
    close(got, X @ W + 1, 1e-6)


def test_some_of_the_devices():
    two = jax.devices()[2:4]
    y = ft.pmap(lambda x: lax.psum(x, "devices"), devices=two)(X[:2])
    assert y.sharding.device_set == set(two)
    close(y[0], X[0] + X[1], 1e-6)


def test_derivatives_pass_through():
    f = ft.pmap(lambda x: jnp.sin(x) * lax.psum(x, "devices"))
    plain = lambda x: jnp.sin(x) * x.sum(0, keepdims=True)
    close(jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X), 1e-5)
    close(jax.jvp(f, (X,), (X,))[1], jax.jvp(plain, (X,), (X,))[1], 1e-5)


def test_autocast_around():
    f = ft.pmap(lambda w, x: x @ w, in_axes=(None, 0))
    got = ft.autocast(f, "bfloat16")(W, X)
    assert got.dtype == jnp.float32 and 0 < jnp.abs(got - X @ W).max() < 5e-2


def test_one_trace_for_one_shape():
    traced = []
    f = ft.pmap(lambda x: traced.append(1) or x)
    f(X), f(X + 1)
    assert len(traced) == 1
    assert f.lower(X).as_text() and f.__wrapped__


def test_shard_replicate_unreplicate():
    batch = {"x": np.arange(32).reshape(16, 2), "y": jnp.arange(16)}
    split = ft.shard(batch)
    assert split["x"].shape == (N, 2, 2) and split["y"].shape == (N, 2)
    assert {s.data.shape for s in split["x"].addressable_shards} == {(1, 2, 2)}
    same(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), split), jax.tree.map(jnp.asarray, batch))
    tree = {"w": W, "n": 3, "key": jax.random.key(1)}
    copies = ft.replicate(tree)
    assert copies["w"].shape == (N, 4, 2) and len(copies["w"].sharding.device_set) == N
    same(ft.unreplicate(copies)["w"], W)
    assert ft.unreplicate(copies)["key"] == jax.random.key(1) and ft.unreplicate(copies)["n"] == 3
    assert ft.unreplicate(np.ones((N, 2))).shape == (2,)
    jax.tree.map(lambda x: x.delete(), copies)
    assert not W.is_deleted()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ft.pmap(jnp.sin)(X[:6]), "pmap: argument 0 has shape (6, 3, 4); its axis 0 needs one slice for each of 8 "
     "devices. ft.shard cuts a batch's rows so; in_axes=None gives every device the whole"),
    (lambda: ft.pmap(lambda a, b: b, in_axes=(None, 1))(W, {"x": X}),
     "pmap: argument 1['x'] has shape (8, 3, 4); its axis 1 needs one slice for each of 8 devices"),
    (lambda: ft.pmap(lambda x: x)(jnp.float32(1)), "pmap: argument 0 has shape (); its axis 0 needs one slice"),
    (lambda: ft.pmap(lambda *, x: x)(x=X[:1]), "pmap: keyword argument x has shape (1, 3, 4); its axis 0"),
    (lambda: ft.pmap(lambda a, b: a, in_axes=(0,))(X, X),
     "has 2 positional arguments; in_axes=(0,) has an entry for 1"),
    (lambda: ft.pmap(lambda a: a["x"], in_axes=({"y": 0},))({"x": X}),
     "pmap: in_axes=({'y': 0},) is no prefix of argument 0, which has PyTreeDef({'x': *})"),
    (lambda: ft.pmap(lambda a: a, out_axes={"y": 0})(X), "pmap: out_axes={'y': 0} is no prefix of the results"),
    (lambda: ft.pmap(lambda x: {"a": x.sum()}, out_axes=None)(X),
     "pmap: result ['a'] of shape () has out_axes=None and may differ between devices: join it first, e.g. "
     "lax.pmean(..., 'devices'), or stack it, out_axes=0"),
    (lambda: ft.pmap(lambda x: ft.pmap(jnp.sin, "inner", devices=jax.devices()[:2])(x), "outer")(X),
     "pmap: 'sin' is called where the axis 'outer' is mapped already, inside another pmap or shard_map; devices are "
     "spread over once: use jax.vmap inside"),
    (lambda: ft.pmap(jnp.sin, devices=[]), "pmap needs at least one device; got devices=[]"),
    (lambda: ft.shard({"x": X[:6]}),
     "shard: ['x'] has shape (6, 3, 4), and its rows do not divide among 8 devices: give it a multiple of 8 rows"),
    (lambda: ft.unreplicate({"n": 3}), "unreplicate: ['n'] is a scalar, without an axis of devices before it"),
])
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
