"""DeiT: a vision transformer with a class token and a distillation token."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax

from fnet import layers as nn
from fnet.models.vision._vit import (
    ENCODER,
    IRRELEVANT,
    POOLER,
    POOLING,
    SIZES,
    TIMM,
    ViT,
    architectures,
    sizes,
)
from fnet.models.weights._config import transformers
from fnet.models.weights._images import ImageInput
from fnet.models.weights._labels import labels
from fnet.models.weights._timm_config import timm
from fnet.models.weights._weight_names import Names, Rule
from fnet.models.weights._words import torch

_SIZES = {name: SIZES[name] for name in ("tiny", "small", "base")}
_KINDS = {
    "DeiTForImageClassificationWithTeacher": dict(classes=..., teacher=True),
    "DeiTForImageClassification": dict(classes=..., teacher=False),
    "DeiTModel": dict(classes=None, teacher=False),
}
BICUBIC = ImageInput(resize=256, resample="bicubic")


class DeiT(ViT):
    """A vision transformer with a class token and a distillation token.

    Each token has its own linear layer for logits, and the output is the mean of both. Those of the
    distillation token were trained to predict the labels of a convolutional network, the teacher.

    Args:
        width, depth, heads, classes, patch, size, hidden, pooler, dropout, epsilon: as in `ViT`.
        teacher: whether the distillation token has logits, too. If not, the output comes from the
            class token alone.

    Input: [batch, size, size, 3]. Output: logits [batch, classes], or an `Encoded` if `classes` is
    None.

    Source: Touvron et al. (2021), Training data-efficient image transformers and distillation
    through attention.

    >>> model = models.DeiT.preset("deit_ti_16_distilled")
    >>> nn.count_parameters(model.spec(model.example()).params)
    5910800
    """

    PRESETS: ClassVar = {
        "deit_ti_16_distilled": SIZES["tiny"],
        "deit_s_16_distilled": SIZES["small"],
        "deit_b_16_distilled": SIZES["base"],
    }
    HUB: ClassVar = {
        f"deit_{short}_16_distilled": (
            f"facebook/deit-{name}-distilled-patch16-224",
            f"timm/deit_{name}_distilled_patch16_224.fb_in1k",
        )
        for short, name in (("ti", "tiny"), ("s", "small"), ("b", "base"))
    }
    NAMES: ClassVar = {
        "timm": Names(
            (
                TIMM,
                Rule("distillation_token", "dist_token"),
                torch.dense("distillation_head", "head_dist"),
            ),
            config={"epsilon": 1e-6},
            metadata={"format": "pt"},
            image=BICUBIC,
        ),
        "huggingface": Names(
            (
                ENCODER,
                Rule("distillation_token", "embeddings.distillation_token"),
                POOLING,
            ),
            prefixes=("", "deit."),
            heads=(
                torch.dense("head", "cls_classifier"),
                torch.dense("distillation_head", "distillation_classifier"),
                torch.dense("classifier", "classifier"),
            ),
            config={"epsilon": 1e-12},
            metadata={"format": "pt"},
            image=BICUBIC,
        ),
    }
    CONFIGS: ClassVar = {
        "deit": transformers(
            {**sizes(), **POOLER, **labels(_KINDS)}, architectures=_KINDS, irrelevant=IRRELEVANT
        ),
        "timm": timm(
            *architectures("deit_{}_distilled", "deit_{}_distilled", _SIZES, teacher=True),
            "token",
            "deit_{tiny, small, base}_distilled_patchP_S",
        ),
    }

    _: KW_ONLY
    teacher: bool = True

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        if self.classes is None:
            return super().forward(scope, x)
        if not self.teacher:
            return nn.Dense(self.classes, axes=("in", "classes"))(
                scope["classifier"], self.features(scope, x)
            )
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x)[:, :2])
        first = nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x[:, 0])
        second = nn.Dense(self.classes, axes=("in", "classes"))(scope["distillation_head"], x[:, 1])
        return (first + second) / 2

    def _tokens(self):
        return "class_token", "distillation_token"
