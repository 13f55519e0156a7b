"""Bounds, tiles, utilization and measurement."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import cost
from fnet import hardware as hw
from fnet.cost._roofline import seconds_text
from fnet.cost._tiles import stored_bytes
from fnet.hardware._measure import _best


def spec(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def net(x, w):
    with jax.named_scope("big"):
        x = x @ w
    with jax.named_scope("thin"):
        return x + 1.0


def test_the_bound_is_the_longer_of_two_times():
    report = hw.roofline(
        net, spec(4096, 4096, dtype="bfloat16"), spec(4096, 4096, dtype="bfloat16"), chip="TPU v5e"
    )
    big, thin = report.scopes
    assert (big.scope, big.bound, thin.bound) == ("big", "compute", "memory")
    assert big.seconds == pytest.approx(2 * 4096**3 / 197e12) and big.memory == pytest.approx(
        3 * 2 * 4096**2 / 819e9
    )
    assert thin.seconds == pytest.approx(2 * 2 * 4096**2 / 819e9)
    assert report.total.seconds == pytest.approx(big.seconds + thin.seconds)
    assert report.ridge == pytest.approx(197e12 / 819e9) and report.waste == ()
    assert report.measured is None and str(report.mfu).startswith(
        "MFU unknown: nothing was measured"
    )


def test_devices_share_the_work():
    one = hw.roofline(net, spec(4096, 4096), spec(4096, 4096), chip="TPU v3", devices=1)
    two = hw.roofline(net, spec(4096, 4096), spec(4096, 4096), chip="TPU v3", devices=2)
    assert one.scopes[0].seconds == pytest.approx(
        2 * 4096**3 / 61.5e12
    )  # one device is half a chip
    assert two.scopes[0].seconds == pytest.approx(one.scopes[0].seconds / 2)


def test_precision_highest_takes_six_passes_on_a_tpu():
    plain = hw.roofline(lambda x: x @ x, spec(512, 512), chip="TPU v4")
    exact = hw.roofline(
        lambda x: jnp.matmul(x, x, precision="highest"), spec(512, 512), chip="TPU v4"
    )
    assert exact.total.compute == pytest.approx(6 * plain.total.compute)


def test_an_unknown_chip_has_no_bounds_and_no_mfu():
    report = hw.roofline(net, spec(64, 64), spec(64, 64), chip="NVIDIA Z9")
    assert {row.bound for row in report.scopes} == {"unknown"} and report.total.seconds is None
    assert (
        report.notes[-1]
        == "NVIDIA Z9 is not in the catalog, so there are no bounds; call hardware.measure()"
    )
    assert "no peak known" in str(report)


def test_a_measured_step_keeps_its_donated_arguments():
    step = jax.jit(lambda p, x: (p - 0.1 * x.T @ (x @ p), x.sum()), donate_argnums=0)
    p, x = jnp.ones((64, 32)), jnp.ones((16, 64))
    report = hw.roofline(step, p, x, repeats=2)
    assert report.measured > 0 and float(p.sum()) == 64 * 32
    assert report.chip == hw.detect() and report.devices == 1
    assert "measured" in str(report) and "MFU" in str(report)


def test_arrays_on_another_chip_are_not_measured():
    report = hw.roofline(net, jnp.ones((8, 8)), jnp.ones((8, 8)), chip="TPU v5e")
    assert report.measured is None and "nothing was measured: this is" in report.mfu.why
    forced = hw.roofline(
        net, jnp.ones((8, 8)), jnp.ones((8, 8)), chip="TPU v5e", measure=True, repeats=1
    )
    assert forced.measured > 0 and forced.mfu.value is None and "not on TPU v5e" in forced.mfu.why


def test_nothing_to_measure_is_an_error():
    with pytest.raises(ValueError, match=r"measure=True needs arrays, got jax.ShapeDtypeStructs"):
        hw.roofline(net, spec(8, 8), spec(8, 8), measure=True)


def test_without_products_there_is_no_mfu():
    report = hw.roofline(lambda x: x + 1.0, jnp.ones(8), repeats=1)
    assert report.mfu.why == "the function has no matrix products"


TILES = [  # (chip, shape, dtype, padded)
    (
        "TPU v5e",
        (1, 64, 10, 128),
        "bfloat16",
        (1, 128, 16, 128),
    ),  # the operands swapped: 10 becomes rows
    ("TPU v5e", (1, 512, 512, 64), "float32", (1, 512, 512, 128)),
    ("TPU v6e", (1, 256, 128, 128), "bfloat16", (1, 256, 128, 256)),
    ("H100 SXM5 80GB", (8, 100, 10, 7), "float16", (8, 128, 64, 8)),
    ("MI300X", (1, 33, 64, 64), "bfloat16", (1, 64, 64, 64)),
    ("Intel Core i7-7700K", (1, 64, 10, 7), "float32", (1, 64, 16, 7)),
    ("AMD EPYC 9654 (Zen 4)", (1, 64, 10, 7), "bfloat16", (1, 64, 32, 7)),
]


@pytest.mark.parametrize(("chip", "shape", "dtype", "padded"), TILES)
def test_tiles(chip, shape, dtype, padded):
    b, m, n, k = shape
    counted = hw.count(
        lambda x, w: jax.lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,)))),
        spec(b, m, k, dtype=dtype),
        spec(b, k, n, dtype=dtype),
    )
    (waste,) = hw.tile_waste(counted.matmuls, hw.chips[chip])
    assert waste.shape == shape and waste.padded == padded
    assert waste.fill == pytest.approx(np.prod(shape) / np.prod(padded))
    assert waste.wasted == pytest.approx(2 * (np.prod(padded) - np.prod(shape)))


def test_waste_is_named_with_its_rule():
    def head(x, w):
        with jax.named_scope("head"):
            return jax.lax.scan(lambda c, _: (c, c @ w), x, None, length=3)[1]

    report = hw.roofline(head, spec(512, 300), spec(300, 10), chip="NVIDIA A100-SXM4-40GB")
    (waste,) = report.waste
    assert (
        waste.times == 3 and str(waste) == "head: dot float32 fills 16% of its tiles (n 10 of 64)"
    )
    assert "Matrix Multiplication Background" in report.rule and "Matrix Multiplication" in str(
        report
    )
    assert hw.tile_waste(report.count.matmuls, hw.chips["TPU v5e"], below=0.1) == ()


def test_mfu():
    v5e = hw.chips["TPU v5e"]
    half = hw.mfu(1e14, 1.0, v5e, "bfloat16")
    assert (
        half.value == pytest.approx(1e14 / 197e12)
        and str(half) == "MFU 50.8% of 197 TFLOP/s (bf16, published)"
    )
    assert hw.mfu(1e14, 1.0, v5e, "bfloat16", devices=4).value == pytest.approx(half.value / 4)
    assert hw.mfu(1e13, 1.0, hw.chips["TPU v3"], "bfloat16").peak == 61.5e12
    assert hw.mfu(1e12, 1.0, hw.chips["H100 SXM5 80GB"]).dtype == "tf32"


def test_an_mfu_without_a_peak_has_a_text():
    assert str(cost.MFU(0.5)) == "MFU 50.0%"


def test_mfu_says_why_it_is_unknown():
    unknown = hw.mfu(1e12, 1.0, hw.detect("NVIDIA Z9"))
    assert str(unknown) == (
        "MFU unknown: the catalog has no peak of NVIDIA Z9; call hardware.measure()"
    )
    v100 = hw.mfu(1e12, 1.0, hw.chips["V100 SXM2 16GB"], "bfloat16")
    assert v100.why == "the peak of V100 SXM2 16GB for bfloat16 is unknown"
    above = hw.mfu(4e14, 1.0, hw.chips["TPU v5e"], "bfloat16")
    assert above.value is None and above.why == (
        "400 TFLOP/s is above the published peak of 197 TFLOP/s (bf16, TPU v5e): the FLOP count or "
        "the time is wrong, or the step did not do all of its work"
    )
    guessed = hw.mfu(1e12, 1.0, hw.chips["Intel Core i7-7700K"])
    assert "above the derived peak" in guessed.why and guessed.why.endswith(
        "call hardware.measure()"
    )
    with pytest.raises(
        ValueError, match=r"mfu: expected a positive time and devices >= 1, got 0.0 s on 1"
    ):
        hw.mfu(1.0, 0.0, hw.chips["TPU v5e"])


def test_emulated_cpu_devices_share_one_chip():
    eight = dataclasses.replace(hw.chips["Intel Core i7-7700K"], jax_devices_per_chip=8)
    assert eight.chips_of(1) == eight.chips_of(8) == 1 and eight.chips_of(16) == 2
    assert hw.chips["TPU v3"].chips_of(1) == 0.5


def test_measure_fills_in_a_row():
    chip = hw.measure(dtypes=("float32", "bfloat16"), size=64, copy_bytes=2**16, seconds=0.01)
    assert (
        chip.known
        and set(chip.peaks) == {"fp32", "bf16"}
        and all(rate > 0 for rate in chip.peaks.values())
    )
    assert chip.bandwidth > 0 and chip.basis("fp32") == chip.basis("bandwidth") == "measured"
    assert chip.name == hw.detect().name and "matmuls of side 64" in chip.notes
    assert hw.roofline(net, jnp.ones((8, 8)), jnp.ones((8, 8)), chip=chip, repeats=1).measured > 0


def test_measure_leaves_out_what_the_device_cannot_do(monkeypatch):
    from fnet.hardware import _measure

    def matmul(device, dtype, size, seconds):
        if dtype == jnp.float16:
            raise RuntimeError("float16 is not supported on this device\nand more lines")
        return 1e9

    monkeypatch.setattr(_measure, "_matmul", matmul)
    chip = hw.measure(size=16, copy_bytes=2**12, seconds=0.001)
    assert set(chip.peaks) == {"fp32", "bf16"}
    assert chip.notes.endswith("Not measured: float16 (float16 is not supported on this device).")


def test_the_best_batch_is_reported():
    calls = []
    assert 0 < _best(lambda: calls.append(1) or jnp.zeros(()), 0.001) < 1 and len(calls) > 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (0.0, "0 ns"), (2.5e-7, "250 ns"), (1.5e-3, "1.5 ms"), (12.0, "12 s")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("chip", "shape", "itemsize", "stored"),
    [
        ("TPU v5e", (), 4, 512),
        ("TPU v2", (), 4, 1024),
        ("TPU v3", (128,), 4, 1024),
        ("TPU v5e", (128,), 2, 512),
        ("TPU v5e", (128,), 1, 512),
        ("TPU v5p", (300,), 2, 1024),
        ("TPU v4", (1100,), 4, 8192),
        ("TPU v6e", (9, 5), 2, 2048),
        ("TPU v5e", (3, 1, 100), 4, 1536),
        ("TPU v2", (3, 1, 100), 4, 2048),
        ("RTX 3080 10GB", (), 4, 4),
    ],
)
def test_what_an_array_takes(chip, shape, itemsize, stored):
    """Argument sizes of programs that libtpu 0.0.52 has compiled for those TPUs."""
    assert stored_bytes(shape, itemsize, hw.chips[chip]) == stored
