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
    np.testing.assert_array_equal(
        tr.Windows(ROW, length=8, batch_size=5, seed=3)(7)["tokens"], first
    )
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
    np.testing.assert_array_equal(
        tr.Windows(held, length=4, batch_size=3, seed=1)(0)["tokens"],
        tr.Windows(ROW, length=4, batch_size=3, seed=1)(0)["tokens"],
    )
    for size in (0, 7):
        path.write_bytes(bytes(size))
        with pytest.raises(
            ValueError, match=rf"train\.bin has {size} bytes: a file of 16-bit tokens has a mul"
        ):
            tr.read_tokens(path)


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        (ROW[:8], {}, r"8 tokens are too few for windows of 8 \+ 1"),
        (ROW.reshape(2, -1), {}, r"tokens are one row of integers; got uint16\[2, 500\]"),
        (ROW.astype(np.float32), {}, r"tokens are one row of integers; got float32\[1000\]"),
        (ROW, {"length": 0}, "length=0: a window predicts at least one token"),
        (ROW, {"batch_size": 0}, "batch_size=0: a batch needs at least one window"),
    ],
)
def test_wrong_rows_and_sizes(tokens, options, text):
    with pytest.raises(ValueError, match=text):
        tr.Windows(tokens, **{"length": 8, "batch_size": 2, **options})


def test_tokens_outside_the_vocabulary():
    windows = tr.Windows(ROW, length=8, batch_size=200, vocab_size=990)
    with pytest.raises(
        ValueError, match=r"batch 0 holds the token 99\d, outside a vocabulary of 990"
    ):
        windows(0)
    tr.Windows(ROW, length=8, batch_size=200, vocab_size=1000)(0)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64", ">u4", "int32"])
def test_files_of_wider_tokens(tmp_path, dtype):
    """Ids above 65,535, which would be two 16-bit numbers each."""
    path, ids = tmp_path / "train.bin", np.random.default_rng(0).integers(0, 128256, 200)
    ids.astype(dtype).tofile(path)
    held = tr.read_tokens(path, dtype)
    np.testing.assert_array_equal(held, ids)
    np.testing.assert_array_equal(
        tr.Windows(held, length=4, batch_size=3)(0)["tokens"],
        tr.Windows(ids, length=4, batch_size=3)(0)["tokens"],
    )
    if not dtype.startswith(">"):
        with pytest.raises(
            ValueError, match="these are tokens of 32 or 64 bits: pass dtype='uint32'"
        ):
            tr.read_tokens(path)


IDS = np.random.default_rng(0).integers(0, 50257, 20_000)
WIDE = {
    "zeros first": np.concatenate([np.zeros(70_000, int), IDS[:50]]),
    "small ids first": np.concatenate([IDS % 4, IDS]),
    "separators of -1": np.where(np.arange(20_000) % 100 == 0, -1, IDS),
    "the lowest separators": np.where(np.arange(20_000) % 10 == 0, -0x8000, IDS),
    "few": IDS[:8],
    "small ids": IDS % 5,
    "a large vocabulary": 20 * IDS,
    "one large number": np.where(np.arange(20_000) == 7, 2**31 - 1, IDS),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_wider_tokens_are_found_anywhere_in_the_file(tmp_path, name, dtype):
    path = tmp_path / "train.bin"
    WIDE[name].astype(dtype).tofile(path)
    with pytest.raises(ValueError, match="every second 16-bit number is 0 or small"):
        tr.read_tokens(path)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        np.concatenate([np.zeros(70_000, int), IDS]),
        IDS % 5,
        IDS % 65,
        IDS // 2000,
        np.sort(IDS),
        np.zeros(100),
        np.arange(16),
        IDS[:2],
        IDS[:3],
    ],
)
def test_files_of_16_bit_tokens_of_all_kinds(tmp_path, tokens):
    tokens.astype(np.uint16).tofile(tmp_path / "train.bin")
    np.testing.assert_array_equal(tr.read_tokens(tmp_path / "train.bin"), tokens)


@pytest.mark.parametrize(
    "pairs", [[[20, 1], [3, 1]] * 1000, [[20, 0]] * 7], ids=["half are small", "too few"]
)
def test_pairs_that_tell_nothing(tmp_path, pairs):
    np.array(pairs, "uint16").tofile(tmp_path / "train.bin")
    np.testing.assert_array_equal(tr.read_tokens(tmp_path / "train.bin"), np.ravel(pairs))


def test_files_that_only_seem_to_have_wider_tokens(tmp_path):
    path, ids = (
        tmp_path / "train.bin",
        np.stack([np.arange(100), np.zeros(100)], 1).astype(np.uint16).ravel(),
    )
    ids.tofile(path)
    np.testing.assert_array_equal(tr.read_tokens(path, "uint16"), ids)
    np.zeros(100, np.uint16).tofile(path)
    assert tr.read_tokens(path).max() == 0


def test_token_files_that_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(8, dtype=np.uint16))
    with pytest.raises(
        ValueError, match=r"a\.npy is a \.npy file, which has a header: read it with np\.load"
    ):
        tr.read_tokens(tmp_path / "a.npy")
    with pytest.raises(TypeError, match="dtype='float32': expected an integer dtype"):
        tr.read_tokens(tmp_path / "a.npy", "float32")
    (tmp_path / "a.bin").write_bytes(bytes(6))
    with pytest.raises(
        ValueError, match="has 6 bytes: a file of 32-bit tokens has a multiple of 4 bytes"
    ):
        tr.read_tokens(tmp_path / "a.bin", "uint32")


@pytest.mark.parametrize("token", [2**31, 2**40, -(2**31) - 1])
def test_tokens_that_int32_cannot_hold(token):
    with pytest.raises(
        ValueError, match=rf"batch 0 holds tokens from .*{token}.*: expected numbers that fit"
    ):
        tr.Windows(np.full(9, token), length=4, batch_size=2)(0)
