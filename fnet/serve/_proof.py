"""Proves that the rows of a batch are independent: whatever one client sends, no bit of another
client's answer changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fnet import introspect
from fnet.export import _evaluate
from fnet.export.standalone import _signature


def rows(model: Any, sizes: Mapping[str, int]) -> str | None:
    """Returns the reason why the rows of a batch are not proved to be independent at some sizes, or
    None if they are.

    The proof is about the portable program in the bundle, before `ft.tune` or a kernel changes it.
    Nothing that the manifest says is believed.
    """
    description, bundle = model.bundle.manifest["entries"][model.entry], model.bundle
    try:
        run = _evaluate.function(bundle, model.entry, sizes)
    except _signature.BundleError as error:
        return f"nothing is proved about its rows: {error}"
    constants = {name: bundle.arrays[name] for name in description["constants"]}
    weights = {name: _described(bundle.arrays[name]) for name in description["weights"]}
    inputs = [
        jax.ShapeDtypeStruct(_signature.shape(leaf, sizes), np.dtype(leaf["dtype"]))
        for _, leaf in model.inputs
    ]

    def outputs(weights: dict, inputs: list) -> list:
        return list(run({**constants, **weights}, inputs))

    report = introspect.depends(outputs, weights, inputs, axes={"rows": ((None, 0), 0)})
    verdict = report.verdict("independent", "rows", trials=False)
    return None if verdict.status == "proved" else " ".join(str(verdict).split())


def _described(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(array), array.dtype)
