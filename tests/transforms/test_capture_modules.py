"""Sites of models of Equinox, Haiku, Flax Linen and flax.nnx."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from checks import close, same
from flax import linen, nnx

from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
X = jax.random.normal(jax.random.key(0), (2, 5, 8))


@pytest.mark.exhaustive
def test_equinox():
    model = eqx.nn.MLP(8, 3, 6, 2, key=jax.random.key(0))
    linears = [f"eqx.nn.MLP/eqx.nn.Linear#{i}" for i in range(3)]
    for f in (model, eqx.filter_jit(model)):
        _, seen = ft.capture(f, r"eqx\.nn\.MLP/.*")(X[0, 0])
        x = X[0, 0]
        for i, name in enumerate(linears):
            x = model.layers[i].weight @ x + model.layers[i].bias
            close(seen[name], x)
            x = jax.nn.relu(x)
        assert list(seen) == linears
    changed = ft.intervene(model, {"eqx.nn.MLP/eqx.nn.Linear#1": lambda value, index: 0 * value})(
        X[0, 0]
    )
    close(changed, model.layers[2].bias)
    twice = eqx.nn.Sequential([model.layers[1], model.layers[1]])
    assert ft.sites(twice)(jnp.ones(6)).names == (
        "eqx.nn.Sequential/eqx.nn.Linear#0",
        "eqx.nn.Sequential/eqx.nn.Linear#1",
        "eqx.nn.Sequential",
    )


@pytest.mark.exhaustive
def test_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([6, 3])(x)))
    params = net.init(jax.random.key(0), X)
    y, seen = ft.capture(net.apply, "mlp/.*")(params, X)
    first = X @ params["mlp/~/linear_0"]["w"] + params["mlp/~/linear_0"]["b"][None, None]
    close(seen, {"mlp/linear_0": first, "mlp/linear_1": y})


@pytest.mark.exhaustive
def test_linen():
    model = linen.Sequential([linen.Dense(6), jnp.tanh, linen.Dense(3)])
    params = model.init(jax.random.key(0), X)
    y, seen = ft.capture(model.apply, ".*layers_.*")(params, X)
    assert [value.shape[-1] for value in seen.values()] == [6, 3]
    same(list(seen.values())[1], y)


class Blocks(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(8, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.shared = self.blocks[0]

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.shared(x)


def test_nnx():
    model = Blocks(nnx.Rngs(0))
    named = ft.name_scopes(model)
    assert ft.sites(model)(X).names == ()
    assert ft.sites(named)(X).names == ("stem", "blocks/0#0", "blocks/1", "blocks/0#1")
    y, seen = ft.capture(named, "blocks/.*")(X)
    same(y, model(X))
    close(seen["blocks/0#0"], model.blocks[0](model.stem(X)))
    same(seen["blocks/0#1"], y)
    square = lambda model, x: jnp.sum(model(x) ** 2)
    same(jax.tree.leaves(nnx.grad(square)(named, X)), jax.tree.leaves(nnx.grad(square)(model, X)))
    model.stem.bias[...] = jnp.ones(4)  # variables are shared
    same(named(X), model(X))
    assert isinstance(named.stem, nnx.Linear)
    slopes = ft.capture_cotangents(square, "stem")(named, X)[1]
    tail = lambda h: jnp.sum(
        model.shared(jnp.tanh(model.blocks[1](jnp.tanh(model.blocks[0](h))))) ** 2
    )
    close(slopes["stem"], jax.grad(tail)(model.stem(X)))
