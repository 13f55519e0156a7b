"""Batches: pure in (seed, step), every example once per epoch."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import training as tr


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 5), st.integers(1, 4))
def test_every_example_once_per_epoch(length, size, seed, epochs):
    batches = tr.Batches({"x": np.arange(length)}, batch_size=size, seed=seed)
    steps = batches.steps(epochs)
    assert (steps - 1) * size < epochs * length <= steps * size
    stream = np.concatenate([batches(i)["x"] for i in range(steps)])
    assert len(stream) == steps * size
    for epoch in stream[: epochs * length].reshape(epochs, length):
        assert sorted(epoch) == list(range(length))


def test_a_batch_depends_on_seed_and_step_alone():
    data = {"x": np.arange(100), "y": -np.arange(100)}
    one, two = (tr.Batches(data, batch_size=8, seed=1) for _ in range(2))
    ahead = [one(i)["x"] for i in range(40)]
    for i in (39, 3, 17):  # in any order, across epochs
        np.testing.assert_array_equal(two(i)["x"], ahead[i])
        np.testing.assert_array_equal(two(i)["y"], -ahead[i])
    other = tr.Batches(data, batch_size=8, seed=2)
    assert not np.array_equal(other(0)["x"], ahead[0])
    assert not np.array_equal(ahead[0], one(25)["x"][:8])  # another epoch, another order


def test_unshuffled():
    batches = tr.Batches({"x": np.arange(5)}, batch_size=3, shuffle=False)
    assert [batches(i)["x"].tolist() for i in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    "data, size, text",
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, 2, "one length, at least 1, got lengths .*'y': 4"),
        ({}, 2, "one or more arrays"),
        ({"x": np.zeros(0)}, 2, "at least 1, got lengths {'x': 0}"),
        ({"x": np.zeros(3)}, 0, "batch_size=0: a batch needs at least one"),
    ],
)
def test_wrong_batches(data, size, text):
    with pytest.raises(ValueError, match=text):
        tr.Batches(data, batch_size=size)


@pytest.mark.parametrize("read", ["Batches", "evaluator", "from_iterator", "fit"])
def test_integers_of_memory_mapped_files_are_checked_when_they_are_read(tmp_path, read):
    """JAX would wrap around 64-bit integers without an error."""
    values = np.arange(8)
    values[6] = 1_700_000_000_000  # milliseconds
    np.save(tmp_path / "time.npy", values)
    times = np.load(tmp_path / "time.npy", mmap_mode="r")
    with pytest.raises(TypeError, match=r"holds 1700000000000, which does not fit into 32 bits"):
        if read == "Batches":
            batches = tr.Batches({"time": times}, 4, shuffle=False)
            assert batches(0)["time"].tolist() == [0, 1, 2, 3]
            batches(1)
        elif read == "evaluator":
            tr.evaluator(
                lambda state, batch: {"n": tr.mean(batch["weight"], batch["weight"])},
                {"time": times},
                4,
            )(0)
        elif read == "fit":  # any function may give batches
            state = tr.TrainState.create({"w": jnp.zeros(1)}, optax.sgd(0.1))
            tr.fit(
                lambda state, batch: (state.apply(optax.sgd(0.1), {"w": jnp.zeros(1)}), {}),
                state,
                lambda i: {"time": times[4 * i : 4 * i + 4]},
                steps=2,
            )
        else:
            tr.from_iterator(lambda: ({"time": times[i : i + 4]} for i in (0, 4)))(1)


def test_the_range_of_memory_mapped_float64(tmp_path):
    np.save(tmp_path / "time.npy", 1.7e9 + 1e-3 * np.arange(10_000))
    times = np.load(tmp_path / "time.npy", mmap_mode="r")
    with pytest.raises(TypeError, match="which float32 rounds to multiples of their difference"):
        tr.Batches({"time": times}, 4)
    np.save(tmp_path / "ok.npy", np.linspace(0, 1, 10_000))
    assert tr.Batches({"x": np.load(tmp_path / "ok.npy", mmap_mode="r")}, 4)(0)["x"].shape == (4,)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(7,), (50, 3), (4, 0), (1, 2, 2)])
def test_a_digest_reads_every_value(dtype, shape):
    values = np.zeros(shape, jnp.dtype(dtype))
    digests = {tr.Batches({"x": values}, 1).digest()}
    for place in range(min(values.size, 3)):
        other = values.copy()
        other.reshape(-1)[-1 - place] = 1
        digests.add(tr.Batches({"x": other}, 1).digest())
    assert len(digests) == 1 + min(values.size, 3)
    assert tr.Batches({"x": values}, 1).digest() in digests
    assert tr.Batches({"y": values}, 1).digest() not in digests


def test_a_digest_reads_a_large_file_throughout(tmp_path):
    rows = np.zeros((1 << 15, 1 << 10), np.uint8)  # 32 MiB
    digests = set()
    for start in (None, 0, 1 << 14, (1 << 15) - 1000):
        changed = rows.copy()
        if start is not None:
            changed[start : start + 1000] = 1
        np.save(tmp_path / "x.npy", changed)
        digests.add(tr.Batches({"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, 8).digest())
    assert len(digests) == 4
