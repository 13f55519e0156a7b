"""rematerialize: the numbers of the step as it was, with less kept between its passes."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

from fnet import hardware as hw
from fnet import layers as nn
from fnet import models
from fnet import transforms as ft
from fnet.transforms import _rematerialize


def gpt(x):
    model = models.GPT(64, 32, 4, 2, context=16, dropout=0.1)
    tokens = jnp.abs(x[:, :17, 0] * 30).astype(jnp.int32) % 64
    params = model.init(jax.random.key(0), tokens[:1, :-1])[0]
    loss = lambda params, tokens: model.cross_entropy(
        params, tokens[:, :-1], tokens[:, 1:], key=jax.random.key(1), train=True
    ).mean()
    return loss, params, tokens


def flax(x):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(6):
                y = linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
                x = x + linen.Dense(16)(linen.gelu(linen.Dense(64)(y)))
            return x

    net = Net()
    return (
        lambda params, x: jnp.square(net.apply(params, x)).mean(),
        net.init(jax.random.key(0), x[:1]),
        x,
    )


def cnn(x):
    blocks = [nn.Residual(nn.Conv(16, 3), nn.BatchNorm(), jax.nn.relu) for _ in range(5)]
    model = nn.Sequential(nn.Conv(16, 3), *blocks, nn.GlobalAvgPool(), nn.Dense(4))
    images = x.reshape(-1, 16, 24, 1)
    params, state = model.init(jax.random.key(0), images[:1])

    def loss(params, images):
        y, _ = model(params, images, state=state, train=True)
        return jnp.square(y - 1).mean()

    return loss, params, images


def plain(x):
    """Stacked layers whose scan also counts, draws and has constants and jitted parts of its own."""
    params = {"w": jax.random.normal(jax.random.key(0), (6, 16, 16)) / 4, "b": jnp.ones((1, 1, 16))}

    @jax.jit
    def layer(h, w, b):
        return h + jnp.tanh(jnp.sin(h @ w) * b)

    def loss(params, x):
        def turn(carried, w):
            h, i = carried
            h = layer(h, w, params["b"])
            return (
                h + jax.random.normal(jax.random.fold_in(jax.random.key(2), i), h.shape),
                i + 1,
            ), h.mean()

        (h, _), means = lax.scan(turn, (x, 0), params["w"])
        return jnp.square(h).mean() + means.sum()

    return loss, params, x


CASES = {"gpt": gpt, "flax": flax, "cnn": cnn, "plain": plain}
X = np.random.default_rng(0).normal(size=(8, 24, 16)).astype(np.float32)


def run(f, *args):
    """f, compiled fast."""
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})(*args)


def error(got, want):
    least = 1e-3 * max(np.abs(b).max() for b in jax.tree.leaves(want))
    return max(
        np.abs(a - b).max() / max(np.abs(b).max(), least)
        for a, b in zip(*(map(np.asarray, jax.tree.leaves(tree)) for tree in (got, want)))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers(name):
    loss, params, x = CASES[name](jnp.asarray(X))
    step = jax.value_and_grad(loss)
    less = ft.rematerialize(step)
    want = run(step, params, x)
    assert error(run(less, params, x), want) <= 1e-5
    assert (
        hw.count(less, params, x).total.recomputed
        > 0.5 * hw.count(jax.jit(loss), params, x).total.matmul
    )
    assert (
        hw.count(step, params, x).total.recomputed
        < 0.1 * hw.count(less, params, x).total.recomputed
    )


WRAPS = [
    lambda step: ft.microbatch(step, 2),
    lambda step: ft.autocast(step, "bfloat16"),
    jax.jit,
    ft.tune,
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrap", WRAPS)
def test_inside_other_transforms(wrap):
    loss, params, x = CASES["flax"](jnp.asarray(X))
    step = wrap(jax.value_and_grad(loss))
    less = ft.rematerialize(step)
    assert error(run(less, params, x), run(step, params, x)) <= 2e-2
    assert "optimization_barrier" in str(jax.make_jaxpr(less)(params, x))


def kept(step, *args):
    """Bytes that loops stack, of the loop that stacks most."""
    scans = [eqn for eqn in jax.make_jaxpr(step)(*args).jaxpr.eqns if eqn.primitive.name == "scan"]
    return max(
        sum(
            v.aval.size * v.aval.dtype.itemsize
            for v in eqn.outvars
            if v.aval.shape[:1] == (eqn.params["length"],)
        )
        for eqn in scans
    )


@pytest.mark.parametrize(("name", "most"), [("gpt", 0.3), ("plain", 0.7)])
def test_a_scan_keeps_what_its_turns_are_given(name, most):
    loss, params, x = CASES[name](jnp.asarray(X))
    step = jax.grad(loss)
    before, after = kept(step, params, x), kept(ft.rematerialize(step), params, x)
    assert after < most * before, (before, after)


@pytest.mark.exhaustive
def test_a_compiled_step_needs_less():
    model = models.GPT(64, 64, 6, 2, context=64)
    tokens = jax.ShapeDtypeStruct((16, 65), jnp.int32)
    params = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros((1, 64), jnp.int32))[0], jax.random.key(0)
    )
    step = jax.grad(
        lambda params, tokens: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
    )
    before, after = (
        jax.jit(f).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes
        for f in (step, ft.rematerialize(step))
    )
    assert after < 0.5 * before, (before, after)


@pytest.mark.exhaustive
def test_symbolic_sizes():
    def loss(w, x):
        for _ in range(8):
            x = jnp.tanh(jnp.tanh(x @ w) + x)
        return x.sum()

    (rows,) = jax.export.symbolic_shape("rows")
    w, types = (
        jnp.eye(3) / 2,
        (jax.ShapeDtypeStruct((3, 3), jnp.float32), jax.ShapeDtypeStruct((rows, 3), jnp.float32)),
    )
    step = ft.rematerialize(jax.grad(loss))
    exported = jax.export.export(jax.jit(step))(*types)
    assert "optimization_barrier" in exported.mlir_module()
    x = jax.random.normal(jax.random.key(0), (5, 3))
    np.testing.assert_allclose(exported.call(w, x), jax.grad(loss)(w, x), rtol=1e-5)


def test_what_keeps_little_is_left_alone():
    loss = lambda w, x: jnp.square(x @ w).mean()
    w, x = jnp.ones((16, 4)), jnp.ones((8, 16))
    step = jax.value_and_grad(loss)
    assert str(jax.make_jaxpr(ft.rematerialize(step))(w, x)) == str(jax.make_jaxpr(step)(w, x))
    tx = optax.sgd(0.1)
    update = lambda grads, state: tx.update(grads, state)
    assert "barrier" not in str(jax.make_jaxpr(ft.rematerialize(update))(w, tx.init(w)))


W = 0.3 * jax.random.normal(jax.random.key(2), (6, 16, 16))


def net(w, x):
    for each in w:
        x = jnp.tanh(jnp.sin(x @ each) * 2)
    return x


def scanned(w, x):
    return jnp.square(
        lax.scan(lambda h, each: (jnp.tanh(jnp.sin(h @ each) * 2), None), x, w)[0]
    ).mean()


def two_players(w, x):
    """The second forward pass takes what the first backward pass has made."""
    loss, grads = jax.value_and_grad(lambda w: jnp.square(net(w, x) - 1).mean())(w)
    return (
        loss,
        grads,
        jax.value_and_grad(lambda v: jnp.square(net(w - grads, net(v, x * loss))).mean())(w),
    )


def through_a_gradient(w, x):
    penalty = lambda w: (
        jnp.square(jax.grad(lambda x: scanned(w, x))(x)).sum() + jnp.square(net(w, x)).mean()
    )
    return jax.value_and_grad(penalty)(w)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [two_players, through_a_gradient])
def test_several_backward_passes(step):
    x = jnp.asarray(X[:, :, :16])
    less = ft.rematerialize(step)
    assert error(run(less, W, x), run(step, W, x)) <= 1e-5
    assert "optimization_barrier" in str(jax.make_jaxpr(less)(W, x))


def test_what_a_layer_does_is_done_once():
    done = []

    def count(i):
        done.append(int(i))
        return np.float32(1)

    def loss(w, x):
        def turn(h, given):
            each, i = given
            one = io_callback(count, jax.ShapeDtypeStruct((), jnp.float32), i)
            return jnp.tanh(jnp.sin(h @ each) * 2 * one), None

        return jnp.square(lax.scan(turn, x, (w, jnp.arange(len(w))))[0]).mean()

    jax.block_until_ready(jax.jit(ft.rematerialize(jax.grad(loss)))(W, jnp.asarray(X)))
    jax.effects_barrier()
    assert sorted(done) == list(range(len(W)))


def test_pieces_end_where_few_bytes_are_live():
    """From half of a piece on."""
    cut = _rematerialize._spread(weight=[4, 4, 4, 4, 4], crossing=[1, 9, 9, 1, 9], size=8)
    assert (cut.ends, cut.cost) == ([0, 2], 18)  # 1 + 9 bytes are kept, and 8 are computed again
