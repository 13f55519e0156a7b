#!/bin/sh
# jax.jit returns the result for 0.0 also for -0.0, and that for (1,) also for (1.0,), because it compares static
# arguments with ==. So do operations that take a fill value.
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

x = jnp.arange(2)
filled = jax.jit(lambda x, value: jnp.full(x.shape, value), static_argnums=1)
scaled = jax.jit(lambda x, scale: x * scale[0], static_argnums=1)


def taken(x, value):
    """An operation of JAX with the value as its parameter, without a jit."""
    return x.at[jnp.array([7, 8])].get(mode="fill", fill_value=value)


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}")
print("of two static arguments that are equal in Python, the second gets the result of the first")
wrong = []
for name, f, x, first, second in (
        ("jnp.full(2, value)", filled, x, 0.0, -0.0),
        ("integers * scale[0]", scaled, x, (1,), (1.0,)),
        ("x.at[beyond].get(mode='fill', fill_value=value)", taken, x.astype(jnp.float32), 0.0, -0.0)):
    jax.clear_caches()
    wanted = np.asarray(f(x, second))
    jax.clear_caches()
    f(x, first)
    y = np.asarray(f(x, second))
    wrong.append(y.dtype != wanted.dtype or not np.array_equal(np.signbit(y), np.signbit(wanted)))
    print(name)
    print(f"{second}:".ljust(20), wanted, wanted.dtype)
    print(f"{second}, after {first}:".ljust(20), y, y.dtype)
print("as described" if all(wrong) else "CHANGED: no longer as described")
sys.exit(not all(wrong))
PYTHON
