"""plan and plan.jit: with every strategy the results of one device on eight, and the reasons for
the choice."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from plan_cases import TENSOR, cnn, flax, gpt, mlp, narrow, transformer

from fnet import models, parallel
from fnet import transforms as ft
from fnet.parallel import _compile, _drafts

pytestmark = pytest.mark.usefixtures("quickly")  # programs run a few times
CASES = {"gpt": gpt, "cnn": cnn, "flax": flax}


def error(got, want):
    """max|a - b| / max|b| of the worst leaf; one that vanishes but for rounding is measured by the
    largest."""
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    least = 1e-2 * max(np.abs(b).max() for b in want)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in zip(got, want))


@functools.cache
def on_one_device(name):
    """The initial state, and (state, metrics) after two steps."""
    step, init, batch = CASES[name]()
    plain, initial = jax.jit(step), jax.jit(init)(jax.random.key(0))
    return initial, plain(plain(initial, batch)[0], batch)


@pytest.mark.quick_cases("cnn-fsdp+pins+remat-options9")
@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        *(("gpt", strategy, {}) for strategy in ("zero1", "fsdp+pins")),
        ("gpt", "fsdp+pins", TENSOR),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (  # parts of the others
                ("gpt", "data", {}),
                ("gpt", "fsdp", {}),
                ("gpt", "zero1+microbatches=2", {}),
                ("flax", "zero1+remat", {}),
            )
        ),
        ("gpt", "fsdp+pins+remat+microbatches=2", TENSOR),
        ("gpt", "fsdp+pins", {"mesh": {"slice": 2, "data": 4}}),
        ("cnn", "fsdp+pins+remat", {}),
        ("flax", "fsdp+pins", {}),
    ],
)
def test_eight_devices_have_the_numbers_of_one(name, strategy, options):
    step, init, batch = CASES[name]()
    plan = parallel.plan(step, init, batch, strategy=strategy, compile=False, **options)
    assert plan.strategy.startswith(strategy)
    state, (initial, wanted) = plan.init(jax.random.key(0)), on_one_device(name)
    jax.tree.map(np.testing.assert_array_equal, state, initial)
    spread = plan.jit(step)
    for _ in range(2):
        given = state
        state, metrics = spread(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim)
    assert error((state, metrics), wanted) <= 1e-5
    assert jax.tree.map(lambda x: x.sharding, state) == plan.state
    split = [x for x in jax.tree.leaves(state) if not x.sharding.is_fully_replicated]
    model = [
        x
        for x in jax.tree.leaves(getattr(state, "params", state))
        if not x.sharding.is_fully_replicated
    ]
    if not options.get("rules"):
        assert bool(split) == (not strategy.startswith("data"))
        assert not strategy.startswith("zero1") or name == "flax" or not model
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert plan.chosen.persistent == held


@pytest.mark.exhaustive
def test_tensor_parallelism_splits_what_its_rules_name():
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="fsdp", compile=False, **TENSOR)
    specs = {
        jax.tree_util.keystr(path): tuple(where.spec)
        for path, where in jax.tree.leaves_with_path(plan.state)
    }
    assert specs[".params['blocks']['fc']['kernel']"] == (None, "data", "tensor")
    assert specs[".params['blocks']['proj']['kernel']"] == (None, "tensor", "data")
    sent = {
        transfer.scope: transfer
        for transfer in plan.chosen.estimate.ledger.transfers
        if transfer.collective == "all-reduce" and transfer.group == 2
    }
    assert {"blocks/proj", "blocks/attention/out"} <= set(sent)  # the sum of a layer's halves
    data = parallel.plan(step, init, batch, strategy="data", **TENSOR)
    (compiled,) = data.candidates
    wide = [each for each in compiled.ledger.transfers if each.group == 2 and each.scope in sent]
    assert wide and compiled.compiled.arguments == compiled.arguments


@pytest.mark.quick_cases("True-8-data")
@pytest.mark.parametrize("strategy", ["data", "fsdp+pins"])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("cast", [False, True])
def test_grouped_convolutions_beside_another_axis(groups, strategy, cast):
    """XLA would sum the gradient of the kernel over the axis "tensor", too."""
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 8 // groups, 8))

    def step(state, batch):
        def loss(kernel):
            y = lax.conv_general_dilated(
                batch,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )
            return jnp.square(y.astype(jnp.float32)).mean()

        value, gradient = jax.value_and_grad(ft.autocast(loss, "bfloat16") if cast else loss)(state)
        return state - gradient, {"loss": value}

    batch = jax.random.normal(jax.random.key(1), (8, 6, 6, 8))
    plan = parallel.plan(
        step, lambda key: kernel, batch, strategy=strategy, mesh=TENSOR["mesh"], compile=False
    )
    want, got = (
        jax.jit(step)(kernel, batch)[0],
        plan.jit(step)(plan.init(jax.random.key(0)), batch)[0],
    )
    near = 1e-2 if cast else 1e-5
    np.testing.assert_allclose(got, want, rtol=0, atol=near * float(jnp.abs(want - kernel).max()))


def test_logical_axes_make_rules():
    model = models.GPT(64, 64, 2, 2, context=16)  # as gpt()'s
    spec = model.spec(jnp.zeros((1, 16), jnp.int32))[0]
    rules = parallel.rules(spec, {"mlp": "tensor"})
    assert rules and all("tensor" in axes for axes in rules.values())
    step, init, batch = gpt()
    plan = parallel.plan(
        step, init, batch, strategy="data", compile=False, mesh=TENSOR["mesh"], rules=rules
    )
    assert "tensor" in plan.state.params["blocks"]["fc"]["kernel"].spec
    with pytest.raises(
        ValueError, match=re.escape("rules: no parameter has an axis named 'head'; there are ")
    ):
        parallel.rules(spec, {"head": "tensor"})


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("make", "pins"), [(transformer, True), (narrow, False)])
def test_pins_where_they_send_less(make, pins):
    plan = parallel.plan(*make(), strategy="fsdp")
    assert plan.pins == pins and {each.strategy for each in plan.candidates} == {
        "fsdp",
        "fsdp+pins",
    }
    sent = {each.strategy: each.ledger.sent for each in plan.candidates}
    assert (
        sent["fsdp+pins"] < 0.6 * sent["fsdp"] if pins else sent["fsdp"] < 0.5 * sent["fsdp+pins"]
    ), sent
    text = plan.explain()
    bases = ["exact", "compiled", "compiled", "estimated", "estimated"]
    assert text.splitlines()[4].split()[4:] == bases
    for each in plan.candidates:
        row = rf"^{re.escape(each.strategy)} .* {each.ledger.sent / 2**20:,.2f}  "
        assert re.search(row, text, re.M)
    assert re.search(r"sends \d\.\d\d times as much", text)


def test_estimates_beside_compiled_numbers_are_marked():
    plan = parallel.plan(*mlp())
    first, *others = plan.candidates
    mixed = dataclasses.replace(
        plan, candidates=(dataclasses.replace(first, compiled=None), *others)
    )
    known, estimate, compiled = mixed.explain().splitlines()[4:7]
    assert known.split()[4:] == ["exact", *["compiled,", "~est."] * 2, *["estimated"] * 2]
    assert estimate.count("~") == 2 and "~" not in compiled
    whole = dataclasses.replace(plan, candidates=(dataclasses.replace(first, persistent=2**30),))
    assert whole.explain().splitlines()[5].split()[1] == "1,024"  # MiB; 99.99 keeps its decimals


def limited(monkeypatch, limit):
    """Plans for devices of so much memory."""
    made = _drafts.Drafts.__init__

    def init(self, *args):
        made(self, *args)
        self.memory = limit

    monkeypatch.setattr(_drafts.Drafts, "__init__", init)


def test_least_is_sent_of_what_fits(monkeypatch):
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch)
    peaks = {each.strategy: each.peak for each in plan.candidates}
    assert plan.strategy == "data" and not plan.pins and peaks["data"] == max(peaks.values())
    lines = plan.explain().splitlines()
    assert re.match(r"8 x .*: data, every chip holds the whole state", lines[0])
    assert "chosen: sends least of what fits" in next(
        line for line in lines if line.startswith("data ")
    )
    limited(monkeypatch, (peaks["data"] - 1) / _drafts.ROOM)
    tight = parallel.plan(step, init, batch)
    assert tight.strategy != "data" and "remat" not in tight.strategy
    assert tight.candidates[0].verdict.startswith("rejected: over 92% of")


def test_rungs_are_climbed_where_nothing_fits(monkeypatch):
    def init(key):
        return {"params": [jnp.zeros((64, 64))] * 16}

    def step(state, batch, *, microbatches=1):
        def loss(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.square(x).mean()

        value, grads = ft.microbatch(jax.value_and_grad(loss), microbatches)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    batch = jax.ShapeDtypeStruct((1 << 16, 64), jnp.float32)
    planned = functools.partial(parallel.plan, step, init, batch, compile=False)
    least = lambda plan: min(each.peak for each in plan.candidates)
    limited(monkeypatch, least(planned()) / _drafts.ROOM - 1)
    plan = planned()
    assert plan.options.remat and plan.options.microbatches == 1
    assert all(
        each.verdict.startswith("rejected") for each in plan.candidates if not each.options.remat
    )
    limited(monkeypatch, least(plan) / _drafts.ROOM - 1)
    plan = planned()
    assert plan.options.remat and f"+microbatches={plan.options.microbatches}" in plan.explain()
    assert plan.chosen.ledger.sent
    limited(monkeypatch, 1024)
    said = (
        r"plan: nothing fits into .* GiB on each of 8 x .*; .* needs least, .* GiB \(estimated\); "
        r"use a "
        r"smaller batch, .* or more devices\. Its largest arrays \(estimated\): .* at \w+\.py:\d+ "
        r"\("
    )
    with pytest.raises(ValueError, match=said):
        planned()


def test_what_is_split_and_what_is_not():
    step, init, batch = gpt()
    plan = parallel.plan(step, init, batch, strategy="fsdp+pins")
    specs = {
        jax.tree_util.keystr(path): tuple(where.spec)
        for path, where in jax.tree.leaves_with_path(plan.state)
    }
    up = ".params['blocks']['fc']['kernel']"
    assert specs[up] == (
        None,
        None,
        "data",
    )  # [depth, width, 4 width], whose first axis a scan goes over
    trace = next(
        name for name in specs if name.endswith("['blocks']['fc']['kernel']") and name != up
    )
    assert specs[trace] == specs[up]  # the momentum
    whole = {path: why for path, _, why in plan.replicated}
    assert whole[".step"] == "small" and "replicated: .step [] (small)" in plan.explain()
    odd = parallel.plan(
        lambda s, b: ((s[0] * b.mean(),), 0.0),
        lambda key: (jnp.ones((81, 81)),),
        jnp.ones(8),
        strategy="fsdp",
    )
    assert odd.replicated == (("[0]", (81, 81), "no axis of [81, 81] is a multiple of 8"),)


@pytest.mark.exhaustive
def test_a_state_that_exists_is_copied():
    step, init, batch = mlp()
    plan = parallel.plan(step, init, batch, strategy="data")
    mine = jax.jit(init)(jax.random.key(0))
    plan.jit(step)(plan.place(mine), np.ones(batch.shape, np.float32))
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))


@pytest.mark.exhaustive
def test_some_devices():
    step, init, batch = narrow()
    plan = parallel.plan(step, init, batch, devices=jax.devices()[:2], strategy="fsdp")
    assert plan.mesh.shape == {"data": 2} and plan.explain().startswith("2 x ")


def test_what_takes_long_is_announced():
    step, init, batch = narrow()
    stages = []
    parallel.plan(step, init, batch, strategy="fsdp", announce=stages.append)
    assert stages[:3] == ["tracing the step", "estimating fsdp", "estimating fsdp+pins"]
    assert sorted(stages[3:]) == [
        "checking how XLA divides the operations",
        "compiling fsdp (2 of 2)",
        "compiling fsdp+pins (1 of 2)",
    ]


def test_what_the_compiler_refuses_is_rejected(monkeypatch):
    step, init, batch = narrow()

    def compiled(spread, *args):
        return _compile.Compiled(0, None, None, "RESOURCE_EXHAUSTED: Ran out of memory")

    monkeypatch.setattr(_compile, "compiled", compiled)
    with pytest.raises(ValueError, match="nothing fits"):
        parallel.plan(step, init, batch)


def test_a_step_that_reads_nothing():
    plan = parallel.plan(
        lambda state, batch: (state, {}),
        lambda key: {"a": jnp.ones(3)},
        np.ones((8, 2)),
        devices="h100:8",
        compile=False,
    )
    assert "inf" not in plan.explain()


def test_an_axis_that_no_rule_names():
    """Its devices do the same work, and the time says so."""
    step, init, batch = narrow()
    plan = parallel.plan(step, init, batch, mesh={"tensor": 4}, compile=False, strategy="data")
    assert dict(plan.mesh.shape) == {"data": 2, "tensor": 4}
    assert (
        "no rule uses the mesh axis tensor, so the 4 devices along it do the same work"
        in plan.explain()
    )
    named = parallel.plan(
        step,
        init,
        batch,
        mesh={"tensor": 4},
        rules={".": (None, "tensor")},
        compile=False,
        strategy="data",
    )
    assert "no rule uses" not in named.explain()
    assert named.chosen.time.compute == pytest.approx(plan.chosen.time.compute / 4)
