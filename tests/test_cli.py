"""The `fnet` command as a person meets it: its output, its errors, its exit codes."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet.cli import main
from fnet.hardware import chips


def run(capsys, *argv):
    code = main(argv)
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert all(line == line.rstrip() for line in lines)
    return code, captured.out, captured.err


def words(text):
    """The text without its line breaks and column gaps."""
    return " ".join(text.split())


def test_devices(capsys):
    code, out, err = run(capsys, "devices")
    assert code == 0 and not err and "\x1b" not in out
    assert "policy, train" in out and "compute float32" in out and "not measured" in words(out)
    assert "JAX devices" in out and "default backend cpu" in out
    assert max(map(len, out.splitlines())) <= 100


def test_devices_with_other_dtypes_for_convolutions(capsys, monkeypatch):
    from fnet import hardware as hw

    policy = hw.Policy(
        compute="bfloat16",
        convolution="float32",
        residual="bfloat16",
        loss_scale=2.0**15,
        reason="so",
    )
    monkeypatch.setattr(hw, "policy", lambda device, mode: policy)
    shown = words(run(capsys, "devices")[1])
    assert (
        "policy, train parameters float32, compute bfloat16 (convolutions float32), residual "
        "stream bfloat16, sums float32, output float32, dynamic loss scaling from 32768 because so"
    ) in shown
    assert str(policy).replace(": so", " because so") in shown


def test_devices_measured(capsys, monkeypatch):
    import dataclasses

    from fnet import hardware as hw

    measured = dataclasses.replace(
        hw.detect(),
        known=True,
        peaks=hw.FrozenTable(fp32=1.25e11),
        bandwidth=2e10,
        bases=hw.FrozenTable(fp32="measured", bandwidth="measured"),
    )
    monkeypatch.setattr(hw, "measure", lambda device: measured)
    out = run(capsys, "devices", "--measure")[1]
    assert "125 GFLOP/s (measured)" in out and "20 GB/s (measured)" in out


@pytest.mark.parametrize("fault", [None, "wrong", "failed"])
def test_devices_checked(capsys, monkeypatch, tmp_path, fault):
    import jax

    from fnet.hardware import _device_check
    from fnet.hardware._operations import OPERATIONS

    monkeypatch.setenv("FNET_CACHE", str(tmp_path))
    monkeypatch.setattr(_device_check, "_known", set())
    one_by_one = OPERATIONS[-1]

    def run_wrong(devices, x):
        if fault == "failed":
            raise RuntimeError("INTERNAL: an illegal address")
        outputs = dict(one_by_one.run(devices, x))
        return outputs | ({"ones(4) + 1": outputs["ones(4) + 1"] + 511} if fault else {})

    few = (OPERATIONS[0], one_by_one._replace(run=run_wrong))
    monkeypatch.setattr(_device_check, "OPERATIONS", few)
    code, out, err = run(capsys, "devices", "--check")
    lines = out.splitlines()
    assert code == (fault is not None) and _device_check.remembered(jax.devices()) == (not fault)
    assert lines[0].split() == ["operation", "dtype", "shape", "error", "bound", "result"]
    assert lines[1].startswith("matmul ") and lines[1].endswith("  right")
    assert lines[2].startswith("one by one ") and lines[2].endswith(f"  {fault or 'right'}")
    assert lines[3].startswith("2 operations on 8 x cpu in ") and max(map(len, lines)) <= 100
    if fault is None:
        assert err == ""
    elif fault == "failed":
        said = "one by one, float32 [1003]: failed (INTERNAL: an illegal address)"
        assert err.splitlines() == [f"fnet devices: cpu:{i}: {said}" for i in range(8)]
    else:
        said = "'ones(4) + 1' is wrong in 4 elements; the worst is off by 511, and must be exact"
        assert err.startswith("fnet devices: cpu:0 (cpu) computes 1 of 2 operations wrongly:\n")
        assert err.count(said) == 8 and err.endswith("pass fit(..., check_devices=False).\n")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Unable to initialize backend 'tpu': gone\nmore"),
            "Unable to initialize backend 'tpu': gone",
        ),
        (AssertionError(), "no backend of JAX_PLATFORMS='cuda' starts"),
    ],
)
def test_no_device_is_one_sentence_and_exit_2(capsys, monkeypatch, error, why):
    def devices():
        raise error

    monkeypatch.setattr("jax.local_devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert run(capsys, "devices") == (2, "", f"fnet devices: JAX finds no device: {why}\n")


def test_a_backend_that_does_not_start_has_one_message_everywhere(capsys, monkeypatch):
    def fail(args):
        raise RuntimeError("Unable to initialize backend 'cuda': gone\nmore")

    monkeypatch.setattr("fnet.cli._plan.run", fail)
    assert run(capsys, "plan", "a:b") == (
        2,
        "",
        "fnet plan: JAX finds no device: Unable to initialize backend 'cuda': gone\n",
    )


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    ("shell", "code", "text"),
    [
        ("{} chips | head -n 1 >/dev/null; exit ${{PIPESTATUS[0]}}", 0, ""),
        pytest.param(
            "{} chips | true; exit ${{PIPESTATUS[0]}}", 0, "", marks=pytest.mark.exhaustive
        ),
        pytest.param("{} chips >&-", 0, "", marks=pytest.mark.exhaustive),
        pytest.param("{} chips >&- 2>&-", 0, "", marks=pytest.mark.exhaustive),
        (
            "{} chips >/dev/full",
            2,
            "fnet chips: [Errno 28] No space left on device (use fnet --debug chips for a "
            "traceback)\n",
        ),
    ],
)
def test_a_reader_that_leaves(shell, code, text):
    done = subprocess.run(
        ["bash", "-c", shell.format(f"{sys.executable} -W ignore -m fnet.cli")],
        text=True,
        stderr=subprocess.PIPE,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (code, text)


def test_without_a_home_nothing_is_written_here(tmp_path, monkeypatch):
    from fnet.hardware import _probe

    monkeypatch.chdir(tmp_path)
    for name in ("FNET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "os.path.expanduser", lambda path: path
    )  # as where the user has no entry in /etc/passwd
    _probe._write(_probe._path(), "a", _probe.Probe(1.0, 1.0, "wall", "0", "2026-01-01"))
    assert _probe._read(_probe._path()) == {} and not list(tmp_path.iterdir())


def test_the_catalog(capsys):
    code, out, _ = run(capsys, "chips")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    row = next(line for line in out.splitlines() if line.startswith("H100 SXM5 80GB"))
    assert words(row) == "H100 SXM5 80GB 2022 66.9 989.4 989.4 1979 1979 80 3352 700"
    assert "DGX-1 (V100)  8 x V100 SXM2 16GB  fp16    1,000      960" in out
    assert "~ computed from units and clock, ? unverified" in out


def test_one_chip(capsys):
    code, out, _ = run(capsys, "chips", "Titan", "RTX")
    assert code == 0
    for part in (
        "130.5 TFLOP/s (published)",
        "72 SM x 8 tensor cores x 128 x 1.77 GHz = 130.5 TFLOP/s",
        "$2,499 / chip",
        "2018-12",
        "280 W (NVIDIA Titan RTX specifications)",
        "4.94e+18 FLOP per dollar at the fp16 peak",
        "NVIDIA Turing whitepaper",
    ):
        assert part in words(out), part


def test_a_disagreement_is_explained(capsys):
    out = words(run(capsys, "chips", "Ryzen 3950X")[1])
    assert (
        "16 cores x 32 x 3.5 GHz = 1.792 TFLOP/s" in out
        and "16 cores x 32 x 4.7 GHz = 2.406 TFLOP/s" in out
    )
    assert "published 4.8 TFLOP/s (+99.5%)" in out and "twice too high" in out


def test_a_system(capsys):
    out = words(run(capsys, "chips", "TPU v3-8")[1])
    assert "4 x TPU v3" in out and "the launch figure is 105 per chip" in out and "$8 / hour" in out
    assert "= 492.8 TFLOP/s published 420 TFLOP/s (-14.8%)" in out


def test_a_slice(capsys):
    code, out, _ = run(capsys, "chips", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert code == 0 and "16 of 132 multiprocessors" in words(out) and "(estimated)" in out


def test_every_chip_prints(capsys):
    assert len(chips) > 80
    for name in chips:
        code, out, err = run(capsys, "chips", name)
        assert code == 0 and out.startswith(name) and "sources" in out and not err, name


def test_an_unknown_name_is_one_sentence_and_exit_2(capsys):
    code, out, err = run(capsys, "chips", "GTX", "1080")
    assert code == 2 and not out
    assert err == (
        "fnet chips: the catalog has no chip 'GTX 1080'; the most similar names are 'GTX 1080 Ti', "
        "'RTX 3080 10GB', 'RTX 2080 Ti'\n"
    )
    assert run(capsys, "chips", "DGX-2")[2].endswith(
        "; the most similar system is 'DGX-1 (V100)'\n"
    )


def test_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert (
        "devices" in out
        and "chips" in out
        and "the policy with its reason" in " ".join(out.split())
    )
    with pytest.raises(SystemExit) as stop:
        main(["chip"])
    assert stop.value.code == 2 and "invalid choice: 'chip'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_fresh_process():
    command = [sys.executable, "-m", "fnet.cli", "chips", "TPU v9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(
        "fnet chips: the catalog has no chip 'TPU v9'"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["chip"], "fnet: argument <command>: invalid choice: 'chip' (choose from"),
        (
            ["devices", "--check", "--measure"],
            "fnet devices: argument --measure: not allowed with argument --check (see fnet devices "
            "--help)",
        ),
        (["devices", "--fast"], "fnet: unrecognized arguments: --fast (see fnet --help)"),
        (["chips", "--x", "TPU"], "fnet: unrecognized arguments: --x"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys, argv, text):
    with pytest.raises(SystemExit) as end:
        main(argv)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(text) and err.count("\n") == 1, err


def test_what_goes_wrong_is_one_line_unless_debug_is_asked_for(capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("the first line\nand more")

    monkeypatch.setattr("fnet.cli._chips._catalog", broken)
    assert run(capsys, "chips") == (
        1,
        "",
        "fnet chips: the first line (use fnet --debug chips for a traceback)\n",
    )
    with pytest.raises(RuntimeError, match="and more"):
        main(["--debug", "chips"])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(max_size=8) | st.sampled_from(["chips", "--measure", "--debug", "H100", "TPU v3"]),
        max_size=4,
    )
)
def test_random_words_never_give_a_traceback(argv):
    if "devices" in argv or "--debug" in argv:
        return
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            code = main(argv)
        except SystemExit as end:  # argparse's
            code = end.code
    assert code in (0, 2) and err.getvalue().count("\n") == (code == 2), (argv, err.getvalue())


PLANNED = """
import jax, jax.numpy as jnp

