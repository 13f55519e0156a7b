"""Encoders and vision models of transformers and timm: random configurations, altered ones; verify_pretrained.py."""

import tempfile

import encoder_families as families
import numpy as np
from verifying import check, needed

from fnet.models import pretrained

LIMIT = 1e-5


def one(name, options, folder):
    """(difference of fnet's outputs, whether the saved folder has bit-equal outputs)."""
    twin, _ = families.made(name, options, folder)
    inputs = families.inputs_of(families.config_of(folder))
    model, params, state = pretrained.load(folder)
    worst = families.difference(families.ours(model, params, state, inputs), families.outputs(twin, inputs), inputs)
    with tempfile.TemporaryDirectory() as back:
        pretrained.save(model, params, state, back, names=pretrained.names_of(model, folder))
        first, second = (families.outputs(families.loaded(name, each), inputs, double=False) for each in (folder, back))
    return worst, all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@check
def encoder_families():
    """Small random configurations of encoders and vision models, written by transformers: outputs, and saved back."""
    needed("torch", "PyTorch"), needed("transformers", "transformers")
    for family, cases in families.CASES.items():
        worst, exact = 0.0, True
        for name, options in cases:
            with tempfile.TemporaryDirectory() as folder:
                difference, same = one(name, options, folder)
                assert difference < LIMIT and same, f"{name} {options}: {difference:.1e}, saved back equal: {same}"
            worst, exact = max(worst, difference), exact and same
        yield f"{family}: {len(cases)} configurations, within {worst:.1e}; saved back, equal bit for bit"


@check
def altered_encoders():
    """Altered configurations of encoders and vision models: equal outputs, or an error."""
    needed("torch", "PyTorch"), needed("transformers", "transformers")
    for family, ((name, options), changes) in families.ALTERED.items():
        equal, refused, skipped = 0, [], 0
        for change in changes:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    families.made(name, {**options, **change}, folder)
                except (AssertionError, TypeError, ValueError, KeyError, RuntimeError, ZeroDivisionError) as error:
                    skipped += 1
                    yield f"    {family} {change}: transformers does not make it ({type(error).__name__})"
                    continue
                try:
                    pretrained.load(folder)
                except ValueError:
                    refused.append(", ".join(f"{key}={value}" for key, value in change.items()))
                    continue
                difference, same = one(name, {**options, **change}, folder)
                assert difference < LIMIT and same, f"{name} {change}: {difference:.1e}, {same}"
                equal += 1
        yield f"{family}: {equal} equal, {len(refused)} refused ({'; '.join(refused)}); {skipped} not made"
    for name, options in families.REFUSED:
        with tempfile.TemporaryDirectory() as folder:
            families.made(name, options, folder)
            try:
                pretrained.load(folder)
            except ValueError:
                continue
            raise AssertionError(f"{name} is not refused")
    yield f"refused: {', '.join(name for name, _ in families.REFUSED)}"
