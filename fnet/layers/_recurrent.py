"""Recurrent layers RNN, LSTM and GRU, for batches of sequences with different lengths, in one or
both directions."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from fnet import _jax
from fnet.layers._core import Layer, method
from fnet.layers._explicit import like, resharded
from fnet.layers._linear import affine, floating, lecun_normal, linear, wide, zeros
from fnet.layers._recurrence import GRU_CELL, LSTM_CELL, Cell, recurrence
from fnet.layers._scope import Scope, describe
from fnet.layers._segments import numbered
from fnet.layers._sizes import integers

_orthogonal = initializers.orthogonal()


def orthogonal_gates(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """An initializer of arrays [features, gates * features]. The array is a concatenation of one
    orthogonal matrix for each gate.

    Source: Saxe, McClelland and Ganguli (2014), Exact solutions to the nonlinear dynamics of
    learning in deep linear neural networks.
    """
    features, columns = shape
    keys = jax.random.split(key, columns // features)
    # [gates, features, features]
    gates = jax.vmap(lambda key: _orthogonal(key, (features, features), dtype))(keys)
    return gates.swapaxes(0, 1).reshape(shape)


def open_forget_gate(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """An initializer of an LSTM's bias: 1 for the forget gate, which is the second of four gates,
    and 0 elsewhere.

    Source: Gers, Schmidhuber and Cummins (2000), Learning to Forget. Measurements: Jozefowicz,
    Zaremba and Sutskever (2015), An Empirical Exploration of Recurrent Network Architectures.
    """
    return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), shape[0] // 4)


class _Steps(NamedTuple):
    """What is known of the time steps, as booleans [time, batch, 1].

    Attributes:
        valid: whether it belongs to a sequence, or None if all do.
        edges: whether a sequence begins here, for those who come from the start and from the end.
            None if each example is one sequence.
    """

    valid: jax.Array | None
    edges: tuple[jax.Array, jax.Array] | None = None


class _Recurrent(Layer):
    """The common base of RNN, LSTM and GRU: a projection of all inputs, then a scan with one matrix
    product per step. A layer with a `cell` is one operation (see `_recurrence`)."""

    gates: typing.ClassVar[int] = 1
    cell: typing.ClassVar[Cell | None] = None

    features: int
    _: KW_ONLY
    bidirectional: bool = False
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    recurrent_init: Callable = orthogonal_gates
    bias_init: Callable = zeros
    unroll: int = 1

    def forward(
        self,
        scope: Scope,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        return self.scan(scope, x, lengths=lengths, segments=segments)[0]

    @method
    def scan(
        self,
        scope: Scope,
        x: jax.Array,
        carry: Any = None,
        *,
        lengths: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Computes the outputs and the final carry (the recurrent state), from which a later call
        can continue.

            y, carry = lstm.scan(params, prompt, lengths=lengths)
            y, carry = lstm.scan(params, token[:, None], carry)        # one more time step

        Args:
            x: [batch, time, features_in].
            carry: the initial carry, returned by an earlier call or by `zero_carry`. Default:
                zeros.
            lengths: integers [batch], the number of valid time steps in each example. Default: all
                time steps.
            segments: integers [batch, time], for sequences that are packed into rows, as in the
                layer's call. Each begins with a carry of zeros, so `carry` must be None.

        Returns:
            `(outputs, carry)`, with the carry after the last valid time step of each example, in
            float32 or float64. The backward direction of a bidirectional layer processes the first
            time step last, so its carry is the one after that.
        """
        x = floating(x, scope, type(self).__name__)
        if x.ndim != 3:
            raise ValueError(
                f"{type(self).__name__} at {scope}: expected input [batch, time, features]; got "
                f"shape {x.shape}"
            )
        steps = self._steps(x, carry, lengths, segments, scope)
        carry = self._begin(carry, x, scope)
        if not self.bidirectional:
            return self._run(scope, x, carry, steps, reverse=False)
        one_way = _OneWay(dataclasses.replace(self, bidirectional=False))
        outputs, after = zip(
            *(
                one_way(scope[name], x, carry[name], steps, name == "backward")
                for name in ("forward", "backward")
            )
        )
        return jnp.concatenate(outputs, -1), dict(zip(("forward", "backward"), after))

    def zero_carry(self, batch: int, dtype: Any = jnp.float32) -> Any:
        """Returns the initial carry, which contains zeros.

        For RNN and GRU, the carry is an array [batch, features]. For LSTM, the carry is `(hidden,
        cell)`, both [batch, features]. For a bidirectional layer, the carry is a dict with one
        carry for "forward" and one for "backward".
        """
        one = self._one_carry(jnp.zeros((batch, self.features), dtype))
        return {"forward": one, "backward": one} if self.bidirectional else one

    def _one_carry(self, zero: Any) -> Any:
        return zero

    def _steps(self, x: jax.Array, carry: Any, lengths: Any, segments: Any, scope: Scope) -> _Steps:
        who = f"{type(self).__name__} at {scope}"
        valid = None if lengths is None else _valid(lengths, x, who)
        if segments is None:
            return _Steps(valid)
        if carry is not None:
            raise ValueError(
                f"{who}: segments cannot be combined with a carry: each sequence in a row begins "
                "with zeros"
            )
        segments = numbered(segments, x.shape[:2], f"{who}: segments").T[..., None]
        text = segments != 0
        change = segments[1:] != segments[:-1]
        edge = jnp.ones_like(text[:1])
        return _Steps(
            text if valid is None else text & valid,
            (text & jnp.concatenate([edge, change]), text & jnp.concatenate([change, edge])),
        )

    def _begin(self, carry: Any, x: jax.Array, scope: Scope) -> Any:
        dtype = jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype
        zero = self.zero_carry(x.shape[0], dtype)
        if carry is None:
            return zero
        if jax.tree.structure(carry) != jax.tree.structure(zero) or any(
            jnp.shape(given) != leaf.shape
            for given, leaf in zip(jax.tree.leaves(carry), jax.tree.leaves(zero))
        ):
            raise ValueError(
                f"{type(self).__name__} at {scope}: expected a carry of shape {_shapes(zero)}; got "
                f"{_shapes(carry)}"
            )
        return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), carry)

    def _run(self, scope: Scope, x: jax.Array, carry: Any, steps: _Steps, *, reverse: bool) -> Any:
        columns = self.gates * self.features
        kernel = functools.partial(scope.param, axes=("in", "out"), roles=("in", "out"))
        arrays = {
            "kernel": kernel("kernel", (x.shape[-1], columns), self.kernel_init),
            "recurrent_kernel": kernel(
                "recurrent_kernel", (self.features, columns), self.recurrent_init
            ),
        }
        if self.use_bias:
            arrays["bias"] = scope.param(
                "bias", (columns,), self.bias_init, ("out",), roles=("out",)
            )
            arrays |= self._more(scope)
        return _scan(self, arrays, x, carry, steps, reverse)

    def _more(self, scope: Scope) -> dict:
        """Returns additional parameters of one direction, which subclasses such as `GRU` define."""
        return {}


