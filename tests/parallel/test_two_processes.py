"""Two real processes on 127.0.0.1, once three, of four devices each: the numbers of one, and an end
in words whatever happens."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close

from fnet import training as tr

SCRIPT = pathlib.Path(__file__).with_name("processes.py")


def pair(case, port, *more, count=2, limit=60):
    """(exit code, what it printed, what it said, seconds) of each."""
    began = time.monotonic()
    command = [sys.executable, str(SCRIPT), case, str(port)]
    dropped = "XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION"
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    every = [
        subprocess.Popen(
            [*command, str(i), str(count), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(count)
    ]
    ends = []
    for process in every:
        try:
            out, err = process.communicate(timeout=max(1, limit - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        ends.append((process.returncode, out, err, time.monotonic() - began))
    assert -9 not in [code for code, *_ in ends] or case == "killed", (
        f"not ended within {limit} s",
        ends,
    )
    return ends


def plain(seen):
    """The metrics of one device on the true rows of each step."""
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    params = jax.random.normal(jax.random.key(0), (5, 64)) * 0.3
    rows = [[0, 0], [32, 32]]
    for counts in seen:
        parts = []
        for i, count in enumerate(counts):
            parts.append(x[rows[i][0] : rows[i][0] + count])
            rows[i][0] += count
        batch = np.concatenate(parts)
        value, grads = jax.value_and_grad(
            lambda w, b: jnp.square(jnp.tanh(b @ w).sum(-1) - 1).mean()
        )(params, batch)
        params = params - 0.1 * grads
        yield {"loss": value, "grads": grads, "rows": jnp.float32(len(batch))}, params


def agrees(came, counts):
    assert len(came["seen"]) == len(counts)
    wanted = list(plain(counts))
    for got, (want, _) in zip(came["seen"], wanted):
        close(jax.tree.map(jnp.float32, got, is_leaf=lambda x: isinstance(x, list)), want)
    close(jnp.float32(came["params"]), wanted[-1][1])


@pytest.mark.exhaustive
def test_uneven_rows_have_the_gradient_of_one_process(free_port):
    """8 and 5 rows, then one that has run out; both end together. The same without weights, for
    whole batches alone."""
    ends = pair("orderly", free_port)
    assert [code for code, *_ in ends] == [0, 0], ends
    said = [json.loads(out.splitlines()[-1]) for _, out, *_ in ends]
    assert said[0]["ragged"] == said[1]["ragged"] and said[0]["dropped"] == said[1]["dropped"]
    agrees(said[0]["ragged"], [[8, 5], [8, 8], [8, 0], [4, 0]])
    agrees(said[0]["dropped"], [[8, 8], [8, 8]])
    for each in said:
        assert re.match(
            r"feed: process 1 \(.+\) has no more batches after 2, but others have; the plan's "
            r"batch has no "
            r"'weight', so its rows cannot be padded; weight the loss by batch\['weight'\], ",
            each["unweighted"],
        )


def test_fit_on_two_processes(free_port, tmp_path):
    """It saves, goes on, evaluates what both share; one process gives it all rows, or each its own."""
    ends = pair("fit", free_port, str(tmp_path))
    assert [code for code, *_ in ends] == [0, 0], ends
    said = [json.loads(out.splitlines()[-1]) for _, out, *_ in ends]
    assert said[0] == said[1]
    assert [row["step"] for row in tr.read_metrics(tmp_path) if "all/loss" in row] == [3, 6]
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    params = jax.random.normal(jax.random.key(0), (5, 64)) * 0.3
    tx = optax.adam(0.02)
    moments = tx.init(params)
    for i in range(6):
        batch = x[16 * (i % 4) :][:16]
        grads = jax.grad(lambda w, b: jnp.square(jnp.tanh(b @ w).sum(-1) - 1).mean())(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = tx.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(said[0]["params"], params, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        said[0]["loss"], np.square(x[:21] @ np.asarray(params)).sum(-1).mean(), rtol=1e-4
    )


@pytest.mark.exhaustive
def test_stages_on_two_processes(free_port):
    """Four layers on each process, through which microbatches travel."""
    ends = pair("stages", free_port)
    assert [code for code, *_ in ends] == [0, 0], ends
    said = [json.loads(out.splitlines()[-1]) for _, out, *_ in ends]
    assert [each["layers"] for each in said] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for each in said:
        np.testing.assert_allclose(*zip(*each["losses"]), rtol=1e-5)
        assert max(each["errors"]) < 1e-6


@pytest.mark.exhaustive
def test_experts_on_two_processes(free_port):
    """Four experts on each process, to which tokens of both travel."""
    ends = pair("experts", free_port, limit=240)
    assert [code for code, *_ in ends] == [0, 0], ends
    said = [json.loads(out.splitlines()[-1]) for _, out, *_ in ends]
    for name in ("dropless", "capacity"):
        assert [each[name]["experts"] for each in said] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert max(error for each in said for error in each[name]["errors"]) < 1e-5


@pytest.mark.exhaustive
def test_time_on_two_processes(free_port):
    """Texts whose parts lie on both processes (one row of devices), or on one (two rows)."""
    ends = pair("time", free_port, limit=240)
    assert [code for code, *_ in ends] == [0, 0], ends
    said = [json.loads(out.splitlines()[-1]) for _, out, *_ in ends]
    assert said[0] == said[1] and [*said[0]] == ["ring 1", "ring 2", "ulysses 1", "ulysses 2"]
    for loss, expected, error in said[0].values():
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert error < 1e-5


# Batches are exchanged ahead of the steps, so the number of the last exchanged batch varies if a
# process ends or hangs.
LATE = r"feed: process %d \(.+\) did not come within 2 s, at batch %s, so the others cannot continue; restart all "
OWN = r"feed: process %d \(.+\), this one, had no batch of its own within 2 s, at batch 2, so the others stop waiting"


ENDS = {  # what the first process says, and the second
    "late": (LATE % (1, 2), OWN % 1),  # its batches do not come
    "late-first": (
        OWN % 0,
        r"feed: process 0 \(.+\) (did not come|had no batch of its own) within 2 s, at batch 2",
    ),
    "stuck": (LATE % (1, r"\d") + r".*this process was blocked in a step", None),
    "broken": (
        r"feed: process 1 \(.+\) failed to create batch 1: OSError: the disk",
        "OSError: the disk is gon",
    ),
    "failed": (
        r"feed: process 1 \(.+\) has ended with ArithmeticError: this process's own, at batch \d, "
        r".*\(this "
        "process was blocked in a step",
        "ArithmeticError: this process's own",
    ),
    "killed": (
        r"feed: process 1 \(.+\) did not come, at batch \d",
        None,
    ),  # after the error of the step itself
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ENDS)
def test_all_end_and_say_who(free_port, case):
    first, second = ENDS[case]
    ends = pair(case, free_port, count=3 if case == "late" else 2)
    for (code, _, err, seconds), message in zip(ends, (first, second, first)):
        assert code != 0 and seconds < 40, (code, err[-1000:], seconds)
        if message is not None:  # of the one that sleeps, JAX ends the process
            assert re.search(message, err), err[-2000:]
    assert ends[0][0] == 1, ends[0][2][-1000:]
