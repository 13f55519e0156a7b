"""The LSTMs over text and the Tree-LSTM: by hand, in training, and what their shapes promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close

from fnet import models
from fnet import training as tr

VOCABULARY = {"and": 0, "or": 1, "not": 2, True: 3, False: 4}
WORTH = {"and": all, "or": any, "not": lambda values: not values[0]}


def filled(model, *inputs):
    rng = np.random.default_rng(0)
    draw = lambda spec: rng.uniform(-0.9, 0.9, spec.shape).astype(np.float32)
    return jax.tree.map(draw, model.spec(*inputs).params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expression(rng, depth):
    """A random formula of and, or (of two or three) and not, as nested tuples."""
    if depth == 0 or rng.random() < 0.2:
        return bool(rng.random() < 0.5)
    operator = rng.choice(["and", "or", "not"])
    count = 1 if operator == "not" else rng.integers(2, 4)
    return (str(operator), *(expression(rng, depth - 1) for _ in range(count)))


def values(tree):
    """The value of every node, in postorder."""
    if not isinstance(tree, tuple):
        return [tree]
    below = [values(child) for child in tree[1:]]
    return [
        *(value for each in below for value in each),
        WORTH[tree[0]]([each[-1] for each in below]),
    ]


def trees(seed, count, depth, nodes):
    """Expressions of at most `nodes` nodes, packed, with the value of every node: [count, nodes],
    -1 in padding."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        tree = expression(rng, depth)
        if len(values(tree)) <= nodes:
            found.append(tree)
    worth = np.full((count, nodes), -1, np.int32)
    for row, tree in zip(worth, found):
        row[: len(values(tree))] = values(tree)
    return models.pack_trees(found, VOCABULARY, nodes), worth


def test_pack_trees():
    packed = models.pack_trees([("and", True, ("not", False)), True], VOCABULARY)
    np.testing.assert_array_equal(packed.labels, [[3, 4, 2, 0], [3, 0, 0, 0]])
    np.testing.assert_array_equal(packed.parents, [[3, 2, 3, 4], [4, 4, 4, 4]])
    assert packed.lengths.tolist() == [4, 1]
    assert models.pack_trees([True], VOCABULARY, 3).parents.tolist() == [[3, 3, 3]]
    assert models.pack_trees([], VOCABULARY).labels.shape == (0, 0)
    deep = functools.reduce(
        lambda tree, _: ("not", tree), range(5000), True
    )  # deeper than Python's stack
    assert models.pack_trees([deep], VOCABULARY).parents[0, :3].tolist() == [1, 2, 3]
    with pytest.raises(
        ValueError, match="tree 1 has the label 'nand', which is not in the vocabulary: 'and', 'or'"
    ):
        models.pack_trees([True, ("nand", True)], VOCABULARY)
    with pytest.raises(ValueError, match="the largest tree has 3 nodes, more than nodes=2"):
        models.pack_trees([("and", True, False)], VOCABULARY, 2)


def by_recursion(params, tree, width):
    """(h, c) of a tree, equations 2 to 8 of the paper, one node at a time."""
    label, *children = tree if isinstance(tree, tuple) else (tree,)
    x = params["embed"]["embedding"][VOCABULARY[label]]
    below = [by_recursion(params, child, width) for child in children]
    s = sum((h for h, _ in below), np.zeros(width))
    gates = (
        x @ params["gates"]["kernel"] + params["gates"]["bias"] + s @ params["recurrent"]["kernel"]
    )
    i, o, u = np.split(gates, 3)
    forget = x @ params["forget"]["kernel"] + params["forget"]["bias"]
    c = sigmoid(i) * np.tanh(u)
    for h_k, c_k in below:
        c = c + sigmoid(forget + h_k @ params["recurrent_forget"]["kernel"]) * c_k
    return sigmoid(o) * np.tanh(c), c


def test_tree_lstm_is_the_recursion_of_the_paper():
    model = models.TreeLSTM(2, 5, 8)
    rng = np.random.default_rng(3)
    found = [expression(rng, 4) for _ in range(6)] + [True]
    packed = models.pack_trees(found, VOCABULARY, 60)
    params = filled(model, *packed)
    logits = jax.jit(model)(params, *packed)
    roots = logits[np.arange(len(found)), packed.lengths - 1]
    for tree, got in zip(found, roots):
        hidden, _ = by_recursion(params, tree, 8)
        np.testing.assert_allclose(
            got, hidden @ params["head"]["kernel"] + params["head"]["bias"], atol=2e-6
        )
    with pytest.raises(
        ValueError,
        match=r"labels and parents \[batch, nodes\] and lengths \[batch\]; got \(7, 60\), ",
    ):
        model.spec(packed.labels, packed.parents, packed.lengths[:3])


