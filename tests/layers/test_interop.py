"""Flax modules as layers and layers as Flax modules: the numbers, the names, the state and the gradients agree."""

import functools
import pathlib
import pickle
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, linen, nnx
from flax.training import train_state

from fnet import layers as nn

KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (4, 6, 6, 2))


def close(got, want, tolerance=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def differ(one, other):
    return any((a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def raises(error, text):
    return pytest.raises(error, match=re.escape(text))


class LinenCNN(linen.Module):
    features: int = 3
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, *, train=False):
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(linen.Conv(self.features, (3, 3))(x)))
        return linen.Dropout(self.rate, deterministic=not train)(linen.Dense(5)(x.mean((1, 2))))


class NnxCNN(nnx.Module):
    def __init__(self, features=3, *, rngs):
        self.layers = nnx.List([nnx.Conv(2, features, (3, 3), rngs=rngs), nnx.Linear(features, 5, rngs=rngs)])
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.layers[0](x)))
        return self.dropout(self.layers[1](x.mean((1, 2))))


CNN = nn.Sequential(conv=nn.Conv(3, 3), norm=nn.BatchNorm(), relu=jax.nn.relu, pool=nn.GlobalAvgPool(),
                    drop=nn.Dropout(0.5), head=nn.Dense(5))


def loss_of(y):
    return jnp.square(y - 1).sum()


def training_step(layer, params, state):
    """(output, new state, gradients), compiled."""
    def loss(params):
        y, new = layer(params, X, state=state, key=KEY, train=True)
        return loss_of(y), (y, new)

    gradients, (y, new) = jax.jit(jax.grad(loss, has_aux=True))(params)
    return y, new, gradients


def first_draw(key):
    """The first key that the layer at a model's root draws."""
    return jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(zlib.crc32(b"draws"))), 1)


# flax.linen inside fnet


@functools.cache
def linen_layer():
    layer = nn.from_linen(LinenCNN())
    return layer, *layer.init(jax.random.key(1), X)


def test_linen_layer_has_the_modules_own_names():
    layer, params, state = linen_layer()
    variables = LinenCNN().init(jax.random.key(1), X)
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert shapes({"params": params, **state}) == shapes(variables)
    spec = layer.spec(X)
    assert shapes(spec.params) == shapes(params) and shapes(spec.state) == shapes(state)
    assert differ(layer.init(jax.random.key(2), X)[0], params)
    close(jax.jit(layer.init)(jax.random.key(1), X), (params, state), 0)


def test_linen_layer_equals_linen():
    layer, params, state = linen_layer()
    module, variables = LinenCNN(), {"params": params, **state}
    y, same = layer(params, X, state=state)
    close(y, module.apply(variables, X))
    close(same, state, 0)

    def loss(params):
        y, moved = module.apply({"params": params, **state}, X, train=True, mutable=["batch_stats"],
                                rngs={"dropout": first_draw(KEY)})
        return loss_of(y), (y, moved)

    gradients, (y, moved) = jax.jit(jax.grad(loss, has_aux=True))(params)
    close(training_step(layer, params, state), (y, moved, gradients))
    assert differ(moved, state) and (y == 0).any()


def test_linen_layer_inside_a_model():
    model = nn.Sequential(nn.Conv(2, 3), backbone=nn.from_linen(LinenCNN()), head=nn.Dense(3))
    params, state = model.init(jax.random.key(0), X)
    assert sorted(params) == ["0", "backbone", "head"] and sorted(state) == ["backbone"]
    y, new = model(params, X, state=state)
    inner = LinenCNN().apply({"params": params["backbone"], **state["backbone"]}, nn.Conv(2, 3)(params["0"], X))
    close(y, nn.Dense(3)(params["head"], inner))
    y, new, gradients = training_step(model, params, state)
    assert differ(new, state) and jax.tree.structure(gradients) == jax.tree.structure(params)
    model.check(params, X, state=state)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        y = linen.BatchNorm(use_running_average=deterministic)(linen.Dense(4)(x))
        return x + linen.Dropout(0.5)(jnp.tanh(y), deterministic=deterministic)


@pytest.mark.parametrize("wrap", [nn.Stack, lambda block, depth: nn.Sequential(*[nn.Remat(block)] * depth)])
def test_linen_layer_stacked_and_rematerialised(wrap):
    x, block = jax.random.normal(jax.random.key(0), (5, 4)), nn.from_linen(LinenBlock())
    plain, model = nn.Sequential(block, block), wrap(block, 2)
    stack = (lambda tree: jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["0"], tree["1"])) if wrap is nn.Stack else (
        lambda tree: tree)
    params, state = plain.init(jax.random.key(1), x)
    close(model.init(jax.random.key(1), x), (stack(params), stack(state)))

    def run(model, params, state):
        def loss(params):
            y, new = model(params, x, state=state, key=KEY, train=True)
            return loss_of(y), (y, new)

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    gradients, (y, new) = run(plain, params, state)
    close(run(model, stack(params), stack(state)), (stack(gradients), (y, stack(new))), 1e-5)


