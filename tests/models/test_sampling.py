"""Options of generation against their definitions in NumPy, streams, and beam search against a
search of all texts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import LENGTHS, MODELS, PROMPTS, compiled, greedy, prepared

from fnet import models
from fnet.models.generation._sampling import Sampling, candidates, penalized, pick, sampling


def logits_after(name, text):
    """The logits of the full pass for the token after a text."""
    row = np.resize(np.array(text, np.int32), (3, 40))
    return np.asarray(compiled(name)(prepared(name)[1], row)[0, len(text) - 1])


def log_softmax(x):
    x = x.astype(np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def with_penalties(logits, prompt, text, repetition, presence, frequency):
    """The definitions of Keskar et al. (2019), and of the API of OpenAI."""
    logits = logits.astype(np.float64)
    for token in range(len(logits)):
        n = text.count(token)
        if token in prompt or n:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        logits[token] -= presence * (n > 0) + frequency * n
    return logits


def test_penalties_of_logits():
    rng = np.random.default_rng(0)
    logits, prompt, text = rng.normal(size=8).astype(np.float32), [1, 3, 3], [2, 2, 3]
    marks, counts = np.isin(np.arange(8), prompt)[None], np.bincount(text, minlength=8)[None]
    options = Sampling(jnp.float32(1), None, None, None, *map(jnp.float32, (1.3, 0.4, 0.2)))
    np.testing.assert_allclose(
        penalized(logits[None], options, marks, counts)[0],
        with_penalties(logits, prompt, text, 1.3, 0.4, 0.2),
        rtol=1e-6,
    )
    plain = Sampling(jnp.float32(1))
    np.testing.assert_array_equal(penalized(logits[None], plain, marks, counts)[0], logits)


INF = np.inf


@pytest.mark.parametrize(
    ("logits", "options", "kept"),
    [
        ([0, 3, 1, 2], dict(top_p=0.0), [1]),
        ([0, 3, 1, 2], dict(top_p=1e-45), [1]),
        ([0, 3, 3, 2], dict(top_p=0.0), [1, 2]),
        ([0, 3, 1, -60], dict(top_p=1.0), [0, 1, 2, 3]),
        ([0, 3, 1, -INF], dict(top_p=1.0), [0, 1, 2]),
        ([0, 3, 1, 2], dict(top_k=1), [1]),
        ([0, 3, 1, 2], dict(top_k=4), [0, 1, 2, 3]),
        ([0, 3, 1, 2], dict(top_k=99), [0, 1, 2, 3]),
        ([3, 3, 3, 2], dict(top_k=1), [0, 1, 2]),
        ([-INF, 3, -INF, 2], dict(top_k=3), [1, 3]),
        ([0, 3, 1, 2], dict(min_p=0.0), [0, 1, 2, 3]),
        ([0, 3, 1, 3], dict(min_p=1.0), [1, 3]),
        ([-INF, 3, -50, 2], dict(min_p=0.0), [1, 2, 3]),
        ([0, 3, 1, 2], dict(temperature=1e-45), [1]),
        ([1, 3, 3, 2], dict(temperature=1e-30), [1, 2]),
        ([3e38, -3e38, 1, 2], dict(temperature=0.1), [0]),
        ([INF, 3, 1, 2], dict(), [0]),
        ([2e-8, 1e-8, -100, 0], dict(top_k=1, temperature=5.0), [0]),
        ([0, 3, 1, 2], dict(temperature=3e38), [0, 1, 2, 3]),
    ],
)
def test_bounds_of_the_options(logits, options, kept):
    """As the processors of transformers with the same names, which keep at least one token."""
    got = candidates(
        jnp.array([logits], jnp.float32), sampling("generate", **{"temperature": 1.0, **options})
    )[0]
    assert not np.isnan(got).any() and np.flatnonzero(jax.nn.softmax(got)).tolist() == kept
    drawn = {
        int(
            pick(
                jnp.array([logits], jnp.float32),
                jax.random.split(jax.random.key(seed), 1),
                sampling("generate", **{"temperature": 1.0, **options}),
            )[0]
        )
        for seed in range(3)
    }
    assert drawn <= set(kept)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options", [(1.5, 0, 0), (1, 2.0, 0), (1, 0, 0.7), (1.2, 0.5, -0.3)], ids=str
)
def test_greedy_text_with_penalties(options):
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given = {
        name: value
        for name, value in zip(names, options)
        if value != (name == "repetition_penalty")
    }
    model, params = prepared("gpt")
    out = greedy(model, params, PROMPTS, max_tokens=10, lengths=LENGTHS, **given)
    for row, prompt, length in zip(out.tokens, PROMPTS, LENGTHS):
        prompt, text = prompt[:length].tolist(), []
        for _ in range(10):
            text.append(
                int(
                    with_penalties(
                        logits_after("gpt", prompt + text), prompt, text, *options
                    ).argmax()
                )
            )
        assert row.tolist() == text
    assert (
        out.tokens.tolist()
        != greedy(model, params, PROMPTS, max_tokens=10, lengths=LENGTHS).tokens.tolist()
    )


def test_log_probabilities_are_those_of_the_model():
    """Also with a temperature and a penalty, which change only which tokens are selected."""
    model, params = prepared("llama")
    out = models.generate(
        model,
        params,
        PROMPTS,
        jax.random.key(4),
        max_tokens=8,
        lengths=LENGTHS,
        temperature=0.7,
        repetition_penalty=1.1,
        stop=[3, 5],
    )
    for row, length, prompt, start, log_probs in zip(
        out.tokens, out.lengths, PROMPTS, LENGTHS, out.log_probs
    ):
        text = prompt[:start].tolist()
        for i in range(8):
            want = log_softmax(logits_after("llama", text))[row[i]] if i < length else 0
            np.testing.assert_allclose(log_probs[i], want, rtol=1e-4, atol=1e-5)
            text.append(int(row[i]))
    assert (out.lengths < 8).any()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_several_texts_of_a_prompt_are_those_of_the_repeated_prompt(name):
    model, params = prepared(name)
    options = dict(max_tokens=6, temperature=1.3, top_k=8, min_p=0.01, frequency_penalty=0.1)
    out = models.generate(
        model, params, PROMPTS, jax.random.key(5), lengths=LENGTHS, samples=4, **options
    )
    want = models.generate(
        model,
        params,
        np.repeat(PROMPTS, 4, 0),
        jax.random.key(5),
        lengths=np.repeat(LENGTHS, 4),
        **options,
    )
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_allclose(out.log_probs, want.log_probs, rtol=1e-4, atol=1e-5)
    assert len({tuple(row) for row in out.tokens[:4].tolist()}) > 1


def test_a_stream_yields_the_tokens_of_generate():
    model, params = prepared("gpt")
    free = greedy(model, params, PROMPTS, max_tokens=12, lengths=LENGTHS)
    options = dict(
        max_tokens=12,
        lengths=LENGTHS,
        stop=[int(free.tokens[0, 3]), int(free.tokens[1, 6])],
        temperature=0.9,
        top_p=0.9,
        presence_penalty=0.2,
        samples=2,
    )
    out = models.generate(model, params, PROMPTS, jax.random.key(1), **options)
    steps = list(models.stream(model, params, PROMPTS, jax.random.key(1), **options))
    assert all(step.shape == (6,) and step.dtype == np.int32 for step in steps) and len(steps) <= 12
    for i, length in enumerate(out.lengths):
        tokens = [int(step[i]) for step in steps]
        assert tokens[:length] == out.tokens[i, :length].tolist() and set(tokens[length:]) <= {-1}
    assert len(steps) == min(12, max(out.lengths) + 1)


class Words:
    """A tokenizer whose tokens 1 to 4 are parts of characters of two and three bytes."""

    stop = ()
    BYTES = (
        b"a",
        b"\xc3",
        b"\xa9",
        b"\xe2\x82",
        b"\xac",
        b"b",
        b"END",
        b"E",
        *(bytes([i]) for i in range(72, 84)),
    )

    def encode(self, text):
        return np.array([0] * len(text), np.int32)

    def decode(self, tokens):
        return b"".join(self.BYTES[int(token)] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3, 4, 0], [5, 7, 5, 7], [5, 7, 6, 0, 0], [6, 0], [7, 1]], ids=str
)
@pytest.mark.parametrize("stop", [(), ("END",), ("ab", "bE")], ids=str)
def test_pieces_of_a_text_are_complete_characters_before_the_first_stop_string(
    tokens, stop, monkeypatch
):
    monkeypatch.setattr(
        "fnet.models.generation._stream.stream",
        lambda *args, **options: iter([[token] for token in tokens]),
    )
    pieces = list(models.stream_text(None, None, Words(), "aa", stop=stop, max_tokens=5))
    text = Words().decode(tokens)
    ends = [at for at in map(text.find, stop) if at >= 0]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
    assert all(pieces) and not any("\ufffd" in piece for piece in pieces[:-1])


class Pieces:
    """A tokenizer whose tokens are byte strings."""

    stop = ()

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def encode(self, text):
        return np.array([0] * len(text), np.int32)

    def decode(self, tokens):
        return b"".join(self.vocabulary[int(token)] for token in tokens).decode(errors="replace")


def first_complete(text, stop):
    """The text before the stop string that is complete first, found character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_in_random_tokens(seed, monkeypatch):
    """Tokens are random cuts of a text, so stop strings and characters of up to four bytes are
    split."""
    rng, stopped = np.random.default_rng(seed), 0
    for _ in range(150):
        letters = "".join(rng.choice(list("abé€🎭"), 3, replace=False))
        text = "".join(rng.choice(list(letters), 24))
        raw = text.encode()
        if rng.integers(4) == 0:
            raw = raw[:-1]  # an incomplete character at the end
        inner = rng.choice(np.arange(1, len(raw)), rng.integers(1, len(raw) - 1), replace=False)
        cuts = [0, *sorted(inner), len(raw)]
        words = Pieces([b"a", *(raw[i:j] for i, j in itertools.pairwise(cuts))])
        stop = [
            "".join(rng.choice(list(letters), rng.integers(1, 6)))
            for _ in range(rng.integers(0, 4))
        ]
        monkeypatch.setattr(
            "fnet.models.generation._stream.stream",
            lambda *args, cuts=cuts, **options: iter([[i] for i in range(1, len(cuts))]),
        )
        pieces = list(models.stream_text(None, None, words, "aa", stop=stop, max_tokens=99))
        whole = raw.decode(errors="replace")
        want = first_complete(whole, stop)
        stopped += want != whole
        assert "".join(pieces) == want, (text, stop, cuts)
        assert all(pieces) and not any("\ufffd" in piece for piece in pieces[:-1])
    assert 50 < stopped < 150


