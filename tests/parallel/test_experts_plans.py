"""Plans with the mesh axis "expert": shardings, transfers, statistics, choices and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import decoder, layer, mixtral, qwen3_moe, top_2_with_capacity, without_experts
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import parallel
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
MESH = {"data": 2, "expert": 4}


def planned(case, mesh=MESH, **options):
    options = {"devices": jax.devices(), "compile": False, "strategy": "fsdp+pins"} | options
    step, init, batch = case()
    return parallel.plan(step, init, batch, mesh=mesh, **options)


def wide(**options):
    """Has arrays that are not too small to be split."""
    return decoder(experts=8, experts_per_token=2, **options)


def test_kernels_of_experts_lie_apart_and_rows_on_all_devices():
    plan = planned(mixtral, strategy="data")
    blocks = plan.state.params["blocks"]
    assert {blocks[name].spec for name in ("gate", "up", "down")} == {P(None, "expert")}
    assert blocks["router"]["kernel"].spec == P()
    assert plan.batch["x"].spec == P(("data", "expert"))
    moments = plan.state.opt_state[0].trace["blocks"]
    assert moments["up"].spec == P(None, "expert")


def test_kernels_of_experts_are_split_further_over_the_other_axes():
    blocks = planned(qwen3_moe).state.params["blocks"]  # [2, 8, 16, 24]
    assert blocks["gate"].spec == P(None, "expert", None, "data")
    assert blocks["down"].spec == P(None, "expert", "data")


def test_tokens_travel_and_kernels_stay():
    """The compiled program has all-to-alls of the estimated size, and gathers nothing in the
    layers but numbers of tokens."""
    step, init, batch = layer(capacity=1.25)
    without_metrics = lambda state, batch: (step(state, batch)[0], {})
    plan = planned(lambda: (without_metrics, init, batch), strategy="data", compile=True)
    ledger = plan.chosen.ledger
    sent = {kind: [] for kind in ("all-to-all", "all-gather")}
    for each in ledger.transfers:
        sent.setdefault(each.collective, []).append(each)
    assert sum(each.bytes for each in sent["all-gather"]) < 2048
    estimated = [
        each for each in plan.chosen.estimate.ledger.transfers if each.collective == "all-to-all"
    ]
    usual = sum(each.sent for each in sent["all-to-all"])
    places, itemsize = 4 * 16, 4  # of each device, in float32
    assert usual == pytest.approx(sum(each.sent for each in estimated), rel=0.1)
    # To the experts and back, forward and backward, but the layer's input has no gradient; beside
    # the tokens, the numbers of their experts.
    assert usual == 0.75 * places * itemsize * (3 * 16 + 1)
    further = [each for each in sent["all-to-all"] if "further_rounds" in each.scope]
    assert further and {each.times for each in further} == {0}


def test_explain_says_what_travels():
    said = planned(mixtral).explain()
    assert (
        "2 x experts at blocks: 1 of 4 on each of 4 devices; tokens travel to them and back" in said
    )
    assert "with room for 1.5 times the mean load" in said
    assert "no rule uses the mesh axis" not in said


def test_the_load_of_experts_is_that_of_one_device():
    model = nn.MixtureOfExperts(8, 24, top_k=2, capacity=0.6)
    _, init, batch = top_2_with_capacity()

    def step(state, batch):
        def loss(params):
            y, seen = ft.capture(model, "load|dropped")(params, batch["x"])
            return jnp.square(y).mean(), seen

        grads, seen = jax.grad(loss, has_aux=True)(state.params)
        return state.replace(params=jax.tree.map(lambda p, g: p - g, state.params, grads)), seen

    plan = parallel.plan(step, init, batch, devices=jax.devices(), mesh=MESH, compile=False)
    state = plan.init(jax.random.key(0))
    _, expected = jax.jit(step)(init(jax.random.key(0)), batch)
    _, seen = plan.jit(step)(state, batch)
    np.testing.assert_array_equal(seen["load"], expected["load"])
    assert seen["load"].sum() == 2 * batch["x"].shape[0] * batch["x"].shape[1]
    assert 0.3 < seen["dropped"] == expected["dropped"] < 1


def test_the_strategy_chooses_the_mesh():
    step, init, batch = mixtral()
    plan = parallel.plan(step, init, batch, devices=jax.devices(), strategy="expert", compile=False)
    meshes = [dict(each.mesh) for each in plan.candidates]
    assert meshes == [MESH, {"data": 4, "expert": 2}]  # four experts
    assert plan.strategy == "expert" and dict(plan.mesh.shape) in meshes


def test_experts_lie_apart_by_themselves_if_nothing_else_fits():
    def large(experts):
        model = nn.MixtureOfExperts(experts, 15360)
        init = lambda key: {"params": model.init(key, jnp.zeros((1, 4096)))[0]}

        def step(state, x):
            grads = jax.grad(lambda params: jnp.square(model(params, x)).mean())(state["params"])
            return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, {}

        return step, init, jax.ShapeDtypeStruct((512, 4096), jnp.float32)

    few = parallel.plan(*large(4), devices="v5e:4x4", compile=False)
    assert not few.strategy.startswith("expert")
    many = parallel.plan(*large(48), devices="v5e:4x4", compile=False)
    assert many.strategy.startswith("expert")
    assert all(
        each.verdict.startswith("rejected")
        for each in many.candidates
        if not each.strategy.startswith("expert")
    )


def test_uneven_experts_are_an_error_that_names_the_axis():
    with pytest.raises(
        ValueError,
        match="MixtureOfExperts at the root: the mesh axis 'expert' has 4 devices, and 6 experts are "
        "not a multiple; use 8 experts, or expert=3",
    ):
        planned(lambda: layer(experts=6))
    with pytest.raises(
        ValueError, match=r"'expert' splits experts .* 5 experts have no divisor in common with 8"
    ):
        planned(lambda: layer(experts=5), None, strategy="expert")


def test_uneven_rows_are_an_error_that_names_the_axes():
    with pytest.raises(
        ValueError, match=r"12 rows, not a multiple of 8 devices \(data=2, expert=4\)"
    ):
        planned(lambda: layer(rows=12))


def test_errors():
    with pytest.raises(
        ValueError, match=r"splits the experts of nn\.MixtureOfExperts, and this step has none"
    ):
        planned(without_experts)
    with pytest.raises(
        ValueError, match="'expert' splits experts over devices, but the step has no"
    ):
        planned(without_experts, None, strategy="expert")
    with pytest.raises(
        ValueError, match="'expert' splits experts over the mesh axis 'expert'; the me"
    ):
        planned(mixtral, {"data": 8}, strategy="expert")
    with pytest.raises(ValueError, match="axes 'expert' and 'stage' cannot be combined"):
        planned(mixtral, {"data": 1, "stage": 2, "expert": 4}, strategy="pipeline")


def test_an_axis_of_explicit_type_is_the_users_own():
    from jax.sharding import AxisType

    kinds = (AxisType.Explicit, AxisType.Explicit)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=kinds)
    step, init, batch = mixtral()
    plan = parallel.plan(step, init, batch, mesh=mesh, strategy="data", compile=False)
    assert plan.axes == ("data",) and plan.experts is None
