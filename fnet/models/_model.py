"""Model: a layer with published configurations (presets) and with the names of its arrays in other
frameworks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet._util._nearest import did_you_mean
from fnet.models.weights._config import Config
from fnet.models.weights._weight_names import Names


class Model(nn.Layer):
    """The base class of models: a layer whose fields are its configuration.

        model = ResNet.preset("resnet50", classes=10)      # ResNet((3, 4, 6, 3), classes=10)

    Subclasses may define these class attributes:

        PRESETS: {name: fields}, the published configurations.
        NAMES: {framework: Names}, the names of the arrays in other frameworks, for `pretrained.load` and `save`.
        CONFIGS: {model_type of config.json: Config}, the meaning of each field of config.json, with which
            `pretrained.load` compares the model. The key for the config.json of timm is "timm".
        HUB: {preset: sources of its weights}, each a repository of the Hugging Face hub, or "torchvision:NAME"
            for a pickle that only torchvision distributes.

    >>> model = models.ResNet.preset("resnet18", classes=10)
    >>> nn.count_parameters(model.spec(model.example()).params)
    11181642
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    NAMES: ClassVar[Mapping[str, Names]] = {}
    CONFIGS: ClassVar[Mapping[str, Config]] = {}
    HUB: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Model:
        """Returns the model with the published configuration `name`.

        Args:
            name: the name of the preset, such as "resnet50".
            changes: values of fields, which replace those of the preset.

        Raises:
            ValueError: the class has no preset `name`.
        """
        if name not in cls.PRESETS:
            there = f"it has {', '.join(cls.PRESETS) or 'none'}"
            raise ValueError(
                f"{cls.__name__} has no preset {name!r}; {did_you_mean(name, cls.PRESETS) or there}"
            )
        return cls(**{**cls.PRESETS[name], **changes})

    def of_keys(self, keys: Collection[str]) -> Model:
        """Returns the model for a file that contains these keys (names of arrays).

        `pretrained.load(folder)` calls it on the model that config.json describes. Override it
        where config.json does not determine all fields: whether a ViT without a classifier has a
        pooler, for example, shows only in the weights. The default returns the model unchanged.
        """
        return self

    def example(self) -> jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the shape and dtype of an input, with a batch of 1 and the published size.

        Pass it to `spec`: `model.spec(model.example())`. For a model with several inputs it is a
        tuple: `model.spec(*model.example())`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no example(self)")


class LanguageModel(Model):
    """A language model. Subclasses define `_body(scope, tokens, lengths, segments)`, which returns
    the head, the head's scope, and the head's input [batch, time, width]. The head is an
    `nn.Dense`, or an `nn.Embed` for tied logits. PACKS says whether the model takes `segments`."""

    PACKS: ClassVar[bool] = True

    def forward(
        self,
        scope: nn.Scope,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> Any:
        head, at, x = self._body(scope, tokens, lengths, segments)
        return self._logits(head, at, x)

    def _logits(self, head, at, x):
        logits = head.attend(at, x) if isinstance(head, nn.Embed) else head(at, x)
        softcap = getattr(self, "logit_softcap", None)
        return logits if softcap is None else softcap * jnp.tanh(logits / softcap)

    @nn.method
    def reduced(self, scope: nn.Scope, tokens, reduce, lengths=None, segments=None):
        """Returns `reduce(x, logits_of)`, where x is the input [batch, time, width] of the head and
        `logits_of` computes the logits of any part of it, so that they need not all be in memory."""
        head, at, x = self._body(scope, tokens, lengths, segments)
        return reduce(x, lambda x: self._logits(head, at, x))

    @nn.method
    def cross_entropy(self, scope: nn.Scope, tokens, labels, lengths=None, segments=None):
        """Returns the cross-entropy of each label in nats, an array [batch, time]. `labels` [batch,
        time] contains the next token at each position. For texts that are packed into rows,
        `nn.next_tokens(tokens, segments)` returns labels, and weights for the losses.

        If the batch has more than 2^29 logits, the logits are computed in chunks, so that they are
        not all in memory at once (see `nn.linear_cross_entropy`).
        """
        head, at, x = self._body(scope, tokens, lengths, segments)
        return head.cross_entropy(at, x, labels, getattr(self, "logit_softcap", None))
