"""A state that was spread over eight devices goes on on other meshes with the same bits, and is
born with those of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import same
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import parallel
from fnet import training as tr

MODEL = nn.Sequential(nn.Dense(256), nn.BatchNorm(), jax.nn.relu, nn.Dense(48))
TX = optax.adam(0.01)
X = np.random.default_rng(0).normal(size=(32, 40)).astype(np.float32)


def init(key):
    """Moments, statistics, a moving average, a key, and a number of weak type, which yields to
    others."""
    params, state = MODEL.init(key, X[:1])
    rest = {
        "norm": state,
        "key": jax.random.fold_in(key, 1),
        "weak": jnp.broadcast_to(jnp.asarray(1.0), (64, 128)),
    }
    return tr.TrainState.create(params, TX, state=rest, ema=0.9)


def step(state, batch):
    key, noise = jax.random.split(state.state["key"])

    def loss(params):
        x = batch + 0.1 * jax.random.normal(noise, batch.shape)
        y, norm = MODEL(params, x, state=state.state["norm"], train=True)
        return jnp.square(y - 1).mean(), norm

    (value, norm), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    return state.apply(TX, grads, state={**state.state, "key": key, "norm": norm}), {"loss": value}


pytestmark = pytest.mark.usefixtures("quickly")  # programs run a few times


@functools.cache
def planned(count, strategy="fsdp"):
    return parallel.plan(step, init, X, devices=jax.devices()[:count], strategy=strategy)


def two_axes(state):
    """Shardings over 2 x 4 devices, both axes of what both divide."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )

    def place(x):
        spec = (
            P("data", "tensor")
            if len(x.shape) == 2 and x.shape[0] % 2 == x.shape[1] % 4 == 0
            else P()
        )
        return NamedSharding(mesh, spec)

    return jax.tree.map(place, state)


TARGETS = {
    "4": lambda shapes: planned(4).state,
    "4, whole": lambda shapes: planned(4, "data").state,
    "1": lambda shapes: planned(1, "data").state,
    "2 x 4": two_axes,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, what was saved, what comes of one more step) of a run on eight devices."""
    plan = planned(8)
    state, spread = plan.init(jax.random.key(0)), plan.jit(step)
    for _ in range(2):
        state, _ = spread(state, X)
    split = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    assert len(split) >= 8 and any(x.weak_type for x in split)
    folder = tmp_path_factory.mktemp("saved")
    with tr.Checkpoints(folder) as checkpoints:
        checkpoints.save(2, state)
    return folder, host(state)


def host(state):
    return jax.tree.map(
        lambda x: np.asarray(
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        ),
        state,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["shapes", pytest.param("arrays", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", TARGETS)
def test_eight_devices_go_on_on_others(saved, name, kind):
    folder, want = saved
    shapes = jax.eval_shape(init, jax.random.key(0))
    places = TARGETS[name](shapes)
    if kind == "arrays":
        target = jax.jit(init, out_shardings=places)(jax.random.key(3))
    else:
        target = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
        )
    state = tr.Checkpoints(folder).restore(target)
    same(host(state), want)
    assert jax.tree.map(lambda x: x.sharding, state) == places
    assert state.state["weak"].weak_type


@pytest.mark.exhaustive
def test_it_goes_on_under_the_new_plan(saved):
    folder, _ = saved
    ends = []
    for count in (8, 4, 1):  # of which 8 went before, too
        plan = planned(count, "data" if count == 1 else "fsdp")
        state = tr.Checkpoints(folder).restore(plan.init(jax.random.key(3)))
        ends.append(plan.jit(step)(state, X)[1]["loss"])
    np.testing.assert_allclose(ends, ends[0], rtol=1e-5)
    again = tr.Checkpoints(folder).restore(planned(8).init(jax.random.key(3)))
    assert planned(8).jit(step)(again, X)[1]["loss"] == ends[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp"])
def test_born_with_the_bits_of_one_device(strategy):
    plan = planned(8, strategy)
    state = plan.init(jax.random.key(5))
    one = jax.jit(init)(jax.random.key(5))
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(one))
    same(host(state), host(one))
    assert jax.tree.map(lambda x: x.sharding, state) == plan.state
