"""serve.Engine: every text is that of `models.generate` alone, whoever else is served."""

import collections

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet.serve._engine import _cache, _loop, _prefix, _programs, _table
from fnet.serve._engine._prompt import Plan

pytestmark = pytest.mark.usefixtures("quickly")
LENGTHS = 3, 33, 2, 12, 33  # a prompt of 33 tokens has a block of 32 before its last token
COUNT = 8


@pytest.mark.quick_cases("gpt", "lstm")
@pytest.mark.parametrize("name", engines.MODELS)
def test_greedy_texts_are_those_of_generate(name):
    """In company, with a cold and with a warm prefix cache."""
    model, params = engines.start(name)
    engine, prompts = engines.engine(model, params), engines.prompts(*LENGTHS)
    expected = [engines.alone(model, params, prompt, COUNT) for prompt in prompts]
    assert len({tuple(text) for text in expected}) == len(LENGTHS)
    for warm in False, True:
        texts = engine.generate(prompts, max_tokens=COUNT, temperature=0)
        assert [text.tokens for text in texts] == expected
        hits = [32 if warm and length > 32 else 0 for length in LENGTHS]
        if name != "angles by length":  # whose prompts are computed in one piece
            assert [text.cached_tokens for text in texts] == hits
    assert {text.finish_reason for text in texts} == {"length"}


@pytest.mark.exhaustive
def test_int8_weights():
    model, params = engines.start("grouped queries")
    params = compress.quantize(params, {".*kernel": compress.Int8()})
    prompts = engines.prompts(3, 20)
    texts = engines.engine(model, params).generate(prompts, max_tokens=COUNT, temperature=0)
    for prompt, text in zip(prompts, texts):
        assert text.tokens == engines.alone(model, params, prompt, COUNT)


@pytest.mark.exhaustive  # the random requests below have adapters, too
def test_adapters_in_one_batch():
    """Of different ranks and for different layers, on quantized parameters."""
    model, base = engines.start("grouped queries")
    base = compress.quantize(base, {"blocks/.*kernel": compress.Int8()})
    french = engines.adapted(base, {"blocks/.*kernel": 2, "embed": 3}, 1)
    german = engines.adapted(base, {"blocks/attention/.*kernel": 4, "head": 1}, 2)
    engine = engines.engine(model, base, adapters={"french": french, "german": german})
    assert engine.one_by_one is None
    names = None, "french", "german", "german", None, "french"
    [prompt] = engines.prompts(20)
    requests = [
        engine.submit(prompt, max_tokens=COUNT, temperature=0, adapter=name) for name in names
    ]
    params = {None: base, "french": french, "german": german}
    expected = {name: engines.alone(model, params[name], prompt, COUNT) for name in params}
    assert len({tuple(text) for text in expected.values()}) == 3
    assert [request.result().tokens for request in requests] == [expected[name] for name in names]


def test_sampled_texts_are_those_of_generate():
    """With all options, beside texts with none, and whatever the slot."""
    model, params = engines.start("grouped queries")
    engine = engines.engine(model, params)
    options = dict(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
    )
    prompts = engines.prompts(3, 5, 9, 4)
    chosen = options, {}, {"temperature": 0}, options
    seeds = 5, 6, 7, 2**40 + 1
    requests = [
        engine.submit(prompt, max_tokens=COUNT, seed=seed, **each)
        for prompt, seed, each in zip(prompts, seeds, chosen)
    ]
    for request, prompt, seed, each in zip(requests, prompts, seeds, chosen):
        expected = engines.alone(model, params, prompt, COUNT, seed=seed, **each)
        assert request.result().tokens == expected


def test_generate_gives_equal_prompts_different_seeds():
    model, params = engines.start("grouped queries")
    first, second = engines.engine(model, params).generate([[1, 2]] * 2, max_tokens=8, seed=3)
    expected = [engines.alone(model, params, [1, 2], 8, seed=seed) for seed in (3, 4)]
    assert [first.tokens, second.tokens] == expected and first.tokens != second.tokens


