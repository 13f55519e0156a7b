"""What is computed: the models by name, their weights and their batches, made with NumPy so that all peers start alike.

What holds for all of them: float32 parameters; the loss is the mean softmax cross entropy over all targets; AdamW with
learning rate 1e-3, betas 0.9 and 0.999, epsilon 1e-8 and weight decay 0.01 on every parameter; GELU in its tanh form;
LayerNorm and BatchNorm with epsilon 1e-5; no dropout. A path names an array as fnet does: "block0/attn/query/kernel",
kernels [..., in, out], images channels last. Each class says its model in full; a peer writes it as its library's own
documentation would.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

LEARNING_RATE, WEIGHT_DECAY, EPSILON = 1e-3, 0.01, 1e-5


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers `dense0`, `dense1`, ..., with biases, ReLU between them.  [batch, features] -> [batch, classes]"""

    batch: int = 256
    widths: tuple[int, ...] = (784, 512, 512, 10)

    def shapes(self):
        return _merged(*(_dense(f"dense{i}", a, b) for i, (a, b) in enumerate(itertools.pairwise(self.widths))))

    def draw(self, rng):
        return rng.standard_normal((self.batch, self.widths[0]), np.float32), _labels(rng, self.batch, self.widths[-1])


@dataclasses.dataclass(frozen=True)
class CNN:
    """Stages of 3 × 3 convolutions `conv0`, `conv1`, ... (SAME, bias, ReLU), after each stage a 2 × 2 max-pooling; the
    mean over space; the dense layer `head`.  [batch, size, size, 3] -> [batch, classes]"""

    batch: int = 64
    size: int = 32
    stages: tuple[tuple[int, ...], ...] = ((64, 64), (128, 128))
    classes: int = 10

    def shapes(self):
        channels = (3, *(width for stage in self.stages for width in stage))
        convs = (_dense(f"conv{i}", 3, 3, a, b) for i, (a, b) in enumerate(itertools.pairwise(channels)))
        return _merged(*convs, _dense("head", channels[-1], self.classes))

    def draw(self, rng):
        return _images(rng, self.batch, self.size), _labels(rng, self.batch, self.classes)


@dataclasses.dataclass(frozen=True)
class GPT:
    """A decoder of pre-norm blocks:  [batch, time] -> [batch, time, vocab]

        x = token[tokens] + position
        x = x + out(attention(norm1(x)))          attn/query, key, value, out; causal; scaled by head_dim^-0.5
        x = x + down(gelu(up(norm2(x))))          width -> 4 width -> width
        logits = norm(x) @ token^T

    Biases, of the dense layers and the norms alike, only with `bias`. The targets are the next tokens.

    Source: Radford et al. (2019), Language Models are Unsupervised Multitask Learners.
    """

    batch: int = 8
    time: int = 256
    width: int = 256
    depth: int = 4
    heads: int = 4
    vocab: int = 256
    bias: bool = False

    def shapes(self):
        return _merged(
            {"token/embedding": (self.vocab, self.width), "position/embedding": (self.time, self.width)},
            *(_block(f"block{i}", self.width, self.bias) for i in range(self.depth)),
            _norm("norm", self.width, self.bias))

    def draw(self, rng):
        tokens = rng.integers(0, self.vocab, (self.batch, self.time + 1), np.int32)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()


WORKLOADS = {
    "mlp": MLP(),
    "cnn": CNN(),
    "gpt": GPT(),
}
SMALL = {
    "mlp": MLP(8, (12, 16, 10)),
    "cnn": CNN(4, 8, ((8,), (16,))),
    "gpt": GPT(2, 16, 32, 2, 2, 32),
}


def workload(name: str, size: str = "full"):
    """The workload of that name, in full or, for tests, in small."""
    return (WORKLOADS if size == "full" else SMALL)[name]


def weights(workload, seed: int = 0) -> dict[str, np.ndarray]:
    """{path: float32 array}. Nothing is left at 0 or 1, so that two arrays that changed places show in the loss."""
    rng = np.random.default_rng(seed)
    return {path: _draw(rng, path.rsplit("/", 1)[-1], shape) for path, shape in workload.shapes().items()}


def batches(workload, n: int = 4, seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets), `n` of them."""
    rng = np.random.default_rng(seed)
    return [workload.draw(rng) for _ in range(n)]


def cross_entropy(logits, targets) -> float:
    """The loss in float64, for peers in inference, which give logits.  [..., classes], [...]"""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, np.asarray(targets)[..., None], -1)[..., 0]
    return float((np.log(np.exp(shifted).sum(-1)) - chosen).mean())


def _draw(rng, kind, shape):
    noise = rng.standard_normal(shape, np.float32)
    if kind == "kernel" or kind == "recurrent_kernel":
        return noise / np.float32(np.sqrt(np.prod(shape[:-1])))
    if kind == "scale" or kind == "var":
        return 1 + np.float32(0.1) * np.tanh(noise)
    return np.float32(0.02) * noise    # bias, embedding, mean


def _images(rng, batch, size):
    return rng.standard_normal((batch, size, size, 3), np.float32)


def _labels(rng, batch, classes):
    return rng.integers(0, classes, batch, np.int32)


def _merged(*parts):
    return {path: shape for part in parts for path, shape in part.items()}


def _dense(path, *shape, bias=True):
    return {f"{path}/kernel": shape, **({f"{path}/bias": shape[-1:]} if bias else {})}


def _norm(path, width, bias=True):
    return {f"{path}/scale": (width,), **({f"{path}/bias": (width,)} if bias else {})}


def _block(path, width, bias):
    return _merged(
        _norm(f"{path}/norm1", width, bias),
        *(_dense(f"{path}/attn/{name}", width, width, bias=bias) for name in ("query", "key", "value", "out")),
        _norm(f"{path}/norm2", width, bias),
        _dense(f"{path}/up", width, 4 * width, bias=bias),
        _dense(f"{path}/down", 4 * width, width, bias=bias))
