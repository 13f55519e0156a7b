"""MLP and CNN: their shapes, their names, and against the same networks in plain jnp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import models

KEY = jax.random.key(0)


def paths(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


@pytest.mark.exhaustive
def test_mlp_is_the_network_written_by_hand():
    model, x = models.MLP((7, 5, 3)), jax.random.normal(KEY, (4, 2, 3))
    params, state = model.init(KEY, x)
    assert state == {}
    assert paths(params) == {
        "fc0/kernel": (6, 7),
        "fc0/bias": (7,),
        "fc1/kernel": (7, 5),
        "fc1/bias": (5,),
        "head/kernel": (5, 3),
        "head/bias": (3,),
    }
    params = jax.tree.map(lambda p: p + 0.1, params)
    h = x.reshape(4, 6)
    for name in ("fc0", "fc1"):
        h = jax.nn.relu(h @ params[name]["kernel"] + params[name]["bias"][None])
    expected = h @ params["head"]["kernel"] + params["head"]["bias"][None]
    np.testing.assert_allclose(model(params, x), expected, rtol=1e-6)


@pytest.mark.exhaustive
def test_cnn_names_and_shapes():
    model = models.CNN(10, (4, 8), (1, 2), stem=(5, 2), dropout=0.1)
    x = jax.random.normal(KEY, (2, 16, 16, 3))
    params, state = model.init(KEY, x)
    assert {k: v for k, v in paths(params).items() if "norm" not in k} == {
        "stage0/block0/conv/kernel": (5, 5, 3, 4),
        "stage1/block0/conv/kernel": (3, 3, 4, 8),
        "stage1/block1/conv/kernel": (3, 3, 8, 8),
        "head/kernel": (8, 10),
        "head/bias": (10,),
    }
    assert paths(state)["stage1/block1/norm/mean"] == (8,)
    logits, new = model(params, x, state=state, key=KEY, train=True)
    assert logits.shape == (2, 10)
    assert paths(new) == paths(state)
    assert not np.allclose(new["stage0"]["block0"]["norm"]["mean"], 0)
    again = model(params, x, state=state)[0]
    np.testing.assert_array_equal(again, model(params, x, state=state)[0])


@pytest.mark.exhaustive
def test_cnn_against_plain_jax():
    model, x = models.CNN(3, (4, 6), 1), jax.random.normal(KEY, (2, 8, 8, 1))
    params, state = model.init(KEY, x)
    state = jax.tree.map(lambda s: s + 0.3, state)
    h = x
    for i in range(2):
        block, stats = params[f"stage{i}"]["block0"], state[f"stage{i}"]["block0"]["norm"]
        h = jax.lax.conv_general_dilated(
            h, block["conv"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        row = lambda a: a[None, None, None]
        h = (h - row(stats["mean"])) / jnp.sqrt(row(stats["var"]) + 1e-5)
        h = jax.nn.relu(h * row(block["norm"]["scale"]) + row(block["norm"]["bias"]))
        if i == 0:
            h = h.reshape(2, 4, 2, 4, 2, 4).max((2, 4))
    expected = h.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"][None]
    np.testing.assert_allclose(model(params, x, state=state)[0], expected, rtol=2e-5, atol=1e-6)


def test_cnn_wants_as_many_depths_as_widths():
    with pytest.raises(
        ValueError, match=r"CNN: expected one number of convs for each of 2 widths; got \(2,\)"
    ):
        models.CNN(3, (4, 8), (2,)).init(KEY, jnp.ones((1, 8, 8, 1)))
