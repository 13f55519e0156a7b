"""A mixture of experts whose experts lie on different devices: tokens travel to their experts and
back by all-to-all over a mesh axis.

XLA needs arrays of fixed sizes, and any number of a device's tokens may go to one expert. So tokens
travel in rounds of equally many places for each device. The first round has room for more than the
mean, `ROOM`, and usually takes all of them. The others run only if a device has more tokens for
another one, so that no token is lost and memory does not depend on the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from fnet.layers._experts_order import in_order
from fnet.layers._linear import wide

FURTHER = "further_rounds"  # the scope of all rounds but the first
ROOM = 1.5  # places for tokens from one device to another in a round, relative to the mean


class Apart(NamedTuple):
    """Where the experts and the tokens of a step lie.

    Attributes:
        mesh: the mesh, whose axes of these names are automatic.
        axis: the mesh axis over which the experts are split.
        rows: the mesh axes over which the first axis of activations is split, `axis` among them.
        time: the mesh axes over which the second axis of activations is split.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    rows: tuple[str, ...]
    time: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """The number of devices that share the experts."""
        return self.mesh.shape[self.axis]

    def count(self, names: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[name] for name in names)


apart = jax.make_user_context(None)
"""Where experts lie, an `Apart`, while a step is traced for several devices, or None. It is a part
of the key of JAX's caches of traced functions."""


class Mixture(NamedTuple):
    """What a mixture of experts computes.

    Attributes:
        experts: the number of experts.
        top_k: the number of experts for each token.
        capacity: the most tokens that an expert processes, or None.
        choose: maps logits to the weights and the numbers of the chosen experts, [..., top_k] each.
        network: the networks of experts: maps rows [rows, f], the `Order` of their experts and the
            kernels to outputs [rows, f].
    """

    experts: int
    top_k: int
    capacity: int | None
    choose: Callable
    network: Callable


