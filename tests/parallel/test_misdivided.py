"""What XLA divides wrongly over several devices: the table, layers on many shardings, and planned
steps."""

import contextlib
import io
import os
import pathlib
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import jaxpr, parallel
from fnet import layers as nn
from fnet.jaxpr import misdivided
from tests.parallel import sharding_product
from tests.parallel.sharding_product import (
    LAYERS,
    MESHES,
    PROMISED,
    SITUATIONS,
    mesh,
    prepared,
    shardings,
)

pytestmark = pytest.mark.usefixtures("quickly")
FINDINGS = pathlib.Path(__file__).parents[2] / "findings"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("row", misdivided.TABLE, ids=lambda row: row.name)
def test_jaxlib_still_needs_the_row(row):
    """Runs the program of the row's script."""
    script = FINDINGS / f"{row.name}.sh"
    assert os.access(script, os.X_OK)
    program = script.read_text().partition("<<'PYTHON'\n")[2].partition("\nPYTHON")[0]
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(program, str(script), "exec"), {})
    assert not ended.value.code, (
        f"set `repaired` of {row.name!r} in fnet/jaxpr/_misdivided.py:\n{said.getvalue()}"
    )


def test_a_repaired_row_does_not_apply(monkeypatch):
    row = misdivided.SPLIT_IMAGE._replace(repaired=(0, 13, 0))
    for version, applies in (((0, 12, 0), True), ((0, 13, 0), False), ((0, 14, 1), False)):
        monkeypatch.setattr(misdivided, "VERSION", version)
        assert row.applies(mesh(2, 2)) == applies
        assert misdivided.SPLIT_IMAGE.applies(
            mesh(2, 2)
        )  # newer jaxlibs, too, as long as none is known to be right


def test_meshes_to_which_a_row_applies():
    for sizes, one, two in (
        ((8,), True, False),
        ((4, 2), True, True),
        ((4, 1), True, False),
        ((1, 1), False, False),
    ):
        each = AbstractMesh(
            sizes, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes)
        )
        assert (misdivided.MAX_POOL.applies(each), misdivided.GROUPED.applies(each)) == (one, two)
    assert not misdivided.MAX_POOL.applies(None)


def check(drawn):
    """Compares layers on several devices with one device, in one program. `drawn`: (case, shardings
    of its args)."""
    cases = {name: prepared(name) for name in dict.fromkeys(name for name, _ in drawn)}
    args = [jax.tree.map(jax.device_put, cases[name][1], places) for name, places in drawn]
    runs = [cases[name][0] for name, _ in drawn]
    results = jax.jit(lambda args: [run(*each) for run, each in zip(runs, args)])(args)
    for (name, places), got in zip(drawn, results):
        said = f"{name} {jax.tree.map(lambda place: place.spec, places)}"
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(cases[name][2])):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4, err_msg=said)


def placed(name, mesh, choose):
    return name, jax.tree.map(lambda x: choose(shardings(x.shape, mesh)), prepared(name)[1])


@pytest.mark.quick_cases("sizes1")
@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_layers_on_drawn_shardings(sizes):
    draw = random.Random(str(sizes))
    names = [*draw.sample(sorted(LAYERS), 3), "grouped", "2d", "overlapping max"]
    check([placed(name, mesh(*sizes), draw.choice) for name in names])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (name, sizes)
        for sizes in [(2, 2), (2, 4), (4,), (8,)]
        for name, (layer, _) in LAYERS.items()
        if len(sizes) == 2 or isinstance(layer, nn.MaxPool)
    ],
)  # one axis is enough for the error of max pooling alone
def test_layers_on_each_sharding_of_each_argument(name, sizes):
    """Each sharding of each argument, beside drawn shardings of the others."""
    each, draw = mesh(*sizes), random.Random(f"{name} {sizes}")
    drawn = []
    leaves, structure = jax.tree.flatten(prepared(name)[1])
    for i, leaf in enumerate(leaves):
        for place in shardings(leaf.shape, each):
            places = [
                place if j == i else draw.choice(shardings(x.shape, each))
                for j, x in enumerate(leaves)
            ]
            drawn.append((name, jax.tree.unflatten(structure, places)))
    for start in range(0, len(drawn), 40):
        check(drawn[start : start + 40])


def constraints(f, *args):
    text = str(jax.make_jaxpr(f)(*args))
    return len(re.findall(r"= (?:divided|sharding_constraint)\[", text))


