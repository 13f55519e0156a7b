"""parallel.check: the known kinds of wrong equations are found, and what is said about them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import parallel
from fnet.parallel._sanitizer import _cases, _processes, _program, _smaller, _values
from fnet.parallel._sanitizer._differences import difference
from tests.parallel.right_programs import PROGRAMS, f32

MESH = {"a": 2, "b": 2}
IMAGES = P(None, "a")


def _conv(x, kernel, **options):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout, **options)


def five_kinds(kernels, rows, images, line):
    """A loss with one operation of each kind that XLA is known to divide wrongly."""
    with jax.named_scope("grouped"):
        loss = (_conv(rows, kernels["grouped"], feature_group_count=4) ** 2).sum()
    with jax.named_scope("image"):
        loss += (_conv(images, kernels["image"]) ** 2).sum()
    with jax.named_scope("kernel"):
        loss += (_conv(images, kernels["kernel"]) ** 2).sum()
    with jax.named_scope("pool"):
        pooled = lax.reduce_window(images, -jnp.inf, lax.max, (1, 3, 1, 1), (1, 1, 1, 1), "SAME")
        loss += (pooled**2).sum()
    with jax.named_scope("product"):
        return loss + (jnp.cumprod(line) ** 2).sum()


@pytest.fixture(scope="module")
def known():
    kernels = {"grouped": f32(3, 3, 1, 4), "image": f32(3, 3, 4, 4), "kernel": f32(3, 3, 4, 4)}
    places = {"grouped": P(), "image": P(), "kernel": P(None, None, None, "b")}
    return parallel.check(
        jax.value_and_grad(five_kinds, (0, 2, 3)),
        *(kernels, f32(4, 4, 4, 4), f32(4, 4, 4, 4), f32(4)),
        mesh=MESH,
        shardings=(places, P("a"), IMAGES, P("a")),
    )


@pytest.mark.exhaustive
def test_the_five_known_kinds_are_found(known):
    by_scope = {}
    for finding in known.findings:
        by_scope.setdefault(finding.scope, []).append(finding)
    assert set(by_scope) == {"grouped", "image", "kernel", "pool", "product"}
    result = lambda scope: [f for f in by_scope[scope] if f.what == "the result"]
    assert [f.factor for f in result("kernel") if f.phase == "forward"] == [2.0]
    assert not [f for f in result("image") if f.phase == "forward"]
    for scope, row in (
        ("grouped", "grouped_convolution_gradient"),
        ("image", "split_image_convolution"),
        ("kernel", "split_kernel_convolution"),
        ("pool", "overlapping_max_pool_gradient"),
    ):
        assert any(row in f.known for f in by_scope[scope]), scope
        assert any("gradient" in f.what for f in by_scope[scope]), scope
        assert any(f.phase == "backward" for f in by_scope[scope]), scope
    assert all(
        set(f.known) <= {"negative_padding", "interior_padding"} for f in by_scope["product"]
    )
    assert not known.ok
    with pytest.raises(ValueError, match=r"^parallel\.check: .* are wrong:"):
        known.check()


def test_a_finding_says_where_what_and_by_how_much(known):
    finding = next(f for f in known.findings if f.scope == "grouped" and "gradient" in f.what)
    text = str(finding)
    assert text in str(known) or text.replace("\n", "\n  ") in str(known)
    assert text.startswith("conv_general_dilated in grouped (test_check.py:"), text
    assert "the gradient of input 1 is multiplied by 2; known as " in text
    assert "plan.jit" in text
    assert "mesh a=2, b=2; arguments P('a', None, None, None), P(None, None, None, None), " in text
    assert "36 of 36 elements differ: element [" in text


def test_the_program_of_a_finding_shows_the_error(known):
    """`program`, `arguments` and `shardings` are all that is needed to show it again."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    place = lambda spec: None if spec is None else NamedSharding(mesh, spec)
    finding = next(f for f in known.findings if f.scope == "grouped" and "gradient" in f.what)
    one = jax.jit(finding.program)(*finding.arguments)
    many = jax.jit(
        finding.program,
        in_shardings=tuple(map(place, finding.shardings)),
        out_shardings=[*map(place, finding.out_shardings)],
    )(*finding.arguments)
    np.testing.assert_array_equal(many[0], one[0])
    np.testing.assert_array_equal(many[1], 2 * one[1])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("written", [True, False])
