"""Generates texts with the functions "prefill" and "decode" of a bundle, which `export.generation`
creates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from fnet.export.standalone import _signature
from fnet.export.standalone._loaded import Bundle
from fnet.serve._protocol import Invalid

ENTRIES = "prefill", "decode", "extend"  # of `export.generation`
# The maximum number of tokens of a prompt that are computed at once, and of generated tokens.
_LARGEST = 1 << 12


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to continue a text. The fields of the request are the tokens of the text, and
    options for the selection of the next tokens."""

    tokens: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    seed: int
    id: str = ""


class Generator:
    """Generates texts with one bundle.

    Attributes:
        characters: the character of each token, or None if the bundle has no characters.json.
        context: the maximum number of tokens of a text, according to the constraint on the inputs
            of the function "prefill". `context` is None if the bundle has no constraint on the
            number of tokens.
    """

    def __init__(self, name: str, version: str, bundle: Bundle):
        self.name, self.version, self.bundle = name, version, bundle
        description = bundle.manifest["entries"]["prefill"]
        (self._tokens, leaf), (self._cache_name, self._cache) = description["inputs"]
        time = leaf["shape"][1]
        fits = lambda n: all(
            _signature.satisfied(text, {time: n}) for text in description["constraints"]
        )
        self.context = next((n for n in map(lambda i: 1 << i, range(20)) if not fits(n + 1)), None)
        if self.context is not None:
            self.context = max(n for n in range(self.context, 2 * self.context + 1) if fits(n))
        files = bundle.files("tokenizer")
        self.characters = None
        if "characters.json" in files:
            self.characters = _characters(files["characters.json"])

    def read(self, body: dict, *, streamed: bool = False) -> Request:
        """Returns the request that the JSON object `body` describes. The keys of `body` are
        text_input or tokens, max_tokens, temperature, top_k (0: all tokens), seed, id, and stream,
        which must agree with the path of the request, `streamed`.

        Raises:
            Invalid: a key or value of `body` is not valid, or the requested text is longer than the
                context of the model.
        """
        known = {
            "text_input",
            "tokens",
            "max_tokens",
            "temperature",
            "top_k",
            "seed",
            "id",
            "stream",
        }
        if unknown := sorted(set(body) - known):
            raise Invalid(f"unknown field {unknown[0][:80]!r}; expected {', '.join(sorted(known))}")
        if body.get("stream", streamed) is not streamed:
            raise Invalid(
                f"stream is {str(body['stream'])[:20]}, but the path is that of "
                f"{'generate_stream, which streams' if streamed else 'generate, which does not stream'}"
            )
        if not isinstance(body.get("id", ""), str):
            raise Invalid("id must be a string")
        tokens = body.get("tokens")
        if "text_input" in body:
            text = body["text_input"]
            if self.characters is None or not isinstance(text, str) or tokens is not None:
                raise Invalid(
                    "text_input must be a string, without tokens"
                    if self.characters is not None
                    else "this bundle has no characters.json; send tokens, a list of integers"
                )
            numbers = {character: i for i, character in enumerate(self.characters)}
            odd = sorted(set(text) - set(numbers))
            if odd:
                raise Invalid(
                    f"the text contains {odd[0]!r}, which is not in the model's vocabulary"
                )
            tokens = [numbers[character] for character in text]
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(x) is int and 0 <= x < 1 << 31 for x in tokens)
        ):
            raise Invalid("expected text_input, or tokens: a list of at least one integer")
        number = lambda name, default, low, high, kinds: _number(
            body, name, default, low, high, kinds
        )
        request = Request(
            tokens,
            number("max_tokens", 64, 1, _LARGEST, (int,)),
            float(number("temperature", 1.0, 0, 100, (int, float))),
            number("top_k", 0, 0, 1 << 20, (int,)),
            number("seed", 0, 0, (1 << 63) - 1, (int,)),
            body.get("id", "")[:256],
        )
        total = len(tokens) + request.max_tokens
        if (
            self.context is not None and total > self.context + 1
        ):  # the last token is not read by the model
            raise Invalid(
                f"the prompt and max_tokens have {total} tokens, expected at most "
                f"{self.context + 1}"
            )
        return request

    def tokens(self, request: Request) -> Iterator[int]:
        """Yields the generated tokens. Each token is computed when the iterator is advanced.

        The prompt is read in parts whose lengths are powers of two, so that few programs are
        compiled.
        """
        zeros = lambda leaf: np.zeros(
            _signature.shape(leaf, {n: 1 for n in leaf["shape"] if isinstance(n, str)}),
            leaf["dtype"],
        )
        cache, rest = mapped(zeros, self._cache), list(request.tokens)
        draw = np.random.default_rng(request.seed)
        while rest:
            n = min(1 << (len(rest).bit_length() - 1), _LARGEST)
            output = self._step("prefill" if n > 1 else "decode", rest[:n], cache)
            cache, rest = output["cache"], rest[n:]
        if max(request.tokens) >= np.size(output["logits"]):
            raise Invalid(
                f"the token {max(request.tokens)} is not in the vocabulary of "
                f"{np.size(output['logits'])}"
            )
        for i in range(request.max_tokens):
            token = _pick(np.asarray(output["logits"], np.float32).reshape(-1), request, draw)
            yield token
            if i + 1 < request.max_tokens:
                output = self._step("decode", [token], cache)
                cache = output["cache"]

    def text(self, token: int) -> str:
        return self.characters[token] if self.characters and token < len(self.characters) else ""

    def _step(self, entry, tokens, cache) -> dict:
        return self.bundle.call(entry, np.asarray([tokens], np.int32), cache)


def generates(bundle: Bundle) -> bool:
    """Whether a bundle has the functions that `export.generation` adds to a program."""
    if not {"prefill", "decode"} <= set(bundle.entries):
        return False
    prefill = bundle.manifest["entries"]["prefill"]
    output = prefill["output"]
    return (
        len(prefill["inputs"]) == 2
        and "shape" in prefill["inputs"][0][1]
        and isinstance(output, dict)
        and {"logits", "cache"} == set(output.get("dict", {}))
    )


def _pick(logits, request, draw) -> int:
    if request.temperature == 0:
        return int(logits.argmax())
    if 0 < request.top_k < len(logits):
        logits = np.where(
            logits >= np.partition(logits, -request.top_k)[-request.top_k], logits, -np.inf
        )
    # The largest becomes 0, so that no temperature, however small, makes several logits infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (logits.astype(np.float64) - logits.max()) / request.temperature
    scaled = np.where(logits == logits.max(), 0, scaled)
    return int((scaled + draw.gumbel(size=logits.shape)).argmax())


def mapped(function, tree) -> Any:
    """Maps a function over the described arrays of a tree."""
    if tree is None:
        return None
    if "dtype" in tree and "shape" in tree:
        return function(tree)
    ((kind, children),) = tree.items()
    if kind == "dict":
        return {key: mapped(function, child) for key, child in children.items()}
    return [mapped(function, child) for child in children]


def _number(body, name, default, low, high, kinds):
    value = body.get(name, default)
    if type(value) not in kinds or not low <= value <= high:
        raise Invalid(f"{name} is {str(value)[:40]}, expected a number from {low} to {high}")
    return value


def _characters(data: bytes) -> str:
    characters = json.loads(data)
    if not isinstance(characters, str):
        raise ValueError("serve: the bundle's tokenizer/characters.json is not a JSON string")
    return characters
