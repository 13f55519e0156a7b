"""One of several processes that write Orbax's checkpoints and read them: what test_orbax.py starts.

    python tests/training/orbax_processes.py PORT PROCESS COUNT FOLDER

Orbax writes FOLDER/orbax and FOLDER/v1, and `to_orbax` FOLDER/ours. Prints as JSON what was read.
"""

import json
import os
import pathlib
import sys

if __name__ == "__main__":
    PORT, ME, COUNT, WHERE = *map(int, sys.argv[1:4]), sys.argv[4]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("FNET_TEST_XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    )

import jax
import numpy as np
from jax.experimental import multihost_utils

from fnet import parallel
from fnet import training as tr


def values():
    rng = np.random.default_rng(0)
    return {
        "rows": rng.normal(size=(8, 3)).astype(np.float32),
        "columns": rng.integers(0, 99, (2, 8)).astype(np.int32),
        "same": np.arange(3, dtype=np.float32),
    }


def main():
    import orbax.checkpoint as ocp
    from orbax.checkpoint import v1

    parallel.initialize(f"127.0.0.1:{PORT}", COUNT, ME)
    folder = pathlib.Path(WHERE)
    mesh = jax.make_mesh((2 * COUNT,), ("x",))
    specs = {"rows": jax.P("x"), "columns": jax.P(None, "x"), "same": jax.P()}
    tree = {
        name: jax.make_array_from_callback(
            array.shape,
            jax.NamedSharding(mesh, specs[name]),
            lambda index, array=array: array[index],
        )
        for name, array in values().items()
    }
    tree["key"] = jax.jit(
        lambda: jax.random.key(3), out_shardings=jax.NamedSharding(mesh, jax.P())
    )()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "orbax", args=ocp.args.PyTreeSave(tree))
    v1.save(folder / "v1", tree)
    tr.to_orbax(tree, folder / "ours")

    right, plainly, shards = [], [], set()
    turned = jax.ShapeDtypeStruct(
        (8, 3), np.float32, sharding=jax.NamedSharding(mesh, jax.P(("x",)))
    )
    for name in ("orbax", "v1", "ours"):
        read = tr.from_orbax(folder / name, like={**tree, "rows": turned})
        shards.add(len(read["rows"].addressable_shards))
        for leaf, array in values().items():
            for shard in read[leaf].addressable_shards:
                right.append(np.array_equal(np.asarray(shard.data), array[shard.index]))
        data = jax.jit(jax.random.key_data)(read["key"])
        right.append(np.asarray(data.addressable_data(0)).tolist() == [0, 3])
        plain = tr.from_orbax(folder / name)
        plainly += [np.array_equal(plain[leaf], array) for leaf, array in values().items()]

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(folder / "harmed", args=ocp.args.PyTreeSave(tree))
    if ME == 0:
        (folder / "harmed" / "rows" / "3.0").unlink()  # which only process 1 needs
    multihost_utils.sync_global_devices("harmed")
    try:
        tr.from_orbax(folder / "harmed", like=tree)
        harmed = "read"
    except tr.CheckpointError as error:
        harmed = str(error).removeprefix(f"{folder / 'harmed'}: ")
    print(
        json.dumps(
            {
                "read": all(right),
                "shards": max(shards),
                "plain": all(plainly),
                "harmed": harmed.split(" (")[0],
            }
        )
    )


if __name__ == "__main__":
    main()
