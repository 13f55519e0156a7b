"""As much of PyTorch as `pretrained.names` needs, in NumPy: modules, tensors and hooks.

`make test` has no PyTorch. The formulas here are its own, so that a proof compares two programs
that were written apart; `make verify-pretrained ARGS=entrances` does so with PyTorch itself.
"""

import contextlib
import types

import numpy as np


class Tensor:
    def __init__(self, array):
        self.array = np.asarray(array)

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.array

    def clone(self):
        return Tensor(self.array.copy())

    def copy_(self, other):
        self.array[...] = other.array

    def data_ptr(self):
        return id(self.array)

    def numel(self):
        return self.array.size

    def stride(self):
        return self.array.strides

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return f"torch.{self.array.dtype}"


class Module:
    """Attributes that are modules, lists of modules or tensors are its parts, as in PyTorch."""

    training = True
    buffers = ()  # names of tensors that are not trained

    def _parts(self):
        for name, value in vars(self).items():
            if isinstance(value, list):
                yield from ((f"{name}.{i}", each) for i, each in enumerate(value))
            elif isinstance(value, Module):
                yield name, value

    def children(self):
        return (part for _, part in self._parts())

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, part in self._parts():
            yield from part.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self):
        return (each for _, each in self.named_modules())

    def state_dict(self, keep_vars=False):
        held = {}
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    held[f"{prefix}.{name}" if prefix else name] = value
        return held

    def named_parameters(self):
        for key, value in self.state_dict().items():
            if key.rpartition(".")[2] not in self.buffers:
                yield key, value

    def register_forward_hook(self, hook, with_kwargs):
        hooks = self.__dict__.setdefault("_hooks", {})
        hooks[hook] = hook
        return types.SimpleNamespace(remove=lambda: hooks.pop(hook))

    def eval(self):
        for each in self.modules():
            each.training = False
        return self

    def __call__(self, *inputs, **options):
        output = self.forward(*inputs, **options)
        for hook in list(self.__dict__.get("_hooks", {})):
            hook(self, inputs, options, output)
        return output


def tensor_of(function):
    return lambda self, *inputs: Tensor(function(self, *(each.array for each in inputs)))


_numbers = np.random.default_rng(0)


def normal(*shape):
    return Tensor(_numbers.normal(size=shape).astype(np.float32) / 2)


class Linear(Module):
    __module__ = "torch.nn.modules.linear"

    def __init__(self, inputs, outputs):
        self.weight, self.bias = normal(outputs, inputs), normal(outputs)

    @tensor_of
    def forward(self, x):
        return x @ self.weight.array.T + self.bias.array


class Conv2d(Module):
    """A window of odd size, padded with zeros."""

    __module__ = "torch.nn.modules.conv"

    def __init__(self, inputs, outputs, window):
        self.weight, self.bias = normal(outputs, inputs, window, window), normal(outputs)

    @tensor_of
    def forward(self, x):
        weight = self.weight.array
        pad = weight.shape[-1] // 2
        x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        size = weight.shape[-2:]
        windows = np.lib.stride_tricks.sliding_window_view(x, size, (2, 3))
        return np.einsum("bihwkl,oikl->bohw", windows, weight) + self.bias.array[:, None, None]


class LayerNorm(Module):
    __module__ = "torch.nn.modules.normalization"

    def __init__(self, features):
        self.weight, self.bias = normal(features), normal(features)

    @tensor_of
    def forward(self, x):
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return y * self.weight.array + self.bias.array


class Embedding(Module):
    __module__ = "torch.nn.modules.sparse"

    def __init__(self, count, features):
        self.weight = normal(count, features)

    @tensor_of
    def forward(self, tokens):
        return self.weight.array[tokens]


class GRU(Module):
    __module__ = "torch.nn.modules.rnn"
    batch_first = False

    def __init__(self, inputs, f):
        self.weight_ih_l0, self.weight_hh_l0 = normal(3 * f, inputs), normal(3 * f, f)
        self.bias_ih_l0, self.bias_hh_l0 = normal(3 * f), normal(3 * f)

    def forward(self, x):
        x = x.array  # [time, batch, inputs]
        h, outputs = np.zeros((x.shape[1], self.weight_hh_l0.shape[1]), np.float32), []
        for step in x:
            rx, zx, nx = np.split(step @ self.weight_ih_l0.array.T + self.bias_ih_l0.array, 3, -1)
            rh, zh, nh = np.split(h @ self.weight_hh_l0.array.T + self.bias_hh_l0.array, 3, -1)
            r, z = (1 / (1 + np.exp(-each)) for each in (rx + rh, zx + zh))
            h = (1 - z) * np.tanh(nx + r * nh) + z * h
            outputs.append(h)
        return Tensor(np.stack(outputs)), Tensor(h[None])


torch = types.ModuleType("torch")
torch.Tensor, torch.from_numpy, torch.no_grad = Tensor, Tensor, contextlib.nullcontext
