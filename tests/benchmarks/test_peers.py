"""benchmarks.peers: peers agree before they are timed, and whatever stops a table says so in one
sentence."""

import collections
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks is no installed package

from benchmarks._live import Live, PeerError, turns  # noqa: E402
from benchmarks.peers import _compare, _fnet, _handwritten  # noqa: E402
from benchmarks.peers import _workloads as spec  # noqa: E402
from benchmarks.peers.__main__ import main  # noqa: E402
from benchmarks.peers._compare import agree  # noqa: E402
from benchmarks.rules import verdict  # noqa: E402

SERVE = "from benchmarks._live import serve; import os, time; serve({%s})"


def peers(*arguments, code=0):
    drop = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in drop},
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def live(answers, name="peer"):
    return Live(name, [sys.executable, "-c", SERVE % answers])


@pytest.mark.exhaustive
def test_a_table_of_two_peers():
    out = peers(
        "mlp",
        "--size=small",
        "--peers=fnet,jax-tuned",
        "--rounds=2",
        "--budget=0.01",
        "--allocator=tuned",
    )
    assert "`python -m benchmarks.peers mlp --size=small" in out
    assert (
        "**mlp**, train, float32, small size, allocator: tuned, on cpu; losses agree to 0.0001"
        in out
    )
    rows = [
        line.split(" | ")
        for line in out.splitlines()
        if line.startswith(("| peer", "| fnet", "| jax-tuned"))
    ]
    assert rows[0][4:] == ["ratio to fnet", "first step s", "peak MB", "examples/s |"]
    assert [row[0] for row in rows[1:]] == ["| fnet", "| jax-tuned"]
    median, low, high = map(float, rows[1][1:4])
    assert 0 < low <= median <= high and rows[1][4] == "1.00"
    assert int(rows[1][6]) > 50 and int(rows[1][7].strip(" |").replace(",", "")) > 0


@pytest.mark.exhaustive
def test_inference_in_mixed_precision():
    out = peers(
        "mlp",
        "--size=small",
        "--peers=jax",
        "--mode=infer",
        "--dtype=mixed",
        "--rounds=1",
        "--budget=0.01",
    )
    assert (
        "**mlp**, infer, mixed, small size, allocator: default, on cpu; losses agree to 0.03" in out
    )


