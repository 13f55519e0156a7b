"""partition and combine: parts by path, gradients and optimizers of one part, and back again."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
from fnet import training as tr

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
LABEL = np.arange(6) % 3
MODEL = nn.Sequential(
    body=nn.Dense(4), norm=nn.BatchNorm(), blocks=nn.Stack(nn.Dense(4), 2), head=nn.Dense(3)
)
PARAMS, STATE = MODEL.init(jax.random.key(0), X)


def paths(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(tree)
    }


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head", {"head/kernel", "head/bias"}),
        ("head/kernel", {"head/kernel"}),
        (r".*/bias", {"body/bias", "norm/bias", "blocks/bias", "head/bias"}),
        (["blocks", "norm/scale"], {"blocks/kernel", "blocks/bias", "norm/scale"}),
        (".*", paths(PARAMS)),
    ],
    ids=range(5),
)
def test_parts_by_path(pattern, expected):
    trainable, frozen = nn.partition(PARAMS, pattern)
    assert paths(trainable) == expected and paths(frozen) == paths(PARAMS) - expected
    back = nn.combine(trainable, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(PARAMS)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(PARAMS)))
    assert jax.tree.structure(nn.combine(frozen, trainable)) == jax.tree.structure(PARAMS)


def loss(params):
    logits, _ = MODEL(params, X, state=STATE, train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABEL).mean()


@pytest.mark.exhaustive
def test_gradients_and_updates_of_one_part():
    trainable, frozen = nn.partition(PARAMS, ["head", "blocks"])
    part = lambda trainable: loss(nn.combine(trainable, frozen))
    grads = jax.jit(jax.grad(part))(trainable)
    whole = jax.grad(loss)(PARAMS)
    for name in ("head", "blocks"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            grads[name],
            whole[name],
        )
    assert paths(grads) == paths(trainable)
    with jax.numpy_dtype_promotion("standard"):
        tx = tr.optimizer("adamw", 0.1, weight_decay=0.1)
        opt_state = tx.init(trainable)
        assert sum(x.size for x in jax.tree.leaves(opt_state)) < 3 * sum(
            x.size for x in jax.tree.leaves(trainable)
        )
        updates, _ = tx.update(grads, opt_state, trainable)
        new = nn.combine(optax.apply_updates(trainable, updates), frozen)
    assert new["body"]["kernel"] is PARAMS["body"]["kernel"]
    assert (np.asarray(new["head"]["kernel"]) != np.asarray(PARAMS["head"]["kernel"])).any()


def test_inside_jit_and_of_shapes():
    twice = jax.jit(lambda params: nn.combine(*nn.partition(params, "head")))
    jax.tree.map(np.testing.assert_array_equal, twice(PARAMS), PARAMS)
    trainable, _ = nn.partition(jax.eval_shape(lambda: PARAMS), "head")
    assert trainable["head"]["kernel"].shape == (4, 3) and trainable["body"]["kernel"] is None


def test_integers_keys_and_other_containers():
    params = {
        "head": {"w": jnp.ones(2), "ids": jnp.arange(3), "key": jax.random.key(0), "none": None},
        "list": [jnp.ones(1), (jnp.zeros(1), True)],
    }
    trainable, frozen = nn.partition(params, ["head", "list/1"])
    assert paths(trainable) == {"head/w", "list/1/0"}
    assert jax.tree.structure(nn.combine(trainable, frozen)) == jax.tree.structure(params)
    grads = jax.grad(lambda t: nn.combine(t, frozen)["head"]["w"].sum())(trainable)
    assert grads["head"]["w"].tolist() == [1, 1] and grads["list"][1][0].tolist() == [0]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("haed", "the pattern 'haed' matches no parameter that has a gradient; nearest: 'head"),
        (["head", "hea"], "the pattern 'hea' matches no parameter"),
        ("ids", "the pattern 'ids' matches no parameter that has a gradient"),
        ("(", r"the pattern '\(' is not a regular expression: "),
    ],
    ids=range(4),
)
def test_patterns_that_match_nothing(pattern, text):
    with pytest.raises(ValueError, match="partition: " + text):
        nn.partition(PARAMS | {"ids": jnp.arange(3)}, pattern)


def test_parts_that_do_not_belong_together():
    trainable, _ = nn.partition(PARAMS, "head")
    with pytest.raises(
        ValueError, match=r"combine: 'head/bias' is in 2 of the parts: pass the two trees"
    ):
        nn.combine(trainable, PARAMS)
    with pytest.raises(
        ValueError, match="combine: expected trees of one structure, got\n  PyTreeDef"
    ):
        nn.combine(trainable, {"head": None})


@pytest.mark.exhaustive
def test_the_program_on_the_page_trains_one_part(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "freeze.md").read_text()
    program = re.search(r"(state = tr.TrainState.create\(trainable.*?)```", page, re.S)[1]
    trainable, frozen = nn.partition(PARAMS, "head")
    names = {
        "jax": jax,
        "nn": nn,
        "optax": optax,
        "tr": tr,
        "model": MODEL,
        "variables": STATE,
        "trainable": trainable,
        "frozen": frozen,
        "tx": optax.sgd(0.1),
    }
    exec(program, names)
    batches = tr.Batches({"x": X, "label": LABEL.astype(np.int32)}, 6, shuffle=False)
    tr.fit(
        names["step"],
        names["state"],
        batches,
        steps=2,
        workdir=tmp_path,
        config={},
        tensorboard=False,
    )
    snapshot = tr.load(tmp_path)
    params = nn.combine(snapshot.params, snapshot.state["frozen"])
    assert float(loss(params)) < float(loss(PARAMS))
    np.testing.assert_array_equal(params["body"]["kernel"], PARAMS["body"]["kernel"])
    assert not np.array_equal(snapshot.state["model"]["norm"]["mean"], STATE["norm"]["mean"])
