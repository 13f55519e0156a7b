"""advise: the products of a function, their estimated times by hand, and decisions for known times."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import compress, models
from fnet import hardware as hw
from fnet import transforms as ft
from fnet.compress import Int4, Int8, _advise, _products

W = {"k1": jnp.ones((16, 32)), "k2": jnp.ones((32, 64)), "k3": jnp.ones((64, 8))}
X = jnp.ones((4, 16))


def chain(params, x):
    return jnp.tanh(x @ params["k1"]) @ params["k2"] @ params["k3"]


def found(f, params, *args):
    return [
        (p.path, p.x.shape, p.w.shape, p.axes, p.count)
        for p in _products.products(f, params, *args)
    ]


@pytest.mark.exhaustive
def test_implicit_arrays_keep_their_form():
    advice = compress.advise(chain, compress.quantize(W, {"k2": Int8()}), X, chip="TPU v5e")
    assert [row.path for row in advice.rows] == ["k1", "k3"] and advice.before > 0


def test_products_on_slices_of_a_parameter():
    """Only the layers of a stack are slices, which XLA copies."""
    params = {"w": jnp.ones((3, 8, 8)), "head": jnp.ones((8, 4))}
    f = lambda p, x: lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0] @ p["head"]
    assert [(p.path, p.sliced) for p in _products.products(f, params, jnp.ones((5, 8)))] == [
        ("w", True),
        ("head", False),
    ]


def test_products_in_scans_batches_and_transposes():
    stack = {"w": jnp.ones((3, 8, 8))}
    assert found(
        lambda p, x: lax.scan(lambda x, w: (x @ w, None), x, p["w"])[0], stack, jnp.ones((5, 8))
    ) == [("w", (5, 8), (8, 8), (-2,), 3)]
    assert found(
        lambda p, x: lax.fori_loop(0, 7, lambda i, x: x @ p["w"], x),
        {"w": jnp.ones((8, 8))},
        jnp.ones((5, 8)),
    ) == [("w", (5, 8), (8, 8), (-2,), 7)]
    assert found(lambda p, x: x @ p["w"].T, {"w": jnp.ones((6, 8))}, jnp.ones((5, 8))) == [
        ("w", (5, 8), (6, 8), (-1,), 1)
    ]
    assert found(
        lambda p, x: jnp.einsum("nbi,nio->nbo", x, p["w"]), stack, jnp.ones((3, 5, 8))
    ) == [("w", (5, 8), (8, 8), (-2,), 3)]
    assert found(
        lambda p, x: lax.conv_general_dilated(
            x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        {"w": jnp.ones((3, 3, 4, 6))},
        jnp.ones((2, 5, 5, 4)),
    ) == [("w", (2, 5, 5, 4), (3, 3, 4, 6), (-4, -3, -2), 1)]


def test_flops_are_those_of_the_count():
    model = models.ResNet((1, 1), bottleneck=False, classes=3, width=8)
    x = jnp.ones((2, 32, 32, 3))
    params, state = model.init(jax.random.key(0), x)
    f = lambda params, x: model(params, x, state=state)[0]
    listed = _products.products(f, params, x)
    assert sum(p.flops * p.count for p in listed) == hw.count(f, params, x).model_flops
    assert listed[0].path == "stem/conv/kernel" and listed[-1].path == "head/kernel"
    assert sum(map(len, _products.grouped(listed))) == len(listed) > len(_products.grouped(listed))


@pytest.mark.parametrize(
    ("name", "dtype"), [("TPU v5e", "bf16"), ("NVIDIA H100 80GB HBM3", "tf32")]
)
def test_estimates_by_hand(name, dtype):
    chip = hw.chips.find(name)
    advice = compress.advise(chain, W, X, chip=chip)
    row = {row.path: row for row in advice.rows}["k2"]
    flops, moved = 2 * 4 * 32 * 64, 4 * (4 * 32 + 4 * 64)
    vector, peak = (
        chip.peaks.get("fp32", np.inf),
        chip.peaks[dtype],
    )  # float32 products run in this dtype
    assert row.bytes == {
        "original": 8192,
        "Int8": 2048 + 256,
        "Int8 dynamic": 2048 + 256,
        "Int4": 1024 + 256,
    }
    want = {
        "original": max(flops / peak, (moved + 8192) / chip.bandwidth),
        "Int8": max(flops / peak, (moved + 2304) / chip.bandwidth) + 2048 / vector,
        "Int8 dynamic": max(flops / chip.peaks["int8"], (moved + 2304) / chip.bandwidth)
        + 3 * 128 / vector,
        "Int4": max(flops / peak, (moved + 1280) / chip.bandwidth) + 4 * 2048 / vector,
    }
    assert row.seconds == pytest.approx(want)
    assert not advice.measured
    total = hw.roofline(chain, W, X, chip=chip, measure=False).total.seconds
    assert advice.before == pytest.approx(total)
    small = compress.quantize(W, {"k2": Int8()})
    assert advice.predict(small) == pytest.approx(total - want["original"] + want["Int8"])


def test_the_advice_is_a_recipe():
    """A tied table is contracted over its last axis; groups are made to fit."""
    params = {**W, "d": jnp.ones((40, 24)), "e": jnp.ones((40, 8))}

    def f(params, x):
        x = chain(params, x)
        return jnp.tile(x, (1, 3)) @ params["d"].T @ params["e"]

    advice = compress.advise(f, params, X, chip="TPU v5e", formats=[Int4()])
    assert dict(advice) == {"k2": Int4(), "k3": Int4(), "d": Int4(8, axes=(-1,))}
    reasons = [row.reason for row in advice.rows]
    assert reasons[0] == "the first product" and reasons[-1] == "the last product"
    small = compress.quantize(params, advice)
    assert not ft.explain(ft.use_implicit_arrays(f), small, X).materialized
    assert advice.predict(small) == pytest.approx(advice.after) and advice.after < advice.before
    lines = str(advice).splitlines()
    assert lines[0] == "TPU v5e: estimates from peak rates and bandwidth, not measured"
    assert lines[2].split()[:6] == ["parameter", "products", "MB", "time", "(estimate)", "Int4:"]
    assert re.match(r"d  +1 x \[4, 24\] x \[40, 24\] .* Int4: 0\.\d\d of the time", lines[6])
    assert re.fullmatch(
        r"3 of 5 parameters: .*B saved; the function takes .* instead of .* \(estimate\)", lines[-1]
    )


def test_decisions_for_known_times(monkeypatch):
    """Int8 pays for k2, nothing for k1 and k3; what is not a product keeps its time."""
    times = {
        (16, 32): {"original": 2, "Int8": 3, "Int8 dynamic": 1.99},
        (32, 64): {"original": 5, "Int8": 1, "Int8 dynamic": 4},
        (64, 8): {"original": 1, "Int8": 9, "Int8 dynamic": 9},
    }
    monkeypatch.setattr(
        _advise, "_probed", lambda product, candidates, returned: times[product.w.shape]
    )
    whole = {"original": 20, "Int8": 24, "Int8 dynamic": 27}  # as those of the products predict
    monkeypatch.setattr(
        _advise, "_seconds", lambda run, trees, args: {name: whole[name] for name in trees}
    )
    both = lambda params, x: (
        chain(params, x),
        x @ params["k1"] @ jnp.ones((32, 2)),
        x @ params["z"],
    )
    params = {"z": jnp.ones((16, 32)), **W}
    advice = compress.advise(
        both, params, X, measure=True, formats=[Int8(), Int8(activations="dynamic")]
    )
    rows = {row.path: row for row in advice.rows}
    assert rows["k1"].seconds["original"] == 4 and rows["k1"].reason == "the first product"
    assert dict(advice) == {"k2": Int8()} and rows["k2"].reason == "0.20 of the time"
    assert rows["k3"].reason == "the fastest format, Int8, takes 9.00 of the time"
    assert rows["z"].reason == "the last product"
    assert (advice.before, advice.after) == (20, 16)
    whole["Int8"] = (
        34  # k2 and k3 take 20 instead of 6 in the whole function, 10 in separate products
    )
    advice = compress.advise(both, params, X, measure=True, formats=[Int8()])
    rows = {row.path: row for row in advice.rows}
    assert [rows[path].seconds["Int8"] for path in ("k2", "k3")] == [2, 18] and rows["k1"].seconds[
        "Int8"
    ] == 6
    small = compress.quantize(params, {"k[23]": Int8()})
    assert advice.predict(small) == pytest.approx(34) and advice.after == 17
    whole |= {"original": 6, "Int8": 8}  # separate products took longer than the whole
    advice = compress.advise(both, params, X, measure=True, formats=[Int8()])
    assert advice.predict(small) == pytest.approx(8)


@pytest.mark.exhaustive
def test_probes_run():
    formats = [
        Int8(),
        Int8(activations="dynamic"),
        Int8(activations="percentile"),
        compress.NF4(8),
        compress.Float8(),
    ]
    advice = compress.advise(jax.jit(chain), W, X, formats=formats)
    assert advice.measured and "every product timed on this machine" in str(advice)
    for row in advice.rows:
        assert set(row.seconds) == {
            "original",
            "Int8",
            "Int8 dynamic",
            "Int8 percentile",
            "NF4",
            "Float8",
        }
        assert min(row.seconds.values()) > 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(formats=[8]), TypeError, "advise: expected formats such as compress.Int8(); got 8"),
        (
            dict(measure=True),
            ValueError,
            "advise: measure=True needs arrays, got jax.ShapeDtypeStructs",
        ),
        (
            dict(f=lambda params, x: x),
            ValueError,
            "advise: the function has no product with a kernel or a table",
        ),
    ],
)
def test_errors(change, error, text):
    arguments = dict(f=chain) | change
    with pytest.raises(error, match=re.escape(text)):
        compress.advise(
            arguments.pop("f"), W, jax.ShapeDtypeStruct((4, 16), jnp.float32), **arguments
        )


def test_a_format_that_was_not_considered():
    advice = compress.advise(chain, W, X, chip="TPU v5e", formats=[Int8()])
    with pytest.raises(
        ValueError,
        match=r"k2 has the format Int4; the advice considered Int8; pass advise\(..., form",
    ):
        advice.predict(compress.quantize(W, {"k2": Int4(16)}))


def test_a_chip_without_rates():
    advice = compress.advise(chain, W, X, chip="Nothing 9000")
    assert not advice and advice.before is None
    assert "no format fits, or a peak or the bandwidth of Nothing 9000 is unknown" in str(advice)
