"""One of several processes that save or restore a sharded tree: what test_sharded_checkpoints.py
starts.

    python tests/training/sharding.py PORT PROCESS COUNT WHERE

It saves two steps, restores the second on the mesh that saved it and on another one, flips a bit of
it and restores again. Prints as JSON what the process has restored, and which shards it has read.
"""

import json
import os
import pathlib
import sys
import warnings

if __name__ == "__main__":
    PORT, ME, COUNT, WHERE = *map(int, sys.argv[1:4]), sys.argv[4]
    warnings.simplefilter("error")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("FNET_TEST_XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )

import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils

from fnet import parallel
from fnet import training as tr
from fnet.training.checkpoints import _shards, _storage

SPECS = {  # of the mesh that saves, and of one with two axes
    "rows": (jax.P("x"), jax.P(("x", "y"))),
    "columns": (jax.P(None, "x"), jax.P("y", "x")),
    "half": (jax.P("x"), jax.P(None, "y")),
    "same": (jax.P(), jax.P("x")),
}


def values(step):
    rng = np.random.default_rng(step)
    return {
        "rows": rng.normal(size=(8, 3)).astype(np.float32),
        "columns": rng.normal(size=(4, 8)).astype(np.float32),
        "half": rng.normal(size=(12, 4)).astype(ml_dtypes.bfloat16),
        "same": rng.integers(0, 99, (4, 2)).astype(np.int32),
    }


def tree(step, mesh, which):
    made = {
        name: jax.make_array_from_callback(
            array.shape,
            jax.NamedSharding(mesh, SPECS[name][which]),
            lambda index, array=array: array[index],
        )
        for name, array in values(step).items()
    }
    key = jax.jit(lambda: jax.random.key(step), out_shardings=jax.NamedSharding(mesh, jax.P()))()
    return made | {"key": key, "step": step, "host": np.arange(step)[:1]}


def mesh(*shape):
    return jax.make_mesh(
        shape, ("x", "y")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape)
    )


def agrees(back, step):
    """Whether every shard here has the bits that were saved."""
    for name, wanted in values(step).items():
        for shard in back[name].addressable_shards:
            if (
                np.asarray(shard.data).tobytes()
                != np.ascontiguousarray(wanted[shard.index]).tobytes()
            ):
                return False
    key = np.asarray(jax.random.key_data(back["key"]).addressable_data(0))
    return (
        back["step"] == step
        and (key == np.asarray(jax.random.key_data(jax.random.key(step)))).all()
    )


def restored(checkpoints, target):
    seen, verified = [], _shards._verified

    def recording(file, name, path, piece):
        seen.append([name.partition(".")[0][:8], path])
        return verified(file, name, path, piece)

    _shards._verified = recording
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        back = checkpoints.restore(target)
    _shards._verified = verified
    same = all(back[name].sharding == target[name].sharding for name in SPECS)
    return {
        "step": back["step"],
        "bits": bool(agrees(back, back["step"]) and same),
        "read": sorted(seen),
        "warned": [
            str(warning.message) for warning in caught if warning.category is tr.CheckpointWarning
        ],
    }


def harm():
    """One bit of what the last process has written of step 2."""
    folder = _storage.location(WHERE) / "2"
    names = os.listdir(folder) if isinstance(folder, pathlib.Path) else folder.keys()
    file = folder / next(name for name in names if name.startswith(f"arrays-{COUNT - 1}"))
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 16
    file.write_bytes(raw)


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    parallel.initialize(f"127.0.0.1:{PORT}", COUNT, ME, initialization_timeout=60)
    count = len(jax.devices())
    with tr.Checkpoints(WHERE) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, tree(step, mesh(count), 0))
    whole = {"host": np.zeros(1, int)}
    came = {
        "steps": tr.Checkpoints(WHERE).steps(),
        "cast": cast(tr.Checkpoints(WHERE), tree(0, mesh(count // 2, 2), 1) | whole),
    }
    for name, target in (
        ("same", tree(0, mesh(count), 0)),
        ("other", tree(0, mesh(count // 2, 2), 1)),
        ("harmed", tree(0, mesh(count), 0)),
    ):
        if name == "harmed" and ME == 0:
            harm()
        multihost_utils.sync_global_devices(name)
        came[name] = restored(tr.Checkpoints(WHERE), target | whole)
    return came


def cast(checkpoints, target):
    """Whether shards are converted as whole arrays are."""
    half = jax.ShapeDtypeStruct((8, 3), ml_dtypes.bfloat16, sharding=target["rows"].sharding)
    back = checkpoints.restore(target | {"rows": half}, cast=True)["rows"]
    wanted = values(2)["rows"].astype(ml_dtypes.bfloat16)
    return back.dtype == half.dtype and all(
        (np.asarray(shard.data) == wanted[shard.index]).all() for shard in back.addressable_shards
    )


if __name__ == "__main__":
    print(json.dumps(main()))