def test_log_probs():
    model, params = engines.start("grouped queries")
    request = engines.engine(model, params).submit(
        [1, 2, 3], max_tokens=4, temperature=0, log_probs=3
    )
    out = models.generate(model, params, jnp.array([[1, 2, 3]]), max_tokens=4, temperature=0)
    logits = model(params, jnp.array([[1, 2, 3, *request.result().tokens]]))[0, 2:-1]
    for token, log_prob, row in zip(request, out.log_probs[0], jax.nn.log_softmax(logits)):
        np.testing.assert_allclose(token.log_prob, log_prob, rtol=1e-4)
        best = np.argsort(-np.asarray(row))[:3]
        assert [each for each, _ in token.top] == best.tolist()
        np.testing.assert_allclose([x for _, x in token.top], row[best], rtol=1e-4)
    plain = engines.engine(model, params).submit([1], max_tokens=1)
    assert [token.top for token in plain] == [()]


def test_several_tokens_at_once(monkeypatch):
    """For small models, while nobody waits: the same texts, stop tokens included."""
    model, params = engines.start("grouped queries")
    engine, asked = engines.engine(model, params), []
    advance = engine._loop._advance

    def recorded(*args, turns):
        asked.append(turns)
        return advance(*args, turns=turns)

    monkeypatch.setattr(engine._loop, "_advance", recorded)
    monkeypatch.setattr(_loop, "_HURRY", np.inf)
    prompts = engines.prompts(3, 5)
    expected = [engines.alone(model, params, prompt, 30) for prompt in prompts]
    engine._loop._pace = 0
    texts = engine.generate(prompts, max_tokens=30, temperature=0)
    assert [text.tokens for text in texts] == expected
    assert asked.count(8) >= 2 and asked.count(1) > 2
    stop = expected[0][10]
    [text] = engine.generate(prompts[:1], max_tokens=30, temperature=0, stop=(stop,))
    assert text.tokens == expected[0][: expected[0].index(stop)] and text.finish_reason == "stop"


def test_a_warm_engine_compiles_nothing_for_its_requests(monkeypatch):
    monkeypatch.setattr(_table, "SHORTEST", 16)
    monkeypatch.setattr(_loop, "_HURRY", np.inf)
    model, params = engines.start("grouped queries")
    engine = engines.engine(model, params, slots=3)
    with pytest.raises(ValueError, match=r"warm: tokens=65 exceeds the context of 64"):
        engine.warm(65)
    engine.warm(64)
    compiled = [f._cache_size() for f in (_programs.advance, _programs.read)]
    engine._loop._pace = 0
    prompts = engines.prompts(3, 9, 17, 40)
    texts = engine.generate(prompts, max_tokens=24, temperature=0)
    assert [f._cache_size() for f in (_programs.advance, _programs.read)] == compiled
    for prompt, text in zip(prompts, texts):
        assert text.tokens == engines.alone(model, params, prompt, 24)


def test_pieces_of_prompts_are_padded_by_at_most_half():
    plan = Plan(None, None, None, 128, True, False)
    assert plan.sizes() == [16, 24, 32, 48, 64, 96, 128]
    assert [plan.size(n) for n in (1, 17, 65, 97, 300)] == [
        (1, 16),
        (17, 24),
        (65, 96),
        (97, 128),
        (128, 128),
    ]
    assert Plan(None, None, None, 100, True, False).sizes()[-2:] == [96, 100]
    cut = Plan(None, None, None, 8, False, False)
    assert cut.sizes() == [1, 2, 4, 8] and cut.size(7) == (4, 4)


@pytest.mark.exhaustive
def test_the_table_grows_and_shrinks_with_what_runs(monkeypatch):
    monkeypatch.setattr(_table, "SHORTEST", 16)
    monkeypatch.setattr(_table, "_PATIENCE", 3)
    model, params = engines.start("grouped queries")
    engine = engines.engine(model, params, slots=4)
    table, sizes = engine._loop.table, []
    prompts = engines.prompts(1, 12, 12)
    requests = [
        engine.submit(prompt, max_tokens=count, temperature=0)
        for prompt, count in zip(prompts, (40, 6, 25))
    ]
    while engine.step():
        sizes.append((len(table.requests), table.length))
    assert sizes[0] == (4, 16) and (4, 32) in sizes and sizes[-1] == (1, 64)
    for prompt, request in zip(prompts, requests):
        text = request.result()
        assert text.tokens == engines.alone(model, params, prompt, len(text.tokens))


