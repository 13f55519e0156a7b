"""The words of a framework: what it calls the arrays of each kind of layer, and how it stores them.

`torch` and `keras` have a method for each layer. It returns the `Rule`s of that layer's arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fnet import layers as nn
from fnet.models.weights._weight_names import CONV, DENSE, SAME, Layout, Rule, Spare, flat


class Words:
    """The conventions of a framework for the names and layouts of arrays.

        torch.dense("fc", "layers.0")          # fc/kernel <-> layers.0.weight, fc/bias <-> layers.0.bias

    Each method returns the rules for one layer, whose path in fnet is `ours` and whose prefix in
    the file is `theirs`. `torch` describes PyTorch: kernels are [out, in] and [out, in, *window],
    and names are such as weight and running_mean. `keras` describes Keras: kernels are as in fnet,
    and names are such as kernel, gamma and moving_mean.
    """

    def __init__(self, join, dense, conv, kernel, bias, norm, count=None):
        self._join, self._dense, self._conv = join, dense, conv
        self._kernel, self._bias, self._norm, self._count = kernel, bias, norm, count

    def dense(self, ours: str | Sequence[str], theirs: str, layout: Layout | None = None) -> tuple:
        """Returns the naming rules for kernel and bias of a Dense.

        Several paths are layers that the file keeps as one, such as query, key and value in one
        matrix: `torch.dense(("attn/query", "attn/key", "attn/value"), "attn.qkv")`.
        """
        return self._affine(ours, theirs, layout or self._dense, (nn.Dense,))

    def conv(self, ours: str, theirs: str) -> tuple:
        """Returns the naming rules for the kernel and the bias of a Conv.

        Those of PyTorch also fit a DepthwiseConv, but not a ConvTranspose, whose kernel has another
        layout.
        """
        return self._affine(
            ours,
            theirs,
            self._conv,
            (nn.Conv, nn.DepthwiseConv) if self._join == "." else (nn.Conv,),
        )

    def norm(self, ours: str, theirs: str) -> tuple:
        """Returns the naming rules for scale and bias of a LayerNorm, RMSNorm or GroupNorm."""
        layers = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm
        return tuple(
            Rule(_path(ours, mine), self._key(theirs, name), layers=layers)
            for mine, name in self._norm[:2]
        )

    def batch_norm(self, ours: str, theirs: str) -> tuple:
        """Returns the naming rules for the arrays of a BatchNorm, and for PyTorch's unused
        num_batches_tracked."""
        count = (
            ()
            if self._count is None
            else (Spare(self._key(theirs, self._count), write=np.int64(0)),)
        )
        return tuple(
            Rule(
                _path(ours, mine),
                self._key(theirs, name),
                beside=count if mine == "mean" else (),
                layers=(nn.BatchNorm,),
            )
            for mine, name in self._norm
        )

    def embed(self, ours: str, theirs: str) -> tuple:
        """Returns the naming rule for the table of an Embed."""
        name = "weight" if self._join == "." else "embeddings"
        return (Rule(_path(ours, "embedding"), self._key(theirs, name), layers=(nn.Embed,)),)

    def _affine(self, ours, theirs, layout, layers):
        each = (ours,) if isinstance(ours, str) else tuple(ours)
        kernels, biases = (tuple(_path(one, name) for one in each) for name in ("kernel", "bias"))
        if len(each) == 1:
            kernels, biases = kernels[0], biases[0]
        return (
            Rule(kernels, self._key(theirs, self._kernel), layout, layers=layers),
            Rule(biases, self._key(theirs, self._bias), layers=layers),
        )

    def _key(self, theirs, name):
        return f"{theirs}{self._join}{name}" if theirs else name


class TorchWords(Words):
    """The conventions of PyTorch, with the layers that other frameworks keep in other ways."""

    def conv_transpose(self, ours: str, theirs: str, groups: int = 1) -> tuple:
        """Returns the naming rules for the kernel and the bias of a ConvTranspose.

        PyTorch keeps the kernel as [in, out / groups, *window], with the input channels first. No
        shape shows the number of groups, so say it as the layer does.
        """
        return self._affine(ours, theirs, _transposed(groups), (nn.ConvTranspose,))

    def rnn(self, ours: str, theirs: str, layer: int | str | None = 0) -> tuple:
        """Returns the naming rules for an RNN; the arguments are those of `lstm`."""
        return self._recurrent(ours, theirs, layer, nn.RNN)

    def lstm(self, ours: str, theirs: str, layer: int | str | None = 0) -> tuple:
        """Returns the naming rules for an LSTM, in one direction or in both.

            torch.lstm("lstm1", "lstm", layer=1)         # lstm1/kernel <-> lstm.weight_ih_l1, ...
            torch.lstm("lstm{i}", "lstm", layer="{i}")   # lstm0, lstm1, ...: all layers of an nn.LSTM

        PyTorch has two biases where fnet has one: `load` adds them, and `save` writes the sum as
        bias_ih and zeros as bias_hh, with which the outputs are the same.

        Args:
            ours: the path of one LSTM in fnet.
            theirs: the prefix of PyTorch's nn.LSTM, which may have several layers.
            layer: which of them it is, or a placeholder of `ours`. None: an nn.LSTMCell.
        """
        refused = "fnet's LSTM has no projection of its outputs (proj_size= in PyTorch)"
        return self._recurrent(ours, theirs, layer, nn.LSTM, (("weight_hr", refused),))

    def gru(self, ours: str, theirs: str, layer: int | str | None = 0) -> tuple:
        """Returns the naming rules for a GRU; the arguments are those of `lstm`.

        The two biases of the reset and update gates are added, as for an LSTM. Those of the new
        gate stay apart in fnet, too, since the reset gate multiplies only one of them.
        """
        return self._recurrent(ours, theirs, layer, nn.GRU)

    def attention(self, ours: str, theirs: str) -> tuple:
        """Returns the naming rules for an Attention, of PyTorch's nn.MultiheadAttention.

        Query, key and value are one matrix in_proj_weight in PyTorch, or three, such as
        q_proj_weight, where keys and values have another size (kdim=, vdim=). Say `batch_first` to
        neither: it changes the inputs, not the weights. `add_bias_kv=True` is refused: fnet's
        Attention has no bias_k.
        """
        parts = "query", "key", "value"
        reason = "fnet's Attention has no such array (add_bias_kv= in PyTorch)"
        refused = tuple(
            Spare(self._key(theirs, name), refused=reason) for name in ("bias_k", "bias_v")
        )
        kernels, biases = (
            tuple(_path(ours, f"{part}/{name}") for part in parts) for name in ("kernel", "bias")
        )
        return (
            Rule(kernels, self._key(theirs, "in_proj_weight"), DENSE, refused, (nn.Dense,)),
            *(
                Rule(
                    kernel, self._key(theirs, f"{part[0]}_proj_weight"), DENSE, refused, (nn.Dense,)
                )
                for kernel, part in zip(kernels, parts)
            ),
            Rule(biases, self._key(theirs, "in_proj_bias"), layers=(nn.Dense,)),
            *self.dense(_path(ours, "out"), self._key(theirs, "out_proj")),
        )

    def weight_norm(
        self,
        rules: tuple,
        dim: int | None = 0,
        *,
        parametrized: bool = False,
        name: str = "weight",
    ) -> tuple:
        """Returns the rules of a layer whose weight PyTorch keeps as a direction v and a norm g.

            torch.weight_norm(torch.conv("stem", "conv1"))

        `load` folds the two into the kernel `g * v / norm(v)`. `save` writes the kernel as v and its
        norm as g, with which PyTorch computes the same kernel.

        Args:
            rules: those of the layer, as the other methods return them.
            dim: the axis of PyTorch's weight that keeps a norm for each index, as in
                torch.nn.utils.weight_norm. None: one norm for the whole weight.
            parametrized: whether the file has the names of torch.nn.utils.parametrizations
                (parametrizations.weight.original0 and original1) instead of weight_g and weight_v.
            name: PyTorch's name of the weight, such as weight_hh_l0 in an nn.LSTM.

        Raises:
            ValueError: none of the rules is for a weight of this name.
        """

        def normed(rule):
            if not isinstance(rule, Rule) or not isinstance(rule.theirs, str):
                return rule
            head, _, last = rule.theirs.rpartition(".")
            if last != name:
                return rule
            found.append(rule)
            names = f"{name}_g", f"{name}_v"
            if parametrized:
                names = tuple(f"parametrizations.{name}.original{i}" for i in (0, 1))
            keys = tuple(self._key(head, each) for each in names)
            return dataclasses.replace(rule, theirs=keys, layout=_weight_normed(rule.layout, dim))

        found: list = []
        changed = tuple(map(normed, flat(rules)))
        if not found:
            keys = ", ".join(repr(rule.theirs) for rule in flat(rules))
            raise ValueError(
                f"torch.weight_norm: expected rules of a layer with a weight {name!r}; got rules "
                f"for {keys}"
            )
        return changed

    def _recurrent(self, ours, theirs, layer, kind, refused=()):
        rules = []
        for place, reverse in ("", ""), ("forward/", ""), ("backward/", "_reverse"):
            end = "" if layer is None else f"_l{layer}{reverse}"
            key = lambda name, end=end: self._key(theirs, name + end)
            path = lambda name, place=place: _path(ours, place + name)
            beside = tuple(Spare(key(name), refused=reason) for name, reason in refused)
            biases, layout = path("bias"), _SUM
            if kind is nn.GRU:
                biases, layout = (path("bias"), path("recurrent_bias")), _GRU_BIASES
            rules += [
                Rule(path("kernel"), key("weight_ih"), DENSE, beside, (kind,)),
                Rule(path("recurrent_kernel"), key("weight_hh"), DENSE, layers=(kind,)),
                Rule(biases, (key("bias_ih"), key("bias_hh")), layout, layers=(kind,)),
            ]
        return tuple(rules)


def _path(ours, name):
    return f"{ours}/{name}" if ours else name


def _transposed(groups: int) -> Layout:
    """The kernel of a transposed convolution: [in, out / groups, *window] in PyTorch, [*window, in /
    groups, out] in fnet."""

    def ours(array):
        inputs, outputs, *window = array.shape
        parts = array.reshape(groups, inputs // groups, outputs, *window)
        parts = np.moveaxis(parts, (1, 0, 2), (-3, -2, -1))  # [*window, in / groups, groups, out]
        return parts.reshape(*parts.shape[:-2], groups * outputs)

    def theirs(array):
        *window, inputs, outputs = array.shape
        parts = array.reshape(*window, inputs, groups, outputs // groups)
        parts = np.moveaxis(parts, (-3, -2, -1), (1, 0, 2))  # [groups, in / groups, out, *window]
        return parts.reshape(groups * inputs, outputs // groups, *window)

    return Layout("conv transpose", ours, theirs)


_SUM = Layout(
    "sum of two biases",
    lambda input_bias, hidden_bias: input_bias + hidden_bias,
    lambda bias: (bias, np.zeros_like(bias)),
)


def _gru_biases(input_bias, hidden_bias):
    """bias [3 f] and recurrent_bias [f] after each other, from PyTorch's two biases [3 f]."""
    gates = 2 * len(input_bias) // 3
    both = input_bias[:gates] + hidden_bias[:gates]
    return np.concatenate([both, input_bias[gates:], hidden_bias[gates:]])


