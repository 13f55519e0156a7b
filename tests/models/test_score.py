"""Log-likelihoods and perplexity against the formula in plain JAX and NumPy."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import compress, models
from fnet import transforms as ft
from fnet.jaxpr import is_implicit
from fnet.models.evaluation import _program, _texts
from fnet.models.evaluation._batches import Item, batches

VOCAB = 29
DYNAMIC = models.DynamicScaling(factor=4.0, original_context=8)
DECODER = models.Decoder(
    VOCAB, 16, 2, 4, 2, 12, context=64, logit_softcap=2.0, window=(5, None), stacked=False
)
MODELS = {
    "gpt": models.GPT(VOCAB, 8, 1, 2, context=48, stacked=False),
    "decoder": DECODER,
    "decoder_by_length": dataclasses.replace(DECODER, rope_scaling=DYNAMIC),
    "experts": dataclasses.replace(DECODER, experts=3, tied=True),
    "lstm": models.LSTMLanguageModel(VOCAB, 8, tied=True),
}
KINDS = {
    "plain": lambda params: params,
    "int8": lambda params: compress.quantize(params, {".*": compress.Int8()}),
    "lora": lambda params: compress.lora(jax.random.key(1), params, {".*": 2}),
}
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, VOCAB, n).tolist() for n in (2, 48, 3, 17, 30, 5, 9, 44, 12, 25)]


@functools.cache
def prepared(name):
    model = MODELS[name]
    params, _ = model.init(jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    return model, jax.tree.map(lambda x: 3 * x, params)


def reference(model, params, texts):
    """The log-softmax of each text's logits, in float64, from one padded batch."""
    params = jax.tree.map(
        lambda x: x.materialize() if is_implicit(x) else x, params, is_leaf=is_implicit
    )
    tokens, lengths = models.padded([text[:-1] for text in texts])
    logits = np.asarray(jax.jit(model)(params, tokens, lengths), np.float64)
    log_probs = logits - logits.max(-1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
    for text, rows in zip(texts, log_probs):
        rows = rows[: len(text) - 1]
        yield rows[np.arange(len(rows)), text[1:]], bool((rows.argmax(-1) == text[1:]).all())


def close(got, want):
    """Whether values agree within 1e-5 of the largest."""
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("gpt", "int8"),
        ("decoder_by_length", "plain"),
        ("lstm", "plain"),
        slow("gpt", "plain"),
        slow("decoder", "plain"),
        slow("decoder", "lora"),
        slow("experts", "plain"),
        slow("lstm", "int8"),
    ],
)
def test_log_probs_are_those_of_the_formula(name, kind):
    model, params = prepared(name)
    params = KINDS[kind](params)
    scores = models.score(model, params, TEXTS)
    for score, (log_probs, greedy) in zip(scores, reference(model, params, TEXTS), strict=True):
        close(score.log_probs, log_probs)
        assert score.log_likelihood == pytest.approx(log_probs.sum(), abs=1e-4)
        assert score.perplexity == pytest.approx(np.exp(-log_probs.mean()), rel=1e-4)
        assert score.greedy == greedy and score.log_probs.dtype == np.float32


@pytest.mark.parametrize("name", ["experts", slow("decoder_by_length"), slow("lstm")])
def test_a_text_alone_has_the_values_that_it_has_in_a_batch(name):
    model, params = prepared(name)
    together = models.score(model, params, TEXTS)
    for number in (0, 1, 3):
        alone = models.score(model, params, [TEXTS[number]])[0].log_probs
        close(alone, together[number].log_probs)
    small = models.score(model, params, TEXTS, batch_tokens=64)
    for a, b in zip(small, together):
        close(a.log_probs, b.log_probs)