class _OneWay(Layer):
    """One direction of a bidirectional layer. It has its own scope."""

    layer: _Recurrent

    def forward(self, scope: Scope, x: jax.Array, carry: Any, steps: _Steps, reverse: bool) -> Any:
        own = Scope(scope._place, type(self.layer))  # the arrays are those of an LSTM, not of this
        return self.layer._run(own, x, carry, steps, reverse=reverse)


class RNN(_Recurrent):
    """The plain recurrent network: `h[t] = tanh(x[t] @ kernel + h[t-1] @ recurrent_kernel + bias)`.

    >>> x = jnp.ones((2, 5, 3))
    >>> params, _ = RNN(4).init(jax.random.key(0), x)
    >>> RNN(4)(params, x, lengths=jnp.array([5, 2])).shape
    (2, 5, 4)

    Glossary: b batch, t time, i input features, f features.

    Args:
        features: number of hidden units, f.
        bidirectional: whether to run in both directions: forward from the first time step of each
            example, and backward from its last valid one. Default False.
        activation: the activation function. Default tanh.
        use_bias: whether to add a bias. Default True.
        kernel_init: initializer of the kernel. Default: LeCun normal, with variance 1 / i (i input
            features) for every gate.
        recurrent_init: initializer of the recurrent kernel. Default: an orthogonal matrix for each
            gate, which preserves the norm of the hidden state.
        bias_init: initializer of the bias. Default: zeros.
        unroll: number of time steps in one iteration of the scan. Default 1.

    Inputs:
        x: [b, t, i], floating point.
        lengths: integers [b], the number of valid time steps in each example. Later outputs are 0,
            and the padding has no effect on the result, even if it is NaN. Default: t.
        segments: integers [b, t], for sequences that are packed into one row: the number of the
            sequence of each time step, or 0 for padding (see `nn.segment_positions`). Each begins
            with a carry of zeros, in both directions. Default: one sequence in each row.

    Output: [b, t, f], or [b, t, 2 f] if bidirectional (the forward outputs first). The method
    `scan` accepts and returns the carry (the recurrent state), so that a later call can continue a
    sequence. With 16-bit inputs, matrix products have 16-bit operands, but gates and carry are
    float32, because rounding the carry in each time step would lose small changes.

    Parameters: kernel [i, f], recurrent_kernel [f, f], bias [f]. A bidirectional layer has them
    twice, at the paths "forward" and "backward".

    Source: Elman (1990), Finding Structure in Time.
    """

    _: KW_ONLY
    activation: Callable = jnp.tanh

    def _step(self, hidden: jax.Array, projected: jax.Array, recurrent: jax.Array) -> jax.Array:
        return self.activation(projected + recurrent)


