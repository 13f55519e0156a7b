"""Embeddings of texts: the encoders, and the requests for them."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from fnet.serve._batching import Batcher
from fnet.serve._openai import _fields
from fnet.serve._openai._errors import Wrong

_MOST_TEXTS = 2048


class Group(NamedTuple):
    """Texts of a request that are computed together: their indices, and the future of the outputs
    of the model, [embeddings]."""

    indices: list[int]
    outputs: Future


class Encoder:
    """A model that turns texts into vectors.

    Attributes:
        name: the id of the model.
        context: the most tokens of a text.
        created: the time in seconds at which it was loaded.

    Args:
        batcher: computes [tokens [rows, time], lengths [rows]] to [embeddings [rows, width]].
        size: how many tokens texts of this many tokens are padded to, with 0.
        rows: the most texts that are computed together.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        batcher: Batcher,
        *,
        context: int,
        width: int,
        rows: int,
        size: Callable[[int], int] = int,
    ):
        self.name, self.tokenizer, self.context, self.width = name, tokenizer, context, width
        self.created = int(time.time())
        self.batcher, self._rows, self._size = batcher, rows, size

    def submit(self, texts: Sequence[Sequence[int]]) -> list[Group]:
        """Begins to compute the embeddings of texts.

        Raises:
            Full: too many requests wait.
        """
        sizes = [self._size(len(text)) for text in texts]
        groups = []
        for size in sorted(set(sizes)):
            indices = [i for i, each in enumerate(sizes) if each == size]
            for start in range(0, len(indices), self._rows):
                part = indices[start : start + self._rows]
                tokens = np.zeros((len(part), size), np.int32)
                for row, index in zip(tokens, part):
                    row[: len(texts[index])] = texts[index]
                lengths = np.array([len(texts[index]) for index in part], np.int32)
                groups.append(Group(part, self.batcher.submit([tokens, lengths])))
        return groups

    def close(self) -> None:
        """Computes what waits, and ends the thread."""
        self.batcher.close()


class Asked(NamedTuple):
    """A request: its model, the tokens of its texts, and whether vectors are sent as base64."""

    model: str
    texts: list[list[int]]
    base64: bool


def read(encoder: Encoder, body: Mapping[str, Any]) -> Asked:
    """Reads a request for embeddings.

    Raises:
        Wrong: a field is not valid, or a text is longer than the model's context.
    """
    found = _fields.read(_fields.EMBEDDINGS, body)
    encoding = found["encoding_format"]
    if encoding not in ("float", "base64"):
        raise Wrong(
            f"encoding_format: expected 'float' or 'base64', got {encoding!r:.80}",
            param="encoding_format",
        )
    if found["dimensions"] not in (None, encoder.width):
        raise Wrong(
            f"dimensions: the vectors of this model have {encoder.width}, and cutting them off "
            "would change what they mean; leave the field out",
            param="dimensions",
        )
    try:
        inputs = _fields.token_lists(found["input"], _MOST_TEXTS)
        texts = [_tokens(encoder, each) for each in inputs]
    except ValueError as error:
        raise Wrong(f"input: {error}", param="input") from None
    for index, text in enumerate(texts):
        if not text:
            raise Wrong(f"input: text {index} has no tokens", param="input")
        if len(text) > encoder.context:
            raise Wrong(
                f"input: text {index} has {len(text)} tokens, more than this model's context of "
                f"{encoder.context}; divide it",
                param="input",
                code="context_length_exceeded",
            )
    return Asked(found["model"], texts, encoding == "base64")


def _tokens(encoder: Encoder, text: str | list[int]) -> list[int]:
    if isinstance(text, str):
        return [int(token) for token in encoder.tokenizer.encode(text)]
    most = encoder.tokenizer.vocab_size
    if max(text) >= most:
        raise ValueError(f"expected tokens below {most}, got {max(text)}")
    return text


def content(asked: Asked, groups: Sequence[Group]) -> dict:
    """Returns the JSON of the answer, when all groups are computed."""
    vectors: dict[int, np.ndarray] = {}
    for group in groups:
        vectors |= zip(group.indices, np.asarray(group.outputs.result()[0], "<f4"))
    count = sum(map(len, asked.texts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _written(vectors[i], asked.base64)}
            for i in range(len(asked.texts))
        ],
        "model": asked.model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _written(vector: np.ndarray, as_text: bool) -> str | list[float]:
    if as_text:
        return base64.b64encode(vector.tobytes()).decode()
    if not np.isfinite(vector).all():
        raise Wrong("an embedding is not finite; the model is at fault", status=500)
    return vector.tolist()
