"""Texts packed into rows: each once in every epoch, whole where it fits, and a function of (seed,
step)."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import layers as nn
from fnet import training as tr
from fnet.training.data._packed import best_fit

DRAW = np.random.default_rng(0)
# The first token of each text is its number.
TEXTS = [np.r_[i, DRAW.integers(100, 200, DRAW.integers(0, 30))] for i in range(90)]


def texts_in(batch):
    """The texts of a batch, in the order of its rows."""
    for tokens, segments, positions in zip(*(batch[name] for name in batch)):
        numbers = np.unique(segments[segments != 0])
        assert numbers.tolist() == list(range(1, len(numbers) + 1))
        for number in numbers:
            (places,) = np.nonzero(segments == number)
            assert (np.diff(places) == 1).all()
            assert (positions[places] == np.arange(len(places))).all()
            yield tokens[places]
        assert not tokens[segments == 0].any() and not positions[segments == 0].any()


def test_every_text_is_in_each_epoch_once():
    packed = tr.Packed(TEXTS, length=32, batch_size=1, seed=5)
    want = collections.Counter(tuple(text) for text in TEXTS)
    orders = []
    for epoch in range(3):
        rows = [packed(epoch * packed.rows + i) for i in range(packed.rows)]
        texts = [tuple(text) for row in rows for text in texts_in(row)]
        assert collections.Counter(texts) == want
        orders.append(texts)
    assert orders[0] != orders[1] != orders[2]
    assert packed.steps(1) == packed.rows and packed.steps(0.5) == -(-packed.rows // 2)


def test_a_batch_is_a_function_of_seed_and_step():
    packed = tr.Packed(TEXTS, length=32, batch_size=7, seed=3)
    batches = [packed(i) for i in range(20)]  # several epochs
    again = tr.Packed(TEXTS, length=32, batch_size=7, seed=3)
    for i in (13, 2, 19, 2):
        for name, array in again(i).items():
            assert array.shape == (7, 32) and array.dtype == np.int32
            np.testing.assert_array_equal(array, batches[i][name])
    other = tr.Packed(TEXTS, length=32, batch_size=7, seed=4)(2)
    assert (other["tokens"] != batches[2]["tokens"]).any()
    still = tr.Packed(TEXTS, length=32, batch_size=4, shuffle=False)
    assert still.rows % 4 or (still(0)["tokens"] == still(still.rows // 4)["tokens"]).all()


def test_segments_and_positions_are_what_layers_compute():
    batch = tr.Packed(TEXTS, length=32, batch_size=9)(1)
    positions = nn.segment_positions(jnp.asarray(batch["segments"]))
    np.testing.assert_array_equal(positions, batch["positions"])


def test_long_texts_overlap_by_one_token():
    text = np.arange(1, 24)
    packed = tr.Packed([text, text[:1], []], length=8, batch_size=2, shuffle=False)
    pieces = [row for i in range(packed.steps(1)) for row in texts_in(packed(i))]
    predicted = np.concatenate([piece[1:] for piece in pieces])
    assert max(map(len, pieces)) == 8 and sorted(predicted.tolist()) == text[1:].tolist()
    exact = tr.Packed([text[:8], text[:15]], length=8, batch_size=1, shuffle=False)
    assert exact.rows == 3 and exact.padding == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=80))
def test_best_fit(sizes):
    """It is what a search through all bins finds."""
    bins = best_fit(np.array(sizes), 40)
    assert sorted(i for items in bins for i in items) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in items) for items in bins]
    assert max(filled) <= 40
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= size
        else:
            rooms.append(40 - size)
    assert sorted(rooms) == sorted(40 - each for each in filled)


def test_padding_is_small():
    lengths = DRAW.lognormal(4.5, 0.8, 3000).astype(int).clip(1, 500)
    packed = tr.Packed([np.ones(n, int) for n in lengths], length=512, batch_size=8)
    assert packed.padding < 0.01
    assert packed.padding == pytest.approx(1 - lengths.sum() / (packed.rows * 512))


def test_a_run_is_resumed_with_the_same_batches(tmp_path):
    packed = lambda: tr.Packed(TEXTS, length=32, batch_size=4)

    def step(state, batch):
        total = state["total"] * 31 % 997 + batch["tokens"].sum() % 997
        return {"total": total}, {"total": total.astype(jnp.float32)}

    def run(steps, workdir):
        start = {"total": jnp.int32(0)}
        return tr.fit(step, start, packed(), steps=steps, workdir=workdir, config={})

    whole = run(30, tmp_path / "a")
    run(11, tmp_path / "b")
    assert int(run(30, tmp_path / "b")["total"]) == int(whole["total"])
    changed = [*TEXTS[:-1], TEXTS[-1][::-1]]
    assert tr.Packed(changed, length=32, batch_size=4).digest() != packed().digest()
    assert packed().identity()["tokens"] == sum(map(len, TEXTS))


def test_texts_of_a_file(tmp_path):
    np.concatenate(TEXTS).astype(np.uint16).tofile(tmp_path / "train.bin")
    tokens = tr.read_tokens(tmp_path / "train.bin")
    texts = np.split(tokens, np.cumsum([len(text) for text in TEXTS])[:-1])
    packed = tr.Packed(texts, length=32, batch_size=5)
    assert all(np.shares_memory(text, tokens) for text in packed.texts)
    np.testing.assert_array_equal(
        packed(3)["tokens"], tr.Packed(TEXTS, length=32, batch_size=5)(3)["tokens"]
    )


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "Packed: the 0 texts have no tokens"),
        ([[], []], {}, "Packed: the 2 texts have no tokens"),
        (["to be"], {}, r"Packed: text 0 is <U5\[\]; expected one row of integers, its tokens"),
        ([[1], [0.5]], {}, r"Packed: text 1 is float64\[1\]; expected one row of integers"),
        ([[1]], {"length": 1}, "length=1: a row that predicts a token has at least two"),
        ([[1]], {"batch_size": 0}, "batch_size=0: a batch needs at least one row"),
    ],
)
def test_errors(texts, options, message):
    with pytest.raises(ValueError, match=message):
        tr.Packed(texts, **{"length": 4, "batch_size": 2, **options})


def test_tokens_outside_the_vocabulary():
    packed = tr.Packed([[1, 2, 9]], length=4, batch_size=1, vocab_size=9)
    with pytest.raises(ValueError, match="batch 5 holds the token 9, outside a vocabulary of 9"):
        packed(5)
