"""The models in PyTorch, run eagerly or with torch.compile.

They use scaled_dot_product_attention, fused AdamW, and the memory format channels_last for images.
With mixed precision, they use `torch.autocast` in bfloat16.
"""

from __future__ import annotations

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import _workloads as spec
from benchmarks.peers._torch_layout import channels_first, transposed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(workload, weights, batches, *, train, mixed, compiled=False):
    return Run(workload, weights, batches, train=train, mixed=mixed, compiled=compiled)


class Run:
    """Runs the steps of a PyTorch model, with the methods of `_steps.Run`."""

    def __init__(self, workload, weights, batches, *, train, mixed, compiled):
        if DEVICE == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, which JAX uses by default
        model = MODELS[type(workload)](workload)
        _fill(model, weights)
        self.model = model.to(DEVICE, memory_format=torch.channels_last).train(train)
        self.batches = [tuple(_on_device(a) for a in batch) for batch in transposed(batches)]
        self.train, self.mixed = train, mixed
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            spec.LEARNING_RATE,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=spec.WEIGHT_DECAY,
            fused=True,
        )
        f = self._loss if train else self.model
        self.f = torch.compile(f) if compiled else f

    def _loss(self, x, y):
        logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def step(self, i):
        x, y = self.batches[i % len(self.batches)]
        if not self.train:
            with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16, enabled=self.mixed):
                return self.f(x)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.mixed):
            loss = self.f(x, y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def wait(self, value):
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def numpy(self, value):
        return value.float().cpu().numpy()

    @staticmethod
    def platform():
        return DEVICE

    @staticmethod
    def device():
        return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"

    @staticmethod
    def memory():
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None


def _on_device(array):
    tensor = torch.from_numpy(array).to(DEVICE)
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor if tensor.is_floating_point() else tensor.long()


NAMES = {
    "weight": ("kernel", "scale", "embedding"),
    "weight_ih": ("kernel",),
    "weight_hh": ("recurrent_kernel",),
    "bias_ih": ("bias",),
    "running_mean": ("mean",),
    "running_var": ("var",),
}


def _fill(model, weights):
    """Copies the weights into the model by name. block.0.attn.qkv.weight consists of the query, key
    and value kernels of block0/attn."""
    left = dict(weights)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        name = re.sub(r"lstm\.(\w+)_l(\d+)", r"lstm\2.\1", name)  # lstm.weight_ih_l0
        *parents, name = re.sub(r"\.(\d+)", r"\1", name).split(".")
        if name in ("num_batches_tracked", "bias_hh"):
            continue
        place = "/".join(parents)
        places = (
            [place[:-3] + part for part in ("query", "key", "value")]
            if place.endswith("/qkv")
            else [place]
        )
        kind = next(kind for kind in NAMES.get(name, (name,)) if f"{places[0]}/{kind}" in left)
        array = np.concatenate([left.pop(f"{place}/{kind}") for place in places], -1)
        tensor.data.copy_(
            torch.from_numpy(channels_first(array) if kind.endswith("kernel") else array)
        )
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")


class MLP(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in zip(w.widths, w.widths[1:]))

    def forward(self, x):  # [batch, features]
        for i, dense in enumerate(self.dense):
            x = dense(F.relu(x) if i else x)
        return x


class CNN(nn.Module):
    def __init__(self, w):
        super().__init__()
        widths = [channels for stage in w.stages for channels in stage]
        self.conv = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip((3, *widths), widths)
        )
        self.head = nn.Linear(widths[-1], w.classes)
        self.pool_after = {sum(map(len, w.stages[: i + 1])) - 1 for i in range(len(w.stages))}

    def forward(self, x):  # [batch, channels, height, width]
        for i, conv in enumerate(self.conv):
            x = F.relu(conv(x))
            if i in self.pool_after:
                x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads, bias, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x):  # [batch, time, width]
        q, k, v = (
            a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal
        )  # [batch, heads, time, head_dim]
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, bias, causal):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, spec.EPSILON, bias=bias)
        self.attn = Attention(width, heads, bias, causal)
        self.norm2 = nn.LayerNorm(width, spec.EPSILON, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):  # [batch, time, width]
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.token = nn.Embedding(w.vocab, w.width)
        self.position = nn.Embedding(w.time, w.width)
        self.block = nn.ModuleList(Block(w.width, w.heads, w.bias, True) for _ in range(w.depth))
        self.norm = nn.LayerNorm(w.width, spec.EPSILON, bias=w.bias)

    def forward(self, tokens):  # [batch, time]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.block:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)  # [batch, time, vocab]


