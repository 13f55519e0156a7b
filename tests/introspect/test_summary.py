"""summary: FLOPs in closed form, parameters as in nnx.tabulate, kept activations as JAX lists them."""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.experimental.custom_partitioning import custom_partitioning

from fnet import introspect, models
from fnet import layers as nn

CHIP = "TPU v5e"
BLOCK = nn.Sequential(
    attend=nn.Residual(nn.LayerNorm(), attention=nn.Attention(2, causal=True)),
    mlp=nn.Residual(nn.LayerNorm(), nn.Dense(12), jnp.tanh, nn.Dense(8)),
)
MODEL = nn.Sequential(nn.Dense(8), blocks=nn.Stack(BLOCK, 3), norm=nn.BatchNorm(), head=nn.Dense(4))


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def products(layer, *inputs, path=""):
    """(forward, backward) FLOPs of matrix products."""
    row = introspect.summary(layer, *inputs, chip=CHIP)[path]
    return row.forward.matmul, row.backward.matmul - row.backward.recomputed


def test_dense():
    """2 b i o forward, as much for the kernel's gradient, and once more for the input's of all but
    the first layer."""
    assert products(nn.Dense(7), spec(3, 5)) == (2 * 3 * 5 * 7, 2 * 3 * 5 * 7)
    both = nn.Sequential(nn.Dense(7), nn.Dense(6))
    assert products(both, spec(3, 5), path="1") == (2 * 3 * 7 * 6, 4 * 3 * 7 * 6)
    row = introspect.summary(nn.Dense(7), spec(3, 5), chip=CHIP).total
    assert (
        row.forward.flops == 2 * 3 * 5 * 7 + 3 * 7
        and row.parameters == 5 * 7 + 7
        and row.parameter_bytes == 4 * 42
    )


def test_conv():
    forward = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    assert products(nn.Conv(6, 3), spec(2, 8, 8, 4)) == (forward, forward)


def test_attention():
    b, t, f, h = 2, 5, 8, 2
    projections, scores = 4 * 2 * b * t * f * f, 2 * 2 * b * t * t * f
    forward, backward = products(nn.Attention(h), spec(b, t, f))
    assert forward == projections + scores
    assert (
        backward == projections + 2 * b * t * f * f + 2 * scores
    )  # the projections read the input, but the last


def test_lstm_and_scan():
    b, t, i, h = 3, 4, 5, 6
    step = 2 * b * (i + h) * 4 * h
    forward, _ = products(nn.LSTM(h), spec(b, t, i))
    assert forward == t * step

    def f(w, x):
        with jax.named_scope("loop"):
            return lax.scan(lambda c, _: (c @ w, None), x, length=9)[0]

    assert products(f, spec(5, 5), spec(3, 5), path="loop") == (
        9 * 2 * 3 * 5 * 5,
        9 * 4 * 3 * 5 * 5,
    )


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (MODEL, (spec(2, 5, 8),)),
        (models.CNN(3, (4, 6)), (spec(2, 8, 8, 3),)),
        (models.GPT(11, 8, 2, 2, context=8), (spec(2, 5, dtype="int32"),)),
        (
            nn.Sequential(*[nn.Remat(nn.Sequential(nn.Dense(4), jnp.tanh, nn.Dense(4)))] * 2),
            (spec(2, 4),),
        ),
    ],
    ids=["stack", "CNN", "GPT", "remat"],
)
def test_kept_activations_are_those_of_jax(layer, inputs):
    summary = introspect.summary(layer, *inputs, chip=CHIP)
    parameters, state = layer.spec(*inputs)
    parameters, state = (
        jax.tree.map(lambda s: spec(*s.shape, dtype=s.dtype), tree) for tree in (parameters, state)
    )
    real = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (state, inputs))

    def f(params):
        state, inputs = real
        return layer(params, *inputs, state=state)[0] if state else layer(params, *inputs)

    want = collections.Counter(
        str((aval.shape, aval.dtype))
        for aval, source in saved_residuals(f, parameters)
        if not re.match("from (the argument|a constant|a literal)", source)
    )
    got = collections.Counter(str((each.shape, each.dtype)) for each in summary.total.kept)
    assert got == want and sum(got.values()) > 0
    assert (
        sum(row.kept_bytes for row in summary.rows if not row.path.count("/"))
        <= summary.total.kept_bytes
    )


