"""Training steps whose experts lie on different devices have the losses, gradients and parameters
of one device."""

import jax
import pytest
from checks import sampled
from expert_cases import CASES, mixtral_with_capacity, packed, qwen3_moe, top_2, top_2_with_capacity
from one_device import compared, in_float64

from fnet.layers import _experts_apart

pytestmark = pytest.mark.usefixtures("quickly", "standard_promotion")
MESH = {"data": 2, "expert": 4}
MESHES = {
    "8": {"data": 1, "expert": 8},
    "4x2": {"data": 4, "expert": 2},
    "context": {"data": 2, "context": 2, "expert": 2},
    "tensor": {"data": 2, "tensor": 2, "expert": 2},
}


@pytest.mark.parametrize("name", sampled(CASES, ["packed", "top_1_with_capacity"]))
def test_a_step_has_the_gradients_of_one_device(name):
    compared(CASES[name], MESH, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_a_step_in_float64_has_the_gradients_of_one_device(name):
    with jax.enable_x64(True):
        compared(CASES[name], MESH, 1e-9, cast=in_float64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", [qwen3_moe, top_2_with_capacity])
def test_meshes(mesh, case):
    if mesh == "context" and case is top_2_with_capacity:
        pytest.skip("a step without attention has no time to split")
    with jax.enable_x64(True):
        compared(case, MESHES[mesh], 1e-9, cast=in_float64)


@pytest.mark.exhaustive
def test_a_capacity_is_filled_in_the_order_of_the_batch_if_time_is_split():
    with jax.enable_x64(True):
        compared(packed, MESHES["context"], 1e-9, cast=in_float64)


@pytest.mark.parametrize("case", [top_2, top_2_with_capacity])
def test_tokens_for_which_a_round_has_no_place_travel_in_further_rounds(case, monkeypatch):
    monkeypatch.setattr(_experts_apart, "ROOM", 0.1)  # eight places
    compared(case, MESH, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp", "expert", "expert+remat"])
def test_strategies(strategy):
    plan = compared(mixtral_with_capacity, MESH, 1e-5, strategy)
    assert plan.strategy.startswith(strategy)


@pytest.mark.exhaustive
def test_microbatches():
    """Each slice has a capacity of its own, as on one device."""
    step, init, batch = top_2_with_capacity()
    batch = {"x": batch["x"].repeat(2, 0)}

    def sliced(state, batch, *, microbatches=2):
        return step(state, batch, microbatches=microbatches)

    compared(lambda: (sliced, init, batch), MESH, 1e-5, "expert+microbatches=2")
