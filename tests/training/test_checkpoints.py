"""Checkpoints: everything comes back as it was, and nothing else is passed off as it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fnet import training as tr
from fnet.training.checkpoints import _checkpoint


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
    target = jax.tree.map(lambda x: x, tree()) | {
        "kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)
    }
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
    checkpoints.save(5, {"x": jnp.float32(5)})  # not measured here
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
        (
            {"a": jnp.ones((3, 2))},
            r"'a': float32\[2, 3\] in the checkpoint, .* has float32\[3, 2\]",
        ),
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
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 9 here, there are steps \[1, 2\]"
    ):
        saved.restore({}, 9)
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        tr.Checkpoints(tmp_path / "empty").restore({})
    assert not (tmp_path / "empty").exists()


def test_all_that_differs_is_listed(saved):
    target = {"a": jnp.ones((3, 2)), "b": jnp.zeros(64, jnp.int32), "c": 1, "d": np.zeros(2)}
    with pytest.raises(tr.CheckpointError) as error:
        saved.restore(target)
    assert [line[:5] for line in str(error.value).splitlines()[1:]] == [
        "  'a'",
        "  'b'",
        "  'c'",
        "  'd'",
    ]
    assert "'c': not in the checkpoint, the target has a Python int" in str(error.value)


def test_a_cast_is_made_on_request_alone(saved):
    target = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": np.zeros(64, np.int8)}
    with pytest.raises(tr.CheckpointError, match="the target has bfloat16"):
        saved.restore(target)
    back = saved.restore(target, cast=True)
    assert back["a"].dtype == jnp.bfloat16 and back["b"].dtype == np.int8
    np.testing.assert_array_equal(back["b"], np.arange(64))
    with pytest.raises(tr.CheckpointError, match=r"the target has int8\[63\]"):
        saved.restore(target | {"b": np.zeros(63, np.int8)}, cast=True)


def test_every_kth_is_kept(tmp_path):
    with tr.Checkpoints(tmp_path, keep=1, keep_every=3) as checkpoints:
        for step in range(8):
            checkpoints.save(step, {"x": step})
        checkpoints.wait()
        assert checkpoints.steps() == [0, 3, 6, 7]


def test_the_best_is_known_to_another_process(tmp_path):
    for step, loss in enumerate([3.0, 1.0, 2.0]):
        with tr.Checkpoints(tmp_path, keep=1, best="loss", mode="min") as checkpoints:
            checkpoints.save(step, {"x": step}, metrics={"loss": loss, "note": np.zeros(2)})
    assert tr.Checkpoints(tmp_path, best="loss", mode="min").best() == 1
    assert checkpoints.steps() == [1, 2] and tr.Checkpoints(tmp_path).best() is None


def test_what_is_not_sound_is_not_saved(tmp_path):
    with tr.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": 1.0}, sound=jnp.array(True))
        checkpoints.save(2, {"x": float("nan")}, sound=jnp.array(False))
        checkpoints.wait()
        assert checkpoints.steps() == [1] and [
            f.name for f in tmp_path.iterdir() if f.name != ".lock"
        ] == ["1"]


def test_a_step_saved_again_is_replaced(tmp_path):
    with tr.Checkpoints(tmp_path) as checkpoints:
        for value in (1, 2):
            checkpoints.save(5, {"x": value})
        checkpoints.wait()
        assert checkpoints.restore({"x": 0}) == {"x": 2} and checkpoints.steps() == [5]


def test_notes_come_back(tmp_path):
    with tr.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, {"x": 1}, notes={"chip": "TPU v5e", "rules": ["a"], "n": 2})
        checkpoints.wait()
        assert (
            checkpoints.notes()
            == checkpoints.notes(5)
            == {"chip": "TPU v5e", "rules": ["a"], "n": 2}
        )


@pytest.mark.parametrize(
    "leaf, text",
    [
        ("a string", "'x' is a str: a checkpoint holds arrays of numbers"),
        (np.array(["a"]), r"'x' is an array of <U1"),
        (np.array([None]), "'x' is an array of object"),
    ],
)
def test_leaves_of_other_kinds_are_refused(tmp_path, leaf, text):
    with pytest.raises(TypeError, match=text):
        tr.Checkpoints(tmp_path).save(1, {"x": leaf})


def test_two_leaves_of_one_path_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two leaves of this tree have the path 'a/b'"):
        tr.Checkpoints(tmp_path).save(1, {"a/b": 1, "a": {"b": 2}})


def test_any_framework_reads_the_arrays(saved):
    from safetensors.numpy import load_file

    arrays = load_file(saved.folder / "2" / "arrays-0.safetensors")
    np.testing.assert_array_equal(arrays["b"], np.arange(64, dtype=np.float32))
    assert arrays["a"].shape == (2, 3)


def test_wrong_arguments_for_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="keep_every=0: expected a number of steps"):
        tr.Checkpoints(tmp_path, keep_every=0)
    with pytest.raises(
        ValueError, match="keep=0: expected a whole number of checkpoints, at least 1"
    ):
        tr.Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"keep=1\.5: expected a whole number"):
        tr.Checkpoints(tmp_path, keep=1.5)
    with pytest.raises(ValueError, match="mode='best'"):
        tr.Checkpoints(tmp_path, mode="best")


def test_restore_waits_for_the_save_that_is_running(tmp_path, monkeypatch):
    write = _checkpoint.write
    monkeypatch.setattr(_checkpoint, "write", lambda *args: (time.sleep(0.3), write(*args))[1])
    with tr.Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.full(3, float(step))})
            np.testing.assert_array_equal(
                checkpoints.restore({"w": jnp.zeros(3)})["w"], np.full(3, step)
            )
            np.testing.assert_array_equal(checkpoints.read()[1]["w"], np.full(3, step))
