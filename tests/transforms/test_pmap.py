"""pmap beside jax.pmap, what JAX's lacks, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same, sampled
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
    "other axes": (
        lambda x, y: x + y.T,
        dict(in_axes=(1, 2), out_axes=1),
        (X.swapaxes(0, 1), X.transpose(2, 1, 0)),
    ),
    "trees": (
        lambda t, s: {"a": t["x"] * s, "b": (t["y"], t["x"].sum())},
        dict(in_axes=({"x": 0, "y": None}, None), out_axes={"a": 1, "b": 0}),
        ({"x": X, "y": W}, jnp.float32(2)),
    ),
    "grad": (jax.grad(lambda w, x: jnp.square(x @ w).mean()), dict(in_axes=(None, 0)), (W, X)),
    "grad of pmean": (jax.grad(loss), dict(in_axes=(None, 0)), (W, X)),
    "vmap inside": (jax.vmap(lambda x: lax.all_gather(x.sum(), "i")), {}, (X,)),
    "keys": (
        lambda key: jax.random.normal(key, (2,)),
        {},
        (jax.random.split(jax.random.key(0), N),),
    ),
    "groups": (
        lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]),
        {},
        (X,),
    ),
    "constant result": (lambda x: 3.0, {}, (X,)),
    "nothing mapped but one": (
        lambda x, n: x[0] * n,
        dict(in_axes=(None, 0)),
        (X, jnp.arange(float(N))),
    ),
    "axis in the middle": (lambda x: x, dict(in_axes=1, out_axes=2), (X.swapaxes(0, 1),)),
    "axis from the end": (
        lambda x: x + 1,
        dict(in_axes=-3, out_axes=-3),
        (X,),
    ),  # where jax.pmap has it right
    "tree of axes from the end": (
        lambda t: (t["x"], t["n"]),
        dict(in_axes=({"x": -3, "n": -1},), out_axes=(-3, -1)),
        ({"x": X, "n": jnp.arange(N)},),
    ),
    "numpy scalars": (lambda x, n: x * n, dict(in_axes=(0, None)), (np.asarray(X), np.float32(2))),
    "None in the tree": (
        lambda t: (t["a"], None),
        dict(out_axes=(0, None)),
        ({"a": X, "b": None},),
    ),
    "out_axes None": (lambda w, x: w * 2, dict(in_axes=(None, 0), out_axes=None), (W, X)),
    "out_axes None of a constant": (lambda x: (3.0, jnp.ones(2)), dict(out_axes=None), (X,)),
    "out_axes None in a tree": (
        lambda w, x: {"w": w, "y": (x, lax.psum(x, "i"))},
        dict(in_axes=(None, 0), out_axes={"w": None, "y": (1, None)}),
        (W, X),
    ),
    "pmean": (lambda x: lax.pmean(x, "i"), {}, (X,)),
    "pmax and pmin": (lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i")), dict(out_axes=None), (X,)),
    "psum of a tree": (
        lambda t: lax.psum(t, "i"),
        dict(out_axes=None),
        ({"x": X, "n": jnp.arange(N)},),
    ),
    "psum of a constant": (lambda x: x / lax.psum(1.0, "i"), {}, (X,)),
    "axis_size": (lambda x: x * float(lax.axis_size("i")), {}, (X,)),
    "all_gather": (lambda x: lax.all_gather(x, "i"), dict(out_axes=1), (X,)),
    "all_gather once": (lambda x: lax.all_gather(x, "i"), dict(out_axes=None), (X,)),
    "all_gather tiled": (
        lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
        dict(out_axes=None),
        (X,),
    ),
    "ppermute": (lambda x: lax.ppermute(x, "i", [(i, (i + 1) % N) for i in range(N)]), {}, (X,)),
    "ppermute of some": (lambda x: lax.ppermute(x, "i", [(0, 1)]), {}, (X,)),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "i", 0, 0),
        {},
        (jnp.arange(float(N * N)).reshape(N, N),),
    ),
    "all_to_all tiled": (
        lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
        {},
        (jnp.arange(float(N * N * 3)).reshape(N, N, 3),),
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "i"),
        {},
        (jnp.arange(float(N * N)).reshape(N, N),),
    ),
    "psum_scatter tiled": (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        {},
        (jnp.arange(float(N * N)).reshape(N, N),),
    ),
    "gathered groups": (
        lambda x: lax.all_gather(x, "i", axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]]),
        {},
        (X,),
    ),
    "jit inside": (jax.jit(lambda x: lax.psum(jnp.sin(x), "i")), dict(out_axes=None), (X,)),
    "vmap inside, over a named axis": (
        jax.vmap(lambda x: lax.psum(x, ("i", "row")), axis_name="row"),
        {},
        (X,),
    ),
    "grad through psum": (jax.grad(lambda x: jnp.square(lax.psum(x, "i")).sum()), {}, (X,)),
    "grad through all_gather": (
        jax.grad(lambda x: jnp.square(lax.all_gather(x, "i")).sum()),
        {},
        (X,),
    ),
    "value_and_grad in a loop": (
        lambda w, x: lax.scan(
            lambda w, x: (
                w - lax.pmean(jax.grad(lambda w: jnp.square(x @ w).mean())(w), "i"),
                None,
            ),
            w,
            x,
        )[0],
        dict(in_axes=(None, 0), out_axes=None),
        (W, X),
    ),
    "a key for each": (
        lambda key, x: x + jax.random.uniform(key),
        {},
        (jax.random.split(jax.random.key(0), N), X),
    ),
    "one key": (
        lambda key, x: jax.random.bits(jax.random.fold_in(key, lax.axis_index("i"))),
        dict(in_axes=(None, 0)),
        (jax.random.key(0), X),
    ),
    "uint32 keys": (
        lambda key: jax.random.bits(key),
        {},
        (jax.random.split(jax.random.PRNGKey(0), N),),
    ),
    "integers and booleans": (
        lambda n, b: (lax.psum(n, "i"), b & (n > 3)),
        {},
        (jnp.arange(N), jnp.arange(N) % 2 == 0),
    ),
    "static": (lambda x, n: x**n, dict(static=1), (X, 2)),
    "static first": (lambda n, x: x**n, dict(static=0, in_axes=(None, 0)), (2, X)),
}
VARIANTS = {
    "all_gather once",
    "all_gather tiled",
    "ppermute of some",
    "all_to_all tiled",
    "psum_scatter tiled",
    "gathered groups",
    "psum of a constant",
    "one key",
    "uint32 keys",
    "integers and booleans",
    "numpy scalars",
    "out_axes None of a constant",
    "static first",
    "tree of axes from the end",
    "axis from the end",
    "None in the tree",
    "constant result",
    "grad through all_gather",
    "psum of a tree",
}  # of the others


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled(CASES, [name for name in CASES if name not in VARIANTS]))
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


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    ("in_axis", "out_axis"), [(-1, -1), (-2, -1), (-1, -2), (-3, -4), (1, -2), (-2, 1), (0, 3)]
)
def test_negative_axes_count_as_in_vmap(in_axis, out_axis, jit):
    # jax.pmap takes only non-negative axes: with others it raises an error, or concatenates along
    # axis 0.
    f, x = lambda x: jnp.stack([x, 2 * x]), jnp.moveaxis(X, 0, in_axis)
    same(jit(ft.pmap(f, in_axes=in_axis, out_axes=out_axis))(x), jax.vmap(f, in_axis, out_axis)(x))
    if jit is not jax.jit:
        put = jax.device_put({"x": x}, jax.devices()[3])
        g = ft.pmap(
            lambda t, y: f(t["x"]) * y,
            in_axes=[{"x": in_axis}, None],
            out_axes=out_axis,
            donate_argnums=0,
        )
        same(g(put, jnp.float32(1)), jax.vmap(f, in_axis, out_axis)(x))


@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, id=name)
        for name, f in {
            "ppermute": lambda x: lax.ppermute(x, "i", [(i, (i + 1) % N) for i in range(N)]),
            "psum of groups": lambda x: lax.psum(
                x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
            ),
            "axis_index": lambda x: lax.axis_index("i"),
            "psum_scatter": lambda x: lax.psum_scatter(jnp.ones(N), "i") * x.sum(),
            "cond on a varying value": lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 0.0),
            "while on a varying value": lambda x: lax.while_loop(
                lambda c: c[0] < x.sum(), lambda c: (c[0] + 1, c[1] * 2), (0.0, 1.0)
            )[1],
            "varying after two iterations": lambda x: lax.fori_loop(
                0, 3, lambda i, c: (c[1], c[2], c[2]), (0.0, 0.0, x.sum())
            )[0],
            "scan over varying values": lambda x: lax.scan(lambda c, y: (c, y + 1), 0.0, x.sum(1))[
                1
            ],
            "checkpoint in jit": jax.jit(lambda x: jax.checkpoint(jnp.sin)(x)),
            "vmap": jax.vmap(lambda x: x + lax.psum(x, "i")),
            "custom_jvp": lambda x: jax.nn.relu(x),
        }.items()
    ],
)
def test_results_that_may_differ_need_an_axis(f):
    with pytest.raises(ValueError, match="has out_axes=None and may differ between devices"):
        ft.pmap(f, "i", out_axes=None)(X)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "f",
    [
        pytest.param(f, id=name)
        for name, f in {
            "cond on a sum": lambda x: lax.cond(
                lax.psum(x.sum(), "i") > 0, lambda: 1.0, lambda: 0.0
            ),
            "loop over means": lambda x: lax.fori_loop(
                0, 3, lambda i, c: c + lax.pmean(x, "i"), jnp.zeros_like(x)
            ),
            "while of constants": lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0),
            "function of a sum": lambda x: jax.nn.relu(lax.psum(x, "i")) @ jnp.ones((4, 2)),
            "random numbers of a constant key": lambda x: jax.random.normal(
                jax.random.key(0), (3,)
            ),
            "checkpoint around a sum": lambda x: jax.checkpoint(
                lambda x: lax.psum(jnp.sin(x), "i")
            )(x),
            "all_gather": lambda x: lax.all_gather(x, "i")[0],
            "one device's value": lambda x: lax.psum(
                jnp.where(lax.axis_index("i") == 2, x, 0.0), "i"
            ),
            "jvp of a mean": lambda x: jax.jvp(lambda x: lax.pmean(x, "i"), (x,), (x,)),
        }.items()
    ],
)
def test_results_that_are_equal_need_none(f):
    same(ft.pmap(f, "i", out_axes=None)(X), jax.pmap(f, "i", out_axes=None)(X))


def test_errors_of_the_function_are_not_hidden():
    def f(x):
        raise NotImplementedError("mine")

    with pytest.raises(NotImplementedError, match="mine"):
        ft.pmap(f, out_axes=None)(X)


def test_donated_and_static_arguments():
    step = ft.pmap(
        lambda n, w, x, *, y: (w * n, x + y),
        in_axes=(None, None, 0),
        out_axes=(None, 0),
        static_argnums=0,
        donate_argnums=(1, 2),
    )
    w, x = jax.device_put(W, jax.devices()[1]), ft.replicate(X[0])
    same(step(3, w, x, y=X), (3 * W, X + X[:1]))
    assert x.is_deleted()
    with pytest.raises(
        TypeError, match="pmap: argument 0 is a list, which is neither an array nor hashable"
    ):
        step([3], W, X, y=X)


def test_compiled_ahead():
    f = ft.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)
    close(f.lower(X).compile()(X), X.sum(0), 1e-6)
    assert f.trace(X).jaxpr.out_avals[0].shape == X.shape[1:]


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
    assert (
        not W.is_deleted()
    )  # one device's copy of it shared its memory, had it been put there without a copy


def test_donation():
    step = ft.pmap(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(X, jax.tree.leaves(step(X))[0].sharding)
    y = step(x)
    assert x.is_deleted() and not y.is_deleted()


def test_arrays_that_were_put_elsewhere():
    third = jax.devices()[3]
    got = ft.pmap(lambda w, x, *, b: x @ w + b[None], in_axes=(None, 0))(
        jax.device_put(W, third), X, b=jax.device_put(jnp.ones((N, 2)), jax.devices()[1])
    )
    close(got, X @ W + 1, 1e-6)


def test_some_of_the_devices():
    two = jax.devices()[2:4]
    y = ft.pmap(lambda x: lax.psum(x, "devices"), devices=two)(X[:2])
    assert y.sharding.device_set == set(two)
    close(y[0], X[0] + X[1], 1e-6)


@pytest.mark.exhaustive
def test_derivatives_pass_through():
    f = ft.pmap(lambda x: jnp.sin(x) * lax.psum(x, "devices"))
    plain = lambda x: jnp.sin(x) * x.sum(0, keepdims=True)
    close(jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X), 1e-5)
    close(jax.jvp(f, (X,), (X,))[1], jax.jvp(plain, (X,), (X,))[1], 1e-5)


@pytest.mark.exhaustive
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
    same(
        jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), split), jax.tree.map(jnp.asarray, batch)
    )
    tree = {"w": W, "n": 3, "key": jax.random.key(1)}
    copies = ft.replicate(tree)
    assert copies["w"].shape == (N, 4, 2) and len(copies["w"].sharding.device_set) == N
    same(ft.unreplicate(copies)["w"], W)
    assert ft.unreplicate(copies)["key"] == jax.random.key(1) and ft.unreplicate(copies)["n"] == 3
    assert ft.unreplicate(np.ones((N, 2))).shape == (2,)
    jax.tree.map(lambda x: x.delete(), copies)
    assert not W.is_deleted()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ft.pmap(jnp.sin)(X[:6]),
            "pmap: argument 0 has shape (6, 3, 4); its axis 0 needs one slice for each of 8 "
            "devices. ft.shard splits the rows of a batch in this way; with in_axes=None every "
            "device gets the complete argument",
        ),
        (
            lambda: ft.pmap(lambda a, b: b, in_axes=(None, 1))(W, {"x": X}),
            "pmap: argument 1['x'] has shape (8, 3, 4); its axis 1 needs one slice for each of 8 "
            "devices",
        ),
        (
            lambda: ft.pmap(lambda x: x)(jnp.float32(1)),
            "pmap: argument 0 has shape (); its axis 0 needs one slice",
        ),
        (
            lambda: ft.pmap(lambda *, x: x)(x=X[:1]),
            "pmap: keyword argument x has shape (1, 3, 4); its axis 0",
        ),
        (
            lambda: ft.pmap(lambda a, b: a, in_axes=(0,))(X, X),
            "has 2 positional arguments, but in_axes=(0,) has 1 entries",
        ),
        (
            lambda: ft.pmap(lambda a: a["x"], in_axes=({"y": 0},))({"x": X}),
            "pmap: in_axes=({'y': 0},) is not a tree prefix of argument 0, which has "
            "PyTreeDef({'x': *})",
        ),
        (
            lambda: ft.pmap(lambda a: a, out_axes={"y": 0})(X),
            "pmap: out_axes={'y': 0} is not a tree prefix of the results",
        ),
        (
            lambda: ft.pmap(lambda x: {"a": x.sum()}, out_axes=None)(X),
            "pmap: result ['a'] of shape () has out_axes=None and may differ between devices: "
            "combine it first, e.g. with lax.pmean(..., 'devices'), or use out_axes=0 to stack it",
        ),
        (
            lambda: ft.pmap(
                lambda x: ft.pmap(jnp.sin, "inner", devices=jax.devices()[:2])(x), "outer"
            )(X),
            "pmap: 'sin' is called inside another pmap or shard_map, which maps the axis 'outer'. "
            "Use jax.vmap inside.",
        ),
        (
            lambda: ft.pmap(jnp.sin, out_axes=3)(X),
            "pmap: result of 'sin' has shape (3, 4) on each device and 3 axes when "
            "stacked; out_axes=3 is out of range",
        ),
        (
            lambda: ft.pmap(lambda x: {"y": x[0]}, out_axes={"y": -3})(X),
            "pmap: result ['y'] of '<lambda>' has shape (4,) "
            "on each device and 2 axes when stacked; out_axes=-3 is out of range",
        ),
        (
            lambda: ft.pmap(jnp.sin, in_axes=-4)(X),
            "pmap: argument 0 has shape (8, 3, 4); its axis -4 needs one slice for",
        ),
        (
            lambda: ft.pmap(jnp.sin, static_argnums=-1),
            "pmap: static_argnums must be positions of arguments, counted from 0; got -1",
        ),
        (
            lambda: ft.pmap(jnp.sin, donate_argnums=(0, -1)),
            "pmap: donate_argnums must be positions of arguments, counted from 0; got (0, -1)",
        ),
        (lambda: ft.pmap(jnp.sin, donate_argnums="a"), "counted from 0; got 'a'"),
        (lambda: ft.pmap(jnp.sin, devices=[]), "pmap needs at least one device; got devices=[]"),
        (
            lambda: ft.shard({"x": X[:6]}),
            "shard: ['x'] has shape (6, 3, 4); its first axis must be a multiple of the 8 devices",
        ),
        (
            lambda: ft.unreplicate({"n": 3}),
            "unreplicate: ['n'] is a scalar; expected a leading axis of devices",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"in_axes": 0.0},
            "pmap: in_axes must be integers, None, or trees of them; got 0.0 in in_axes=0.0",
        ),
        (
            {"in_axes": ({"x": True},)},
            "pmap: in_axes must be integers, None, or trees of them; got True in "
            "in_axes=({'x': True},)",
        ),
        (
            {"out_axes": "i"},
            "pmap: out_axes must be integers, None, or trees of them; got 'i' in out_axes='i'",
        ),
    ],
)
def test_axes_are_integers(options, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        ft.pmap(jnp.sin, **options)


def one_key(x):
    """The device's own key, from one key that all devices get."""
    return jax.random.split(jax.random.key(0), 8)[lax.axis_index("devices")]


