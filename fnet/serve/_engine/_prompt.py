"""A prompt that is being computed, piece by piece, in a cache of its own with one row.

The cache begins empty or with blocks of the prefix cache, and goes into the table when it is
complete; until then no other text can see it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.serve._engine import _cache, _programs
from fnet.serve._engine._cache import Layout
from fnet.serve._engine._prefix import BLOCK, Block, Prefixes
from fnet.serve._engine._request import Request

_SMALLEST = 16  # tokens of a piece; shorter ones are padded


class Plan(NamedTuple):
    """How prompts are computed.

    Attributes:
        model, params: unstacked.
        layout: of the model's cache.
        chunk: the largest number of tokens of a piece.
        padded: whether a piece may be padded, to a power of two or three quarters of one. If not, it
            is cut into powers of two.
        same_pieces: whether the pieces must not depend on what the prefix cache has.
    """

    model: Any
    params: Any
    layout: Layout
    chunk: int
    padded: bool
    same_pieces: bool

    def size(self, remaining: int) -> tuple[int, int]:
        """Returns (tokens of the next piece, tokens that are computed for it)."""
        count = min(remaining, self.chunk)
        if not self.padded:
            count = 1 << (count.bit_length() - 1)
            return count, count
        return count, next((size for size in self.sizes() if size >= count), self.chunk)

    def empty(self, rows: int, length: int) -> Any:
        """Returns an empty cache."""
        return _cache.empty(self.params, model=self.model, rows=rows, length=length)

    def read(self, adapters: jax.Array, piece: np.ndarray, count: int, row: Any) -> Any:
        """Returns the cache `row` after the first `count` tokens of a piece [1, size]."""
        counts = jnp.asarray([count], jnp.int32)
        return _programs.read(self.model, self.params, adapters, jnp.asarray(piece), counts, row)

    def sizes(self) -> list[int]:
        """How many tokens may be computed at a time."""
        least = _SMALLEST if self.padded else 1
        powers = [least << i for i in range((self.chunk // least).bit_length() + 1)]
        between = [3 * power // 4 for power in powers[1:]] if self.padded else []
        last = [self.chunk] if self.padded else []
        return sorted({size for size in (*powers, *between, *last) if size <= self.chunk})


class Prompt:
    """All tokens of a prompt but the last, which the first decode step reads.

    Attributes:
        request: whose prompt it is.
        adapter: the number of its adapter.
        row: the cache.
        count: how many tokens it has.
    """

    def __init__(
        self, plan: Plan, request: Request, adapter: int, length: int, prefixes: Prefixes | None
    ):
        self.request, self.adapter, self.count = request, adapter, 0
        self._plan, self._prefixes = plan, prefixes
        self._tokens = request.prompt[:-1]
        self._adapters = jnp.asarray([adapter], jnp.int32)
        self.row = plan.empty(1, length)
        self._last_block: Block | None = None
        if prefixes is not None:
            self._last_block = prefixes.root(request.adapter)
            self._resume(prefixes.find(request.adapter, self._tokens))
        request.cached_tokens = self.count

    @property
    def done(self) -> bool:
        return self.count == len(self._tokens)

    @property
    def cost(self) -> int:
        """The tokens that the next piece computes."""
        return self._plan.size(len(self._tokens) - self.count)[1]

    def advance(self) -> None:
        """Computes the next piece."""
        plan = self._plan
        count, size = plan.size(len(self._tokens) - self.count)
        piece = np.zeros((1, size), np.int32)
        piece[0, :count] = self._tokens[self.count : self.count + count]
        self.row = plan.read(self._adapters, piece, count, self.row)
        self.count += count
        self._remember()

    def _resume(self, chain: list[Block]) -> None:
        """Copies the blocks from which the prompt can be continued."""
        plan = self._plan
        if plan.same_pieces:
            chain = chain[: len(chain) * BLOCK // plan.chunk * plan.chunk // BLOCK]
        while chain and plan.layout.recurrent and chain[-1].carries is None:
            chain.pop()
        if not chain:
            return
        for number, block in enumerate(chain):
            start = jnp.asarray(number * BLOCK, jnp.int32)
            self.row = _cache.restored(self.row, block.arrays, start, layout=plan.layout)
        self.count, self._last_block = len(chain) * BLOCK, chain[-1]
        carries = jax.tree.map(jnp.copy, chain[-1].carries or [])
        count = jnp.asarray(self.count, jnp.int32)
        self.row = _cache.resumed(self.row, carries, count, layout=plan.layout)

    def _remember(self) -> None:
        """Adds the complete blocks of the tokens up to now to the prefix cache."""
        if self._prefixes is None or self._last_block is None:
            return
        layout, block = self._plan.layout, self._last_block
        start = self._depth(block)
        while start + BLOCK <= self.count:
            tokens = tuple(self._tokens[start : start + BLOCK])
            ends = layout.recurrent and start + BLOCK == self.count
            known = block.children.get(tokens)
            if known is not None and (known.carries is not None or not ends):
                block = known
            else:
                place = jnp.asarray(start, jnp.int32)
                arrays, carries = _cache.block(self.row, place, size=BLOCK, layout=layout)
                block = self._prefixes.add(block, tokens, arrays, carries if ends else None)
            start += BLOCK
        self._last_block = block

    @staticmethod
    def _depth(block: Block) -> int:
        depth, at = 0, block
        while at.parent is not None:
            depth, at = depth + BLOCK, at.parent
        return depth
