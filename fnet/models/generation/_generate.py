"""Text generation for prompts of different lengths, with a key/value cache and one compiled
program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from fnet import layers as nn
from fnet import transforms as ft
from fnet.jaxpr import automatic, is_implicit
from fnet.layers._explicit import like
from fnet.layers._sizes import at_most, integers, sized
from fnet.models._blocks import unstack
from fnet.models.generation._sampling import Sampling, is_sampled, penalized, pick, sampling

_SMALLEST = (
    16  # programs are compiled for lengths that are powers of two; this is the smallest length
)


class Generated(NamedTuple):
    """The output of `generate`, registered with `jax.export` as "fnet.models.Generated".

    Attributes:
        tokens: [batch * samples, max_tokens], the generated tokens, with 0 after the end of an
            example.
        lengths: [batch * samples], the number of tokens of each example before its stop token, or
            max_tokens if it has none.
        log_probs: [batch * samples, max_tokens], the log-probability of each token according to the
            model, before penalties, temperature, top_k, top_p and min_p, with 0 after the end of an
            example.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> models.generate(gpt, params, jnp.array([[1, 2]]), max_tokens=3, temperature=0).tokens.shape
    (1, 3)
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None = None  # None: an exported program of an earlier version


export.register_namedtuple_serialization(Generated, serialized_name="fnet.models.Generated")


def padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pads lists of tokens on the right with 0, so that they form one array.

    Args:
        rows: a list of tokens for each example.

    Returns:
        `(tokens, lengths)`: the tokens [rows, length of the longest list], and the length of each
        list [rows].

    >>> padded([[5, 6, 7], [8]])
    (array([[5, 6, 7],
           [8, 0, 0]], dtype=int32), array([3, 1], dtype=int32))
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for row, given in zip(tokens, rows):
        row[: len(given)] = given
    return tokens, lengths


