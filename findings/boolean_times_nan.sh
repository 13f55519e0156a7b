#!/bin/sh
# A boolean mask times NaN is NaN in JAX without jit, and 0 with it: XLA turns the product with a converted boolean into
# a selection. A mask made by jnp.where, or of floats, stays a product, so only some masks hide a NaN, and only under jit.
set -eu
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jax 0.10.2 needs Python 3.11 or newer: set PYTHON")'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
cd "$folder"
environment/bin/python - <<'PYTHON'
import math
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import jaxlib

gate, values = jnp.array([1.0, -1.0]), jnp.array([2.0, math.nan])
masked = {
    "converted": lambda x, y: (x > 0).astype(jnp.float32) * y,
    "in a sum of products": lambda x, y: jnp.einsum("i,i->i", (x > 0).astype(jnp.float32), y),
    "by jnp.where": lambda x, y: jnp.where(x > 0, 1.0, 0.0) * y,
    "of floats": lambda x, y: jnp.maximum(jnp.sign(x), 0.0) * y,
}
print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("the second element of a mask [1, 0] times [2, NaN]; IEEE 754 says NaN")
found = {}
for name, f in masked.items():
    eager, jitted = (float(each(gate, values)[1]) for each in (f, jax.jit(f)))
    found[name] = math.isnan(eager), math.isnan(jitted)
    print(f"{name:20} without jit {eager}, with jit {jitted}")
same = found == {
    "converted": (True, False),
    "in a sum of products": (True, False),
    "by jnp.where": (True, True),
    "of floats": (True, True),
}
print("as described" if same else "CHANGED: no longer as described")
sys.exit(not same)
PYTHON