def test_one_device_and_one_axis_get_no_constraints():
    layer, x = (
        nn.Sequential(nn.Conv(8, 3), nn.DepthwiseConv(3), nn.MaxPool(2)),
        jnp.ones((8, 8, 8, 8)),
    )
    params = layer.init(jax.random.key(0), x)[0]
    assert not constraints(layer, params, x)
    assert not constraints(layer, params, jax.device_put(x, NamedSharding(mesh(8), P("a"))))
    assert constraints(layer, params, jax.device_put(x, NamedSharding(mesh(2, 2), P("a")))) == 6
    pool = nn.MaxPool(3, 1)
    assert not constraints(pool, {}, x)
    assert constraints(pool, {}, jax.device_put(x, NamedSharding(mesh(8), P("a")))) == 2
    with jax.set_mesh(mesh(2, 2)):
        assert constraints(layer, params, x) == 6


def equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


@pytest.mark.quick_cases(4)
@pytest.mark.filterwarnings("ignore:.with mesh:")
@pytest.mark.parametrize(
    ("situation", "name"),
    [
        ("with mesh", "2d"),
        ("with mesh", "grouped 1d"),
        ("with mesh", "overlapping max"),
        ("set_mesh", "even window"),
        ("vmap of both", "dilated"),
        ("vmap of both", "pointwise"),
        ("vmap of inputs", "few rows"),
        ("vmap of kernels", "depthwise 1d"),
        ("placed", "transposed"),
    ],
)
def test_drawn_cases_of_each_situation(situation, name):
    """Five drawn cases, and one in which the batch, or else an image axis, is split over one axis
    of 2 x 4."""
    each, mapped = mesh(2, 4), SITUATIONS[situation]
    drawn = list(sharding_product.drawn(name, situation, each, 5))
    rows = (None,) * (mapped[1] == 0)
    split = NamedSharding(
        each, P(*rows, "a") if "pointwise" in name or mapped[1] == 0 else P(*rows, None, "a")
    )
    params, _, _ = prepared(name, mapped).args
    drawn.append((jax.tree.map(lambda _: NamedSharding(each, P()), params), split, split))
    for places in drawn:
        found = sharding_product.outcome(name, situation, each, places)
        assert found.result == "equal", (found, places)


def test_a_split_bias_does_not_split_the_convolution():
    """XLA ended the process, as it does for some grouped convolutions whose features are split."""
    each, situation = mesh(2, 4), "vmap of both"
    place = lambda *axes: NamedSharding(each, P(*axes))
    params = {"kernel": place(None, None, None, None, ("b", "a")), "bias": place("a", "b")}
    places = params, place(None, None, None, "a"), place(None, None, "b", "a")
    assert sharding_product.outcome("few rows", situation, each, places).result == "equal"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.with mesh:")
@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("situation", PROMISED)
def test_a_sample_of_the_product(situation, name, sizes):
    """`python -m tests.parallel.sharding_product` runs all of it."""
    if SITUATIONS[situation][0] == 0 and not prepared(name).args[0]:
        pytest.skip("no kernel to map")
    each = sharding_product.mesh_for(situation, *MESHES[sizes])
    for places in sharding_product.drawn(name, situation, each, 5):
        found = sharding_product.outcome(name, situation, each, places)
        refused = situation == "explicit mesh" and found.why.startswith("ShardingTypeError")
        assert found.result == "equal" or refused, (found, places)


@pytest.mark.parametrize("name", ["2d", "dilated", "overlapping max", "overlapping max 1d"])
def test_types_that_split_an_image_axis(name):
    each = sharding_product.mesh_for("explicit mesh", 2, 4)
    params, _, _ = prepared(name).args
    whole = NamedSharding(each, P())
    places = jax.tree.map(lambda _: whole, params), NamedSharding(each, P(None, "a")), whole
    found = sharding_product.outcome(name, "explicit mesh", each, places)
    assert found.result == "equal" and found.gathered, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["2d", "depthwise", "overlapping max"])
def test_without_jit(name):
    """The input alone lies on the mesh, or nothing does, and the mesh is set."""
    layer, _ = LAYERS[name]
    _, (params, x, _), (want, _) = prepared(name)
    each = mesh(2, 2)
    placed = jax.device_put(x, NamedSharding(each, P(None, "a")))
    with jax.set_mesh(each):
        results = [layer(params, x)]
    results += [layer(params, placed), jax.vmap(lambda row: layer(params, row[None])[0])(placed)]
    for got in results:
        np.testing.assert_array_equal(got, want)