def generate(
    model: nn.Layer,
    params: dict,
    prompts: jax.Array,
    key: jax.Array | None = None,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    samples: int = 1,
    stop: Sequence[int] = (),
    lengths: jax.Array | None = None,
    dtype: Any = None,
) -> Generated:
    """Continues each prompt, one token at a time.

        out = models.generate(model, params, [tokenizer.encode("Once upon a time")], max_tokens=200, temperature=0)
        print(tokenizer.decode(out.tokens[0, :out.lengths[0]]))

    One call of the model processes the prompts except their last tokens; a `lax.while_loop` then
    adds one token to every example until all have stopped, with keys and values in a cache. Both
    are one compiled program, which serves calls of similar lengths (prompts and `max_tokens` are
    rounded up to powers of two) and any values of the sampling options. It copies the parameters
    once, to cast them to `dtype` and to unstack their blocks; if that takes too much memory, see
    `unstack`.

    Args:
        model: a decoder, such as GPT, Decoder or LSTMLanguageModel.
            `model(params, tokens, lengths=, state=cache)` returns (logits [batch, time,
            vocab_size], cache), and `model.cache` creates an empty cache.
        params: the parameters of the model.
        prompts: integers [batch, time], at least one token in each example, padded on the right.
        key: a `jax.random.key`, not needed for temperature 0. The random numbers of an example
            depend on its index in the batch and on the index of the token, not on other examples.
        max_tokens: the maximum number of tokens to generate.
        temperature: divisor of the logits, finite. 0 takes the most probable token; a temperature
            that is traced by `jax.jit` must not be 0.
        top_k: sample only from the k most probable tokens (Fan et al., 2018), an integer >= 1. More
            than the vocabulary has no effect. Tokens as probable as the k-th are kept, too.
        top_p: after `top_k`, sample only from the smallest set of tokens whose probabilities add up
            to at least p (Holtzman et al., 2020, nucleus sampling), from 0 (only the most probable
            token) to 1 (no effect). Tokens as probable as the last one of the set are kept, too.
        min_p: sample only from tokens whose probability is at least min_p times the largest (Nguyen
            et al., 2024), from 0 (no effect) to 1 (only the most probable tokens).
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the
            prompt or in the generated text (Keskar et al., 2019).
        presence_penalty: subtracted once from the logits of generated tokens.
        frequency_penalty: subtracted from the logit of a token for each time that it was generated.
        samples: number of texts for each prompt, which is still processed only once. Row
            `i * samples + j` of the result is text j of prompt i.
        stop: tokens that end an example.
        lengths: integers [batch], the number of tokens of each prompt. Default: `time`.
        dtype: the dtype to which floating-point parameters are cast, and in which keys and values
            are cached. Default: that of the parameters. "bfloat16" is faster on GPUs and TPUs,
            where the time of a token depends on the number of bytes that it reads.

    Returns:
        `Generated(tokens, lengths, log_probs)`, with tokens [batch * samples, max_tokens].

    Raises:
        ValueError: `prompts` are not [batch, time], a value in `lengths` is not from 1 to `time`,
            an option is outside its range, a prompt and `max_tokens` together exceed the model's
            context, or tokens are sampled without a key.
        TypeError: `prompts` are not integers.

    >>> from fnet import models
    >>> model = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> models.generate(model, params, [[1, 2, 3]], max_tokens=5, temperature=0).tokens.shape
    (1, 5)
    """
    options = sampling(
        "generate",
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    sampled = is_sampled(temperature)
    inputs, sizes = prepare("generate", model, prompts, lengths, key, sampled, samples, max_tokens)
    out = _generate(
        model,
        params,
        *inputs,
        options,
        jnp.asarray(stop, jnp.int32),
        jnp.asarray(max_tokens, jnp.int32),
        **sizes,
        samples=samples,
        sampled=sampled,
        dtype=None if dtype is None else jnp.dtype(dtype),
    )
    return Generated(
        out.tokens[:, :max_tokens],
        jnp.minimum(out.lengths, max_tokens),
        out.log_probs[:, :max_tokens],
    )


def prepare(caller, model, prompts, lengths, key, sampled, samples, max_tokens) -> tuple:
    """Checks the arguments of `generate`, and returns ((prompts, lengths, key), sizes for the
    compiled program).

    The sizes are {"room": number of tokens that the compiled program can generate, "capacity":
    length of its cache}.
    """
    if sampled and key is None:
        raise ValueError(f"{caller}: sampling needs key=jax.random.key(...); or pass temperature=0")
    if not isinstance(samples, int) or samples < 1:
        raise ValueError(f"{caller}: samples must be an integer >= 1; got {samples!r}")
    prompts, lengths = _prompts(caller, model, prompts, lengths, max_tokens)
    time, room = prompts.shape[1], _bucket(max_tokens)
    context = getattr(model, "context", None)
    if sized(time):
        context = context or _bucket(time) + room
        width = 1 + max(time - 1, min(_bucket(time - 1), context))
        capacity = min(width + room, context)
    else:  # a symbolic length, for one exported program that is used for all lengths
        width, capacity = time, context or time + room
    prompts = jnp.pad(prompts, ((0, 0), (0, width - time)))
    return (prompts, lengths, jax.random.key(0) if key is None else key), {
        "room": room,
        "capacity": capacity,
    }


class Carry(NamedTuple):
    """The carry of the loop over tokens. `last` [batch] is the last token of each example. For the
    repetition, presence and frequency penalties, `seen` states which tokens are in the prompt, and
    `counts` states how often each token was generated."""

    count: jax.Array
    last: jax.Array
    done: jax.Array
    out: Generated
    cache: Any
    keys: jax.Array
    seen: jax.Array | None
    counts: jax.Array | None


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("room", "capacity", "samples", "sampled", "dtype")
)
def _generate(
    model,
    params,
    prompts,
    lengths,
    key,
    options,
    stop,
    max_tokens,
    *,
    room,
    capacity,
    samples,
    sampled,
    dtype,
):
    def run(params, prompts, lengths, key, options, stop, max_tokens):
        decoder, params = prepared(model, params, dtype)
        carry = start(
            decoder,
            params,
            prompts,
            lengths,
            key,
            options,
            room=room,
            capacity=capacity,
            samples=samples,
        )
        return advance(decoder, params, carry, options, stop, max_tokens, sampled=sampled).out

    return automatic(run, like(prompts, 0))(
        params, prompts, lengths, key, options, stop, max_tokens
    )


def start(
    model, params, prompts, lengths, key, options: Sampling, *, room, capacity, samples
) -> Carry:
    """Runs the prompts [batch, time] through the model, and returns the initial carry of the loop
    over new tokens."""
    batch, width = prompts.shape
    cache = empty_cache(model, params, jax.ShapeDtypeStruct((batch, capacity), jnp.int32))
    if width != 1:
        # Processes all tokens but the last, to cache their keys and values. XLA removes the unused
        # logits.
        _, cache = reading(model, params)(params, prompts[:, :-1], lengths=lengths - 1, state=cache)
    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)
    seen = counts = None
    if options.counts:
        vocab_size = jax.eval_shape(lambda: reading(model, params)(params, last, state=cache))[
            0
        ].shape[-1]
        valid = jnp.arange(width)[None] < lengths[:, None]
        # Padding is out of bounds and therefore dropped.
        tokens = jnp.where(valid, prompts, vocab_size)
        mark = lambda tokens: jnp.zeros(vocab_size, bool).at[tokens].set(True, mode="drop")
        seen = jax.vmap(mark)(tokens)
        counts = jnp.zeros((batch, vocab_size), jnp.int32)
    if samples > 1:
        cache = taken(model, cache, jnp.repeat(jnp.arange(batch), samples), batch, capacity)
        last, seen, counts = jax.tree.map(lambda x: jnp.repeat(x, samples, 0), (last, seen, counts))
        batch = batch * samples
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch, dtype=jnp.int32))
    zero = jnp.zeros(batch, jnp.int32)
    out = Generated(
        jnp.zeros((batch, room), jnp.int32), zero, jnp.zeros((batch, room), jnp.float32)
    )
    return Carry(jnp.zeros((), jnp.int32), last[:, 0], zero > 0, out, cache, keys, seen, counts)


