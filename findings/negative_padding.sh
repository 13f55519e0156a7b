#!/bin/sh
# lax.pad with a negative width returns its operand unshifted, and the gradients of jnp.cumprod and of
# lax.associative_scan, which contain it, are wrong, if the result is split over two devices.
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
split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
x, cotangent = np.array([1, 2, -1, 0.5, 2, -2, 1, 0.5], np.float32), np.arange(1, 9, dtype=np.float32)


def shifted(x):
    return lax.pad(x, np.float32(0), ((-1, 1, 0),))


def gradient(x, cotangent):
    return jax.vjp(jnp.cumprod, x)[1](cotangent)[0]


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
wrong = []
for name, f, args, places, result in (
        ("x shifted by one element, the result is split", shifted, (x,), (whole,), split),
        ("the gradient of jnp.cumprod, x is split", gradient, (x, cotangent), (split, whole), None)):
    one = np.asarray(jax.jit(f)(*args))
    many = np.asarray(jax.jit(f, in_shardings=places, out_shardings=result)(*args))
    wrong.append(not np.allclose(many, one))
    print(name)
    print("one device: ", one)
    print("two devices:", many)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
