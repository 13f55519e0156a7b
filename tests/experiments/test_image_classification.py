"""The experiment as a user runs it: trains, resumes, finds itself finished, starts over, complains."""

import gzip
import json
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "experiments" / "image_classification.py")]
LAST_LINE = re.compile(r"test accuracy 0\.\d{4}")


def environment():
    """A user's: without the test suite's eight devices and strictness."""
    drop = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    kept = {k: v for k, v in os.environ.items() if k not in drop}
    return kept | {"XLA_FLAGS": os.environ["FNET_TEST_XLA_FLAGS"]}


def run(*flags, code=0, cwd=ROOT):
    done = subprocess.run(
        [*SCRIPT, *flags], capture_output=True, text=True, env=environment(), cwd=cwd, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def interrupted(flags, log):
    """Starts a run, waits until it has logged twice, and presses Ctrl-C: where it stopped."""
    process = subprocess.Popen(
        [*SCRIPT, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert err.count("\n") == 1 and "Traceback" not in err
    return int(re.search(r"SIGINT: stopped at step (\d+) of 800 and saved it", err).group(1))


@pytest.mark.exhaustive
def test_interrupted_resumed_finished_refused_restarted(tmp_path):
    """One run in its life."""
    flags = [f"--workdir={tmp_path}", "--steps=800", "--model=mlp", "--batch_size=8", "--nolast20"]
    at = interrupted(flags, tmp_path / "metrics.jsonl")
    out = run(*flags).stdout
    assert f"resumed at step {at} " in out
    assert LAST_LINE.fullmatch(out.splitlines()[-1])
    for words in ("chip: ", "policy: parameters", "parameters, 800 steps", "steps/s", "MFU", "ETA"):
        assert words in out
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 800
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert sorted(set(steps)) == list(range(40, 801, 40))

    again = run(*flags).stdout
    assert "resumed at step 800" in again and "compiled" not in again
    assert again.splitlines()[-1] == out.splitlines()[-1]

    refused = run(*flags, "--seed=1", code=2).stderr
    assert refused.strip().endswith("or restart") and "(seed was 0, is 1)" in refused

    small = [f"--workdir={tmp_path}", "--steps=10", "--width=4", "--batch_size=8", "--restart"]
    anew = run(*small).stdout  # the CNN, on both splits
    assert "resumed at" not in anew
    assert re.fullmatch(r"accuracy on the last 20 % of the file 0\.\d{4}", anew.splitlines()[-2])
    assert LAST_LINE.fullmatch(anew.splitlines()[-1])
    for folder in (tmp_path, tmp_path / "last20"):
        assert list((folder / "tensorboard").iterdir())
        for name in ("curves.png", "confusion.png"):
            assert (folder / name).read_bytes().startswith(b"\x89PNG")


def idx(path, array_type, shape, data):
    header = struct.pack(">HBB", 0, array_type, len(shape)) + struct.pack(f">{len(shape)}I", *shape)
    with gzip.open(path, "wb") as file:
        file.write(header + data)


def bad_shape(folder):
    """MNIST files in which the images are flat."""
    folder = folder / "mnist"
    folder.mkdir()
    for part, n in (("train", 4), ("t10k", 2)):
        idx(folder / f"{part}-images-idx3-ubyte.gz", 8, (n, 784), bytes(n * 784))
        idx(folder / f"{part}-labels-idx1-ubyte.gz", 8, (n,), bytes(n))


@pytest.mark.exhaustive
def test_errors_are_one_line_and_exit_2(tmp_path):
    bad_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"step": 3}')
    (tmp_path / "file").write_text("")
    data = f"--data_dir={tmp_path}"
    cases = {
        ("--dataset=minst",): "--dataset=minst: use digits, mnist",
        ("--dataset=mnist", data): r"train-images-idx3-ubyte.gz.*\(4, 784\)",
        ("--model=vit",): "--model=vit: use cnn, mlp",
        (f"--config={tmp_path}/config.json",): "has no field 'step': did you mean 'steps'",
        ("--batchsize=3",): r"Unknown command line flag 'batchsize'.*--help",
        ("--workdir=" + str(tmp_path / "file"),): "file",
    }
    started = [
        (
            subprocess.Popen(
                [*SCRIPT, f"--workdir={tmp_path}/run", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
                cwd=ROOT,
            ),
            text,
        )
        for flags, text in cases.items()
    ]
    for process, text in started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert re.search(text, err), err


def test_a_missing_file_without_a_network(tmp_path):
    blocked = environment() | {
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [*SCRIPT, "--dataset=mnist", f"--data_dir={tmp_path}", f"--workdir={tmp_path}/run"],
        capture_output=True,
        text=True,
        env=blocked,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "train-images-idx3-ubyte.gz" in done.stderr and "into" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapper", ["lookahead", "sam"])
def test_wrappers_around_the_optimizer(tmp_path, wrapper):
    flags = [
        f"--workdir={tmp_path}",
        "--model=mlp",
        "--batch_size=64",
        "--nolast20",
        f"--wrapper={wrapper}",
        "--optimizer=momentum",
        "--precision=float32",
    ]
    run(*flags, "--steps=60")
    done = run(*flags, "--steps=120")  # resumes with the state of the wrapper
    assert "resumed at step 60" in done.stdout
    assert float(re.search(r"test accuracy (\S+)$", done.stdout.strip())[1]) > 0.9
    if wrapper == "sam":
        wrong = run(*flags[:-1], "--steps=120", "--precision=float16", "--restart", code=2)
        assert "--wrapper=sam: its second gradient has no loss scale" in wrong.stderr
