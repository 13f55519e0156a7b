"""`fit` with modules, and with states that do not count the steps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fnet import compress, parallel
from fnet import layers as nn
from fnet import training as tr

pytestmark = pytest.mark.usefixtures("quickly", "standard_promotion")


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


TX = optax.sgd(0.1)


def batches(i):
    return np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.fc(x)))


def init(key):
    model = Net(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def step(model, optimizer, batch):
    loss = lambda model: jnp.square(model(batch) - 1).mean()
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return {"loss": value}


def saved(folder, steps, state, **options):
    return tr.fit(
        step,
        state,
        batches,
        steps=steps,
        workdir=folder,
        config={},
        tensorboard=False,
        save_every=2,
        **options,
    )


def values(state):
    key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves(nnx.state(state))
    return [np.asarray(jax.random.key_data(x) if key(x) else x) for x in leaves]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(values(a), values(b), strict=True))


def test_a_module_is_trained_in_place_and_resumed_exactly(tmp_path):
    want = init(jax.random.key(0))
    for i in range(4):
        nnx.jit(step)(*want, batches(i))
    saved(tmp_path, 2, init(jax.random.key(0)), tune=False)
    model, optimizer = init(jax.random.key(1))
    kernel = model.fc.kernel
    result = saved(tmp_path, 4, (model, optimizer), tune=False)
    assert result[0] is model and result[1] is optimizer and model.fc.kernel is kernel
    assert equal(result, want)
    assert equal(tr.restore(tmp_path, like=init(jax.random.key(2))), want)
    params, _ = tr.load(tmp_path).params
    np.testing.assert_array_equal(params["norm"]["mean"], model.norm.mean[...])


def test_evaluations_and_callbacks_get_modules(tmp_path):
    seen = []

    def measure(state, batch):
        model, _ = state
        model.eval()
        return {"out": tr.mean(model(batch["x"]).mean(-1), batch["weight"])}

    def evaluate(state):
        model, _ = state
        model.eval()
        return {"out": model(batches(9)).mean()}

    evaluations = {"own": evaluate, "all": tr.evaluator(measure, {"x": batches(9)}, 4)}
    state = init(jax.random.key(0))
    options = {"evaluate": evaluations, "every": 2, "best": "all/out", "best_mode": "max"}
    saved(tmp_path, 4, state, on_step=lambda end: seen.append(end.state[0].drop), **options)
    rows = tr.read_metrics(tmp_path)
    last = {name: x for row in rows for name, x in row.items()}
    np.testing.assert_allclose(last["own/out"], last["all/out"], rtol=1e-4, atol=1e-6)
    state[0].eval()
    np.testing.assert_allclose(last["own/out"], state[0](batches(9)).mean(), rtol=1e-4, atol=1e-6)
    assert len(seen) == 4 and all(isinstance(drop, nnx.Dropout) for drop in seen)


def test_an_evaluation_must_not_train():
    def evaluate(state):
        return {"out": state[0](batches(9)).mean()}

    def measure(state, batch):
        return {"out": tr.mean(state[0](batch["x"]).mean(-1), batch["weight"])}

    for function in (evaluate, tr.evaluator(measure, {"x": batches(9)}, 8)):
        with pytest.raises(ValueError, match=r"changes 0/norm/mean, 0/norm/var, as training does"):
            tr.fit(step, init(jax.random.key(0)), batches, steps=1, evaluate={"e": function})


@pytest.mark.parametrize("planned", [False, True])
def test_fit_with_a_plan_equals_fit(planned):
    want = tr.fit(step, init(jax.random.key(0)), batches, steps=3)
    plan = parallel.plan(step, init, batches(0), devices=jax.devices()[:4], compile=False)
    state = plan.init(jax.random.key(0)) if planned else init(jax.random.key(0))
    got = tr.fit(step, state, batches, steps=3, plan=plan)
    for a, b in zip(values(got), values(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert len(got[0].fc.kernel.get_value().sharding.device_set) == 4


def test_fit_counts_the_steps_of_other_states(tmp_path):
    def plain(params, batch):
        return {"w": params["w"] + batch.mean()}, {}

    options = {"workdir": tmp_path, "config": {}, "tensorboard": False}
    tr.fit(plain, {"w": jnp.zeros(())}, lambda i: jnp.float32(i), steps=3, **options)
    last = tr.fit(plain, {"w": jnp.zeros(())}, lambda i: jnp.float32(i), steps=5, **options)
    assert last == {"w": 0 + 1 + 2 + 3 + 4}
    assert tr.load(tmp_path).params == last and tr.load(tmp_path).step == 5
    assert tr.restore(tmp_path, like={"w": jnp.zeros(())}) == last


def test_a_step_of_an_equinox_model_returns_a_scalar_loss(tmp_path):
    tx = optax.adam(1e-2)

    def make(key):
        model = eqx.nn.MLP(4, 3, 8, 1, key=key)
        return model, tx.init(eqx.filter(model, eqx.is_array))

    def make_step(model, opt_state, batch):
        loss = lambda model: jnp.square(jax.vmap(model)(batch) - 1).mean()
        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, value

    options = {"workdir": tmp_path, "config": {}, "tensorboard": False, "log_every": 1}
    model, _ = tr.fit(make_step, make(jax.random.key(0)), batches, steps=3, **options)
    assert isinstance(model, eqx.nn.MLP) and model(batches(0)[0]).shape == (3,)
    assert all("train/loss" in row for row in tr.read_metrics(tmp_path) if "train/loss" in row)
    assert any("train/loss" in row for row in tr.read_metrics(tmp_path))


def test_a_step_that_changes_more_than_arrays():
    class Named(Net):
        calls = 0

        def __call__(self, x):
            self.calls += 1
            return super().__call__(x)

    def make(key):
        model = Named(nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    with pytest.raises(TypeError, match=r"the attribute 'calls' was None, is 1.*nnx\.Variable"):
        tr.fit(step, make(jax.random.key(0)), batches, steps=1)

    def adds(model, optimizer, batch):
        model.new = nnx.Variable(batch)
        return step(model, optimizer, batch)

    with pytest.raises(TypeError, match="only arrays change, but in it 0/new is new"):
        tr.fit(adds, init(jax.random.key(0)), batches, steps=1)


def test_a_module_that_is_not_an_argument():
    other = Net(nnx.Rngs(0))

    def closes_over(model, optimizer, batch):
        other(batch)
        return step(model, optimizer, batch)

    with pytest.raises(Exception, match="Cannot mutate") as raised:
        tr.fit(closes_over, init(jax.random.key(0)), batches, steps=1)
    assert "not among its arguments" in " ".join(raised.value.__notes__)


def test_a_step_that_returns_less_than_its_state():
    tx = optax.sgd(0.1)

    def forgets(model, opt_state, batch):
        return model, jnp.float32(0)

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"must return \(model, opt_state, metrics\).*it returned"):
        tr.fit(forgets, (model, tx.init(None)), batches, steps=1)


def test_train_trains_a_module_in_place():
    x, y = batches(0), np.arange(8) % 3

    class Classifier(nnx.Module):
        def __init__(self, rngs):
            self.net, self.head = Net(rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.net(x))

    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    want = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(want, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def by_hand(model, optimizer):
        grads = nnx.grad(lambda model: cross_entropy(model(x), y).mean())(model)
        optimizer.update(model, grads)

    for _ in range(5):
        by_hand(want, optimizer)
    model = Classifier(nnx.Rngs(0))
    state = tr.train(
        model, lambda i: (x, y), cross_entropy, optax.adam(1e-2), steps=5, validation=(x, y)
    )
    for a, b in zip(values(model), values(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert state.params["head"]["kernel"].shape == (8, 3) and "rngs" in state.state["net"]["drop"]
    assert not model.net.norm.use_running_average


def test_train_names_what_a_module_has():
    with pytest.raises(TypeError, match=r"nn\.update_nnx\(module, params, state\)"):
        tr.train(Net(nnx.Rngs(0)), batches, optax.l2_loss, TX, steps=1, params={})
    mlp = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"got a MLP: write a step for tr\.fit"):
        tr.train(mlp, batches, optax.l2_loss, TX, steps=1)


def test_a_step_that_takes_the_items_of_a_batch():
    """`step(model, optimizer, x, y)`, as other libraries' examples have it, in fit and in a plan."""

    def pairwise(model, optimizer, x, y):
        loss = lambda model: jnp.square(model(x).sum(-1) - y).mean()
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return {"loss": value}

    pairs = lambda i: (batches(i), np.ones(8, np.float32))
    own, fitted, planned = (init(jax.random.key(0)) for _ in range(3))
    jitted = nnx.jit(pairwise)
    for i in range(3):
        jitted(*own, *pairs(i))
    tr.fit(pairwise, fitted, pairs, steps=3, tune=False)
    plan = parallel.plan(pairwise, init, pairs(0), devices=jax.devices()[:1])
    planned = plan.place(planned)
    compiled = plan.jit(pairwise)
    for i in range(3):
        compiled(*planned, *pairs(i))
    for model, _ in (fitted, planned):
        for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(own[0]))):
            if jnp.issubdtype(a.dtype, jnp.floating):
                np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(
        TypeError, match="the step takes x, y after its state, so a batch must be a"
    ):
        tr.fit(pairwise, init(jax.random.key(0)), batches, steps=1)


def test_quantized_parameters_whose_base_is_fixed(tmp_path):
    """The trained half of a `LowRank` over an `Int4` has no array of the base, and no shape."""
    params = compress.quantize({"fc": {"kernel": jnp.ones((8, 6))}}, {"fc": compress.Int4(8)})
    params = compress.lora(jax.random.key(0), params, {"fc/kernel": 2})
    trained, fixed = nn.partition(params, ".*/[ab]")

    @jax.jit
    def step(state, x):
        def loss(trained):
            whole = compress.materialize(nn.combine(trained, state.state))
            return jnp.square(x @ whole["fc"]["kernel"] - 1).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    data = lambda i: np.random.default_rng(i).normal(size=(4, 8)).astype(np.float32)
    state = tr.TrainState.create(trained, TX, state=fixed)
    ended = tr.fit(step, state, data, steps=3, workdir=tmp_path, config={}, tensorboard=False)
    assert int(ended.step) == 3
