"""compare: one training step on several chips; figures against closed forms and against plan."""

import jax
import jax.numpy as jnp
import pytest

from fnet import hardware as hw
from fnet import parallel

ROWS, WIDTH = 64, 512


def step(state, batch):
    def loss(params):
        x = batch
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, {
        "loss": value
    }


def init(key):
    return {"params": {f"fc{i}": jnp.zeros((WIDTH, WIDTH)) for i in range(4)}}


BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
PRODUCTS = (
    (4 * 3 - 1) * 2 * ROWS * WIDTH * WIDTH
)  # forward, two in the backward pass, one for the first layer


def only(chip, **options):
    (column,) = parallel.compare(step, init, BATCH, [chip], **options).columns
    return column


def test_the_figures_are_those_of_the_closed_forms():
    column = only("i7-7700K")
    other = sum(
        cost.elementwise + cost.reduction + cost.transcendental
        for cost in column.count.scopes.values()
    )
    assert column.count.model_flops == PRODUCTS and column.policy.compute == jnp.float32
    assert column.time.compute == pytest.approx((PRODUCTS + other) / 0.538e12)
    assert column.time.memory >= column.count.total.fused_bytes / 38.4e9
    assert column.watts == 91 and column.watt_hours(1000) == pytest.approx(
        91 * column.time.seconds * 1000 / 3600
    )
    assert (
        column.memory is None
        and column.rows is None
        and column.fits is None
        and column.dollars(1) is None
    )


@pytest.mark.exhaustive
def test_the_same_step_has_the_same_flops_and_the_dtype_of_each_chip():
    table = parallel.compare(step, init, BATCH, ["Titan RTX", "A100 SXM4 80GB", "Titan X Pascal"])
    assert [column.count.dtype for column in table.columns] == ["float16", "bfloat16", "float32"]
    assert {column.count.model_flops for column in table.columns} == {PRODUCTS}
    fixed = parallel.compare(
        step, init, BATCH, ["Titan RTX", "Titan X Pascal"], precision="float32"
    )
    assert {column.count.dtype for column in fixed.columns} == {"float32"}
    assert [
        column.count.dtype
        for column in parallel.compare(step, init, BATCH, ["T4"], precision="as written").columns
    ] == ["float32"]


def test_a_system_shares_the_batch_and_has_a_price_of_its_own():
    column, one = only("TPU v2-8"), only("TPU v2")
    assert (
        str(column.target) == "4 x TPU v2 (8 devices)" and column.memory == one.memory == 8 * 2**30
    )
    assert column.dollars(1000) == pytest.approx(4.5 * column.time.seconds * 1000 / 3600)
    assert one.dollars(1000) == pytest.approx(1.125 * one.time.seconds * 1000 / 3600)
    assert column.watts == 4 * 280 and column.peak < one.peak
    with pytest.raises(ValueError, match=r"has 60 rows, not a multiple of 8 devices"):
        parallel.compare(step, init, jax.ShapeDtypeStruct((60, WIDTH), "float32"), ["TPU v2-8"])


@pytest.mark.quick_cases("TPU v5e")
@pytest.mark.parametrize("chip", ["RTX 2080 Ti", "TPU v5e"])
def test_the_largest_batch_is_that_of_plan(chip):
    column = only(chip, precision="as written")
    plain, again = (
        rows
        for _, rows in parallel.plan(step, init, BATCH, devices=chip, compile=False).largest_batches
    )
    assert column.rows == pytest.approx((plain, again), rel=0.05) and column.fits
    parallel.plan(
        step,
        init,
        jax.ShapeDtypeStruct((column.rows[0], WIDTH), "float32"),
        devices=chip,
        strategy="data",
        compile=False,
    )
    with pytest.raises(ValueError, match="nothing fits"):
        parallel.plan(
            step,
            init,
            jax.ShapeDtypeStruct((int(1.1 * column.rows[0]), WIDTH), "float32"),
            devices=chip,
            strategy="data",
            compile=False,
        )


def test_a_batch_that_does_not_fit():
    column = parallel.compare(
        step, init, jax.ShapeDtypeStruct((10**8, WIDTH), "float32"), ["T4"]
    ).columns[0]
    assert column.fits is False and 0 < column.rows[0] < 10**8 and column.time.seconds > 0


def test_every_number_is_labelled():
    table = parallel.compare(
        step, init, BATCH, ["Titan RTX", "i7-7700K", "TPU v2-8"], examples=6400
    )
    assert table.steps == 100 and table.period == "epoch"
    words = {"chips", "dtype of products"}
    for column in table.columns:
        for name, figure in column.figures(table.steps, table.period).items():
            number = any(char.isdigit() for char in figure.text)
            assert figure.basis in (
                *hw.chips["T4"].bases.values(),
                "exact",
                "published",
                "derived",
                "estimated",
                "",
            )
            assert name in words or bool(figure.basis) == number or name in ("bound by", "fits"), (
                name,
                figure,
            )
    rows = {row[0]: row[1:] for row in table.table()}
    assert rows["FLOPs of a step"][0] == "exact" and rows["best possible time"][0] == "estimated"
    assert rows["peak of a chip"][:3] == ["", "130 TFLOP/s (published)", "538 GFLOP/s (derived)"]
    assert "energy per epoch" in str(table) and table.markdown().count("\n") == len(rows)


@pytest.mark.parametrize(
    ("chips", "text"),
    [
        (["RTX 9999"], r"^compare: devices must be .*got 'RTX 9999'"),
        (["V100"], r"^compare: .*got 'V100': the catalog has 4 chips 'V100': 'V100 SXM2 16GB'"),
        ([], "^compare: expected at least one name of a chip"),
    ],
)
def test_invalid_chips(chips, text):
    with pytest.raises(ValueError, match=text):
        parallel.compare(step, init, BATCH, chips)
