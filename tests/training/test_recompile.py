"""What fit says of steps that are compiled again, and of those that run out of memory."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import hardware as hw
from fnet import layers as nn
from fnet import parallel
from fnet import training as tr
from fnet.parallel import _drafts
from fnet.training.loop._recompile import Arguments

TX = optax.sgd(0.1)
TRACES = []


def step(state, batch):
    TRACES.append(None)
    value, grads = jax.value_and_grad(lambda p: (p["w"] * batch["x"].astype(jnp.float32)).sum())(
        state.params
    )
    return state.apply(TX, grads), {"loss": value}


def lines(batches, steps, state=None, **options):
    out = io.StringIO()
    state = tr.TrainState.create({"w": jnp.zeros(())}, TX) if state is None else state
    tr.fit(
        step,
        state,
        batches,
        steps=steps,
        progress=tr.Progress(out, bar=False),
        tune=False,
        **options,
    )
    return [line for line in out.getvalue().splitlines() if "compiled again" in line]


@pytest.mark.exhaustive
def test_each_cause_is_reported_once():
    shapes = [4, 4, 2, 4, 2, 3, 4]
    found = lines(lambda i: {"x": np.ones(shapes[i], np.float32)}, 7)
    assert found == [
        "step 3 is compiled again: batch/x was float32[4], is float32[2]",
        "step 6 is compiled again: batch/x was float32[2], is float32[3]",
    ]


@pytest.mark.exhaustive
def test_reports_are_compilations():
    def traced(batches, steps):
        TRACES.clear()
        return len(lines(batches, steps)), len(TRACES)

    reports, once = traced(lambda i: {"x": np.ones(4, np.float32)}, 5)
    again, more = traced(lambda i: {"x": np.ones(4 if i < 3 else 5, np.float32)}, 5)
    assert (reports, again, more - once) == (0, 1, 1)


def test_dtypes_structures_and_static_values():
    assert lines(lambda i: {"x": np.ones(2, np.float32 if i else np.int32)}, 2) == [
        "step 2 is compiled again: batch/x was int32[2], is float32[2]"
    ]
    extra = lambda i: {"x": np.ones(2, np.float32)} | ({"y": np.ones(1)} if i else {})
    assert lines(extra, 2) == [
        "step 2 is compiled again: batch: its structure or a static value was {'x': *}, is "
        "{'x': *, 'y': *}"
    ]

    watch = Arguments("batch")
    parts = [jax.tree_util.Partial(max, np.ones(2)), jax.tree_util.Partial(min, np.ones(2))]
    assert watch.changed(parts[0]) is None
    assert re.fullmatch(
        r"batch: its structure or a static value was .*max.*, is .*min.*", watch.changed(parts[1])
    )
    assert watch.changed(parts[0]) is None


def test_a_weakly_typed_state():
    state = tr.TrainState.create({"w": jnp.asarray(0.0)}, TX)
    assert state.params["w"].weak_type
    found = lines(lambda i: {"x": np.ones(2, np.float32)}, 3, state)
    assert found in (
        [],
        ["step 2 is compiled again: state/params/w was float32[] (weakly typed), is float32[]"],
    )


@pytest.mark.exhaustive
def test_shapes_that_never_repeat():
    found = lines(lambda i: {"x": np.ones(i + 1, np.float32)}, 12)
    assert len(found) == 8 and found[-1].endswith(
        "is float32[9]; further shapes of batch/x are not reported: pad it to a few fixed ones"
    )


# Memory. XLA raises the true error: one array needs 2^48 bytes, more than the addresses of a
# process.

WIDTH, ROWS = 2**23, 2**23
MODEL = nn.Sequential(
    wide=nn.Dense(WIDTH, use_bias=False), act=jnp.sin, head=nn.Dense(1, use_bias=False)
)


def wide_step(state, batch):
    def loss(params):
        return jnp.sort(MODEL(params, batch["x"]), axis=0).sum()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads), {"loss": value}


def needs(rows):
    """Bytes of the two largest arrays of the step: the wide layer's output and its cotangent."""
    return 2 * rows * WIDTH * 4


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(what the error says, its cause)."""
    params, _ = MODEL.init(jax.random.key(0), jnp.zeros((1, 1)))
    batch = {"x": np.ones((ROWS, 1), np.float32)}
    with pytest.raises(tr.OutOfMemory) as raised:
        tr.fit(
            wide_step,
            tr.TrainState.create(params, TX),
            lambda i: batch,
            steps=2,
            tune=False,
            workdir=tmp_path_factory.mktemp("run"),
            config={},
        )
    return str(raised.value), raised.value.__cause__


def test_running_out_of_memory_names_the_largest_arrays(report):
    text, cause = report
    assert isinstance(cause, jax.errors.JaxRuntimeError)
    first, *rest = text.splitlines()
    assert re.fullmatch(
        r"the first step ran out of memory \(RESOURCE_EXHAUSTED: Out of memory .*\)", first
    )
    assert re.search(rf"GiB  float32\[{ROWS},{WIDTH}\] of (\w+/)*wide.* \(estimated\)\n", text)
    assert re.search(rf"\n +32.0 MiB  float32\[1, {WIDTH}\] params/wide/kernel\n", text)
    advice = "Use a smaller batch, ft.microbatch, ft.rematerialize, or more devices (parallel.plan)"
    assert rest[-2] == advice
    assert re.fullmatch(r"`fnet reduce \S+` reduces the step to a short script", rest[-1])


def test_the_largest_batch_that_fits(report):
    text, _ = report
    found = re.search(
        r"the largest batch that fits: (\d+) \(estimated\); this batch has (\d+)", text
    )
    fits, memory = int(found[1]), hw.detect().per_device.memory_bytes  # of eight
    assert int(found[2]) == ROWS
    assert 0.7 * memory < needs(fits) < memory


def test_an_evaluation_that_runs_out_of_memory():
    def evaluation(state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    text = (
        r"the evaluation 'test' ran out of memory \(RESOURCE_EXHAUSTED: Out of memory allocating "
        r"123 bytes\.\)\n"
        r"  largest arrays of the state and batch:\n( +0\.0 MiB  .*\n)+Use a smaller batch_size in "
        r"tr\.evaluator"
    )
    with pytest.raises(tr.OutOfMemory) as raised:
        lines(lambda i: {"x": np.ones(2, np.float32)}, 2, evaluate={"test": evaluation})
    assert re.fullmatch(text, str(raised.value))


def test_other_errors_of_xla_are_raised_as_they_are():
    def evaluation(state):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: something else"):
        lines(lambda i: {"x": np.ones(2, np.float32)}, 2, evaluate={"test": evaluation})


@pytest.fixture
def planned(monkeypatch):
    """(plan on two devices, initial state) of a step that does not fit, which planning itself would
    refuse."""
    monkeypatch.setattr(_drafts, "ROOM", 1e9)
    init = lambda key: tr.TrainState.create(MODEL.init(key, jnp.zeros((1, 1)))[0], TX)
    plan = parallel.plan(
        wide_step,
        init,
        {"x": np.ones((ROWS, 1), np.float32)},
        devices=jax.devices()[:2],
        strategy="zero1",
        compile=False,
    )
    return plan, plan.init(jax.random.key(0))


def test_out_of_memory_under_a_plan(planned):
    """All numbers are those of one device, and the batch is a multiple of the devices."""
    plan, state = planned
    with pytest.raises(tr.OutOfMemory) as raised:
        tr.fit(
            wide_step,
            state,
            lambda i: {"x": np.ones((ROWS, 1), np.float32)},
            steps=2,
            tune=False,
            plan=plan,
        )
    text, memory = str(raised.value), hw.detect().per_device.memory_bytes
    assert re.match(
        r"the first step ran out of memory \(RESOURCE_EXHAUSTED: .*\)\n  the step needs [\d,.]+ "
        r"GiB on "
        r"each device \(estimated\), and each device has [\d,.]+ GiB\n",
        text,
    ), text
    fits, given = map(
        int,
        re.search(
            r"batch that fits: (\d+) \(estimated, a multiple of 2\); this batch has (\d+)", text
        ).groups(),
    )
    assert (
        given == ROWS and fits % 2 == 0 and 0.5 * memory < needs(fits) / 2 < memory
    )  # a sort mixes the rows
    assert re.search(r"\n  largest arrays on each device:\n", text)
    assert re.search(rf"\n +32.0 MiB  float32\[1, {WIDTH}\] params/wide/kernel\n", text), text
    assert text.endswith("or more devices (parallel.plan)")


def test_an_evaluation_under_a_plan():
    def evaluation(state):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.")

    init = lambda key: tr.TrainState.create({"w": jnp.zeros(())}, TX)
    batch = {"x": np.ones(2**18, np.float32)}
    plan = parallel.plan(step, init, batch, devices=jax.devices()[:2])
    with pytest.raises(
        tr.OutOfMemory,
        match=r"arrays of the state and batch on each device:\n +0.5 MiB  "
        r"float32\[131072\] batch/x\n",
    ):
        lines(
            lambda i: batch,
            2,
            plan.init(jax.random.key(0)),
            plan=plan,
            evaluate={"test": evaluation},
        )
