"""Plans of steps whose state is a tuple or holds modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from fnet import parallel
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly", "standard_promotion")
BATCH = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
TX = optax.sgd(0.1, momentum=0.9)


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def init(key):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(key))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def step(model, optimizer, batch):
    loss = lambda model: jnp.square(model(batch) - 1).mean()
    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def planned(strategy="auto", **options):
    options = {"devices": jax.devices()[:4], "compile": False} | options
    return parallel.plan(step, init, BATCH, strategy=strategy, **options)


@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
def test_a_module_is_split_and_updated_in_place(strategy):
    plan = planned(strategy)
    model, optimizer = plan.init(jax.random.key(0))
    other = init(jax.random.key(0))
    split = plan.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(split(model, optimizer, BATCH), step(*other, BATCH), rtol=1e-5)
    np.testing.assert_allclose(model.kernel[...], other[0].kernel[...], rtol=1e-5, atol=1e-6)
    whole = model.kernel.get_value().sharding.is_fully_replicated
    moment = jax.tree.leaves(nnx.state(optimizer.opt_state))[1]
    assert whole == (strategy != "fsdp")
    assert moment.sharding.is_fully_replicated == (strategy == "data")


def test_a_rule_names_the_path_of_a_variable():
    plan = planned(mesh={"data": 2, "tensor": 2}, rules={"kernel": (None, "tensor")})
    assert plan.state[0]["kernel"].spec == P(None, "tensor")
    model, optimizer = plan.init(jax.random.key(0))
    loss = plan.jit(step)(model, optimizer, BATCH)
    np.testing.assert_allclose(loss, step(*init(jax.random.key(0)), BATCH), rtol=1e-5)


def test_place_makes_modules_on_the_devices():
    plan, (model, optimizer) = planned("fsdp"), init(jax.random.key(0))
    placed, momentum = plan.place((model, optimizer))
    want = step(model, optimizer, BATCH)
    assert placed is not model and isinstance(placed, nnx.Linear)
    np.testing.assert_allclose(plan.jit(step)(placed, momentum, BATCH), want, rtol=1e-5)


def test_a_planned_step_can_be_tuned_and_lowered():
    plan = planned("data")
    state = plan.init(jax.random.key(0))
    text = plan.jit(step).lower(*state, BATCH).as_text()
    assert "stablehlo" in text and text.count("dot_general") >= 2
    tuned = ft.tune(plan.jit(step), "cpu")
    other = init(jax.random.key(0))
    for _ in range(2):
        np.testing.assert_allclose(tuned(*state, BATCH), step(*other, BATCH), rtol=1e-5)


def test_a_tuple_of_arrays_may_be_arguments():
    def make(key):
        params = {"w": jax.random.normal(key, (64, 3))}
        return params, TX.init(params)

    def update(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: jnp.square(batch @ p["w"]).mean())(params)
        updates, opt_state = TX.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    plan = parallel.plan(update, make, BATCH, devices=jax.devices()[:4], compile=False)
    got = plan.jit(update)(*plan.init(jax.random.key(0)), BATCH)
    want = update(*make(jax.random.key(0)), BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    tuned = ft.tune(plan.jit(update), "cpu")(*plan.init(jax.random.key(0)), BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), tuned, want)


def test_a_single_module_and_a_dict_of_modules():
    class Both(nnx.Module):
        def __init__(self, key):
            self.model, self.optimizer = init(key)

    def alone(both, batch):
        return {"loss": step(both.model, both.optimizer, batch)}

    def together(state, batch):
        loss = step(state["params"], state["optimizer"], batch)
        return state, loss

    want = step(*init(jax.random.key(0)), BATCH)
    options = {"devices": jax.devices()[:4], "compile": False}
    plan = parallel.plan(alone, Both, BATCH, **options)
    np.testing.assert_allclose(
        plan.jit(alone)(plan.init(jax.random.key(0)), BATCH)["loss"], want, rtol=1e-5
    )
    make = lambda key: dict(zip(("params", "optimizer"), init(key)))
    plan = parallel.plan(together, make, BATCH, **options)
    state = plan.init(jax.random.key(0))
    new, loss = plan.jit(together)(state, BATCH)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert new["params"] is state["params"]


def test_microbatches_of_a_step_of_modules():
    def sliced(model, optimizer, batch, *, microbatches=1):
        loss = lambda model, batch: jnp.square(model(batch) - 1).mean()
        grad = ft.microbatch(nnx.value_and_grad(loss), microbatches)
        value, grads = grad(model, batch)
        optimizer.update(model, grads)
        return value

    plan = parallel.plan(
        sliced, init, BATCH, devices=jax.devices()[:2], strategy="data+remat+microbatches=2"
    )
    got = plan.jit(sliced)(*plan.init(jax.random.key(0)), BATCH)
    np.testing.assert_allclose(got, step(*init(jax.random.key(0)), BATCH), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["data", "fsdp+pins"])
def test_the_state_of_a_module_is_a_state(strategy):
    graph = nnx.graphdef(init(jax.random.key(0)))

    def pure(state, batch):
        model, optimizer = nnx.merge(graph, state["params"])
        value = step(model, optimizer, batch["scale"] * batch["x"])
        return {"count": state["count"] + 1, "params": nnx.state((model, optimizer))}, value

    def begin(key):
        return {"count": jnp.zeros((), jnp.int32), "params": nnx.state(init(key))}

    batch = {"scale": np.float32(2), "x": BATCH}
    plan = parallel.plan(pure, begin, batch, devices=jax.devices()[:4], strategy=strategy)
    state, value = plan.jit(pure)(plan.init(jax.random.key(0)), batch)
    expected, wanted = pure(begin(jax.random.key(0)), batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state, expected
    )


def test_wrong_calls_and_steps_are_named():
    plan = planned("data")
    model, optimizer = plan.init(jax.random.key(0))
    with pytest.raises(TypeError, match="expected the 2 arguments of the state and the batch"):
        plan.jit(step)((model, optimizer), BATCH)
    with pytest.raises(ValueError, match=r"plan\.jit: batch of shape \(6, 64\) has 6 rows"):
        plan.jit(step)(model, optimizer, BATCH[:6])
    mlp = eqx.nn.MLP(64, 3, 8, 1, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"must return \(model, count, metrics\).*3\]\)"):
        parallel.plan(
            lambda model, count, batch: (model, jax.vmap(model)(batch)),
            lambda key: (mlp, jnp.zeros(())),
            BATCH,
            devices=jax.devices()[:2],
        )
