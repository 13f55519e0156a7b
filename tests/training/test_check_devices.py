"""fit(check_devices=): the devices are checked once, before anything is compiled, and a run on wrong
ones does not begin."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from several import processes

from fnet import hardware as hw
from fnet import parallel
from fnet import training as tr
from fnet.hardware import _device_check
from fnet.hardware._operations import AXIS, OPERATIONS
from fnet.training.loop import _devices

TX = optax.sgd(0.1)
FAST = {"tensorboard": False, "tune": False, "config": {}}


def step(state, batch):
    return state.apply(TX, {"w": state.params["w"] * batch}), {"loss": batch.sum()}


def start(array=jnp.ones):
    return tr.TrainState.create({"w": array(2)}, TX)


def batches(i):
    return np.full(2, i, np.float32)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an empty cache, that counts the checks; `status` is what they find."""
    state = types.SimpleNamespace(checks=[], status="right")

    def check_devices(devices):
        state.checks.append(devices)
        one = hw.OperationCheck(
            "cpu:1", "cpu", "sum", "float32", "[3]", state.status, "rows", 2.0, 0.5, 4
        )
        return hw.DeviceCheck((one,), "jax 1", 0.25)

    monkeypatch.setenv("FNET_PROBE", "1")
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_device_check, "_known", set())
    monkeypatch.setattr(_devices, "check_devices", check_devices)
    return state


def test_once_for_all_runs_and_processes(machine, tmp_path, capsys):
    run = lambda steps: tr.fit(
        step,
        start(),
        batches,
        steps=steps,
        workdir=tmp_path / "run",
        progress=tr.Progress(),
        **FAST,
    )
    run(2)
    assert machine.checks == [jax.local_devices()]
    said = "checking the devices, once for this kind, driver and jaxlib\n"
    assert capsys.readouterr().out.count(said) == 1
    _device_check._known.clear()  # a new process, that resumes the run
    assert run(4).step == 4
    tr.fit(step, start(), batches, steps=1, tune=False)
    assert len(machine.checks) == 1 and said not in capsys.readouterr().out
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in events]
    assert texts.count("checked cpu:1 in 0.2 s") == 1


def test_not_at_all(machine, monkeypatch):
    tr.fit(step, start(), batches, steps=1, tune=False, check_devices=False)
    monkeypatch.setenv("FNET_PROBE", "0")
    tr.fit(step, start(), batches, steps=1, tune=False)
    assert machine.checks == []


def test_nothing_is_lost_on_a_wrong_device(machine, tmp_path):
    workdir = tmp_path / "run"
    tr.fit(step, start(), batches, steps=2, workdir=workdir, check_devices=False, **FAST)
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    machine.status = "wrong"
    called = []

    def used(*arguments):
        called.append(arguments)
        raise AssertionError

    for _ in range(2):  # wrong devices are not remembered
        with pytest.raises(hw.FaultyDevice) as error:
            tr.fit(used, start(), used, steps=4, workdir=workdir, restart=True, **FAST)
    assert str(error.value) == (
        "fit: cpu:1 (cpu) computes 1 of 1 operations wrongly:\n"
        "  sum, float32 [3]: 'rows' is wrong in 4 elements; the worst is off by 2, where rounding "
        "explains 0.5\n"
        "with jax 1. Install another version of the driver or of jax and jaxlib, and try again "
        "with `fnet devices --check`. To train in spite of it, pass fit(..., check_devices=False)."
    )
    assert not called and len(machine.checks) == 2
    assert before == {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}


def test_an_operation_that_fails_is_noted_and_not_remembered(machine, tmp_path):
    machine.status = "failed"
    for steps in (1, 2):
        tr.fit(step, start(), batches, steps=steps, workdir=tmp_path / "run", **FAST)
    assert len(machine.checks) == 2
    text = (tmp_path / "run" / "events.jsonl").read_text()
    assert text.count("checked cpu:1 in 0.2 s; cpu:1: sum, float32 [3]: failed") == 2


