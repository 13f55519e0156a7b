#!/bin/sh
# jax.experimental.multihost_utils gathers nothing from processes with different numbers of devices, although arrays
# and programs over all of these devices work.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
version=$("$python" -c 'import sys; print("0.12.0" if sys.version_info >= (3, 12) else "0.10.2")')
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version"
cd "$folder"
cat > process.py <<'PYTHON'
import os
import sys

port, me = sys.argv[1], int(sys.argv[2])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={me + 1}"
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
x = jax.make_array_from_callback((3,), rows, lambda at: np.arange(3.0, dtype=np.float32)[at])
total = float(jax.jit(lambda x: x.sum())(x))
try:
    gathered = str(multihost_utils.process_allgather(np.int32(me)))
except ValueError as error:
    gathered = f"ValueError: {error}"
described = total == 3.0 and "cannot reshape array of size 3" in gathered
if me == 0:
    print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, two processes with 1 and 2 devices")
    print("process_allgather lays out all devices as an array of processes x local devices")
    print(f"the sum of [0, 1, 2] over the three devices: {total}")
    print(f"process_allgather: {gathered}")
    print("as described" if described else "CHANGED: no longer as described")
sys.stdout.flush()
os._exit(not described)  # without the barrier at the end, which the other process may have left
PYTHON
port=$(environment/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
environment/bin/python process.py "$port" 1 > /dev/null 2>&1 &
environment/bin/python process.py "$port" 0