def test_a_gradient_without_jit():
    layer, _ = LAYERS["2d"]
    _, (params, x, cotangent), (_, (want, _)) = prepared("2d")
    placed = jax.device_put(x, NamedSharding(mesh(2, 2), P(None, "a")))
    equal(jax.grad(lambda params: (layer(params, placed) * cotangent).sum())(params), want)
    with jax.disable_jit():
        equal(layer(params, placed), prepared("2d").want[0])


def test_one_example_at_a_time():
    """The examples, which `vmap` maps, are split over one axis of the mesh."""
    layer, _ = LAYERS["grouped"]
    _, (params, x, cotangent), (_, (want, _)) = prepared("grouped")
    placed = [jax.device_put(array, NamedSharding(mesh(2, 2), P("a"))) for array in (x, cotangent)]

    def loss(params, x, cotangent):
        return (jax.vmap(lambda row: layer(params, row[None])[0])(x) * cotangent).sum()

    equal(jax.jit(jax.grad(loss))(params, *placed), want)
    gradient = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))  # of each example
    each = gradient(params, *(array[:, None] for array in placed))
    equal(jax.tree.map(lambda leaf: leaf.sum(0), each), want)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spmd_axis_name", [None, "a"])
def test_networks_side_by_side(spmd_axis_name):
    """Each network has its own parameters, and the networks, or the batch, are split."""
    layer = nn.Sequential(nn.Conv(8, 3), nn.MaxPool(3, 1), nn.DepthwiseConv(3))
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 8, 8)).astype(np.float32)
    params = jax.vmap(lambda key: layer.init(key, x[0])[0])(jax.random.split(jax.random.key(0), 2))
    loss = lambda params, x: jnp.square(layer(params, x)).sum()
    want = jax.jit(jax.vmap(jax.grad(loss)))(params, x)
    for spec in P("a"), P("a", "b"), P(None, "a"):
        placed = jax.device_put(x, NamedSharding(mesh(2, 2), spec))
        got = jax.jit(jax.vmap(jax.grad(loss), spmd_axis_name=spmd_axis_name))(params, placed)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_derivatives_of_other_kinds():
    """Forward mode, forward over reverse mode, rematerialization and a loop over layers."""
    layer = nn.Conv(8, 3)
    x = np.random.default_rng(0).normal(size=(4, 8, 8, 8)).astype(np.float32)
    params = layer.init(jax.random.key(0), x)[0]
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    loss = lambda params, x: jnp.square(layer(params, x)).sum()
    deep = lambda params, x: jnp.square(
        lax.scan(lambda x, params: (layer(params, x), None), x, params)[0]
    ).sum()
    placed = jax.device_put(x, NamedSharding(mesh(2, 2), P(None, "a")))
    for f in (
        lambda x: jax.jvp(loss, (params, x), (params, x)),
        lambda x: jax.jvp(jax.grad(loss), (params, x), (params, x)),
        lambda x: jax.grad(jax.checkpoint(loss))(params, x),
        lambda x: jax.grad(deep)(stacked, x),
    ):
        want = jax.jit(f)(x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
            jax.jit(f)(placed),
            want,
        )


def test_flat_programs_contain_no_constraints():
    """The exports read flat programs, also of parameters that lie on a mesh."""
    layer, _ = LAYERS["2d"]
    _, (params, x, _), (want, _) = prepared("2d")
    placed = jax.device_put(x, NamedSharding(mesh(2, 2), P("a")))
    flat = jaxpr.flatten(jax.make_jaxpr(layer)(params, placed))
    assert not {"divided", "sharding_constraint"} & {eqn.primitive.name for eqn in flat.jaxpr.eqns}
    (y,) = jax.core.eval_jaxpr(flat.jaxpr, flat.consts, *jax.tree.leaves((params, x)))
    equal(y, want)


