"""FLOP per dollar and per watt over the years."""

import builtins

import pytest

from fnet import hardware as hw


def test_points_are_the_figures_of_the_catalog():
    dollars, watts = hw.history("dollar"), hw.history("watt")
    by_name = {(point.name, point.dtype): point for point in dollars}
    assert (
        by_name["Titan RTX", "fp16"].value
        == hw.flop_per_dollar(hw.chips["Titan RTX"], "fp16")[0].flop_per_dollar
    )
    assert not by_name["Titan RTX", "fp16"].rented and by_name["TPU v3-8", "bf16"].rented
    power = {(point.name, point.dtype): point.value for point in watts}
    assert power["TPU v2", "bf16"] == 46e12 / 280 and power[
        "DGX-1 (V100)", "fp16"
    ] == pytest.approx(8 * 125e12 / 3500)
    for points in (dollars, watts):
        assert len(points) > 40 and [point.year for point in points] == sorted(
            point.year for point in points
        )
    assert {point.dtype for point in hw.history("watt", ("fp32",))} == {"fp32"}


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    figure = hw.plot(tmp_path / "years.png")
    assert (tmp_path / "years.png").read_bytes().startswith(b"\x89PNG")
    left, right = figure.axes
    assert left.get_title() == "FLOP per dollar at the peak rate" and len(left.lines) == len(
        hw.history("dollar")
    )
    assert len(right.lines) == len(hw.history("watt")) and left.get_yscale() == "log"
    names = {text.get_text() for text in right.texts}
    assert "K80" in names and any(name.startswith("TPU") for name in names)
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        hw.plot(tmp_path / "years.xyz")


def test_without_matplotlib(monkeypatch):
    load = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"plots need .*: pip install matplotlib$"):
        hw.plot()
