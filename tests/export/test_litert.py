"""LiteRT models in its interpreter, in a process without JAX, equal to the models of fnet;
quantized weights; errors.

Their packages exclude versions of the tested set, so they have an environment of their own: make
verify-export.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stable_values
from checks import close
from other_libraries import IMAGE, equinox_model, flax_model, haiku_model
from test_bundles import specs_of
from zoo import MODELS, build, inputs

from fnet import compress, export, models
from fnet import transforms as ft
from fnet.export.litert import _litert

pytestmark = [
    pytest.mark.usefixtures("quickly"),
    pytest.mark.filterwarnings(
        "ignore:Program.litert. the operators of LiteRT compute other values"
    ),
]
QUICK = "CNN", "GPT"


@pytest.fixture
def litert():
    return pytest.importorskip("ai_edge_litert.interpreter"), pytest.importorskip(
        "litert_converter"
    )


def linear(kernel=None):
    kernel = jnp.ones((3, 2)) if kernel is None else kernel
    return export.program(
        lambda params, x: x @ params, kernel, x=export.spec(f"b, {kernel.shape[0]}")
    )


READER = """
import sys
sys.modules["jax"] = sys.modules["fnet"] = sys.modules["tensorflow"] = None
import numpy as np
from ai_edge_litert.interpreter import Interpreter
for path in sys.argv[1:]:
    data, interpreter = np.load(path + ".npz"), Interpreter(path, num_threads=1)
    signatures = list(interpreter.get_signature_list())
    assert len(signatures) == 2, signatures
    for size, signature in enumerate(data["signatures"]):
        runner = interpreter.get_signature_runner(str(signature))
        names = [name for name in data if name.startswith(f"in{size}")]
        results = runner(**{f"x{i}": data[f"in{size}_{i}"] for i in range(len(names))})
        for i, name in enumerate(data["outputs"]):
            got, want = results[str(name)], data[f"out{size}_{i}"].astype(np.float64)
            assert got.shape == want.shape, (path, size, got.shape, want.shape)
            assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max(), (path, size, np.abs(got - want).max())
    print("equal")
"""


def runs_in_litert(names, folder):
    for name in names:
        f, params, _, shapes = build(name)
        sizes = [{variable: pair[i] for variable, pair in MODELS[name][2].items()} for i in (0, 1)]
        program, file = export.program(f, params, **specs_of(name)), folder / f"{name}.tflite"
        program.litert(file, sizes=sizes, check=False)
        arrays = {
            "signatures": [
                "_".join(["predict", *(f"{k}{n}" for k, n in chosen.items())]) for chosen in sizes
            ]
        }
        arrays["outputs"] = [
            name
            for name, _ in _litert.described_leaves([("output", program.entries["predict"].output)])
        ]
        for size in 0, 1:
            x = inputs(name, shapes[size])
            arrays |= {f"in{size}_{i}": a for i, a in enumerate(x)}
            arrays |= {
                f"out{size}_{i}": a for i, a in enumerate(jax.tree.leaves(jax.jit(f)(params, *x)))
            }
        np.savez(f"{file}.npz", **arrays)
    files = [str(folder / f"{name}.tflite") for name in names]
    run = subprocess.run([sys.executable, "-c", READER, *files], capture_output=True, text=True)
    assert run.stdout.split() == ["equal"] * len(names), run.stderr


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in MODELS
    ],
)
def test_models_in_a_process_without_jax(name, litert, tmp_path):
    runs_in_litert([name], tmp_path)


def compared(f, params, x, path, /, sizes, **specs):
    """The outputs in LiteRT for these inputs equal f's."""
    export.program(f, params, **specs).litert(path, sizes=sizes)
    from ai_edge_litert.interpreter import Interpreter

    got = Interpreter(str(path)).get_signature_runner("predict")(**dict(zip(specs, [x])))
    close(got["output"], np.asarray(jax.jit(f)(params, x)), 1e-5)


