"""Pruning by masks: the schedule and the selection against NumPy, and training with checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import compress
from fnet import training as tr

DRAW = np.random.default_rng(0)
PARAMS = {
    "a": {"kernel": DRAW.normal(size=(6, 5)), "bias": DRAW.normal(size=5)},
    "b": {"kernel": 3 * DRAW.normal(size=(5, 4))},
    "c": {"kernel": DRAW.normal(size=(2, 2))},
}
PARAMS = jax.tree.map(np.float32, PARAMS)


def run(tx, steps):
    """The parameters after each update with fixed gradients."""
    params, state, grads = PARAMS, tx.init(PARAMS), jax.tree.map(lambda x: np.cos(7 * x), PARAMS)
    update, history = jax.jit(tx.update), []
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        history.append(jax.tree.map(np.asarray, params))
    return history


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("jointly", [False, True])
def test_selection_and_schedule_are_those_of_numpy(jointly):
    rules, begin, end, every = (
        {"a": 0.6, ".*/kernel": 0.3} if not jointly else {"a|b": 0.5},
        2,
        9,
        3,
    )
    history = run(
        optax.chain(
            optax.sgd(0.05),
            compress.prune(rules, begin=begin, end=end, every=every, jointly=jointly),
        ),
        12,
    )
    want = jax.tree.map(np.copy, PARAMS)
    grads = jax.tree.map(lambda x: np.cos(7 * x), PARAMS)
    dead = {name: np.zeros(want[name]["kernel"].shape, bool) for name in "abc"}
    for t, got in enumerate(history):
        for name in "abc":
            for leaf in want[name]:
                want[name][leaf] = want[name][leaf] - np.float32(0.05) * grads[name][leaf]
        for name in "abc":
            want[name]["kernel"][dead[name]] = 0
        if begin <= t <= end and ((t - begin) % every == 0 or t == end):
            share = 1 - (1 - (t - begin) / (end - begin)) ** 3
            groups = [("ab", 0.5)] if jointly else [("a", 0.6), ("b", 0.3), ("c", 0.3)]
            for names, sparsity in groups:
                sizes = np.concatenate([np.abs(want[name]["kernel"]).ravel() for name in names])
                count = round(share * sparsity * sizes.size)
                lowest = np.zeros(sizes.size, bool)
                lowest[np.argsort(sizes, kind="stable")[:count]] = True
                for name in names:
                    dead[name] = lowest[: dead[name].size].reshape(dead[name].shape)
                    lowest = lowest[dead[name].size :]
                    want[name]["kernel"][dead[name]] = 0
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
        assert all((got[name]["kernel"] == 0).sum() == dead[name].sum() for name in "abc")
    zeros = [round(float((history[-1][name]["kernel"] == 0).mean()), 2) for name in "abc"]
    assert zeros == [0.6, 0.3, 0.25] if not jointly else zeros[0] > 0.5 > zeros[1] > 0 == zeros[2]


@pytest.mark.exhaustive
def test_in_fit_with_checkpoints_a_resumed_run_is_the_same(tmp_path):
    tx = optax.chain(optax.adam(0.05), compress.prune({".*": 0.5}, begin=1, end=4, every=2))
    data = {"x": DRAW.normal(size=(32, 6)).astype(np.float32), "y": DRAW.integers(0, 4, 32)}

    def step(state, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["a"]["kernel"] + params["a"]["bias"][None])
            return optax.softmax_cross_entropy_with_integer_labels(
                hidden @ params["b"]["kernel"], batch["y"]
            ).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    def train(workdir, steps):
        params = {name: PARAMS[name] for name in "ab"}
        return tr.fit(
            step,
            tr.TrainState.create(params, tx),
            tr.Batches(data, batch_size=8, seed=0),
            steps=steps,
            workdir=workdir,
            save_every=3,
            tensorboard=False,
            config={},
        )

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    parts = train(tmp_path / "parts", 6)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)
    assert [(np.asarray(whole.params[name]["kernel"]) == 0).mean() for name in "ab"] == [0.5, 0.5]
    assert whole.params["a"]["bias"].all()


def test_of_implicit_arrays_only_values_in_training_are_pruned():
    fake = compress.fake_quantize(PARAMS, {"a": compress.Int8()})
    tx = optax.chain(optax.sgd(0.0), compress.prune({"a": 0.5}, end=0))
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, fake), tx.init(fake), fake)
    kernel = optax.apply_updates(fake, updates)["a"]["kernel"]
    assert (kernel.values == 0).sum() == 15 and (kernel.step == fake["a"]["kernel"].step).all()
    with pytest.raises(ValueError, match="the pattern 'a' matches no kernel"):
        tx.init(compress.quantize(PARAMS, {"a": compress.Int8()}))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: compress.prune({"a": 0.5}, begin=3, end=2),
            "expected 0 <= begin <= end and every >= 1; got begin=3",
        ),
        (lambda: compress.prune({"a": 2.0}, end=2), "a sparsity between 0 and 1 for 'a'; got 2.0"),
        (
            lambda: compress.prune({"d": 0.5}, end=2).init(PARAMS),
            "pattern 'd' matches no kernel or table; nearest: 'a/ker",
        ),
        (
            lambda: compress.prune({"a/bias": 0.5}, end=2).init(PARAMS),
            "'a/bias' matches no kernel or table",
        ),
        (
            lambda: compress.prune({"a": 0.5}, end=2).update(PARAMS, None),
            r"prune: expected the parameters: tx.update\(",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