def test_huge_pages_are_asked_for_where_the_process_starts(monkeypatch):
    seen = []
    monkeypatch.setattr(
        _compare, "Live", lambda name, command, environment: seen.append(environment)
    )
    for allocator in "default", "huge":
        options = _compare.parser().parse_args(["mlp", f"--allocator={allocator}"])
        _compare._live("fnet", {"peer": "fnet"}, "mlp", "train", "float32", options)
    assert [each.get("GLIBC_TUNABLES") for each in seen] == [None, "glibc.malloc.hugetlb=1"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_peer_that_is_not_installed():
    sentence = "torch needs torch, which is not installed: pip install -e '.[bench]'"
    assert (
        peers("mlp", "--size=small", "--peers=torch", code=1).strip()
        == f"benchmarks.peers: {sentence}"
    )


@pytest.mark.exhaustive
def test_what_is_meant_for_accelerators():
    said = peers("gpt2-124m", "--peers=fnet", code=1)
    assert said.strip() == (
        "benchmarks.peers: gpt2-124m needs an accelerator, and fnet finds none here; a step "
        "would take minutes; --force runs it nevertheless"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mlp", "--peers=fnet,tensorflow"], "no 'tensorflow' among fnet, fnet-tuned, jax"),
        (["mlp", "--dtype=bf16"], "no 'bf16' among float32, mixed"),
        (["alexnet"], "invalid choice: 'alexnet'"),
    ],
)
def test_unknown_names(arguments, sentence, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert sentence in capsys.readouterr().err


def test_losses_that_disagree():
    agree("linen", [2.0, 1.0], "fnet", [2.0001, 1.0], 1e-4)
    for wrong in 1.0003, float("nan"):
        with pytest.raises(
            PeerError,
            match=re.escape(
                f"linen does not compute what fnet does: its loss 1 is {wrong:.6g}, fnet's is 1 "
                "(relative 0.0001 allowed); no times were taken"
            ),
        ):
            agree("linen", [2.0, wrong], "fnet", [2.0, 1.0], 1e-4)


def test_turns_go_round():
    now = "'time': lambda budget: (print('noise'), time.time())[1]"
    with live(now, "a") as a, live(now, "b") as b:
        figures = turns([a, b], rounds=3, budget=0, limit=60)
    order = sorted((at, name) for name, times in figures.items() for at in times)
    assert "".join(name for _, name in order) == "ababab"
    with live(
        "'time': lambda budget, count=__import__('itertools').count(): next(count)", "a"
    ) as a:
        assert turns([a], rounds=2, budget=0, untimed=3, limit=60) == {"a": [3, 4]}


def test_a_peer_that_fails_dies_or_sleeps():
    with live("'fail': lambda: 1 / 0, 'sleep': lambda: time.sleep(60)") as peer:
        with pytest.raises(
            PeerError, match=r"^peer failed at 'fail': ZeroDivisionError: division by zero$"
        ):
            peer.ask("fail", limit=60)
        with pytest.raises(
            PeerError, match=r"^peer gave no answer to 'sleep' within 0.2 s and was stopped$"
        ):
            peer.ask("sleep", limit=0.2)
        with pytest.raises(PeerError, match=r"^peer was killed by signal 9 at 'fail'"):
            peer.ask("fail", limit=60)
    with live("'die': lambda: (os.write(2, b'out of memory'), os._exit(3))") as peer:
        with pytest.raises(PeerError, match=r"^peer ended with code 3 at 'die': out of memory$"):
            peer.ask("die", limit=60)


@pytest.mark.parametrize("name", spec.WORKLOADS)
def test_weights_and_batches_are_the_same_everywhere(name):
    small = spec.workload(name, "small")
    first, second = spec.weights(small), spec.weights(small)
    assert all(np.array_equal(first[path], second[path]) for path in first) and len(first) == len(
        second
    )
    assert all(array.dtype == np.float32 and np.unique(array).size > 1 for array in first.values())
    (x, y), (x2, _) = spec.batches(small)[0], spec.batches(small)[1]
    assert not np.array_equal(x, x2) and y.min() >= 0 and type(small) is type(spec.workload(name))


def test_cross_entropy_by_hand():
    assert spec.cross_entropy([[0.0, np.log(3.0)]], [1]) == pytest.approx(np.log(4 / 3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18"])
def test_fnet_compiles_to_what_one_writes_by_hand(name):
    small = spec.workload(name, "small")
    counts = []
    for module in _fnet, _handwritten:
        run = module.build(
            small, spec.weights(small), spec.batches(small, 1), train=True, mixed=False
        )
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):  # Optax needs both
            program = run.f.lower(run.state, *run.batches[0]).compile().as_text()
        counts.append(collections.Counter(re.findall(r" ([a-z][\w-]*)\(", program)))
    assert counts[0]["fusion"] > 10
    if name == "resnet18":  # fnet's BatchNorm computes its statistics in one pass
        counts = [
            {kind: count[kind] for kind in ("convolution", "dot", "custom-call")}
            for count in counts
        ]
    assert counts[0] == counts[1]


def test_what_is_said_of_a_rule():
    off = [1.0] * 10
    assert verdict([0.9] * 9 + [1.5], off) == "pays: 0.90 of the time"
    assert verdict([1.2] * 10, off) == "costs: 1.20 of the time"
    assert verdict([0.9] * 3, off[:3]) == "pays: 0.90 of the time"
    for even in [0.99] * 10, [0.9] * 8 + [1.5] * 2, [0.96] * 3:
        assert verdict(even, off[: len(even)]).startswith("makes no difference that shows: ")