def test_the_memory_that_xla_needs_stands_beside_the_kept_activations():
    """Of four layers whose outputs are kept, XLA's program holds at least these."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Dense(64), jnp.sin)))
    summary = introspect.summary(model, spec(512, 64), chip=CHIP, compile=True)
    assert introspect.summary(model, spec(512, 64), chip=CHIP).temporary_bytes is None
    assert 3 * 512 * 64 * 4 <= summary.temporary_bytes <= 3 * summary.total.kept_bytes
    assert "temporary memory of the compiled forward and backward pass: " in str(summary)


class Twin(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.value = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.stem(x)).mean((1, 2))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.value(x)


def test_parameters_of_a_twin_equal_those_of_tabulate():
    twin, x = Twin(nnx.Rngs(0)), jnp.ones((2, 6, 6, 3))
    summary = introspect.summary(twin, x, chip=CHIP)
    table = nnx.tabulate(twin, x, console_kwargs={"width": 200, "force_terminal": False})
    total = int(re.search(r"Total Parameters: ([\d,]+)", table)[1].replace(",", ""))
    running = 8  # statistics of BatchNorm, which tabulate counts
    assert summary.total.parameters == total - running == 112 + 8 + 2 * 20 + 10
    assert {row.path: row.parameters for row in summary.rows} == {
        "stem": 112,
        "norm": 8,
        "blocks": 40,
        "blocks/0": 20,
        "blocks/1": 20,
        "value": 10,
    }
    model = nn.Sequential(
        stem=nn.Conv(4, 3),
        norm=nn.BatchNorm(),
        pool=nn.GlobalAvgPool(),
        blocks=nn.Sequential(nn.Dense(4), jnp.tanh, nn.Dense(4), jnp.tanh),
        value=nn.Dense(2),
    )
    mine = introspect.summary(model, x, chip=CHIP)
    assert [mine[path].parameters for path in ("stem", "norm", "blocks", "value", "")] == [
        112,
        8,
        40,
        10,
        170,
    ]
    assert [mine[path].forward.matmul for path in ("stem", "blocks", "value", "")] == [
        summary[path].forward.matmul for path in ("stem", "blocks", "value", "")
    ]


@pytest.mark.exhaustive
def test_rows_and_totals():
    summary = introspect.summary(MODEL, spec(2, 5, 8), chip=CHIP)
    paths = [row.path for row in summary.rows]
    assert paths[:5] == [
        "0",
        "blocks",
        "blocks/attend",
        "blocks/attend/0",
        "blocks/attend/attention",
    ]
    assert not [path for path in paths if "[:]" in path or path.endswith("/weights")]
    assert summary["blocks/mlp"].output == (spec(3, 2, 5, 8),) and summary["blocks"].output == (
        spec(2, 5, 8),
    )
    top = [row for row in summary.rows if "/" not in row.path]
    assert sum(row.parameters for row in top) == summary.total.parameters
    assert sum(row.forward.flops for row in top) == summary.total.forward.flops
    assert abs(sum(row.share for row in top) - 1) < 1e-9 and summary.total.share == 1
    assert [
        row.path for row in introspect.summary(MODEL, spec(2, 5, 8), chip=CHIP, depth=1).rows
    ] == ["0", "blocks", "norm", "head"]
    trained = introspect.summary(MODEL, spec(2, 5, 8), chip=CHIP, train=True)
    assert trained["norm"].forward.flops > summary["norm"].forward.flops


def test_symbolic_sizes():
    (b,) = jax.export.symbolic_shape("b")
    symbolic = introspect.summary(MODEL, spec(b, 5, 8), chip=CHIP)
    assert symbolic["head"].output[0].shape == (b, 5, 4)
    for size in (2, 7):
        concrete = introspect.summary(MODEL, spec(size, 5, 8), chip=CHIP)
        for row, other in zip(
            (*symbolic.rows, symbolic.total), (*concrete.rows, concrete.total), strict=True
        ):
            at = lambda value, size=size: (
                value if isinstance(value, int) else eval(str(value), {"b": size})
            )
            for name in ("forward", "backward"):
                assert at(getattr(row, name).flops) == getattr(other, name).flops, row.path
            assert at(row.kept_bytes) == other.kept_bytes and row.parameters == other.parameters
    assert symbolic.total.share is None
    assert re.search(r"head +float32\[b, 5, 4\] +36 \(144 B\) +\(340\*b\) F", str(symbolic))
    assert str(symbolic).endswith(
        f"no share of time: the sizes are symbolic, or the peaks of {symbolic.chip.name} are "
        "unknown"
    )


def test_forms():
    summary = introspect.summary(
        nn.Sequential(nn.Dense(4), head=nn.Dense(2)), spec(3, 5), chip=CHIP
    )
    lines = str(summary).splitlines()
    assert re.split(r"  +", lines[0].strip()) == [
        "path",
        "output",
        "parameters",
        "forward FLOPs",
        "backward FLOPs",
        "kept",
        "share of time",
    ]
    assert re.match(r"head +float32\[3, 2\] +10 \(40 B\) +54 F", lines[2])
    assert lines[3].startswith("total")
    assert lines[4] == f"share of time: of a forward and backward pass at the roofline of {CHIP}"
    table = summary.markdown().splitlines()
    assert len(table) == 7 and table[3].startswith("| head | float32[3, 2] | 10 (40 B) | 54 F |")
    assert (
        summary.html().count("<tr>") == 4
        and "<td>head</td>" in summary.html() == summary._repr_html_()
    )
    data = summary.data()
    assert (
        data[1]["path"] == "head"
        and data[-1]["parameters"] == 34
        and data[1]["output"] == ["float32[3, 2]"]
    )
    assert (
        introspect.summary(lambda params, x: params["<a>"] * x, {"<a>": 2.0}, spec(3))
        .html()
        .count("<a>")
        == 0
    )


def test_any_function():
    def loss(params, x):
        with jax.named_scope("layer"):
            h = jnp.tanh(x @ params["layer"]["w"])
        return jnp.sum(h**2)

    row = introspect.summary(loss, {"layer": {"w": spec(5, 4)}}, spec(3, 5), chip=CHIP)["layer"]
    assert (row.parameters, row.forward.matmul, row.backward.matmul) == (20, 120, 120)
    assert [(each.shape, each.path) for each in row.kept] == [((3, 4), "layer")] * len(row.kept)


def test_an_operation_without_a_derivative():
    """custom_partitioning raises another type of error than a while loop."""

    @custom_partitioning
    def product(x, w):
        return jnp.tanh(x @ w)

    whole = lambda mesh: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    product.def_partition(
        lambda mesh, args, result: (mesh, lambda x, w: x @ w, whole(mesh), (whole(mesh),) * 2),
        infer_sharding_from_operands=lambda mesh, args, result: whole(mesh),
        sharding_rule="i j, j k -> i k",
    )
    f = lambda w, x: product(x, w) @ w.T
    table = introspect.summary(f, jnp.ones((4, 5)), jnp.ones((8, 4)), chip=CHIP)
    assert (table.total.parameters, table.total.backward.matmul, table.total.kept) == (20, 0, ())
    assert (
        table.notes[0]
        == "no backward pass: Differentiation rule for 'custom_partitioning' not implemented"
    )
    graph = introspect.graph(f, jnp.ones((4, 5)), jnp.ones((8, 4)))
    assert any("no derivative with respect to its first argument" in note for note in graph.notes)


def test_functions_without_a_backward_pass():
    """Of integers, and with a while loop: the forward pass is still counted."""

    def loop(w, x):
        with jax.named_scope("layer"):
            x = x @ w
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    table = introspect.summary(loop, spec(5, 4), spec(3, 5), chip=CHIP)
    assert (table["layer"].forward.matmul, table["layer"].backward.matmul, table.total.kept) == (
        120,
        0,
        (),
    )
    assert table.notes[0].startswith(
        "no backward pass: Reverse-mode differentiation does not work for lax.while_loop"
    )
    table = introspect.summary(lambda x: x > 0, spec(3), chip=CHIP)
    assert table.notes == ("no backward pass: the function returns nothing floating-point",)
    assert table.total.forward.flops == 3 and "no backward pass" in str(table)


def test_errors():
    with pytest.raises(
        TypeError,
        match=r"summary: expected a layer, a flax\.nnx module, or a function and its "
        r"parameters; got no arguments",
    ):
        introspect.summary(jnp.sin)
    with pytest.raises(TypeError, match="got a int"):
        introspect.summary(3, 4)
    with pytest.raises(TypeError, match="train=True is for layers"):
        introspect.summary(jnp.sin, 1.0, train=True)
    with pytest.raises(KeyError, match="the summary has no path 'haed'; it has '0', 'head'"):
        introspect.summary(nn.Sequential(nn.Dense(4), head=nn.Dense(2)), spec(3, 5), chip=CHIP)[
            "haed"
        ]
