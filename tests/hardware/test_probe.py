"""The probe of a CPU: the decision from injected timings, what is kept, when nothing is measured,
and one real run."""

import datetime
import json
import math
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from fnet import hardware as hw
from fnet import transforms as ft
from fnet._util import _timing
from fnet.hardware import _probe
from fnet.hardware._policy import _here

TODAY = datetime.date.today().isoformat()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an empty cache, whose probe gives `times` and counts its runs."""
    state = types.SimpleNamespace(
        times=dict(zip(NAMES, ([1.0], [0.5], [1.0], [1.0]))),
        runs=[],
        busy=False,
        file=tmp_path / "fnet" / "probe.json",
    )

    def timed(mode, clock):
        state.runs.append((mode, clock.__name__))
        return _probe.ratios(state.times)

    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "fnet"))
    monkeypatch.setenv("FNET_PROBE", "1")
    monkeypatch.setattr(_probe, "_ratios", timed)
    monkeypatch.setattr(_probe, "_busy", lambda: state.busy)
    _probe._once.cache_clear()
    yield state
    _probe._once.cache_clear()


NAMES = [("dot", "float32"), ("dot", "bfloat16"), ("conv", "float32"), ("conv", "bfloat16")]


@pytest.mark.parametrize(
    ("dot", "conv", "compute", "convolution"),
    [
        (0.52, 1.0, "bfloat16", "float32"),
        (0.8, 0.9, "bfloat16", "bfloat16"),
        (0.81, 0.5, "float32", "float32"),
        (0.52, 0.91, "bfloat16", "float32"),
        (0.1, math.inf, "bfloat16", "float32"),
        (math.inf, 0.1, "float32", "float32"),
    ],
)
def test_the_rule(dot, conv, compute, convolution):
    probe = _probe.Probe(dot, conv, "wall", "0.10.2", "2026-11-21")
    assert _probe.verdict(probe, "train")[:2] == (compute, convolution)


def test_the_reason_quotes_the_ratios_the_version_and_the_date():
    probe = _probe.Probe(0.73, 1.02, "wall", "0.10.2", "2026-11-21")
    assert _probe.verdict(probe, "train")[2] == (
        "bfloat16 took 0.73 of float32's time for a matrix product and 1.02 for a convolution, "
        "forward and backward, in the probe of 2026-11-21 with jaxlib 0.10.2; it is selected up to "
        "0.8, and for convolutions up to 0.9"
    )
    why = _probe.verdict(probe._replace(clock="processor"), "inference")[2]
    assert (
        "of float32's processor time (the machine was busy) for" in why
        and "convolution, forward, in" in why
    )


def test_ratios_are_medians_over_rounds():
    # One round in which float32 waited, one in which bfloat16 did: neither counts.
    times = dict(
        zip(
            NAMES,
            (
                [2.0, 2.0, 9.0, 2.0, 2.0],
                [1.0, 1.0, 1.0, 8.0, 1.0],
                [4.0, 4.0, 4.0],
                [4.0, 4.2, 40.0],
            ),
        )
    )
    assert _probe.ratios(times) == (0.5, 1.05)
    # A machine that slows down while it is measured.
    drift = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert _probe.ratios(dict(zip(NAMES, (drift, [0.75 * t for t in drift]) * 2))) == (0.75, 0.75)
    assert _probe.ratios({name: times[name] for name in NAMES[:3]}) == (
        0.5,
        math.inf,
    )  # no bfloat16 convolution
    assert _probe.ratios(dict(zip(NAMES, ([0.0, 2.0], [1.0, 1.0]) * 2))) == (
        0.5,
        0.5,
    )  # a clock that stood still


def test_calls_are_timed_in_turns():
    now, order = [0.0], []

    def call(name, takes):
        def run():
            order.append(name)
            now[0] += takes
            return ()

        return run

    times = _timing.timings({"a": call("a", 2.0), "b": call("b", 1.0)}, lambda: now[0])
    rounds = len(times["a"])
    assert 9 <= rounds <= 50 and times == {"a": [2.0] * rounds, "b": [1.0] * rounds}
    assert order == ["a", "b"] * rounds


def test_the_policy_of_this_machine_is_the_probes(machine):
    policy = hw.policy()
    assert (
        policy.compute == jnp.bfloat16
        and policy.param == policy.accum == policy.output == jnp.float32
    )
    assert policy.convolution == jnp.float32 and str(policy).startswith(
        "parameters float32, compute bfloat16 (convolutions float32), sums float32"
    )
    assert policy.loss_scale is None
    assert policy.reason.startswith(
        hw.detect().name
    )  # some CPUs say more of themselves in brackets
    assert ": bfloat16 took 0.50 of float32's time" in policy.reason
    assert f"in the probe of {TODAY} with jaxlib {_probe.jaxlib.__version__}" in policy.reason
    for same in ("auto", jax.local_devices()[3], jax.local_devices(), hw.detect(), [hw.detect()]):
        assert hw.policy(same) == policy
    assert machine.runs == [("train", "perf_counter")]
    served = hw.policy(mode="inference")
    assert served.compute == served.param == jnp.bfloat16 and machine.runs[1:] == [
        ("inference", "perf_counter")
    ]


def test_amx_alone_does_not_decide(machine, monkeypatch):
    from fnet.hardware import _policy

    chip = hw.detect("Intel Xeon Platinum 8480+ (Sapphire Rapids)")
    monkeypatch.setattr(_policy, "detect", lambda given: chip)
    assert hw.policy(None, probe=False).compute == jnp.float32
    assert hw.policy(None, "inference", probe=False).compute == jnp.bfloat16
    assert hw.policy(None).compute == jnp.bfloat16
    machine.times["dot", "bfloat16"] = [0.9]
    assert hw.policy(None, "inference").compute == jnp.float32  # measured, against the table


@pytest.mark.parametrize(
    "given",
    [
        "cpu",
        "Intel Core i7-7700K",
        "Strange Thing",
        "bfloat16",
        hw.chips["Ryzen 3950X"],
        hw.chips["TPU v3"],
        "TPU v4",
        ["TPU v4", "Tesla T4"],
    ],
    ids=str,
)
def test_what_is_only_spoken_of_is_not_measured(machine, given):
    hw.policy(given)
    assert not machine.runs
    if not isinstance(given, list):
        assert not _here(given)
    assert not _here(types.SimpleNamespace(platform="cpu", device_kind="cpu"))


def test_probe_false_and_the_environment_keep_the_table(machine, monkeypatch):
    assert (
        hw.policy(probe=False).compute == jnp.float32
        and "was not measured" in hw.policy(probe=False).reason
    )
    monkeypatch.setenv("FNET_PROBE", "0")
    assert hw.policy() == hw.policy(probe=False) and not machine.runs
    assert hw.policy(probe=True).compute == jnp.bfloat16 and len(machine.runs) == 1


def test_nothing_is_measured_under_tracing_but_what_is_known_counts(machine):
    seen = []

    def f(x):
        seen.append(hw.policy())
        return x

    for transform in (jax.jit, jax.vmap, jax.grad, jax.make_jaxpr):
        transform(f)(jnp.ones((2,) if transform is jax.vmap else ()))
    assert not machine.runs and {policy.compute.name for policy in seen} == {"float32"}
    assert seen[0].reason.endswith(
        "(not measured, because JAX is tracing a function; call policy before)"
    )
    known = hw.policy()
    jax.make_jaxpr(f)(1.0)
    assert seen[-1] == known and known.compute == jnp.bfloat16 and len(machine.runs) == 1


def test_nothing_is_measured_beside_another_backend_or_in_several_processes(machine, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr(jax, "default_backend", lambda: "gpu")
        assert hw.policy(jax.local_devices()[0]).reason.endswith(
            "(not measured, because JAX's default backend is gpu)"
        )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert hw.policy().reason.endswith(
        "(not measured, because all processes must select the same dtypes)"
    )
    assert not machine.runs


def test_fnet_devices_probes_and_says_so(machine, capsys):
    from fnet.cli import main

    assert main(["devices"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for passes in ("forward and backward", "forward"):
        assert f"for a convolution, {passes}, in the probe of {TODAY}" in said
    assert [mode for mode, _ in machine.runs] == ["train", "inference"]


@pytest.mark.exhaustive
def test_importing_measures_nothing(tmp_path):
    environment = {**os.environ, "FNET_PROBE": "1", "FNET_CACHE": str(tmp_path)}
    code = "import fnet.transforms; from fnet.hardware import _probe; print(_probe._once.cache_info().currsize)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n" and not list(tmp_path.iterdir())


def test_the_machine_keeps_its_measurement(machine):
    policy = hw.policy()
    _probe._once.cache_clear()  # a new process
    machine.times["dot", "bfloat16"] = [2.0]
    assert hw.policy() == policy and len(machine.runs) == 1
    ((key, entry),) = json.loads(machine.file.read_text()).items()
    assert entry == {
        "dot": 0.5,
        "conv": 1.0,
        "clock": "wall",
        "jaxlib": _probe.jaxlib.__version__,
        "date": TODAY,
    }
    assert f"{hw.detect().units['cores']:g} cores" in key and key.endswith(", probe 2, train")
    assert os.listdir(machine.file.parent) == ["probe.json"]
    hw.policy(mode="inference")
    assert len(json.loads(machine.file.read_text())) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(_probe.jaxlib, "__version__", "9.9"),
        lambda patch: patch.setattr(_probe, "_VERSION", 99),
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_another=true"),
        lambda patch: patch.setattr(
            _probe, "read_cpu", lambda: types.SimpleNamespace(model="X", cores=2, flags=())
        ),
    ],
    ids=["jaxlib", "probe", "XLA_FLAGS", "CPU"],
)
def test_another_machine_or_version_measures_again(machine, monkeypatch, change):
    hw.policy()
    change(monkeypatch)
    hw.policy()
    assert len(machine.runs) == 2 and len(json.loads(machine.file.read_text())) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{",
        "\0",
        "null",
        '{"KEY": 3}',
        '{"KEY": {"dot": 0.5}}',
        '{"KEY": {"dot": "a", "conv": 1.0, "clock": "wall", "jaxlib": "", "date": ""}}',
        '{"KEY": {"dot": NaN, "conv": 1.0, "clock": "wall", "jaxlib": "", "date": ""}}',
        '{"KEY": {"dot": 0.5, "conv": 1.0, "clock": "sun", "jaxlib": "", "date": ""}}',
    ],
)
def test_a_file_that_cannot_be_understood_is_written_anew(machine, text):
    hw.policy()
    (key,) = json.loads(machine.file.read_text())
    machine.file.write_text(text.replace("KEY", key))
    _probe._once.cache_clear()
    assert hw.policy().compute == jnp.bfloat16 and len(machine.runs) == 2
    assert list(json.loads(machine.file.read_text())) == [key]


def test_a_cache_that_cannot_be_written_is_no_error(machine, monkeypatch):
    machine.file.parent.parent.joinpath("file").write_text("")
    monkeypatch.setenv("FNET_CACHE", str(machine.file.parent.parent / "file"))  # not a folder
    assert hw.policy() == hw.policy() and hw.policy().compute == jnp.bfloat16
    assert len(machine.runs) == 1  # kept in this process


def test_a_busy_machine_is_measured_by_processor_time_for_the_day(machine):
    machine.busy = True
    assert "processor time (the machine was busy)" in hw.policy().reason
    assert machine.runs == [("train", "process_time")]
    _probe._once.cache_clear()
    hw.policy()
    assert len(machine.runs) == 1
    machine.file.write_text(machine.file.read_text().replace(TODAY, "2020-01-01"))
    _probe._once.cache_clear()
    machine.busy = False
    assert "processor" not in hw.policy().reason and len(machine.runs) == 2


def test_busy_is_half_a_load_per_cpu(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for load, busy in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 9.0, 9.0), raising=False)
        assert _probe._busy() is busy
    monkeypatch.delattr(os, "getloadavg")
    assert _probe._busy() is False


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("FNET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _probe._path() == tmp_path / ".cache" / "fnet" / "probe.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert _probe._path() == tmp_path / "x" / "fnet" / "probe.json"
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "y"))
    assert _probe._path() == tmp_path / "y" / "probe.json"


@pytest.mark.parametrize("operation", [_probe._dot, _probe._conv])
def test_what_is_measured_is_what_autocast_emits(operation):
    """The same products, with the same types of operands and sums, forward and backward."""
    shape, kernel = ((4, 4), (4, 4)) if operation is _probe._dot else ((2, 4, 4, 3), (3, 3, 3, 3))

    def products(f, *args):
        text = jax.jit(f).lower(*args).as_text()
        found = re.findall(r"stablehlo\.(dot_general|convolution).*?: (\(.*)", text)
        return sorted(
            (name, re.sub(r"tensor<([^>]*x)?(\w+)>", r"\2", types)) for name, types in found
        )

    def forward(x, w):
        if operation is _probe._dot:
            return x @ w
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def both(x, w, g):
        y, backward = jax.vjp(forward, x, w)
        return y, backward(g)

    wide = [jax.ShapeDtypeStruct(s, "float32") for s in (shape, kernel, shape)]
    low = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in ((shape, "bfloat16"), (kernel, "float32"), (shape, "bfloat16"))
    ]
    emitted = products(ft.autocast(both, "bfloat16"), *wide)
    assert (
        len(emitted) == 3 and products(lambda *args: operation(*args, train=True), *low) == emitted
    )


def test_the_real_probe(monkeypatch, tmp_path):
    monkeypatch.setenv("FNET_CACHE", str(tmp_path))
    monkeypatch.setattr(_timing, "_SECONDS", 0.0)  # nine rounds
    _probe._once.cache_clear()
    policy = hw.policy(probe=True)
    (entry,) = json.loads((tmp_path / "probe.json").read_text()).values()
    assert 0 < entry["dot"] < 100 and 0 < entry["conv"] < 100
    assert f"bfloat16 took {entry['dot']:.2f} of float32's" in policy.reason
    assert policy.compute == ("bfloat16" if entry["dot"] <= 0.8 else "float32")
    assert policy.convolution == (policy.compute if entry["conv"] <= 0.9 else "float32")
    _probe._once.cache_clear()


def test_an_operation_that_xla_lacks_is_infinitely_slow(monkeypatch):
    monkeypatch.setattr(_probe, "_SIDE", 8)
    monkeypatch.setattr(_probe, "_IMAGES", (1, 4, 4, 2))
    monkeypatch.setattr(_probe, "_KERNEL", (3, 3, 2, 2))
    real = _probe._conv

    def broken(x, w, g, *, train):
        if x.dtype == jnp.bfloat16:
            raise NotImplementedError("UNIMPLEMENTED: bf16 convolution")
        return real(x, w, g, train=train)

    monkeypatch.setattr(_probe, "_conv", broken)
    dot, conv = _probe._ratios("inference", _probe.time.perf_counter)
    assert 0 < dot < math.inf and conv == math.inf
