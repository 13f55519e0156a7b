"""Stretches of tokens: a function of (seed, step), and each token predicted once."""

import numpy as np
import pytest

from fnet import training as tr

ROW = np.arange(1000, dtype=np.uint16)


def test_a_batch_is_a_function_of_seed_and_step():
    windows = tr.Windows(ROW, length=8, batch_size=5, seed=3)
    first = windows(7)["tokens"]
    assert first.shape == (5, 9) and first.dtype == np.int32
    np.testing.assert_array_equal(first, first[:, :1] + np.arange(9))
    windows(8)
    np.testing.assert_array_equal(tr.Windows(ROW, length=8, batch_size=5, seed=3)(7)["tokens"], first)
    others = windows(6)["tokens"], tr.Windows(ROW, length=8, batch_size=5, seed=4)(7)["tokens"]
    assert all((other != first).any() for other in others)


def test_every_place_is_drawn():
    windows = tr.Windows(ROW[:12], length=8, batch_size=50)
    assert set(windows.starts(0).tolist()) == {0, 1, 2, 3}


def test_stretches_predict_each_token_once():
    cut = tr.stretches(ROW[:103], 10)
    assert cut.shape == (10, 11) and np.shares_memory(cut, ROW)
    np.testing.assert_array_equal(cut[:, 1:].ravel(), ROW[1:101])
    np.testing.assert_array_equal(cut[:, 0], ROW[:100:10])


def test_files_of_16_bit_tokens(tmp_path):
    path = tmp_path / "train.bin"
    ROW.tofile(path)
    held = tr.read_tokens(path)
    assert isinstance(held, np.memmap) and not held.flags.writeable
    np.testing.assert_array_equal(held, ROW)
    np.testing.assert_array_equal(tr.Windows(held, length=4, batch_size=3, seed=1)(0)["tokens"],
                                  tr.Windows(ROW, length=4, batch_size=3, seed=1)(0)["tokens"])
    for size in (0, 7):
        path.write_bytes(bytes(size))
        with pytest.raises(ValueError, match=rf"train\.bin has {size} bytes: a file of 16-bit tokens has an even"):
            tr.read_tokens(path)


@pytest.mark.parametrize(("tokens", "options", "text"), [
    (ROW[:8], {}, r"8 tokens are too few for windows of 8 \+ 1"),
    (ROW.reshape(2, -1), {}, r"tokens are one row of integers; got uint16\[2, 500\]"),
    (ROW.astype(np.float32), {}, r"tokens are one row of integers; got float32\[1000\]"),
    (ROW, {"length": 0}, "length=0: a window predicts at least one token"),
    (ROW, {"batch_size": 0}, "batch_size=0: a batch needs at least one window"),
])
def test_wrong_rows_and_sizes(tokens, options, text):
    with pytest.raises(ValueError, match=text):
        tr.Windows(tokens, **{"length": 8, "batch_size": 2, **options})


def test_tokens_outside_the_vocabulary():
    windows = tr.Windows(ROW, length=8, batch_size=200, vocab_size=990)
    with pytest.raises(ValueError, match=r"batch 0 holds the token 99\d, outside a vocabulary of 990"):
        windows(0)
    tr.Windows(ROW, length=8, batch_size=200, vocab_size=1000)(0)
