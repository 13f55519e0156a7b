"""The training steps of the notebooks compile for TPUs that are not attached (make pods)."""

import importlib.util
import json
import pathlib

import jax
import matplotlib
import pytest

from fnet import hardware, parallel, training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: make pods"
)
FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"


def cells(name, *ids):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["id"] in ids]


def compiled(step, state, batch, slice):
    """The plan of a step for four chips, or for one if the batch has one row."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    rows = jax.tree.leaves(batch)[0].shape[0]
    init = lambda key: jax.tree.map(jax.numpy.zeros_like, state)
    return parallel.plan(
        step, init, batch, devices=f"{slice}:2x2" if rows % 4 == 0 else f"{slice}:1x1"
    )


def plans(name, slice, monkeypatch):
    """Runs the cells up to the steps with the policy of the chip, and compiles each step."""
    policy, found, names = hardware.policy("TPU " + slice), [], {}
    monkeypatch.setattr(hardware, "policy", lambda *_, **__: policy)

    def fit(step, state, batches, **options):
        found.append(compiled(step, state, batches(0), slice))
        return state

    monkeypatch.setattr(training, "fit", fit)
    matplotlib.use("agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if name == "quickstart":
            for code in cells(name, "cell03", "cell05", "cell07", "cell09", "cell12"):
                exec(code, names)
        else:
            for code in cells(name, "cell03", "cell05", "cell07", "cell09", "cell11"):
                exec(code, names)
            found.append(compiled(names["step"], names["state"], names["batches"](0), slice))
    return found


@pytest.mark.parametrize("slice", ["v5e", "v6e"])
@pytest.mark.parametrize("name", ["quickstart", "tpu_pod_training"])
def test_the_steps_compile(name, slice, monkeypatch):
    found = plans(name, slice, monkeypatch)
    assert len(found) == (2 if name == "quickstart" else 1)
    for plan in found:
        assert plan.chosen.compiled and plan.chosen.compiled.peak
