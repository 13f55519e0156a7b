"""Plans with the mesh axis "context": shardings, choices, errors and estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_cases import by_hand, chunked, gpt, language_model, llama, packed, shifted, tokens, vit
from jax.sharding import PartitionSpec as P

from fnet import models, parallel
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
MESH = {"data": 2, "context": 4}


def planned(case, mesh=MESH, **options):
    options = {"devices": jax.devices(), "compile": False, "strategy": "fsdp+pins"} | options
    step, init, batch = case()
    return parallel.plan(step, init, batch, mesh=mesh, **options)


def long_texts(rows, time):
    """A step of texts that have activations of many GiB, each of them alone."""
    model = models.GPT(64, 1024, 4, 8, context=time)
    init = lambda key: {"params": model.init(key, model.example())[0]}

    def step(state, tokens, *, microbatches=1):
        def loss(params, tokens):
            return model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()

        grads = ft.microbatch(jax.grad(loss), microbatches)(state["params"], tokens)
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, {}

    return step, init, jax.ShapeDtypeStruct((rows, time + 1), jnp.int32)


def test_time_of_the_batch_is_split():
    plan = planned(packed)
    assert {name: place.spec for name, place in plan.batch.items()} == dict.fromkeys(
        ("tokens", "segments", "positions"), P("data", "context")
    ) | {"positions": P("data")}  # which the step does not read
    assert "positions" in plan.unused[0]


def test_parameters_are_split_over_all_devices():
    plan = planned(lambda: language_model(models.GPT(256, 64, 1, 4, context=64)))
    assert plan.state.params["embed"]["embedding"].spec == P(("data", "context"))
    whole = planned(gpt, strategy="data").state
    assert all(place.is_fully_replicated for place in jax.tree.leaves(whole))


def test_tokens_with_one_more_than_the_devices_divide_are_whole():
    plan = planned(gpt)
    assert plan.batch["tokens"].spec == P("data")
    said = plan.explain()
    assert "batch['tokens'] [2, 33] is not split along time: 33 is not a multiple of 4" in said
    assert planned(shifted).batch["tokens"].spec == P("data", "context")


def test_explain_says_how_attention_is_computed_and_why():
    said = planned(llama).explain()
    assert "forward attention over 32 positions in 4 parts: ulysses (" in said
    ring = planned(llama, {"data": 1, "context": 8}).explain()
    assert "ring (" in ring and "no ulysses: 4 key/value heads are not a multiple of 8" in ring
    assert "in zigzag, so that all devices have equal work" in ring
    assert "(padded to 32)" in planned(shifted).explain()
    assert "is written by hand, so XLA gathers the keys" in planned(by_hand).explain()


def test_images_are_split_where_they_become_patches():
    plan = planned(vit)
    assert plan.batch.spec == P("data")
    assert "attention over 65 positions in 4 parts (padded to 68)" in plan.explain()


def test_an_uneven_time_is_one_error_that_names_the_axis():
    step, init, _ = gpt()
    with pytest.raises(ValueError) as error:
        parallel.plan(
            step,
            init,
            {"tokens": tokens(2, 42)},
            devices=jax.devices(),
            mesh={"data": 1, "context": 8},
        )
    assert str(error.value) == (
        "plan: the mesh axis 'context' has 8 devices, but attention runs over 41 positions (axis 1 "
        "of batch['tokens']), which is not a multiple; use 48 positions, or context=4"
    )


def test_a_batch_of_another_time_is_an_error_that_names_the_axis():
    plan = planned(packed)
    _, init, batch = packed()
    state = jax.eval_shape(init, jax.random.key(0))
    assert plan.objection(state, batch) is None
    assert plan.objection(state, jax.tree.map(lambda x: x[:, :30], batch)) == (
        "batch['segments'] of shape (2, 30) has 30 positions, not a multiple of the 4 devices of the "
        "mesh axis 'context'"
    )


def test_a_step_without_attention_is_an_error():
    step = lambda state, x: ({"params": state["params"] + (x @ state["params"]).mean()}, {})
    init = lambda key: {"params": jnp.ones((8,))}
    with pytest.raises(
        ValueError, match=r"'context' splits the time .* no attention of a text on itself"
    ):
        parallel.plan(step, init, np.ones((8, 16, 8), np.float32), devices=jax.devices(), mesh=MESH)


@pytest.mark.exhaustive
def test_activations_stay_split():
    """No device holds the activations of all of time."""
    options = {"compile": True, "strategy": "data"}
    whole = planned(chunked, {"data": 1}, devices=jax.devices()[:1], **options)
    split = planned(chunked, {"data": 1, "context": 8}, **options)
    activations = lambda plan: plan.chosen.compiled.peak - plan.chosen.compiled.arguments
    assert activations(split) < activations(whole) / 4


def test_the_strategy_chooses_the_mesh():
    step, init, batch = packed()
    plan = parallel.plan(
        step, init, batch, devices=jax.devices(), strategy="context", compile=False
    )
    assert plan.strategy == "context" and dict(plan.mesh.shape) in (
        {"data": 2, "context": 4},
        {"data": 1, "context": 8},
    )
    assert [dict(each.mesh) for each in plan.candidates] == [MESH, {"data": 1, "context": 8}]


def test_time_is_split_by_itself_if_the_devices_cannot_share_the_rows():
    step, init, batch = packed()  # of two rows
    plan = parallel.plan(step, init, batch, devices=jax.devices(), compile=False)
    assert plan.strategy == "context"


def test_time_is_split_by_itself_if_the_activations_of_one_text_do_not_fit():
    options = {"devices": "v5e:2x4", "compile": False}
    assert not parallel.plan(*long_texts(8, 1 << 12), **options).strategy.startswith("context")

    plan = parallel.plan(*long_texts(8, 1 << 18), **options)
    assert plan.strategy.startswith("context+remat+microbatches=")
    rejected = [each for each in plan.candidates if each.verdict.startswith("rejected")]
    assert "fsdp+pins+remat" in [each.strategy for each in rejected]


def test_errors_of_the_strategy():
    step, init, batch = packed()
    with pytest.raises(
        ValueError, match=r"strategy 'context' .* the mesh has the axes data, tensor"
    ):
        planned(packed, {"data": 4, "tensor": 2}, strategy="context")
    with pytest.raises(ValueError, match=r"'context' and 'stage' cannot be combined"):
        planned(packed, {"data": 1, "stage": 2, "context": 4}, strategy="auto")
    with pytest.raises(ValueError, match=r"1 devices cannot share|cannot share 2 rows"):
        parallel.plan(step, init, batch, devices=jax.devices()[:1], strategy="context")
