"""MobileNetV2 and GPT-2 in torch.nn alone, by their papers, under the names of their published
weights."""

import math

import torch
from torch import nn

BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv_norm(inputs, outputs, size=1, stride=1, groups=1):
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class Inverted(nn.Module):
    """Sandler et al. (2018), figure 4."""

    def __init__(self, inputs, outputs, expansion, stride):
        super().__init__()
        inner, self.adds = inputs * expansion, stride == 1 and inputs == outputs
        expand = [conv_norm(inputs, inner)] if expansion > 1 else []
        *project, _ = conv_norm(inner, outputs)
        self.conv = nn.Sequential(*expand, conv_norm(inner, inner, 3, stride, inner), *project)

    def forward(self, x):
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    """Sandler et al. (2018), table 2; keys as torchvision's."""

    def __init__(self):
        super().__init__()
        layers, width = [conv_norm(3, 32, 3, 2)], 32
        for expansion, channels, count, stride in BLOCKS:
            for i in range(count):
                layers.append(Inverted(width, channels, expansion, stride if i == 0 else 1))
                width = channels
        self.features = nn.Sequential(*layers, conv_norm(width, 1280))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x):  # [batch, 3, height, width]
        return self.classifier(self.features(x).mean((2, 3)))


class Affine(nn.Module):
    """x @ weight + bias, the weight [in, out] as GPT-2's files hold it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, outputs)),
            nn.Parameter(torch.empty(outputs)),
        )

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": Affine(width, 3 * width), "c_proj": Affine(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": Affine(width, 4 * width), "c_proj": Affine(4 * width, width)}
        )

    def forward(self, x):  # [batch, time, width]
        batch, time, width = x.shape
        parts = (
            self.attn["c_attn"](self.ln_1(x))
            .view(batch, time, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        query, key, value = parts  # [batch, heads, time, head_dim]
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -torch.inf)
        x = x + self.attn["c_proj"](
            (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, time, width)
        )
        return x + self.mlp["c_proj"](
            nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        )


class GPT(nn.Module):
    """Radford et al. (2019); keys as GPT-2's first files."""

    def __init__(self, vocab_size, width, depth, heads, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens):  # [batch, time]
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T  # [batch, time, vocab_size]
