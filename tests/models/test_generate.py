"""Generation: what a cache changes (nothing), what is drawn, what is compiled, and what is refused."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import compress, models
from fnet import transforms as ft
from fnet.models.generation import _generate
from fnet.models.generation._generate import empty_cache
from fnet.models.generation._generate import prepared as with_separate_layers
from fnet.models.generation._sampling import Sampling, likeliest, pick

VOCAB = 20
MODELS = {
    "gpt": models.GPT(VOCAB, 16, 2, 2, context=40),
    "llama": models.Decoder(VOCAB, 16, 2, 4, 2, 24, context=40),
    "lstm": models.LSTMLanguageModel(VOCAB, 16, tied=True),
}
PROMPTS = np.random.default_rng(0).integers(1, VOCAB, (3, 7)).astype(np.int32)
LENGTHS = np.array([7, 1, 4], np.int32)
greedy = functools.partial(
    models.generate, temperature=0, stop=(-1, -2)
)  # as many as in the tests: one program


@functools.cache
def prepared(name):
    """(model, params) with every parameter so large that the likeliest token changes from place to
    place."""
    model = MODELS[name]
    rng = np.random.default_rng(7)
    draw = lambda spec: (rng.standard_normal(spec.shape) * 3 / np.sqrt(spec.shape[-1])).astype(
        np.float32
    )
    return model, jax.tree.map(draw, model.spec(jax.ShapeDtypeStruct((1, 8), jnp.int32)).params)


@functools.cache
def compiled(name):
    model, _ = prepared(name)
    return jax.jit(model)


def without_cache(name, prompt, count):
    """Greedy decoding by its definition: everything again for every token, in one shape."""
    found = [*prompt]
    for _ in range(count):
        row = np.resize(np.array(found, np.int32), (3, 40))
        found.append(compiled(name)(prepared(name)[1], row)[0, len(found) - 1].argmax())
    return np.array(found[len(prompt) :])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_changes_no_logits(name):
    """Prompts of unequal length at once, then token by token: the logits of the full pass."""
    model, params = prepared(name)
    text = np.random.default_rng(2).integers(1, VOCAB, (3, 40)).astype(np.int32)
    text[:, :7] = PROMPTS
    full = compiled(name)(params, text)
    step = jax.jit(lambda tokens, lengths, cache: model(params, tokens, lengths, state=cache))
    cache = model.cache(jax.ShapeDtypeStruct((3, 40), jnp.int32))
    logits, cache = step(PROMPTS, LENGTHS, cache)
    rows = np.arange(3)
    close(logits[rows, LENGTHS - 1], full[rows, LENGTHS - 1])
    for at in range(5):
        logits, cache = step(text[rows, LENGTHS + at][:, None], np.ones(3, np.int32), cache)
        close(logits[:, 0], full[rows, LENGTHS + at])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_the_full_pass(name):
    model, params = prepared(name)
    out = greedy(model, params, PROMPTS, max_tokens=10, lengths=LENGTHS)
    assert out.tokens.shape == (3, 10) and out.lengths.tolist() == [10, 10, 10]
    for row, prompt, length in zip(out.tokens, PROMPTS, LENGTHS):
        np.testing.assert_array_equal(row, without_cache(name, prompt[:length], 10))
    assert len({*np.asarray(out.tokens).ravel().tolist()}) > 2


class Counting(models.GPT):
    """A GPT that counts its traces."""

    traces: ClassVar = []

    def forward(self, scope, tokens, lengths=None):
        self.traces.append(tokens.shape)
        return super().forward(scope, tokens, lengths)


@pytest.mark.exhaustive
def test_one_program_for_all_lengths_and_options():
    params = prepared("gpt")[1]
    model = Counting(VOCAB, 16, 2, 2, context=40)
    draw = functools.partial(models.generate, model, params)
    key = jax.random.key(0)
    draw(PROMPTS, key, max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, lengths=LENGTHS)
    assert (3, 16) in model.traces and (3, 1) in model.traces  # the prompts, and the step
    del model.traces[:]
    draw(PROMPTS[:, :4], key, max_tokens=16, temperature=1.3, top_k=2, top_p=0.5)
    draw(np.tile(PROMPTS, 2), key, max_tokens=1, temperature=2, top_k=50, top_p=1)
    assert not model.traces


@pytest.mark.exhaustive
def test_a_row_does_not_depend_on_the_others():
    model, params = prepared("lstm")
    draw = lambda prompts, lengths: models.generate(
        model, params, prompts, jax.random.key(3), max_tokens=8, lengths=lengths
    )
    together = draw(PROMPTS, LENGTHS)
    alone = draw(PROMPTS[:1], LENGTHS[:1])
    np.testing.assert_array_equal(together.tokens[0], alone.tokens[0])
    again = draw(
        np.where(np.arange(7)[None] < LENGTHS[:, None], PROMPTS, 13), LENGTHS
    )  # other padding
    np.testing.assert_array_equal(together.tokens, again.tokens)


def test_stop_tokens_end_a_row():
    model, params = prepared("gpt")
    free = np.asarray(greedy(model, params, PROMPTS, max_tokens=12, lengths=LENGTHS).tokens)
    stop = [int(free[0, 3]), int(free[1, 6])]
    out = greedy(model, params, PROMPTS, max_tokens=12, lengths=LENGTHS, stop=stop)
    for row, length, whole in zip(out.tokens, out.lengths, free):
        ends = np.flatnonzero(np.isin(whole, stop))
        assert length == (ends[0] if ends.size else 12)
        np.testing.assert_array_equal(row, np.where(np.arange(12) < length, whole, 0))
    assert out.lengths[0] <= 3


@pytest.mark.exhaustive
def test_a_prompt_that_fills_the_context():
    model, params = prepared("gpt")
    prompt = np.resize(PROMPTS[0], (1, 36))  # from 17 on, a program is made for 32, then for 40
    prompt = np.pad(prompt, ((0, 0), (0, 30)))  # more padding than the model has places
    out = greedy(
        model, params, prompt, max_tokens=5, lengths=[36]
    )  # the last of them needs no place
    np.testing.assert_array_equal(out.tokens[0], without_cache("gpt", prompt[0, :36], 5))


def test_what_is_drawn_follows_the_probabilities():
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
    keys = jax.random.split(jax.random.key(0), 20000)
    draw = jax.jit(
        lambda temperature, k, p, m: pick(
            jnp.tile(logits, (len(keys), 1)), keys, Sampling(temperature, k, p, m)
        )
    )

    def draws(temperature, **options):
        return draw(
            temperature,
            *(None if options.get(n) is None else np.float32(options[n]) for n in "kpm"),
        )

    def held_to(tokens, weights):
        shares = np.bincount(tokens, minlength=5) / len(keys)
        expected = np.array(weights) / sum(weights)
        assert (shares[expected == 0] == 0).all()
        np.testing.assert_allclose(shares, expected, atol=0.015)

    held_to(draws(1.0), [0.4, 0.3, 0.15, 0.1, 0.05])
    held_to(draws(0.5), np.square([0.4, 0.3, 0.15, 0.1, 0.05]))
    held_to(draws(1.0, k=2), [4, 3, 0, 0, 0])
    held_to(draws(1.0, p=0.8), [0.4, 0.3, 0.15, 0, 0])
    held_to(draws(1.0, k=3, p=0.8), [0.4, 0.3, 0, 0, 0])  # of three, two have .82 of what is left
    held_to(
        draws(1.0, p=0.0), [1, 0, 0, 0, 0]
    )  # the most probable token, also where it is not the first:
    assert (
        int(pick(logits[None, ::-1], keys[:1], Sampling(np.float32(1), None, np.float32(0)))[0])
        == 4
    )
    held_to(draws(1.0, k=9, p=1.0), [0.4, 0.3, 0.15, 0.1, 0.05])
    held_to(draws(1.0, m=0.3), [0.4, 0.3, 0.15, 0, 0])  # at least 0.3 of 0.4
    held_to(draws(1.0, k=2, m=0.3), [4, 3, 0, 0, 0])
    held_to(draws(1.0, m=0.0), [0.4, 0.3, 0.15, 0.1, 0.05])


FLOATS = st.floats(-100, 100, width=32, allow_subnormal=False)  # XLA takes a subnormal for 0


@settings(max_examples=60, deadline=None)
@given(st.lists(FLOATS, min_size=8, max_size=8), st.integers(1, 9), st.floats(0.01, 1))
def test_the_likeliest_are_those_that_sorting_finds(logits, k, p):
    logits = np.array([logits], np.float32)
    order = np.sort(logits[0])[::-1]
    got = np.isfinite(find(logits, np.ones_like(logits), np.float32(k)))[0]
    np.testing.assert_array_equal(got, logits[0] >= order[min(k, 8) - 1])

    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    got = np.isfinite(find(logits, weights, np.float32(p)))[0]
    assert weights[0, got].sum() >= p - 1e-5
    least = weights[0, got].min()
    assert (weights[0, ~got] <= least).all()
    assert weights[0, logits[0] > logits[0, got].min()].sum() < p + 1e-5


find = jax.jit(likeliest)


@pytest.mark.exhaustive
def test_traced_in_16_bits_and_under_autocast():
    model, params = prepared("llama")
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    assert greedy(model, half, PROMPTS, max_tokens=4).tokens.dtype == jnp.int32
    draw = lambda params, prompts, lengths, key, temperature: models.generate(
        model, params, prompts, key, max_tokens=6, temperature=temperature, lengths=lengths
    )
    inputs = params, PROMPTS, LENGTHS, jax.random.key(0), jnp.float32(0.9)
    lowered = ft.autocast(draw, "float32")(*inputs)
    np.testing.assert_array_equal(lowered.tokens, jax.jit(draw)(*inputs).tokens)


def test_padded():
    tokens, lengths = models.padded([[5, 6, 7], [], np.array([8])])
    np.testing.assert_array_equal(tokens, [[5, 6, 7], [0, 0, 0], [8, 0, 0]])
    assert lengths.tolist() == [3, 0, 1] and tokens.dtype == lengths.dtype == np.int32


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            dict(prompts=np.ones((1, 3), np.float32)),
            TypeError,
            r"prompts of integer tokens; got float32\[1, 3\]",
        ),
        (
            dict(prompts=[1, 2]),
            ValueError,
            r"prompts \[batch, time\] of at least one token each; got shape \(2,\)",
        ),
        (
            dict(prompts=np.ones((2, 0), np.int32)),
            ValueError,
            r"got shape \(2, 0\); models.padded pads",
        ),
        (
            dict(lengths=[3]),
            ValueError,
            r"lengths must be integers \[batch\] \(3,\); got int32\[1\]",
        ),
        (dict(lengths=[3, 0, 1]), ValueError, r"lengths must be from 1 to 7; got \[3, 0, 1\]"),
        (dict(lengths=[3, 8, 1]), ValueError, r"lengths must be from 1 to 7; got \[3, 8, 1\]"),
        (dict(max_tokens=0), ValueError, "max_tokens must be >= 1; got 0"),
        (
            dict(max_tokens=35),
            ValueError,
            "prompts of 7 tokens and max_tokens=35 exceed the model's context of 40",
        ),
        (
            dict(temperature=np.float32(1)),
            ValueError,
            "sampling needs key=jax.random.key\\(...\\); or pass temperature=0",
        ),
        (
            dict(temperature=-1.0, key=0),
            ValueError,
            r"temperature must be finite and >= 0; got -1\.0",
        ),
        (dict(top_k=0), ValueError, "top_k must be an integer >= 1; got 0"),
        (dict(top_p=1.5), ValueError, r"top_p must be from 0 to 1; got 1\.5"),
    ],
)
def test_errors(options, error, text):
    model, params = prepared("gpt")
    key = None if options.pop("key", None) is None else jax.random.key(0)
    with pytest.raises(error, match=text):
        models.generate(
            model,
            params,
            options.pop("prompts", PROMPTS),
            key,
            **{"max_tokens": 4, "temperature": 0, **options},
        )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_dtype_casts_parameters_and_cache_once(name):
    """The text of a model whose parameters have that dtype; inside the loop, nothing is cast from
    float32 weights."""
    model, params = prepared(name)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    out = greedy(model, params, PROMPTS, max_tokens=6, lengths=LENGTHS, dtype="bfloat16")
    want = greedy(model, low, PROMPTS, max_tokens=6, lengths=LENGTHS)
    np.testing.assert_array_equal(out.tokens, want.tokens)


def test_keys_and_values_are_cached_in_the_dtype_of_the_parameters_with_the_heads_first():
    model, params = prepared("llama")
    model, low = with_separate_layers(model, params, jnp.bfloat16)
    cache = empty_cache(model, low, jax.ShapeDtypeStruct((3, 40), jnp.int32))
    assert not model.stacked and sorted(cache["blocks"]) == ["0", "1"]
    for block in cache["blocks"].values():
        assert (
            block["attention"]["cached_key"].dtype
            == block["attention"]["cached_value"].dtype
            == jnp.bfloat16
        )
        assert block["attention"]["cached_key"].shape == (3, 2, 40, 4)
        assert block["attention"]["index"].dtype == jnp.int32


@pytest.mark.exhaustive
def test_a_stacked_model_generates_what_separate_layers_do():
    model, params = prepared("gpt")
    assert model.stacked
    apart = greedy(*models.unstack(model, params), PROMPTS, max_tokens=6, lengths=LENGTHS)
    np.testing.assert_array_equal(
        greedy(model, params, PROMPTS, max_tokens=6, lengths=LENGTHS).tokens, apart.tokens
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_quantized_parameters_generate_what_their_values_do(name):
    model, params = prepared(name)
    recipe = {"embed": compress.Int8(axes=-1), ".*kernel": compress.Int4(4)}
    small = compress.quantize(params, recipe)
    texts = greedy(model, small, PROMPTS, max_tokens=6, lengths=LENGTHS)
    same = greedy(model, compress.materialize(small), PROMPTS, max_tokens=6, lengths=LENGTHS)
    np.testing.assert_array_equal(texts.tokens, same.tokens)
    close(texts.log_probs, same.log_probs, 1e-4)


@pytest.mark.exhaustive
def test_beams_of_quantized_parameters():
    model, params = prepared("llama")
    small = compress.quantize(params, {".*kernel": compress.Int4(4)})
    beams = lambda params: models.beam_search(model, params, PROMPTS, max_tokens=4, beams=2)
    np.testing.assert_array_equal(beams(small).tokens, beams(compress.materialize(small)).tokens)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("platform", "chip", "rows", "rule", "count"),
    [("gpu", "H100 SXM5 80GB", 1, "two_rows", 8), ("tpu", "TPU v5e", 2, "few_updates", 4)],
)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_token_is_decoded_by_a_tuned_step(name, platform, chip, rows, rule, count, monkeypatch):
    model, params = prepared(name)
    prompts = PROMPTS[:rows]
    generated = lambda: greedy(model, params, prompts, max_tokens=5, dtype="bfloat16")
    plain = generated()
    _generate._generate.clear_cache()
    tuned = []
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr("fnet.transforms._tune._accelerators.LARGE", 64)
    monkeypatch.setattr(
        ft, "tune", lambda f, tune=ft.tune: tuned.append(tune(f, chip)) or tuned[-1]
    )
    got = generated()
    _generate._generate.clear_cache()
    model, params = with_separate_layers(model, params, jnp.dtype("bfloat16"))
    fired = ft.explain(tuned[0], params, prompts[:, :1], empty_cache(model, params, prompts)).rows
    assert len([row for row in fired if row.rule == rule]) >= count
    np.testing.assert_array_equal(got.tokens, plain.tokens)
    close(
        got.log_probs, plain.log_probs, 0.05
    )  # measured: equal; bfloat16 rounds each product by up to 2e-3
