#!/bin/sh
# With the switch jax_scan3, a jitted lax.scan returns its initial carry unless something reads what it stacks: JAX
# removes the loop as one whose results nobody reads.
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
import jaxlib
from jax import lax


def doubled(x):
    return lax.scan(lambda carry, _: (2 * carry, None), x, length=3)[0]


def stacked(x):
    return lax.scan(lambda carry, _: (2 * carry, carry), x, length=3)


def counted(x):
    return lax.fori_loop(0, 3, lambda i, carry: 2 * carry, x)


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("three doublings of 1.0; right is 8.0")
found = {}
for switch in (False, True):
    jax.config.update("jax_scan3", switch)
    for f in (doubled, stacked, counted):
        eager, jitted = (float(jax.tree.leaves(each(1.0))[0]) for each in (f, jax.jit(f)))
        found[f.__name__, switch] = eager, jitted
        print(f"jax_scan3={switch!s:5} {f.__name__:8} eager {eager}, jit {jitted}")
wrong = (8.0, 1.0)
same = (
    all(found[name, False] == (8.0, 8.0) for name in ("doubled", "stacked", "counted"))
    and found["doubled", True] == found["counted", True] == wrong
    and found["stacked", True] == (8.0, 8.0)
)
print("as described" if same else "CHANGED: no longer as described")
sys.exit(not same)
PYTHON