@pytest.mark.exhaustive
def test_a_flax_model(litert, tmp_path):
    f, params, x = flax_model()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        compared(f, params, x, tmp_path / "f.tflite", {"b": 3}, x=export.spec("b, 8, 8, 1"))


@pytest.mark.exhaustive
def test_an_equinox_model(litert, tmp_path):
    f, params, x = equinox_model()
    with jax.numpy_rank_promotion("allow"):
        compared(f, params, x, tmp_path / "f.tflite", {"b": 4}, x=export.spec("b, 6"))


@pytest.mark.exhaustive
def test_a_haiku_model(litert, tmp_path):
    f, params, x = haiku_model()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        compared(f, params, x, tmp_path / "f.tflite", {"b": 2}, x=export.spec("b, 5", "int32"))


def test_weights_of_fewer_bits(litert, tmp_path):
    """The model computes with weights that NumPy rounds in the same way; several signatures share
    them."""
    kernel = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(4, 256)).astype(np.float32)
    program, sizes, outputs = linear(jnp.asarray(kernel)), [{"b": 1}, {"b": 4}], {}
    for dtype, width in ("float32", 4), ("float16", 2), ("int8", 1):
        path = tmp_path / dtype
        program.litert(path, sizes=sizes, dtype=dtype)
        assert 0 < path.stat().st_size - kernel.size * width < 5000
        outputs[dtype] = (
            litert[0].Interpreter(str(path)).get_signature_runner("predict_b4")(x=x)["output"]
        )
    close(outputs["float32"], x @ kernel, 1e-5)
    close(outputs["float16"], x @ kernel.astype(np.float16).astype(np.float32), 1e-5)
    scale = np.abs(kernel).max(0) / 127
    rounded = np.round(kernel / scale) * scale
    apart = np.abs(outputs["int8"] - x @ rounded).max() / np.abs(x @ rounded).max()
    assert 0 < apart < 0.02  # x is rounded to 8 bits as well


def test_trees_reversed_scans_and_default_sizes(litert, tmp_path):
    def f(params, x):
        carry, y = jax.lax.scan(
            lambda c, a: (c + a @ params, c), x["a"][:, 0], x["a"].swapaxes(0, 1), reverse=True
        )
        return {"last": carry, "all": y.swapaxes(0, 1)}

    program = export.program(
        f, jnp.eye(3) / 2, x={"a": export.spec("b, t, 3", where=("t <= 4", "b >= 2"))}
    )
    program.litert(tmp_path / "f.tflite")
    runner = litert[0].Interpreter(str(tmp_path / "f.tflite")).get_signature_runner("predict")
    assert list(runner.get_input_details()["x/a"]["shape"]) == [2, 4, 3]
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    got, want = runner(**{"x/a": x}), f(jnp.eye(3) / 2, {"a": jnp.asarray(x)})
    close(got["output/last"], want["last"], 1e-6)
    close(got["output/all"], want["all"], 1e-6)


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_additions_to_rows(mode, litert, tmp_path):
    """Also outside of the array, and twice to one row."""
    draw = np.random.default_rng(0)
    x, rows, both = (
        draw.normal(size=shape).astype(np.float32) for shape in [(4, 5, 3), (6, 5, 3), (6, 3)]
    )
    first, second = np.int32([0, 3, 3, -9, 4, 1]), np.int32([4, 0, 0, 1, 2, 5])

    def f(params, x, first, second):
        return (
            x.at[first].add(rows, mode=mode),
            x.at[first, second].add(both, mode=mode),
            x.at[:, second].add(rows.swapaxes(0, 1)[:4], mode=mode),
        )

    inputs = {"x": x, "first": first, "second": second}
    program = export.program(f, {}, **inputs)
    program.litert(tmp_path / "f.tflite")
    assert (
        _litert.compare(program, tmp_path / "f.tflite", sizes={}, inputs=list(inputs.values()))
        <= 1e-5
    )