def test_the_script_of_a_finding_runs_without_fnet(known, written, tmp_path):
    finding = next(f for f in known.findings if f.scope == "grouped" and "gradient" in f.what)
    if not written:  # as for primitives that have no public name
        object.__setattr__(finding, "written", "")
    script = finding.script()
    assert "fnet" not in script and ("conv_general_dilated_p.bind" in script) == written
    (tmp_path / "script.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the results differ" in done.stdout


def test_loops_branches_and_calls_are_opened():
    def step(w, x, i):
        def body(carry, row):
            carry = jax.jit(lambda c: jnp.tanh(c @ w))(carry) + row
            return carry, carry.sum(-1)

        y, sums = lax.scan(body, jnp.zeros((4, 4)), x)
        y = lax.cond(i > 0, jnp.sin, jnp.cos, y)
        y = lax.while_loop(lambda c: jnp.sum(c) < 3, lambda c: jnp.exp(c), y)
        return y, sums

    found = parallel.check(
        step, f32(4, 4), f32(3, 4, 4), f32(), mesh={"a": 2}, shardings=(P(), P(None, "a"), P())
    )
    assert found.ok, found
    assert found.divided == 8  # dot, tanh, add, two sums, sin, cos, exp
    assert not found.skipped


@pytest.mark.parametrize(
    ("many", "one", "factor"),
    [
        ([2.0, 4.0, 0.0], [1.0, 2.0, 0.0], 2.0),
        ([1.0, 5.0, 3.0], [1.0, 2.0, 3.0], None),
        ([1.0, np.nan, 3.0], [1.0, 2.0, 3.0], None),
        ([1.0, 2.0], [1.0, 2.001], None),
        ([-1.0, -2.0], [1.0, 2.0], -1.0),
    ],
)
def test_differences(many, one, factor):
    found = difference(np.float32(many), np.float32(one))
    assert found is not None and found.factor == factor


@pytest.mark.parametrize(
    ("many", "one"),
    [
        ([1.0, 1e4, 3.0], [1.0000001, 1e4, 3.1]),  # beside the largest element
        ([np.nan, np.inf], [np.nan, np.inf]),
        ([], []),
        ([0.0, -0.0], [-0.0, 0.0]),
    ],
)
def test_rounding_is_no_difference(many, one):
    assert difference(np.float32(many), np.float32(one)) is None


def test_integers_are_compared_exactly():
    assert difference(np.array([1 << 30]), np.array([(1 << 30) + 1])) is not None
    assert difference(np.array([True]), np.array([False])).count == 1
    assert difference(np.ones(3), np.ones(4)).error == np.inf


def test_noise_of_a_cancellation_is_rounding():
    assert difference(np.float32([3.0]), np.float32([1.0]), noise=1.0) is None
    assert difference(np.float32([3.0]), np.float32([1.0]), noise=1e-3) is not None


def test_values_are_exact_or_hostile():
    types = (((64, 64), "float32"), ((64,), "int32"), ((64,), "bool"), ((8, 8), "bfloat16"))
    exact, hostile = (_values.draw(kind, types) for kind in _values.DRAWS)
    assert np.array_equal(2 * exact[0], np.round(2 * exact[0])) and np.abs(exact[0]).max() == 3
    assert {1e4, -1e4, 0.0} <= set(hostile[0].ravel().tolist())
    assert (np.signbit(hostile[0]) & (hostile[0] == 0)).any()
    assert (np.abs(hostile[0][hostile[0] != 0]) < 1e-38).any()
    assert exact[1].min() == -2 and set(exact[2].tolist()) == {True, False}
    again = _values.draw("exact", types)
    assert all(np.array_equal(a, b) for a, b in zip(exact, again))
    matrix = _values.draw("hostile", [((4, 8, 8), "float32")], "definite")[0]
    assert (np.linalg.eigvalsh(matrix) > 0).all()


def case(name):
    return _cases.Case(name, (("a", 2),), (), ())


def test_a_child_that_ends_is_a_result_of_its_case(monkeypatch):
    monkeypatch.setattr(_processes, "_MODULE", "tests.parallel.unreliable_child")
    monkeypatch.setattr(_processes, "_TOGETHER", 3)
    names = ["right", "right", "aborts", "right", "hangs", "right"]
    program = _cases.Program("", (), ())
    results = _processes.run(
        dict.fromkeys(names, program), [*map(case, names)], _processes.Limits(3.0)
    )
    assert [each["status"] for each in results] == names
    assert results[2]["text"] == "SIGABRT: Check failed: a == b (1 vs. 2)"
    assert results[4]["text"] == "no result after 3 s"


def test_a_step_that_ends_the_compiler_is_a_finding(monkeypatch):
    def ended(*_):
        raise _processes.Ended("SIGABRT: Check failed: shapes")

    monkeypatch.setattr(_processes, "shardings", ended)
    found = parallel.check(jnp.sin, f32(4), mesh={"a": 2}, shardings=P("a"))
    assert not found.ok and found.findings[0].status == "aborts"
    assert "compiling it ends the process" in str(found) and "Check failed: shapes" in str(found)


def _equation(f, *shapes, inputs, outputs):
    (eqn,) = jax.make_jaxpr(f)(*shapes).eqns
    return _program.Equation(eqn, None, inputs, outputs)


def test_large_arrays_become_smaller_and_stay_as_even():
    mesh = (("a", 4),)
    split = (("a",), ())
    equation = _equation(
        jnp.dot, f32(4096, 515), f32(515, 1024), inputs=(split, ((), ())), outputs=(split,)
    )
    alone = _smaller.alone(equation, mesh)
    (rows, inner), (same, columns) = (x.shape for x in alone.shapes)
    assert inner == same and rows % 4 == 0 and inner % 4 == 515 % 4 and columns % 4 == 0
    assert rows * inner < 2048 and rows != columns

    merged = _equation(
        lambda x: lax.reshape(x, (64 * 128, 32)),
        f32(64, 128, 32),
        inputs=((("a",), (), ()),),
        outputs=(split,),
    )
    alone = _smaller.alone(merged, mesh)
    (y,) = jax.eval_shape(alone.function, *alone.shapes)
    assert y.shape[0] % 4 == 0 and y.size < 64 * 128 * 32


def test_what_is_too_large_is_not_run():
    equation = _equation(
        lambda x: lax.slice(x, (5, 0), (3000, 1000)),
        f32(4096, 1000),
        inputs=((("a",), ()),),
        outputs=(((), ()),),
    )
    assert _smaller.alone(equation, (("a", 4),)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no argument lies on a mesh; pass mesh= and shardings="),
        ({"mesh": {"a": 2}, "shardings": P()}, "no argument is split over the mesh"),
        (
            {"mesh": {"a": 3}, "shardings": P("a")},
            "does not divide array 0 of the arguments, of shape",
        ),
        ({"mesh": {"a": 2}, "shardings": ([P("a")],)}, "must have the structure of the arguments"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match="^parallel.check: .*" + message.replace("(", r"\(")):
        parallel.check(jnp.sin, f32(4), **options)


def test_a_mesh_with_explicit_axes_is_refused():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="expected a mesh whose axes have the type Auto"):
        parallel.check(jnp.sin, f32(4), mesh=mesh, shardings=P("a"))


def test_no_function():
    with pytest.raises(TypeError, match=r"parallel\.check"):
        parallel.check(3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_have_no_findings(name):
    with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it
        step, args, mesh, shardings = PROGRAMS[name]()
        found = parallel.check(step, *args, mesh=mesh, shardings=shardings)
    assert found.ok and found.different, found


@pytest.mark.exhaustive
def test_a_plan_and_placed_arguments():
    """A plan says where the arguments of its step lie. In `plan.jit`, known errors are avoided."""

    def init(key):
        return {"params": jax.random.normal(key, (3, 3, 1, 8))}

    def step(state, x):
        grad = jax.grad(lambda k: (_conv(x, k, feature_group_count=8) ** 2).sum())(state["params"])
        return {"params": state["params"] - 0.1 * grad}, {"norm": jnp.sum(grad)}

    x = f32(4, 4, 4, 8)
    devices = jax.devices()[:4]
    plan = parallel.plan(step, init, x, devices=devices, mesh={"data": 2, "idle": 2}, compile=False)
    state = jax.eval_shape(init, jax.random.key(0))
    assert not parallel.check(step, state, x, shardings=plan).ok
    placed = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state, x),
        (plan.state, plan.batch),
    )
    assert not parallel.check(step, *placed).ok
    found = parallel.check(plan.jit(step), state, x, shardings=plan)
    assert found.divided
