#!/bin/sh
# JAX takes 64-bit indices modulo 2^32, also where indices out of bounds should be dropped, clipped, or filled with NaN.
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
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

jax.config.update("jax_enable_x64", True)
x = jnp.array([10.0, 11.0, 12.0, 13.0, 14.0])
near, far = jnp.array([7]), jnp.array([2**32 + 1])

print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("of five elements, the index 2^32 + 1 is taken for 1, unlike the index 7")
wrong = []
for name, f in (("x.at[i].get(mode='fill')", lambda i: x.at[i].get(mode="fill")),
                ("x.at[i].get(mode='clip')", lambda i: x.at[i].get(mode="clip")),
                ("x.at[i].set(0.0, mode='drop')", lambda i: x.at[i].set(0.0, mode="drop")),
                ("jnp.take(x, i)", lambda i: jnp.take(x, i)),
                ("jax.ops.segment_sum(ones, i, num_segments=5)",
                 lambda i: jax.ops.segment_sum(jnp.ones(1), i, num_segments=5))):
    beyond, inside, taken = (np.asarray(f(i)) for i in (near, jnp.array([1]), far))
    wrong.append(np.array_equal(taken, inside) and not np.array_equal(taken, beyond))
    print(name)
    print("i = [7]:       ", beyond)
    print("i = [2^32 + 1]:", taken)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