@pytest.mark.exhaustive
def test_the_steps_of_a_decoder(litert, tmp_path):
    """With the caches as inputs and outputs."""
    gpt = models.GPT(11, 8, 2, 2, context=8)
    params, _ = gpt.init(jax.random.key(0), gpt.example())
    program = export.program(gpt, params, tokens=export.spec("b, t", "int32", where="t <= 8"))
    program = export.generation(program, gpt, context=8)
    program.litert(tmp_path / "prefill.tflite", entry="prefill", sizes={"b": 1, "t": 3})
    program.litert(tmp_path / "decode.tflite", entry="decode", sizes={"b": 1})


def test_errors(tmp_path, monkeypatch):
    program = export.program(lambda params, x: x * 2, {}, x=export.spec("b, t", where="t <= 8"))
    for options, error in (
        ({"dtype": "int4"}, r"Program.litert: dtype='int4': expected float32, float16, int8"),
        ({"entry": "embed"}, r"Program.litert: there is no entry point 'embed'; there are predict"),
        (
            {"sizes": {"b": 2}},
            r"Program.litert: sizes=\{'b': 2\}: expected a number of at least 1 for b and t",
        ),
        ({"sizes": {"b": 0, "t": 1}}, r"expected a number of at least 1 for b and t"),
        ({"sizes": []}, r"Program.litert: sizes=\[\]: expected at least one choice of sizes"),
        ({"sizes": [{"b": 1, "t": 2}] * 2}, r"Program.litert: sizes has \{'b': 1, 't': 2\} twice"),
        (
            {"sizes": {"b": 1, "t": 9}},
            r"Program.litert: sizes=\{'b': 1, 't': 9\} violates the constraint t <= 8",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            program.litert(tmp_path / "f.tflite", **options)
    monkeypatch.setitem(sys.modules, "litert_converter", None)
    with pytest.raises(
        ImportError,
        match=r"LiteRT needs the packages litert-converter, ai-edge-litert and litert-quantizer "
        r"\(.*\): pip install litert-converter==0\.5\.0 'ai-edge-litert==2\.3\.\*' "
        r"'litert-quantizer==0\.11\.\*'\. They exist for some versions of Python and systems alone; "
        r"this is Python 3\.\d+ on \w+",
    ):
        program.litert(tmp_path / "f.tflite")
    assert not (tmp_path / "f.tflite").exists()


OPERATIONS = {
    "transposed convolution": lambda x: jax.lax.conv_transpose(
        x[None, :, :, None], jnp.ones((3, 3, 1, 4)), (2, 2), "SAME"
    ),
    "updates": lambda x: x.at[:, 3].set(0.0),
    "top_k": lambda x: jax.lax.top_k(x, 3),
    "cumsum": lambda x: x.cumsum(1),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, x),
    "argmax": lambda x: x.argmax(1),
    "searchsorted": lambda x: jnp.searchsorted(
        jnp.linspace(-1, 1, 9), x, side="right", method="compare_all"
    ),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore:Program.litert.*With usual inputs, the outputs agree"
)  # top_k: 0.0 and -0.0
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, litert, tmp_path):
    program = export.program(lambda params, x: OPERATIONS[name](x), {}, x=export.spec("6, 8"))
    program.litert(tmp_path / "f.tflite")  # which compares the outputs


@pytest.mark.exhaustive
def test_quantized_parameters_of_fnet(litert, tmp_path):
    model = models.CNN(10, (4, 6), 1)
    params, state = model.init(jax.random.key(0), IMAGE)
    params = compress.quantize(params, {".*kernel": compress.Int8()})
    f = ft.use_implicit_arrays(lambda params, x: model(params, x, state=state)[0])
    compared(f, params, IMAGE, tmp_path / "f.tflite", {"b": 3}, x=export.spec("b, 8, 8, 1"))


