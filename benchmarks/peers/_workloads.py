"""The workloads: the models by name, their weights and their batches. NumPy creates them, so that
all peers have equal values.

All workloads have float32 parameters and no dropout. The loss is the mean softmax cross entropy
over all targets. The optimizer is AdamW with learning rate 1e-4, betas 0.9 and 0.999, epsilon 1e-8,
and weight decay 0.01 on every parameter. GELU is computed with tanh. LayerNorm and BatchNorm have
epsilon 1e-5. The path of an array is its path in fnet, such as "block0/attn/query/kernel". Kernels
are [..., in, out], and images have channels last. Each class defines its model completely. A peer
implements the model in the style of its library's documentation.

In the first steps of AdamW, even a tiny gradient changes a parameter by about the learning rate, so
rounding errors of such gradients become large. With this learning rate, the losses of equal models
differ by at most 1e-4 in three steps, but a missing step is detected. With 1e-3, the losses of
ResNet-18 differ by up to 3e-3.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

LEARNING_RATE, WEIGHT_DECAY, EPSILON = 1e-4, 0.01, 1e-5


@dataclasses.dataclass(frozen=True)
class MLP:
    """Dense layers `dense0`, `dense1`, ..., with biases and with ReLU between the layers: [batch,
    features] -> [batch, classes]."""

    batch: int = 256
    widths: tuple[int, ...] = (784, 512, 512, 10)

    def shapes(self):
        return _merged(
            *(_dense(f"dense{i}", a, b) for i, (a, b) in enumerate(itertools.pairwise(self.widths)))
        )

    def draw(self, rng):
        return rng.standard_normal((self.batch, self.widths[0]), np.float32), _labels(
            rng, self.batch, self.widths[-1]
        )


@dataclasses.dataclass(frozen=True)
class CNN:
    """Stages of 3 × 3 convolutions `conv0`, `conv1`, ... with SAME padding, bias and ReLU: [batch,
    size, size, 3] -> [batch, classes]. A 2 × 2 max-pooling follows each stage. The mean over height
    and width and the dense layer `head` follow the last stage."""

    batch: int = 64
    size: int = 32
    stages: tuple[tuple[int, ...], ...] = ((64, 64), (128, 128))
    classes: int = 10

    def shapes(self):
        channels = (3, *(width for stage in self.stages for width in stage))
        convs = (
            _dense(f"conv{i}", 3, 3, a, b) for i, (a, b) in enumerate(itertools.pairwise(channels))
        )
        return _merged(*convs, _dense("head", channels[-1], self.classes))

    def draw(self, rng):
        return _images(rng, self.batch, self.size), _labels(rng, self.batch, self.classes)


@dataclasses.dataclass(frozen=True)
class GPT:
    """A decoder of pre-norm blocks: [batch, time] -> [batch, time, vocab].

        x = token[tokens] + position
        x = x + out(attention(norm1(x)))          attn/query, key, value, out; causal; scaled by head_dim^-0.5
        x = x + down(gelu(up(norm2(x))))          width -> 4 width -> width
        logits = norm(x) @ token^T

    Only with `bias`, the dense layers and the norms have biases. The targets are the next tokens.

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
            {
                "token/embedding": (self.vocab, self.width),
                "position/embedding": (self.time, self.width),
            },
            *(_block(f"block{i}", self.width, self.bias) for i in range(self.depth)),
            _norm("norm", self.width, self.bias),
        )

    def draw(self, rng):
        return _tokens(rng, self)


