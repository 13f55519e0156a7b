"""The catalog: rows, names, formulas beside quotes, prices."""

import json
import math
import pickle
import re
from importlib import resources

import jax.numpy as jnp
import pytest

from fnet import hardware as hw

BASES = {"exact", "measured", "published", "derived", "estimated", "unverified"}


def test_every_row_is_whole():
    assert len(hw.chips) >= 85
    for name, chip in hw.chips.items():
        assert chip.name == name and chip.known and chip.sources
        assert chip.kind in ("cpu", "gpu", "tpu")
        assert chip.peaks and all(rate > 1e9 for rate in chip.peaks.values())
        assert {chip.basis(field) for field in (*chip.peaks, "memory_bytes", "bandwidth")} <= BASES
        assert chip.jax_devices_per_chip in (1, 2)
        assert all(price.date and price.source and price.usd > 0 for price in chip.prices)
        assert chip.power_watts is None or chip.power_source


def test_every_figure_of_the_file_names_a_field_it_doubts():
    """What a row calls derived or unverified is a field it has: a misspelt one would vouch for a
    figure."""
    fields = {
        "bandwidth",
        "clock",
        "links",
        "device_kinds",
        "units",
        "year",
        "all",
        "memory_bytes",
        "memory_kind",
        "caches",
    }
    for row in json.loads(resources.files("fnet.hardware").joinpath("chips.json").read_text())[
        "chips"
    ]:
        for name in (*row.get("derived", ()), *row.get("unverified", ())):
            assert name in fields or name in row["peak_tflops"], f"{row['name']}: {name}"
            assert name != "bandwidth" or "bandwidth_gbs" in row
            assert name != "links" or "links" in row
            assert name != "caches" or "caches_mib" in row
            assert name != "memory_kind" or "memory_kind" in row
            assert name != "memory_bytes" or "memory_gib" in row


def test_rows_are_values():
    chip = hw.chips["TPU v5e"]
    assert hash(chip) == hash(hw.chips["TPU v5e"]) and pickle.loads(pickle.dumps(chip)) == chip
    with pytest.raises(AttributeError):
        chip.name = "another"
    with pytest.raises(TypeError):
        chip.peaks["bf16"] = 1.0


def test_names():
    assert hw.chips["TPU v5e"].peaks["bf16"] == 197e12
    assert hw.chips["tpu v6e"] is hw.chips["TPU v6e (Trillium)"]
    assert hw.chips.find("NVIDIA H100 80GB HBM3").name == "H100 SXM5 80GB"
    assert hw.chips.find("NVIDIA L40S").name == "L40S" and hw.chips.find("NVIDIA L4").name == "L4"
    assert hw.chips.find("AMD Instinct MI300X VF").name == "MI300X"
    assert (
        hw.chips.find("TPU v5").name == "TPU v5p" and hw.chips.find("TPU v5 lite").name == "TPU v5e"
    )
    assert "RTX 3090" in hw.chips and "RTX 4080" not in hw.chips and 7 not in hw.chips
    assert next(iter(hw.chips)) == "TPU v2"


@pytest.mark.parametrize("look", [hw.chips.__getitem__, hw.chips.find])
def test_an_unknown_name_lists_similar_names(look):
    with pytest.raises(
        KeyError, match="the catalog has no chip 'TPU v5x'; the most similar names are 'TPU v5"
    ):
        look("TPU v5x")


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("V100", ["V100 SXM2 16GB", "V100 PCIe 16GB", "V100 SXM2 32GB", "V100 PCIe 32GB"]),
        ("titan x", ["Titan X (Maxwell)", "Titan X (Pascal)"]),
        ("P100", ["P100 PCIe 16GB", "P100 SXM2 16GB"]),
    ],
)
def test_a_name_of_several_chips_lists_them(name, variants):
    with pytest.raises(KeyError) as error:
        hw.chips[name]
    assert error.value.args[0] == (
        f"the catalog has {len(variants)} chips {name!r}: {', '.join(map(repr, variants))}; "
        "choose one"
    )
    assert name not in hw.chips and hw.chips.variants(name) == variants
    with pytest.raises(KeyError, match="choose one"):
        hw.chips.find(name)


