"""Resuming is exact: what a run that died and went on ends with has the bits of one that did not."""

import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft
from fnet.training.checkpoints import _manifest
from fnet.training.loop import _provenance

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(40, 4)).astype(np.float32),
    "y": RNG.integers(0, 3, 40).astype(np.int32),
}
POLICY = hw.policy("float16")
TX = ft.loss_scale(
    optax.adamw(0.02), POLICY, interval=5
)  # grows within the run, and overflows at times


def batches():
    return tr.Batches(DATA, batch_size=8, seed=3)


def step(state, batch):
    """Noise, a loss scale, a moving average, statistics, a random key that is carried along."""
    key, noise = jax.random.split(state.state["key"])
    x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)

    def loss(params):
        logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = ft.scaled_value_and_grad(loss)(state.opt_state, state.params)
    new = {"key": key, "mean": 0.9 * state.state["mean"] + x.mean()}
    scale = ft.loss_scale_state(state.opt_state).scale
    return state.apply(TX, grads, state=new), {"loss": value, "scale": scale, "x": tr.mean(x)}


def start():
    key = jax.random.key(0)
    params = {"hidden": jax.random.normal(key, (4, 8)) / 2, "head": jnp.zeros((8, 3))}
    return tr.TrainState.create(
        params, TX, state={"key": jax.random.key(5), "mean": jnp.zeros(())}, ema=0.9
    )


def measure(state, batch):
    logits = jnp.tanh(batch["x"] @ state.averaged["hidden"]) @ state.averaged["head"]
    return {"accuracy": tr.mean(logits.argmax(-1) == batch["y"], batch["weight"])}


@pytest.fixture(scope="module")
def options():
    return {
        "evaluate": {"test": tr.evaluator(measure, DATA, batch_size=16)},
        "every": 6,
        "log_every": 4,
        "save_every": 3,
        "early_stop": tr.EarlyStop(metric="test/accuracy", patience=50),
        "tensorboard": False,
        "config": {},
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, tr.fit(step, start(), batches(), steps=24, workdir=workdir, **options)


def everything(workdir):
    """Each leaf of the last checkpoint with its checksum, and the metrics without times."""
    checkpoints = tr.Checkpoints(workdir / "checkpoints")
    leaves = _manifest.read_manifest(checkpoints.folder / str(checkpoints.latest()))["leaves"]
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in tr.read_metrics(workdir)
    ]
    return leaves, rows


def same_run(a, b):
    """Equal in everything, and if not, in what."""
    (leaves, rows), (others, other_rows) = everything(a), everything(b)
    assert leaves.keys() == others.keys()
    assert {
        path: (leaves[path], others[path]) for path in leaves if leaves[path] != others[path]
    } == {}
    assert rows == other_rows


@pytest.mark.exhaustive
def test_everything_is_in_the_checkpoint(whole):
    leaves, rows = everything(whole[0])
    for part in (
        "state/params/head",
        "state/opt_state/scale",
        "state/ema/head",
        "state/state/key",
        "state/step",
        "loop/metrics/loss/total",
        "loop/best",
        "loop/stale",
        "loop/offset",
        "loop/skipped",
    ):
        assert part in leaves, sorted(leaves)
    assert "state/opt_state/inner/0/mu/head" in leaves and len(rows) == 10
    assert len({row["train/scale"] for row in rows if "train/scale" in row}) > 1


