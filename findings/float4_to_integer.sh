#!/bin/sh
# A float4_e2m1fn of 6.0, its largest number, becomes the largest integer when compiled code converts it: 127 for int8,
# 2147483647 for int32. As a constant of the program, or by way of float32, it becomes 6.
set -eu
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jax 0.12 needs Python 3.12 or newer: set PYTHON")'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.12.0 jaxlib==0.12.0
cd "$folder"
environment/bin/python - <<'PYTHON'
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import jaxlib

numbers = jnp.array([0.5, 4.0, 6.0, -6.0]).astype(jnp.float4_e2m1fn)
direct = jax.jit(lambda x: x.astype(jnp.int32))
detour = jax.jit(lambda x: x.astype(jnp.float32).astype(jnp.int32))
constant = jax.jit(lambda: numbers.astype(jnp.int32))
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("[0.5, 4, 6, -6] of float4_e2m1fn as int32")
found = {
    "converted": direct(numbers).tolist(),
    "by way of float32": detour(numbers).tolist(),
    "as a constant": constant().tolist(),
}
for name, values in found.items():
    print(f"{name:18} {values}")
same = found["converted"][2] == 2**31 - 1 and found["by way of float32"] == [0, 4, 6, -6]
print("as described" if same else "CHANGED: no longer as described")
sys.exit(not same)
PYTHON