class LSTM(_Recurrent):
    """Long short-term memory.

        i, f, g, o = split(x[t] @ kernel + h[t-1] @ recurrent_kernel + bias)
        c[t] = sigmoid(f) * c[t-1] + sigmoid(i) * tanh(g)
        h[t] = sigmoid(o) * tanh(c[t])

    >>> x, lstm = jnp.ones((2, 5, 3)), LSTM(4)
    >>> params, _ = lstm.init(jax.random.key(0), x)
    >>> y, (hidden, cell) = lstm.scan(params, x)
    >>> step, carry = lstm.scan(params, x[:, :1], (hidden, cell))
    >>> y.shape, step.shape, cell.shape
    ((2, 5, 4), (2, 1, 4), (2, 4))

    Args:
        features, bidirectional, use_bias, kernel_init, recurrent_init, unroll: as in `RNN`.
        bias_init: initializer of the bias. Default: 1 for the forget gate and 0 elsewhere, as in
            Keras, because with 0 the gate would halve the cell state in each time step at the start
            of training. Flax has 0 there, and PyTorch random values around 0.

    Inputs and output: as in `RNN`. The carry is `(hidden, cell)`.

    Parameters: kernel [i, 4 f], recurrent_kernel [f, 4 f], bias [4 f]. The gates have PyTorch's
    order: input, forget, cell, output. The bias is the sum of PyTorch's two biases.

    Source: Hochreiter and Schmidhuber (1997), Long Short-Term Memory. Forget gate: Gers,
    Schmidhuber and Cummins (2000), Learning to Forget.
    """

    gates: typing.ClassVar[int] = 4
    cell: typing.ClassVar[Cell | None] = LSTM_CELL

    _: KW_ONLY
    bias_init: Callable = open_forget_gate

    def _one_carry(self, zero: Any) -> tuple:
        return zero, zero


