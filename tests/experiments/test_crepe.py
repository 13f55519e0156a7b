"""CREPE: its sizes, its input, and torchcrepe's names. tests/zoo.py runs it through the transforms, and
tests/reference/verify_encoders.py compares it with torchcrepe."""

import pathlib
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from fnet import layers as nn
from fnet.models import pretrained

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))
from crepe import Crepe


@pytest.mark.parametrize(("preset", "count"), [("crepe_full", 22_239_976), ("crepe_tiny", 486_552)])
def test_published_parameter_counts(preset, count):
    model = Crepe.preset(preset)
    assert nn.count_parameters(model.spec(model.example()).params) == count


def test_a_whole_window_is_needed():
    with pytest.raises(
        ValueError, match=r"Crepe: expected sound \[batch, 1024\], 64 ms at 16 kHz; got \(1, 512\)"
    ):
        Crepe(1).spec(jax.ShapeDtypeStruct((1, 512), "float32"))


def test_the_names_of_torchcrepe(tmp_path):
    model, rng = Crepe(1), np.random.default_rng(0)
    spec = model.spec(model.example())
    params, state = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype("float32"), (*spec,)
    )
    file = pretrained.save(model, params, state, tmp_path / "crepe.safetensors")
    arrays = load_file(file)
    assert len(arrays) == 44 and arrays["conv1.weight"].shape == (32, 1, 512, 1)
    np.testing.assert_array_equal(arrays["conv6_BN.running_var"], state["norm6"]["var"])
    np.testing.assert_array_equal(arrays["classifier.weight"], params["head"]["kernel"].T)
    jax.tree.map(np.testing.assert_array_equal, pretrained.load(model, file), (params, state))
