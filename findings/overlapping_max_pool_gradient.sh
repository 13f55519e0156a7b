#!/bin/sh
# The gradient of max pooling with overlapping windows is wrong where images are split, also on a mesh of one axis.
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
x = np.random.default_rng(0).permutation(64).reshape(1, 8, 8, 1).astype(np.float32)


def f(x):
    pooled = lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return jax.grad(lambda x: pooled(x).sum())(x)


one = np.asarray(jax.jit(f)(x))
many = np.asarray(jax.jit(f, in_shardings=(NamedSharding(mesh, P(None, "a"))))(x))

print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("images are split over four devices: the gradient is another one")
print("one device:  ", one.ravel()[:8])
print("four devices:", many.ravel()[:8])
wrong = not np.array_equal(many, one)
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
