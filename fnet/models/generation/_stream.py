"""Streaming: yields tokens and text while they are generated."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import layers as nn
from fnet.jaxpr import automatic
from fnet.layers._explicit import like
from fnet.models.generation import _generate
from fnet.models.generation._sampling import is_sampled, sampling


def stream(
    model: nn.Layer,
    params: dict,
    prompts: jax.Array,
    key: jax.Array | None = None,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    samples: int = 1,
    stop: Sequence[int] = (),
    lengths: jax.Array | None = None,
    dtype: Any = None,
    **options: float | None,
) -> Iterator[np.ndarray]:
    """Generates the tokens of `generate`, and yields one of each example at a time.

        for tokens in models.stream(model, params, prompts, max_tokens=100, temperature=0):
            print(tokens)

    The arguments are those of `generate`, and are checked when the first token is requested.

    Yields:
        An int32 array [batch * samples], the next token of each example, or -1 for an example that
        has ended.

    Raises:
        ValueError, TypeError: as for `generate`.

    >>> model = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> [tokens.shape for tokens in models.stream(model, params, [[1, 2, 3]], max_tokens=2, temperature=0)]
    [(1,), (1,)]
    """
    selection = sampling("stream", temperature=temperature, **options)
    sampled = is_sampled(temperature)
    inputs, sizes = _generate.prepare(
        "stream", model, prompts, lengths, key, sampled, samples, max_tokens
    )
    model, params = _generate.prepared(model, params, None if dtype is None else jnp.dtype(dtype))
    carry = _start(model, params, *inputs, selection, **sizes, samples=samples)
    stop = jnp.asarray(stop, jnp.int32)
    for _ in range(max_tokens):
        carry = _step(model, params, carry, selection, stop, sampled=sampled)
        tokens, done = np.asarray(carry.last), np.asarray(carry.done)
        yield np.where(done, -1, tokens)
        if done.all():
            return


def stream_text(
    model: nn.Layer,
    params: dict,
    tokenizer: Any,
    prompt: str,
    key: jax.Array | None = None,
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Continues a text, and yields the continuation in pieces while it is generated.

        for piece in models.stream_text(model, params, tokenizer, "Once upon a time", max_tokens=200, temperature=0):
            print(piece, end="", flush=True)

    Each piece ends with a complete character. What may be the start of a stop string is held back
    until the text after it shows that it is not.

    Args:
        model, params: as for `generate`.
        tokenizer: a tokenizer, such as the result of `models.read_tokenizer`: `encode`, `decode`,
            and `stop`, the tokens that end a text.
        prompt: the text to continue, of at least one token.
        key: a `jax.random.key`, not needed for temperature 0.
        stop: strings that end the text. It ends before the first of them; where several overlap,
            before the one that is completed first.
        options: `max_tokens` and other options of `generate`, except `samples` and `lengths`.

    Yields:
        The pieces of the generated text, as strings.

    Raises:
        ValueError, TypeError: as for `generate`.

    >>> tokenizer = models.CharTokenizer("to be or not")
    >>> model = models.GPT(tokenizer.vocab_size, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> len("".join(models.stream_text(model, params, tokenizer, "to be", max_tokens=5, temperature=0)))
    5
    """
    start = [int(token) for token in tokenizer.encode(prompt)]
    yield from pieces("stream_text", model, params, tokenizer, start, key, stop, **options)


def pieces(
    caller: str, model, params, tokenizer, start: list[int], key, stop: Sequence[str], **options
) -> Iterator[str]:
    """Yields the text that follows the tokens `start`, in pieces."""
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(
            f"{caller}: expected a sequence of strings as stop, none of them empty; got {stop!r}"
        )
    for name in {"samples", "lengths"} & options.keys():
        raise TypeError(f"{caller}: {name} is an option of `stream`; {caller} generates one text")
    tokens, sent, begin = list(start), 0, len(tokenizer.decode(start)) if start else 0
    for (token,) in stream(model, params, [start], key, stop=tokenizer.stop, **options):
        if token < 0:
            break
        tokens.append(int(token))
        text = tokenizer.decode(tokens)[begin:]
        complete = text.rstrip("\ufffd")  # the end may be an incomplete character
        end = _end(complete, stop)
        if end is not None:
            if end > sent:
                yield text[sent:end]
            return
        safe = len(complete)
        safe -= max(
            (n for each in stop for n in range(1, len(each)) if complete.endswith(each[:n])),
            default=0,
        )
        if safe > sent:
            yield text[sent:safe]
            sent = safe
    text = tokenizer.decode(tokens)[begin:]
    end = _end(text, stop)
    if text[sent:end]:
        yield text[sent:end]


def _end(text: str, stop: Sequence[str]) -> int | None:
    """Returns where the stop string begins that is completed first, so that the result does not
    depend on how the text is divided into tokens."""
    ends = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    return min(ends)[1] if ends else None


@functools.partial(jax.jit, static_argnums=0, static_argnames=("room", "capacity", "samples"))
def _start(model, params, prompts, lengths, key, options, *, room, capacity, samples):
    run = functools.partial(_generate.start, model, room=room, capacity=capacity, samples=samples)
    return automatic(run, like(prompts))(params, prompts, lengths, key, options)


@functools.partial(jax.jit, static_argnums=0, static_argnames="sampled", donate_argnums=2)
def _step(model, params, carry, options, stop, *, sampled):
    run = functools.partial(_generate.advance, model, sampled=sampled)
    return automatic(run, like(carry.last))(params, carry, options, stop, carry.count + 1)