@pytest.mark.exhaustive
def test_the_text_of_a_stream_is_that_of_generate():
    words = models.CharTokenizer("abcdefghijklmnopqrst")
    model, params = prepared("gpt")
    out = greedy(model, params, words.encode("bca")[None], max_tokens=9)
    text = words.decode(out.tokens[0])
    stream = lambda stop: list(
        models.stream_text(model, params, words, "bca", max_tokens=9, temperature=0, stop=stop)
    )
    assert "".join(stream(())) == text and len(stream(())) == 9
    assert "".join(stream([text[3:5]])) == text[: text.index(text[3:5])]


@pytest.mark.exhaustive
def test_a_beam_of_all_texts_finds_the_best_ones():
    """With as many beams as texts, nothing is lost: all texts of three tokens, those with a stop
    token shorter."""
    model = models.GPT(4, 8, 1, 1, context=8)
    params = jax.tree.map(
        lambda s: 2 * jax.random.normal(jax.random.key(3), s.shape) / s.shape[-1] ** 0.5,
        model.spec(jax.ShapeDtypeStruct((1, 3), jnp.int32)).params,
    )
    scores, run = {}, jax.jit(model)
    for text in itertools.product(range(4), repeat=3):
        row = np.array([[1, 2, *text]], np.int32)
        each = jax.nn.log_softmax(run(params, row)[0, 1:4])[np.arange(3), np.array(text)]
        end = text.index(3) if 3 in text else 3
        count = min(end + 1, 3)
        scores[text[:end]] = float(each[:count].sum()) / count**0.7
    best = models.beam_search(
        model, params, [[1, 2]], beams=64, max_tokens=3, stop=[3], length_penalty=0.7
    )
    want = sorted(scores.items(), key=lambda item: -item[1])
    got = [
        (tuple(row[:n].tolist()), float(score))
        for row, n, score in zip(best.tokens[0], best.lengths[0], best.scores[0])
        if score > -1e8
    ]
    assert [text for text, _ in got[:8]] == [text for text, _ in want[:8]]
    np.testing.assert_allclose(
        [score for _, score in got[:8]], [score for _, score in want[:8]], rtol=1e-4
    )
    assert not np.asarray(best.tokens[0])[
        np.arange(3)[None] >= np.asarray(best.lengths[0])[:, None]
    ].any()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_one_beam_is_greedy(name):
    model, params = prepared(name)
    stop = [int(greedy(model, params, PROMPTS, max_tokens=9, lengths=LENGTHS).tokens[0, 4])]
    want = greedy(model, params, PROMPTS, max_tokens=9, lengths=LENGTHS, stop=stop)
    best = models.beam_search(
        model, params, PROMPTS, beams=1, max_tokens=9, lengths=LENGTHS, stop=stop
    )
    np.testing.assert_array_equal(best.tokens[:, 0], want.tokens)
    np.testing.assert_array_equal(best.lengths[:, 0], want.lengths)


