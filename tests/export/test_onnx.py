"""ONNX models equal the models in onnxruntime, in a process without JAX."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from other_libraries import IMAGE, equinox_model, flax_model, haiku_model
from test_bundles import QUICK, specs_of
from test_renew import PROGRAMS, normal
from zoo import MODELS, build, inputs

from fnet import export, models

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("quickly")
from fnet.export.onnx import _onnx, _reductions  # noqa: E402

READER = """
import sys
sys.modules["jax"] = sys.modules["fnet"] = None
import numpy as np, onnxruntime
for path in sys.argv[1:]:
    data = np.load(path + ".npz")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in 0, 1:
        known = [value.name for value in session.get_inputs()]
        names = sorted(name for name in data if name.startswith(f"in{size}"))
        results = session.run(None, {f"x{i}": data[name] for i, name in enumerate(names) if f"x{i}" in known})
        for i, y in enumerate(results):
            want = data[f"out{size}_{i}"].astype(np.float64)
            assert y.shape == want.shape and np.abs(y - want).max() <= 1e-5 * np.abs(want).max(), (path, size, i)
    print("equal")
"""


def runs_in_onnxruntime(names, folder):
    for name in names:
        f, params, _, shapes = build(name)
        arrays, file = {}, folder / f"{name}.onnx"
        export.program(f, params, **specs_of(name)).onnx(file, check=False)
        for size in 0, 1:
            x = inputs(name, shapes[size])
            arrays |= {f"in{size}_{i}": a for i, a in enumerate(x)}
            arrays |= {
                f"out{size}_{i}": a for i, a in enumerate(jax.tree.leaves(jax.jit(f)(params, *x)))
            }
        np.savez(f"{file}.npz", **arrays)
    files = [str(folder / f"{name}.onnx") for name in names]
    run = subprocess.run([sys.executable, "-c", READER, *files], capture_output=True, text=True)
    assert run.stdout.split() == ["equal"] * len(names), run.stderr


def test_models_in_a_process_without_jax(tmp_path):
    runs_in_onnxruntime(QUICK, tmp_path)


@pytest.mark.exhaustive
def test_every_model_in_a_process_without_jax(tmp_path):
    runs_in_onnxruntime([name for name in MODELS if name not in QUICK], tmp_path)


OPERATIONS = {
    name: program
    for name, program in PROGRAMS.items()
    if name not in ("unary", "integers", "reductions", "sorting")
}
OPERATIONS |= {
    "unary": (
        lambda x: [
            f(jnp.abs(x) / 4 + 0.1)
            for f in (
                jnp.exp2,
                jnp.expm1,
                jnp.log,
                jnp.log1p,
                jnp.sin,
                jnp.cos,
                jnp.tan,
                jnp.arcsin,
                jnp.arccos,
                jnp.arctan,
                jnp.sinh,
                jnp.cosh,
                jnp.arcsinh,
                jnp.arctanh,
                jnp.sqrt,
                jax.lax.rsqrt,
                jnp.cbrt,
                jax.lax.erf,
                jax.lax.erfc,
                jnp.floor,
                jnp.ceil,
                jnp.round,
                jnp.sign,
                jnp.isfinite,
                jax.nn.sigmoid,
            )
        ],
        [normal(3, 4)],
    ),
    "integers": (
        lambda x, y: [x // y, x & y, x | y, x ^ y, ~x, x == y, x < y, jnp.maximum(x, y)],
        [PROGRAMS["integers"][1][0], PROGRAMS["integers"][1][1]],
    ),
    "reductions": (
        lambda x: [
            x.sum(0),
            x.prod(1),
            x.max(),
            x.min((0, 1)),
            x.argmax(1),
            x.argmin(0),
            jnp.cumsum(x, 1),
        ],
        [normal(3, 4)],
    ),
    "products of 8-bit integers": (
        lambda x, y: jax.lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
        ),
        [
            jnp.asarray(np.random.default_rng(i).integers(-127, 128, shape), jnp.int8)
            for i, shape in enumerate([(3, 40), (40, 5)])
        ],
    ),
    "sorting": (
        lambda x, y: [*jax.lax.sort((x, y), num_keys=1), *jax.lax.top_k(x, 2), jnp.argsort(x, 0)],
        PROGRAMS["sorting"][1],
    ),
    "slices of one axis": (lambda x: [x[:, 1:], x[2:], x[:, jnp.int32(1)]], [normal(3, 4, 2)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, tmp_path):
    f, args = OPERATIONS[name]
    program = export.program(
        lambda params, *args: f(*args), {}, **{f"x{i}": a for i, a in enumerate(args)}
    )
    program.onnx(tmp_path / "f.onnx", check=False)
    assert _onnx.compare(program, tmp_path / "f.onnx", inputs=list(args)) <= 1e-5


def compared(f, params, path, x, /, **specs):
    """The outputs in onnxruntime for these inputs equal f's."""
    import onnxruntime

    export.program(f, params, **specs).onnx(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    got = session.run(None, {value.name: a for value, a in zip(session.get_inputs(), x)})
    for a, b in zip(got, jax.tree.leaves(jax.jit(f)(params, *x)), strict=True):
        close(a, np.asarray(b), 1e-5)


@pytest.mark.exhaustive
def test_cumulative_extremes_along_a_symbolic_axis(tmp_path):
    x = np.random.default_rng(0).integers(-9, 9, (2, 7, 3), np.int32)
    f = lambda _, x: [
        op(x, axis=1, reverse=reverse)
        for op in (jax.lax.cummax, jax.lax.cummin)
        for reverse in (False, True)
    ]
    compared(f, {}, tmp_path / "f.onnx", [x], x=export.spec("b, t, 3", "int32"))


def test_a_flax_model(tmp_path):
    f, params, x = flax_model()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        compared(f, params, tmp_path / "f.onnx", [x], x=export.spec("b, 8, 8, 1"))


@pytest.mark.exhaustive
def test_an_equinox_model(tmp_path):
    f, params, x = equinox_model()
    with jax.numpy_rank_promotion("allow"):
        compared(f, params, tmp_path / "f.onnx", [x], x=export.spec("b, 6"))


@pytest.mark.exhaustive
def test_a_haiku_model(tmp_path):
    f, params, x = haiku_model()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        compared(f, params, tmp_path / "f.onnx", [x], x=export.spec("b, 5", "int32"))


def test_a_training_step(tmp_path):
    """With the gradients of convolutions, a pooling, a dense layer and a cross entropy."""
    model = models.CNN(10, (4, 6), 1)
    params, state = model.init(jax.random.key(0), IMAGE)

    def step(params, x, labels):
        def loss(params):
            logits = jax.nn.log_softmax(model(params, x, state=state)[0])
            return -jnp.take_along_axis(logits, labels[:, None], 1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return {"loss": value, "params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)}

    compared(
        step,
        params,
        tmp_path / "f.onnx",
        [IMAGE, np.array([1, 2, 3], np.int32)],
        x=export.spec("b, 8, 8, 1"),
        labels=export.spec("b", "int32"),
    )


def test_the_graph(tmp_path):
    """Names of sizes, inputs, outputs and scopes; the weights are stored once."""
    f, params, _, _ = build("GPT")
    export.program(f, params, **specs_of("GPT")).onnx(tmp_path / "f.onnx", opset=18)
    model = onnx.load(tmp_path / "f.onnx")
    assert model.opset_import[0].version == 18
    sizes = [
        [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
        for x in model.graph.input
    ]
    assert sizes[0] == ["b", "t"] and [x.name for x in model.graph.output] == ["output"]
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Loop") == 1  # over the stacked blocks
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    body = next(a.g for a in loop.attribute if a.name == "body")
    assert any(node.name.startswith("blocks/attention/query/MatMul") for node in body.node)
    count = sum(
        int(np.prod(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.name.startswith("params/")
    )
    assert count == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_a_product_of_narrow_integers(tmp_path):
    f = lambda params, x: jax.lax.dot(x, params, preferred_element_type=np.int32)
    y = np.full((7, 2), 30_000, np.int16)
    export.program(f, y, x=export.spec("b, 7", "int16")).onnx(
        tmp_path / "f.onnx"
    )  # which compares the outputs


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_windows_that_are_poolings(dtype, tmp_path):
    """onnxruntime has poolings of floating-point numbers only."""
    f = lambda params, x: jax.lax.reduce_window(
        x, np.zeros((), dtype), jax.lax.add, (1, 3), (1, 2), "SAME"
    )
    export.program(f, {}, x=export.spec("b, 9", dtype)).onnx(tmp_path / "f.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node]
    assert ("AveragePool" in kinds) == (dtype == "float32")


def test_a_softmax_needs_no_search_for_nan(tmp_path):
    """Its results are NaN without it. Those of a maximum alone are not."""
    for f, searched in (
        (lambda params, x: jax.nn.softmax(x * 2), False),
        (lambda params, x: (x * 2).max(1), True),
    ):
        export.program(f, {}, x=export.spec("b, 9")).onnx(tmp_path / "f.onnx")
        kinds = [node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node]
        assert ("IsNaN" in kinds) == searched


def test_broadcasts_are_left_to_the_operators(tmp_path):
    f = lambda params, x: jnp.broadcast_to(params[:, None], x.shape) * x
    export.program(f, normal(3), x=export.spec("b, 3, t")).onnx(tmp_path / "f.onnx")
    assert "Expand" not in [node.op_type for node in onnx.load(tmp_path / "f.onnx").graph.node]


@pytest.mark.parametrize("n", [7, 4096 * 4096, 3 * 2**30])
def test_a_long_sum_is_divided_evenly(n):
    factors = _reductions._factors(n)
    assert math.prod(factors) == n and max(factors) <= _reductions._BLOCK
    assert _reductions._factors(1_000_003) is None  # a prime


def test_external_weights(tmp_path):
    program = export.program(
        lambda params, x: x @ params["kernel"],
        {"kernel": normal(100, 100)},
        x=export.spec("b, 100"),
    )
    for _ in range(2):  # the second file replaces the first
        program.onnx(tmp_path / "f.onnx", external=True)
        assert (tmp_path / "f.onnx.data").stat().st_size == 40_000
    assert (tmp_path / "f.onnx").stat().st_size < 1000
    assert _onnx.compare(program, tmp_path / "f.onnx") <= 1e-5


def test_errors(tmp_path):
    def f(params, x):
        with jax.named_scope("block/norm"):
            return jax.lax.nextafter(x, x + 1)

    program = export.program(f, {}, x=export.spec("b"))
    with pytest.raises(
        NotImplementedError,
        match=r"ONNX: the operation 'nextafter' at 'block/norm' is not supported; "
        r"write this part of the model with other operations",
    ):
        program.onnx(tmp_path / "f.onnx")
    with pytest.raises(ValueError, match=r"opset=17: expected 18 to \d+"):
        program.onnx(tmp_path / "f.onnx", opset=17)
    with pytest.raises(ValueError, match=r"there is no entry point 'embed'; there are predict"):
        program.onnx(tmp_path / "f.onnx", entry="embed")
    program = export.program(lambda params, x: x * 2, {}, x=export.spec("b", "bfloat16"))
    with pytest.raises(
        NotImplementedError,
        match=r"computes in bfloat16, which onnxruntime does not support on CPUs",
    ):
        program.onnx(tmp_path / "f.onnx")