def test_a_cache_that_cannot_be_written_stops_nothing(machine, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        tr.fit(step, start(), batches, steps=1, tune=False)
    assert len(machine.checks) == 1


def test_the_devices_that_the_run_uses(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: asked.append(backend) or [1, 2])
    on_one = {"a": jax.device_put(jnp.ones(3), jax.devices()[5]), "key": jax.random.key(0)}
    assert _devices._local(on_one, None) == [1, 2]  # also those of this kind that it does not use
    assert _devices._local({"a": np.ones(3)}, None) == [1, 2]
    assert asked == ["cpu", None]


def test_the_devices_of_a_plan(machine):
    shapes = np.zeros(8, np.float32)
    plan = parallel.plan(
        lambda state, batch: (state.apply(TX, {"w": state.params["w"] * batch.mean()}), {}),
        lambda key: start(),
        shapes,
        devices="v5e:2x2",
    )
    with pytest.raises(ValueError, match="plan for"):  # not attached, which is said as without it
        tr.fit(step, start(), batches, steps=1, plan=plan)
    assert machine.checks == []


def test_a_device_with_a_fault_is_found_by_fit(machine, monkeypatch):
    """The check itself, with three operations, one of which is wrong on one device."""

    def run(x):
        sums = {part: array for part, array in OPERATIONS[5].run(x).items()}
        faulty = jax.lax.axis_index(AXIS) == 6
        return {**sums, "all": jnp.where(faulty, sums["all"] - 1, sums["all"])}

    assert OPERATIONS[5].name == "sum"
    few = (OPERATIONS[0], OPERATIONS[5]._replace(run=run), OPERATIONS[-1])
    monkeypatch.setattr(_device_check, "OPERATIONS", few)
    monkeypatch.setattr(_devices, "check_devices", hw.check_devices)
    for jit in (True, False):
        with pytest.raises(hw.FaultyDevice) as error:
            tr.fit(step, start(), batches, steps=1, jit=jit)
        first, second = str(error.value).splitlines()[:2]
        assert first == "fit: cpu:6 (cpu) computes 1 of 3 operations wrongly:"
        assert second == (
            "  sum, float32 [331, 307]: 'all' is wrong in 1 element; the worst is off by 1, and "
            "must be exact"
        )


# Several processes.


class Store:
    """The key-value store of a run with two processes, the other of which says `other`."""

    def __init__(self, other=None, late=False):
        self.said, self.other, self.late = {}, other, late

    def key_value_set(self, key, text):
        self.said[key] = text

    def wait_at_barrier(self, name, milliseconds):
        if self.late:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {name} timed out\nmore")
        if self.other is not None:
            self.said[f"{name}/1"] = self.other

    def key_value_dir_get(self, folder):
        return [item for item in self.said.items() if item[0].startswith(folder)]


@pytest.fixture
def two(machine, monkeypatch):
    def store(*arguments, **options):
        made = Store(*arguments, **options)
        monkeypatch.setattr(_devices._jax.processes, "notes", lambda: made)
        return made

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return store


def test_a_process_stops_for_the_fault_of_another(machine, two):
    two("gpu:0 (A) computes 1 of 20 operations wrongly: ...")
    with pytest.raises(hw.FaultyDevice) as error:
        _devices.check(start(), None, print)
    assert str(error.value) == "fit: process 1: gpu:0 (A) computes 1 of 20 operations wrongly: ..."


def test_a_process_tells_its_own_fault(machine, two):
    machine.status = "wrong"
    store = two()
    with pytest.raises(hw.FaultyDevice, match=r"^fit: process 0: cpu:1 \(cpu\) computes 1 of 1 op"):
        _devices.check(start(), None, print)
    assert len(store.said) == 1


def test_processes_that_have_nothing_to_check_wait_for_those_that_have(machine, two, monkeypatch):
    monkeypatch.setenv("FNET_PROBE", "0")
    two("wrong")
    with pytest.raises(hw.FaultyDevice, match="process 1: wrong"):
        _devices.check(start(), None, print)
    two()
    assert _devices.check(start(), None, print) is None and machine.checks == []


def test_a_process_that_does_not_come(machine, two):
    two(late=True)
    with pytest.raises(tr.PeerLost) as error:
        _devices.check(start(), None, print)
    assert (
        "process 0 of 2 has checked its devices, and another process has not within 300 s (DEA"
        in (str(error.value))
    )


def test_an_error_of_the_check_itself_is_told_to_the_others(machine, two, monkeypatch):
    def check_devices(devices):
        raise MemoryError("full")

    monkeypatch.setattr(_devices, "check_devices", check_devices)
    store = two()
    with pytest.raises(MemoryError):
        _devices.check(start(), None, print)
    assert list(store.said.values()) == ["could not check its devices: MemoryError: full"]


@pytest.mark.exhaustive
def test_two_processes_agree(tmp_path):
    script = pathlib.Path(__file__).with_name("checking.py")
    first, second = processes(script, 2, str(tmp_path))
    assert first["right"] == second["right"] == 2
    assert first["wrong"] == second["wrong"]
    assert first["wrong"].startswith("fit: process 1: cpu:")
    assert "'all' is wrong in 1 element; the worst is off by 1, and must be exact" in first["wrong"]