def mixed(
    mixture: Mixture,
    where: Apart,
    x: jax.Array,
    logits: jax.Array,
    kernels: tuple[jax.Array, ...],
    valid: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a mixture of experts on the devices of a mesh.

    Args:
        mixture: what is computed.
        where: where the experts lie.
        x: [..., f], with the rows of the batch along the first axis.
        logits: [..., experts], of the router.
        kernels: arrays [experts, ...].
        valid: booleans [...], or None.

    Returns:
        The outputs [..., f], the number of tokens for which each expert was chosen, [experts], and
        the number of those that it processed, [experts].
    """
    shape = x.shape
    over = [where.rows, where.time][: x.ndim - 1] + [()] * (x.ndim - 3)
    padding = [-n % where.count(names) for n, names in zip(shape, over)]
    if any(padding) and valid is None:
        valid = jnp.ones(shape[:-1], bool)
    pad = lambda y: jnp.pad(y, [(0, n) for n in padding] + [(0, 0)] * (y.ndim - len(padding)))
    tokens = [pad(y) if any(padding) else y for y in (x, logits, valid) if y is not None]
    spec, split = P(*(names or None for names in over)), P(where.axis)

    def local(tokens: list, kernels: tuple) -> tuple:
        return _Device(mixture, where, *tokens).outputs(kernels)

    names = {*where.rows, *where.time}
    names |= {name for name, n in where.mesh.shape.items() if n == 1}
    y, load, kept = jax.shard_map(
        local,
        mesh=where.mesh,
        in_specs=([spec] * len(tokens), (split,) * len(kernels)),
        out_specs=(spec, P(), P()),
        axis_names=names,
        check_vma=False,
    )(tokens, kernels)
    return y[tuple(map(slice, shape[:-1]))], load, kept


class _Device:
    """The tokens of one device, on their way to the experts."""

    def __init__(self, mixture: Mixture, where: Apart, x: Any, logits: Any, valid: Any = None):
        self.mixture, self.where, self.shape = mixture, where, x.shape
        rows = x.shape[0] if where.time and x.ndim > 2 else 1  # pieces in the order of the batch
        self.x = x.reshape(-1, x.shape[-1])  # [tokens, f]
        weights, chosen = mixture.choose(logits.reshape(-1, mixture.experts))
        if valid is not None:
            chosen = jnp.where(valid.reshape(-1, 1), chosen, mixture.experts)
        # Pairs (token, expert): the first choices of all tokens, then the second choices, ...
        self.weights, chosen = weights.T.reshape(-1), chosen.T.reshape(-1)
        self.load = self._everywhere(jnp.bincount(chosen, length=mixture.experts))
        if mixture.capacity is not None:
            chosen = self._within_capacity(chosen, rows)
        self.order = in_order(chosen, mixture.experts)
        self.kept = self._everywhere(self.order.sizes)

    def _everywhere(self, counts: jax.Array) -> jax.Array:
        return lax.psum(counts, (*self.where.rows, *self.where.time))

    def _within_capacity(self, chosen: jax.Array, rows: int) -> jax.Array:
        """Replaces experts that are full by `experts`. An expert is filled in the order of the
        whole batch, so each device must know how many tokens of the others come before its own."""
        where, experts, k = self.where, self.mixture.experts, self.mixture.top_k
        piece = jnp.arange(k * rows).repeat(chosen.size // (k * rows))
        key = jnp.where(chosen < experts, piece * experts + chosen, k * rows * experts)
        own = in_order(key, k * rows * experts)
        counts = own.sizes.reshape(k, rows, experts)
        both = (where.rows, where.time) if where.time else (where.rows,)
        for names in reversed(both):
            counts = lax.all_gather(counts, names)
        counts = counts.reshape(where.count(where.rows), -1, k, rows, experts)
        counts = counts.transpose(2, 0, 3, 1, 4)  # [k, devices of rows, rows, of time, experts]
        flat = counts.reshape(-1, experts)
        before = (jnp.cumsum(flat, 0) - flat).reshape(counts.shape)
        first = lax.dynamic_index_in_dim(before, lax.axis_index(where.rows), 1, keepdims=False)
        at = lax.axis_index(where.time) if where.time else 0
        first = lax.dynamic_index_in_dim(first, at, 2, keepdims=False)  # [k, rows, experts]
        place = own.ranks() + first.reshape(-1).at[key].get(mode="fill", fill_value=0)
        return jnp.where(place < self.mixture.capacity, chosen, experts)

    def outputs(self, kernels: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        n, experts = self.where.devices, self.mixture.experts
        tokens, own = self.x.shape[0], experts // n
        most = tokens * min(self.mixture.top_k, own)  # for one device
        if self.mixture.capacity is not None:
            most = min(most, own * self.mixture.capacity)
        mean = tokens * self.mixture.top_k / n
        places = max(1, min(most, 8 * math.ceil(ROOM * mean / 8)))
        total = self.round(0, places, kernels)
        others = -(-most // places) - 1
        if others > 0:
            longest = lax.pmax(self.sent.max(), (*self.where.rows, *self.where.time))

            def later(total: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
                def more() -> jax.Array:
                    with jax.named_scope(FURTHER):
                        return total + self.round(at, places, kernels)

                # With the inner checkpoint, the branch alone has the arrays for its gradient: the
                # peak of a step of a Mixtral sized down is 1,510 MiB on a TPU v5e, or else 1,947.
                further = jax.checkpoint(more)
                return lax.cond(at * places < longest, further, lambda: total), None

            # Without the outer one, the backward pass would read arrays of all possible rounds.
            rounds = jnp.arange(1, others + 1)
            total, _ = lax.scan(jax.checkpoint(later), total, rounds)
        return total.astype(self.x.dtype).reshape(self.shape), self.load, self.kept

    @property
    def sent(self) -> jax.Array:
        """The number of pairs for each of the devices that share the experts."""
        return self.order.sizes.reshape(self.where.devices, -1).sum(1)

    def round(self, at: Any, places: int, kernels: tuple[jax.Array, ...]) -> jax.Array:
        """Sends up to `places` tokens to each device. Returns the weighted outputs of their experts
        [tokens, f]."""
        n, tokens = self.where.devices, self.x.shape[0]
        pairs, own = self.order.pairs.size, self.mixture.experts // n
        sent = self.sent
        slots = at * places + jnp.arange(places)[None]
        first = (jnp.cumsum(sent) - sent)[:, None]
        spot = jnp.where(slots < sent[:, None], first + slots, pairs)  # [n, places]
        pair = self.order.pairs.at[spot].get(mode="fill", fill_value=pairs)
        expert = self.order.keys.at[pair].get(mode="fill", fill_value=-1)
        expert = jnp.where(pair < pairs, expert % own, own)  # own: an empty place
        token = jnp.where(pair < pairs, pair % tokens, tokens)

        there = self.exchanged(self.x.at[token].get(mode="fill", fill_value=0))  # [n, places, f]
        expert = self.exchanged(expert).reshape(-1)
        order = in_order(expert, own)
        y = self.mixture.network(there.reshape(-1, there.shape[-1]), order, kernels)
        back = wide(self.exchanged(y.reshape(there.shape)))
        y = back * self.weights.at[pair].get(mode="fill", fill_value=0)[..., None]
        return jnp.zeros(self.x.shape, y.dtype).at[token].add(y, mode="drop")

    def exchanged(self, x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, self.where.axis, 0, 0)