def test_a_long_prompt_stops_nobody():
    """Prompts are begun in the order of arrival, and what runs gets a token in each turn."""
    model, params = engines.start("grouped queries")
    engine = engines.engine(model, params, slots=2)
    running = engine.submit([1], max_tokens=20)
    engine.step()
    long, late = (engine.submit(prompt, max_tokens=2) for prompt in engines.prompts(49, 2))
    counts = []
    while not long.generated:
        engine.step()
        counts.append((len(running.generated), len(late.generated)))
    assert counts == [(2, 0), (3, 0), (4, 0)]  # 48 tokens in pieces of 16
    assert len(late.result().tokens) == 2


@pytest.mark.exhaustive
def test_rows_that_are_not_independent_are_computed_one_by_one():
    """A mixture of experts with a capacity over the batch: company would take the places of a
    text."""
    model = engines.decoder(experts=4, experts_per_token=2, expert_capacity=0.6)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)
    engine, prompts = engines.engine(model, params), engines.prompts(1, 1, 1, 2, 1, 3)
    assert "not proved" in engine.one_by_one
    texts = engine.generate(prompts, max_tokens=COUNT, temperature=0)
    for prompt, text in zip(prompts, texts):
        [single] = engine.generate([prompt], max_tokens=COUNT, temperature=0)
        assert single.tokens == text.tokens and single.log_probs == text.log_probs
        if len(prompt) == 1:  # the others take places of the tokens of their own prompts
            assert text.tokens == engines.alone(model, params, prompt, COUNT)


def test_exact_texts_have_the_same_bits_in_company():
    model, params = engines.start("grouped queries")
    engine = engines.engine(model, params, exact=True)
    prompts = engines.prompts(3, 33, 2, 33, 17)
    cold = engine.generate(prompts, max_tokens=COUNT)
    for i, (prompt, text) in enumerate(zip(prompts, cold)):
        [warm] = engine.generate([prompt], max_tokens=COUNT, seed=i)
        assert warm.tokens == text.tokens and warm.log_probs == text.log_probs
        assert warm.cached_tokens == (32 if len(prompt) > 32 else 0)


# 100 requests that arrive and leave at random, and faults that this comparison catches.


def wrong(engine, model, params, count=100, seed=0):
    """Serves `count` random requests, some of which are cancelled, and returns the numbers of those
    whose texts are not those of `models.generate` alone. `params` are {adapter: parameters}."""
    draw = np.random.default_rng(seed)
    [beginning] = engines.prompts(32, seed=9)
    waiting, running, faults = collections.deque(range(count)), {}, []
    while waiting or any(request.finish_reason is None for request, _ in running.values()):
        for _ in range(min(draw.integers(0, 5), len(waiting))):
            number = waiting.popleft()
            prompt = draw.integers(0, engines.VOCAB, draw.integers(1, 6)).tolist()
            prompt = beginning + prompt if draw.random() < 0.5 else prompt
            new = int(draw.integers(1, COUNT + 1))
            name = list(params)[draw.integers(len(params))]
            options = dict(max_tokens=new, temperature=0, adapter=name)
            running[number] = engine.submit(prompt, **options), name
        for request, _ in running.values():
            if request.finish_reason is None and draw.random() < 0.002:
                request.cancel()
        engine.step()
    for number, (request, name) in running.items():
        text, reason = request.generated, request.finish_reason
        expected = engines.alone(model, params[name], request.prompt, request.options.max_tokens)
        if reason == "cancelled":
            expected = expected[: len(text)]
        if text != expected or reason not in ("length", "cancelled"):
            faults.append(number)
    return faults


@pytest.fixture(scope="module")
def world():
    """A model, and parameters without and with adapters."""
    model, params = engines.start("grouped queries")
    rules = {"blocks/.*kernel": 2}
    return model, {
        None: params,
        "french": engines.adapted(params, rules, 1),
        "german": engines.adapted(params, rules, 2),
    }


