"""MixtureOfExperts: several feed-forward networks, of which a router selects a few for each token.
Router losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from fnet.jaxpr import automatic, tag, tagging
from fnet.layers._core import Layer
from fnet.layers._experts_apart import Apart, Mixture, apart, mixed
from fnet.layers._experts_order import Order, in_order
from fnet.layers._explicit import like
from fnet.layers._linear import Dense, floating, lecun_normal, wide
from fnet.layers._scope import Scope
from fnet.layers._tile_dot import tile_dot

per_expert = initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class MixtureOfExperts(Layer):
    """Feed-forward networks (experts), of which a router selects `top_k` for each token.

        p = softmax(x @ router)
        out = sum over the top_k experts e of  p[e] * down_e(activation(gate_e(x)) * up_e(x))

    >>> from fnet import layers as nn
    >>> mixture = nn.MixtureOfExperts(8, 16, top_k=2)
    >>> params, _ = mixture.init(jax.random.key(0), jnp.ones((2, 5, 4)))
    >>> mixture(params, jnp.ones((2, 5, 4))).shape, params["gate"].shape
    ((2, 5, 4), (8, 4, 16))

    gate_e, up_e and down_e are matrix products with the parameters of the expert e. Its weight p[e]
    is computed in float32 (float64 for float64 inputs).

    Glossary: E experts, f features, h hidden features.

    Args:
        experts: number of experts.
        hidden: number of hidden features of an expert.
        top_k: number of experts for each token. Default 2.
        normalize: whether the weights of the selected experts are divided by their sum, as in
            Mixtral. Default True.
        capacity: the maximum load of an expert, as a multiple of the mean load. It processes at
            most ceil(capacity * tokens * top_k / experts) tokens of the batch: those with it as
            their first choice before those with it as their second, and so on, in batch order among
            equals. Its output for the rest is 0. Default None: no maximum (dropless).
        activation: the function that is applied to the outputs of `gate`. Default: `jax.nn.silu`.
        kernel_init: initializer of the arrays gate, up and down, each [E, in, out].

    Inputs:
        x: [..., f], floating point.
        valid: booleans [...], False for padding, which no expert processes. Default: all True.

    Output: [..., f], in x's dtype.

    Parameters: router/kernel [f, E]; gate, up [E, f, h]; down [E, h, f].

    Under a plan with the mesh axis "expert" (`parallel.plan`), experts lie on different devices.

    Sites for `ft.capture`: `load`, int32 [E], the number of tokens for which each expert was
    chosen, and `dropped`, the fraction of them for which a capacity had no place.

    `load_balancing_loss` and `router_z_loss` need the logits of the router. Capture the output of
    its scope:

        loss, seen = ft.capture(loss_fn, ".*/router")(params, batch)

    Source: Shazeer et al. (2017), Outrageously Large Neural Networks: The Sparsely-Gated
    Mixture-of-Experts Layer. Capacity: Fedus et al. (2021), Switch Transformers. Normalized
    weights: Jiang et al. (2024), Mixtral of Experts.
    """

    experts: int
    hidden: int
    _: KW_ONLY
    top_k: int = 2
    normalize: bool = True
    capacity: float | None = None
    activation: Callable = jax.nn.silu
    kernel_init: Callable = per_expert

    def forward(self, scope: Scope, x: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(
                f"MixtureOfExperts at {scope}: expected 1 <= top_k <= experts, got "
                f"top_k={self.top_k} and {self.experts} experts"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(
                f"MixtureOfExperts at {scope}: expected a capacity > 0 or None, got {self.capacity}"
            )
        x = floating(x, scope, "MixtureOfExperts")
        if valid is not None and jnp.shape(valid) != x.shape[:-1]:
            raise ValueError(
                f"MixtureOfExperts at {scope}: expected valid {list(x.shape[:-1])} for x "
                f"{list(x.shape)}, got {list(jnp.shape(valid))}"
            )
        width = x.shape[-1]
        up_shape, up_axes = (self.experts, width, self.hidden), ("expert", "embed", "mlp")
        down_shape, roles = (self.experts, self.hidden, width), ("layers", "in", "out")
        gate, up = (
            scope.param(name, up_shape, self.kernel_init, up_axes, roles=roles)
            for name in ("gate", "up")
        )
        down = scope.param(
            "down", down_shape, self.kernel_init, ("expert", "mlp", "embed"), roles=roles
        )
        logits = Dense(
            self.experts, use_bias=False, kernel_init=lecun_normal, axes=("embed", None)
        )(scope["router"], x)

        arrays = x, logits, gate, up, down, *(() if valid is None else (valid,))
        mix = automatic(self._mix, (like(x, *range(x.ndim)), like(x, None), like(x, None)))
        manual = jax.sharding.get_abstract_mesh().manual_axes  # the user's shard_map
        if apart.value is not None and like(x) is None and not manual:
            mix = functools.partial(self._mix_apart, apart.value, scope)
        y, load, kept = mix(*arrays)
        if tagging.value:
            tag(load, "load")
            tag(1 - kept.sum() / jnp.maximum(load.sum(), 1), "dropped")
        return y

    def _mix_apart(
        self,
        where: Apart,
        scope: Scope,
        x: jax.Array,
        logits: jax.Array,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.experts % where.devices:
            near = next(n for n in range(where.devices, 0, -1) if self.experts % n == 0)
            whole = where.devices * math.ceil(self.experts / where.devices)
            raise ValueError(
                f"MixtureOfExperts at {scope}: the mesh axis {where.axis!r} has {where.devices} "
                f"devices, and {self.experts} experts are not a multiple; use {whole} experts"
                + (f", or {where.axis}={near}" if near > 1 else "")
            )
        capacity = self._capacity(math.prod(x.shape[:-1]) * self.top_k)
        mixture = Mixture(self.experts, self.top_k, capacity, self._choose, self._network)
        gate, up, down, *valid = arrays
        return mixed(mixture, where, x, logits, (gate, up, down), *(valid or (None,)))

    def _capacity(self, pairs: int) -> int | None:
        """The most of all pairs (token, expert) that an expert processes."""
        return None if self.capacity is None else math.ceil(self.capacity * pairs / self.experts)

    def _choose(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the weights and the numbers of the experts of each token, [tokens, top_k]."""
        weights, chosen = lax.top_k(jax.nn.softmax(wide(logits)), self.top_k)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights, chosen

    def _mix(
        self,
        x: jax.Array,
        logits: jax.Array,
        gate: jax.Array,
        up: jax.Array,
        down: jax.Array,
        valid: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the outputs, and the numbers of tokens for which each expert was chosen, and that
        it processed."""
        width, shape = x.shape[-1], x.shape
        # [tokens, f], [tokens, E]
        x, logits = (x.reshape(-1, width), logits.reshape(-1, self.experts))
        weights, chosen = self._choose(logits)
        # The order in which a capacity is filled: the first choices of all tokens, then the second
        # choices, ...
        chosen, weights = chosen.T.reshape(-1), weights.T.reshape(-1)  # [pairs]
        if valid is not None:
            chosen = jnp.where(jnp.tile(valid.reshape(-1), self.top_k), chosen, self.experts)
        order = in_order(chosen, self.experts)
        capacity = self._capacity(chosen.shape[0])
        pairs, product = _tiled(order) if capacity is None else _batched(order, capacity)
        kept = order.sizes if capacity is None else jnp.minimum(order.sizes, capacity)
        tokens = jnp.where(pairs < 0, x.shape[0], pairs % x.shape[0])
        pairs = jnp.where(pairs < 0, chosen.shape[0], pairs)
        y = x.at[tokens].get(mode="fill", fill_value=0)  # [tiles or E, rows, f]
        y = wide(self._networks(product, y, gate, up, down))
        y = y * weights.at[pairs].get(mode="fill", fill_value=0)[..., None]
        total = jnp.zeros(x.shape, y.dtype).at[tokens].add(y, mode="drop")
        return total.astype(x.dtype).reshape(shape), order.sizes, kept

    def _networks(self, product: Callable, x: jax.Array, *kernels: jax.Array) -> jax.Array:
        gate, up, down = (kernel.astype(x.dtype) for kernel in kernels)
        return product(self.activation(product(x, gate)) * product(x, up), down)

    def _network(self, x: jax.Array, order: Order, kernels: tuple[jax.Array, ...]) -> jax.Array:
        """Computes the outputs of experts for rows [rows, f], whose experts are the keys of an
        order. Those of rows without an expert are 0."""
        if len(order.sizes) == 1:
            return self._networks(_batched_dot, x[None], *kernels)[0]
        rows, product = _tiled(order)
        rows = jnp.where(rows < 0, x.shape[0], rows)
        y = self._networks(product, x.at[rows].get(mode="fill", fill_value=0), *kernels)
        return jnp.zeros(x.shape, y.dtype).at[rows].set(y, mode="drop")


def load_balancing_loss(
    logits: jax.Array, top_k: int, *, valid: jax.Array | None = None
) -> jax.Array:
    """Computes a loss that is lowest if all experts receive the same number of tokens.

        E * sum over experts e of  f[e] * P[e]

    >>> from fnet import layers as nn
    >>> float(nn.load_balancing_loss(jnp.zeros((6, 4)), top_k=2))
    2.0

    f[e] is the fraction of tokens with the expert e among their top_k, and P[e] the mean of
    softmax(logits)[e] over the tokens. If all E experts are selected equally often, each f[e] is
    top_k / E, and the loss is top_k. Only P[e] is differentiated, since the gradient of f[e] is
    zero.

    Args:
        logits: [..., E], the outputs of the scope `router` of one or several `MixtureOfExperts`.
        top_k: number of experts for each token.
        valid: booleans [...], False for padding. Default: all True.

    Returns:
        The loss, a float32 scalar.

    Source: Fedus et al. (2021), Switch Transformers, eq. 4, with top_k choices as in Mixtral.
    """
    logits = wide(logits)
    experts = logits.shape[-1]
    _, chosen = lax.top_k(logits, top_k)
    mean = _masked_mean(valid, logits.shape[:-1])
    fraction = mean(jax.nn.one_hot(chosen, experts, dtype=logits.dtype).sum(-2))  # [E]
    return experts * (fraction * mean(jax.nn.softmax(logits))).sum()


def router_z_loss(logits: jax.Array, *, valid: jax.Array | None = None) -> jax.Array:
    """Computes the router z-loss, mean(logsumexp(logits)^2), which keeps the logits of a router
    small, because large ones have large rounding errors.

    >>> from fnet import layers as nn
    >>> round(float(nn.router_z_loss(jnp.zeros((6, 4)))), 4)    # log(4)^2
    1.9218

    Args:
        logits: [..., E], the outputs of the scope `router` of one or several `MixtureOfExperts`.
        valid: booleans [...], False for padding. Default: all True.

    Returns:
        The loss, a float32 scalar.

    Source: Zoph et al. (2022), ST-MoE, eq. 5.
    """
    return _masked_mean(valid, logits.shape[:-1])(
        jax.nn.logsumexp(wide(logits), -1, keepdims=True) ** 2
    )[0]


def _masked_mean(valid: jax.Array | None, shape: tuple[int, ...]) -> Callable:
    """Returns a function that maps an array [*shape, n] to its mean over the valid tokens, an array
    [n]."""
    if valid is None:
        return lambda x: x.reshape(-1, x.shape[-1]).mean(0)
    valid = jnp.broadcast_to(valid, shape).reshape(-1, 1)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(valid, x.reshape(-1, x.shape[-1]), 0).sum(0) / jnp.maximum(
            valid.sum(), 1
        ).astype(x.dtype)

    return mean


def _tiled(order: Order) -> tuple[jax.Array, Callable]:
    """Divides the pairs (token, expert), sorted by expert, into tiles of equally many rows, each of
    one expert. There are enough tiles for any distribution of the tokens.

    Returns:
        The pair in each row [tiles, rows], or -1 for a row without one, and the product of the
        tiles with the kernels of their experts.
    """
    starts, sizes, pairs = order.starts, order.sizes, order.pairs.shape[0]
    experts = sizes.shape[0]
    if isinstance(pairs, int):
        rows = min(256, 2 ** math.ceil(math.log2(max(pairs / (2 * experts), 1))))
        tiles = pairs if rows == 1 else pairs // rows + min(experts, pairs)
    else:  # a symbolic batch
        rows, tiles = 16, pairs // 16 + experts
    ends = jnp.cumsum(-(-sizes // rows))  # the last tile of each expert, plus 1
    tile = jnp.arange(tiles)
    expert = jnp.minimum((tile[:, None] >= ends[None]).sum(-1), experts - 1)  # [tiles]
    within = (tile - (ends - -(-sizes // rows))[expert])[:, None] * rows + jnp.arange(rows)[None]
    used = (within < sizes[expert][:, None]) & (tile < ends[-1])[:, None]
    places = jnp.where(used, starts[expert][:, None] + within, pairs)
    return _at(order, places), functools.partial(tile_dot, expert=expert)


def _batched(order: Order, capacity: int) -> tuple[jax.Array, Callable]:
    """As `_tiled`, with a single tile of `capacity` rows for each expert."""
    slots, pairs = jnp.arange(capacity)[None], order.pairs.shape[0]
    used = slots < order.sizes[:, None]  # [E, slots]
    return _at(order, jnp.where(used, order.starts[:, None] + slots, pairs)), _batched_dot


def _at(order: Order, places: jax.Array) -> jax.Array:
    return order.pairs.at[places].get(mode="fill", fill_value=-1)


def _batched_dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [E, rows, in] by [E, in, out]; returns [E, rows, out]."""
    return lax.dot_general(x, kernel, (((2,), (1,)), ((0,), (0,))))
