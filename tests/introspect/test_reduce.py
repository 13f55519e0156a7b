"""`introspect.reduce`: what it finds, and what its scripts do in a process of their own."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import introspect
from fnet import transforms as ft
from fnet.introspect._reduce import _child, _predicates, _search, _switches


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def status(found):
    """The exit status of a script in a process that knows neither fnet nor this test."""
    own = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.modules['fnet'] = None; import runpy; runpy.run_path('repro.py')",
    ]
    return subprocess.run(command, cwd=found.path.parent, env=own, capture_output=True).returncode


def layers(w, x):
    def block(x, w):
        with jax.named_scope("block"):
            h = jnp.tanh(x @ w)
            with jax.named_scope("gate"):
                return h + jnp.log(jnp.where(w[0, 0] > 90, 0.0, 1.0)), None

    y, _ = lax.scan(block, x, w)
    return jax.nn.softmax(y).sum(), y.mean()


def test_the_logarithm_of_zero_in_layer_11_of_12(tmp_path):
    w = draw(12, 8, 8)
    w[10, 0, 0] = 100
    found = introspect.reduce(layers, (w, draw(4, 8)), "not finite", tmp_path)
    assert (found.operations, found.reason) == (("log",), "infinity")
    assert (found.layer, found.iterations) == ("block/gate", ("iteration 10 of 12",))
    assert found.reproduced and status(found) == 1
    assert found.lines <= 8 and "fnet" not in found.source
    assert not (tmp_path / "repro.npz").exists()
    text = (tmp_path / "repro.txt").read_text()
    assert "log in 'block/gate', iteration 10 of 12 of the loop around it" in text
    assert text == f"{found}\n"


@pytest.mark.exhaustive
def test_a_script_of_a_program_that_is_sound_ends_with_0(tmp_path):
    found = introspect.reduce(
        lambda x: jnp.sqrt(x).sum(), (-np.ones(3, np.float32),), "not finite", tmp_path
    )
    assert status(found) == 1
    found.path.write_text(found.source.replace("-np.ones", "np.ones").replace("-1", "1"))
    assert status(found) == 0


def half(x, w):
    with jax.named_scope("mlp"):
        h = (200 * x).astype(jnp.float16) @ (200 * w).astype(jnp.float16)
    return jax.nn.relu(h).astype(jnp.float32).sum(-1)


def solver(x):
    def step(carry):
        i, x = carry
        with jax.named_scope("solver"):
            return i + 1, jnp.where(i == 5, jnp.sqrt(x - 100), x * 1.1)

    return lax.while_loop(lambda carry: carry[0] < 10, step, (0, x))[1]


def branches(x):
    def bad(x):
        with jax.named_scope("bad"):
            return jnp.log(x - x)

    return lax.cond(x.sum() > -1e9, bad, jnp.sin, x) * 2


def growing(x):
    return lax.scan(lambda x, _: (50 * x, x), x, None, length=30)[1]


def keyed(key, x):
    return jnp.log(0 * jax.random.uniform(key, (4,)) * x)


def unsupported(x):
    with jax.named_scope("product"):
        y = lax.dot_general(
            x, x, (((1,), (1,)), ((), ())), precision=lax.DotAlgorithmPreset.TF32_TF32_F32
        )
    return jnp.tanh(y).sum()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("f", "args", "failing", "operation", "layer"),
    [
        (half, (draw(8, 64), draw(64, 8, seed=1)), "not finite", "dot_general", "mlp"),
        (half, (draw(8, 64), draw(64, 8, seed=1)), "differs from float64", "dot_general", "mlp"),
        (solver, (draw(4),), "not finite", "sqrt", "solver"),
        (branches, (draw(4),), "not finite", "log", "bad"),
        (growing, (draw(4),), "not finite", "mul", ""),
        (keyed, (jax.random.key(3), draw(4)), "not finite", "log", ""),
        (unsupported, (draw(4, 4),), "raises", "dot_general", "product"),
    ],
)
def test_predicates(f, args, failing, operation, layer, tmp_path):
    found = introspect.reduce(f, args, failing, tmp_path)
    assert operation in found.operations and len(found.operations) <= 3
    assert found.layer == layer
    assert found.reproduced and status(found) == 1


def test_float32_where_another_dtype_does_not_matter(tmp_path):
    f = lambda x: jnp.log(x.astype(jnp.bfloat16) * 0).astype(jnp.float32).sum()
    found = introspect.reduce(f, (draw(4),), "not finite", tmp_path)
    assert found.operations == ("log",)
    assert "float32" in found.source and "bfloat16" not in found.source


@pytest.mark.exhaustive
def test_numpy_as_the_other_computation(tmp_path):
    def f(x):
        return jnp.cos(x + 1) * 2

    found = introspect.reduce(f, (draw(50),), "differs from NumPy", tmp_path, tolerance=1e-9)
    assert found.operations == ("cos",) and found.reproduced


def test_a_wrong_rule_of_a_transform(tmp_path):
    def wrong(primitive, scope, inputs, equation):
        return [1.01 * jnp.sin(inputs[0])] if primitive == "sin" else NotImplemented

    def f(x):
        with jax.named_scope("a"):
            x = jnp.cos(x) @ x.T
        with jax.named_scope("b"):
            return jnp.sin(x).sum()

    found = introspect.reduce(
        f,
        (draw(4, 5),),
        "differs from plain JAX",
        tmp_path,
        transform=lambda f: ft.rewrite(f, wrong),
    )
    assert (found.operations, found.layer) == (("sin",), "b")
    assert status(found) == 1


@pytest.mark.exhaustive
def test_the_rule_of_tune_that_is_involved(tmp_path):
    """A difference of rounding stands for a wrong result."""

    def f(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.tanh(y)

    args = draw(2, 8, 8, 3), draw(3, 3, 3, 4, seed=1)
    tuned = ft.tune(jax.grad(lambda x, k: f(x, k).sum(), 1), "cpu")
    if not float(jnp.abs(tuned(*args) - jax.jit(tuned.tuned[0])(*args)).max()):
        pytest.skip("tune leaves this program as it is on this machine")
    found = introspect.reduce(tuned, args, "differs from plain JAX", tmp_path, tolerance=1e-12)
    assert "conv_general_dilated" in found.operations
    assert found.switches and all(name.startswith("the rule '") for name in found.switches)


def test_a_scope_of_autocast(tmp_path):
    """The error becomes visible in one scope, and comes from another."""

    def f(x, a, b):
        with jax.named_scope("first"):
            y = x @ a  # 257.25, which 16 bits round to 257
        with jax.named_scope("second"):
            z = (y - 256.0) @ b
        with jax.named_scope("third"):
            return z, a @ a.T

    a = jnp.array([[256.0, 1.0], [1.0, 256.0], [0.25, 0.25]])
    args = jnp.ones((2, 3)), a, jnp.ones((2, 2))
    cast = ft.autocast(f, "bfloat16", rules={"third": "float32"})
    found = introspect.reduce(cast, args, "differs from plain JAX", tmp_path)
    assert found.reproduced and found.switches == ("the scope 'first' of autocast",)
    assert found.layer == "second" and ".astype(jnp.bfloat16)" in found.source
    spared = ft.autocast(f, "bfloat16", rules={"first": "float32", "third": "float32"})
    with pytest.raises(ValueError, match="does not fail"):
        introspect.reduce(spared, args, "differs from plain JAX", tmp_path)


def large(run, results):
    return any(np.abs(np.asarray(y)).max() > 1e3 for y in results)


def test_a_function_of_the_user_is_part_of_the_script(tmp_path):
    found = introspect.reduce(lambda x: jnp.exp(x + 1).sum(0), (9 + draw(4, 4),), large, tmp_path)
    assert "exp" in found.operations and found.failing == "large"
    assert "def large(run, results):" in found.source and status(found) == 1


@pytest.mark.exhaustive
def test_a_function_that_the_script_cannot_contain(tmp_path):
    limit = 1e3
    found = introspect.reduce(
        lambda x: jnp.exp(x),
        (9 + draw(4),),
        lambda run, results: results[0].max() > limit,
        tmp_path,
    )
    assert found.reproduced is None
    assert "your function judges them" in str(found)


def test_the_gradient_of_a_grouped_convolution_on_a_mesh_of_two_axes(tmp_path):
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(kernel, x):
        with jax.named_scope("conv"):
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=4
            )
        return jnp.square(jax.nn.gelu(y)).mean()

    args = put(draw(3, 3, 1, 4)), put(draw(4, 4, 4, 4, seed=1), "a")
    f = jax.value_and_grad(loss)
    found = introspect.reduce(f, args, "differs from one device", tmp_path)
    assert (found.operations, found.layer) == (("conv_general_dilated",), "conv")
    assert found.lines <= 8 and max(map(len, found.source.splitlines())) <= 100
    assert status(found) == 1


def test_long_arguments_go_to_a_file(tmp_path):
    x = draw(300)
    found = introspect.reduce(
        lambda x: jnp.cumsum(x * x),
        (x,),
        lambda run, results: (
            results[0].shape == (300,) and abs(results[0][-1] - np.square(x).sum()) < 1e-2
        ),
        tmp_path,
    )
    assert 'np.load("repro.npz")' in found.source
    with np.load(tmp_path / "repro.npz") as data:
        assert data["a"].shape == (300,)


@pytest.mark.exhaustive
def test_the_same_call_gives_the_same_script_and_tries_nothing_twice(tmp_path):
    args = draw(8, 64), draw(64, 8, seed=1)
    first = introspect.reduce(half, args, "not finite", tmp_path / "a")
    other = introspect.reduce(half, args, "not finite", tmp_path / "b")
    assert first.source == other.source and first.tried == other.tried > 3
    again = introspect.reduce(half, args, "not finite", tmp_path / "a")
    assert again.source == first.source and again.tried == 0


@pytest.mark.exhaustive
def test_a_killed_reduction_continues(tmp_path):
    args = draw(8, 64), draw(64, 8, seed=1)
    whole = introspect.reduce(half, args, "not finite", tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:3], lines[3][:20]]))  # killed while it wrote a line
    again = introspect.reduce(half, args, "not finite", tmp_path)
    assert again.source == whole.source
    assert 0 < again.tried <= whole.tried - 3


def test_programs_that_do_not_fail(tmp_path):
    with pytest.raises(
        ValueError, match=r"does not fail \(not finite\): all of its results are finite"
    ):
        introspect.reduce(jnp.sin, (draw(3),), "not finite", tmp_path)
    with pytest.raises(ValueError, match="an argument is not finite itself"):
        introspect.reduce(jnp.sin, (np.full(3, np.nan, np.float32),), "not finite", tmp_path)
    with pytest.raises(
        ValueError, match=r"the largest relative error is \d.*, and 3.5e-04 is allowed"
    ):
        introspect.reduce(jnp.sin, (draw(3),), "differs from float64", tmp_path)
    with pytest.raises(ValueError, match="no argument lies on several devices"):
        introspect.reduce(jnp.sin, (draw(3),), "differs from one device", tmp_path)
    with pytest.raises(ValueError, match="computes no array of numbers"):
        introspect.reduce(lambda x: None, (draw(3),), "not finite", tmp_path)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("not finit", "'not finit' is not a predicate; did you mean 'not finite'?"),
        (
            "wrong",
            "Expected a function of a program and its results, or one of: not finite, raises",
        ),
        ("differs from plain JAX", "pass a function that ft.tune or ft.autocast returned"),
    ],
)
def test_unknown_predicates(failing, message, tmp_path):
    with pytest.raises(ValueError) as raised:
        introspect.reduce(jnp.sin, (draw(3),), failing, tmp_path)
    assert message in str(raised.value)


# Child processes.


def test_a_crash_and_a_hang_are_results(tmp_path):
    script = tmp_path / "crash.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert _child.run(script, _child.Limits()).crashed == "crashed with signal 11 (SIGSEGV)"
    script.write_text("import time; time.sleep(60)")
    outcome = _child.run(script, _child.Limits(seconds=0.5))
    assert outcome.hung == "still running after 0.5 s" and outcome.crashed is None
    script.write_text("x = bytearray(2**33)")
    outcome = _child.run(script, _child.Limits(memory=2**31))
    assert outcome.status == 1 and outcome.last_line == "MemoryError"
    script.write_text("import fnet")
    assert "ModuleNotFoundError" in _child.run(script, _child.Limits()).output


@pytest.mark.exhaustive
def test_a_compiler_that_crashes(monkeypatch, tmp_path):
    """In the child process, an operation kills the process when it is traced."""
    start = "import jax, os\njax.lax.erf_inv = lambda *_: os.kill(os.getpid(), 9)\n"
    monkeypatch.setattr(_child, "_START", start + _child._START)

    def f(x):
        y = jnp.sin(x) + 1
        with jax.named_scope("draw"):
            y = lax.erf_inv(y * 0.1)
        return jnp.cos(y).sum()

    found = introspect.reduce(f, (draw(3),), "crashes", tmp_path)
    assert (found.operations, found.layer) == (("erf_inv",), "draw")
    assert found.reason == "crashed with signal 9 (SIGKILL)" and found.reproduced


@pytest.mark.exhaustive
def test_memory(tmp_path):
    def f(x):
        with jax.named_scope("pairs"):
            y = jnp.sort(x[:, None] * x[None, :], axis=0)
        return jnp.tanh(y).sum()

    found = introspect.reduce(f, (draw(3000),), "uses more than 30 MB", tmp_path)
    assert set(found.operations) & {"sort", "mul"} and found.layer == "pairs"
    assert found.reproduced


@pytest.mark.parametrize("wanted", [{3}, {0, 9}, {2, 3, 7}, set(range(10))])
def test_minimized_keeps_what_is_needed(wanted):
    assert _search.minimized(range(10), lambda kept: wanted <= set(kept)) == sorted(wanted)


@pytest.mark.exhaustive
def test_versions(tmp_path):
    found = introspect.reduce(
        lambda x: jnp.log(x - x),
        (draw(3),),
        "not finite",
        tmp_path,
        versions=[sys.executable, "1.x"],
    )
    assert found.versions == {
        sys.executable: "fails",
        "1.x": "'1.x' is not a version of jax, such as 0.10.2",
    }
    assert f"jax {sys.executable}: fails" in str(found)


@pytest.mark.exhaustive
def test_another_release_that_computes_other_results(monkeypatch, tmp_path):
    """In the child process, the sine is wrong, as it may be in another release."""
    start = "import jax.numpy as jnp, jax\njnp.sin = lambda x: 1.1 * jax.lax.sin(x)\n"
    monkeypatch.setattr(_child, "_START", start + _child._START)

    def f(x):
        with jax.named_scope("wave"):
            y = jnp.sin(x + 1)
        return jnp.cos(y) * 2

    found = introspect.reduce(f, (draw(5),), f"differs from jax {sys.executable}", tmp_path)
    assert (found.operations, found.layer) == (("sin",), "wave")
    # The script states what the release computed, and with it the failure stays away.
    assert found.reproduced is False
    monkeypatch.undo()
    assert status(found) == 1


@pytest.mark.exhaustive
def test_a_compiler_that_hangs(monkeypatch, tmp_path):
    start = "import jax, time\njax.lax.erf_inv = lambda *_: time.sleep(60)\n"
    monkeypatch.setattr(_child, "_START", start + _child._START)
    f = lambda x: lax.erf_inv(jnp.sin(x) * 0.1)
    found = introspect.reduce(f, (draw(2),), "hangs", tmp_path, limit_seconds=8)
    assert found.operations == ("erf_inv",)
    assert found.reason == "still running after 8 s" and found.reproduced


@pytest.mark.exhaustive
def test_a_slow_compilation(monkeypatch, tmp_path):
    """In the child process, the compilation of a sine takes two seconds longer."""
    start = (
        "import jax, jax.numpy as jnp, time\nsine = jax.lax.sin\ncompiled = jax.stages.Lowered.compile\n"
        "def compile(self):\n    time.sleep(2 * ('sine' in self.as_text()))\n    return compiled(self)\n"
        "jax.stages.Lowered.compile = compile\n"
    )
    monkeypatch.setattr(_child, "_START", start + _child._START)
    f = lambda x: jnp.cos(jnp.sin(x) + 1)
    found = introspect.reduce(f, (draw(2),), "compiles longer than 1.5 s", tmp_path)
    assert found.operations == ("sin",) and found.reproduced


def test_flags_of_the_compiler(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nif 'fast_math' in os.environ['XLA_FLAGS']: sys.exit('reproduced: NaN')"
    )
    judge, limits = _predicates.NotFinite(), _child.Limits()
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --xla_cpu_enable_fast_math=true --b=2")
    assert _switches.flags(script, judge, limits) == ("--xla_cpu_enable_fast_math=true",)
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --b=2")
    assert _switches.flags(script, judge, limits) == ()


def test_the_first_difference_of_a_comparison(tmp_path):
    def f(x):
        y = ft.tag(jnp.cos(x) + 2, "shifted")
        return jnp.log(ft.tag(jnp.sqrt(y - 9), "root"))

    def g(x):
        y = ft.tag(jnp.cos(x) + 2, "shifted")
        return jnp.log(ft.tag(jnp.sqrt(y), "root"))

    compared = introspect.compare(f, g, draw(3))
    assert compared.first.name == "root"
    assert compared.reduce("not finite", tmp_path).operations == ("sqrt",)
    with pytest.raises(ValueError, match="the two programs do not differ"):
        introspect.compare(g, g, draw(3)).reduce("not finite", tmp_path)
