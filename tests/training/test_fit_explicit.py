"""fit(plan=) on a mesh with explicit axes: the numbers of one device, and the same bits after a
death, for a step written for one device and for one that states its own shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_resume import Died, everything, same_run

from fnet import parallel
from fnet import training as tr

pytestmark = pytest.mark.usefixtures("quickly")
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
TX = optax.sgd(0.1, momentum=0.9)
DATA = np.random.default_rng(0).normal(size=(6, 16, 64)).astype(np.float32)
OPTIONS = {"every": 4, "log_every": 4, "save_every": 2, "tensorboard": False, "config": {}}


def init(key, w=None, v=None):
    first, second = jax.random.split(key)
    params = {
        "w": jax.random.normal(first, (64, 128), out_sharding=w),
        "v": 0.1 * jax.random.normal(second, (128, 64), out_sharding=v),
    }
    return tr.TrainState.create(params, TX)


def losses(params, x, place=None):
    y = jnp.einsum("bi,io->bo", jnp.tanh(x @ params["w"]), params["v"], out_sharding=place)
    return jnp.square(y - x).mean(1)


def step_of(place):
    def step(state, x):
        loss = lambda params: losses(params, x, place).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    return step


def measure_of(place):
    return lambda state, batch: {"loss": tr.mean(losses(state.params, batch[0], place), batch[1])}


def plans():
    """(step, plan, evaluation) by name."""
    made = {}
    for strategy in ("zero1", "fsdp+pins"):
        step = step_of(None)
        plan = parallel.plan(step, init, DATA[0], mesh=MESH, strategy=strategy, compile=False)
        made[strategy] = step, plan, measure_of(None)
    step = step_of(P("data", None))
    typed = functools.partial(init, w=P(None, "model"), v=P("model", None))
    plan = parallel.plan(step, typed, DATA[0], mesh=MESH, strategy="explicit", compile=False)
    made["explicit"] = step, plan, measure_of(P())
    return made


def fit(name, workdir, steps=6, death=None):
    step, plan, measure = plans()[name]

    def batches(i):
        if i == death:
            raise Died
        return DATA[i % len(DATA)]

    evaluate = {"test": tr.evaluator(measure, DATA[1], batch_size=8)}
    state = plan.init(jax.random.key(0))
    options = OPTIONS | {"evaluate": evaluate}
    return tr.fit(step, state, batches, steps=steps, workdir=workdir, plan=plan, **options)


@pytest.mark.quick_cases("explicit-set_mesh")
@pytest.mark.parametrize("context", [None, "set_mesh"])
@pytest.mark.parametrize("name", ["zero1", "fsdp+pins", "explicit"])
def test_the_numbers_of_one_device_and_the_same_bits_after_a_death(tmp_path, name, context):
    one = tr.fit(
        step_of(None),
        jax.jit(init)(jax.random.key(0)),
        lambda i: DATA[i],
        steps=6,
        workdir=tmp_path / "one",
        **OPTIONS,
        evaluate={"test": tr.evaluator(measure_of(None), DATA[1], batch_size=8)},
    )
    if context:
        with jax.set_mesh(MESH):
            run(tmp_path, name, one)
    else:
        run(tmp_path, name, one)


def run(tmp_path, name, one):
    whole = fit(name, tmp_path / "whole")
    with pytest.raises(Died):
        fit(name, tmp_path / "resumed", death=3)
    resumed = fit(name, tmp_path / "resumed")
    plan = plans()[name][1]
    for state in (whole, resumed):
        for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(plan.state), strict=True):
            assert x.sharding.mesh == MESH and x.sharding.is_equivalent_to(place, x.ndim)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    for x, y in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    same_run(tmp_path / "resumed", tmp_path / "whole")
    rows, wanted = (everything(tmp_path / each)[1] for each in ("resumed", "one"))
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    assert any("test/loss" in row for row in rows)
    for row, want in zip(rows, wanted):
        np.testing.assert_allclose(list(row.values()), list(want.values()), rtol=1e-5)