class ViT(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.patch = nn.Conv2d(3, w.width, w.patch, w.patch)
        self.position = nn.Embedding((w.size // w.patch) ** 2, w.width)
        self.block = nn.ModuleList(Block(w.width, w.heads, True, False) for _ in range(w.depth))
        self.norm = nn.LayerNorm(w.width, spec.EPSILON)
        self.head = nn.Linear(w.width, w.classes)

    def forward(self, x):  # [batch, channels, height, width]
        x = (
            self.patch(x).flatten(2).transpose(1, 2) + self.position.weight
        )  # [batch, tokens, width]
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nn.Module):
    def __init__(self, before, width, out, stride, bottleneck):
        super().__init__()
        convs = (
            [(before, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            if bottleneck
            else [(before, width, 3, stride), (width, out, 3, 1)]
        )
        for j, (a, b, window, strides) in enumerate(convs, 1):
            self.add_module(f"conv{j}", nn.Conv2d(a, b, window, strides, window // 2, bias=False))
            self.add_module(f"norm{j}", nn.BatchNorm2d(b, spec.EPSILON, 0.1))
        self.n = len(convs)
        self.projects = before != out or stride != 1
        if self.projects:
            self.shortcut = nn.Conv2d(before, out, 1, stride, bias=False)
            self.shortcut_norm = nn.BatchNorm2d(out, spec.EPSILON, 0.1)

    def forward(self, x):  # [batch, channels, height, width]
        y = x
        for j in range(1, self.n + 1):
            y = getattr(self, f"norm{j}")(getattr(self, f"conv{j}")(y))
            y = F.relu(y) if j < self.n else y
        return F.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.projects else x))


class ResNet(nn.Module):
    def __init__(self, w):
        super().__init__()
        window, stride = (7, 2) if w.photos else (3, 1)
        self.stem = nn.Conv2d(3, w.width, window, stride, window // 2, bias=False)
        self.stem_norm = nn.BatchNorm2d(w.width, spec.EPSILON, 0.1)
        self.photos = w.photos
        self.block = nn.ModuleList(Residual(*sizes, w.bottleneck) for sizes in w.blocks())
        self.head = nn.Linear(list(w.blocks())[-1][2], w.classes)

    def forward(self, x):  # [batch, channels, height, width]
        x = F.relu(self.stem_norm(self.stem(x)))
        if self.photos:
            x = F.max_pool2d(x, 3, 2, 1)
        for block in self.block:
            x = block(x)
        return self.head(x.mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.token = nn.Embedding(w.vocab, w.width)
        self.lstm = nn.LSTM(w.width, w.width, w.depth, batch_first=True)
        self.head = nn.Linear(w.width, w.vocab)
        for name, bias in self.lstm.named_parameters():
            if name.startswith("bias_hh"):  # the workload has only one bias, so this bias stays 0
                nn.init.zeros_(bias).requires_grad_(False)

    def forward(self, tokens):  # [batch, time]
        return self.head(self.lstm(self.token(tokens))[0])  # [batch, time, vocab]


MODELS = {
    spec.MLP: MLP,
    spec.CNN: CNN,
    spec.GPT: GPT,
    spec.ViT: ViT,
    spec.ResNet: ResNet,
    spec.LSTM: LSTM,
}
