"""Serves a folder of weights as transformers writes it: config.json, safetensors, tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import models
from fnet.models import pretrained
from fnet.serve._batching import Batcher
from fnet.serve._engine._engine import Engine
from fnet.serve._openai import _pooling
from fnet.serve._openai._embeddings import Encoder
from fnet.serve._openai._language import Language
from fnet.serve._options import Options

_ENCODERS = models.Bert, models.DistilBert, models.Roberta, models.ModernBert
_SMALLEST = 16  # tokens to which a text is padded at least


def open_folder(
    name: str, folder: Path, options: Options, observe: Callable[[int, float], None]
) -> Language | Encoder:
    """Loads the model of a folder: a language model, or an encoder of texts.

    Args:
        name: the id of the model.
        folder: config.json, *.safetensors and the files of a tokenizer.
        options: `slots`, `context` and `adapters` are those of the engine.
        observe: called with the rows and the seconds of each batch of an encoder.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the model is neither.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"serve: {folder} has no config.json; expected a bundle, or a folder of weights with "
            "config.json, *.safetensors and the files of a tokenizer"
        )
    model, params, _ = pretrained.load(folder, dtype=_dtype(options.dtype))
    tokenizer = models.read_tokenizer(folder)
    if isinstance(model, _ENCODERS) and getattr(model, "head", None) is None:
        if options.adapters:
            raise ValueError(f"serve: {folder} is an encoder of texts, which takes no adapters")
        return _encoder(name, folder, model, params, tokenizer, options, observe)
    if not isinstance(model, models.GPT | models.Decoder | models.LSTMLanguageModel):
        raise ValueError(
            f"serve: {folder} is a {type(model).__name__}, neither a language model nor an encoder "
            "of texts; export it as a bundle with export.program"
        )
    adapters = {
        each: pretrained.load_adapter(model, params, path)
        for each, path in options.adapters.items()
    }
    engine = Engine(
        model,
        params,
        slots=options.slots,
        context=options.context,
        adapters=adapters,
        stop=tokenizer.stop,
        queue=options.max_queue,
    )
    if options.warm:
        engine.warm(options.warm)
    return Language(name, engine, tokenizer, engine.context, adapters)


def _encoder(name, folder, model, params, tokenizer, options, observe) -> Encoder:
    pooling = _pooling.pooling(folder)
    context = min(model.context, pooling.longest or model.context)
    embed = jax.jit(functools.partial(_embed, model, pooling))

    def compute(arrays: list[np.ndarray]) -> list[np.ndarray]:
        rows = len(arrays[0])
        size = 1 << (rows - 1).bit_length()
        # Copies of the last row, so that few programs are compiled.
        tokens, lengths = (np.concatenate([x, x[-1:].repeat(size - rows, 0)]) for x in arrays)
        return [np.asarray(embed(params, tokens, lengths))[:rows]]

    batcher = Batcher(
        compute,
        max_batch=options.max_batch,
        max_delay=options.max_delay,
        max_queue=options.max_queue,
        observe=observe,
    )
    return Encoder(
        name,
        tokenizer,
        batcher,
        context=context,
        width=model.width,
        rows=options.max_batch,
        size=lambda count: min(max(_SMALLEST, 1 << (count - 1).bit_length()), context),
    )


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(
            f"serve: dtype={name!r}: expected a dtype such as 'float32' or 'bfloat16'"
        ) from None


def _embed(
    model: Any, pooling: Callable, params: Any, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    return pooling(model(params, jnp.asarray(tokens), lengths).hidden, lengths)
