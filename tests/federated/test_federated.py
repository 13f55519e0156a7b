"""Federated averaging against plain SGD, NumPy and its own definition."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import federated, introspect
from fnet import training as tr
from fnet.search._population import Population


def parts(sizes, dtype="float64"):
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(n, 3)).astype(dtype), "y": rng.normal(size=n).astype(dtype)}
        for n in sizes
    ]


def loss(params, batch, weight, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    weight = weight.astype(error.dtype)
    return (error**2 * weight).sum() / weight.sum()


def params(dtype="float64"):
    return {"w": jnp.array([0.1, -0.2, 0.3], dtype), "b": jnp.zeros((), dtype)}


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(np.asarray(x) - np.asarray(y)).max() <= 1e-6 * max(
            np.abs(np.asarray(y)).max(), 1e-30
        )


def run(round, state, rounds=1):
    for _ in range(rounds):
        state, metrics = round(state, federated.no_batches(0))
    return state, metrics


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_fedsgd_with_all_clients_is_one_large_batch(method):
    with jax.enable_x64(True):
        data = parts([5, 2, 8, 1])
        round = federated.fedavg(
            federated.local(loss, optax.sgd(0.1)),
            federated.clients(data),
            server=optax.sgd(1.0),
            sampled=4,
            method=method,
        )
        state, metrics = run(round, federated.init(jax.random.key(0), params(), optax.sgd(1.0)), 5)
        whole, want = jax.tree.map(lambda *x: np.concatenate(x), *data), params()
        for _ in range(5):
            value, grads = jax.value_and_grad(loss)(want, whole, jnp.ones(16), None)
            want = jax.tree.map(lambda w, g: w - 0.1 * g, want, grads)
        close(state.params, want)
        np.testing.assert_allclose(metrics["loss"].result(), value, rtol=1e-6)


def test_several_epochs_of_uneven_clients_equal_numpy():
    """One batch of a client in each epoch makes its order irrelevant; the smaller client has fewer
    batches."""
    with jax.enable_x64(True):
        data = parts([4, 4, 2])
        local = federated.local(loss, optax.sgd(0.1, momentum=0.9), proximal=0.5)
        round = federated.fedavg(
            local,
            federated.clients(data),
            server=optax.sgd(0.7),
            sampled=3,
            epochs=3,
            batch_size=4,
            method="vmap",
        )
        state, _ = run(round, federated.init(jax.random.key(0), params(), optax.sgd(0.7)), 2)
        w = np.array([0.1, -0.2, 0.3, 0.0])
        for _ in range(2):
            ends = []
            for part in data:
                mine, velocity = w.copy(), np.zeros(4)
                x = np.concatenate([part["x"], np.ones((len(part["x"]), 1))], 1)
                for _ in range(3):
                    gradient = 2 * x.T @ (x @ mine - part["y"]) / len(x) + 0.5 * (mine - w)
                    velocity = gradient + 0.9 * velocity
                    mine = mine - 0.1 * velocity
                ends.append(mine)
            w = w + 0.7 * sum(n * (end - w) for n, end in zip((4, 4, 2), ends)) / 10
        close(jnp.concatenate([state.params["w"], state.params["b"][None]]), w)


def test_sums_over_clients_do_not_fit_in_16_bits():
    """257 and 1 examples: the weighted mean of the changes 1 and 0, whose weights bfloat16 would
    round to 256 and 1."""
    data = federated.clients([np.ones(257, np.float32), np.zeros(1, np.float32)])
    change = lambda w, batch, weight, key: (w + (batch * weight).max().astype(w.dtype) / 8, {})
    round = federated.fedavg(
        change, data, server=optax.sgd(8.0), sampled=2, epochs=1, batch_size=257, method="vmap"
    )
    params = [jnp.zeros((), dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    ends = [
        run(round, federated.init(jax.random.key(0), w, optax.sgd(8.0)))[0].params for w in params
    ]
    assert float(ends[1]) == pytest.approx(257 / 258) and ends[0].dtype == jnp.bfloat16
    assert float(ends[0]) == float(ends[1].astype(jnp.bfloat16))


def test_every_example_is_used_once_in_an_epoch():
    seen = []

    def local_step(w, batch, weight, key):
        return w + (weight * 10.0**batch).sum(), {"examples": weight.sum()}

    data = federated.clients([np.arange(0, 3, dtype=np.float32), np.arange(3, 5, dtype=np.float32)])
    round = federated.fedavg(
        local_step, data, server=optax.sgd(1.0), sampled=1, epochs=1, batch_size=2, method="vmap"
    )
    for seed in range(4):
        state, _ = run(round, federated.init(jax.random.key(seed), jnp.float32(0), optax.sgd(1.0)))
        seen.append(float(state.params))
    assert set(seen) <= {111.0, 11000.0} and len(set(seen)) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["one traced program", "two devices", "two devices, loop", "loop"])
def test_rounds_do_not_depend_on_how_clients_run(kind):
    data = federated.clients(parts([4, 3, 5, 2], "float32"))
    make = lambda **options: federated.fedavg(
        federated.local(loss, optax.sgd(0.05)),
        data,
        server=optax.adam(0.1),
        sampled=2,
        epochs=2,
        batch_size=2,
        dropout=0.3,
        **options,
    )
    begin = lambda: federated.init(jax.random.key(5), params("float32"), optax.adam(0.1))
    want, measured = run(make(method="vmap"), begin(), 3)
    if kind == "one traced program":
        got, other = run(jax.jit(make(method="vmap")), begin(), 3)
    elif "two devices" in kind:
        got, other = run(
            make(method="loop" if "loop" in kind else "vmap", devices=jax.devices()[:2]), begin(), 3
        )
    else:
        got, other = run(make(method="loop"), begin(), 3)
    for a, b in zip(
        jax.tree.leaves((got.params, other)), jax.tree.leaves((want.params, measured)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_clients_that_do_not_answer_and_bytes():
    data = federated.clients(parts([2] * 8, "float32"))
    round = federated.fedavg(
        federated.local(loss, optax.sgd(0.1)),
        data,
        server=optax.sgd(1.0, momentum=0.9),
        sampled=4,
        dropout=0.999,
        method="vmap",
    )
    state, metrics = run(
        round, federated.init(jax.random.key(0), params("float32"), optax.sgd(1.0, momentum=0.9))
    )
    assert (
        float(metrics["answers"]) == 0 and float(state.bytes) == 4 * 16
    )  # 4 floats to 4 clients, none back
    close(state.params, params("float32"))
    state, metrics = run(
        federated.fedavg(
            federated.local(loss, optax.sgd(0.1)),
            data,
            server=optax.sgd(1.0),
            sampled=4,
            method="vmap",
        ),
        federated.init(jax.random.key(0), params("float32"), optax.sgd(1.0)),
        2,
    )
    assert float(metrics["answers"]) == 4 and float(state.bytes) == 2 * 8 * 16


def test_a_client_that_diverges_does_not_answer():
    def local_step(w, batch, weight, key):
        return w + batch.sum(), {"loss": batch.sum()}

    data = federated.clients([np.float32([1.0]), np.float32([np.nan])])
    round = federated.fedavg(local_step, data, server=optax.sgd(1.0), sampled=2, method="vmap")
    state, metrics = run(round, federated.init(jax.random.key(0), jnp.float32(0), optax.sgd(1.0)))
    assert float(state.params) == 1 and float(metrics["answers"]) == 1


def a_round():
    """A round of four uneven clients, its data, the parameters of the server, and its clients."""
    round = federated.fedavg(
        federated.local(loss, optax.sgd(0.1)),
        federated.clients(parts([5, 2, 8, 1], "float32")),
        server=optax.sgd(1.0),
        sampled=4,
        epochs=2,
        batch_size=3,
        method="vmap",
    )
    state = federated.init(jax.random.key(0), params("float32"), optax.sgd(1.0))
    ((_, _, data),) = round._places
    clients, _ = round._begin((state.params, state.key, state.step), data[1], 0, 4)
    with_members = lambda members: Population(
        clients.step, members, clients.hyper, clients.diverged
    )
    return round, data, state.params, clients.members, with_members


@pytest.mark.independent(in_axes=(0,))
def test_a_client_learns_from_its_own_examples_alone():
    round, data, server, members, with_members = a_round()

    def local(members):
        return round._step.plain(with_members(members), (np.int32(1), data, server))[0].members

    return local, members


def test_what_a_client_without_an_answer_has_learned_reaches_nothing():
    """Two of four clients do not answer."""
    round, data, server, members, with_members = a_round()

    def closed(members, answers):
        return round._close(with_members(members), answers, {}, server, data[1])

    answers = np.array([True, True, False, False])
    report = introspect.depends(closed, members, answers, axes={"clients": ((0, 0), None)})
    assert report.padding("clients", 2, known={"answers": answers}).status == "proved"
    assert report.padding("clients", 2, known={"answers": ~answers}).status == "refuted"


def test_clipped_and_noisy_gradients_are_those_of_optax():
    """Without noise: the mean of clipped gradients, padding excluded. With noise: noise of the
    right size."""
    part = parts([3, 4], "float32")
    begin = lambda: federated.init(jax.random.key(0), params("float32"), optax.sgd(1.0))

    def one(noise, clip=0.5):
        round = federated.fedavg(
            federated.local(loss, optax.sgd(1.0), clip=clip, noise=noise),
            federated.clients(part),
            server=optax.sgd(1.0),
            sampled=2,
            method="vmap",
        )
        return jax.tree.map(lambda a, b: b - a, params("float32"), run(round, begin())[0].params)

    total = np.zeros(4)
    for each in part:
        for x, y in zip(each["x"], each["y"]):
            g = 2 * (x @ np.array([0.1, -0.2, 0.3]) - y) * np.append(x, 1)
            total += g * min(1, 0.5 / np.linalg.norm(g))
    got = one(0.0)
    np.testing.assert_allclose(np.append(got["w"], got["b"]), -total / 7, rtol=1e-5)
    noisy = one(100.0)
    spread = np.append(noisy["w"], noisy["b"]) + total / 7
    assert 3 < np.abs(spread).max() < 60 and len(set(spread.tolist())) == 4  # sd 50 / 7 sqrt(2)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::fnet.training.ResumeWarning")
def test_fit_resumes_bit_by_bit(tmp_path):
    data = federated.clients(parts([4, 3, 5, 2], "float32"))

    def train(folder, rounds):
        round = federated.fedavg(
            federated.local(loss, optax.sgd(0.05)),
            data,
            server=optax.sgd(1.0),
            sampled=2,
            batch_size=2,
            method="vmap",
        )
        state = federated.init(jax.random.key(5), params("float32"), optax.sgd(1.0))
        return tr.fit(
            round,
            state,
            federated.no_batches,
            steps=rounds,
            workdir=tmp_path / folder,
            log_every=1,
            tensorboard=False,
            config={},
        )

    whole = train("whole", 6)
    train("parts", 3)
    for a, b in zip(jax.tree.leaves(train("parts", 6)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(
            jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a,
            jax.random.key_data(b) if jnp.issubdtype(b.dtype, jax.dtypes.prng_key) else b,
        )
    rows = tr.read_metrics(tmp_path / "whole")
    assert len(rows) == 6 and {"train/loss", "train/answers", "train/megabytes"} <= rows[-1].keys()


@pytest.mark.exhaustive
def test_two_processes_equal_one(tmp_path):
    """Two processes with two devices each, beside one with four; `fit` saves and resumes both."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    script = str(pathlib.Path(__file__).with_name("two_processes.py"))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def start(count):
        return [
            subprocess.Popen(
                [sys.executable, script, str(port), str(i), str(count), str(tmp_path / str(count))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for i in range(count)
        ]

    results = []
    for count in (2, 1):
        processes = start(count)
        try:
            ends = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0] * count, ends
        results.append([json.loads(out.splitlines()[-1]) for out, _ in ends])
    (first, second), (alone,) = results
    assert first == second  # bit for bit
    for method in ("vmap", "loop"):
        for a, b in zip(
            jax.tree.leaves(first[method]), jax.tree.leaves(alone[method]), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        rows = tr.read_metrics(tmp_path / "2" / method)
        assert [row["step"] for row in rows if "all/loss" in row] == [1, 2, 3, 4, 5]


def test_errors():
    data = federated.clients(parts([2, 2]))
    local = federated.local(loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"fedavg\(sampled=3\): expected a number from 1 to 2"):
        federated.fedavg(local, data, server=optax.sgd(1.0), sampled=3)
    with pytest.raises(ValueError, match=r"dropout=1.0"):
        federated.fedavg(local, data, server=optax.sgd(1.0), sampled=2, dropout=1.0)
    with pytest.raises(ValueError, match="1 clients cannot be divided"):
        federated.fedavg(local, data, server=optax.sgd(1.0), sampled=1, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="noise needs clip="):
        federated.local(loss, optax.sgd(0.1), noise=1.0)
    with pytest.raises(ValueError, match="clip > 0"):
        federated.local(loss, optax.sgd(0.1), clip=0.0)
    with pytest.raises(ValueError, match="at least one client"):
        federated.clients([])
    with pytest.raises(ValueError, match=r"client 1 has arrays of \[2, 3\] examples"):
        federated.clients([{"x": np.ones(2), "y": np.ones(2)}, {"x": np.ones(2), "y": np.ones(3)}])