def test_the_ledger_names_what_the_layers_avoid():
    model = nn.Sequential(nn.Conv(16, 3), nn.MaxPool(3, 2, padding=1), nn.DepthwiseConv(3))
    x = jax.device_put(np.ones((1, 8, 8, 8), np.float32), NamedSharding(mesh(2, 2), P(None, "a")))
    params = model.init(jax.random.key(0), x)[0]
    ledger = parallel.ledger(jax.jit(model).lower(params, x).compile())
    gathers = {
        each.scope: each.bytes for each in ledger.transfers if each.collective == "all-gather"
    }
    assert gathers["0/avoid_split_image_convolution"] == x.nbytes  # the image, on each device
    batch = jax.device_put(
        np.ones((8, 8, 8, 8), np.float32), NamedSharding(mesh(2, 2), P(("a", "b")))
    )
    assert not parallel.ledger(jax.jit(model).lower(params, batch).compile()).transfers


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["2d", "grouped", "transposed"])
def test_several_kernels_for_one_input(name):
    """`vmap` over the kernels makes one convolution of them, with more features."""
    layer, _ = LAYERS[name]
    _, (params, x, cotangent), _ = prepared(name)
    several = lambda leaf: np.stack([leaf, 2 * leaf])
    params, cotangent, each = jax.tree.map(several, params), several(cotangent), mesh(2, 2)

    def run(params, x, cotangent):
        y, transpose = jax.vjp(jax.vmap(layer, (0, None)), params, x)
        return y, transpose(cotangent)

    draw = lambda leaf: random.Random(name).choice(shardings(leaf.shape, each))
    args = params, x, cotangent
    got = jax.jit(run)(*jax.tree.map(jax.device_put, args, jax.tree.map(draw, args)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
        got,
        jax.jit(run)(*args),
    )


def test_inside_shard_map_nothing_is_constrained():
    each, layer = mesh(2, 2), nn.Conv(8, 3)
    x = jnp.ones((8, 8, 8, 8))
    params = layer.init(jax.random.key(0), x)[0]
    mapped = jax.shard_map(layer, mesh=each, in_specs=(P(), P("a")), out_specs=P("a"))
    np.testing.assert_allclose(jax.jit(mapped)(params, x), layer(params, x), rtol=1e-5, atol=1e-5)


def test_the_batch_and_the_channels_stay_split():
    each = mesh(2, 2)
    x = jax.device_put(jnp.ones((8, 8, 8, 8)), NamedSharding(each, P("a")))
    conv, depthwise = nn.Conv(8, 3, use_bias=False), nn.DepthwiseConv(3, use_bias=False)
    params = conv.init(jax.random.key(0), x)[0]
    kernel = jax.device_put(params["kernel"], NamedSharding(each, P(None, None, None, "b")))
    y = jax.jit(conv)({"kernel": kernel}, x)
    assert y.sharding.is_equivalent_to(NamedSharding(each, P("a", None, None, "b")), 4)
    y = jax.jit(depthwise)(depthwise.init(jax.random.key(0), x)[0], x)
    assert y.sharding.is_equivalent_to(
        NamedSharding(each, P(("a", "b"))), 4
    )  # each device has its own rows


def planned(step, init, batch, **options):
    plan = parallel.plan(step, init, batch, compile=False, **options)
    return plan, plan.jit(step)(plan.init(jax.random.key(0)), batch)


@pytest.mark.parametrize("sizes", [{"data": 4, "tensor": 2}, {"data": 8}])
def test_a_planned_step_and_what_its_plan_says(sizes):
    model = nn.Sequential(
        nn.Conv(16, 3), nn.MaxPool(3, 2, padding=1), nn.DepthwiseConv(3), nn.GlobalAvgPool()
    )
    x = np.random.default_rng(0).normal(size=(16, 8, 8, 4)).astype(np.float32)

    def step(params, x):
        value, gradients = jax.value_and_grad(
            lambda params: jnp.square(model(params, x) - 1).mean()
        )(params)
        return gradients, {"loss": value}

    init = lambda key: model.init(key, x[:1])[0]
    plan, got = planned(step, init, x, strategy="fsdp+pins", mesh=sizes)
    want = jax.jit(step)(init(jax.random.key(0)), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    held = {row.name: each.nbytes for each in plan.avoided for row in each.rows}
    row = 2 * 8 * 8 * 16 + 4 * 4 * 16  # input, gradient and cotangent
    pooled = row * 4 * 16 // sizes["data"]
    assert held["overlapping_max_pool_gradient"] == pooled
    assert ("grouped_convolution_gradient" in held) == (len(sizes) == 2)
    if len(sizes) == 2:
        assert held["grouped_convolution_gradient"] == 3 * 3 * 16 * 4  # the kernel
    assert (
        "not left to XLA (overlapping_max_pool_gradient): the gradient of max pooling with "
        f"overlapping windows, wrong where an image axis is split: 1 equation, {pooled:,} bytes "
        "held unsplit by each chip"
    ) in plan.explain()
    assert (
        "not left to XLA (split_image_convolution, split_kernel_convolution): " in plan.explain()
    ) == (len(sizes) == 2)


def test_rows_that_the_chips_cannot_share():
    """The gradient of a grouped convolution that does not read the batch alone: its operands are
    gathered."""
    kernel = np.ones((3, 3, 1, 8), np.float32)
    x = np.random.default_rng(0).integers(-3, 4, (8, 4, 4, 8)).astype(np.float32)

    def step(kernel, x):
        def loss(kernel):
            rows = jnp.concatenate([x[:2], x])  # 10 rows
            y = lax.conv_general_dilated(
                rows,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=8,
            )
            return jnp.square(y).sum()

        return jax.grad(loss)(kernel), {}

    plan, (got, _) = planned(
        step, lambda key: jnp.asarray(kernel), x, mesh={"data": 4, "tensor": 2}, strategy="data"
    )
    np.testing.assert_array_equal(got, jax.jit(step)(kernel, x)[0])
    (grouped,) = [each for each in plan.avoided if each.rows == (misdivided.GROUPED,)]
    assert grouped.nbytes == 2 * 10 * 4 * 4 * 8 * 4  # input and cotangent


def test_a_strided_slice_over_split_features():
    """Without the constraint, elements of the gradient are at other indices."""

    def step(w, x):
        return jax.grad(lambda w: (w[1::2] * x.mean(0)).sum())(w), {}

    x = np.arange(8 * 2050, dtype=np.float32).reshape(8, 2050) % 7
    init = lambda key: jnp.zeros((4100,))
    plan, (got, _) = planned(step, init, x, strategy="fsdp", devices=jax.devices()[:4])
    assert plan.state.spec == P("data")
    np.testing.assert_allclose(got, jax.jit(step)(init(None), x)[0], rtol=1e-6)
    assert [each.rows for each in plan.avoided] == [(misdivided.PADDING,)]


@pytest.mark.quick_cases("8-cummax", "12-cumprod")
@pytest.mark.parametrize(
    "scanned",
    [
        lambda x: jnp.cumprod(x, 0),
        lax.cummax,
        lambda x: lax.cumlogsumexp(x, reverse=True),
        lambda x: lax.associative_scan(jnp.multiply, x),
        lambda x: lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, 1 - x))[
            1
        ],
    ],
    ids=["cumprod", "cummax", "cumlogsumexp", "products", "recurrence"],
)
@pytest.mark.parametrize("size", [8, 12])
def test_gradients_of_scans_over_a_split_axis(scanned, size):
    """Without the plan, XLA returns other gradients of products and recurrences."""

    def step(state, batch):
        y, transpose = jax.vjp(scanned, state["params"]["x"])
        return {**state, "params": {"x": y}}, {
            "gradient": transpose(state["cotangent"])[0] + 0 * batch.sum()
        }

    draw = np.random.default_rng(size)
    x = (2.0 ** draw.integers(-1, 2, (size, 4)) * draw.choice([-1, 1], (size, 4))).astype(
        np.float32
    )
    batch = np.ones((4, 2), np.float32)
    cotangent = np.broadcast_to(draw.permutation(size)[:, None] + 1, x.shape).astype(np.float32)
    init = lambda key: {"params": {"x": jnp.asarray(x)}, "cotangent": jnp.asarray(cotangent)}
    plan, got = planned(
        step,
        init,
        batch,
        strategy="data",
        mesh={"data": 2, "tensor": 2},
        rules={"x": ("tensor",)},
        devices=jax.devices()[:4],
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        got,
        jax.jit(step)(init(None), batch),
    )
    assert plan.state["params"]["x"].spec == P("tensor")
    held = [each for each in plan.avoided if each.rows == (misdivided.NEGATIVE,)]
    assert held and not any(each.nbytes for each in held)