@pytest.mark.exhaustive
def test_more_beams_find_better_texts():
    model, params = prepared("llama")
    few, many = (
        models.beam_search(
            model, params, PROMPTS, beams=n, max_tokens=8, lengths=LENGTHS, length_penalty=0.0
        )
        for n in (1, 6)
    )
    assert (many.scores[:, 0] >= few.scores[:, 0] - 1e-5).all() and (
        np.diff(many.scores, axis=1) <= 0
    ).all()
    for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
        text, total = prompt[:length].tolist(), 0.0
        for token in many.tokens[i, 0].tolist():
            total += log_softmax(logits_after("llama", text))[token]
            text.append(token)
        np.testing.assert_allclose(many.scores[i, 0], total, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(min_p=1.5), r"generate: min_p must be from 0 to 1; got 1\.5"),
        (
            dict(repetition_penalty=0.0),
            r"generate: repetition_penalty must be from 0\.001 to 1000; got 0\.0",
        ),
        (
            dict(presence_penalty=float("nan")),
            "generate: presence_penalty must be from -100 to 100; got nan",
        ),
        (
            dict(frequency_penalty=200),
            "generate: frequency_penalty must be from -100 to 100; got 200",
        ),
        (dict(top_k=0), "generate: top_k must be an integer >= 1; got 0"),
        (dict(top_k=2.5), r"generate: top_k must be an integer >= 1; got 2\.5"),
        (dict(top_k=float("inf")), "generate: top_k must be an integer >= 1; got inf"),
        (dict(top_p=1.1), r"generate: top_p must be from 0 to 1; got 1\.1"),
        (dict(top_p=-0.1), r"generate: top_p must be from 0 to 1; got -0\.1"),
        (dict(repetition_penalty=-1), "generate: repetition_penalty must be from 0"),
        *(
            (dict(temperature=value), f"generate: temperature must be finite and >= 0; got {value}")
            for value in (-0.5, float("inf"), float("nan"))
        ),
        (dict(samples=0), "generate: samples must be an integer >= 1; got 0"),
    ],
)
def test_errors(options, text):
    model, params = prepared("gpt")
    with pytest.raises(ValueError, match=text):
        models.generate(model, params, PROMPTS, max_tokens=4, **{"temperature": 0, **options})


