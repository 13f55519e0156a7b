"""Ring and Ulysses attention on the parts of time, compared with attention on one device, forward
and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from jax.sharding import AxisType

from fnet import jaxpr
from fnet import layers as nn
from fnet.parallel._context import _layout as layouts
from fnet.parallel._context._layout import Layout
from fnet.parallel._context._mapped import FORMS, Attention

pytestmark = pytest.mark.usefixtures("quickly")
ROWS, TIME, HEADS, GROUPS, SIZE = 2, 32, 8, 4, 8
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 3]], [5, 15, 9, 3], axis=1)
MASK = np.random.default_rng(0).random((ROWS, HEADS, TIME, TIME)) < 0.6
# {name: (options of the attention, time)}
CASES = {
    "full": ({}, TIME),
    "full, padded": ({}, 29),
    "causal": ({"causal": True}, TIME),
    "causal, padded": ({"causal": True}, 31),
    "causal, odd parts": ({"causal": True}, 28),
    "window": ({"causal": True, "window": 5}, TIME),
    "long window": ({"causal": True, "window": 27}, TIME),
    "window on both sides": ({"window": 5}, TIME),
    "long window on both sides": ({"window": 20}, 30),
    "segments": ({"segments": SEGMENTS}, TIME),
    "causal segments": ({"segments": SEGMENTS, "causal": True}, TIME),
    "causal segments, padded": ({"segments": SEGMENTS[:, :31], "causal": True}, 31),
    "segments and window": ({"segments": SEGMENTS, "causal": True, "window": 4}, TIME),
    "lengths": ({"lengths": np.array([7, 32]), "causal": True}, TIME),
    "starts": ({"starts": np.array([0, 3]), "causal": True, "window": 6}, TIME),
    "mask": ({"mask": MASK, "causal": True}, TIME),
    "mask of all heads": ({"mask": MASK[:, 0, :30, :30]}, 30),
    "mask of keys": ({"mask": MASK[0, 0, :1]}, TIME),
    "softcap": ({"softcap": 2.0, "causal": True}, TIME),
}
QUICK = [("ring", name) for name in ("causal, padded", "window on both sides", "causal segments")]
QUICK += [("ulysses", "causal segments, padded"), ("ulysses", "full")]
TABLE = {f"{form}-{name}": (form, name) for form in FORMS for name in CASES}


def mesh_of(data, context):
    return jax.make_mesh((data, context), ("data", "context"), axis_types=(AxisType.Auto,) * 2)


def divided(f, form, mesh, layout_of):
    """`f` with its attention on the parts of time."""

    def rule(primitive, scope, inputs, eqn):
        attention = Attention.of(eqn)
        if attention is None:
            return NotImplemented
        layout = layout_of(attention)
        return FORMS[form](attention, layout, mesh, ("data",), eqn, *inputs)

    return jaxpr.rewrite(f, rule)


def ring(mesh, **changes):
    def layout(attention):
        _, t, h, _ = attention.shape
        form, n = attention.form, mesh.shape["context"]
        options = {"causal": form.causal, "window": form.window}
        return layouts.ring_layout("context", n, t, h, **options)._replace(**changes)

    return layout


def problem(options, time, dtype, *, rows=ROWS, heads=HEADS, groups=GROUPS):
    rng = np.random.default_rng(1)
    draw = lambda heads: jnp.asarray(rng.normal(size=(rows, time, heads, SIZE)), dtype)
    q, k, v, weight = draw(heads), draw(groups), draw(groups), draw(heads)

    def loss(q, k, v):
        out = nn.dot_product_attention(q, k, v, **options)
        return (out * weight).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True), (q, k, v)


def agree(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("case", sampled(TABLE, [f"{form}-{name}" for form, name in QUICK]))
def test_outputs_and_gradients_are_those_of_one_device(case):
    form, name = TABLE[case]
    mesh, (options, time) = mesh_of(2, 4), CASES[name]
    with jax.enable_x64(True):
        f, arrays = problem(options, time, jnp.float64)
        got = jax.jit(divided(f, form, mesh, ring(mesh)))(*arrays)
        agree(got, f(*arrays), 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", TABLE)
def test_float32(case):
    form, name = TABLE[case]
    mesh, (options, time) = mesh_of(2, 4), CASES[name]
    f, arrays = problem(options, time, jnp.float32)
    (_, out), gradients = jax.jit(divided(f, form, mesh, ring(mesh)))(*arrays)
    (_, expected), expected_gradients = f(*arrays)
    agree((out, gradients), (expected, expected_gradients), 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_as_close_as_on_one_device(form):
    mesh = mesh_of(2, 4)
    f, arrays = problem({"causal": True}, TIME, jnp.bfloat16)
    exact, more = problem({"causal": True}, TIME, jnp.float32)
    (_, out), gradients = jax.jit(divided(f, form, mesh, ring(mesh)))(*arrays)
    (_, expected), expected_gradients = exact(*more)
    for a, b in zip((out, *gradients), (expected, *expected_gradients)):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, np.float32) - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", [1, 2, 8])
@pytest.mark.parametrize("heads, groups", [(8, 8), (8, 1), (3, 3)])
def test_other_numbers_of_devices_and_heads(context, heads, groups):
    mesh = mesh_of(8 // context, context)
    with jax.enable_x64(True):
        f, arrays = problem({"causal": True}, TIME, jnp.float64, heads=heads, groups=groups)
        got = jax.jit(divided(f, "ring", mesh, ring(mesh)))(*arrays)
        agree(got, f(*arrays), 1e-9)


@pytest.mark.parametrize("pieces", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("zigzag", [False, True])
def test_blocks_of_any_size_in_any_order(zigzag, pieces):
    mesh = mesh_of(2, 4)
    with jax.enable_x64(True):
        f, arrays = problem({"segments": SEGMENTS, "causal": True}, TIME, jnp.float64)
        layout = ring(mesh, zigzag=zigzag, pieces=pieces)
        agree(jax.jit(divided(f, "ring", mesh, layout))(*arrays), f(*arrays), 1e-9)


def test_zigzag_gives_all_devices_equal_work():
    """The pairs of positions of which the later sees the earlier, on each device."""

    def seen(layout):
        blocks = [np.asarray(layout.starts(i)) for i in range(layout.devices)]
        rows = [[start + j for start in own for j in range(layout.size)] for own in blocks]
        return [sum(row + 1 for row in each) for each in rows]

    whole = Layout("context", 4, 32)
    assert len(set(seen(whole._replace(zigzag=True)))) == 1
    assert max(seen(whole)) > 1.7 * np.mean(seen(whole))
    parts = [np.asarray(whole._replace(zigzag=True, pieces=2).starts(i)) for i in range(4)]
    assert sorted(np.concatenate(parts)) == list(range(0, 32, 2))


def test_a_window_visits_near_devices_alone():
    whole = Layout("context", 8, 64)
    assert layouts.tour(whole, True, None, False) == (0, 7)
    assert layouts.tour(whole, True, 9, False) == (0, 1)
    assert layouts.tour(whole, True, 10, False) == (0, 2)
    assert layouts.tour(whole, False, 9, False) == (-1, 2)
    assert layouts.tour(whole, True, 9, True) == (0, 7)  # each text begins elsewhere
    assert layouts.tour(whole, False, 40, False) == (0, 7)


def test_blocks_have_few_logits():
    layout = layouts.ring_layout("context", 16, 1 << 20, 16, causal=True, window=None)
    assert layout.zigzag and 16 * layout.size**2 <= layouts.LOGITS
    assert layout.size * layout.blocks * 16 == 1 << 20
