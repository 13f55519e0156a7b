#!/bin/sh
# jax 0.10.2: x.at[:, 0].set(0.0) changes another column, too, if a constraint inside of the program splits the columns
# of x over two devices. With jax 0.12.0 it does not.
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

mesh = Mesh(np.array(jax.devices()[:2]), ("a",), axis_types=(AxisType.Auto,))
place = lambda *axes: NamedSharding(mesh, P(*axes))
x = np.arange(1, 33, dtype=np.float32).reshape(4, 8)


def column(x):
    return x.at[:, 0].set(0.0)


def divided(x):
    return column(lax.with_sharding_constraint(x, place(None, "a")))


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
one = np.asarray(jax.jit(column)(x))
many = np.asarray(jax.jit(divided, in_shardings=place())(x))
print("x.at[:, 0].set(0.0), if a constraint splits the columns of x over two devices")
print("one device: ", one.tolist())
print("two devices:", many.tolist())
wrong = not np.array_equal(many, one) and not many[:, 0].any()
described = wrong == (jax.__version_info__ < (0, 12))
print("as described" if described else "CHANGED: no longer as described")
sys.exit(not described)
PYTHON
