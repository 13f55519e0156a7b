"""What a program is computed as: a proof is about the portable program, but `ft.tune`, kernels and
implicit arrays compute some of its operations in another form.

`FORMS` lists every such form. Each equals the portable one, and keeps its rows apart: NaN or
infinities in one row change no bit of another. A form that is added without an entry fails
`test_every_form_has_an_entry`.
"""

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fnet
from fnet import _jax, compress, native
from fnet import layers as nn
from fnet import transforms as ft
from fnet.compress._formats import Format
from fnet.hardware._onednn import onednn
from fnet.jaxpr import ImplicitArray, Interpreter, Value, description
from fnet.layers import _tile_dot, dot_product_attention
from fnet.serve._engine import _adapters  # noqa: F401, defines Adapted
from fnet.transforms._autocast import _lowered
from fnet.transforms._tune import _accelerators, _accumulated, _convolutions, _cpu, _library
from fnet.transforms._tune._tune import RULES

pytestmark = [
    pytest.mark.usefixtures("quickly", "every_size"),
    pytest.mark.filterwarnings("ignore:tune. the compiler options"),
]
ROOT = Path(fnet.__file__).parent
B16 = jnp.bfloat16
GPU, TPU = "H100 SXM5 80GB", "TPU v5e"


@pytest.fixture
def every_size(monkeypatch):
    """Rules of tune that exclude small arrays or some CPUs apply to all."""
    for module, values in (
        (_cpu, {"LARGE": 2, "LARGE_LOW": 0, "EXAMPLES": 1, "CHANNELS": 1}),
        (_convolutions, {"WORK": 0}),
        (
            _library,
            {"LARGE": 0, "SMALL": 0, "bfloat16_pays": lambda: True, "onednn": lambda: True},
        ),
        (_accelerators, {"LARGE": 1}),
        (_accumulated, {"LARGE": 1}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def draw(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


class Form(NamedTuple):
    """A program in its portable form, and how it is computed.

    Attributes:
        program: the function.
        x: its argument, whose first axis has the rows.
        computed: returns the program in the other form.
        tolerance: the largest difference, divided by the largest output.
        rows: whether the first axis of the result has the rows, too. Otherwise the result combines
            them in both forms.
        weights: other arguments of the function.
    """

    program: Callable
    x: Any
    computed: Callable
    tolerance: float = 1e-5
    rows: bool = True
    weights: tuple = ()


# tune


def tuned(name: str, chip: str = "cpu") -> Callable:
    rules = {rule.name: rule.name == name for rule in RULES[chip_kind(chip)]}

    def computed(f):
        g = ft.tune(f, chip, rules=rules)

        def checked(*args):
            report = ft.explain(g, *args)
            option = next(r for r in RULES[chip_kind(chip)] if r.name == name).options
            used = {row.rule for row in report.rows}
            missing = name.startswith("native") and not native.library()
            assert name in used or missing or (option and option.items() <= report.options.items())
            return g(*args) if option else jax.jit(g)(*args)

        return checked

    return computed


def chip_kind(chip: str) -> str:
    return "cpu" if chip == "cpu" else "tpu" if chip.startswith("TPU") else "gpu"


def convolution(
    channels, groups=1, *, window=(3, 3), padding="SAME", kernel="IO", dtype=jnp.float32, **options
):
    sizes = {"I": channels // groups, "O": channels}
    w = draw(*window, *(sizes[axis] for axis in kernel), dtype=dtype)
    space = "DHW"[-len(window) :]
    return lambda x: lax.conv_general_dilated(
        x.astype(dtype),
        w,
        (1,) * len(window),
        padding,
        dimension_numbers=(f"N{space}C", space + kernel, f"N{space}C"),
        feature_group_count=groups,
        **options,
    )


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def gradient(f):
    """The gradient of each row."""
    return jax.grad(lambda x: (f(x) * jnp.sin(jnp.arange(f(x).size).reshape(f(x).shape))).sum())


def kernel_gradient(x):
    f = lambda w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.grad(lambda w: (f(w) ** 2).sum())(draw(3, 3, 4, 4))


def layers(x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, draw(3, 8, 8))[0]


def cast_layers(x):
    """A constant that each iteration casts."""
    w = draw(8, 8)

    def one(part):
        return (part.astype(B16) @ w.astype(B16)).astype(jnp.float32)

    return lax.map(one, x)


def overwritten(x):
    """A cache in which each row writes one place."""
    at = jnp.array([[2], [0], [3], [1]])
    cache = jnp.broadcast_to(x[:, :, None], (4, 8, 5))
    return cache.at[jnp.arange(4)[:, None], :, at].set(x[:, None], mode="drop")


def statistics(x):
    """A batch norm's mean and variance of bfloat16 numbers, between convolutions."""
    model = nn.Sequential(nn.Conv(4, 1), nn.BatchNorm(momentum=0.0), jax.nn.relu, nn.Conv(2, 3))
    params, state = model.init(jax.random.key(0), x)
    f = ft.autocast(lambda x: model(params, x, state=state, train=True), "bfloat16")
    return jnp.stack(jax.tree.leaves(f(x)[1]["1"]))


def recurrent(x):
    layer = nn.LSTM(5, bidirectional=True)
    params, _ = layer.init(jax.random.key(0), x)
    return layer(params, x, lengths=jnp.array([16, 3, 0, 9]))


IMAGES = draw(4, 4, 4, 4)
summed = jax.vmap(
    lambda row: lax.scan(lambda s, e: (s + e.T @ e, None), jnp.zeros((16, 16)), row)[0]
)
TUNE = {
    "summed_products": Form(summed, draw(4, 3, 1, 16), tuned("summed_products")),
    "products": Form(
        lambda x: jnp.einsum("de,bte->bdt", draw(5, 8), x), draw(4, 6, 8), tuned("products")
    ),
    "bfloat16_products": Form(
        lambda x: x @ draw(8, 5, dtype=B16),
        draw(4, 8, dtype=B16),
        tuned("bfloat16_products"),
        2**-7,
    ),
    "max_pool": Form(pooled, IMAGES, tuned("max_pool")),
    "max_pool_gradient": Form(gradient(pooled), IMAGES, tuned("max_pool_gradient")),
    "native_convolution": Form(convolution(64), draw(4, 8, 8, 64), tuned("native_convolution")),
    "native_product": Form(
        lambda x: x @ draw(256, 257), draw(4, 256), tuned("native_product"), 1e-5
    ),
    "native_recurrence": Form(recurrent, draw(4, 16, 3), tuned("native_recurrence")),
    "depthwise_convolution": Form(convolution(4, 4), IMAGES, tuned("depthwise_convolution")),
    "grouped_convolution": Form(convolution(4, 2), IMAGES, tuned("grouped_convolution")),
    "small_input": Form(convolution(4), draw(4, 2, 2, 4), tuned("small_input")),
    "dilated_input": Form(
        convolution(3, window=(2, 2, 2), lhs_dilation=(2, 2, 2), padding=((1, 1),) * 3),
        draw(4, 3, 3, 3, 3),
        tuned("dilated_input"),
    ),
    "convolution_gradient": Form(
        kernel_gradient, draw(4, 8, 8, 4), tuned("convolution_gradient"), rows=False
    ),
    "kernel_layout": Form(
        convolution(4, kernel="OI", dtype=B16), IMAGES, tuned("kernel_layout"), 2**-7
    ),
    "convolution_kernels": Form(convolution(4), IMAGES, tuned("convolution_kernels")),
    "convolution_library": Form(
        convolution(4, dtype=B16), IMAGES, tuned("convolution_library"), 2**-7
    ),
    "unrolled_layers": Form(layers, draw(4, 8), tuned("unrolled_layers", GPU)),
    "hoisted_casts": Form(cast_layers, draw(4, 3, 8), tuned("hoisted_casts", GPU), 2**-7),
    "comparison": Form(
        lambda x: jnp.take_along_axis(x, jnp.array([[3], [0], [7], [1]]), 1),
        draw(4, 8),
        tuned("comparison", GPU),
    ),
    "two_rows": Form(
        lambda x: x @ draw(256, 256, dtype=B16),
        draw(1, 256, dtype=B16),
        tuned("two_rows", GPU),
        2**-7,
        rows=False,
    ),
    "separate_layers": Form(
        lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w, unroll=3)[0],
        draw(4, 8),
        tuned("separate_layers", TPU),
        weights=(draw(3, 8, 8),),
    ),
    "few_updates": Form(overwritten, draw(4, 8), tuned("few_updates", TPU)),
    "unshifted": Form(statistics, draw(16, 3, 3, 3), tuned("unshifted", TPU), 1e-3, rows=False),
}

# Lowerings of fnet's own primitives


class Opened(Interpreter):
    """Evaluates primitives of fnet by other functions of their operands and parameters."""

    def __init__(self, forms):
        super().__init__()
        self.forms, self.opened_names = forms, set()

    def equation(self, eqn, at, inputs, plan):
        form = self.forms.get(eqn.primitive.name)
        if form is None:
            return NotImplemented
        self.opened_names.add(eqn.primitive.name)
        outputs = form(eqn)(*(value.x for value in inputs))
        return list(map(Value, outputs if isinstance(outputs, (list, tuple)) else [outputs]))


def by(**forms) -> Callable:
    """Computes a program with other forms of some primitives."""

    def computed(f):
        interpreter = Opened(forms)

        def run(x):
            y = jax.jit(interpreter.applied(f))(x)
            assert interpreter.opened_names == set(forms)
            return y

        return run

    return computed


def plain(eqn) -> Callable:
    """What `introspect.depends` and bundles make of a primitive of fnet."""
    body = description(eqn.primitive).plain(eqn)
    return lambda *arrays: jax.core.eval_jaxpr(body, (), *arrays)


def lowered(form) -> Callable:
    return lambda eqn: functools.partial(form, **eqn.params)


def attention(x):
    heads = x.reshape(*x.shape[:2], 2, 8)
    return dot_product_attention(
        heads, heads, heads, causal=True, lengths=jnp.array([40, 3, 64, 9])
    )


def packed_attention(x):
    """Four texts in each row, so that blocks are skipped."""
    heads = x.reshape(*x.shape[:2], 2, 8)
    segments = jnp.broadcast_to(jnp.repeat(jnp.arange(1, 5), 128), x.shape[:2])
    return dot_product_attention(heads, heads, heads, causal=True, segments=segments)


def in_bfloat16(x):
    return ft.autocast(lambda x: jnp.tanh(x @ draw(8, 5)), "bfloat16")(x)


def by_hand(x):
    w = draw(8, 5).astype(B16)
    y = jnp.matmul(x.astype(B16), w, preferred_element_type=jnp.float32)
    return jnp.tanh(y)


def experts(x):
    """Rows of several experts, each with its own kernel."""
    kernels, expert = draw(2, 8, 5), jnp.array([1, 0, 1, 1])
    return _tile_dot.tile_dot(x, kernels, expert)


LOWERINGS = {  # by file, one for each call of `mlir.register_lowering`
    "jaxpr/_tags.py": {"tag": Form(lambda x: ft.tag(x, "x"), draw(4, 8), jax.jit)},
    "layers/_divided.py": {
        "divided": "parallel/test_misdivided.py::test_one_device_and_one_axis_get_no_constraints"
    },
    "layers/_recurrence.py": {"recurrence": Form(recurrent, draw(4, 7, 3), jax.jit)},
    "native/_primitive.py": {
        "portable": "transforms/test_tune_native.py::test_an_exported_program_is_portable",
        "kernels on CPUs": "native/test_convolution_kernel.py::test_products_and_gradients_are_those_of_xla",
    },
    "layers/_tile_dot.py": {"tile_dot": Form(experts, draw(4, 3, 8), by())},
    "layers/_attend.py": {
        "attention on CPUs": Form(attention, draw(4, 64, 16), jax.jit),
        "attention of packed texts": Form(packed_attention, draw(4, 512, 16), jax.jit),
        "attention by kernels": (
            "layers/test_attend_flash.py::test_splash_attention_in_pallas_interpreter"
        ),
    },
    "transforms/_autocast/_lowered.py": {
        name: Form(in_bfloat16, draw(4, 8), by(lowered=lowered(form)), 2**-7)
        for name, form in (
            ("products on accelerators", _lowered._on_accelerators),
            ("products on CPUs", _lowered._on_cpu),
            ("products on CUDA", _lowered._on_cuda),
        )
    },
}

# Implicit arrays


def implicit(params) -> Callable:
    """A product with a parameter that is stored in another form."""

    def computed(f):
        g = ft.use_implicit_arrays(lambda p, x: program_of(p, x))
        return lambda x: jax.jit(g)(params, x)

    return computed


def program_of(params, x):
    return jnp.tanh(x @ params["w"])


def stored(make) -> Form:
    params = make({"w": draw(8, 5)})
    values = compress.materialize(params)
    return Form(lambda x: program_of(values, x), draw(4, 8), implicit(params))


def quantized(format) -> Callable:
    return lambda params: compress.quantize(params, {".*": format})


IMPLICIT = {  # by class
    "Quantized": {
        type(each).__name__: stored(quantized(each))
        for each in (compress.Int8(), compress.Int4(group=2), compress.NF4(None), compress.Float8())
    },
    "LowRank": {"LoRA": stored(lambda p: compress.lora(jax.random.key(0), p, {".*": 2}))},
    "FakeQuantized": {"fake": stored(lambda p: compress.fake_quantize(p, {".*": compress.Int8()}))},
    "Adapted": {"adapters of rows": "serve/test_engine.py::test_adapters_in_one_batch"},
}

# Kernels by the names of their custom calls, with the tests of their numbers, and of rows. There is
# none for cuDNN's, which need a GPU; that they are called as JAX calls them is tested without one.
KERNELS = {
    "tpu_custom_call": "layers/test_attend_flash.py::test_splash_attention_keeps_rows_apart",
    **dict.fromkeys(
        (
            "__cudnn$fmhaSoftmax",
            "__cudnn$fmhaSoftmaxBackward",
            "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxBackward",
        ),
        "layers/test_attend_flash.py::test_cudnn_is_called_as_jax_nn_calls_it",
    ),
}

FORMS = {
    **TUNE,
    **{name: form for each in LOWERINGS.values() for name, form in each.items()},
    **{name: form for each in IMPLICIT.values() for name, form in each.items()},
}
ELSEWHERE = {name: form for name, form in FORMS.items() if isinstance(form, str)}


def near(got, want, tolerance):
    got, want = (np.asarray(y, np.float64) for y in (got, want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    largest = np.abs(want[finite]).max(initial=0)
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= tolerance * largest


@pytest.mark.quick_cases("products", "attention on CPUs", "products on CPUs", "Int8")
@pytest.mark.parametrize("name", sorted(FORMS.keys() - ELSEWHERE.keys()))
def test_each_form_equals_the_portable_one_and_keeps_rows_apart(name):
    form = FORMS[name]
    if name == "convolution_library" and not onednn():
        pytest.skip("this XLA or CPU has no oneDNN convolutions of bfloat16")
    bound = lambda f: lambda x: f(x, *form.weights)
    portable = bound(jax.jit(portable_of(form.program)))
    computed = bound(form.computed(form.program))
    y = np.asarray(computed(form.x).astype(jnp.float32))
    near(y, portable(form.x), form.tolerance)
    for row in {0, len(form.x) - 1}:
        for value in (jnp.nan, jnp.inf):
            x = form.x.at[row].set(value)
            changed = np.asarray(computed(x).astype(jnp.float32))
            near(changed, portable(x), form.tolerance)
            if form.rows:
                kept = np.arange(len(y)) != row
                assert changed[kept].tobytes() == y[kept].tobytes(), (row, value)


def portable_of(f):
    """The program with the primitives of fnet opened, as in a bundle."""

    class Portable(Interpreter):
        def equation(self, eqn, at, inputs, plan):
            opened = description(eqn.primitive).plain
            if opened is None:
                return NotImplemented
            return self.evaluate(opened(eqn), (), inputs, at)

    return Portable().applied(f)


def test_every_form_has_an_entry():
    """Rules of tune, lowerings of fnet's primitives, implicit arrays and kernels."""
    rules = {rule.name for platform in RULES.values() for rule in platform}
    assert rules == set(TUNE)
    lowerings = {}
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "register_lowering" not in text:
            continue
        calls = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_lowering")
        ]
        lowerings[path.relative_to(ROOT).as_posix()] = len(calls)
    assert lowerings == {path: len(names) for path, names in LOWERINGS.items()}
    assert {kind.__name__ for kind in subclasses(ImplicitArray)} == {"Wrapped", *IMPLICIT}
    formats = {kind.__name__ for kind in subclasses(Format)}
    assert formats == set(IMPLICIT["Quantized"])
    assert set(_jax.kernels.CUSTOM_CALLS) == set(KERNELS)
    for test in (*ELSEWHERE.values(), *KERNELS.values()):
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT.parent / "tests" / path).read_text(encoding="utf-8")


def subclasses(kind) -> set[type]:
    """Those of fnet; classes of fnet that are private observe, and compute nothing else."""
    found = {each for each in kind.__subclasses__() if each.__module__.startswith("fnet.")}
    found = {each for each in found if not each.__name__.startswith("_")}
    return found.union(*map(subclasses, found))