def small():
    init = lambda key: {"params": {"w": jnp.zeros((64, 64))}}
    def step(state, batch):
        value, grads = jax.value_and_grad(lambda p: jnp.square(batch @ p["w"]).mean())(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value
    return step, init, jax.ShapeDtypeStruct((64, 64), jnp.float32)

def wrong():
    return 1

broken = 3
"""


def test_plan(capsys, tmp_path, monkeypatch):
    (tmp_path / "planned.py").write_text(PLANNED)
    code, out, err = run(
        capsys, "plan", f"{tmp_path}/planned.py:small", "--devices", "h100:4x8", "--estimate"
    )
    assert (
        code == 0
        and not err
        and out.startswith("32 x H100 SXM5 80GB in 4 machines, 80.0 GiB each: ")
    )
    assert "This is an estimate: " in out and "mesh: slice 4 x data 8" in out
    monkeypatch.chdir(tmp_path)
    code, out, err = run(
        capsys,
        "plan",
        "planned:small",
        "--mesh",
        "data=-1,tensor=2",
        "--rule",
        "w=none,tensor",
        "--strategy",
        "fsdp",
        "--estimate",
    )
    assert code == 0 and not err and "mesh: data 4 x tensor 2" in out


def test_a_plan_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "planned.py").write_text(PLANNED)
    picture = tmp_path / "plan.svg"
    plan = ("plan", f"{tmp_path}/planned.py:small", "--devices", "v5e:2x2", "--estimate")
    code, out, err = run(capsys, *plan, "--plot", str(picture))
    assert code == 0 and not err and out.endswith(f"{picture}\n") and "<svg" in picture.read_text()


def test_a_long_plan_says_what_it_does(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("fnet._util._heartbeat.EVERY", 0.01)
    (tmp_path / "planned.py").write_text(PLANNED)
    code, out, err = run(capsys, "plan", f"{tmp_path}/planned.py:small")
    assert code == 0 and "chosen" in out and "so far" not in out
    assert re.search(r"^fnet plan: compiling (\S+) \(1 of 2\), 0 s so far$", err, re.MULTILINE)


def test_the_example_in_the_help_of_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    _, _, text = capsys.readouterr().out.partition("a file train.py,\n")
    code, _, commands = text.partition("and the commands\n")
    (tmp_path / "train.py").write_text(textwrap.dedent(code))
    lines = [line.strip() for line in commands.splitlines() if line.startswith("    fnet ")]
    assert len(lines) == 2
    for line in lines:
        code, out, err = run(capsys, *shlex.split(line)[1:])
        assert (code, err) == (0, "") and " chosen: " in out
    assert "mesh: slice 2 x data 2 x tensor 4" in out


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_libtpu_prints_nothing(tmp_path):
    (tmp_path / "planned.py").write_text(PLANNED)
    done = subprocess.run(
        [sys.executable, "-m", "fnet.cli", "plan", "planned.py:small", "--devices", "v5e:2x2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "" and "compiled" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere:small"], "there is no module nowhere, also not in this folder"),
        (["nowhere.py:small"], "there is no file nowhere.py"),
        (["small"], "'small': expected module:function or file.py:function"),
        (["small:"], "'small:': expected module:function or file.py:function"),
        (["planned.py:absent"], "planned.py has no function 'absent'"),
        (["planned.py:broken"], "planned.py has no function 'broken'"),
        (["planned.py:wrong"], "planned.py:wrong must return (step, init, batch); it returned int"),
        (
            ["planned.py:small", "--mesh", "data"],
            "--mesh=data: expected axes and their lengths, such as data=-1,tensor=4",
        ),
        (
            ["planned.py:small", "--rule", "w"],
            "--rule=w: expected a pattern, = and a mesh axis or None",
        ),
        (["planned.py:small", "--devices", "v9:1"], "unknown chip 'v9'"),
    ],
)
def test_plan_errors(capsys, tmp_path, monkeypatch, argv, message):
    (tmp_path / "planned.py").write_text(PLANNED)
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "plan", *argv)
    assert (code, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_compare(capsys, tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp

        def make():
            def step(w, x):
                return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), {}

            return step, lambda key: jnp.zeros((8, 4)), jax.ShapeDtypeStruct((16, 8), jnp.float32)
        """)
    )
    code, out, err = run(
        capsys, "compare", f"{tmp_path}/own.py:make", "--chips", "Titan RTX, TPU v2-8"
    )
    assert code == 0 and not err and re.search(r"FLOPs of a step +exact +\S+ k?F", out)
    assert "energy per 1,000 steps" in out and "TPU v2-8: price of 2026" in out
    out = run(
        capsys, "compare", "resnet18", "--batch=2", "--chips=i7-7700K", "--precision=float32"
    )[1]
    assert "energy per epoch" in out and "images per second" in out and "91 W" not in out


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("resnet51 --chips T4", "'resnet51' is not a known model: expected one such as resnet50, "),
        ("minilm-l6 --chips T4", "'minilm-l6' is not a known model"),
        ("resnet50 --chips T5", "compare: devices must be 'local',"),
        ("resnet50 --chips ,", "compare: expected at least one name of a chip"),
        ("resnet50 --chips T4 --batch 0", "--batch=0: expected a number >= 1"),
        (
            "own.py:make --chips T4 --batch 8",
            "--batch=8: the batch of own.py:make is what the function returns",
        ),
        (
            "resnet50 --chips V100",
            "'V100 SXM2 16GB', 'V100 PCIe 16GB', 'V100 SXM2 32GB', 'V100 PCIe 32GB'; choose one",
        ),
    ],
)
def test_compare_errors_are_one_line(capsys, line, text):
    code, out, err = run(capsys, "compare", *shlex.split(line))
    assert code == 2 and not out and text in err and err.count("\n") == 1