class Flagged(linen.Module):
    """Says what it was told."""

    @linen.compact
    def __call__(self, x, is_training=None, deterministic=None, frozen=None):
        told = {"is_training": is_training, "deterministic": deterministic, "frozen": frozen}
        return x * 0 + sum(3 ** i * (1 + value) for i, value in enumerate(told.values()) if value is not None)


@pytest.mark.parametrize(("how", "given", "train", "told"), [
    (None, {}, True, {"is_training": True, "deterministic": False}),
    (None, {}, False, {"is_training": False, "deterministic": True}),
    (None, {"deterministic": True}, True, {"is_training": True, "deterministic": True}),
    ("not frozen", {}, True, {"frozen": False}),
    ("not frozen", {"frozen": True}, True, {"frozen": True}),
    ("deterministic", {}, True, {"deterministic": True}),
    ("", {}, True, {}),
])
def test_linen_layer_tells_the_module_that_it_trains(how, given, train, told):
    layer = nn.from_linen(Flagged(), train=how)
    want = Flagged().apply({}, jnp.zeros(1), **told)
    assert layer({}, jnp.zeros(1), train=train, **given) == want
    assert nn.from_linen(Flagged())({}, jnp.zeros(1), True, False, train=False) == Flagged().apply(
        {}, jnp.zeros(1), True, False)


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.sow("losses", "size", jnp.square(x).sum())
        kernel = linen.with_partitioning(linen.initializers.ones, ("embed", None))
        counter = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if not self.is_initializing() and self.is_mutable_collection("counters"):
            counter.value += 1
        return linen.Dense(3, kernel_init=kernel, use_bias=False)(x)


def test_linen_layer_with_boxes_sown_values_and_collections_of_its_own():
    layer, x = nn.from_linen(Boxed()), jnp.ones((2, 4))
    spec = layer.spec(x)
    assert spec.params["Dense_0"]["kernel"].axes == ("embed", None)
    params, state = layer.init(jax.random.key(0), x)
    assert state == {"counters": {"calls": 0}}
    y, new = layer(params, x, state=state)
    np.testing.assert_array_equal(y, 4)
    assert new == {"counters": {"calls": 1}}
    close(nn.linen_variables(core.freeze(Boxed().init(jax.random.key(0), x)))[0], params)


def test_linen_layer_of_lists_is_a_value():
    layer = nn.from_linen(linen.Sequential([linen.Dense(4), linen.Sequential([linen.relu, linen.Dense(3)])]))
    twin = nn.from_linen(linen.Sequential([linen.Dense(4), linen.Sequential([linen.relu, linen.Dense(3)])]))
    assert layer == twin and hash(layer) == hash(twin)
    assert repr(layer) == "from_linen(Sequential)"
    params, _ = layer.init(jax.random.key(0), jnp.ones((2, 2)))
    close(jax.jit(lambda layer, params: layer(params, jnp.ones((2, 2))), static_argnums=0)(twin, params),
          layer(params, jnp.ones((2, 2))))
    assert pickle.loads(pickle.dumps(nn.from_linen(LinenCNN(4)))) == nn.from_linen(LinenCNN(4))


def test_linen_layer_errors():
    layer, params, state = linen_layer()
    with raises(TypeError, "from_linen: expected a flax.linen module, e.g. linen.Dense(10); got the class "
                           "Dense: call it"):
        nn.from_linen(linen.Dense)
    with raises(TypeError, "from_linen: expected a flax.linen module, e.g. linen.Dense(10); got a Dense"):
        nn.from_linen(nn.Dense(3))
    with raises(ValueError, "from_linen: expected a module that is not bound to variables; got a bound Dense; pass "
                            "module.unbind()[0], and its variables as params and state (inside another linen module, "
                            "construct it with parent=None)"):
        nn.from_linen(linen.Dense(3).bind({"params": {}}))
    with raises(ValueError, "from_linen(LinenCNN) needs the state 'batch_stats/BatchNorm_0/mean' (3,); pass state=, "
                            "the second result of model.init"):
        layer(params, X)
    with raises(ValueError, "LinenLayer at the root needs random numbers; pass key=jax.random.key(...) to the model"):
        layer(params, X, state=state, train=True)
    with raises(ValueError, "'Conv_0/kernel': expected shape (3, 3, 1, 3) for this input, got (3, 3, 2, 3) in params"):
        layer(params, X[..., :1], state=state)
    with raises(ValueError, "'Dense_0/kernel': expected shape (3, 5) for this input, but params has no such array "
                            "('Dense_0' contains bias)"):
        layer({**params, "Dense_0": {"bias": jnp.ones(5)}}, X, state=state)
    with raises(ValueError, "'batch_stats/BatchNorm_0/mean': expected shape (3,) for this input, but state has no such "
                            "array"):
        layer(params, X, state={})

    class Tupled(linen.Module):
        @linen.compact
        def __call__(self, x):
            return x * self.param("pair", lambda key: (jnp.ones(()), 2.0))[1]

    with raises(TypeError, "'pair': a layer's params must be arrays in dicts; got a tuple"):
        nn.from_linen(Tupled()).init(jax.random.key(0), X)