def _torch_gru_biases(biases):
    f = len(biases) // 4
    return biases[: 3 * f], np.concatenate([np.zeros_like(biases[: 2 * f]), biases[3 * f :]])


_GRU_BIASES = Layout("biases of a GRU", _gru_biases, _torch_gru_biases)


def _weight_normed(layout: Layout, dim: int | None) -> Layout:
    """A kernel with the layout `layout` whose file has its norm g and its direction v."""
    whole = dim in (None, -1)  # torch has -1 for None

    def norm(v):
        axes = tuple(range(v.ndim)) if whole else tuple(i for i in range(v.ndim) if i != dim)
        return np.sqrt(np.square(v.astype(np.float64)).sum(axes, keepdims=not whole))

    def ours(g, v):
        return layout.ours((v * (g / norm(v))).astype(v.dtype))

    def theirs(array):
        v = layout.theirs(array)
        g = norm(v)
        # A direction of length 0 has no norm; any other is right where g is 0.
        return g.astype(v.dtype), np.where(g == 0, np.ones_like(v), v)

    return Layout(f"weight norm of {layout.name}", ours, theirs)


torch = TorchWords(
    ".",
    DENSE,
    CONV,
    "weight",
    "bias",
    (("scale", "weight"), ("bias", "bias"), ("mean", "running_mean"), ("var", "running_var")),
    "num_batches_tracked",
)
keras = Words(
    "/",
    SAME,
    SAME,
    "kernel",
    "bias",
    (("scale", "gamma"), ("bias", "beta"), ("mean", "moving_mean"), ("var", "moving_variance")),
)