def test_plot_of_chips(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(capsys, "chips", "--plot", str(tmp_path / "years.svg")) == (
        0,
        f"{tmp_path}/years.svg\n",
        "",
    )
    assert "FLOP per dollar" in (tmp_path / "years.svg").read_text()
    assert run(capsys, "chips", "--plot", str(tmp_path / "no" / "years.png"))[0] == 2


STEP = """
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

@dataclasses.dataclass
class Options:  # needs the file's module, where annotations are text
    rate: float = 0.1

def init(key):
    return {"params": {"kernel": jax.random.normal(key, (5, 3))}}

def step(state, batch):
    def loss(params):
        with jax.named_scope("head"):
            return jnp.square(batch @ params["kernel"] + 1e-5).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - Options().rate * g, state["params"], grads)}, value

def make():
    return step, init, jax.ShapeDtypeStruct((4, 5), jnp.float32)

def broken():
    def wrong(state, batch):
        raise TypeError("not today")

    return wrong, init, jax.ShapeDtypeStruct((4, 5), jnp.float32)
"""


def test_lock_and_diff(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    code, out, _ = run(capsys, "lock", "step.py:make")
    assert code == 0 and out.startswith("step.lock: step: ") and " in 2 layers" in out
    assert run(capsys, "diff", "step.lock")[:2] == (0, "nothing changed\n")

    # The same size and the same second: Python's cached bytecode would be the old program.
    written = (tmp_path / "step.py").stat()
    (tmp_path / "step.py").write_text(STEP.replace("1e-5", "1e-6"))
    os.utime(tmp_path / "step.py", ns=(written.st_atime_ns, written.st_mtime_ns))
    code, out, _ = run(capsys, "diff", "step.lock")
    assert code == 1 and out.startswith(
        "first change: head: `add f32[4,3] 1e-05 : f32[4,3]` is now"
    )
    assert run(capsys, "lock", "step.py:make", "--no-values", "-o", "new.lock")[0] == 0
    code, out, _ = run(capsys, "diff", "step.lock", "new.lock")
    assert code == 1 and "note: no values: they were not asked for" in out
    assert run(capsys, "diff", "new.lock")[:2] == (
        0,
        out.splitlines()[-1].join(["nothing changed\n", "\n"]),
    )

    assert run(capsys, "lock", "step.py:make", "--devices=v5e:2x2", "--no-values")[0] == 0
    assert "\nplan: 4 x TPU v5e, " in (tmp_path / "step.lock").read_text()
    code, out, _ = run(capsys, "diff", "new.lock", "step.lock")
    assert code == 1 and "plan: nothing, now 4 x TPU v5e" in out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["diff", "other.lock"], "No such file"),
        (
            ["diff", "step.py"],
            "step.py is no lock file: its first line must begin with 'fnet lock'",
        ),
        (["diff", "own.lock"], "was not written by `fnet lock`, so that it names no function"),
        (
            ["diff", "own.lock", "step.py:broken"],
            "step.py:broken cannot be run: TypeError: not today",
        ),
        (["lock", "step.py"], "expected module:function or file.py:function"),
    ],
)
def test_lock_errors(capsys, tmp_path, monkeypatch, argv, message):
    from fnet import introspect

    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    introspect.lock(abs, 1.0 + np.zeros(3, np.float32)).save("own.lock")
    code, out, err = run(capsys, *argv)
    assert code == 2 and not out and message in words(err), err
