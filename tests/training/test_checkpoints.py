"""Checkpoints: everything comes back as it was, and nothing else is passed off as it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fnet import training as tr


def tree():
    return {
        "kernel": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "half": jnp.full((3,), 1.5, jnp.bfloat16),
        "empty": jnp.zeros((0, 4)),
        "host": np.arange(4, dtype=np.int64),
        "key": jax.random.key(5),
        "old_key": jax.random.PRNGKey(5),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "count": 3,
        "rate": 0.5,
        "nested": [(jnp.int32(7),), None],
    }


def test_round_trip_of_every_kind_of_leaf(tmp_path):
    checkpoints = tr.Checkpoints(tmp_path)
    checkpoints.save(1, tree())
    checkpoints.wait()
    target = jax.tree.map(lambda x: x, tree()) | {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
    back = checkpoints.restore(target)
    checkpoints.close()
    assert jax.tree.structure(back) == jax.tree.structure(tree())
    for (path, a), b in zip(jax.tree.leaves_with_path(tree()), jax.tree.leaves(back)):
        assert type(a) is type(b), path
        if isinstance(a, jax.Array):
            assert a.dtype == b.dtype, path
            if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(a) == jax.random.key_impl(b)
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_save_is_a_copy(tmp_path):
    """The step donates its buffers while the save is still under way."""
    checkpoints = tr.Checkpoints(tmp_path)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((512, 512))
    checkpoints.save(0, {"x": x})
    for _ in range(3):
        x = add(x)
    checkpoints.wait()
    assert float(checkpoints.restore({"x": x})["x"].max()) == 0
    checkpoints.close()


def test_a_sharded_array_comes_back_in_its_place(tmp_path):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, PartitionSpec("data")))
    checkpoints = tr.Checkpoints(tmp_path)
    checkpoints.save(0, {"x": x})
    checkpoints.wait()
    back = checkpoints.restore({"x": x})["x"]
    checkpoints.close()
    assert back.sharding == x.sharding and back.committed
    np.testing.assert_array_equal(back, x)


def test_an_array_bound_to_no_device_stays_so(tmp_path):
    checkpoints = tr.Checkpoints(tmp_path)
    checkpoints.save(0, {"x": jnp.ones(3), "key": jax.random.key(0)})
    checkpoints.wait()
    back = checkpoints.restore({"x": jnp.ones(3), "key": jax.random.key(0)})
    checkpoints.close()
    assert not back["x"].committed and not back["key"].committed


def test_the_last_few_and_the_best_are_kept(tmp_path):
    checkpoints = tr.Checkpoints(tmp_path, keep=2, best="test/loss", mode="min")
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0]):
        checkpoints.save(step, {"x": jnp.float32(step)}, metrics={"test/loss": loss})
    checkpoints.save(5, {"x": jnp.float32(5)})             # not measured here
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5]
    assert (checkpoints.latest(), checkpoints.best()) == (5, 1)
    assert float(checkpoints.restore({"x": jnp.float32(0)}, 1)["x"]) == 1
    checkpoints.close()


@pytest.fixture
def saved(tmp_path):
    checkpoints = tr.Checkpoints(tmp_path / "c")
    for step in (1, 2):
        checkpoints.save(step, {"a": jnp.ones((2, 3)), "b": jnp.arange(64, dtype=jnp.float32)})
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


@pytest.mark.parametrize(
    "target, text",
    [
        ({"a": jnp.ones((3, 2))}, r"'a': float32\[2, 3\] in the checkpoint, .* has float32\[3, 2\]"),
        ({"a": jnp.ones((2, 3), jnp.bfloat16)}, "'a': float32.*the target has bfloat16"),
        ({"c": jnp.ones(3)}, r"'c': not in the checkpoint, the target has float32\[3\]"),
        ({}, r"'a': float32\[2, 3\] in the checkpoint, not in the target"),
        ({"a": jax.random.key(0)}, r"the target has uint32\[2\] \(PRNG key, .*fry"),
    ],
)
def test_another_target_is_refused_by_leaf(saved, target, text):
    with pytest.raises(tr.CheckpointError, match=text):
        saved.restore({"b": jnp.zeros(64)} | target)


def test_no_such_checkpoint(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 9 here, there are steps \[1, 2\]"):
        saved.restore({}, 9)
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        tr.Checkpoints(tmp_path / "empty").restore({})
    assert not (tmp_path / "empty").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore's futures
def test_flipped_bits_never_pass(saved):
    target = {"a": jnp.ones((2, 3)), "b": jnp.zeros(64)}
    files = [f for f in (saved.folder / "2" / "arrays").rglob("*") if f.is_file() and f.stat().st_size]
    caught = 0
    for file in files:
        sound = file.read_bytes()
        for place in np.linspace(0, len(sound) - 1, 12).astype(int):
            damaged = bytearray(sound)
            damaged[place] ^= 16
            file.write_bytes(bytes(damaged))
            try:
                back = saved.restore(target)
            except tr.CheckpointError as error:
                caught += 1
                assert "move that folder away to go on from step 1" in str(error)
            else:                                          # the bit did not matter
                np.testing.assert_array_equal(back["b"], np.arange(64))
                np.testing.assert_array_equal(back["a"], np.ones((2, 3)))
        file.write_bytes(sound)
    assert caught > 10


def test_an_empty_step_folder_is_an_error(saved):
    (saved.folder / "3").mkdir()
    again = tr.Checkpoints(saved.folder)
    assert again.latest() == 3
    with pytest.raises(tr.CheckpointError, match="3: this checkpoint cannot be read"):
        again.restore({})
    again.close()


def test_wrong_arguments_for_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="keep=0: at least the last"):
        tr.Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="mode='best'"):
        tr.Checkpoints(tmp_path, mode="best")
