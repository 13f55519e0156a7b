"""Writes torch_<family>.npz: what PyTorch computes for every case of torch_cases.py, forward and
backward.

    python -m venv torch-env && torch-env/bin/pip install torch==2.13.0 numpy
    torch-env/bin/python tests/reference/make_torch_fixtures.py [family ...]

The tests read the files alone. Parameters, inputs and cotangents are drawn in float32 from the
case's name, PyTorch computes in float64, and its results are rounded to float32: what a test then
sees is fnet's own rounding.
"""

import json
import pathlib
import sys
import zlib

import numpy as np
import torch
from torch_cases import FAMILIES

TORCH = "2.13.0"


def draws(seed):
    """float32 numbers, standard normal, as float64, from the text `seed` and nothing else."""
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    return lambda shape: torch.from_numpy(
        generator.standard_normal(shape, np.float32).astype(np.float64)
    )


def record(case):
    """The arrays of one case by name: config, params/*, inputs/*, outputs/*, cotangents/*,
    gradients/*."""
    draw = draws(case.name)
    params, inputs = (
        {name: rounded(make(draw)) for name, make in given.items()}
        for given in (case.params, case.inputs)
    )
    leaves = {f"params/{name}": array for name, array in params.items()}
    leaves |= {f"inputs/{name}": array for name, array in inputs.items()}
    varied = {
        name: array.requires_grad_() for name, array in leaves.items() if array.is_floating_point()
    }

    outputs = case.twin(params, **inputs, **case.twin_options)
    moved = {name: y for name, y in outputs.items() if y.requires_grad}
    cotangents = {name: draw(y.shape) for name, y in moved.items()}
    gradients = dict(
        zip(
            varied,
            torch.autograd.grad(
                list(moved.values()), list(varied.values()), list(cotangents.values())
            ),
        )
    )
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        zero = bool(gradient.abs().max() < 1e-9 * largest)
        assert zero == (name in case.zero), (
            f"{case.name}: the gradient of {name} is {'' if zero else 'not '}zero"
        )

    config = {
        "layer": case.layer,
        "options": case.options,
        "call": case.call,
        "zero": list(case.zero),
    }
    arrays = {"config": np.array(json.dumps(config)), **leaves}
    for kind, tree in ("outputs", outputs), ("cotangents", cotangents), ("gradients", gradients):
        arrays |= {f"{kind}/{name}": array for name, array in tree.items()}
    return {f"{case.name}/{name}": portable(array) for name, array in arrays.items()}


def rounded(array):
    """The numbers that float32 holds: what the fixture stores is what PyTorch saw."""
    return array.float().double() if array.is_floating_point() else array


def portable(array):
    if not isinstance(array, torch.Tensor):
        return array
    array = array.detach().numpy()
    return array.astype({"f": np.float32, "i": np.int32, "b": np.bool_}[array.dtype.kind])


def main(families):
    if torch.__version__.split("+")[0] != TORCH:
        sys.exit(f"the fixtures come from torch=={TORCH}; this is {torch.__version__}")
    for family in families or FAMILIES:
        path = pathlib.Path(__file__).with_name(f"torch_{family}.npz")
        cases = FAMILIES[family]()
        arrays = {}
        for case in cases:
            arrays |= record(case)
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {len(cases)} cases, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
