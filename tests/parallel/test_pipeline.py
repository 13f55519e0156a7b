"""Pipelines of layers: the numbers of one device, whatever the schedule."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from checks import close, sampled
from jax import lax
from jax.sharding import AxisType
from pipeline_cases import CASES, ROWS, UNROLLED, certain, trained

from fnet import layers as nn
from fnet.parallel._pipeline import Schedule, pipelined, schedule

SCHEDULES = {  # (data, stage), microbatches, rounds
    f"{data}x{stage} m{microbatches} v{rounds}": ((data, stage), microbatches, rounds)
    for (data, stage), microbatches, rounds in itertools.product(
        [(1, 8), (2, 4), (4, 2)], (2, 4, 8), (1, 2)
    )
    if ROWS // data % microbatches == 0
    and (rounds == 1 or (microbatches >= stage and rounds * stage <= 8))
}


def mesh_of(data, stage):
    return jax.make_mesh((data, stage), ("data", "stage"), axis_types=(AxisType.Auto,) * 2)


def compared(case, mesh, run=None, *, dtype=jnp.float64, tolerance=1e-9, **options):
    """`run` of a step, by default two steps, on the stages, compared with one device."""
    with jax.enable_x64(dtype == jnp.float64):
        step, state, batch = {**CASES, **UNROLLED}[case](dtype)
        records = []
        spread = pipelined(step, mesh_of(*mesh), record=records.append, **options)
        got, want = (certain(jax.jit((run or twice)(f))(state, batch)) for f in (spread, step))
        close(got, want, tolerance)
    return records


def twice(step):
    """The loss and the gradients of a step, and the parameters after two."""

    def run(state, batch):
        state, metrics = step(state, batch)
        state, _ = step(state, batch)
        return {"params": state["params"], **metrics}

    return run


def once(step):
    """The loss and the gradients of a step."""
    return lambda state, batch: step(state, batch)[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", sampled(CASES, ("mlp", "counted", "keyed", "context")))
def test_equal_to_one_device(case):
    records = compared(case, (2, 4), microbatches=4)
    assert {each.backward for each in records} == {False, True}
    assert {each.layers for each in records} == {8}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", sampled(CASES, ("checkpoint", "dropout")))
def test_equal_to_one_device_in_rounds(case):
    compared(case, (4, 2), microbatches=2, rounds=2)


@pytest.mark.parametrize("case", sampled(UNROLLED, ("blocks",)))
def test_blocks_without_a_loop(case):
    records = compared(case, (2, 4), microbatches=4)
    assert [(each.layers, each.rolled) for each in records[:2]] == [(4, True)] * 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled(SCHEDULES, ("1x8 m8 v1", "2x4 m8 v2", "4x2 m2 v1")))
@pytest.mark.parametrize("case", sampled(("mlp", "gpt"), ("mlp",)))
def test_schedules(case, name):
    mesh, microbatches, rounds = SCHEDULES[name]
    (forward, *_) = compared(case, mesh, microbatches=microbatches, rounds=rounds)
    assert forward.schedule == Schedule(mesh[1], microbatches, rounds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", sampled(CASES, ("gpt",)))
def test_equal_to_one_device_in_float32(case):
    compared(case, (2, 4), once, dtype=jnp.float32, tolerance=1e-5)


def test_bubble():
    """Of 4 stages and 8 microbatches, each waits 3 of 11 turns, and 3 of 19 with two rounds."""
    assert Schedule(4, 8).bubble == 3 / 11 and Schedule(4, 8, 2).bubble == 3 / 19
    assert schedule(4, 64, over=2) == Schedule(4, 16)
    assert schedule(4, 24, over=2) == Schedule(4, 12)


# Errors.


def refused(step, state, batch, mesh=(2, 4), **options):
    with pytest.raises(ValueError) as error:
        jax.eval_shape(pipelined(step, mesh_of(*mesh), **options), state, batch)
    return str(error.value)


def test_layers_must_be_a_multiple_of_the_stages():
    step, state, batch = CASES["mlp"](jnp.float32, depth=6)
    assert refused(step, state, batch).startswith(
        "pipeline: 6 layers are not a multiple of 4 stages (the mesh axis 'stage' of length 4); "
        "use a mesh axis of length 2 or 3 or 6"
    )
    assert "of 2 groups on each of 2 stages" in refused(step, state, batch, (4, 2), rounds=2)


def test_rows_must_be_a_multiple_of_devices_and_of_microbatches():
    step, state, batch = CASES["mlp"](jnp.float32)
    assert refused(step, state, batch[:12]).startswith(
        "pipeline: 12 rows are not a multiple of 8 devices, 2 along 'data' times 4 along 'stage'"
    )
    assert refused(step, state, batch, microbatches=3).startswith(
        "pipeline: 8 rows on each device along 'data' (of 16) are not a multiple of 3 "
        "microbatches; use microbatches=2"
    )
    assert "at least as many microbatches as stages, 4; got 2" in refused(
        step, state, batch, microbatches=2, rounds=2
    )


def test_a_step_without_layers():
    step, state, batch = trained(
        lambda params, x: jnp.square(x @ params).mean(),
        jnp.ones((4, 4)),
        jnp.ones((16, 4)),
        "float32",
    )
    assert "the step has no layers: neither a lax.scan whose carry" in refused(step, state, batch)


def layers_of(function):
    """A step whose layers are `function(x, w) -> x`."""
    params = jax.random.normal(jax.random.key(0), (8, 16, 16)) / 4
    x = jax.random.normal(jax.random.key(1), (ROWS, 16))

    def loss(params, x):
        return jnp.square(lax.scan(lambda x, w: (function(x, w), None), x, params)[0]).mean()

    return trained(loss, params, x, "float32")


def normalized(x, w):
    with jax.named_scope("norm"):
        return (x - x.mean(0, keepdims=True)) @ w


NOT_BY_ROWS = {
    "statistics": (normalized, "'sub' at 'norm' (test_pipeline.py", "combines each row with a sum"),
    "maximum": (lambda x, w: x @ w / x.max(0, keepdims=True), "", "the maximum over it is taken"),
    "sort": (lambda x, w: jnp.sort(x @ w, axis=0), "'sort'", "needs all rows at once: sorted"),
    "cumsum": (lambda x, w: jnp.cumsum(x @ w, axis=0), "", "needs all rows at once: accumulated"),
    "flip": (lambda x, w: (x @ w)[::-1], "'rev'", "needs all rows at once: reversed"),
    "rows": (lambda x, w: x @ x.T @ x @ w, "'dot_general'", "combines rows with other rows"),
    "behind": (lambda x, w: jnp.stack([x, x @ w]).reshape(-1, 16)[:ROWS], "", "axis of rows"),
    "branch": (
        lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
        "",
        "needs all rows at once",
    ),
    "square of a sum": (lambda x, w: x @ w + jnp.square(x.sum()), "", "not linear in a sum"),
}


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_layers_that_need_all_rows(name):
    function, where, why = NOT_BY_ROWS[name]
    said = refused(*layers_of(function))
    assert said.startswith("pipeline: the layers cannot be computed for some rows of the batch")
    assert where in said and why in said, said


def test_batchnorm_is_refused_by_name():
    block = nn.Residual(nn.Dense(16), nn.BatchNorm())
    model = nn.Stack(block, 8)
    x = jnp.ones((ROWS, 16))
    params, state = model.init(jax.random.key(0), x)
    loss = lambda params, x: jnp.square(model(params, x, state=state, train=True)[0]).mean()
    said = refused(*trained(loss, params, x, "float32"))
    assert "at '1' (_norm.py" in said
