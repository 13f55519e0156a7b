"""Measured energy, from a fake folder of counters and a fake NVML."""

import sys
import types

import jax
import pytest

from fnet import hardware as hw
from fnet import introspect
from fnet.hardware import _energy
from fnet.training.loop._progress import Progress
from fnet.training.loop._reports import Reports


@pytest.fixture
def powercap(tmp_path):
    """Two packages, a part of one, the platform, and a device that is no counter of energy."""
    names = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for folder, name in names.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text("999999999\n")
        counted(tmp_path, folder, 500_000_000)
    (tmp_path / "dtpm").mkdir()
    return tmp_path


def counted(root, folder, microjoules):
    (root / folder / "energy_uj").write_text(f"{microjoules}\n")


def meter(root):
    return _energy.energy_meter(jax.devices("cpu"), root=root)


def test_packages_are_added_up_once(powercap):
    found = meter(powercap)
    assert found.source == "RAPL package-0, RAPL package-1" and found.joules() == 0
    counted(powercap, "intel-rapl:0", 530_000_000)
    counted(powercap, "intel-rapl:1", 510_000_000)
    counted(powercap, "intel-rapl:2", 900_000_000)
    assert found.joules() == pytest.approx(40)
    assert found.joules() == pytest.approx(40)


def test_a_counter_begins_again_at_zero(powercap):
    found = meter(powercap)
    counted(powercap, "intel-rapl:0", 999_000_000)
    assert found.joules() == pytest.approx(499)
    counted(powercap, "intel-rapl:0", 3_000_000)  # 1 J to the end of the range, and 3 more
    assert found.joules() == pytest.approx(503)
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert found.joules() == pytest.approx(503)


def test_without_counters_or_permission_there_is_no_meter(tmp_path, powercap, monkeypatch):
    assert meter(tmp_path / "absent") is None
    monkeypatch.setattr(_energy, "_microjoules", lambda file: lambda: open(file / "denied").read())
    assert meter(powercap) is None
    (tmp_path / "empty" / "intel-rapl:0").mkdir(parents=True)
    assert meter(tmp_path / "empty") is None


class NVMLError(Exception):
    pass


def nvml(monkeypatch, **functions):
    """A module in place of nvidia-ml-py, with one GPU."""
    module = types.ModuleType("pynvml")
    module.__spec__ = types.SimpleNamespace(name="pynvml")
    module.NVMLError = NVMLError
    module.millijoules = 1000
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetTotalEnergyConsumption = lambda handle: module.millijoules
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def refuse(*args):
    raise NVMLError("Not Supported")


GPU = types.SimpleNamespace(platform="gpu", id=0, local_hardware_id=0)


def test_gpus_are_counted_by_nvml(monkeypatch, tmp_path):
    module = nvml(monkeypatch)
    found = hw.energy_meter([GPU], root=tmp_path)
    module.millijoules = 8000
    assert found.source == "NVML GPU 0" and found.joules() == pytest.approx(7)
    module.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert found.joules() == pytest.approx(7)


@pytest.mark.parametrize(
    "name", ["nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_nvml_that_refuses_is_absent(monkeypatch, tmp_path, name):
    nvml(monkeypatch, **{name: refuse})
    assert hw.energy_meter([GPU], root=tmp_path) is None


def test_a_run_logs_joules_per_step(monkeypatch, powercap, capsys):
    monkeypatch.setattr(hw, "energy_meter", lambda: meter(powercap))
    reports = Reports(Progress(bar=False), 100)
    reports.start(10)
    counted(powercap, "intel-rapl:0", 560_000_000)
    feed = types.SimpleNamespace(lap=lambda at: (0.0, 20))
    assert reports.times(30, feed)["joules_per_step"] == pytest.approx(3)
    reports.show(30, {"loss": 1.0})  # the same step: the same figure
    assert "3 J/step" in capsys.readouterr().out
    counted(powercap, "intel-rapl:0", 570_000_000)
    reports.show(40, {})
    assert "1 J/step" in capsys.readouterr().out


def test_a_run_without_counters_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(hw, "energy_meter", lambda: None)
    reports = Reports(Progress(bar=False), 100)
    reports.start(0)
    reports.show(10, {"loss": 1.0})
    feed = types.SimpleNamespace(lap=lambda at: (0.0, 20))
    assert "joules_per_step" not in reports.times(20, feed)
    assert "J/step" not in capsys.readouterr().out


def test_a_profile_has_the_energy_of_a_step(monkeypatch, powercap):
    begun = []

    def made():
        found = meter(powercap)
        begun.append(found)
        counted(powercap, "intel-rapl:0", 500_000_000 + 2_000_000 * len(begun))
        return found

    monkeypatch.setattr(hw, "energy_meter", made)
    profile = introspect.profile(lambda x: x @ x, jax.numpy.ones((64, 64)), repeats=3)
    assert profile.joules == pytest.approx(2) and "measured energy: 2 J a step" in str(profile)
    monkeypatch.setattr(hw, "energy_meter", lambda: None)
    silent = introspect.profile(lambda x: x @ x, jax.numpy.ones((64, 64)), repeats=2)
    assert silent.joules is None and "energy" not in str(silent)
