"""flax.linen modules as layers and layers as linen modules: equal values, names, state and
gradients."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core, linen
from flax.training import train_state
from interop_cases import (
    CNN,
    KEY,
    LinenCNN,
    X,
    close,
    differ,
    first_draw,
    loss_of,
    raises,
    training_step,
)

from fnet import layers as nn

# flax.linen inside fnet


@functools.cache
def linen_layer():
    layer = nn.from_linen(LinenCNN())
    return layer, *layer.init(jax.random.key(1), X)


@pytest.mark.exhaustive
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
        y, moved = module.apply(
            {"params": params, **state},
            X,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": first_draw(KEY)},
        )
        return loss_of(y), (y, moved)

    gradients, (y, moved) = jax.jit(jax.grad(loss, has_aux=True))(params)
    close(training_step(layer, params, state), (y, moved, gradients))
    assert differ(moved, state) and (y == 0).any()


def test_linen_layer_inside_a_model():
    model = nn.Sequential(nn.Conv(2, 3), backbone=nn.from_linen(LinenCNN()), head=nn.Dense(3))
    params, state = model.init(jax.random.key(0), X)
    assert sorted(params) == ["0", "backbone", "head"] and sorted(state) == ["backbone"]
    y, new = model(params, X, state=state)
    inner = LinenCNN().apply(
        {"params": params["backbone"], **state["backbone"]}, nn.Conv(2, 3)(params["0"], X)
    )
    close(y, nn.Dense(3)(params["head"], inner))
    y, new, gradients = training_step(model, params, state)
    assert differ(new, state) and jax.tree.structure(gradients) == jax.tree.structure(params)
    model.check(params, X, state=state)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        y = linen.BatchNorm(use_running_average=deterministic)(linen.Dense(4)(x))
        return x + linen.Dropout(0.5)(jnp.tanh(y), deterministic=deterministic)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "wrap", [nn.Stack, lambda block, depth: nn.Sequential(*[nn.Remat(block)] * depth)]
)
def test_linen_layer_stacked_and_rematerialised(wrap):
    x, block = jax.random.normal(jax.random.key(0), (5, 4)), nn.from_linen(LinenBlock())
    plain, model = nn.Sequential(block, block), wrap(block, 2)
    stack = (
        (lambda tree: jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["0"], tree["1"]))
        if wrap is nn.Stack
        else (lambda tree: tree)
    )
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
        return x * 0 + sum(
            3**i * (1 + value) for i, value in enumerate(told.values()) if value is not None
        )


@pytest.mark.parametrize(
    ("how", "given", "train", "told"),
    [
        (None, {}, True, {"is_training": True, "deterministic": False}),
        (None, {}, False, {"is_training": False, "deterministic": True}),
        (None, {"deterministic": True}, True, {"is_training": True, "deterministic": True}),
        ("not frozen", {}, True, {"frozen": False}),
        ("not frozen", {"frozen": True}, True, {"frozen": True}),
        ("deterministic", {}, True, {"deterministic": True}),
        ("", {}, True, {}),
    ],
)
def test_linen_layer_tells_the_module_that_it_trains(how, given, train, told):
    layer = nn.from_linen(Flagged(), train=how)
    want = Flagged().apply({}, jnp.zeros(1), **told)
    assert layer({}, jnp.zeros(1), train=train, **given) == want
    assert nn.from_linen(Flagged())({}, jnp.zeros(1), True, False, train=False) == Flagged().apply(
        {}, jnp.zeros(1), True, False
    )


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
    layer = nn.from_linen(
        linen.Sequential([linen.Dense(4), linen.Sequential([linen.relu, linen.Dense(3)])])
    )
    twin = nn.from_linen(
        linen.Sequential([linen.Dense(4), linen.Sequential([linen.relu, linen.Dense(3)])])
    )
    assert layer == twin and hash(layer) == hash(twin)
    assert repr(layer) == "from_linen(Sequential)"
    params, _ = layer.init(jax.random.key(0), jnp.ones((2, 2)))
    close(
        jax.jit(lambda layer, params: layer(params, jnp.ones((2, 2))), static_argnums=0)(
            twin, params
        ),
        layer(params, jnp.ones((2, 2))),
    )
    assert pickle.loads(pickle.dumps(nn.from_linen(LinenCNN(4)))) == nn.from_linen(LinenCNN(4))


def test_linen_layer_errors():
    layer, params, state = linen_layer()
    with raises(
        TypeError,
        "from_linen: expected a flax.linen module, e.g. linen.Dense(10); got the class "
        "Dense: call it",
    ):
        nn.from_linen(linen.Dense)
    with raises(
        TypeError, "from_linen: expected a flax.linen module, e.g. linen.Dense(10); got a Dense"
    ):
        nn.from_linen(nn.Dense(3))
    with raises(
        ValueError,
        "from_linen: expected a module that is not bound to variables; got a bound Dense; pass "
        "module.unbind()[0], and its variables as params and state (inside another linen module, "
        "construct it with parent=None)",
    ):
        nn.from_linen(linen.Dense(3).bind({"params": {}}))
    with raises(
        ValueError,
        "from_linen(LinenCNN) needs the state 'batch_stats/BatchNorm_0/mean' (3,); pass state=, "
        "the second result of model.init",
    ):
        layer(params, X)
    with raises(
        ValueError,
        "LinenLayer at the root needs random numbers; pass key=jax.random.key(...) to the model",
    ):
        layer(params, X, state=state, train=True)
    with raises(
        ValueError,
        "'Conv_0/kernel': expected shape (3, 3, 1, 3) for this input, got (3, 3, 2, 3) in params",
    ):
        layer(params, X[..., :1], state=state)
    with raises(
        ValueError,
        "'Dense_0/kernel': expected shape (3, 5) for this input, but params has no such array "
        "('Dense_0' contains bias)",
    ):
        layer({**params, "Dense_0": {"bias": jnp.ones(5)}}, X, state=state)
    with raises(
        ValueError,
        "'batch_stats/BatchNorm_0/mean': expected shape (3,) for this input, but state has no such "
        "array",
    ):
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

    with raises(
        RuntimeError,
        "LinenLayer at 'drop' calls scope.key() inside a jax transform (scan, cond, vmap, jit, "
        "...); use scope.pure",
    ):
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
    y, moved = nn.to_linen(plain).apply(
        {"params": params, "batch_stats": state}, X, train=True, mutable=["batch_stats"]
    )
    want, new = plain(params, X, state=state, train=True)
    close((y, moved["batch_stats"]), (want, new))
    assert differ(new, state)


class Outer(linen.Module):
    """fnet's CNN twice, with its own name and with a given one, and shared, beside a module of
    Flax's."""

    @linen.compact
    def __call__(self, x, train=False):
        body = nn.to_linen(
            nn.Sequential(conv=nn.Conv(2, 3), norm=nn.BatchNorm(), drop=nn.Dropout(0.5)),
            name="body",
        )
        x = body(body(x, train=train), train=train)
        return linen.Dense(5)(nn.to_linen(CNN)(x, train=train))


