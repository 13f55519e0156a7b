"""Items, such as pairs of a token and an expert, sorted by a key."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Order(NamedTuple):
    """Items sorted by their keys, in their own order where keys are equal.

    Attributes:
        keys: the key of each item, [items].
        pairs: the items in the order of their keys, [items].
        sizes: the number of items with each key, [count]. Items with larger keys come last.
    """

    keys: jax.Array
    pairs: jax.Array
    sizes: jax.Array

    @property
    def starts(self) -> jax.Array:
        """The place of the first item of each key, [count]."""
        return jnp.cumsum(self.sizes) - self.sizes

    def ranks(self) -> jax.Array:
        """Returns how many items with the same key are before each item, [items]. For items with
        keys of `count` or more, the result is any number."""
        places = jnp.zeros_like(self.pairs).at[self.pairs].set(jnp.arange(self.pairs.size))
        return places - self.starts.at[self.keys].get(mode="fill", fill_value=0)


def in_order(keys: jax.Array, count: int) -> Order:
    """Sorts items by integer keys [items], of which those below `count` are counted."""
    return Order(keys, jnp.argsort(keys), jnp.bincount(keys, length=count))
