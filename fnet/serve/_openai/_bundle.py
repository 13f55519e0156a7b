"""Serves bundles that have a tokenizer: the language models and encoders in them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import models
from fnet._util._tokenizer_files import is_file_of_a_tokenizer
from fnet.export import _evaluate
from fnet.export.standalone import _signature
from fnet.export.standalone._loaded import Bundle
from fnet.serve._batching import Batcher
from fnet.serve._engine._engine import Engine
from fnet.serve._generate import mapped
from fnet.serve._model import Model
from fnet.serve._openai._embeddings import Encoder
from fnet.serve._openai._language import Language
from fnet.serve._options import Options

_ENTRY = "extend"


class Decoder:
    """The language model of a bundle, with the two methods that `serve.Engine` needs. Its parameters
    are the weights of the bundle, by their names.

    Attributes:
        context: the maximum number of tokens of a text.
    """

    def __init__(self, bundle: Bundle):
        self._bundle = bundle
        self._description = bundle.manifest["entries"][_ENTRY]
        _, _, (_, self._cache) = self._description["inputs"]
        self.context = _longest(self._description["constraints"])
        names = [*self._description["weights"], *self._description["constants"]]
        self.params = {name: jnp.asarray(bundle.arrays[name]) for name in names}

    def cache(self, tokens: jax.ShapeDtypeStruct) -> Any:
        """Returns an empty cache for tokens [batch, time]."""
        rows, time = tokens.shape
        return mapped(
            lambda leaf: jnp.zeros(_signature.shape(leaf, {"b": rows, "c": time}), leaf["dtype"]),
            self._cache,
        )

    def __call__(
        self, params: Any, tokens: jax.Array, lengths: jax.Array | None = None, *, state: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the logits of each text's last token, [batch, 1, vocab_size], and the cache."""
        rows = len(tokens)
        if lengths is None:
            lengths = jnp.full(rows, tokens.shape[1], jnp.int32)
        as_stored = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), state, self._types(state))
        named = {"tokens": tokens, "lengths": lengths, "cache": as_stored}
        inputs, sizes = _signature.bound(self._bundle.path, _ENTRY, self._description, (), named)
        run = _evaluate.function(self._bundle, _ENTRY, sizes)
        leaves = run(params, [jnp.asarray(x) for x in inputs])
        output = _signature.unflatten(self._description["output"], iter(leaves))
        cache = jax.tree.map(lambda x, old: x.astype(old.dtype), output["cache"], state)
        return output["logits"][:, None], cache

    def _types(self, state: Any) -> Any:
        """The cache as the program takes it; an engine may keep it in another dtype."""
        leaves = iter(jax.tree.leaves(mapped(lambda leaf: np.dtype(leaf["dtype"]), self._cache)))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, next(leaves)), state)


def offers_text(bundle: Bundle) -> bool:
    """Whether a bundle has a tokenizer, and a language model that `serve.Engine` can compute."""
    entry = bundle.manifest["entries"].get(_ENTRY, {})
    return bool(bundle.files("tokenizer")) and len(entry.get("inputs", ())) == 3


def offers_embeddings(model: Model) -> bool:
    """Whether a model is an encoder: tokens [b, t] and lengths [b] to vectors [b, width], in a
    bundle with a tokenizer."""
    if len(model.inputs) != 2 or len(model.outputs) != 1 or not model.rows_name:
        return False
    (_, tokens), (_, lengths), (_, output) = *model.inputs, *model.outputs
    integers = all(np.dtype(leaf["dtype"]).kind == "i" for leaf in (tokens, lengths))
    axes = len(tokens["shape"]), len(lengths["shape"]), len(output["shape"])
    fits = integers and axes == (2, 1, 2) and isinstance(output["shape"][1], int)
    return fits and bool(model.bundle.files("tokenizer"))


def language(name: str, bundle: Bundle, options: Options) -> Language:
    """Returns the language model of a bundle, for which `offers_text` holds.

    Raises:
        ValueError: its tokenizer is damaged.
    """
    tokenizer = _tokenizer(bundle)
    decoder = Decoder(bundle)
    engine = Engine(
        decoder,
        decoder.params,
        slots=options.slots,
        context=options.context,
        stop=tokenizer.stop,
        queue=options.max_queue,
    )
    if options.warm:
        engine.warm(options.warm)
    return Language(name, engine, tokenizer, engine.context)


def encoder(name: str, model: Model, batcher: Batcher, options: Options) -> Encoder:
    """Returns an encoder for which `offers_embeddings` holds. Texts of one length are computed
    together, because only the server's proofs know whether padding changes an output.

    Raises:
        ValueError: its tokenizer is damaged.
    """
    ((_, leaf), _), ((_, output),) = model.inputs, model.outputs
    longest = _longest(model.constraints, leaf["shape"][1])
    return Encoder(
        name,
        _tokenizer(model.bundle),
        _Checked(model, batcher),
        context=longest or 1 << 20,
        width=output["shape"][1],
        rows=options.max_batch,
    )


class _Checked:
    """The batcher of a model whose inputs have to be checked."""

    def __init__(self, model: Model, batcher: Batcher):
        self._model, self._batcher = model, batcher
        self.close = batcher.close

    def submit(self, arrays: list[np.ndarray]) -> Any:
        return self._batcher.submit(self._model.bound(arrays))


def _tokenizer(bundle: Bundle) -> Any:
    """Reads the tokenizer of a bundle, from copies of its files. Nothing in them is executed, apart
    from the chat template in its sandbox."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in bundle.files("tokenizer").items():
            if is_file_of_a_tokenizer(name):
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
        try:
            return models.read_tokenizer(folder)
        except (ValueError, FileNotFoundError) as error:
            text = str(error).replace(folder, "tokenizer")
            raise ValueError(f"serve: {bundle.path}: {text}") from None


def _longest(constraints: list[str], *names: str) -> int | None:
    """Returns the largest size that constraints such as "t <= 64" allow for the variables, or for
    any variable if none is named."""
    found = []
    for text in constraints:
        left, sign, right = text.partition("<=")
        if sign and right.strip().isdigit() and (not names or left.strip() in names):
            found.append(int(right))
    return min(found, default=None)
