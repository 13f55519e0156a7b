"""The models in PyTorch, eager and under torch.compile.

scaled_dot_product_attention, fused AdamW, images in the memory format channels last; mixed is `torch.autocast` in
bfloat16.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import _workloads as spec
from benchmarks.peers._torch_layout import channels_first, transposed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(workload, weights, batches, *, train, mixed, compiled=False):
    return Run(workload, weights, batches, train=train, mixed=mixed, compiled=compiled)


class Run:
    """As `_steps.Run`."""

    def __init__(self, workload, weights, batches, *, train, mixed, compiled):
        model = MODELS[type(workload)](workload)
        _fill(model, weights)
        self.model = model.to(DEVICE, memory_format=torch.channels_last).train(train)
        self.batches = [tuple(_on_device(a) for a in batch) for batch in transposed(batches)]
        self.train, self.mixed = train, mixed
        self.optimizer = torch.optim.AdamW(model.parameters(), spec.LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8,
                                           weight_decay=spec.WEIGHT_DECAY, fused=True)
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

    def device(self):
        return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"

    def memory(self):
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None


def _on_device(array):
    tensor = torch.from_numpy(array).to(DEVICE)
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor if tensor.is_floating_point() else tensor.long()


def _fill(model, weights):
    """Copies the weights in, by name: block.0.attn.qkv.weight is block0/attn's query, key and value."""
    left = dict(weights)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            *parents, kind = re.sub(r"\.(\d+)", r"\1", name).split(".")
            place = "/".join(parents)
            kinds = {"weight": ("kernel", "scale", "embedding"), "running_mean": ("mean",),
                     "running_var": ("var",), "num_batches_tracked": ()}.get(kind, (kind,))
            for kind in kinds:
                if place.endswith("/qkv"):
                    three = [left.pop(f"{place[:-3]}{part}/{kind}", None) for part in ("query", "key", "value")]
                    array = None if three[0] is None else torch.cat([torch.from_numpy(a) for a in three], -1).numpy()
                else:
                    array = left.pop(f"{place}/{kind}", None)
                if array is not None:
                    tensor.copy_(torch.from_numpy(channels_first(array) if kind == "kernel" else array))
                    break
            else:
                if kinds:
                    raise ValueError(f"no weights for {name}")
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")


class MLP(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in zip(w.widths, w.widths[1:]))

    def forward(self, x):                                                  # [batch, features]
        for i, dense in enumerate(self.dense):
            x = dense(F.relu(x) if i else x)
        return x


class CNN(nn.Module):
    def __init__(self, w):
        super().__init__()
        widths = [channels for stage in w.stages for channels in stage]
        self.conv = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip((3, *widths), widths))
        self.head = nn.Linear(widths[-1], w.classes)
        self.pool_after = {sum(map(len, w.stages[:i + 1])) - 1 for i in range(len(w.stages))}

    def forward(self, x):                                                  # [batch, channels, height, width]
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

    def forward(self, x):                                                  # [batch, time, width]
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)     # [batch, heads, time, head_dim]
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, bias, causal):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, spec.EPSILON, bias=bias)
        self.attn = Attention(width, heads, bias, causal)
        self.norm2 = nn.LayerNorm(width, spec.EPSILON, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):                                                  # [batch, time, width]
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.token = nn.Embedding(w.vocab, w.width)
        self.position = nn.Embedding(w.time, w.width)
        self.block = nn.ModuleList(Block(w.width, w.heads, w.bias, True) for _ in range(w.depth))
        self.norm = nn.LayerNorm(w.width, spec.EPSILON, bias=w.bias)

    def forward(self, tokens):                                             # [batch, time]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.block:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)                   # [batch, time, vocab]


MODELS = {spec.MLP: MLP, spec.CNN: CNN, spec.GPT: GPT}
