#!/bin/sh
# The gradient of a strided slice is wrong where its axis is split, also on a mesh of one axis.
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

mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
x, cotangent = np.arange(12, dtype=np.float32), np.arange(1, 7, dtype=np.float32)


def f(x, cotangent):
    return jax.vjp(lambda x: x[1::2], x)[1](cotangent)[0]    # lax.pad with zeros between the elements


one = np.asarray(jax.jit(f)(x, cotangent))
split = NamedSharding(mesh, P("a"))
many = np.asarray(jax.jit(f, in_shardings=(split, None), out_shardings=split)(x, cotangent))

print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("the gradient is split over four devices: some of its elements are at other indices")
print("one device:  ", one.ravel()[:8])
print("four devices:", many.ravel()[:8])
wrong = not np.array_equal(many, one)
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