def served(world, **options):
    model, params = world
    adapters = {name: tree for name, tree in params.items() if name}
    return engines.engine(model, params[None], adapters=adapters, **options)


def test_random_requests_with_cancellations(world):
    engine = served(world)
    assert wrong(engine, *world) == []
    stats = engine.stats()
    assert stats.prefix_hits > 5 and stats.finished["cancelled"] > 5
    assert sum(stats.finished.values()) == 100 and stats.active == stats.waiting == 0


@pytest.mark.exhaustive
def test_random_requests_with_little_room(world):
    """Blocks are dropped all the time, and the table has memory for two rows."""
    row = served(world)._loop.table.bytes
    engine = served(world, prefix_cache=9000, memory=2 * row)
    assert wrong(engine, *world, seed=1) == []
    assert 0 < engine.stats().prefix_bytes <= 9000 and engine.stats().cache_bytes <= 2 * row


def test_planted_fault_a_slot_reused_early(world, monkeypatch):
    engine = served(world)
    leave = engine._loop.table.leave

    def early():
        leave()
        requests = engine._loop.table.requests
        if None not in requests and len(engine._queue):
            requests[0] = None

    monkeypatch.setattr(engine._loop.table, "leave", early)
    assert wrong_or_stuck(engine, world)


def test_planted_fault_the_wrong_adapter(world, monkeypatch):
    engine = served(world)
    monkeypatch.setattr(engine._loop, "_adapters", {"french": 2, "german": 1})
    assert wrong(engine, *world, 30)


def test_planted_fault_a_prefix_of_another_adapter(world, monkeypatch):
    root = _prefix.Prefixes.root
    monkeypatch.setattr(_prefix.Prefixes, "root", lambda self, adapter: root(self, None))
    assert wrong(served(world), *world)


def test_planted_fault_a_block_of_another_text(world, monkeypatch):
    """As if a block had been given to other tokens without being written anew."""
    add = _prefix.Prefixes.add

    def kept(self, parent, tokens, arrays, carries):
        self.first = getattr(self, "first", arrays)
        return add(self, parent, tokens, self.first, carries)

    monkeypatch.setattr(_prefix.Prefixes, "add", kept)
    assert wrong(served(world), *world)


def test_planted_fault_a_slot_that_is_not_cleared(world, monkeypatch):
    """The row of the next request is written over the one before, which ended with NaN, but only as
    far as its own tokens go."""
    put, layout = _cache.put, served(world)._loop.plan.layout

    def partly(table, row, slot, *, layout):
        written = put(jax.tree.map(jnp.copy, table), row, slot, layout=layout)
        count = int(next(x[0] for x, y in zip(jax.tree.leaves(row), layout.leaves) if y.counts))
        pairs = zip(jax.tree.leaves(table), jax.tree.leaves(written), layout.leaves)
        mixed = [
            new if leaf.time is None else old.at[:, :, :count].set(new[:, :, :count])
            for old, new, leaf in pairs
        ]
        return jax.tree.unflatten(jax.tree.structure(table), mixed)

    def texts():
        engine = served(world)
        engine.generate([[1, 2, 3]], max_tokens=2, temperature=0)
        table = engine._loop.table
        poisoned = [
            jnp.full_like(x, jnp.nan) if leaf.time is not None else x
            for x, leaf in zip(jax.tree.leaves(table.cache), layout.leaves)
        ]
        table.cache = jax.tree.unflatten(jax.tree.structure(table.cache), poisoned)
        request = engine.submit([4, 5], max_tokens=4, temperature=0)
        return request.result().tokens

    expected = engines.alone(world[0], world[1][None], [4, 5], 4)
    assert texts() == expected
    monkeypatch.setattr(_cache, "put", partly)
    assert texts() != expected


def wrong_or_stuck(engine, world):
    """Whether the comparison fails, or a request never ends."""
    steps, step = iter(range(1000)), engine.step
    engine.step = lambda: step() if next(steps, None) is not None else pytest.fail("stuck")
    try:
        return wrong(engine, *world)
    except pytest.fail.Exception as error:
        return str(error)
