#!/bin/sh
# With the switch jax_scan3, jax.lax.scan ignores reverse=True without an error: it runs forward.
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
from jax import lax


def sums(x):
    """The sum of the elements after each one."""
    return lax.scan(lambda carry, each: (carry + each, carry), 0.0, x, reverse=True)[1]


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("the sum of the elements after each of 0, 1, 2; right is 3, 2, 0")
found = {}
for switch in (False, True):
    jax.config.update("jax_scan3", switch)
    found[switch] = tuple(map(float, sums(jnp.arange(3.0))))
    print(f"jax_scan3={switch!s:5} {found[switch]}")
same = found == {False: (3.0, 2.0, 0.0), True: (0.0, 0.0, 1.0)}
print("as described" if same else "CHANGED: no longer as described")
sys.exit(not same)
PYTHON