COLLECTIVES = {
    "psum": lambda x: lax.psum(x * lax.axis_index("devices").astype(x.dtype), "devices"),
    "no collective": lambda x: x * 2,
    "psum in groups": lambda x: lax.psum(
        x, "devices", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
    ),
    "psum of the index in groups": lambda x: lax.psum(
        x * lax.axis_index("devices").astype(x.dtype),
        "devices",
        axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "pmax in groups": lambda x: lax.pmax(
        x, "devices", axis_index_groups=[[0, 2, 4, 6], [1, 3, 5, 7]]
    ),
    "all_gather": lambda x: lax.all_gather(
        x * lax.axis_index("devices").astype(x.dtype), "devices"
    ),
    "all_gather in groups": lambda x: lax.all_gather(
        x * lax.axis_index("devices").astype(x.dtype),
        "devices",
        axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "psum_scatter": lambda x: lax.psum_scatter(x, "devices", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "devices", 0, 0, tiled=True),
    "ppermute of a ring": lambda x: lax.ppermute(
        x, "devices", [(i, (i + 1) % 8) for i in range(8)]
    ),
    "ppermute of one pair": lambda x: lax.ppermute(x, "devices", [(0, 1)]),
    "ppermute to itself": lambda x: lax.ppermute(x, "devices", [(0, 0)]),
    "pshuffle": lambda x: lax.pshuffle(x, "devices", [*range(1, 8), 0]),
    "keys of the devices": lambda x: jax.random.normal(one_key(x), x.shape),
    "one key": lambda x: jax.random.normal(jax.random.key(0), x.shape),
    "in a scan": lambda x: lax.scan(
        lambda c, _: (lax.all_to_all(c, "devices", 0, 0, tiled=True), None), x, None, length=1
    )[0],
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_result_of_every_device_is_the_same(name):
    f, x = COLLECTIVES[name], jnp.arange(1.0, 9.0)
    each = np.asarray(ft.pmap(f, in_axes=None)(x))
    whole = ft.pmap(f, in_axes=None, out_axes=None)
    if (each == each[0]).all():
        np.testing.assert_array_equal(whole(x), each[0])
    else:
        with pytest.raises(
            ValueError, match="has out_axes=None and may differ between devices: combine it first"
        ):
            whole(x)