def test_operations_that_are_not_supported(litert, tmp_path):
    """In the converter, in the interpreter, and bfloat16."""
    refused = {
        lambda x: jax.lax.while_loop(
            lambda x: x.sum() < 100, lambda x: x * 2, x
        ): "not supported by litert-converter",
        lambda x: jnp.sort(
            x, 0
        ): r"the operation 'sort' at 'the top level' is not supported: the interpreter cannot "
        r"run this model: Didn't find op for .*STABLEHLO_SORT",
        lambda x: jax.lax.nextafter(
            x + 1, x
        ): r"the operation 'nextafter' at 'the top level' is not supported",
        lambda x: (
            x.astype(jnp.bfloat16) * 2
        ): r"the operation 'convert' at 'the top level' computes in bfloat16",
        lambda x: (
            x.astype(jnp.float16) * 2
        ): r"the operation 'convert' at 'the top level' computes in float16",
    }
    for f, error in refused.items():
        with pytest.raises(NotImplementedError, match=f"LiteRT: .*{error}"):
            export.program(lambda params, x, f=f: f(x), {}, x=export.spec("3")).litert(
                tmp_path / "f.tflite"
            )


def test_a_program_for_which_the_interpreter_ends_its_process(litert, tmp_path):
    types = dict.fromkeys("xy", export.spec("2, 0", "uint8"))
    with pytest.raises(
        NotImplementedError,
        match="LiteRT: the operation 'eq' at 'the top level' is not supported: the "
        "process that converts and tries the model ended with status -6",
    ):
        export.program(lambda params, x, y: x == y, {}, **types).litert(tmp_path / "f.tflite")
    assert not (tmp_path / "f.tflite").exists()


def test_a_program_that_fails_only_when_it_runs(litert, tmp_path):
    f = lambda params, x: jax.lax.reduce_window(x, np.uint16(0), jax.lax.add, (2,), (1,), "VALID")
    with pytest.raises(
        NotImplementedError, match="'window_sum' at 'the top level' is not supported"
    ):
        export.program(f, {}, x=export.spec("5", "uint16")).litert(
            tmp_path / "f.tflite", check=False
        )


SPECIAL = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1e-20,
        -1e-8,
        1e-5,
        0.3,
        -0.7,
        1 - 2**-24,
        1,
        -1,
        1.5,
        2.5,
        -20,
        88.5,
        127.7,
        1e9,
        -1e20,
        3.4e38,
        -3.4e38,
    ],
    np.float32,
)
FUNCTIONS = (
    "neg sign log log1p expm1 exp2 sinh cosh asinh acosh atanh sqrt rsqrt cbrt abs floor ceil "
    "is_finite atan asin acos"
).split()