def test_cores_memory_and_caches():
    facts = {
        name: (hw.chips[name].cores, hw.chips[name].memory_kind)
        for name in (
            "Titan RTX",
            "MI300X",
            "i7-7700K",
            "TPU v3",
            "GTX Titan X",
            "K80",
            "M1 Max",
            "Graviton3",
        )
    }
    assert facts == {
        "Titan RTX": (4608, "GDDR6"),
        "MI300X": (19456, "HBM3"),
        "i7-7700K": (4, "DDR4"),
        "TPU v3": (2, "HBM"),
        "GTX Titan X": (3072, "GDDR5"),
        "K80": (4992, "GDDR5"),
        "M1 Max": (32, None),
        "Graviton3": (64, "DDR5"),
    }
    assert hw.chips["A100 SXM4 80GB"].caches["L2"] == 40 * 2**20
    assert hw.chips["A100 SXM4 80GB"].basis("caches") == "unverified"


def test_no_row_answers_for_another_kind():
    kinds = [kind for chip in hw.chips.values() for kind in chip.device_kinds]
    assert len(kinds) == len({kind.lower() for kind in kinds})
    for chip in hw.chips.values():
        assert all(hw.chips.find(kind) is chip for kind in chip.device_kinds)


def test_memory_and_bandwidth_are_bytes():
    v5p = hw.chips["TPU v5p"]
    assert v5p.memory_bytes == 95 * 2**30 and v5p.bandwidth == 2765e9
    assert v5p.links.count == 6 and v5p.links.each_way == 90e9


def test_a_device_has_its_share_of_the_chip():
    half = hw.chips["TPU v3"].per_device
    assert (
        half.peaks["bf16"] == 61.5e12
        and half.memory_bytes == 16 * 2**30
        and half.jax_devices_per_chip == 1
    )
    assert half.name == "TPU v3, one of 2 devices"
    assert hw.chips["TPU v5e"].per_device is hw.chips["TPU v5e"]


