"""The entry points with which a server generates text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.export._program import Program
from fnet.export._spec import spec, spec_of


def generation(program: Program, model: nn.Layer, *, context: int) -> Program:
    """Returns the program with the two entry points by which `fnet serve` generates text.

        program = export.program(gpt, params, tokens=export.spec("b, t", "int32", where="t <= 1024"))
        export.generation(program, gpt, context=1024).save("gpt.fnet", tokenizer="characters.json")

    "prefill" reads several tokens of each text, and "decode" one. Both take tokens and a cache,
    which is all 0 at first, and return {"logits": those of the last token, [batch, vocab_size],
    "cache": the new cache}. They share the weights of "predict".

    Args:
        program: the program of the model, from `export.program`.
        model: a decoder such as GPT, Decoder or LSTMLanguageModel:
            `model(params, tokens, state=cache)` returns (logits [batch, time, vocab_size], cache),
            and `model.cache` makes the cache.
        context: the maximum number of tokens of a text.

    >>> from fnet import export, models
    >>> gpt = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> program = export.program(gpt, params, tokens=export.spec("b, t", "int32", where="t <= 8"))
    >>> list(export.generation(program, gpt, context=8).entries)
    ['predict', 'prefill', 'decode']
    """

    def step(params: Any, tokens: jax.Array, cache: Any) -> dict:
        logits, cache = model(params, tokens, state=cache)
        return {"logits": logits[:, -1], "cache": cache}

    cache = spec_of(lambda b: model.cache(jax.ShapeDtypeStruct((b, context), jnp.int32)))
    program = program.entry(
        "prefill", step, tokens=spec("b, t", "int32", where=f"t <= {context}"), cache=cache
    )
    return program.entry("decode", step, tokens=spec("b, 1", "int32"), cache=cache)
