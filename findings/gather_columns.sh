#!/bin/sh
# x[:, i] has the elements of other columns, if the columns of x are split over one axis of a mesh of 2 x 4 devices, the
# rows of the result over the same axis, and its columns over the other.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
version=$("$python" -c 'import sys; print("0.12.0" if sys.version_info >= (3, 12) else "0.10.2")')
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version"
cd "$folder"
environment/bin/python - <<'PYTHON'
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
place = lambda *axes: NamedSharding(mesh, P(*axes))
x = np.arange(1, 129, dtype=np.float32).reshape(8, 16)
i = np.array([3, 0, 9, 5, 1, 2, 7, 4], np.int32)


def columns(x, i):
    return x[:, i]


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
one = np.asarray(jax.jit(columns)(x, i))
many = np.asarray(jax.jit(columns, in_shardings=(place(None, "a"), place()), out_shardings=place("a", "b"))(x, i))
print("x[:, i] on 2 x 4 devices, first row")
print("one device:   ", one[0])
print("eight devices:", many[0])
wrong = not np.allclose(many, one)
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
