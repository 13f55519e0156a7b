"""The checks of exported files: they find faults that are planted in conversions, and refuse no
legal program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import export
from fnet import layers as nn
from fnet.export import _examples, _stable
from fnet.export._choices import choices
from fnet.export.onnx import _elementwise
from fnet.export.standalone import _interpret, _outputs, _rounding, _sizes

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("quickly")
from fnet.export.onnx import _onnx  # noqa: E402

S = export.spec


def program(f, **specs):
    return export.program(lambda params, *args: f(*args), {}, **specs)


def op(kind, *more, **attributes):
    return lambda e, *xs: e.g.op(kind, *xs, *(e.number(x) for x in more), **attributes)


def first_rows(e, x):
    """exp(x) of the first example, for all."""
    return e.g.op("Exp", e.g.op("Expand", e.g.slice(x, 0, 1, 0), e.g.op("Shape", x)))


def inexact(e, x):
    return e.g.op("Mul", e.g.op("Exp", x), e.number(1.00003))


def bounded_sigmoid(e, x):
    return e.g.op("Sigmoid", e.g.op("Max", x, e.number(-18)))


def two_terms(e):
    return [e.g.op("ReduceSum", e.g.slice(e.x(0), 0, 2, 1), e.g.integers(1), keepdims=0)]


def unchecked_index(e):
    """An index beyond the axis is taken from its other end."""
    at = e.g.op(
        "Mod",
        e.g.cast(e.g.op("Squeeze", e.x(1), e.g.integers(-1)), np.int64),
        e.g.size(e.in_types[0][1][0]),
    )
    return [e.g.op("Gather", e.x(0), at, axis=0)]


def clipped_scatter(e):
    e.options = {**e.options, "clip": True}
    return REAL["scatter"](e)


def other_epsilon(e):
    return [
        e.g.op(
            "LayerNormalization",
            e.x(0),
            e.g.constant(np.ones(8, np.float32)),
            axis=-1,
            epsilon=2e-5,
        )
    ]


def cast(e, x):
    return e.g.cast(x, e.dtype)


def with_argmax(**attributes):
    return lambda e: [e.g.cast(e.g.op("ArgMax", e.x(0), axis=1, keepdims=0, **attributes), e.dtype)]


REAL = dict(_onnx._DIRECT)
TABLE = np.arange(12, dtype=np.float32).reshape(6, 2)
X, N = S("b, t"), S("b", "int32")
FAULTS = {  # name: (the operation, its faulty conversion, a program that uses it)
    "lengths off by one": (
        "lt",
        op("LessOrEqual"),
        program(
            lambda x, n: jnp.where(jnp.arange(x.shape[1])[None] < n[:, None], x, 0.0).sum(1),
            x=X,
            n=N,
        ),
    ),
    "an index that is not clamped": (
        "gather",
        unchecked_index,
        program(lambda i: jnp.take(TABLE, i, axis=0, mode="clip"), i=N),
    ),
    "updates that are clamped instead of dropped": (
        "scatter",
        clipped_scatter,
        program(lambda i: jnp.zeros((5, 2)).at[i].add(1.0), i=N),
    ),
    "the sign of a remainder": (
        "rem",
        op("Mod", fmod=0),
        program(lambda x, y: lax.rem(x, y), x=N, y=N),
    ),
    "quotients that lose their sign": (
        "div",
        lambda e, x, y: e.g.op("Abs", e.g.op("Div", x, y)),
        program(lambda x, y: lax.div(x, y), x=N, y=N),
    ),
    "casts that do not saturate": ("convert", cast, program(lambda x: x.astype(jnp.uint8), x=X)),
    "log1p near 0": (
        "log1p",
        lambda e, x: e.g.op("Log", e.g.op("Add", x, e.number(1))),
        program(lambda x: jnp.log1p(jnp.abs(x)), x=X),
    ),
    "expm1 near 0": (
        "expm1",
        lambda e, x: e.g.op("Sub", e.g.op("Exp", x), e.number(1)),
        program(jnp.expm1, x=X),
    ),
    "a sigmoid that stops at -18": ("logistic", bounded_sigmoid, program(jax.nn.sigmoid, x=X)),
    "halves that are rounded up": (
        "round",
        lambda e, x: e.g.op("Floor", e.g.op("Add", x, e.number(0.5))),
        program(jnp.round, x=X),
    ),
    "a wrong digit": ("exp", inexact, program(jnp.exp, x=X)),
    "wrong for more than two": ("reduce_sum", two_terms, program(lambda x: x.sum(1), x=X)),
    "wrong for more than one example": ("exp", first_rows, program(jnp.exp, x=X)),
    "the last of equal maxima": (
        "argmax",
        with_argmax(select_last_index=1),
        program(lambda x: jnp.argmax(jnp.sign(x), 1), x=X),
    ),
    "another epsilon": (
        "layer_norm",
        other_epsilon,
        program(lambda x: jax.nn.standardize(x, epsilon=1e-5), x=S("b, 8")),
    ),
    "an integer without its sign": ("neg", op("Abs"), program(lambda x: -x, x=N)),
    "a large integer": (
        "mul",
        lambda e, x, y: e.g.cast(
            e.g.op("Mul", *(e.g.cast(a, np.float32) for a in (x, y))), np.int32
        ),
        program(lambda x: x * jnp.int32(3), x=N),
    ),
    "a bool that is ignored": (
        "and",
        lambda e, x, y: e.g.op("Identity", x),
        program(lambda x, y: x & y, x=S("b", "bool"), y=S("b", "bool")),
    ),
}


def planted(monkeypatch, name, function):
    table = _elementwise.ELEMENTWISE if name in _elementwise.ELEMENTWISE else _onnx._DIRECT
    monkeypatch.setitem(table, name, function)


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault(name, monkeypatch, tmp_path):
    operation, function, example = FAULTS[name]
    planted(monkeypatch, operation, function)
    with pytest.raises(
        _outputs.Different, match=r"in onnxruntime with (usual|extreme) inputs, the output 'output'"
    ):
        example.onnx(tmp_path / "f.onnx")


def test_nan_that_is_not_propagated(monkeypatch, tmp_path):
    planted(monkeypatch, "max", lambda e, x, y: e.g.op("Where", e.g.op("Greater", x, y), x, y))
    with pytest.warns(
        UserWarning, match=r"with special inputs.* is 0.0, expected nan.*With finite inputs"
    ):
        program(jax.nn.relu, x=X).onnx(tmp_path / "f.onnx")


NUMPY = {  # faults in the evaluation by NumPy, which the tests in a bundle find
    "lengths off by one": ("lt", np.less_equal),
    "log1p near 0": ("log1p", lambda x: np.log(np.float32(1) + x)),
    "halves that are rounded up": ("round", lambda x: np.floor(x + np.float32(0.5))),
    "an integer without its sign": ("neg", np.abs),
    "wrong for more than two": ("reduce_sum", lambda x: x[:, :2].sum(1)),
    "a bool that is ignored": ("and", lambda x, y: x),
    "the sign of a remainder": ("rem", np.mod),
    "expm1 near 0": ("expm1", lambda x: np.exp(x) - np.float32(1)),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", NUMPY)
def test_a_planted_fault_in_a_bundle(name, monkeypatch, tmp_path):
    operation, function = NUMPY[name]
    FAULTS[name][2].save(tmp_path / "f.fnet")
    bundle = export.load(tmp_path / "f.fnet", check=True)
    monkeypatch.setitem(
        _interpret.OPERATIONS, operation, lambda run, options, types, *arrays: [function(*arrays)]
    )
    with pytest.raises(
        export.BundleError, match="'predict' computed with NumPy, the output '0' differs"
    ):
        bundle.check()


deep = [np.random.default_rng(i).normal(size=(32, 32)).astype(np.float32) for i in range(12)]


def chaotic(x):
    """A deep network with large random weights amplifies rounding to its largest values."""
    for kernel in deep:
        x = jnp.sin(3 * (x @ kernel))
    return x


LEGAL = {
    "float16 softmax": (jax.nn.softmax, {"x": S("b, 4", "float16")}),
    "division of integers": (lambda x, y: [x // y, x % y, 100 // x, x // 3], {"x": N, "y": N}),
    "a padding of the window's size": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), ((0, 0), (2, 1))),
        {"x": S("b, 6")},
    ),
    "differences of sums": (lambda x: x.sum(1) - 1e3 + (x[:, :1] * 1e3).sum(1), {"x": X}),
    "a chaotic network": (chaotic, {"x": S("b, 32")}),
    "a long sum": (
        lambda x: (jnp.tile(x, (1, 500)) * jnp.sin(jnp.arange(4000.0))[None]).sum(1),
        {"x": S("b, 8")},
    ),
    "a loop that ends": (
        lambda n, x: lax.fori_loop(0, n, lambda i, x: x * 1.5, x),
        {"n": S("", "int32"), "x": X},
    ),
    "constraints": (
        lambda x: x.reshape(x.shape[0], x.shape[1] // 4, 4).mean(2),
        {"x": S("b, h", where=("mod(h, 4) == 0", "h >= 300"))},
    ),
    "a multiple of a size": (
        lambda x: x.reshape(x.shape[0], x.shape[1] // 4, 4).mean(2),
        {"x": S("b, 4*h")},
    ),
    "infinite values": (
        lambda x: [jnp.log(jnp.maximum(x, 0.0)), jnp.exp(x), 1 / jnp.maximum(x, 0.0)],
        {"x": X},
    ),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_program(name, tmp_path):
    f, specs = LEGAL[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        example = program(f, **specs)
        example.onnx(tmp_path / "f.onnx")
        example.save(tmp_path / "f.fnet")
        export.load(tmp_path / "f.fnet", check=True)


def drawn(example, kind, sizes):
    ranges = _examples.Ranges(_stable.stable(example.entries["predict"].closed)[0])
    return _examples.drawn(example.entries["predict"].inputs, sizes, ranges, kind)


def test_the_ranges_of_integers():
    """Lengths, tokens, starts and divisors are drawn from the ranges in which the program uses
    them."""

    def f(tokens, lengths, start, divisor):
        x = jnp.asarray(np.zeros((50, 2), np.float32))[tokens]
        return (
            nn.dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], lengths=lengths),
            (lax.dynamic_slice_in_dim(x, start, 2, 1)),
            tokens // divisor,
        )

    example = program(
        f,
        tokens=S("b, t", "int32", where="t >= 2"),
        lengths=N,
        start=S("", "int32"),
        divisor=S("", "int32"),
    )
    tokens, lengths, start, divisor = drawn(example, "usual", {"b": 8, "t": 6})
    assert tokens.min() == 0 and tokens.max() == 49 and lengths.min() == 1 and lengths.max() == 6
    assert 0 <= start < 6 and divisor != 0
    tokens, lengths, start, divisor = drawn(example, "extreme", {"b": 8, "t": 6})
    assert tokens.min() < 0 and tokens.max() > 50 and lengths.min() < 1 and lengths.max() > 6


def test_the_ranges_of_integers_in_branches_and_loops():
    def f(rows, lengths, which, branch):
        table, t = jnp.asarray(np.zeros((50, 2), np.float32)), rows.shape[0]
        places = jnp.arange(t)
        inside = lax.scan(
            lambda total, i: (total + (places < lengths[i]).sum(dtype=jnp.int32), i),
            np.int32(0),
            places,
        )
        sums = lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + table[rows].sum()), (0, np.float32(0))
        )
        chosen = lax.select_n(which, *(jnp.full(which.shape, i) for i in range(4)))
        return inside, sums, chosen, lax.switch(branch, [jnp.sin, jnp.cos, jnp.tan], np.float32(1))

    example = program(
        f,
        rows=S("t", "int32"),
        lengths=S("t", "int32"),
        which=S("9", "int32"),
        branch=S("", "int32"),
    )
    rows, lengths, which, _ = drawn(example, "usual", {"t": 40})
    assert (rows.min(), rows.max(), which.min(), which.max()) == (0, 49, 0, 3)
    assert 1 <= lengths.min() and 30 < lengths.max() <= 40
    rows, lengths, which, _ = drawn(example, "extreme", {"t": 40})
    assert rows.min() < 0 and rows.max() > 50 and lengths.min() < 1 and 40 < lengths.max() < 99
    assert which.min() < 0 and 3 < which.max() < 99


def test_the_kinds_of_numbers():
    (x,) = drawn(program(jnp.exp, x=S("b, t")), "extreme", {"b": 20, "t": 20})
    assert (
        np.isfinite(x).all()
        and (np.abs(x) < 1e-4).any()
        and (x > 99).any()
        and (x < -99).any()
        and (x == 0).any()
    )
    (x,) = drawn(program(jnp.exp, x=S("b, t")), "special", {"b": 20, "t": 20})
    assert np.isnan(x).any() and (x == np.inf).any() and (x == -np.inf).any()
    (n,) = drawn(program(lambda n: n + 1, n=N), "extreme", {"b": 40})
    assert n.min() < -1e9 and n.max() > 1e9 and (np.abs(n) < 10).any()
    quotients = program(lambda n, d: n // d, n=N, d=N)
    assert (drawn(quotients, "extreme", {"b": 400})[1] == 0).any() and (
        drawn(quotients, "usual", {"b": 400})[1]
    ).all()
    (flags,) = drawn(program(jnp.logical_not, x=S("b", "bool")), "usual", {"b": 40})
    assert flags.any() and not flags.all()


def test_sizes():
    assert choices(["b", "t"]) == [{"b": 3, "t": 4}, {"b": 1, "t": 5}]
    assert choices(["h"], ["h >= 1000", "mod(h, 4) == 0"])[0]["h"] >= 1000
    assert choices(["t"], ["t >= 4", "t <= 3"]) == []
    assert choices(["t"], ["t + 1 == 1000"]) == [{"t": 999}]


def test_nan_in_some_runs_is_no_agreement():
    one, nan = np.ones(1, np.float32), np.full(1, np.nan, np.float32)
    assert _rounding._deviation([nan] * 3) == 0 and _rounding._deviation([one] * 3) == 0
    for runs in (one, nan, nan), (nan, one, one), (one, one, nan):
        assert _rounding._deviation(runs) == np.inf


def test_a_size_with_a_huge_exponent_is_refused():
    assert _sizes.size("b^3", {"b": 2}) == 8
    with pytest.raises(ValueError, match="cannot evaluate a size with the exponent 99999"):
        _sizes.size("b^99999", {"b": 2})


def test_a_check_that_cannot_run_says_so(tmp_path):
    example = program(lambda x: x.sum(), x=S("b, t", where=("t >= b*b*b*b", "b >= 77")))
    with pytest.warns(
        UserWarning, match="not compared with the program, because no small sizes were found"
    ):
        example.onnx(tmp_path / "f.onnx")


def test_an_error_of_onnxruntime_names_the_operation(tmp_path, monkeypatch):
    planted(monkeypatch, "exp", lambda e, x: e.g.op("Expand", x, e.g.integers(7, 7)))
    with (
        jax.named_scope("block"),
        pytest.raises(NotImplementedError, match=r"onnxruntime cannot run .*Expand"),
    ):
        program(jnp.exp, x=S("b, t")).onnx(tmp_path / "f.onnx")


@pytest.mark.parametrize(
    "f",
    (
        lambda x: jnp.einsum("bti,bsi->bts", x, x),
        lambda x: jnp.repeat(x, 2, axis=1),
        lambda x: jnp.tile(x, (1, 3, 1)),
        lambda x: jnp.roll(x, 1, 0),
        lambda x: lax.map(lambda row: row * 2, x),
    ),
)
def test_an_empty_batch(f, tmp_path):
    import onnxruntime

    program(f, x=S("b, t, 4", where="t >= 2")).onnx(tmp_path / "f.onnx", check=False)
    x = np.zeros((0, 4, 4), np.float32)
    (y,) = onnxruntime.InferenceSession(str(tmp_path / "f.onnx")).run(None, {"x": x})
    assert y.shape == f(x).shape


def test_comparisons():
    compare = lambda got, want, **options: _outputs.compare(
        "f", ["y"], [got], [want], 1e-5, **options
    )
    large = np.array([1e6, 1e-6], np.float32)
    assert compare(large, large) == 0
    with pytest.raises(_outputs.Different, match=r"y\[1\] is .* \(1 of 2 elements differ\)"):
        compare(large * np.array([1, 1.1], np.float32), large)  # small beside the largest element
    assert compare(large * np.array([1, 1.1], np.float32), large, largest=True) < 1e-5
    assert compare(large + 0.1, large, spreads=[lambda: [np.array([1.0, 1.0])]]) <= 1e-5
    nan = np.array([np.nan, np.inf, -np.inf, 0], np.float32)
    assert compare(nan, nan) == 0
    assert compare(large.astype(jnp.bfloat16), large.astype(jnp.bfloat16)) == 0
    for i in range(4):
        wrong = nan.copy()
        wrong[i] = 1
        with pytest.raises(_outputs.Different):
            compare(wrong, nan)
    with pytest.raises(_outputs.Different, match="is 2, expected 1"):
        compare(np.array([2]), np.array([1]))
    with pytest.raises(_outputs.Different, match=r"has shape \(1,\), and the program's \(2,\)"):
        compare(np.zeros(1), np.zeros(2))
    assert [
        _outputs.tolerance(dtypes)
        for dtypes in (["float32"], ["int32"], ["float32", "float16"], ["float64"])
    ] == [1e-5, 1e-5, 2e-3, 1e-10]
