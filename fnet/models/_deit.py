"""DeiT: a vision transformer with a second token, which was trained to predict the labels of another network."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY
from typing import ClassVar

import jax

from fnet import layers as nn
from fnet.models._images import ImageInput
from fnet.models._vit import ENCODER, IRRELEVANT, POOLER, ViT, fused, sizes
from fnet.models.weights._config import timm, transformers
from fnet.models.weights._labels import labels
from fnet.models.weights._weight_names import Names, Rule, Spare, torch

_SIZES = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12)}
_KINDS = {
    "DeiTForImageClassificationWithTeacher": dict(classes=..., teacher=True),
    "DeiTForImageClassification": dict(classes=..., teacher=False), "DeiTModel": dict(classes=None, teacher=False),
}
BICUBIC = ImageInput(resize=256, resample="bicubic")


def _architecture(name):
    """Returns the fields of the model for a timm architecture such as deit_small_distilled_patch16_224, or None."""
    found = re.fullmatch("deit_(tiny|small|base)_distilled_patch([0-9]{1,3})_([0-9]{1,4})", name)
    if found is None:
        return None
    width, depth, heads = _SIZES[found[1]]
    return dict(width=width, depth=depth, heads=heads, patch=int(found[2]), size=int(found[3]), teacher=True)


def _architecture_of(model):
    size = next((size for size, each in _SIZES.items() if each == (model.width, model.depth, model.heads)), "other")
    return f"deit_{size}_distilled_patch{model.patch}_{model.size}"


class DeiT(ViT):
    """A vision transformer with a class token and a distillation token.

    Each of the two tokens has its own last layer. The last layer of the distillation token was trained to predict the
    labels of a convolutional network. The output is the mean of the logits of both layers.

    Args:
        width, depth, heads, classes, patch, size, hidden, pooler, dropout, epsilon: as in `ViT`.
        teacher: whether the distillation token has a last layer. If False, the output is computed from the class token
            alone.

    Input: [batch, size, size, 3]. Output: [batch, classes], or `Encoded` if `classes` is None.

    Source: Touvron et al. (2021), Training data-efficient image transformers and distillation through attention.

    >>> model = models.DeiT.preset("deit_ti_16_distilled")
    >>> nn.count_parameters(model.spec(model.example()).params)
    5910800
    """

    PRESETS: ClassVar = {
        "deit_ti_16_distilled": dict(width=192, depth=12, heads=3),
        "deit_s_16_distilled": dict(width=384, depth=12, heads=6),
        "deit_b_16_distilled": dict(width=768, depth=12, heads=12),
    }
    HUB: ClassVar = {
        f"deit_{short}_16_distilled": (f"facebook/deit-{name}-distilled-patch16-224",
                                       f"timm/deit_{name}_distilled_patch16_224.fb_in1k")
        for short, name in (("ti", "tiny"), ("s", "small"), ("b", "base"))}
    NAMES: ClassVar = {
        "timm": Names((
            Rule("class_token", "cls_token"), Rule("distillation_token", "dist_token"), Rule("position", "pos_embed"),
            torch.conv("patches", "patch_embed.proj"),
            torch.norm("blocks/norm1", "blocks.{i}.norm1"),
            fused("blocks.{i}.attn.qkv.weight", "blocks.{i}.attn.qkv.bias"),
            torch.dense("blocks/attention/out", "blocks.{i}.attn.proj"), torch.norm("blocks/norm2", "blocks.{i}.norm2"),
            torch.dense("blocks/fc1", "blocks.{i}.mlp.fc1"), torch.dense("blocks/fc2", "blocks.{i}.mlp.fc2"),
            torch.norm("norm", "norm"), torch.dense("head", "head"), torch.dense("distillation_head", "head_dist"),
        ), config={"epsilon": 1e-6}, metadata={"format": "pt"}, image=BICUBIC),
        "huggingface": Names((
            ENCODER, Rule("distillation_token", "embeddings.distillation_token"), torch.dense("pooler", "pooler.dense"),
            Spare("pooler.dense.weight"), Spare("pooler.dense.bias"),
        ), prefixes=("", "deit."), heads=(torch.dense("head", "cls_classifier"),
                                          torch.dense("distillation_head", "distillation_classifier"),
                                          torch.dense("classifier", "classifier")),
            config={"epsilon": 1e-12}, metadata={"format": "pt"}, image=BICUBIC),
    }
    CONFIGS: ClassVar = {
        "deit": transformers({**sizes(), **POOLER, **labels(_KINDS)}, architectures=_KINDS, irrelevant=IRRELEVANT),
        "timm": timm(_architecture, "token", "deit_{tiny, small, base}_distilled_patchP_S", write=_architecture_of),
    }

    _: KW_ONLY
    teacher: bool = True

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        if self.classes is None:
            return super().forward(scope, x)
        if not self.teacher:
            return nn.Dense(self.classes)(scope["classifier"], self.features(scope, x))
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x)[:, :2])
        first = nn.Dense(self.classes)(scope["head"], x[:, 0])
        second = nn.Dense(self.classes)(scope["distillation_head"], x[:, 1])
        return (first + second) / 2

    def _tokens(self):
        return "class_token", "distillation_token"