def test_a_mig_slice_is_a_part_of_its_chip():
    whole, part = hw.chips["H100 SXM5 80GB"], hw.chips.find("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert part.name == "H100 SXM5 80GB MIG 1g.10gb"
    assert part.peaks["bf16"] == pytest.approx(whole.peaks["bf16"] * 16 / 132)
    assert part.bandwidth == pytest.approx(419e9, rel=1e-3) and part.memory_bytes == 10 * 2**30
    assert part.basis("bf16") == "estimated" and "16 of 132 multiprocessors" in part.notes
    assert not part.prices and part.power_watts is None


def test_peak_follows_what_jax_does_with_float32():
    v5e, h100, v100 = hw.chips["TPU v5e"], hw.chips["H100 SXM5 80GB"], hw.chips["V100 SXM2 16GB"]
    assert v5e.peak("float32")[:2] == (197e12, "bf16")
    assert v5e.peak(jnp.float32, precision="highest").flops == pytest.approx(197e12 / 6)
    assert v5e.peak("float16") is None and v5e.peak("int8").flops == 394e12
    assert (
        h100.peak("float32").dtype == "tf32"
        and h100.peak("float32", precision="highest").dtype == "fp32"
    )
    assert v100.peak("float32").flops == 15.7e12 and v100.peak("bfloat16") is None
    assert hw.chips["MI300X"].peak("float32").dtype == "fp32_matrix"


# What the vendors and the lectures print, from the formulas: TFLOP/s.
FORMULAS = [
    ("Titan RTX", "fp32", "72 SM x 64 cores x 2 x 1.77 GHz", 16.3),
    ("Titan RTX", "fp16", "72 SM x 8 tensor cores x 128 x 1.77 GHz", 130.5),
    ("RTX 2080 Ti", "fp32", "68 SM x 64 cores x 2 x 1.545 GHz", 13.4),
    ("Intel Core i7-7700K", "fp32", "4 cores x 32 x 4.2 GHz", 0.54),
    ("TPU v2", "bf16", "2 cores x 1 MXU x 128 x 128 x 2 x 0.7 GHz", 45.9),
    ("TPU v3", "bf16", "2 cores x 2 MXU x 128 x 128 x 2 x 0.94 GHz", 123.2),
    ("MI300X", "fp16", "304 CU x 2048 x 2.1 GHz", 1307.4),
    ("Titan X Pascal", "fp32", "28 SM x 128 cores x 2 x 1.531 GHz", 10.97),
    ("K80", "fp32", "26 SM x 192 cores x 2 x 0.875 GHz", 8.74),
    ("Apple A11 Bionic", "fp32", "3 cores x 64 lanes x 2 x 1.066 GHz", 0.41),
    ("Apple M2", "fp32", "10 cores x 128 lanes x 2 x 1.398 GHz", 3.58),
    ("Snapdragon X Elite", "fp32", "6 cores x 256 lanes x 2 x 1.5 GHz", 4.6),
    ("Graviton3", "fp32", "64 cores x 32 x 2.6 GHz", 5.32),
]


@pytest.mark.parametrize(("name", "dtype", "formula", "tflops"), FORMULAS)
def test_formulas(name, dtype, formula, tflops):
    (row,) = [c for c in hw.computed(hw.chips[name]) if c.dtype == dtype]
    assert row.formula == formula and row.flops / 1e12 == pytest.approx(tflops, rel=0.005)


def test_every_disagreement_is_explained():
    rows = [
        (item.name, check)
        for item in (*hw.chips.values(), *hw.systems.values())
        for check in hw.checks(item)
    ]
    assert len(rows) > 60
    for name, check in rows:
        assert math.isfinite(check.deviation)
        assert abs(check.deviation) < 0.02 or check.explanation, (
            f"{name} {check.dtype}: {check.deviation:+.1%}"
        )


def quote(item, dtype, tflops):
    (check,) = [c for c in hw.checks(item) if c.dtype == dtype and c.quoted == tflops * 1e12]
    return check


def test_the_published_figures_beside_the_computed():
    assert quote(hw.chips["Titan V"], "fp32", 14).deviation == pytest.approx(-0.06, abs=0.005)
    assert "V100 PCIe" in quote(hw.chips["Titan V"], "fp16", 112).explanation
    ryzen = quote(hw.chips["Ryzen 9 3950X"], "fp32", 4.8)
    assert (
        ryzen.quoted / ryzen.computed == pytest.approx(2, rel=0.01)
        and "twice too high" in ryzen.explanation
    )
    assert abs(quote(hw.chips["i7-7700K"], "fp32", 0.54).deviation) < 0.01


def test_systems():
    assert set(hw.systems) == {"DGX-1 (V100)", "TPU v2-8", "TPU v3-8", "TPU v2 pod", "TPU v3 pod"}
    dgx = hw.systems["DGX-1"]
    assert (dgx.count, dgx.chip.name) == (8, "V100 SXM2 16GB")
    assert "119.2" in quote(dgx, "fp16", 960).explanation
    assert hw.systems["TPU v2-8"].flops("bf16") == 184e12 and quote(
        hw.systems["TPU v2-8"], "bf16", 180
    )
    board = hw.systems["TPU v3-8"]
    assert board.flops("bf16") == 492e12 and "492" in quote(board, "bf16", 420).explanation
    assert hw.systems["TPU v3 pod"].flops("bf16") == pytest.approx(126e15, rel=0.001)
    assert dgx.flops("bf16") is None
    with pytest.raises(KeyError, match="the catalog has no system 'DGX-9'"):
        hw.systems["DGX-9"]


LAUNCH = {
    "Intel Core i7-7700K": 385,
    "AMD Ryzen 9 3950X": 749,
    "RTX 2080 Ti": 1199,
    "Titan RTX": 2499,
    "Titan V": 2999,
    "DGX-1 (V100)": 149_000,
}


@pytest.mark.parametrize("name", LAUNCH)
def test_launch_prices(name):
    item = hw.chips[name] if name in hw.chips else hw.systems[name]
    (price,) = [price for price in item.prices if price.per != "hour"]
    assert price.usd == LAUNCH[name] and re.fullmatch(r"20\d\d-\d\d", price.date) and price.source
    assert item.power_watts > 0 and item.power_source


def test_flop_per_dollar():
    (rent,) = hw.flop_per_dollar(hw.systems["TPU v3-8"])
    assert rent.flop_per_dollar == pytest.approx(492e12 * 3600 / 8) and rent.price.date == "2026"
    (bought,) = hw.flop_per_dollar(hw.chips["Titan RTX"], "fp32", years=1)
    assert bought.flop_per_dollar == pytest.approx(16.3e12 * 365.25 * 86400 / 2499)
    assert "1 years of use" in bought.assumption
    assert (
        hw.flop_per_dollar(hw.chips["TPU v4i"]) == ()
        and hw.flop_per_dollar(hw.chips["Titan RTX"], "bf16") == ()
    )