def advance(model, params, carry: Carry, options: Sampling, stop, until, *, sampled) -> Carry:
    """Generates tokens until each example has `until` new tokens, or all examples have stopped."""
    seen, apply = carry.seen, decoder(model)

    def going(carry):
        return (carry.count < until) & ~carry.done.all()

    def step(carry):
        count, last, done, out, cache, keys, _, counts = carry
        logits, cache = apply(params, last[:, None], cache)
        logits = logits[:, 0].astype(jnp.float32)  # [batch, vocab_size]
        draws = jax.vmap(lambda key: jax.random.fold_in(key, count))(keys) if sampled else None
        token = pick(
            logits if counts is None else penalized(logits, options, seen, counts), draws, options
        )
        done = done | (token[:, None] == stop[None]).any(-1)
        chosen = jnp.take_along_axis(logits, token[:, None], 1) - jax.nn.logsumexp(
            logits, -1, keepdims=True
        )
        token = jnp.where(done, 0, token)
        if counts is not None:
            counts = jax.vmap(lambda row, token, n: row.at[token].add(n))(
                counts, token, (~done).astype(jnp.int32)
            )
        put = lambda rows, column: lax.dynamic_update_slice(
            rows, column, (jnp.zeros_like(count), count)
        )
        out = Generated(
            put(out.tokens, token[:, None]),
            jnp.where(done, out.lengths, count + 1),
            put(out.log_probs, jnp.where(done[:, None], 0, chosen)),
        )
        return Carry(count + 1, token, done, out, cache, keys, None, counts)

    return lax.while_loop(going, step, carry._replace(seen=None))._replace(seen=seen)


def decoder(model):
    """Returns a function (params, tokens, cache) -> (logits, cache), which is tuned."""

    def decode(params, tokens, cache):
        return reading(model, params)(params, tokens, state=cache)

    return ft.tune(decode)


def reading(model, params):
    """Returns the model as a function of these parameters, which may be quantized or have adapters."""
    leaves = jax.tree.leaves(params, is_leaf=is_implicit)
    return ft.use_implicit_arrays(model) if any(map(is_implicit, leaves)) else model


def taken(model, cache, rows, batch, capacity):
    """Selects the examples with the indices `rows` from a cache of `batch` examples."""
    other = jax.eval_shape(
        lambda: model.cache(jax.ShapeDtypeStruct((2 * batch, capacity), jnp.int32))
    )

    def take(x, other):
        axes = [axis for axis, (a, b) in enumerate(zip(x.shape, other.shape)) if a != b]
        return jnp.take(x, rows, axes[0]) if axes else x

    return jax.tree.map(take, cache, other)


def prepared(model, params, dtype):
    """Returns a pair: the unstacked model, and the unstacked parameters cast to `dtype`."""
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, params)
    return unstack(model, params) if getattr(model, "stacked", False) else (model, params)


def empty_cache(model, params, tokens):
    """Returns an empty cache, with keys and values in the dtype of the parameters."""
    dtypes = {x.dtype for x in jax.tree.leaves(params) if _is_float(x)}
    cache = model.cache(tokens)
    if len(dtypes) != 1:
        return cache
    dtype = dtypes.pop()
    keys_and_values = ("cached_key", "cached_value")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(dtype) if path[-1].key in keys_and_values else x, cache
    )


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _prompts(caller, model, prompts, lengths, max_tokens):
    prompts = jnp.asarray(prompts)
    if not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise TypeError(
            f"{caller}: expected prompts of integer tokens; got "
            f"{prompts.dtype}{list(prompts.shape)}"
        )
    if prompts.ndim != 2 or not prompts.size:
        raise ValueError(
            f"{caller}: expected prompts [batch, time] of at least one token each; got shape "
            f"{prompts.shape}; models.padded pads lists of different lengths"
        )
    if max_tokens < 1:
        raise ValueError(f"{caller}: max_tokens must be >= 1; got {max_tokens}")
    batch, time = prompts.shape
    lengths = (
        jnp.full(batch, time, jnp.int32)
        if lengths is None
        else integers(lengths, batch, f"{caller}: lengths")
    )
    longest = time
    if not isinstance(lengths, jax.core.Tracer):
        held = np.asarray(lengths)
        if held.min() < 1 or held.max() > time:
            raise ValueError(f"{caller}: lengths must be from 1 to {time}; got {held.tolist()}")
        longest = int(held.max())
    context = getattr(model, "context", None)
    if context is not None and not at_most(caller, longest + max_tokens, context + 1):
        raise ValueError(
            f"{caller}: prompts of {longest} tokens and max_tokens={max_tokens} exceed the model's "
            f"context of {context}"
        )
    return prompts[:, :longest].astype(jnp.int32), lengths.astype(jnp.int32)


def _bucket(count):
    """Returns the length for which a program is compiled: 0, or the next power of two."""
    return 0 if count == 0 else max(_SMALLEST, 1 << (count - 1).bit_length())
