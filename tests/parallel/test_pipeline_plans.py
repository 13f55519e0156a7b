"""Plans with stages: what they say, and what they compute."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pipeline_cases import CASES, UNROLLED, certain

from fnet import parallel
from fnet.parallel import Strategy


def planned(case, dtype=jnp.float32, **options):
    step, state, batch = {**CASES, **UNROLLED}[case](dtype)
    return parallel.plan(step, lambda key: state, batch, **options), step, state, batch


def follows(plan, step, state, batch, tolerance=1e-5):
    """Two steps of the plan are two steps on one device."""
    spread, ours, alone = plan.jit(step), plan.init(jax.random.key(0)), state
    for _ in range(2):
        ours, metrics = spread(ours, batch)
        alone, wanted = jax.jit(step)(alone, batch)
    close(metrics["loss"], wanted["loss"], tolerance)
    close(certain(ours["params"]), certain(alone["params"]), tolerance)
    return ours


def test_a_mesh_with_stages():
    """The batch lies on all devices, and each stage holds its own layers."""
    plan, *case = planned("mlp", mesh={"data": 2, "stage": 4}, compile=False)
    assert {each.strategy for each in plan.candidates} == {"pipeline", "pipeline+rounds=2"}
    assert plan.axes == ("data", "stage") and plan.batch.spec == P(("data", "stage"))
    state = follows(plan, *case)
    assert state["params"]["w"].sharding.spec == P("stage")
    assert {x.data.shape for x in state["params"]["w"].addressable_shards} == {(2, 16, 16)}
    assert {x.data.shape for x in state["opt"][0].trace["w"].addressable_shards} == {(2, 16, 16)}


def test_what_a_plan_says():
    plan, *_ = planned(
        "gpt",
        mesh={"data": 2, "stage": 4},
        strategy="pipeline+microbatches=4+rounds=2",
        devices="v5e:2x4",
        compile=False,
    )
    assert [(each.layers, each.backward) for each in plan.pipeline] == [(8, False), (8, True)]
    said = plan.explain()
    assert re.search(
        r"pipeline at blocks, forward: 4 stages of 2 layers each in 2 groups, 4 microbatches, "
        r"circular, 2 rounds: each stage waits 27.3% of the time \(3 of 11 turns\), and sends "
        r"[\d.]+ MiB per step \(estimated\)\n",
        said,
    )
    assert "pipeline at blocks, backward: 4 stages" in said
    assert "embeddings, heads and losses: the rows of the batch are split over all chips" in said
    sent = sum(each.sent for each in plan.pipeline)
    assert 0 < sent <= plan.chosen.ledger.sent


def test_meshes_of_the_strategy_pipeline():
    """All numbers of stages into which layers and devices can be divided are compared."""
    plan, *case = planned("mlp", strategy="pipeline", compile=False)
    stages = {(each.mesh["stage"], each.options.rounds) for each in plan.candidates}
    assert stages == {(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)}
    follows(plan, *case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ("pipeline", "pipeline+remat+microbatches=4+rounds=2"))
@pytest.mark.parametrize("case", ("gpt", "gqa", "vit", "recurrent", "dropout"))
def test_plans_of_models(case, strategy):
    with jax.enable_x64(True):
        options = dict(strategy=strategy, mesh={"data": 2, "stage": 4})
        plan, *case = planned(case, jnp.float64, **options)
        assert plan.strategy.startswith(strategy)
        follows(plan, *case, tolerance=1e-9)


def test_blocks_without_a_loop():
    plan, *case = planned("blocks", mesh={"data": 2, "stage": 4}, compile=False)
    assert [(each.layers, each.rolled) for each in plan.pipeline] == [(4, True)] * 2
    assert "the layers are blocks without a loop: their parameters are split over all" in str(plan)
    follows(plan, *case)


def test_on_other_meshes():
    """Explicit axes, and a mesh that is set around the plan."""
    mesh = jax.make_mesh((2, 4), ("data", "stage"))
    plan, *case = planned("mlp", mesh=mesh, compile=False)
    assert plan.mesh == mesh
    follows(plan, *case)
    plan, step, state, batch = planned("mlp", mesh={"data": 2, "stage": 4}, compile=False)
    state, batch = jax.tree.map(np.asarray, (state, batch))
    kinds = (AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "stage"), axis_types=kinds)):
        follows(plan, step, state, batch)


def test_longer_time_with_a_bubble():
    """The estimated time of a pipeline is that of all devices without bubbles, and the bubble."""
    options = dict(devices="v5e:2x4", compile=False)
    alone, *_ = planned("mlp", strategy="data", **options)
    plan, *_ = planned(
        "mlp", strategy="pipeline+microbatches=4", mesh={"data": 2, "stage": 4}, **options
    )
    once, twice = plan.candidates  # rounds: each stage waits 3 of 7 turns, or 3 of 11
    assert once.time.compute == pytest.approx(alone.chosen.time.compute * 7 / 4)
    assert twice.time.compute == pytest.approx(alone.chosen.time.compute * 11 / 8)


def test_names_of_strategies():
    assert str(Strategy("pipeline", remat=True, microbatches=4, rounds=2)) == (
        "pipeline+remat+microbatches=4+rounds=2"
    )
    with pytest.raises(ValueError, match=r"unknown strategy 'fsdp\+rounds=2'"):
        planned("mlp", strategy="fsdp+rounds=2")


def test_errors_name_the_axis():
    stages = {"data": 2, "stage": 4}
    with pytest.raises(
        ValueError, match=r"mesh axis 'stage' is for the stages .* got strategy 'fsdp'"
    ):
        planned("mlp", strategy="fsdp", mesh=stages)
    with pytest.raises(
        ValueError, match=r"needs a mesh axis 'stage' longer than 1.*got \{'data': 8\}"
    ):
        planned("mlp", strategy="pipeline", mesh={"data": 8})
    with pytest.raises(
        ValueError, match=r"8 layers are not a multiple of .* \(the mesh axis 'stage'"
    ):
        planned("mlp", strategy="pipeline+rounds=4", mesh=stages)
    with pytest.raises(ValueError, match="rules= cannot be combined with the stages of a pipeline"):
        planned("mlp", mesh=stages, rules={"w": (None, "stage")})
    step, state, batch = CASES["mlp"](jnp.float32, depth=7)
    with pytest.raises(ValueError, match=r"7 layers cannot be divided into equal stages on 8 dev"):
        parallel.plan(step, lambda key: state, batch, strategy="pipeline")