def test_errors_of_streams_and_beams():
    model, params = prepared("gpt")
    with pytest.raises(ValueError, match="stream: max_tokens must be >= 1; got 0"):
        next(models.stream(model, params, PROMPTS, max_tokens=0, temperature=0))
    with pytest.raises(
        ValueError, match="expected a sequence of strings as stop, none of them empty; got 'END'"
    ):
        next(
            models.stream_text(model, params, models.ByteTokenizer(), "a", stop="END", max_tokens=3)
        )
    with pytest.raises(
        TypeError,
        match="stream: unknown option 'top_n'; options of sampling are temperature, top_k, ",
    ):
        next(models.stream(model, params, PROMPTS, max_tokens=3, temperature=0, top_n=4))
    for options in {"samples": 2}, {"lengths": [3]}:
        text = f"stream_text: {next(iter(options))} is an option of `stream`; stream_text generates one text"
        with pytest.raises(TypeError, match=text):
            next(
                models.stream_text(
                    model, params, models.ByteTokenizer(), "a", max_tokens=3, **options
                )
            )
    with pytest.raises(ValueError, match="beam_search: beams must be an integer >= 1; got 0"):
        models.beam_search(model, params, PROMPTS, beams=0, max_tokens=4)
    with pytest.raises(
        ValueError, match="beam_search: prompts of 7 tokens and max_tokens=35 exceed"
    ):
        models.beam_search(model, params, PROMPTS, beams=2, max_tokens=35)