@pytest.mark.exhaustive
def test_layer_in_a_linen_model_trains_with_flax_train_state():
    variables = Outer().init({"params": jax.random.key(0)}, X)
    assert sorted(variables["params"]) == ["Dense_0", "FnetLayer_0", "body"]
    assert sorted(variables["params"]["body"]) == ["conv", "norm"]
    assert variables["params"]["body"]["conv"]["kernel"].shape == (3, 3, 2, 2)

    class State(train_state.TrainState):
        batch_stats: dict

    state = State.create(
        apply_fn=Outer().apply,
        params=variables["params"],
        tx=optax.sgd(0.01),
        batch_stats=variables["batch_stats"],
    )

    @jax.jit
    def step(state, key):
        def loss(params):
            y, moved = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                X,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
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
    with raises(
        ValueError,
        "Dropout at 'drop' needs random numbers; pass key=jax.random.key(...) to the model",
    ):
        Outer().apply(variables, X, train=True, mutable=["batch_stats"])


def test_there_and_back():
    layer = nn.from_linen(nn.to_linen(CNN))
    params, state = layer.init(jax.random.key(0), X)
    want = CNN(params, X, state=state["batch_stats"])
    close(layer(params, X, state=state), (want[0], {"batch_stats": want[1]}))
    module = nn.to_linen(nn.from_linen(LinenCNN()))
    variables = module.init(jax.random.key(0), X)
    assert set(variables["batch_stats"]) == {"batch_stats"}
    close(
        module.apply(variables, X),
        LinenCNN().apply({"params": variables["params"], **variables["batch_stats"]}, X),
    )


# Initial values that depend on the inputs, of which a layer knows the shapes.


class ActNorm(linen.Module):
    """Normalizes by the statistics of the first batch (Kingma and Dhariwal 2018)."""

    state: bool = False

    @linen.compact
    def __call__(self, x):
        mean = (
            self.variable("first", "mean", lambda: x.mean(0)).value
            if self.state
            else self.param("mean", lambda key: x.mean(0))
        )
        return x - mean[None]


@pytest.mark.parametrize("wrap", [lambda m: m, linen.jit, linen.remat])
@pytest.mark.parametrize("state", [False, True])
def test_initial_values_that_depend_on_the_inputs_are_refused(wrap, state):
    module, x = wrap(ActNorm)(state), jnp.arange(6.0).reshape(2, 3)
    layer = nn.from_linen(module)
    with pytest.raises(
        ValueError,
        match="the initial value of 'first/mean' depends"
        if state
        else "the initial value of 'mean' depends on the values of the inputs",
    ):
        layer.init(jax.random.key(0), x)
    params, after = nn.linen_variables(module.init(jax.random.key(0), x))
    np.testing.assert_array_equal(
        layer(params, x, state=after)[0] if state else layer(params, x), x - x.mean(0)[None]
    )


@pytest.mark.parametrize("wrap", [lambda m: m, linen.jit, linen.remat])
def test_initial_values_beside_computations_with_the_inputs(wrap):
    """Programs of which a part depends on the inputs, and the parameters do not."""

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _=None):
            x = linen.relu(linen.Dense(3)(x))
            self.sow("intermediates", "x", x)
            return linen.BatchNorm(use_running_average=True)(x), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x, _ = wrap(Block)()(x)
            blocks = linen.scan(
                Block, {"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=2
            )()
            return blocks(x, None)[0]

    x = jnp.ones((2, 3))
    params, state = nn.from_linen(Model()).init(jax.random.key(0), x)
    want, _ = nn.linen_variables(Model().init(jax.random.key(0), x))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, want) and set(state) == {
        "batch_stats"
    }
