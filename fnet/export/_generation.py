"""The entry points with which a server generates text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.export._program import Program
from fnet.export._spec import spec, spec_of


def generation(
    program: Program, model: nn.Layer, *, context: int, tokenizer: Any = None
) -> Program:
    """Returns the program with the entry points by which `fnet serve` generates text.

        program = export.program(gpt, params, tokens=export.spec("b, t", "int32", where="t <= 1024"))
        export.generation(program, gpt, context=1024, tokenizer=folder).save("gpt.fnet")

    "prefill" reads several tokens of each text, and "decode" one. Both take tokens and a cache,
    which is all 0 at first, and return {"logits": those of the last token, [batch, vocab_size],
    "cache": the new cache}. "extend" takes `lengths`, too, the number of tokens of each text [batch],
    and a cache of any size up to the context; with it, `serve.Engine` generates many texts together.
    All share the weights of "predict".

    Args:
        program: the program of the model, from `export.program`.
        model: a decoder such as GPT, Decoder or LSTMLanguageModel:
            `model(params, tokens, lengths=, state=cache)` returns (logits [batch, time, vocab_size],
            cache), and `model.cache` makes the cache.
        context: the maximum number of tokens of a text.
        tokenizer: the tokenizer that the bundle gets, with its chat template: its folder, its files,
            or what `models.read_tokenizer` returned. Default None: that of `Program.save`.

    >>> from fnet import export, models
    >>> gpt = models.GPT(vocab_size=7, width=4, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> program = export.program(gpt, params, tokens=export.spec("b, t", "int32", where="t <= 8"))
    >>> list(export.generation(program, gpt, context=8).entries)
    ['predict', 'prefill', 'decode', 'extend']
    """

    def step(params: Any, tokens: jax.Array, cache: Any) -> dict:
        logits, cache = model(params, tokens, state=cache)
        return {"logits": logits[:, -1], "cache": cache}

    def extend(params: Any, tokens: jax.Array, lengths: jax.Array, cache: Any) -> dict:
        logits, cache = model(params, tokens, lengths=lengths, state=cache)
        last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, 1)
        return {"logits": last[:, 0], "cache": cache}

    cache = spec_of(lambda b: model.cache(jax.ShapeDtypeStruct((b, context), jnp.int32)))
    program = program.entry(
        "prefill", step, tokens=spec("b, t", "int32", where=f"t <= {context}"), cache=cache
    )
    program = program.entry("decode", step, tokens=spec("b, 1", "int32"), cache=cache)
    where: tuple[str, ...] = (f"t <= {context}",)
    if _grows(model):  # a recurrent model's cache has no size of its own
        cache = spec_of(lambda b, c: model.cache(jax.ShapeDtypeStruct((b, c), jnp.int32)))
        where = "t <= c", f"c <= {context}"
    program = program.entry(
        "extend",
        extend,
        tokens=spec("b, t", "int32", where=where),
        lengths=spec("b", "int32"),
        cache=cache,
    )
    return Program(program.entries, program.weights, program._trees, tokenizer)


def _grows(model: nn.Layer) -> bool:
    """Whether the cache is larger for longer texts."""
    shapes = [
        jax.eval_shape(lambda n=n: model.cache(jax.ShapeDtypeStruct((1, n), jnp.int32)))
        for n in (1, 2)
    ]
    return shapes[0] != shapes[1]