@pytest.mark.quick_cases("columns", "tokens")
@pytest.mark.parametrize(
    ("loss", "row"),
    [
        (lambda w, i: (w[i[:, 1:]] ** 2).sum(), misdivided.SCATTER),
        (lambda w, i: jax.ops.segment_max(w[:15], i[0, 1:], 8).sum(), misdivided.SCATTER),
        (lambda w, i: (w[:, i[0]] * w[:, i[1]]).sum(), misdivided.COLUMNS),
    ],
    ids=["tokens", "segments", "columns"],
)
def test_indices_in_a_planned_step(loss, row):
    """The rows of the batch are split over `data`, and its time over another axis, by a constraint
    of the step."""

    def step(w, i):
        place = NamedSharding(plan_mesh, P(None, "other"))
        value, gradient = jax.value_and_grad(loss)(w, lax.with_sharding_constraint(i, place))
        return w - gradient, {"loss": value}

    plan_mesh = mesh(4, 2)
    plan_mesh = jax.sharding.Mesh(
        plan_mesh.devices, ("data", "other"), axis_types=plan_mesh.axis_types
    )
    draw = np.random.default_rng(0)
    w = draw.integers(1, 3, (16, 512)).astype(np.float32)
    i = draw.integers(1, 8, (8, 16)).astype(np.int32)
    plan, (got, _) = planned(step, lambda key: jnp.asarray(w), i, mesh=plan_mesh, strategy="fsdp")
    assert row in {each for avoided in plan.avoided for each in avoided.rows}
    np.testing.assert_allclose(got, w - jax.jit(jax.grad(loss))(w, i), rtol=1e-5)


