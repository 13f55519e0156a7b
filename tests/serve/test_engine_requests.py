"""serve.Engine: what a request may ask, how it ends, and the thread."""

import re
import threading

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, serve
from fnet import layers as nn
from fnet.serve._engine import _cache

pytestmark = pytest.mark.usefixtures("quickly")


@pytest.fixture(scope="module")
def model():
    return engines.start("grouped queries")


@pytest.fixture
def engine(model):
    return engines.engine(*model, context=32, slots=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "a prompt of at least one integer token, such as [1, 2, 3]; got []"),
        ({"prompt": "text"}, "got 'text'"),
        ({"prompt": [[1, 2]]}, "got [[1, 2]]"),
        ({"prompt": [1.5]}, "got [1.5]"),
        ({"prompt": [1, 24]}, "tokens must be from 0 to 23; got 24"),
        ({"prompt": [-1]}, "tokens must be from 0 to 23; got -1"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1; got 0"),
        ({"max_tokens": True}, "max_tokens must be an integer >= 1; got True"),
        ({"max_tokens": 31}, "a prompt of 3 tokens and max_tokens=31 exceed the context of 32"),
        ({"temperature": -1}, "temperature must be finite and >= 0; got -1"),
        ({"temperature": None}, "temperature must be a number; got None"),
        ({"temperature": "hot"}, "temperature must be a number; got 'hot'"),
        ({"top_k": 1.5}, "top_k must be an integer >= 1; got 1.5"),
        ({"top_p": 2}, "top_p must be from 0 to 1; got 2"),
        ({"seed": -1}, "seed must be an integer from 0 to 9223372036854775807; got -1"),
        ({"stop": "end"}, "stop must be a sequence of tokens, such as (2,); got 'end'"),
        ({"stop": (1.5,)}, "a stop token must be an integer >= 0; got 1.5"),
        ({"log_probs": 21}, "log_probs must be an integer from 0 to 20; got 21"),
        ({"adapter": "frensh"}, "unknown adapter 'frensh'; the engine has none"),
        ({"mask": [1]}, "mask needs a method allowed, or must be None; got [1]"),
        ({"callback": 3}, "callback needs a method __call__, or must be None; got 3"),
    ],
)
def test_errors_of_submit(engine, options, message):
    call = {"prompt": [1, 2, 3], "max_tokens": 4, **options}
    with pytest.raises(ValueError, match=r"^submit: ") as error:
        engine.submit(call.pop("prompt"), **call)
    assert message in str(error.value)
    assert not engine.step()  # nothing waits


def test_errors_of_the_constructor(model):
    model, params = model
    for options, message in [
        ({"slots": 0}, "Engine: slots must be an integer >= 1; got 0"),
        ({"context": 65}, "Engine: context=65 exceeds that of the model, 64; pass at most that"),
        ({"chunk": 0}, "Engine: chunk must be an integer >= 1; got 0"),
        ({"queue": 0}, "Engine: queue must be an integer >= 1; got 0"),
        ({"memory": 0}, "Engine: memory must be an integer >= 1; got 0"),
        ({"prefix_cache": -1}, "Engine: prefix_cache must be an integer >= 0; got -1"),
        ({"stop": 2}, "Engine: stop must be a sequence of tokens, such as (2,); got 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            serve.Engine(model, params, **options)
    embed = nn.Embed(24, 3)
    with pytest.raises(ValueError, match="Embed has no cache"):
        serve.Engine(embed, embed.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))[0])