class GRU(_Recurrent):
    """Gated recurrent unit, as in PyTorch and cuDNN: the reset gate is applied after the product
    with recurrent_kernel.

        r, z = split(x[t] @ kernel[:, :2f] + h[t-1] @ recurrent_kernel[:, :2f] + bias[:2f])
        n = tanh(x[t] @ kernel[:, 2f:] + bias[2f:] + sigmoid(r) * (h[t-1] @ recurrent_kernel[:, 2f:] + recurrent_bias))
        h[t] = (1 - sigmoid(z)) * n + sigmoid(z) * h[t-1]

    >>> x = jnp.ones((2, 5, 3))
    >>> params, _ = GRU(4, bidirectional=True).init(jax.random.key(0), x)
    >>> GRU(4, bidirectional=True)(params, x).shape
    (2, 5, 8)

    Args:
        features, bidirectional, use_bias, kernel_init, recurrent_init, bias_init, unroll: as in
            `RNN`.

    Inputs and output: as in `RNN`. The carry is the hidden state.

    Parameters: kernel [i, 3 f], recurrent_kernel [f, 3 f], bias [3 f], recurrent_bias [f]. The
    gates have PyTorch's order: reset, update, new. PyTorch has two biases for each; for reset and
    update, bias is their sum. For the new gate n they stay apart: bias is added to `x[t] @ kernel`,
    and recurrent_bias to `h[t-1] @ recurrent_kernel`.

    Source: Cho et al. (2014), Learning Phrase Representations using RNN Encoder-Decoder. Formula:
    Chung et al. (2014), Empirical Evaluation of Gated Recurrent Neural Networks on Sequence
    Modeling.
    """

    gates: typing.ClassVar[int] = 3
    cell: typing.ClassVar[Cell | None] = GRU_CELL

    def _more(self, scope: Scope) -> dict:
        bias = scope.param(
            "recurrent_bias", (self.features,), self.bias_init, ("out",), roles=("out",)
        )
        return {"recurrent_bias": bias}


# Jitted, so that eager calls compile once for each layer and shape. An eager scan would compile in
# each call, because its closure is a new function each time.
@functools.partial(jax.jit, inline=True, static_argnums=(0, 5))
def _scan(
    layer: Any, arrays: dict, x: jax.Array, carry: Any, steps: _Steps, reverse: bool
) -> tuple:
    valid = steps.valid
    begins = None if steps.edges is None else steps.edges[reverse]
    if layer.cell is not None:
        states, structure = jax.tree.flatten(carry)
        options = {"begins": begins, "reverse": reverse, "unroll": layer.unroll}
        y, states = recurrence(layer.cell, arrays, x, states, valid, **options)
        return y, jax.tree.unflatten(structure, states)

    x = x.swapaxes(0, 1)  # [time, batch, features_in]
    if valid is not None:
        x = jnp.where(valid, x, 0)  # otherwise NaN in padding reaches the kernel's gradient
    bias = [arrays["bias"]] if "bias" in arrays else []
    projected = (affine if bias else linear)(x, arrays["kernel"], *bias)

    def step(hidden: jax.Array, inputs: tuple) -> tuple:
        projected, valid, begins = inputs
        if begins is not None:
            hidden = jnp.where(begins, 0, hidden)
        # The kernel is cast within the step, so that its gradient is summed over time in the
        # kernel's dtype.
        recurrent = linear(hidden.astype(x.dtype), arrays["recurrent_kernel"])
        after = layer._step(hidden, wide(projected), wide(recurrent))
        output = after.astype(x.dtype)
        if valid is not None:
            after = jnp.where(valid, after, hidden)
            output = jnp.where(valid, output, 0)
        return after, output

    # Inside shard_map, the carry must vary over the same mesh axes as the results of a step.
    carry = resharded(carry, like(x, 1))
    inputs = projected, valid, begins
    leaves, structure = jax.tree.flatten((carry, inputs, arrays["recurrent_kernel"]))
    carry, inputs, _ = jax.tree.unflatten(structure, _jax.vary_alike(*leaves))
    carry, outputs = lax.scan(step, carry, inputs, reverse=reverse, unroll=layer.unroll)
    return outputs.swapaxes(0, 1), carry  # [batch, time, features]


def _valid(lengths: Any, x: jax.Array, who: str) -> jax.Array:
    """Returns a boolean array [time, batch, 1] that is True for valid steps."""
    lengths = integers(lengths, x.shape[0], f"{who}: lengths")
    # lengths.dtype may be too narrow.
    steps = lax.broadcasted_iota(jnp.int32, (x.shape[1], x.shape[0], 1), 0)
    return steps < lengths[None, :, None].astype(jnp.int32)


def _shapes(tree: Any) -> Any:
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {_shapes(leaf)}" for name, leaf in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return f"({', '.join(map(_shapes, tree))})"
    return describe(tree)