def test_even_indices_are_left_to_xla():
    """The first axis that is indexed, and numbers of indices that each mesh axis divides."""
    each = AbstractMesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    table, even, uneven = (jnp.ones(shape) for shape in ((16, 4), (8, 4), (7, 4)))
    i = jnp.zeros(8, jnp.int32)
    whole = lambda f, *args: [
        found
        for eqn in jaxpr.equations(jax.make_jaxpr(f)(*args))
        if (found := misdivided.in_equation(eqn, each))
    ]
    assert not whole(lambda x, i: x[i], table, i)
    assert not whole(lambda x, i, y: x.at[i].add(y), table, i, even)
    (found,) = whole(lambda x, i, y: x.at[i].add(y), table, i[1:], uneven)
    assert found == ((misdivided.SCATTER,), ((), (0,), (0,)), ((),))
    (found,) = whole(lambda x, i: x[:, i], table, i)
    assert found == ((misdivided.COLUMNS,), ((1,), ()), ((),))


def test_updates_at_a_single_index(monkeypatch):
    """They are wrong with jax 0.10.2 wherever a constraint splits the indexed axis."""
    each = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    x = jnp.ones((4, 8))
    functions = {
        (1,): lambda x: x.at[:, 0].set(0.0),
        (0,): lambda x: x.at[2].max(0.0),
        (0, 1): lambda x: x.at[2, 3].add(1.0),
    }

    def found(f):
        equations = jaxpr.equations(jax.make_jaxpr(f)(x))
        return [whole for eqn in equations if (whole := misdivided.in_equation(eqn, each))]

    for version, applies in (((0, 10, 2), True), ((0, 12, 0), False)):
        monkeypatch.setattr(misdivided, "VERSION", version)
        for axes, f in functions.items():
            want = misdivided.Whole((misdivided.COLUMN,), (axes, (), ()), (axes,))
            assert found(f) == [want] * applies
        assert not found(lambda x: x.at[jnp.array([1, 3])].set(0.0))


def test_a_column_that_a_planned_step_sets():
    def step(w, x):
        place = NamedSharding(plan_mesh, P(None, "data"))

        def loss(w):
            w = lax.with_sharding_constraint(w, place).at[:, 0].set(0.0)
            return ((x @ w) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, {"loss": value}

    plan_mesh = jax.sharding.Mesh(
        mesh(8).devices.reshape(8), ("data",), axis_types=(AxisType.Auto,)
    )
    draw = np.random.default_rng(0)
    w, x = (draw.integers(1, 3, shape).astype(np.float32) for shape in ((16, 512), (8, 16)))
    _, (got, _) = planned(step, lambda key: jnp.asarray(w), x, mesh=plan_mesh, strategy="fsdp")
    gradient = x.T @ (2 * (x @ np.where(np.arange(512) == 0, 0, w)))
    np.testing.assert_allclose(got, w - np.where(np.arange(512) == 0, 0, gradient), rtol=1e-5)


def test_a_plan_for_absent_chips_of_a_step_with_attention_and_an_avoided_operation():
    def init(key):
        return jax.random.normal(key, (8, 16))

    def step(w, x):
        def loss(w):
            y = (x @ w).reshape(4, 6, 4, 4)
            y = nn.dot_product_attention(y, y, y, causal=True)[:, ::2]  # padded in the gradient
            return (y**2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, {"loss": value}

    x = jnp.ones((4, 6, 8))
    plan = parallel.plan(step, init, x, devices="v5e:2x2", compile=False)
    assert {row for avoided in plan.avoided for row in avoided.rows} >= {misdivided.PADDING}