def test_errors_of_adapters(model):
    model, params = model
    other = jax.tree.map(lambda x: x + 1, params)
    small = engines.engine(model, params, memory=4000)
    with pytest.raises(ValueError, match=r"a text of up to 52 tokens needs .* and memory=4000"):
        small.submit([1, 2, 3], max_tokens=50)
    for adapter, message in [
        ({}, "adapter 'x' needs the structure of params, with LowRank leaves"),
        (other, "x': blocks/.* differs from params, and is no LowRank"),
        (engines.adapted(other, {"head": 1}, 0), "differs from params, and is no LowRank"),
        (
            {**params, "head": compress.lora(jax.random.key(0), other, {"head": 1})["head"]},
            "'x': head/kernel has another base than params; adapt the params that are served",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            serve.Engine(model, params, adapters={"x": adapter})
    adapters = {"french": engines.adapted(params, {"head": 1}, 0)}
    with pytest.raises(ValueError, match=r"unknown adapter 'frensh'; did you mean 'french'\?"):
        engines.engine(model, params, adapters=adapters).submit([1], max_tokens=1, adapter="frensh")


def test_a_full_queue_and_a_closed_engine(model):
    engine = engines.engine(*model, queue=2)
    first, second = (engine.submit([1], max_tokens=1) for _ in range(2))
    with pytest.raises(serve.Full, match="2 requests wait, and queue=2; ask again later"):
        engine.submit([1], max_tokens=1)
    first.cancel()
    assert engine.submit([1], max_tokens=1).result().finish_reason == "length"
    engine.close()
    assert second.finish_reason == "length" and engine.stats().refused == 1
    with pytest.raises(RuntimeError, match="it is closed, and accepts no more requests"):
        engine.submit([1], max_tokens=1)
    with pytest.raises(RuntimeError, match=r"start\(\) after close\(\)"):
        engine.start()


def test_stop_tokens(model):
    text = engines.alone(*model, [1, 2], 8)
    at = next(i for i, token in enumerate(text) if token not in text[:i] and i > 1)
    for engine, options in (
        (engines.engine(*model, stop=(text[at],)), {}),
        (engines.engine(*model), {"stop": np.array([text[at]])}),
    ):
        # The row computes one token more before the host knows, which nobody sees.
        [finished] = engine.generate([[1, 2]], max_tokens=8, temperature=0, **options)
        assert finished.tokens == text[:at] and finished.finish_reason == "stop"
        assert len(finished.log_probs) == at
        assert engine.stats().generated_tokens == at


def test_cancellation_frees_the_slot(engine):
    first, second, third = (engine.submit([1], max_tokens=20) for _ in range(3))
    engine.step()
    assert engine.stats().active == 2 and engine.stats().waiting == 1
    first.cancel()
    assert first.finish_reason == "cancelled" and len(first.result().tokens) == 1
    engine.step()
    assert len(third.generated) == 1 and len(first.generated) == 1 and len(second.generated) == 2
    first.cancel()
    assert engine.stats().finished["cancelled"] == 1
    waiting = engine.submit([1], max_tokens=1)
    waiting.cancel()
    assert engine.stats().waiting == 0 and list(waiting) == []


def test_a_cancelled_prompt_is_left(engine):
    long, short = engine.submit([1] * 30, max_tokens=2), engine.submit([1], max_tokens=1)
    engine.step()
    assert engine.stats().active == 1
    long.cancel()
    assert short.result().finish_reason == "length" and long.generated == []


class Even:
    """Allows even tokens, and records what it is asked."""

    def __init__(self):
        self.asked = []

    def allowed(self, tokens):
        self.asked.append(tokens)
        return np.arange(engines.VOCAB) % 2 == 0


def test_masks(model, engine):
    mask = Even()
    masked, free = (engine.submit([1, 2], max_tokens=6, mask=each, seed=1) for each in (mask, None))
    tokens = masked.result().tokens
    assert not any(token % 2 for token in tokens)
    assert mask.asked == [tokens[:i] for i in range(6)]
    assert free.result().tokens == engines.alone(*model, [1, 2], 6, seed=1)
    with engine:
        assert engine.submit([1, 2], max_tokens=6, mask=Even(), seed=1).result().tokens == tokens


class Broken:
    def __init__(self, result):
        self.result = result

    def allowed(self, tokens):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (KeyError("state"), "KeyError: 'state'"),
        (np.ones(3, bool), r"mask.allowed: expected booleans \[24\], got bool\[3\]"),
        (np.zeros(24, bool), r"mask.allowed: no token may follow \[\]"),
    ],
    ids=["raises", "shape", "nothing"],
)
def test_a_mask_that_fails_ends_its_request_alone(model, engine, result, message):
    broken = engine.submit([1, 2], max_tokens=3, mask=Broken(result))
    other = engine.submit([1, 2], max_tokens=3, temperature=0)
    assert broken.result().finish_reason == "error" and broken.result().tokens == []
    assert re.search(message, broken.result().error)
    assert other.result().tokens == engines.alone(*model, [1, 2], 3)
    with pytest.raises(RuntimeError, match="prompt 0 has failed"):
        engine.generate([[1]], max_tokens=1, mask=Broken(result))


