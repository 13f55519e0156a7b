"""Model: a layer that the field knows by name, with presets and the names that others give its arrays."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from fnet import layers as nn
from fnet.models._config import Config
from fnet.models._rules import Names


class Model(nn.Layer):
    """A layer whose fields are its configuration, with published configurations by name.

        model = ResNet.preset("resnet50", classes=10)      # ResNet((3, 4, 6, 3), classes=10)

    Subclasses may define:

        PRESETS: {name: fields}, the published configurations.
        NAMES: {framework: Names}, what the arrays are called elsewhere: how `pretrained.load` and `save` know them.
        CONFIGS: {model_type of config.json: Config}, how `pretrained.load` compares the model with config.json; the
            key for timm's config.json is "timm".
        HUB: {preset: where its weights are published}: repositories of Hugging Face's hub, or "torchvision:NAME" for
            what torchvision alone gives out, as pickles.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    NAMES: ClassVar[Mapping[str, Names]] = {}
    CONFIGS: ClassVar[Mapping[str, Config]] = {}
    HUB: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @classmethod
    def preset(cls, name: str, **changes) -> Model:
        """The published configuration `name`, with some of its fields changed.

        Raises:
            ValueError: for a name that this class has no preset for.
        """
        if name not in cls.PRESETS:
            near = difflib.get_close_matches(name, cls.PRESETS, 1)
            raise ValueError(f"{cls.__name__} has no preset {name!r}" + (f": did you mean {near[0]!r}?" if near else
                             f": it has {', '.join(cls.PRESETS) or 'none'}"))
        return cls(**{**cls.PRESETS[name], **changes})

    def example(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of an input of the published size, one row: `model.spec(model.example())`."""
        raise NotImplementedError(f"{type(self).__name__} has no example(self)")


class LanguageModel(Model):
    """A model of text whose logits are made from what a body leaves, by a head: `_body(scope, tokens, lengths)` gives
    (the head, an `nn.Dense` or the `nn.Embed` that it is tied to, its place, and its input [batch, time, width])."""

    def forward(self, scope: nn.Scope, tokens, lengths=None):              # [batch, time]
        head, at, x = self._body(scope, tokens, lengths)
        return head.attend(at, x) if isinstance(head, nn.Embed) else head(at, x)

    @nn.method
    def cross_entropy(self, scope: nn.Scope, tokens, labels, lengths=None):
        """Losses [batch, time] in nats of labels [batch, time], the tokens that follow, for large vocabularies: logits
        are never all in memory (`nn.linear_cross_entropy`)."""
        head, at, x = self._body(scope, tokens, lengths)
        return head.cross_entropy(at, x, labels)
