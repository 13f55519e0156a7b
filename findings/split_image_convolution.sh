#!/bin/sh
# The gradient of a convolution's kernel is multiplied by the length of an idle mesh axis.
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

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
draw = lambda seed, *shape: np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)
x, kernel, cotangent = draw(0, 4, 4, 4, 4), draw(1, 3, 3, 4, 4), draw(2, 4, 4, 4, 4)


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def f(x, cotangent):
    return jax.vjp(lambda kernel: convolved(x, kernel), kernel)[1](cotangent)[0]


one = np.asarray(jax.jit(f)(x, cotangent))
many = np.asarray(jax.jit(f, in_shardings=(NamedSharding(mesh, P(None, "a")), NamedSharding(mesh, P(None, "a"))))(x, cotangent))

print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("images are split over the axis a of a mesh of 2 x 2 devices: the kernel's gradient is twice as large")
print("one device:  ", one.ravel()[:8])
print("four devices:", many.ravel()[:8])
wrong = np.array_equal(many, 2 * one)
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