def test_a_callback_that_raises_ends_its_request_alone(model, engine, caplog):
    seen = []

    def fails(token):
        seen.append(token)
        raise OSError("the client is gone")

    broken = engine.submit([1, 2], max_tokens=3, callback=fails)
    heard = []
    other = engine.submit([1, 2], max_tokens=3, temperature=0, callback=heard.append)
    assert broken.result().error == "OSError: the client is gone"
    assert len(broken.result().tokens) == 1 and seen == [*broken, None]
    assert other.result().tokens == engines.alone(*model, [1, 2], 3)
    assert heard == [*other, None] and "the callback of a request" in caplog.text


def test_logits_that_are_not_finite(model):
    model, params = model
    params = {**params, "head": jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), params["head"])}
    text = engines.engine(model, params).submit([1], max_tokens=3).result()
    assert text.finish_reason == "error" and text.tokens == []
    assert text.error == "FloatingPointError: the model's logits are not finite"


def test_a_turn_that_fails_ends_what_runs_and_no_more(model, engine, monkeypatch, caplog):
    running = engine.submit([1, 2], max_tokens=3)
    engine.step()

    def fails(*args, turns):
        raise MemoryError("no room")

    advance = engine._loop._advance
    monkeypatch.setattr(engine._loop, "_advance", fails)
    engine.step()
    monkeypatch.setattr(engine._loop, "_advance", advance)
    assert running.result().error == "MemoryError: no room" and "no room" in caplog.text
    later = engine.submit([1, 2], max_tokens=3, temperature=0)
    assert later.result().tokens == engines.alone(*model, [1, 2], 3)


def test_a_prompt_that_cannot_be_begun_ends_with_the_error(engine, monkeypatch, caplog):
    def fails(*args, **options):
        raise MemoryError("no room")

    monkeypatch.setattr(_cache, "empty", fails)
    broken = engine.submit([1, 2], max_tokens=3)
    monkeypatch.setattr(engine._loop.table, "clear", lambda: None)
    assert broken.result().error == "MemoryError: no room" and "no room" in caplog.text


def test_a_thread_serves_several_readers(model):
    with engines.engine(*model) as engine:
        with pytest.raises(RuntimeError, match=r"step\(\) is for an engine without a thread"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"start\(\) after start\(\)"):
            engine.start()
        results = {}

        def read(seed):
            request = engine.submit([1, 2], max_tokens=6, seed=seed)
            results[seed] = [token.id for token in request], request.result().tokens

        readers = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        [both] = engine.generate([[1, 2]], max_tokens=6, seed=3)
    for seed, (read_tokens, tokens) in results.items():
        assert read_tokens == tokens == engines.alone(*model, [1, 2], 6, seed=seed)
    assert both.tokens == results[3][1]
    assert both.first_token_s is not None and 0 < both.first_token_s <= both.total_s
    stats = engine.stats()
    assert stats.generated_tokens == 7 * 6 and stats.finished["length"] == 7
    assert stats.first_token.total == 7 and stats.between_tokens.total == 7 * 5
    assert 0 < stats.first_token.sum and not engine._thread.is_alive()


def test_closing_waits_or_cancels(model):
    engine = engines.engine(*model)
    with engine:
        requests = [engine.submit([1], max_tokens=30) for _ in range(6)]
    assert [len(request.generated) for request in requests] == [30] * 6
    engine = engines.engine(*model)
    engine.start()
    requests = [engine.submit([1], max_tokens=60) for _ in range(6)]
    next(iter(requests[0]))
    engine.close(cancel=True)
    assert {request.finish_reason for request in requests} <= {"cancelled", "length"}
    assert requests[-1].finish_reason == "cancelled"
    with pytest.raises(ZeroDivisionError), engines.engine(*model) as engine:
        request = engine.submit([1], max_tokens=60)
        raise ZeroDivisionError
    assert request.finish_reason is not None


def test_a_result_that_takes_too_long(model):
    engine = engines.engine(*model)
    engine._thread = threading.current_thread()  # as if another thread took the turns, slowly
    request = engine.submit([1], max_tokens=2)
    with pytest.raises(TimeoutError, match=r"no end within 0.01 s; it still runs"):
        request.result(timeout=0.01)


def test_memory_bounds_the_rows_that_run(model):
    engine = engines.engine(*model)
    one = engine._loop.table.bytes
    engine = engines.engine(*model, memory=2 * one)
    requests = [engine.submit([1, 2], max_tokens=8, temperature=0) for _ in range(5)]
    largest = 0
    while engine.step():
        largest = max(largest, engine.stats().active)
    assert largest == 2 and {request.finish_reason for request in requests} == {"length"}
