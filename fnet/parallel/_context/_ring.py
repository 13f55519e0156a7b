"""Ring attention: each device keeps its queries, and keys and values travel around a ring of
devices. A device adds what it sees of each part, with the softmax still open (Liu et al., 2023).
In the backward pass, the cotangents of keys and values travel with them.

The functions work on the parts of one device, inside of `jax.shard_map`. Their arguments and
results are those of the primitives of `nn.dot_product_attention`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers._attend_xla import Form, Products, cast
from fnet.parallel._context import _tiles as tiles
from fnet.parallel._context._layout import Layout, Tour, tour
from fnet.parallel._context._tiles import Block, Hidden, Sums


def forward(
    form: Form,
    products: Products,
    layout: Layout,
    outs: tuple,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *where: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a device's part of the output [b, t, h, d], and of the peak and total [b, h, t] of
    each row of logits, in the dtype of sums.

    Args:
        form: the options of the attention.
        products: how matrix products are computed.
        layout: how time is divided. Queries and keys have the same times.
        outs: the dtype of the output.
        q, k, v: the device's part, [b, t, h, d] and [b, t, g, d], in the order of time.
        where: the optional arrays, in the order of `form.given`: `lengths` and `starts` [b],
            `segments` [b, whole time], and `mask` [b, h, t, whole time].
    """
    ring = _Ring(form, products, layout, k.shape[2], where)
    queries, keys, values = ring.operands(q), ring.travelers(k), ring.travelers(v)

    def step(shift: Any, travelers: tuple, sums: Sums) -> tuple[tuple, Sums]:
        keys, values = travelers
        starts, others = ring.own, ring.starts(shift)
        rows = jnp.arange(layout.blocks, dtype=jnp.int32) * layout.size

        def one(query: tuple) -> Sums:
            q, start, row, sums = query
            block = Block(start, layout.size, row)

            def add(sums: Sums, key: tuple) -> tuple[Sums, None]:
                k, v, start = key
                other = Block(start, layout.size)
                work = lambda sums: tiles.add(
                    form, products, q, k, v, ring.seen(block, other), sums
                )
                return ring.if_it_matters(block, other, work, sums), None

            return lax.scan(add, sums, (keys, values, others))[0]

        return travelers, lax.map(one, (queries, starts, rows, sums))

    begin = tiles.begin(queries, products.wide)
    _, sums = ring.around((keys, values), begin, step)
    out, peak, total = tiles.finish(sums)
    return ring.joined(cast(out, outs[0])), ring.statistics(peak), ring.statistics(total)


