"""Recurrent layers: RNN, LSTM and GRU, over ragged batches, in one direction or both."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from fnet.layers._core import Layer, method
from fnet.layers._linear import affine, align, floating, lecun_normal, linear, wide, zeros
from fnet.layers._scope import Scope, describe

_orthogonal = initializers.orthogonal()


def orthogonal_gates(key, shape, dtype=jnp.float32):
    """An orthogonal matrix for every gate, side by side: [features, gates * features].

    Source: Saxe, McClelland and Ganguli (2014), Exact solutions to the nonlinear dynamics of learning in deep linear
    neural networks.
    """
    features, columns = shape
    keys = jax.random.split(key, columns // features)
    gates = jax.vmap(lambda key: _orthogonal(key, (features, features), dtype))(keys)    # [gates, features, features]
    return gates.swapaxes(0, 1).reshape(shape)


def open_forget_gate(key, shape, dtype=jnp.float32):
    """0, and 1 for the forget gate, the second of the four.

    Source: Gers, Schmidhuber and Cummins (2000), Learning to Forget; Jozefowicz, Zaremba and Sutskever (2015), An
    Empirical Exploration of Recurrent Network Architectures, which measured it.
    """
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


class _Recurrent(Layer):
    """What RNN, LSTM and GRU share: a projection of all inputs for each gate, then a scan with one dot for each step.

    The gates' projections are arrays of their own: sliced out of one, XLA:CPU computes a step's gates number by number.
    """

    gates: typing.ClassVar[int] = 1

    features: int
    _: KW_ONLY
    bidirectional: bool = False
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    recurrent_init: Callable = orthogonal_gates
    bias_init: Callable = zeros
    unroll: int = 1

    def forward(self, scope: Scope, x, *, lengths=None):
        return self.scan(scope, x, lengths=lengths)[0]

    @method
    def scan(self, scope: Scope, x, carry=None, *, lengths=None):
        """The outputs and the carry that the next steps go on from.

            y, carry = lstm.scan(params, prompt, lengths=lengths)
            y, carry = lstm.scan(params, token[:, None], carry)        # one step more

        Args:
            x: [batch, time, features_in].
            carry: where to begin, as it came back from a call or from `zero_carry`; None: zeros.
            lengths: [batch] integers, the steps of each row that count; None: all of them.

        Returns:
            `(outputs, carry)`: outputs as from calling the layer, and each row's carry after its own last step (for
            the direction backward, its first), in float32 at least.
        """
        x = floating(x, scope, type(self).__name__)
        if x.ndim != 3:
            raise ValueError(f"{type(self).__name__} at {scope} takes an input [batch, time, features]; got shape "
                             f"{x.shape}")
        valid = None if lengths is None else _valid(lengths, x, self, scope)
        carry = self._begin(carry, x, scope)
        if not self.bidirectional:
            return self._run(scope, x, carry, valid, reverse=False)
        one_way = _OneWay(dataclasses.replace(self, bidirectional=False))
        outputs, after = zip(*(
            one_way(scope[name], x, carry[name], valid, name == "backward") for name in ("forward", "backward")))
        return jnp.concatenate(outputs, -1), dict(zip(("forward", "backward"), after))

    def zero_carry(self, batch: int, dtype=jnp.float32):
        """The carry before the first step: zeros.

        RNN, GRU: hidden [batch, features]. LSTM: `(hidden, cell)`, both [batch, features]. In two directions: a dict
        of one "forward" and one "backward".
        """
        one = self._one_carry(jnp.zeros((batch, self.features), dtype))
        return {"forward": one, "backward": one} if self.bidirectional else one

    def _one_carry(self, zero):
        return zero

    def _begin(self, carry, x, scope):
        dtype = jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype
        zero = self.zero_carry(x.shape[0], dtype)
        if carry is None:
            return zero
        if jax.tree.structure(carry) != jax.tree.structure(zero) or any(
                jnp.shape(given) != leaf.shape for given, leaf in zip(jax.tree.leaves(carry), jax.tree.leaves(zero))):
            raise ValueError(f"{type(self).__name__} at {scope} carries {_shapes(zero)} from step to step; got "
                             f"{_shapes(carry)}")
        return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), carry)

    def _run(self, scope, x, carry, valid, *, reverse):
        columns = self.gates * self.features
        arrays = {"kernel": scope.param("kernel", (x.shape[-1], columns), self.kernel_init, ("in", "out"))}
        arrays["recurrent_kernel"] = scope.param("recurrent_kernel", (self.features, columns), self.recurrent_init,
                                                 ("in", "out"))
        if self.use_bias:
            arrays["bias"] = scope.param("bias", (columns,), self.bias_init, ("out",))
            arrays |= self._more(scope)
        return _scan(self, arrays, x, carry, valid, reverse)

    def _more(self, scope):
        """Further parameters of one direction."""
        return {}


class _OneWay(Layer):
    """One direction of a bidirectional layer, at a place of its own."""

    layer: _Recurrent

    def forward(self, scope, x, carry, valid, reverse):
        return self.layer._run(scope, x, carry, valid, reverse=reverse)


class RNN(_Recurrent):
    """The plain recurrent network: `h[t] = tanh(x[t] @ kernel + h[t-1] @ recurrent_kernel + bias)`.

    Glossary: b batch, t time, i input features, f features.

    Parameters: kernel [i, f], recurrent_kernel [f, f], bias [f]; with `bidirectional=True` these below "forward" and
    "backward".

    Args:
        features: how many hidden units, f.
        bidirectional: whether to run over time both ways, from each row's own first and last step.
        activation: instead of tanh.
        use_bias: whether there is a bias.
        kernel_init: LeCun's normal distribution (its variance 1 / i does not depend on the number of gates).
        recurrent_init: an orthogonal matrix, so that norms neither grow nor shrink over time.
        unroll: steps in one iteration of the scan.

    Input [b, t, i], with `lengths=` [b] where rows are shorter than t: the numbers are those of each row by itself,
    outputs past a row's end are 0, and padding counts for nothing, NaN and gradients included. Output [b, t, f], or
    [b, t, 2 f], forward first. `scan` gives the carry as well and takes it, for going on step by step.

    16-bit inputs are multiplied in their dtype; the gates and the carry are float32, because a carry that is rounded
    to 16 bits at each step loses the small changes.

    Source: Elman (1990), Finding Structure in Time.

    >>> x = jnp.ones((2, 5, 3))
    >>> params, _ = RNN(4).init(jax.random.key(0), x)
    >>> RNN(4)(params, x, lengths=jnp.array([5, 2])).shape
    (2, 5, 4)
    """

    _: KW_ONLY
    activation: Callable = jnp.tanh

    def _step(self, arrays, hidden, projected, recur):
        (px,), (ph,) = projected, recur(hidden)
        return self.activation(px + ph)

    def _output(self, carry):
        return carry


class LSTM(_Recurrent):
    """Long short-term memory.

        i, f, g, o = split(x[t] @ kernel + h[t-1] @ recurrent_kernel + bias)
        c[t] = sigmoid(f) * c[t-1] + sigmoid(i) * tanh(g)
        h[t] = sigmoid(o) * tanh(c[t])

    Parameters: kernel [i, 4 f], recurrent_kernel [f, 4 f], bias [4 f], the gates in PyTorch's order: input, forget,
    cell, output. PyTorch's two biases are one here, their sum.

    Options, inputs and outputs as in `RNN`. The carry is `(hidden, cell)`. The bias begins at 1 for the forget gate
    and 0 elsewhere, as in Keras: with 0 half of the memory is gone at every step before anything is learned (Flax
    begins at 0, PyTorch at random around 0).

    Source: Hochreiter and Schmidhuber (1997), Long Short-Term Memory; the forget gate: Gers, Schmidhuber and Cummins
    (2000), Learning to Forget.

    >>> x, lstm = jnp.ones((2, 5, 3)), LSTM(4)
    >>> params, _ = lstm.init(jax.random.key(0), x)
    >>> y, (hidden, cell) = lstm.scan(params, x)
    >>> step, carry = lstm.scan(params, x[:, :1], (hidden, cell))
    >>> y.shape, step.shape, cell.shape
    ((2, 5, 4), (2, 1, 4), (2, 4))
    """

    gates: typing.ClassVar[int] = 4

    _: KW_ONLY
    bias_init: Callable = open_forget_gate

    def _one_carry(self, zero):
        return zero, zero

    def _step(self, arrays, carry, projected, recur):
        hidden, cell = carry
        i, f, g, o = (px + ph for px, ph in zip(projected, recur(hidden)))
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell

    def _output(self, carry):
        return carry[0]


class GRU(_Recurrent):
    """Gated recurrent unit, in the form of PyTorch and cuDNN: the reset gate acts after the recurrent dot.

        r, z = split(x[t] @ kernel[:, :2f] + h[t-1] @ recurrent_kernel[:, :2f] + bias[:2f])
        n = tanh(x[t] @ kernel[:, 2f:] + bias[2f:] + sigmoid(r) * (h[t-1] @ recurrent_kernel[:, 2f:] + recurrent_bias))
        h[t] = (1 - sigmoid(z)) * n + sigmoid(z) * h[t-1]

    Parameters: kernel [i, 3 f], recurrent_kernel [f, 3 f], bias [3 f], the gates in PyTorch's order: reset, update,
    new; and recurrent_bias [f], the bias of the new gate's recurrent dot, which the reset gate scales. PyTorch's two
    biases of the gates r and z are one here, their sum.

    Options, inputs and outputs as in `RNN`. The carry is the hidden state.

    Source: Cho et al. (2014), Learning Phrase Representations using RNN Encoder-Decoder; this form: Chung et al.
    (2014), Empirical Evaluation of Gated Recurrent Neural Networks on Sequence Modeling.

    >>> x = jnp.ones((2, 5, 3))
    >>> params, _ = GRU(4, bidirectional=True).init(jax.random.key(0), x)
    >>> GRU(4, bidirectional=True)(params, x).shape
    (2, 5, 8)
    """

    gates: typing.ClassVar[int] = 3

    def _more(self, scope):
        return {"recurrent_bias": scope.param("recurrent_bias", (self.features,), self.bias_init, ("out",))}

    def _step(self, arrays, hidden, projected, recur):
        (rx, zx, nx), (rh, zh, nh) = projected, recur(hidden)
        if self.use_bias:
            nh = nh + align(arrays["recurrent_bias"], nh)
        z = jax.nn.sigmoid(zx + zh)
        return (1 - z) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + z * hidden

    def _output(self, carry):
        return carry


# Compiled once for each layer and shape in eager mode too, where a scan's closure would be new at every call.
@functools.partial(jax.jit, inline=True, static_argnums=(0, 5))
def _scan(layer, arrays, x, carry, valid, reverse):
    x = x.swapaxes(0, 1)    # [time, batch, features_in]
    if valid is not None:
        x = jnp.where(valid, x, 0)    # NaN in padding would reach the kernel's gradient
    apart = functools.partial(jnp.split, indices_or_sections=layer.gates, axis=-1)
    each = [apart(arrays[name]) for name in ("kernel", "bias") if name in arrays]
    projected = [affine(x, *gate) if "bias" in arrays else linear(x, *gate) for gate in zip(*each)]

    def recur(hidden):
        # The kernel is cast within the step, so that its gradient is summed over time in its own dtype.
        return apart(wide(linear(hidden.astype(x.dtype), arrays["recurrent_kernel"])))

    def step(carry, inputs):
        projected, valid = inputs
        after = layer._step(arrays, carry, [wide(gate) for gate in projected], recur)
        output = layer._output(after).astype(x.dtype)
        if valid is not None:
            after = jax.tree.map(lambda new, old: jnp.where(valid, new, old), after, carry)
            output = jnp.where(valid, output, 0)
        return after, output

    carry, outputs = lax.scan(step, carry, (projected, valid), reverse=reverse, unroll=layer.unroll)
    return outputs.swapaxes(0, 1), carry    # [batch, time, features]


def _valid(lengths, x, layer, scope):
    """Which steps count: [time, batch, 1]."""
    lengths = jnp.asarray(lengths)
    if lengths.shape != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{type(layer).__name__} at {scope}: lengths are [batch] integers, here {x.shape[:1]}; got "
                         f"{lengths.dtype}{list(lengths.shape)}")
    steps = lax.broadcasted_iota(jnp.int32, (x.shape[1], x.shape[0], 1), 0)    # narrow lengths could not count them
    return steps < lengths[None, :, None].astype(jnp.int32)


def _shapes(tree):
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {_shapes(leaf)}" for name, leaf in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(_shapes, tree))})"
    return describe(tree)
