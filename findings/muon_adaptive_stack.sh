#!/bin/sh
# optax.contrib.muon(adaptive=True) multiplies all matrices of a stack by one number, the sum of all their norms.
set -eu
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/environment"
version=$("$python" -c 'import sys; print("0.12.0" if sys.version_info >= (3, 12) else "0.10.2")')
"$folder/environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    "jax==$version" "jaxlib==$version" "optax==0.2.8"
cd "$folder"
environment/bin/python - <<'PYTHON'
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jaxlib
import numpy as np
import optax

gradients = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
gradients *= np.array([1, 10, 100], np.float32)[:, None, None]      # of three layers, as jax.lax.scan stacks them


def update(gradient, adaptive):
    """Returns the first update of a matrix, or of each matrix of a stack."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=gradient.ndim - 2, output_axis=gradient.ndim - 1)
    optimizer = optax.contrib.muon(1.0, muon_weight_dimension_numbers=axes, adaptive=adaptive)
    weights = np.zeros_like(gradient)
    return np.asarray(optimizer.update(gradient, optimizer.init(weights), weights)[0])


print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, optax {optax.__version__}")
print("three layers with gradients of the sizes 1, 10 and 100: with adaptive=True, and only then, each layer's update")
print("is another one in a stack of the layers than if each layer is an array")
size = lambda x: np.linalg.norm(x, axis=(-2, -1))
sizes = {}
for adaptive in False, True:
    sizes[adaptive] = size(update(gradients, adaptive)), size(np.stack([update(g, adaptive) for g in gradients]))
    print(f"adaptive={adaptive}, the sizes of the updates")
    print("three arrays:", sizes[adaptive][1])
    print("one stack:   ", sizes[adaptive][0])
ratio = sizes[True][0] / sizes[True][1]
wrong = np.allclose(*sizes[False], rtol=1e-3) and ratio[0] > 50 and ratio[1] > 5
print("as described" if wrong else "CHANGED: no longer as described")
sys.exit(not wrong)
PYTHON