def backward(
    form: Form,
    products: Products,
    layout: Layout,
    outs: tuple,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns a device's part of the cotangents of q, k and v, in the dtypes `outs`. `rest` are the
    optional arrays, the three results of `forward`, and the cotangent of the output."""
    *where, out, peak, total, of_out = rest
    ring = _Ring(form, products, layout, k.shape[2], where)
    queries, keys, values = ring.operands(q), ring.travelers(k), ring.travelers(v)
    saved = tiles.save(
        products, ring.parts(out), ring.parts(of_out), ring.rows(peak), ring.rows(total)
    )

    def step(shift: Any, travelers: tuple, of_queries: jax.Array) -> tuple[tuple, jax.Array]:
        keys, values, *of_keys = travelers
        rows = jnp.arange(layout.blocks, dtype=jnp.int32) * layout.size

        def one(of_queries: jax.Array, key: tuple) -> tuple[jax.Array, tuple]:
            k, v, start, *of_key = key
            other = Block(start, layout.size)

            def pull(of_key: tuple, query: tuple) -> tuple[tuple, jax.Array]:
                q, start, row, saved, of_query = query
                block = Block(start, layout.size, row)

                def work(cotangents: tuple) -> tuple:
                    seen = ring.seen(block, other)
                    more = tiles.pull(form, products, q, k, v, seen, saved)
                    return tuple(map(jnp.add, cotangents, more))

                found = ring.if_it_matters(block, other, work, (of_query, *of_key))
                return found[1:], found[0]

            of_key, of_queries = lax.scan(
                pull, tuple(of_key), (queries, ring.own, rows, saved, of_queries)
            )
            return of_queries, of_key

        of_queries, of_keys = lax.scan(
            one, of_queries, (keys, values, ring.starts(shift), *of_keys)
        )
        return (keys, values, *of_keys), of_queries

    zeros = lambda x: jnp.zeros(x.shape, products.wide)
    travelers = keys, values, zeros(keys), zeros(values)
    (_, _, *of_keys), of_queries = ring.around(travelers, zeros(queries), step)
    found = of_queries, *(ring.home(x)[:, :, :, None] for x in of_keys)
    return tuple(ring.joined(cast(x, dtype)) for x, dtype in zip(found, outs))


class _Ring:
    """What both passes share. Blocks have the layout [blocks, b, g, r, t, d], those of keys have no
    axis r."""

    def __init__(self, form: Form, products: Products, layout: Layout, groups: int, where: tuple):
        self.form, self.products, self.layout, self.groups = form, products, layout, groups
        hidden = Hidden.of(form, layout.time, where, groups)
        if hidden.mask is not None and hidden.mask.shape[3] > 1:
            hidden = hidden._replace(mask=layout.turned(hidden.mask, 3))
        self.hidden = hidden
        self.tour: Tour = tour(layout, form.causal, form.window, hidden.starts is not None)
        self.own = layout.starts(lax.axis_index(layout.axis))

    def starts(self, shift: Any) -> jax.Array:
        """The positions of the blocks that are here after so many hops."""
        return self.layout.starts((lax.axis_index(self.layout.axis) - shift) % self.layout.devices)

    def seen(self, queries: Block, keys: Block) -> Any:
        return tiles.seen(self.form, self.hidden, queries, keys, self.layout.padded)

    def if_it_matters(self, queries: Block, keys: Block, work: Any, otherwise: Any) -> Any:
        """Devices decide by themselves: there is no transfer in `work`."""
        matters = tiles.matters(self.form, self.hidden, queries, keys)
        return lax.cond(matters, work, lambda unchanged: unchanged, otherwise)

    def around(self, travelers: Any, carry: Any, step: Any) -> tuple[Any, Any]:
        """Calls `step(shift, travelers, carry)` for each part that passes."""
        first, hops = self.tour
        if first:
            travelers = self.sent(travelers, first)

        def turn(state: tuple, shift: Any) -> tuple[tuple, None]:
            travelers, carry = step(shift, *state)
            return (self.sent(travelers, 1), carry), None

        state = travelers, carry
        if hops:
            shifts = first + jnp.arange(hops, dtype=jnp.int32)
            state, _ = lax.scan(turn, state, shifts)
        return step(first + hops, *state)

    def sent(self, x: Any, by: int) -> Any:
        n = self.layout.devices
        pairs = [(i, (i + by) % n) for i in range(n)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.layout.axis, pairs), x)

    def home(self, x: jax.Array) -> jax.Array:
        back = self.tour.home % self.layout.devices
        return self.sent(x, back) if back else x

    def parts(self, x: jax.Array) -> jax.Array:
        """[b, time, h, d] -> [blocks, b, g, r, t, d]"""
        x = self.layout.turned(x, 1)
        b, _, h, d = x.shape
        x = x.reshape(b, self.layout.blocks, self.layout.size, self.groups, h // self.groups, d)
        return x.transpose(1, 0, 3, 4, 2, 5)

    def operands(self, x: jax.Array) -> jax.Array:
        """Rounds operands as products do, which halves what is sent of them in 16 bits."""
        return self.parts(cast(x, self.products.compute))

    def travelers(self, x: jax.Array) -> jax.Array:
        """Keys or values, [blocks, b, g, t, d]."""
        return self.operands(x)[:, :, :, 0]

    def joined(self, x: jax.Array) -> jax.Array:
        """[blocks, b, g, r, t, d] -> [b, time, h, d]"""
        m, b, g, r, t, d = x.shape
        return self.layout.returned(x.transpose(1, 0, 4, 2, 3, 5).reshape(b, m * t, g * r, d), 1)

    def rows(self, x: jax.Array) -> jax.Array:
        """[b, h, time] -> [blocks, b, g, r, t]"""
        x = self.layout.turned(x, 2)
        b, h, _ = x.shape
        x = x.reshape(b, self.groups, h // self.groups, self.layout.blocks, self.layout.size)
        return x.transpose(3, 0, 1, 2, 4)

    def statistics(self, x: jax.Array) -> jax.Array:
        """[blocks, b, g, r, t] -> [b, h, time]"""
        m, b, g, r, t = x.shape
        return self.layout.returned(x.transpose(1, 2, 3, 0, 4).reshape(b, g * r, m * t), 2)