def test_linen_layer_draws_inside_transforms_only_through_pure():
    @nn.layer
    def mapped(scope, x):
        return jax.vmap(lambda row: nn.from_linen(linen.Dropout(0.5))(scope["drop"], row))(x)

    with raises(RuntimeError, "LinenLayer at 'drop' calls scope.key() inside a jax transform (scan, cond, vmap, jit, "
                              "...); use scope.pure"):
        mapped()({}, X, key=KEY, train=True)
    np.testing.assert_array_equal(mapped()({}, X), X)


# fnet inside flax.linen


def test_layer_in_linen_equals_the_layer():
    module = nn.to_linen(CNN)
    variables = module.init(jax.random.key(0), X)
    params, state = nn.linen_variables(variables)
    assert set(state) == {"batch_stats"}
    state = state["batch_stats"]
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)
    assert (shapes(params), shapes(state)) == tuple(map(shapes, CNN.init(jax.random.key(0), X)))
    close(module.apply(variables, X), CNN(params, X, state=state)[0])
    close(module.apply({"params": params, "batch_stats": state}, X), CNN(params, X, state=state)[0])

    plain = nn.Sequential(nn.Conv(3, 3), nn.BatchNorm())
    params, state = plain.init(jax.random.key(0), X)
    y, moved = nn.to_linen(plain).apply({"params": params, "batch_stats": state}, X, train=True,
                                        mutable=["batch_stats"])
    want, new = plain(params, X, state=state, train=True)
    close((y, moved["batch_stats"]), (want, new))
    assert differ(new, state)


class Outer(linen.Module):
    """fnet's CNN twice, with its own name and with a given one, and shared, beside a module of Flax's."""

    @linen.compact
    def __call__(self, x, train=False):
        body = nn.to_linen(nn.Sequential(conv=nn.Conv(2, 3), norm=nn.BatchNorm(), drop=nn.Dropout(0.5)), name="body")
        x = body(body(x, train=train), train=train)
        return linen.Dense(5)(nn.to_linen(CNN)(x, train=train))


def test_layer_in_a_linen_model_trains_with_flax_train_state():
    variables = Outer().init({"params": jax.random.key(0)}, X)
    assert sorted(variables["params"]) == ["Dense_0", "FnetLayer_0", "body"]
    assert sorted(variables["params"]["body"]) == ["conv", "norm"]
    assert variables["params"]["body"]["conv"]["kernel"].shape == (3, 3, 2, 2)

    class State(train_state.TrainState):
        batch_stats: dict

    state = State.create(apply_fn=Outer().apply, params=variables["params"], tx=optax.sgd(0.01),
                         batch_stats=variables["batch_stats"])

    @jax.jit
    def step(state, key):
        def loss(params):
            y, moved = state.apply_fn({"params": params, "batch_stats": state.batch_stats}, X, train=True,
                                      mutable=["batch_stats"], rngs={"dropout": key})
            return loss_of(y), moved

        (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=moved["batch_stats"]), value

    after, first = step(state, KEY)
    assert step(state, KEY)[1] == first != step(state, jax.random.key(4))[1]
    assert differ(after.params, state.params) and differ(after.batch_stats, state.batch_stats)
    for i in range(20):
        after, last = step(after, jax.random.fold_in(KEY, i))
    assert last < first
    with pytest.raises(Exception, match='collection "batch_stats" is immutable'):
        Outer().apply(variables, X, train=True, rngs={"dropout": KEY})
    with raises(ValueError, "Dropout at 'drop' needs random numbers; pass key=jax.random.key(...) to the model"):
        Outer().apply(variables, X, train=True, mutable=["batch_stats"])