@pytest.mark.exhaustive
def test_tree_lstm_learns_to_evaluate_expressions_of_any_shape():
    """Trained on small formulas, it evaluates larger ones; and one program serves every shape."""
    model, traced = models.TreeLSTM(2, 5, 32), []
    packed, worth = trees(0, 2048, 3, 24)
    batches = tr.Batches({**packed._asdict(), "worth": worth}, batch_size=64, seed=0)
    tx = optax.adam(tr.schedule("cosine", 2e-2, 400, warmup=0.05))

    @jax.jit
    def step(state, batch):
        traced.append(batch["labels"].shape)

        def loss(params):
            logits = model(params, batch["labels"], batch["parents"], batch["lengths"])
            each = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.maximum(batch["worth"], 0)
            )
            real = batch["worth"] >= 0
            return each.mean(where=real)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), value

    params, _ = model.init(jax.random.key(0), *packed)
    state = tr.TrainState.create(params, tx)
    for i in range(400):
        state, _ = step(state, batches(i))
    assert len(traced) == 1

    large, worth = trees(1, 256, 5, 48)
    big = large.lengths > 24  # larger than any that it was trained on
    roots = np.arange(256), large.lengths - 1
    guess = np.asarray(jax.jit(model)(state.params, *large).argmax(-1))
    right = (guess == worth)[roots]
    assert big.sum() > 50 and 0.3 < worth[roots].mean() < 0.7
    assert right[big].mean() > 0.95 and right.mean() > 0.97


@pytest.mark.parametrize("tied", [True, False])
def test_lstm_language_model_by_hand(tied):
    model, tokens = models.LSTMLanguageModel(7, 5, 2, tied=tied), np.array([[1, 4, 2, 6]])
    params = filled(model, tokens)
    x = params["embed"]["embedding"][tokens[0]]
    for layer in ("lstm0", "lstm1"):
        h = c = np.zeros(5)
        rows = []
        for row in x:
            at = params[layer]
            i, f, g, o = np.split(row @ at["kernel"] + h @ at["recurrent_kernel"] + at["bias"], 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            rows.append(h)
        x = np.stack(rows)
    want = (
        x @ params["embed"]["embedding"].T
        if tied
        else x @ params["head"]["kernel"] + params["head"]["bias"]
    )
    np.testing.assert_allclose(model(params, tokens)[0], want, atol=2e-6)


def test_lstm_classifier_sees_no_padding():
    model = models.LSTMClassifier(3, 9, 6, dropout=0.5)
    tokens, lengths = np.random.default_rng(0).integers(0, 9, (4, 8)), np.array([8, 1, 5, 3])
    params = jax.tree.map(lambda leaf: -leaf, filled(model, tokens))
    call = jax.jit(model)
    logits = call(params, tokens, lengths)
    other = np.where(np.arange(8)[None] < lengths[:, None], tokens, 3)
    close(call(params, other, lengths), logits, 1e-6)
    close(call(params, tokens[2:3, :5]), logits[2:3], 1e-5)
    train = jax.jit(functools.partial(model, params, tokens, lengths, train=True))
    assert not np.allclose(train(key=jax.random.key(0)), train(key=jax.random.key(1)))


def test_lstm_classifier_learns_what_stands_far_apart():
    """Whether the first token comes again before a text of 4 to 12 tokens ends: no bag of words
    tells."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 13, 2048).astype(np.int32)
    tokens = rng.integers(2, 10, (2048, 12)).astype(np.int32)
    label = rng.integers(0, 2, 2048).astype(np.int32)
    tokens[:, 0] = rng.integers(0, 2, 2048)
    tokens[np.arange(2048), lengths - 1] = np.where(label == 1, tokens[:, 0], 1 - tokens[:, 0])
    batches = tr.Batches(
        {"tokens": tokens, "lengths": lengths, "label": label}, batch_size=128, seed=0
    )
    model, tx = models.LSTMClassifier(2, 10, 24), optax.adam(1e-2)

    @jax.jit
    def step(state, batch):
        def loss(params):
            logits = model(params, batch["tokens"], batch["lengths"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), value

    params, _ = model.init(jax.random.key(0), tokens[:1])
    state = tr.TrainState.create(params, tx)
    for i in range(150):
        state, value = step(state, batches(i))
    assert value < 0.1