def test_continuations_after_their_prompts():
    model, params = prepared("gpt")
    whole = models.score(model, params, TEXTS)
    cuts = [len(text) // 2 for text in TEXTS]
    pairs = [(text[:cut], text[cut:]) for text, cut in zip(TEXTS, cuts)]
    for pair, cut, score, all_of_it in zip(pairs, cuts, models.score(model, params, pairs), whole):
        np.testing.assert_allclose(score.log_probs, all_of_it.log_probs[cut - 1 :], atol=1e-5)
        assert len(score.log_probs) == len(pair[1])


def test_greedy_is_the_text_that_generate_writes():
    model, params = prepared("gpt")
    out = models.generate(model, params, [[3, 4]], max_tokens=6, temperature=0)
    best = np.asarray(out.tokens[0]).tolist()
    other = [*best[:-1], (best[-1] + 1) % VOCAB]
    right, wrong = models.score(model, params, [([3, 4], best), ([3, 4], other)])
    assert right.greedy and not wrong.greedy
    np.testing.assert_allclose(right.log_probs, out.log_probs[0], atol=1e-5)


def bigrams(params, tokens):
    return params[tokens]  # [batch, time, vocab_size]


TABLE = jnp.asarray(np.random.default_rng(2).normal(size=(VOCAB, VOCAB)), jnp.float32)


def test_a_function_of_ones_own():
    log_probs = np.asarray(jax.nn.log_softmax(TABLE))
    for text, score in zip(TEXTS, models.score(bigrams, TABLE, TEXTS)):
        np.testing.assert_allclose(score.log_probs, log_probs[text[:-1], text[1:]], atol=1e-6)
    half = models.score(bigrams, TABLE.astype(jnp.bfloat16), TEXTS)
    rounded = np.asarray(jax.nn.log_softmax(TABLE.astype(jnp.bfloat16).astype(jnp.float32)))
    np.testing.assert_allclose(half[1].log_probs, rounded[TEXTS[1][:-1], TEXTS[1][1:]], atol=1e-6)


def test_impossible_tokens_and_nan_stay_where_they_are():
    table = np.array(TABLE)
    table[3, 4], table[:, 5] = -np.inf, -np.inf
    table[7] = np.nan
    impossible, lost, fine = models.score(
        bigrams, jnp.asarray(table), [[1, 3, 4, 1], [7, 1], [1, 2]]
    )
    assert impossible.log_probs[1] == -np.inf and np.isfinite(impossible.log_probs[[0, 2]]).all()
    assert impossible.log_likelihood == -math.inf and impossible.perplexity == math.inf
    assert math.isnan(lost.log_likelihood) and np.isfinite(fine.log_likelihood)
    assert models.perplexity(bigrams, jnp.asarray(table), [3, 4]) == math.inf


def test_texts_without_tokens():
    model, params = prepared("gpt")
    scores = models.score(model, params, [[], [3], ([1, 2], []), ([], [4])])
    assert [len(score.log_probs) for score in scores] == [0, 0, 0, 0]
    assert all(score.log_likelihood == 0 and score.greedy for score in scores)
    assert all(math.isnan(score.perplexity) for score in scores)
    assert models.score(model, params, []) == []
    assert math.isnan(models.perplexity(model, params, []))


def test_strings():
    tokenizer = models.CharTokenizer("to be or nt")
    model = models.GPT(tokenizer.vocab_size, 8, 1, 2, context=32)
    params, _ = model.init(jax.random.key(0), model.example())
    score = functools.partial(models.score, model, params)
    texts = ["to be", ("to be", " or not"), ("to be ", "or not"), ("", "to be")]
    whole, pair, spaced, empty = score(texts, tokenizer=tokenizer)
    tokens = [tokenizer.encode("to be"), (tokenizer.encode("to be"), tokenizer.encode(" or not"))]
    for a, b in zip((whole, pair, spaced, empty), score([*tokens, tokens[1], tokens[0]])):
        np.testing.assert_array_equal(a.log_probs, b.log_probs)
    assert [each.bytes for each in (whole, pair, spaced)] == [5, 7, 6]
    bits = -whole.log_likelihood / math.log(2) / 5
    assert whole.bits_per_byte == pytest.approx(bits)
    assert len(whole.log_probs) == 4  # this tokenizer has no token that stands before a text
    tokenizer.stop = (3,)
    (begun,) = score(["to be"], tokenizer=tokenizer)
    (same,) = score([([3], tokenizer.encode("to be"))])
    np.testing.assert_array_equal(begun.log_probs, same.log_probs)
    tokenizer.bos = 4  # which comes before the token that ends a text
    (begun,) = score(["to be"], tokenizer=tokenizer)
    (same,) = score([tokenizer.encode("to be")], prefix=4)
    np.testing.assert_array_equal(begun.log_probs, same.log_probs)
    (once,) = score([[4, 1, 2]], prefix=4)  # as in lm-evaluation-harness, not twice
    assert len(once.log_probs) == 2


def test_the_token_before_a_text():
    class Tokenizer:
        def __init__(self, alone, **named):
            self.alone = alone
            vars(self).update(named)

        def encode(self, text, special_tokens=True):
            return self.alone

    assert _texts.prefix_of(Tokenizer([7], stop=(2,))) == 7
    assert _texts.prefix_of(Tokenizer([7], bos=1, stop=(2,))) == 1
    assert _texts.prefix_of(Tokenizer([7, 8], bos=None, stop=(2, 3))) == 2
    assert _texts.prefix_of(Tokenizer([])) is None


def test_windows_are_those_of_the_harness():
    """The example in the documentation of lm_eval.api.model.LM.loglikelihood_rolling."""
    text = _texts.Text(np.array([99, *range(10)], np.int32), 1, None)
    pairs = [(x.tolist(), y.tolist()) for x, y in _texts.windows(text, 4, 4)]
    assert pairs == [
        ([99, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_windows_score_every_token_once(data):
    count = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(1, count))
    context = data.draw(st.integers(1, 20))
    stride = data.draw(st.integers(1, context))
    text = _texts.Text(np.arange(count, dtype=np.int32), first, None)
    seen = []
    for inputs, labels in _texts.windows(text, context, stride):
        assert 1 <= len(labels) <= len(inputs) <= context
        assert inputs.tolist() == list(range(inputs[0], labels[-1]))
        before = labels[0] - inputs[0]  # tokens before the first label
        assert inputs[0] == 0 or before >= context - stride + 1
        assert inputs[0] == 0 or len(inputs) == context
        seen += labels.tolist()
    assert seen == list(range(first, count))


def test_perplexity_of_long_texts():
    model, params = prepared("gpt")
    text = RNG.integers(0, VOCAB, 150).tolist()
    for context, stride in ((48, 48), (48, 7), (20, 20)):
        pairs = []  # each token after what its window holds before it
        for end in range(1, 150):
            last = context  # of the window
            while last < end:
                last = min(last + stride, 149)
            pairs.append((text[max(0, last - context) : end], [text[end]]))
        want = [each.log_likelihood for each in models.score(model, params, pairs)]
        (score,) = models.score(model, params, [text], context=context, stride=stride)
        np.testing.assert_allclose(score.log_probs, want, atol=2e-5)
        value = models.perplexity(model, params, text, context=context, stride=stride)
        assert value == pytest.approx(np.exp(-np.mean(want)), rel=1e-4)
    assert models.perplexity(model, params, jnp.asarray(text), context=20) == value
    two = models.perplexity(model, params, [text, np.asarray(text)], context=20)
    assert two == pytest.approx(value, rel=1e-6)


def shapes(lengths, **options):
    items = [Item(np.full(n, i, np.int32), np.zeros(1, np.int32)) for i, n in enumerate(lengths)]
    found = [batch for batch, _ in batches(items, batch_tokens=2048, **options)]
    return collections.Counter(batch.tokens.shape for batch in found)


def test_few_shapes_and_little_padding():
    lengths = np.random.default_rng(0).integers(16, 512, 300).tolist()
    packed = shapes(lengths, packs=True, context=8192)
    assert list(packed) == [(4, 512)]
    assert packed[4, 512] * 2048 < 1.08 * sum(lengths)
    assert set(shapes([*lengths, 900, 3500], packs=True, context=8192)) == {
        (4, 512),
        (1, 1024),
        (1, 4096),
    }
    assert set(shapes(lengths, packs=True, context=100 * 8)) == {(4, 512)}
    alone = shapes(range(16, 512), packs=False, context=None)
    assert sorted(alone) == [(1, 16), (4, 512), (8, 256), (16, 32), (16, 128), (32, 64)]
    assert shapes([5], packs=True, context=6) == {(1, 6): 1}


def test_one_program_for_each_shape():
    traced = []

    def counted(params, tokens):
        traced.append(tokens.shape)
        return bigrams(params, tokens)

    texts = [RNG.integers(0, VOCAB, n) for n in range(2, 200)]
    models.score(counted, TABLE, texts)
    models.score(counted, TABLE, texts[::-1])
    assert sorted(shape[1] for shape in traced) == [16, 32, 64, 128, 256]


def test_equal_prompts_are_computed_once():
    prompt = np.arange(10, dtype=np.int32)
    items = [Item(prompt, np.array([label], np.int32)) for label in range(12)]
    found = list(batches(items, packs=True, context=64, batch_tokens=64))
    held = [int((batch.segments > 0).sum()) for batch, _ in found]
    assert sum(held) == 20  # a text has at most as many labels as tokens
    model, params = prepared("gpt")
    scores = models.score(model, params, [(prompt, [label]) for label in range(VOCAB)])
    assert sum(math.exp(score.log_likelihood) for score in scores) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["plain", slow("int8")])
def test_the_logits_of_a_batch_are_never_all_in_memory(kind):
    model = models.GPT(20_000, 16, 1, 2, context=128)
    params = model.init(jax.random.key(0), model.example())[0]
    params = KINDS[kind](params)
    text = np.arange(128, dtype=np.int32)
    items = [Item(text + number, text) for number in range(16)]
    ((batch, _),) = batches(items, packs=True, context=128, batch_tokens=2048)
    logits = batch.tokens.size * 20_000 * 4
    program = _program.scored.lower(model, params, batch).compile()
    assert program.memory_analysis().temp_size_in_bytes < logits / 3

    def plain(params, tokens):
        logits = ft.use_implicit_arrays(model)(params, tokens)
        labels = jnp.roll(tokens, -1, 1)[..., None]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), labels, 2)

    compiled = jax.jit(plain).lower(params, batch.tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= logits


@pytest.mark.parametrize(
    "texts, options, error, message",
    [
        (
            [[1] * 50],
            {},
            ValueError,
            r"text 0 has 50 tokens with its prompt, and the model sees 48",
        ),
        ([([1] * 40, [1] * 10)], {}, ValueError, "pass stride= to score it in windows"),
        ([[1, 29]], {}, ValueError, r"tokens must be from 0 to 28; text 0 has 29"),
        ([[1], [-1, 2]], {}, ValueError, r"tokens must be from 0 to 28; text 1 has -1"),
        (["abc"], {}, TypeError, r"got the string 'abc'; pass tokenizer="),
        ("abc", {}, TypeError, "expected a list of texts, got the string 'abc'"),
        ([("abc", [1])], {}, TypeError, "both strings or both tokens"),
        ([[1.5, 2.0]], {}, TypeError, "a sequence of integer tokens; got"),
        ([[[1, 2], [3, 4]]], {}, TypeError, "a sequence of integer tokens; got"),
        ([[1, 2]], {"context": 49}, ValueError, "from 1 to 48, the context of the model; got 49"),
        (
            [[1, 2]],
            {"stride": 49},
            ValueError,
            "stride must be an integer from 1 to the context of 48",
        ),
        ([[1, 2]], {"stride": 0}, ValueError, "got 0"),
        ([[1, 2]], {"batch_tokens": 0}, ValueError, "batch_tokens must be an integer >= 1; got 0"),
    ],
)
def test_errors(texts, options, error, message):
    with pytest.raises(error, match=message):
        models.score(*prepared("gpt"), texts, **options)


def test_errors_of_models():
    with pytest.raises(ValueError, match="stride=4 needs context="):
        models.score(bigrams, TABLE, [[1, 2]], stride=4)
    with pytest.raises(
        ValueError, match=r"expected logits \[1, 16, vocab_size\].*got shape \(16,\)"
    ):
        models.score(lambda params, tokens: tokens[0], TABLE, [[1, 2]])
    with pytest.raises(ValueError, match="Encoded"):
        bert = models.Bert(vocab_size=VOCAB, width=8, depth=1, heads=2, hidden=8, context=16)
        models.score(bert, bert.init(jax.random.key(0), *_inputs(bert))[0], [[1, 2]])
    capacity = dataclasses.replace(MODELS["experts"], expert_capacity=1.0)
    with pytest.raises(ValueError, match=r"expert_capacity=1\.0, which tokens the experts drop"):
        models.score(capacity, prepared("experts")[1], [[1, 2]])
    with pytest.raises(ValueError, match="bits_per_byte needs the bytes"):
        models.Score(np.zeros(2, np.float32), True).bits_per_byte  # noqa: B018


def _inputs(model):
    example = model.example()
    return example if isinstance(example, tuple) else (example,)
