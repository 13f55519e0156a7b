"""Text generation: prompts of different lengths, a key/value cache, and one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from fnet import layers as nn
from fnet.layers._sizes import at_most, sized
from fnet.models._blocks import unstack

_SIGN = np.uint32(1 << 31)
_SMALLEST = 16    # programs are compiled for lengths that are powers of two from here on


class Generated(NamedTuple):
    """The output of `generate`, registered with `jax.export` as "fnet.models.Generated".

    Attributes:
        tokens: [batch, max_tokens], 0 after the end of an example.
        lengths: [batch], the number of tokens of each example before its stop token, or max_tokens.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> models.generate(gpt, params, jnp.array([[1, 2]]), max_tokens=3, temperature=0).tokens.shape
    (1, 3)
    """

    tokens: jax.Array
    lengths: jax.Array


export.register_namedtuple_serialization(Generated, serialized_name="fnet.models.Generated")


def padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Pads lists of tokens on the right with 0: `(tokens [rows, longest], lengths [rows])`.

    >>> padded([[5, 6, 7], [8]])
    (array([[5, 6, 7],
           [8, 0, 0]], dtype=int32), array([3, 1], dtype=int32))
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for row, given in zip(tokens, rows):
        row[:len(given)] = given
    return tokens, lengths


def generate(model: nn.Layer, params: dict, prompts: jax.Array, key: jax.Array | None = None, *, max_tokens: int,
             temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, stop: Sequence[int] = (),
             lengths: jax.Array | None = None, dtype: Any = None) -> Generated:
    """Continues each prompt token by token.

    The prompts run through the model at once, which stores their keys and values in a cache. Then one `lax.while_loop`
    generates one token of every example in each iteration, until all examples have stopped. All of it is one compiled
    program. The program is reused for prompts and `max_tokens` up to the next power of two, and for every temperature,
    top_k and top_p. Before the loop, the parameters are cast to `dtype` and the layers of a stacked model are separated
    (`unstack`), because a step reads every weight once and updates every cache in place. This copies the parameters.

        out = models.generate(model, params, [words.encode("Once upon a time")], max_tokens=200, temperature=0)
        print(words.decode(out.tokens[0, :out.lengths[0]]))

    Args:
        model: a decoder: `model(params, tokens, lengths=, state=cache)` returns logits [batch, time, vocab_size], and
            `model.cache` creates the cache. Examples are GPT, Llama and LSTMLanguageModel.
        params: its parameters.
        prompts: integers [batch, time], at least one token in each example, padded on the right.
        key: a `jax.random.key`, not needed for temperature 0. The random numbers of an example depend on its index in
            the batch and the index of the token, not on the other examples.
        max_tokens: the maximum number of tokens to generate.
        temperature: divisor of the logits. 0: always the most probable token. A temperature that is traced by
            `jax.jit` must not be 0.
        top_k: sample only from the k most probable tokens (Fan et al., 2018).
        top_p: sample only from the smallest set of tokens whose probabilities add up to p (Holtzman et al., 2020,
            nucleus sampling). It is applied after top_k.
        stop: tokens that end an example.
        lengths: integers [batch], the length of each prompt. Default: `time`.
        dtype: floating-point parameters are cast to it, once; keys and values are cached in it. Default: that of the
            parameters. "bfloat16" on GPUs and TPUs: a step is as fast as its bytes are read.

    Returns:
        A `Generated` with tokens [batch, max_tokens] and lengths [batch].

    Raises:
        ValueError: prompts of another shape, lengths outside 1 .. time, an option outside its range, more tokens than
            the model's context, or sampling without a key.
        TypeError: prompts that are not integers.

    >>> from fnet import models
    >>> model = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> models.generate(model, params, [[1, 2, 3]], max_tokens=5, temperature=0).tokens.shape
    (1, 5)
    """
    prompts, lengths = _prompts(model, prompts, lengths, max_tokens)
    sampled = isinstance(temperature, jax.core.Tracer) or bool(temperature != 0)
    if sampled and key is None:
        raise ValueError("generate: sampling needs key=jax.random.key(...); or pass temperature=0")
    _check_range("temperature", temperature, 0, np.inf)
    for name, value, low, high in ("top_k", top_k, 1, np.inf), ("top_p", top_p, 0, 1):
        if value is not None:
            _check_range(name, value, low, high)
    time, room = prompts.shape[1], _bucket(max_tokens)
    context = getattr(model, "context", None)
    if sized(time):
        context = context or _bucket(time) + room
        width = 1 + max(time - 1, min(_bucket(time - 1), context))
        capacity = min(width + room, context)
    else:    # one exported program serves all lengths
        width, capacity = time, context or time + room
    prompts = jnp.pad(prompts, ((0, 0), (0, width - time)))
    return _cut(_generate(
        model, params, prompts, lengths, jax.random.key(0) if key is None else key,
        jnp.asarray(max_tokens, jnp.int32), jnp.asarray(temperature, jnp.float32), jnp.asarray(stop, jnp.int32),
        None if top_k is None else jnp.asarray(top_k, jnp.int32),
        None if top_p is None else jnp.asarray(top_p, jnp.float32),
        room=room, capacity=capacity, sampled=sampled, dtype=None if dtype is None else jnp.dtype(dtype)), max_tokens)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("room", "capacity", "sampled", "dtype"))
def _generate(model, params, prompts, lengths, key, max_tokens, temperature, stop, top_k, top_p, *, room, capacity,
              sampled, dtype=None):
    batch, width = prompts.shape
    rows = jnp.arange(batch, dtype=jnp.int32)
    model, params = _prepared(model, params, dtype)
    cache = _cache(model, params, jax.ShapeDtypeStruct((batch, capacity), jnp.int32))
    if width != 1:
        # All tokens but the last, for their keys and values. XLA removes the unused logits.
        _, cache = model(params, prompts[:, :-1], lengths=lengths - 1, state=cache)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)

    def going(carry):
        count, _, done, *_ = carry
        return (count < max_tokens) & ~done.all()

    def step(carry):
        count, token, done, tokens, ends, cache = carry
        logits, cache = model(params, token[:, None], state=cache)
        draws = jax.vmap(lambda key: jax.random.fold_in(key, count))(keys) if sampled else None
        token = _pick(logits[:, 0].astype(jnp.float32), draws, temperature, top_k, top_p)
        done = done | (token[:, None] == stop[None]).any(-1)
        token = jnp.where(done, 0, token)
        tokens = lax.dynamic_update_slice(tokens, token[:, None], (jnp.zeros_like(count), count))
        return count + 1, token, done, tokens, jnp.where(done, ends, count + 1), cache

    last = jnp.take_along_axis(prompts, lengths[:, None] - 1, 1)[:, 0]
    zero = jnp.zeros(batch, jnp.int32)
    carry = (jnp.zeros((), jnp.int32), last, zero > 0, jnp.zeros((batch, room), jnp.int32), zero, cache)
    _, _, _, tokens, ends, _ = lax.while_loop(going, step, carry)
    return Generated(tokens, ends)


def _prepared(model, params, dtype):
    """The model with separate layers and its parameters, cast."""
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, params)
    return unstack(model, params) if getattr(model, "stacked", False) else (model, params)


def _cache(model, params, tokens):
    """An empty cache, with keys and values in the dtype of the parameters."""
    dtypes = {x.dtype for x in jax.tree.leaves(params) if _is_float(x)}
    cache = model.cache(tokens)
    if len(dtypes) != 1:
        return cache
    dtype = dtypes.pop()
    keys_and_values = ("cached_key", "cached_value")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(dtype) if path[-1].key in keys_and_values else x, cache)


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _pick(logits, keys, temperature, top_k, top_p):
    """The next token of each example: [batch, vocab_size] to [batch]. Without keys, the most probable one."""
    if keys is None:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k is not None:
        logits = _likeliest(logits, jnp.ones_like(logits), top_k.astype(logits.dtype))
    if top_p is not None:
        logits = _likeliest(logits, jax.nn.softmax(logits), top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _likeliest(logits, weights, enough):
    """Sets all logits to -inf except the fewest largest whose weights add up to `enough`: [batch, vocab_size].

    The smallest of these is determined bit by bit, with 32 sums. On a CPU this takes a tenth of the time of a sort.
    """
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), jnp.uint32)    # -0 becomes 0
    keys = jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)                   # integers in the order of the logits

    def narrow(step, least):
        higher = least | _SIGN >> step.astype(jnp.uint32)
        total = jnp.where(keys >= higher, weights, 0).sum(-1, keepdims=True)
        return jnp.where(total >= enough, higher, least)

    least = lax.fori_loop(0, 32, narrow, jnp.zeros_like(keys[:, :1]))
    return jnp.where(keys >= least, logits, -jnp.inf)


def _prompts(model, prompts, lengths, max_tokens):
    prompts = jnp.asarray(prompts)
    if not jnp.issubdtype(prompts.dtype, jnp.integer):
        raise TypeError(f"generate: expected prompts of integer tokens; got {prompts.dtype}{list(prompts.shape)}")
    if prompts.ndim != 2 or not prompts.size:
        raise ValueError("generate: expected prompts [batch, time] of at least one token each; got shape "
                         f"{prompts.shape}; models.padded pads lists of different lengths")
    if max_tokens < 1:
        raise ValueError(f"generate: max_tokens must be >= 1; got {max_tokens}")
    batch, time = prompts.shape
    lengths = jnp.full(batch, time, jnp.int32) if lengths is None else jnp.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"generate: lengths must be integers [batch] ({batch},); got "
                         f"{lengths.dtype}{list(lengths.shape)}")
    longest = time
    if not isinstance(lengths, jax.core.Tracer):
        held = np.asarray(lengths)
        if held.min() < 1 or held.max() > time:
            raise ValueError(f"generate: lengths must be from 1 to {time}; got {held.tolist()}")
        longest = int(held.max())
    context = getattr(model, "context", None)
    if context is not None and not at_most("generate", longest + max_tokens, context + 1):
        raise ValueError(f"generate: prompts of {longest} tokens and max_tokens={max_tokens} exceed the model's "
                         f"context of {context}")
    return prompts[:, :longest].astype(jnp.int32), lengths.astype(jnp.int32)


def _check_range(name, value, low, high):
    if not isinstance(value, jax.core.Tracer) and not low <= value <= high:
        raise ValueError(f"generate: {name} must be {'>= ' + str(low) if high == np.inf else f'from {low} to {high}'}; "
                         f"got {value}")


def _bucket(count):
    """The length for which a program is compiled: 0, or a power of two."""
    return 0 if count == 0 else max(_SMALLEST, 1 << (count - 1).bit_length())


def _cut(out, max_tokens):
    return Generated(out.tokens[:, :max_tokens], jnp.minimum(out.lengths, max_tokens))