@dataclasses.dataclass(frozen=True)
class ViT:
    """An encoder of GPT's blocks, with biases and without the causal mask: [batch, size, size, 3]
    -> [batch, classes].

        x = patch(images) + position              a convolution of patch × patch, stride patch; then [tokens, width]
        logits = head(mean(norm(blocks(x))))      the mean over all tokens; no class token

    Source: Dosovitskiy et al. (2021), An Image is Worth 16x16 Words; widths as in Touvron et al.
    (2021), DeiT-Ti; the mean as in Beyer et al. (2022), Better plain ViT baselines.
    """

    batch: int = 32
    size: int = 32
    patch: int = 4
    width: int = 192
    depth: int = 12
    heads: int = 3
    classes: int = 10

    def shapes(self):
        return _merged(
            _dense("patch", self.patch, self.patch, 3, self.width),
            {"position/embedding": ((self.size // self.patch) ** 2, self.width)},
            *(_block(f"block{i}", self.width, True) for i in range(self.depth)),
            _norm("norm", self.width),
            _dense("head", self.width, self.classes),
        )

    def draw(self, rng):
        return _images(rng, self.batch, self.size), _labels(rng, self.batch, self.classes)


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A residual network with BatchNorm: [batch, size, size, 3] -> [batch, classes].

        stem: conv 3 × 3 (for photos 7 × 7, stride 2), norm, ReLU (for photos a 3 × 3 max-pooling, stride 2)
        block: x = relu(shortcut(x) + f(x))
        head: the mean over height and width, a dense layer

    f has two 3 × 3 convolutions, or with `bottleneck` a 1 × 1, a 3 × 3 and a 1 × 1 convolution. A
    norm follows each convolution, and a ReLU follows each norm except the last. The first 3 × 3
    convolution has the stride of the block. The shortcut is a 1 × 1 convolution and a norm if the
    shapes of x and f(x) differ, otherwise the identity.

    Convolutions have no bias. Their padding on both sides is half the size of the window.
    BatchNorm's momentum is 0.9.

    Source: He et al. (2016), Deep Residual Learning for Image Recognition; the stride as in
    PyTorch's ResNet v1.5.
    """

    batch: int = 32
    size: int = 32
    depths: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    bottleneck: bool = False
    photos: bool = False
    classes: int = 10

    def blocks(self):
        """Yields (input channels, channels, output channels, stride) of every block."""
        channels = self.width
        for stage, depth in enumerate(self.depths):
            width = self.width << stage
            out = 4 * width if self.bottleneck else width
            for i in range(depth):
                yield channels, width, out, 2 if stage and not i else 1
                channels = out

    def shapes(self):
        window = 7 if self.photos else 3
        parts = [
            {"stem/kernel": (window, window, 3, self.width)},
            _batch_norm("stem_norm", self.width),
        ]
        for i, (before, width, out, stride) in enumerate(self.blocks()):
            convs = (
                [(1, before, width), (3, width, width), (1, width, out)]
                if self.bottleneck
                else [(3, before, width), (3, width, out)]
            )
            for j, (window, a, b) in enumerate(convs, 1):
                parts += [
                    {f"block{i}/conv{j}/kernel": (window, window, a, b)},
                    _batch_norm(f"block{i}/norm{j}", b),
                ]
            if before != out or stride != 1:
                parts += [
                    {f"block{i}/shortcut/kernel": (1, 1, before, out)},
                    _batch_norm(f"block{i}/shortcut_norm", out),
                ]
        return _merged(*parts, _dense("head", out, self.classes))

    def draw(self, rng):
        return _images(rng, self.batch, self.size), _labels(rng, self.batch, self.classes)


@dataclasses.dataclass(frozen=True)
class LSTM:
    """A token embedding, layers `lstm0`, `lstm1`, ..., and the dense layer `head`: [batch, time] ->
    [batch, time, vocab].

    The gates are in the order input, forget, cell, output. A layer has one bias. The initial state
    is zero. The targets are the next tokens.

    Source: Hochreiter and Schmidhuber (1997), Long Short-Term Memory; Gers et al. (2000) for the
    forget gate.
    """

    batch: int = 32
    time: int = 128
    width: int = 256
    depth: int = 2
    vocab: int = 256

    def shapes(self):
        width, gates = self.width, 4 * self.width
        cells = (
            {
                f"lstm{i}/kernel": (width, gates),
                f"lstm{i}/recurrent_kernel": (width, gates),
                f"lstm{i}/bias": (gates,),
            }
            for i in range(self.depth)
        )
        return _merged(
            {"token/embedding": (self.vocab, self.width)},
            *cells,
            _dense("head", self.width, self.vocab),
        )

    def draw(self, rng):
        return _tokens(rng, self)


WORKLOADS = {
    "mlp": MLP(),
    "cnn": CNN(),
    "gpt": GPT(),
    "lstm": LSTM(),
    "vit-tiny": ViT(),
    "resnet18": ResNet(),
    "resnet50": ResNet(128, 224, (3, 4, 6, 3), bottleneck=True, photos=True, classes=1000),
    "gpt2-124m": GPT(
        16, 1024, 768, 12, 12, 50304, bias=True
    ),  # with the vocabulary padded to a multiple of 128
    "gpt2-350m": GPT(8, 1024, 1024, 24, 16, 50304, bias=True),
}
ACCELERATOR = (
    "resnet50",
    "gpt2-124m",
    "gpt2-350m",
)  # too slow on a CPU; mixed precision by default
SMALL = {
    "mlp": MLP(8, (12, 16, 10)),
    "cnn": CNN(4, 8, ((8,), (16,))),
    "gpt": GPT(2, 16, 32, 2, 2, 32),
    "lstm": LSTM(2, 6, 16, 2, 32),
    "vit-tiny": ViT(2, 8, 4, 24, 2, 3),
    "resnet18": ResNet(2, 8, (1, 1), 8),
    "resnet50": ResNet(2, 32, (1, 1), 8, bottleneck=True, photos=True),
    "gpt2-124m": GPT(2, 16, 32, 2, 2, 32, bias=True),
    "gpt2-350m": GPT(2, 16, 32, 3, 2, 32, bias=True),
}


def items(workload) -> tuple[str, int]:
    """Returns what one step processes: ("tokens", count) or ("examples", count)."""
    return (
        ("tokens", workload.batch * workload.time)
        if hasattr(workload, "time")
        else ("examples", workload.batch)
    )


def workload(name: str, size: str = "full"):
    """Returns the workload of this name, with its full sizes or, for tests, with small sizes."""
    return (WORKLOADS if size == "full" else SMALL)[name]


def weights(workload, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the weights, {path: float32 array}. No array is constant 0 or 1, so that exchanged
    arrays change the loss."""
    rng = np.random.default_rng(seed)
    drawn = {
        path: _draw(rng, path.rsplit("/", 1)[-1], shape)
        for path, shape in workload.shapes().items()
    }
    if isinstance(workload, LSTM):
        drawn["token/embedding"] *= (
            50  # no norm follows, and activations of scale 0.02 give tiny gradients
        )
    return drawn


def batches(workload, n: int = 4, seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns `n` batches (inputs, targets)."""
    rng = np.random.default_rng(seed)
    return [workload.draw(rng) for _ in range(n)]


def cross_entropy(logits, targets) -> float:
    """Returns the loss in float64 for logits [..., classes] and targets [...]. It is used for
    inference, in which peers return logits."""
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
    return np.float32(0.02) * noise  # bias, embedding, mean


def _images(rng, batch, size):
    return rng.standard_normal((batch, size, size, 3), np.float32)


def _tokens(rng, w):
    tokens = rng.integers(0, w.vocab, (w.batch, w.time + 1), np.int32)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


def _labels(rng, batch, classes):
    return rng.integers(0, classes, batch, np.int32)


def _merged(*parts):
    return {path: shape for part in parts for path, shape in part.items()}


def _dense(path, *shape, bias=True):
    return {f"{path}/kernel": shape, **({f"{path}/bias": shape[-1:]} if bias else {})}


def _norm(path, width, bias=True):
    return {f"{path}/scale": (width,), **({f"{path}/bias": (width,)} if bias else {})}


def _batch_norm(path, width):
    return {f"{path}/{name}": (width,) for name in ("scale", "bias", "mean", "var")}


def _block(path, width, bias):
    return _merged(
        _norm(f"{path}/norm1", width, bias),
        *(
            _dense(f"{path}/attn/{name}", width, width, bias=bias)
            for name in ("query", "key", "value", "out")
        ),
        _norm(f"{path}/norm2", width, bias),
        _dense(f"{path}/up", width, 4 * width, bias=bias),
        _dense(f"{path}/down", 4 * width, width, bias=bias),
    )
