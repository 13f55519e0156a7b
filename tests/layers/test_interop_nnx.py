"""flax.nnx modules as layers and layers as nnx modules: equal values, names, state and gradients."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from interop_cases import CNN, KEY, NnxCNN, X, close, differ, loss_of, raises, training_step

from fnet import layers as nn

# flax.nnx inside fnet


@functools.cache
def nnx_layer():
    layer = nn.from_nnx(NnxCNN, features=3)
    return layer, *layer.init(jax.random.key(1), X)


def loaded(params, state, **modes):
    module = NnxCNN(rngs=nnx.Rngs(9))
    nn.update_nnx(module, params, state)
    return module


def test_nnx_layer_equals_nnx():
    layer, params, state = nnx_layer()
    assert sorted(params) == ["layers", "norm"] and sorted(params["layers"]) == ["0", "1"]
    assert jax.tree.map(jnp.shape, state) == {"norm": {"mean": (3,), "var": (3,)}}
    module = loaded(params, state)
    close(nn.nnx_variables(module), (params, state), 0)
    module.eval()
    y, same = layer(params, X, state=state)
    close(y, module(X))
    close(same, state, 0)
    assert differ(layer.init(jax.random.key(2), X)[0], params)
    close(jax.jit(layer.init)(jax.random.key(1), X), (params, state), 0)


def test_nnx_layer_trains_as_nnx():
    def build(rngs):
        return nnx.Sequential(
            nnx.Conv(2, 3, (3, 3), rngs=rngs), nnx.BatchNorm(3, rngs=rngs), jnp.tanh
        )

    layer = nn.from_nnx(build)
    params, state = layer.init(jax.random.key(1), X)
    module = build(nnx.Rngs(0))
    nn.update_nnx(module, params, state)

    @nnx.jit
    def theirs(module):
        gradients, y = nnx.grad(lambda m: (lambda y: (loss_of(y), y))(m(X)), has_aux=True)(module)
        return gradients, y

    gradients, y = theirs(module)
    ours = training_step(layer, params, state)
    close(ours[:2], (y, nn.nnx_variables(module)[1]))
    flat = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(gradients)
    }
    mine = {
        ".".join(p.key for p in path): leaf for path, leaf in jax.tree.leaves_with_path(ours[2])
    }
    close(mine, flat, 1e-5)
    assert differ(ours[1], state)


def test_nnx_layer_draws_from_the_models_key():
    layer, params, state = nnx_layer()
    run = jax.jit(lambda key: layer(params, X, state=state, key=key, train=True)[0])
    assert (run(KEY) == run(KEY)).all() and differ(run(KEY), run(jax.random.key(5)))
    wide = nn.from_nnx(nnx.Dropout, 0.25)
    y, x = wide({}, jnp.ones((100, 100)), key=KEY, train=True), jnp.ones((100, 100))
    assert abs((y == 0).mean() - 0.25) < 0.02
    np.testing.assert_allclose(y[y != 0], 4 / 3, rtol=1e-6)
    np.testing.assert_array_equal(wide({}, x), x)
    pair = nn.Sequential(wide, wide)
    assert differ(pair({}, x, key=KEY, train=True), y)
    with raises(
        ValueError,
        "NnxLayer at the root needs random numbers; pass key=jax.random.key(...) to the model",
    ):
        wide({}, x, train=True)


class NnxBlock(nnx.Module):
    def __init__(self, width, *, rngs):
        self.linear, self.norm = (
            nnx.Linear(width, width, rngs=rngs),
            nnx.BatchNorm(width, rngs=rngs),
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


@pytest.mark.exhaustive
def test_nnx_layer_stacked():
    block, x = nn.from_nnx(NnxBlock, 4), jax.random.normal(jax.random.key(0), (5, 4))
    plain, stacked = nn.Sequential(block, block), nn.Stack(block, 2)
    trees = plain.init(jax.random.key(1), x)
    stack = lambda tree: jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["0"], tree["1"])
    close(stacked.init(jax.random.key(1), x), tuple(map(stack, trees)))
    run = lambda model: jax.jit(
        lambda params, state: model(params, x, state=state, key=KEY, train=True)
    )
    y, state = run(plain)(*trees)
    close(run(stacked)(*map(stack, trees)), (y, stack(state)), 1e-5)


def sorted_names(*names):
    return dict.fromkeys(sorted(names))


def numpys(array):
    return np.zeros(array.shape, array.dtype)


class Arrays(nnx.Module):
    """A constant, held as a variable or not, a counter and a cell that draws for its first carry."""

    def __init__(self, hold=nnx.Variable, *, rngs):
        self.constant = hold(jnp.arange(2.0))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.rnn = nnx.RNN(nnx.GRUCell(2, 3, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.rnn(x * self.constant[...].reshape(1, 1, 2))


def test_nnx_layer_with_constants_counters_and_draws():
    layer, x = nn.from_nnx(Arrays), jnp.ones((2, 4, 2))
    params, state = layer.init(jax.random.key(0), x)
    assert state["calls"] == 0
    y, new = layer(params, x, state=state, key=KEY)
    module = Arrays(rngs=nnx.Rngs(1))
    nn.update_nnx(module, params, state)
    close(y, module(x))
    assert new["calls"] == 1
    close(new, nn.nnx_variables(module)[1])
    for hold in (jnp.square, numpys):
        with raises(
            TypeError,
            "'constant' is an array outside of a variable; store it as nnx.Variable(array), so "
            "that it is part of the layer's state",
        ):
            nn.from_nnx(Arrays, hold=hold).init(jax.random.key(0), x)


class Doubled(nnx.Module):
    def __call__(self, x):
        return x * 2


class Scaled(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(jnp.full((), scale))

    def __call__(self, x, deterministic=True):
        return x * self.scale[...] * (1 if deterministic else 2)


def test_nnx_layer_without_rngs_and_with_a_mode_argument():
    layer = nn.from_nnx(Scaled, 3.0)
    params, state = layer.init(jax.random.key(0), X)
    assert params == {"scale": 3} and state == {}
    np.testing.assert_array_equal(layer(params, X), X * 3)
    np.testing.assert_array_equal(layer(params, X, train=True), X * 6)
    np.testing.assert_array_equal(nn.from_nnx(Doubled)({}, X), X * 2)


def test_nnx_layer_is_a_value_and_its_errors():
    layer, params, state = nnx_layer()
    assert layer == nn.from_nnx(NnxCNN, features=3) != nn.from_nnx(NnxCNN, features=4)
    assert repr(layer) == "from_nnx(NnxCNN, features=3)"
    assert pickle.loads(pickle.dumps(layer)) == layer
    with raises(
        TypeError,
        "from_nnx: expected a constructor and its arguments, from_nnx(NnxCNN, ...); got a NnxCNN "
        "that is already constructed; convert its arrays with nnx_variables(module)",
    ):
        nn.from_nnx(loaded(params, state))
    with raises(
        TypeError,
        "from_nnx: expected a constructor and its arguments, from_nnx(nnx.Linear, 4, 3); got an "
        "int",
    ):
        nn.from_nnx(3)
    with raises(
        TypeError,
        "from_nnx(sorted_names, 'b'): expected a constructor of a flax.nnx module; it returned a "
        "dict of b",
    ):
        nn.from_nnx(sorted_names, "b").init(jax.random.key(0), X)
    with raises(
        ValueError,
        "from_nnx(NnxCNN, features=3) needs the state 'norm/mean' (3,); pass state=, the second "
        "result of model.init",
    ):
        layer(params, X)
    with raises(
        ValueError, "'layers/1/kernel': expected shape (3, 5) for this input, got (2, 5) in params"
    ):
        layer(
            {
                **params,
                "layers": {
                    **params["layers"],
                    "1": {"kernel": jnp.ones((2, 5)), "bias": jnp.ones(5)},
                },
            },
            X,
            state=state,
        )
    with raises(
        ValueError,
        "update_nnx: 2 arrays do not match NnxCNN: 'norm/bias' (3,) is missing; "
        "'norm/offset' (3,) is not used",
    ):
        norm = {"scale": params["norm"]["scale"], "offset": params["norm"]["bias"]}
        nn.update_nnx(loaded(params, state), {**params, "norm": norm})
    with raises(TypeError, "nnx_variables: expected a flax.nnx module; got a dict of layers, norm"):
        nn.nnx_variables(params)


# fnet inside flax.nnx


def test_layer_in_nnx_equals_the_layer_and_trains():
    plain = nn.Sequential(
        conv=nn.Conv(3, 3), norm=nn.BatchNorm(), pool=nn.GlobalAvgPool(), head=nn.Dense(5)
    )
    module = nn.to_nnx(plain, X, rngs=nnx.Rngs(0))
    params, state = nn.nnx_variables(module)
    assert {type(leaf) for _, leaf in nnx.to_flat_state(nnx.state(module.params))} == {nnx.Param}
    assert {type(leaf) for _, leaf in nnx.to_flat_state(nnx.state(module.state))} == {nnx.BatchStat}
    optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: loss_of(m(X)))(module)
        optimizer.update(module, gradients)
        return loss

    for _ in range(2):
        step(module, optimizer)
        _, state, gradients = training_step(plain, params, state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    close(nn.nnx_variables(module), (params, state), 1e-5)
    module.eval()
    close(module(X), plain(params, X, state=state)[0], 1e-5)
    close(nn.nnx_variables(module)[1], state, 1e-5)


class NnxOuter(nnx.Module):
    def __init__(self, *, rngs):
        self.body = nn.to_nnx(CNN, X, rngs=rngs)
        self.head = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))


def test_layer_in_an_nnx_model():
    module = NnxOuter(rngs=nnx.Rngs(0))
    run = nnx.jit(lambda module: module(X))
    assert differ(run(module), run(module))  # dropout goes on drawing
    module.eval()
    before = nn.nnx_variables(module)
    assert not differ(run(module), run(module))
    close(nn.nnx_variables(module), before, 0)
    fresh = nn.to_nnx(
        CNN, jax.ShapeDtypeStruct(X.shape, X.dtype), rngs=nnx.Rngs(params=5, dropout=6)
    )
    nn.update_nnx(fresh, *nn.nnx_variables(module.body))
    fresh.eval()
    close(fresh(X), module.body(X))
    with raises(TypeError, "to_nnx: expected rngs=nnx.Rngs(0), the random streams; got an int"):
        nn.to_nnx(CNN, X, rngs=0)
    for convert, options in ((nn.to_nnx, {"rngs": nnx.Rngs(0)}), (nn.to_linen, {})):
        with raises(
            TypeError,
            f"{convert.__name__}: expected a layer, e.g. nn.Dense(10); got the class Dense",
        ):
            convert(nn.Dense, **options)
        with raises(
            TypeError, f"{convert.__name__}: expected a layer, e.g. nn.Dense(10); got a Dense"
        ):
            convert(linen.Dense(3), **options)
