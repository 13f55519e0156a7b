"""Data larger than memory: read from a mapped file where a batch lies, or through Grain; never
copied whole."""

import importlib.util

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr


def resident() -> int:
    """Bytes of the process that are no file's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.fixture
def mapped(tmp_path):
    """64 GiB of examples in a file that takes up no room."""
    rows = np.lib.format.open_memmap(tmp_path / "images.npy", "w+", np.uint8, (1 << 20, 1 << 16))
    return np.load(tmp_path / "images.npy", mmap_mode="r"), rows


@pytest.mark.exhaustive
def test_batches_of_a_mapped_file(mapped):
    images, rows = mapped
    batches = tr.Batches({"image": images, "index": np.arange(len(images))}, batch_size=16, seed=1)
    where = batches.index(3)
    rows[where, 5] = np.arange(1, 17)
    before = resident()
    for step in range(8):
        batch = batches(step)
        if step == 3:
            assert (
                batch["image"][:, 5].tolist() == list(range(1, 17))
                and (batch["index"] == where).all()
            )
    assert type(batch["image"]) is np.ndarray and batch["image"].shape == (16, 1 << 16)
    assert resident() - before < 64 << 20  # a batch is 1 MiB, an epoch's order 8


def test_the_loop_reads_a_mapped_file(mapped):
    images, rows = mapped
    batches = tr.Batches({"image": images}, batch_size=4, seed=0)
    rows[batches.index(1), 0] = 255
    tx = optax.sgd(1.0)

    def step(state, batch):
        brightness = batch["image"][:, 0].astype(jnp.float32).mean()
        return state.apply(tx, {"w": -brightness}), {"brightness": brightness}

    state = tr.TrainState.create({"w": jnp.zeros(())}, tx)
    state = tr.fit(step, state, batches, steps=3)
    assert state.params["w"] == 255


@pytest.mark.skipif(
    importlib.util.find_spec("grain") is None,
    reason="Grain is not installed: pip install grain",
)
def test_grain_is_a_function_of_the_step():
    import grain

    dataset = grain.MapDataset.range(100).seed(1).shuffle().repeat().batch(8)
    tx = optax.sgd(1.0)

    def step(state, batch):
        return state.apply(tx, {"w": -batch.sum().astype(jnp.float32)}), {"sum": tr.mean(batch)}

    state = tr.TrainState.create({"w": jnp.zeros(())}, tx)
    state = tr.fit(step, state, dataset.__getitem__, steps=25)
    assert state.params["w"] == 2 * sum(range(100))  # two epochs
