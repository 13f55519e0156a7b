"""llama2.c's model.bin run in NumPy, one token at a time: written from the format and the paper,
without fnet."""

import math

import numpy as np


class Decoder:
    """`logits = decoder(token)` for one token after the other; keys and values are kept.

    Args:
        raw: the file: seven integers, then floats.
        dtype: to compute in.
    """

    def __init__(self, raw, dtype=np.float64):
        self.dim, hidden, self.depth, self.heads, self.groups, vocab, context = np.frombuffer(
            raw[:28], "<i4"
        ).tolist()
        n, dim, d, v = self.depth, self.dim, self.dim // self.heads, abs(vocab)
        shapes = {
            "embed": (v, dim),
            "norm1": (n, dim),
            "q": (n, dim, dim),
            "k": (n, self.groups * d, dim),
            "v": (n, self.groups * d, dim),
            "o": (n, dim, dim),
            "norm2": (n, dim),
            "gate": (n, hidden, dim),
            "down": (n, dim, hidden),
            "up": (n, hidden, dim),
            "norm": (dim,),
            "tables": (context, d),
        }
        shapes |= {"head": (v, dim)} if vocab < 0 else {}
        floats, at, self.w = np.frombuffer(raw[28:], "<f4"), 0, {}
        for name, shape in shapes.items():
            self.w[name] = floats[at : at + math.prod(shape)].reshape(shape).astype(dtype)
            at += math.prod(shape)
        assert at == len(floats)
        self.rates = 10000.0 ** (-np.arange(0, d, 2) / d)
        self.keys, self.values = ([[] for _ in range(n)] for _ in range(2))

    def __call__(self, token):
        w, x = self.w, self.w["embed"][token]
        turn = np.exp(1j * len(self.keys[0]) * self.rates)
        for i in range(self.depth):
            y = self._norm(x, w["norm1"][i])
            q, k, v = (
                (w[name][i] @ y).reshape(-1, self.dim // self.heads) for name in "qkv"
            )  # [heads, head_dim]
            self.keys[i].append(self._turned(k, turn))
            self.values[i].append(v)
            keys, values = (
                np.repeat(np.stack(rows), self.heads // self.groups, 1)  # [time, heads, ...]
                for rows in (self.keys[i], self.values[i])
            )
            scores = np.einsum("hd,thd->ht", self._turned(q, turn), keys) / math.sqrt(q.shape[-1])
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            y = np.einsum("ht,thd->hd", scores / scores.sum(-1, keepdims=True), values)
            x = x + w["o"][i] @ y.reshape(-1)
            y = self._norm(x, w["norm2"][i])
            gate = w["gate"][i] @ y
            x = x + w["down"][i] @ (gate / (1 + np.exp(-gate)) * (w["up"][i] @ y))
        return w.get("head", w["embed"]) @ self._norm(x, w["norm"])

    def greedy(self, prompt, count):
        """The likeliest `count` tokens behind the prompt."""
        for token in prompt:
            logits = self(token)
        found = []
        for _ in range(count):
            found.append(int(logits.argmax()))
            logits = self(found[-1])
        return found

    def _norm(self, x, scale):
        return x / np.sqrt((x * x).mean() + 1e-5) * scale

    def _turned(self, x, turn):
        z = (x[:, 0::2] + 1j * x[:, 1::2]) * turn
        return np.stack([z.real, z.imag], -1).reshape(x.shape).astype(x.dtype)