def test_there_and_back():
    layer = nn.from_linen(nn.to_linen(CNN))
    params, state = layer.init(jax.random.key(0), X)
    want = CNN(params, X, state=state["batch_stats"])
    close(layer(params, X, state=state), (want[0], {"batch_stats": want[1]}))
    module = nn.to_linen(nn.from_linen(LinenCNN()))
    variables = module.init(jax.random.key(0), X)
    assert set(variables["batch_stats"]) == {"batch_stats"}
    close(module.apply(variables, X),
          LinenCNN().apply({"params": variables["params"], **variables["batch_stats"]}, X))


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
        return nnx.Sequential(nnx.Conv(2, 3, (3, 3), rngs=rngs), nnx.BatchNorm(3, rngs=rngs), jnp.tanh)

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
    flat = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(gradients)}
    mine = {".".join(p.key for p in path): leaf for path, leaf in jax.tree.leaves_with_path(ours[2])}
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
    with raises(ValueError, "NnxLayer at the root needs random numbers; pass key=jax.random.key(...) to the model"):
        wide({}, x, train=True)


class NnxBlock(nnx.Module):
    def __init__(self, width, *, rngs):
        self.linear, self.norm = nnx.Linear(width, width, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


def test_nnx_layer_stacked():
    block, x = nn.from_nnx(NnxBlock, 4), jax.random.normal(jax.random.key(0), (5, 4))
    plain, stacked = nn.Sequential(block, block), nn.Stack(block, 2)
    trees = plain.init(jax.random.key(1), x)
    stack = lambda tree: jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["0"], tree["1"])
    close(stacked.init(jax.random.key(1), x), tuple(map(stack, trees)))
    run = lambda model: jax.jit(lambda params, state: model(params, x, state=state, key=KEY, train=True))
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
        with raises(TypeError, "'constant' is an array outside of a variable; store it as nnx.Variable(array), so that "
                               "it is part of the layer's state"):
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
    with raises(TypeError, "from_nnx: expected a constructor and its arguments, from_nnx(NnxCNN, ...); got a NnxCNN "
                           "that is already constructed; convert its arrays with nnx_variables(module)"):
        nn.from_nnx(loaded(params, state))
    with raises(TypeError, "from_nnx: expected a constructor and its arguments, from_nnx(nnx.Linear, 4, 3); got an "
                           "int"):
        nn.from_nnx(3)
    with raises(TypeError, "from_nnx(sorted_names, 'b'): expected a constructor of a flax.nnx module; it returned a "
                           "dict of b"):
        nn.from_nnx(sorted_names, "b").init(jax.random.key(0), X)
    with raises(ValueError, "from_nnx(NnxCNN, features=3) needs the state 'norm/mean' (3,); pass state=, the second "
                            "result of model.init"):
        layer(params, X)
    with raises(ValueError, "'layers/1/kernel': expected shape (3, 5) for this input, got (2, 5) in params"):
        layer({**params, "layers": {**params["layers"], "1": {"kernel": jnp.ones((2, 5)), "bias": jnp.ones(5)}}}, X,
              state=state)
    with raises(ValueError, "update_nnx: 2 arrays do not match NnxCNN: 'norm/bias' (3,) is missing; "
                            "'norm/offset' (3,) is not used"):
        norm = {"scale": params["norm"]["scale"], "offset": params["norm"]["bias"]}
        nn.update_nnx(loaded(params, state), {**params, "norm": norm})
    with raises(TypeError, "nnx_variables: expected a flax.nnx module; got a dict of layers, norm"):
        nn.nnx_variables(params)


# fnet inside flax.nnx


def test_layer_in_nnx_equals_the_layer_and_trains():
    plain = nn.Sequential(conv=nn.Conv(3, 3), norm=nn.BatchNorm(), pool=nn.GlobalAvgPool(), head=nn.Dense(5))
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
    assert differ(run(module), run(module))    # dropout goes on drawing
    module.eval()
    before = nn.nnx_variables(module)
    assert not differ(run(module), run(module))
    close(nn.nnx_variables(module), before, 0)
    fresh = nn.to_nnx(CNN, jax.ShapeDtypeStruct(X.shape, X.dtype), rngs=nnx.Rngs(params=5, dropout=6))
    nn.update_nnx(fresh, *nn.nnx_variables(module.body))
    fresh.eval()
    close(fresh(X), module.body(X))
    with raises(TypeError, "to_nnx: expected rngs=nnx.Rngs(0), the random streams; got an int"):
        nn.to_nnx(CNN, X, rngs=0)
    for convert, options in ((nn.to_nnx, {"rngs": nnx.Rngs(0)}), (nn.to_linen, {})):
        with raises(TypeError, f"{convert.__name__}: expected a layer, e.g. nn.Dense(10); got the class Dense"):
            convert(nn.Dense, **options)
        with raises(TypeError, f"{convert.__name__}: expected a layer, e.g. nn.Dense(10); got a Dense"):
            convert(linen.Dense(3), **options)


def test_docs_page_runs():
    page = pathlib.Path(__file__).parents[2] / "docs" / "interop.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert len(blocks) == 7
    namespace = {"__name__": "interop_page"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