def run(path, *arrays):
    from ai_edge_litert.interpreter import Interpreter

    results = Interpreter(str(path)).get_signature_runner("predict")(
        **{f"x{i}": x for i, x in enumerate(arrays)}
    )
    return [results[name] for name in sorted(results)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values_of_functions(name, litert, tmp_path):
    f = getattr(jax.lax, name)
    export.program(lambda params, x: f(x), {}, x0=export.spec("n")).litert(
        tmp_path / "f", sizes={"n": 22}, check=False
    )
    assert stable_values.judged(run(tmp_path / "f", SPECIAL)[0], f(SPECIAL)) == ""


@pytest.mark.exhaustive
def test_special_values_of_pairs(litert, tmp_path):
    """Remainders, divisions by zero, shifts beyond the bits, positions of NaN, and casts."""
    x, y = (a.ravel() for a in np.meshgrid(SPECIAL, SPECIAL))
    numbers = np.array([-(2**31), -33, -7, -1, 0, 1, 2, 31, 32, 2**31 - 1], np.int32)
    i, j = (a.ravel() for a in np.meshgrid(numbers, numbers))

    def f(params, x0, x1, x2, x3):
        return [
            jax.lax.rem(x0, x1),
            jax.lax.div(x2, x3),
            jax.lax.rem(x2, x3),
            jax.lax.shift_right_logical(x2, x3),
            jax.lax.shift_right_arithmetic(x2, x3),
            jnp.argmax(x0),
            jnp.argmin(x0[1:]),
            x0.astype(jnp.int8),
            jax.lax.clamp(x3, x2, x3 + 1),
        ]

    export.program(
        f,
        {},
        x0=export.spec("484"),
        x1=export.spec("484"),
        x2=export.spec("100", "int32"),
        x3=export.spec("100", "int32"),
    ).litert(tmp_path / "f", check=False)
    for got, want in zip(
        run(tmp_path / "f", x, y, i, j), f({}, *map(jnp.asarray, (x, y, i, j))), strict=True
    ):
        assert stable_values.judged(got, want) == ""


def test_sums_of_unsigned_integers_and_pads_of_negative_zeros(litert, tmp_path):
    """LiteRT has no sums over windows and axes of uint32, and pads with 0.0 in place of -0.0."""

    def f(params, x0, x1, x2):
        rows = jax.lax.reduce_window(
            x0, np.uint32(0), jax.lax.add, (2, 2), (1, 1), ((1, 1), (0, 1))
        )
        return [
            rows,
            jnp.cumsum(x0, 1),
            jnp.cumprod(x0, 0),
            jax.lax.pad(x1, x2, ((1, 0, 0), (-1, 2, 1))),
            jax.lax.pad(x1, x2, ((3, -3, 0), (0, 0, 0))),
            jax.lax.pad(x1, np.float32(1), ((1, 1, 0),) * 2),
            jnp.where(
                jax.lax.pad(jnp.ones((2, 3), bool), np.False_, ((3, -3, 0), (0, 0, 0))), x1, 0
            ),
        ]

    x0 = np.array([[1, 2**31, 2**32 - 1], [7, 2**32 - 3, 2**16 + 1]], np.uint32)
    x1 = np.array([[1, -0.0, np.nan], [np.inf, 0.0, -2]], np.float32)
    export.program(
        f, {}, x0=export.spec("2, 3", "uint32"), x1=export.spec("2, 3"), x2=export.spec("")
    ).litert(tmp_path / "f", check=False)
    for x2 in np.float32(-0.0), np.float32(0.0), np.float32(np.nan), np.float32(3):
        wanted = f({}, *map(jnp.asarray, (x0, x1, x2)))
        for got, want in zip(run(tmp_path / "f", x0, x1, x2), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
            assert (
                got.dtype.kind == "u" or not (np.signbit(got) ^ np.signbit(want))[want == 0].any()
            )


def test_a_warning_of_other_values(litert, tmp_path):
    def f(params, x):
        with jax.named_scope("head"):
            return jnp.exp(x), jnp.exp(x + 1), jnp.maximum(x, 0)

    with pytest.warns(
        UserWarning,
        match=r"values for special numbers. exp at 'head' and 1 more: exp\(NaN\) is 0, "
        r"and results above 2.4e38 are infinite; max at 'head': NaN is ignored",
    ):
        export.program(f, {}, x=export.spec("3")).litert(tmp_path / "f")
    with pytest.warns(
        UserWarning,
        match=r"special numbers. -0.0 at 'the top level': an array of this constant alone",
    ):
        export.program(lambda params, x: jnp.where(x > 1, x, -0.0), {}, x=export.spec("3")).litert(
            tmp_path / "f"
        )


def test_a_difference_is_reported(litert, tmp_path):
    linear().litert(tmp_path / "f.tflite")
    other = linear(jnp.full((3, 2), 1.001))
    with pytest.raises(
        ValueError,
        match=r"f.tflite: in LiteRT with usual inputs, the output 'output' differs from "
        r"the program's by 1.0e-03 of its value, more than 1e-05",
    ):
        _litert.compare(other, tmp_path / "f.tflite", sizes={"b": 1})
    with pytest.raises(ValueError, match=r"more than 0\.25"):
        _litert.compare(
            linear(jnp.full((3, 2), 1.4)),
            tmp_path / "f.tflite",
            sizes={"b": 1},
            tolerance=_litert.TOLERANCE["int8"],
        )
