"""Checkpoints of several processes: each writes and reads its own shards, in a folder and in an
object store."""

import pathlib
import re

import jax
import numpy as np
import pytest
import s3
import sharding
from several import processes

from fnet import training as tr

SCRIPT = pathlib.Path(__file__).with_name("sharding.py")
NEEDS_S3 = pytest.mark.skipif(bool(s3.MISSING), reason=s3.REASON)


@pytest.fixture(params=["folder", pytest.param("store", marks=NEEDS_S3)])
def where(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"{request.getfixturevalue('store')}/{request.node.name}"


def test_two_processes_save_and_two_or_one_restore(where):
    """On the mesh that saved, on one with two axes, and in this process on other numbers of
    devices. Damage that only one of two processes sees is judged by both."""
    came = processes(SCRIPT, 2, where)
    common = [["arrays-0", name] for name in ("host", "key", "same", "step")]
    for me, each in enumerate(
        came
    ):  # two devices of each process: two shards of each leaf that is sharded
        assert each["steps"] == [1, 2] and each["cast"] is True
        own = [[f"arrays-{me}", name] for name in ("columns", "half", "rows")] * 2
        assert each["same"] == {"step": 2, "bits": True, "read": sorted(own + common), "warned": []}
        assert (each["other"]["step"], each["other"]["bits"]) == (2, True)
        assert (each["harmed"]["step"], each["harmed"]["bits"]) == (1, True)
    assert re.search(
        r"step 2 is damaged \(as process 1 found\) and was set aside as 2.damaged; going on from "
        r"step 1",
        came[0]["harmed"]["warned"][0],
    )
    assert re.search(
        r"step 2 is damaged \('\w+' does not have the checksum", came[1]["harmed"]["warned"][0]
    )
    checkpoints = tr.Checkpoints(where)
    assert (checkpoints.steps(), checkpoints.damaged()) == ([1], ["2.damaged"])
    restores_here(checkpoints, sharding.values(1))


def restores_here(checkpoints, wanted):
    """One process, eight devices, four, one, and a mesh of 2x4."""
    for shape in ((8,), (4,), (1,), (2, 4)):
        mesh = jax.make_mesh(
            shape,
            ("x", "y")[: len(shape)],
            axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
            devices=jax.devices()[: int(np.prod(shape))],
        )
        place = {
            name: jax.NamedSharding(mesh, jax.P(None, "x") if name == "columns" else jax.P())
            for name in wanted
        }
        like = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place[name])
            for name, array in wanted.items()
        }
        back = checkpoints.restore(
            like | {"key": jax.random.key(0), "step": 0, "host": np.zeros(1, int)}
        )
        for name, array in wanted.items():
            assert back[name].sharding == place[name], (shape, name)
            assert np.asarray(back[name]).tobytes() == array.tobytes(), (shape, name)


def test_eight_devices_to_fewer_and_another_mesh(where):
    """In one process."""
    wanted = sharding.values(1)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = {
        name: jax.device_put(
            array, jax.NamedSharding(mesh, jax.P(None, "x") if name == "columns" else jax.P())
        )
        for name, array in wanted.items()
    }
    with tr.Checkpoints(where) as checkpoints:
        checkpoints.save(
            1, spread | {"key": jax.random.key(1), "step": 1, "host": np.zeros(1, int)}
        )
        checkpoints.wait()
        restores_here(checkpoints, wanted)