class Died(Exception):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("deaths", [[12], [1, 20]])
def test_died_and_gone_on_it_ends_with_the_same_bits(tmp_path, options, whole, deaths):
    """Dead at any step: what was done after the last checkpoint is done again alike."""
    for death in deaths:

        def feed(i, death=death):
            if i == death:
                raise Died
            return batches()(i)

        with pytest.raises(Died):
            tr.fit(step, start(), feed, steps=24, workdir=tmp_path, **options)
    tr.fit(step, start(), batches(), steps=24, workdir=tmp_path, **options)
    same_run(tmp_path, whole[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [12, 24])
def test_interrupted_while_evaluating_it_evaluates_again(tmp_path, options, whole, at):
    real = options["evaluate"]["test"]

    def interrupted(state):
        if int(state.step) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(state)

    arguments = {"steps": 24, "workdir": tmp_path}
    with pytest.raises(tr.Interrupted, match=rf"SIGTERM: stopped at step {at} of 24 and saved it"):
        tr.fit(
            step, start(), batches(), **arguments, **(options | {"evaluate": {"test": interrupted}})
        )
    assert [row["step"] for row in tr.read_metrics(tmp_path) if "test/accuracy" in row] == list(
        range(6, at, 6)
    )
    tr.fit(step, start(), batches(), **arguments, **options)
    same_run(tmp_path, whole[0])


@pytest.mark.exhaustive
def test_interrupted_before_the_first_step(tmp_path, options, whole):
    def interrupting(i):
        os.kill(os.getpid(), signal.SIGTERM)
        return batches()(i)

    with pytest.raises(tr.Interrupted, match="stopped at step 0 of 24 and saved it"):
        tr.fit(step, start(), interrupting, steps=24, workdir=tmp_path, **options)
    assert tr.Checkpoints(tmp_path / "checkpoints").steps() == [0]
    tr.fit(step, start(), batches(), steps=24, workdir=tmp_path, **options)
    same_run(tmp_path, whole[0])


@pytest.mark.exhaustive
def test_a_fallback_goes_on_to_the_same_end(tmp_path, options, whole):
    tr.fit(step, start(), batches(), steps=12, workdir=tmp_path, **options)
    file = tmp_path / "checkpoints" / "12" / "arrays-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.warns(tr.CheckpointWarning, match=r"step 12 is damaged .* going on from step 9"):
        tr.fit(step, start(), batches(), steps=24, workdir=tmp_path, **options)
    same_run(tmp_path, whole[0])
    assert (tmp_path / "checkpoints" / "12.damaged").is_dir()


def plain(state, batch):
    loss = lambda params: jnp.square(batch["x"] @ params["w"] - 1).mean()
    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(optax.adam(0.1), grads), {"loss": value}


def sharded(count):
    """(state, batches) over so many devices: the batch is cut, the parameters are whole on each, or
    cut as well."""
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    params = {"w": jax.device_put(jnp.ones((4, 8)), place(None, "data"))}
    state = tr.TrainState.create(params, optax.adam(0.1))
    state = jax.device_put(
        state, jax.tree.map(lambda x: place(None, "data") if x.ndim == 2 else place(), state)
    )
    return state, lambda i: jax.device_put({"x": batches()(i)["x"]}, place("data"))


def test_other_devices_take_over_to_rounding(tmp_path):
    """Eight devices, then four, then one: the same numbers to 1e-6, and it is said that they are
    not the same bits."""
    expected = tr.fit(plain, *sharded(8), steps=9)
    tr.fit(plain, *sharded(8), steps=3, workdir=tmp_path, config={})
    for count, steps in ((4, 6), (1, 9)):
        with pytest.warns(
            tr.ResumeWarning,
            match=rf"number of devices was \d, is {count}; from this step.*rounding",
        ):
            state = tr.fit(plain, *sharded(count), steps=steps, workdir=tmp_path, config={})
        assert len(state.params["w"].sharding.device_set) == count
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-7)


def test_another_chip_is_reported_and_the_rules_kept(tmp_path, monkeypatch):
    state = lambda: tr.TrainState.create({"w": jnp.ones((4, 8))}, optax.adam(0.1))
    tr.fit(
        plain,
        state(),
        batches(),
        steps=2,
        workdir=tmp_path,
        config={},
        notes={"policy": "as decided"},
    )
    notes = tr.Checkpoints(tmp_path / "checkpoints").notes()
    assert notes["policy"] == "as decided" and notes["chip"] == hw.detect().name and notes["tune"]
    real = _provenance.facts
    monkeypatch.setattr(
        _provenance, "facts", lambda state: real(state) | {"chip": "TPU v9", "jaxlib": "9.9"}
    )
    with pytest.warns(
        tr.ResumeWarning,
        match=r"2: the chip was .*, is TPU v9; jaxlib was .*, is 9.9; from this step",
    ):
        tr.fit(plain, state(), batches(), steps=3, workdir=tmp_path, config={})


def test_tune_goes_on_with_the_rules_of_the_beginning():
    now = {"kind": "cpu"}
    names = [rule.name for rule in _provenance.RULES["cpu"]]
    kept = _provenance.rules({"kind": "cpu", "tune": names[:1]}, now)
    assert kept == {name: name == names[0] for name in names}
    assert _provenance.chosen(ft.tune(jax.jit(plain), "cpu", rules=kept)) == names[:1]
    assert _provenance.rules({"kind": "gpu", "tune": []}, now) is None
    assert _provenance.rules({"kind": "cpu"}, now) is None


# Signals.


def test_in_another_thread_no_handler_is_touched():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(
        target=lambda: tr.fit(
            plain,
            tr.TrainState.create({"w": jnp.ones((4, 8))}, optax.adam(0.1)),
            batches(),
            steps=2,
        )
    )
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_and_the_wakeup_pipe_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    threads = threading.active_count()
    with pytest.raises(Died):
        tr.fit(plain, tr.TrainState.create({"w": jnp.ones((4, 8))}, optax.adam(0.1)), died, steps=2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(wakeup) == wakeup and threading.active_count() == threads


def died(i):
    if i:
        raise Died
    return batches()(i)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first, second", [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM")])
def test_a_later_signal_ends_at_once_even_in_a_call_that_no_handler_interrupts(first, second):
    """`threading.Lock` is not such a call, and neither is sleep: hashing in C is. Repeats within a
    second are one."""
    program = (
        "import hashlib\nfrom fnet.training.loop._signals import signals\nwith signals() as seen:\n"
        "    print('ready', flush=True)\n    hashlib.pbkdf2_hmac('sha256', b'', b'', 1 << 27)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, first))
        process.send_signal(getattr(signal, second))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(getattr(signal, second))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, second)
    assert err == "ended at once; the run resumes from its last checkpoint\n"


def test_in_a_notebook_the_second_is_a_keyboard_interrupt(monkeypatch):
    from fnet.training.loop._signals import signals

    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(KeyboardInterrupt), signals() as seen:
        os.kill(os.getpid(), signal.SIGINT)
        assert seen.received == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)  # the same one, within a second
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
