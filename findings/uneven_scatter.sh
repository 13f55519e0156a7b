#!/bin/sh
# Additions at indices (x.at[i].add, jnp.bincount, the gradient of an embedding) count an element that does not
# exist, if the devices do not divide the number of indices, and a mesh axis is idle.
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
split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
tokens = np.array([4, 5, 1, 2, 7, 4, 2, 6], np.int32)
table = np.ones((8, 2), np.float32)


def counts(tokens):
    return jnp.bincount(tokens[1:], length=8)


def gradient(tokens, table):
    return jax.grad(lambda table: table[tokens[1:]].sum())(table)


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("8 tokens are split over the axis a of a mesh of 2 x 2 devices. The last 7 of them do not contain a 0:")
wrong = []
for name, f, args, places in (
        ("how often each occurs", counts, (tokens,), (split,)),
        ("the gradient of an embedding", gradient, (tokens, table), (split, whole))):
    one = np.asarray(jax.jit(f)(*args))
    many = np.asarray(jax.jit(f, in_shardings=places)(*args))
    wrong.append(not one[0].any() and many[0].all() and np.array_equal(many[1:], one[1:]))
    print(name)
    print("one device:  ", one.T.tolist())
    print("four devices:", many.T.tolist())
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
