"""profile: times by path and phase, of JAX's own profiler."""

import functools
import gzip
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from fnet import introspect
from fnet import layers as nn
from fnet import transforms as ft
from fnet.introspect import _hlo, _profile, _protobuf, _trace
from fnet.introspect._hlo import Operation

N = 384
BLOCK = nn.Sequential(up=nn.Dense(2 * N), act=jax.nn.gelu, down=nn.Dense(N))
MODEL = nn.Sequential(stem=nn.Dense(N), blocks=nn.Stack(nn.Remat(BLOCK), 3), head=nn.Dense(8))
X = jnp.ones((128, N))
PARAMS, _ = MODEL.init(jax.random.key(0), X)
TX = optax.adam(1e-3)


def train(params, opt_state, x):
    value, grads = jax.value_and_grad(lambda params: jnp.square(MODEL(params, x)).mean())(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


@pytest.fixture(scope="module")
def trained():
    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(train, donate_argnums=(0, 1))
        return introspect.profile(step, PARAMS, TX.init(PARAMS), X, repeats=4)


def test_paths_phases_and_sums(trained):
    """Each path has the phases that its computation has, and the parts sum to the whole."""
    blocks = trained["blocks"].seconds
    assert {"forward", "backward", "recomputed"} <= blocks.keys() and blocks["backward"] > blocks[
        "forward"
    ] / 4
    assert trained.total.seconds["optimizer"] > 0
    assert set(trained["stem"].seconds) <= {"forward", "backward", "optimizer"}
    tops = [row for row in trained.rows if "/" not in row.path]
    assert sum(row.total for row in tops) == pytest.approx(trained.total.total)
    assert trained["blocks"].total >= trained["blocks/up"].total + trained["blocks/down"].total
    assert (
        0 < trained.coverage <= 1 + 1e-9 and 0 <= trained.spanning <= 1 and trained.steps in (2, 3)
    )
    assert trained["blocks"].total > trained["head"].total  # 200 times the FLOPs
    with pytest.raises(KeyError, match="the profile has no path 'block'; it has 'stem'"):
        trained["block"]


def test_flops_beside_the_times_are_those_of_the_summary(trained):
    whole = introspect.summary(lambda params, x: jnp.square(MODEL(params, x)).mean(), PARAMS, X)
    for path in ("blocks/up", "head"):
        row = whole[path]
        assert trained[path].cost.matmul == row.forward.matmul + row.backward.matmul
    assert trained["blocks"].bound > trained["head"].bound > 0


def test_forms(trained, tmp_path):
    text, rows = str(trained), trained.data()
    assert text.splitlines()[0].split()[:4] == ["path", "forward", "ms", "backward"]
    assert (
        "recomputed ms" in text
        and "outside of operations" in text
        and "in fusions of several paths" in text
    )
    assert rows[-1]["path"] == "" and rows[-1]["seconds"] == pytest.approx(trained.total.total)
    assert all(
        row["seconds"] == pytest.approx(sum(row[phase] for phase in _hlo.PHASES)) for row in rows
    )
    assert (
        trained.markdown().startswith("| path | forward ms")
        and "<td>blocks/up</td>" in trained._repr_html_()
    )
    json.dumps(rows)
    trained.trace.save(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"step 0", "blocks/up recomputed"} <= {event["name"] for event in slices}
    assert all(event["dur"] >= 0 for event in slices) and {event["ph"] for event in events} == {
        "M",
        "X",
    }


def event(start, end, name, line="a", opcode="dot"):
    return _trace.Event(
        start, end, Operation(name, opcode, name, "forward", frozenset({name})), "cpu", line
    )


def times(*events, windows=((0, 100),)):
    return {
        operation.name: time for operation, time in _profile.attributed(events, windows).items()
    }


def test_operations_at_the_same_time_share_it():
    """Two threads for 10 ns are 10 ns of wall time, not 20."""
    assert times(event(0, 10, "x"), event(0, 10, "y", "b")) == {"x": 5, "y": 5}
    assert times(event(0, 10, "x"), event(4, 20, "y", "b")) == {"x": 4 + 3, "y": 3 + 10}
    assert times(event(0, 10, "x"), event(0, 10, "x", "b")) == {"x": 10}
    assert times(event(0, 10, "x"), event(30, 40, "x")) == {"x": 20}


def test_a_loop_counts_while_nothing_inside_runs():
    assert times(event(0, 100, "loop", opcode="while"), event(10, 40, "x"), event(50, 60, "y")) == {
        "loop": 60,
        "x": 30,
        "y": 10,
    }
    assert times(event(0, 10, "x"), windows=[(2, 4), (6, 7)]) == {"x": 3}


def test_several_devices_are_averaged():
    other = event(0, 30, "x")._replace(device="cpu:1")
    made = _profile.of_trace(
        _trace.Trace((event(0, 10, "x"), other), ((0, 40),)),
        (),
        introspect.summary(nn.Dense(2), X).chip,
    )
    assert made["x"].total == pytest.approx(20e-9) and made.step_seconds == pytest.approx(40e-9)


def test_a_plain_function_is_forward_and_a_scan_has_its_paths():
    def f(w, x):
        with jax.named_scope("loop"):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        with jax.named_scope("end"):
            return x @ w[0]

    found = introspect.profile(f, jnp.ones((4, 200, 200)), jnp.ones((200, 200)), repeats=2)
    assert (
        found.total.seconds.keys() == {"forward"}
        and found["loop"].total > 0
        and found["end"].total > 0
    )
    assert found["loop"].cost.matmul == 4 * 2 * 200**3


@pytest.mark.exhaustive
def test_transformed_steps():
    """A tuned and an autocast step keep their paths; a second call of a step with its own state
    works."""
    step = lambda params, x: jax.grad(lambda params: jnp.square(MODEL(params, x)).mean())(params)
    for changed in (ft.tune(step), ft.autocast(step, "bfloat16")):
        found = introspect.profile(changed, PARAMS, X, repeats=1)
        assert (
            found["blocks/up"].total > 0 and "backward" in found.total.seconds and found.steps == 1
        )


def test_a_function_of_another_library():
    nnx = pytest.importorskip("flax.nnx")
    module = ft.name_scopes(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(module)

    def f(params, x):
        with jax.named_scope("linear"):
            return nnx.merge(graph, params)(x)

    assert introspect.profile(f, params, jnp.ones((64, 64)), repeats=1, depth=1)["linear"].total > 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: introspect.profile(lambda x: float(x) + 1, jnp.ones(())),
            TypeError,
            "^profile: jax.jit cannot compile <lambda>: Abstract tracer value",
        ),
        (
            lambda: introspect.profile(lambda x, mode: x, jnp.ones(()), "text"),
            TypeError,
            "^profile: jax.jit cannot compile <lambda>: ",
        ),
        (
            lambda: introspect.profile(jnp.sin, jax.ShapeDtypeStruct((), "float32")),
            TypeError,
            "which has no values",
        ),
        (
            lambda: introspect.profile(jnp.sin, jnp.ones(()), repeats=0),
            ValueError,
            "repeats counts calls, at least 1",
        ),
        (
            lambda: introspect.profile("sin", jnp.ones(())),
            TypeError,
            "profile: expected a function, got a str",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_a_running_profiler_is_named(tmp_path):
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(RuntimeError, match="another profile is running"),
    ):
        introspect.profile(jnp.sin, jnp.ones(3))
    assert introspect.profile(jnp.sin, jnp.ones(3), repeats=1).steps == 1  # and afterwards it works


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(ValueError, match=r"contains no trace of jax\.profiler"):
        _trace.read(tmp_path)
    (tmp_path / "a.xplane.pb").write_bytes(b"")
    with pytest.raises(ValueError, match="the trace has no operations"):
        _trace.read(tmp_path)


def test_protocol_buffers():
    message = (
        bytes([0x08, 0x96, 0x01, 0x12, 2])
        + b"ab"
        + bytes([0x1D, 1, 0, 0, 0, 0x22, 3, 1, 0x96, 0x01])
    )
    found = dict(_protobuf.fields(memoryview(message)))
    assert found[1] == 150 and _protobuf.text(found[2]) == "ab" and found[3] == 1
    assert _protobuf.numbers(found[4]) == [1, 150] and _protobuf.numbers(7) == [7]
    for broken in (b"\x08", b"\x12\x05a", b"\x0b", b"\x08\x96"):
        with pytest.raises(ValueError, match="a protocol buffer"):
            dict(_protobuf.fields(memoryview(broken)))


def test_operations_of_a_compiled_program_equal_its_text():
    """The parsed HLO has the instructions, opcodes and names that XLA prints."""
    step = jax.jit(
        functools.partial(jax.grad(lambda params, x: jnp.square(MODEL(params, x)).mean()))
    )
    compiled = step.lower(PARAMS, X).compile()
    module = compiled.runtime_executable().hlo_modules()[0]
    found = _hlo.operations(memoryview(module.as_serialized_hlo_module_proto()))
    printed = dict(
        re.findall(
            r"^ *(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(", module.to_string(), re.MULTILINE
        )
    )
    assert len(printed) > 30 and found.keys() == printed.keys()
    assert all(found[name].opcode == opcode for name, opcode in printed.items())
    products = [each for each in found.values() if each.opcode in ("dot", "convolution")]
    assert {each.path for each in products} <= {"stem", "blocks/up", "blocks/down", "head"}
    assert {each.phase for each in products} == {"forward", "backward", "recomputed"}
