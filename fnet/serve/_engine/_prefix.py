"""Beginnings of prompts that are already computed, in blocks of tokens.

The blocks form a tree: each continues its parent, and the roots are one for each adapter, because an
adapter changes keys and values. The block that was not used for the longest time is dropped first;
a parent is used whenever a child is, so leaves go before their parents.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax

BLOCK = 32  # tokens


@dataclasses.dataclass(eq=False)
class Block:
    """The cached arrays of `BLOCK` tokens.

    Attributes:
        tokens: the tokens, by which the parent finds the block.
        parent: the block before, or None for a root.
        arrays: the arrays of these tokens.
        carries: the carries of recurrent layers at the end of the block, or None if they are not
            known there.
        children: the blocks that continue this one.
    """

    tokens: tuple[int, ...] = ()
    parent: Block | None = None
    arrays: Any = None
    carries: Any = None
    children: dict[tuple[int, ...], Block] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves((self.arrays, self.carries)))


class Prefixes:
    """The blocks of all adapters, within a number of bytes."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.bytes = most_bytes, 0
        self._roots: dict[Hashable, Block] = {}
        self._used: collections.OrderedDict[Block, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._used)

    def root(self, adapter: Hashable) -> Block:
        return self._roots.setdefault(adapter, Block())

    def find(self, adapter: Hashable, tokens: Sequence[int]) -> list[Block]:
        """Returns the longest chain of blocks with which the tokens begin."""
        chain, block = [], self.root(adapter)
        for part in _parts(tokens):
            if part not in block.children:
                break
            block = block.children[part]
            chain.append(block)
        self._touch(block)
        return chain

    def add(self, parent: Block, tokens: Sequence[int], arrays: Any, carries: Any) -> Block:
        """Adds a block behind its parent, or completes the one that is there with carries. If the
        parent was dropped meanwhile, the block is not kept."""
        key = tuple(tokens)
        if parent.parent is None and parent not in self._roots.values():
            return Block(key, parent)
        if parent.parent is not None and parent not in self._used:
            return Block(key, parent)
        known = parent.children.get(key)
        if known is None:
            known = parent.children[key] = Block(key, parent, arrays)
            self.bytes += known.nbytes
        if carries is not None and known.carries is None:
            before = known.nbytes
            known.carries = carries
            self.bytes += known.nbytes - before
        self._touch(known)
        self._drop()
        return known

    def clear(self) -> None:
        self._roots.clear()
        self._used.clear()
        self.bytes = 0

    def _touch(self, block: Block | None) -> None:
        while block is not None and block.parent is not None:
            self._used[block] = None
            self._used.move_to_end(block)
            block = block.parent

    def _drop(self) -> None:
        while self.bytes > self.most_bytes and self._used:
            block, _ = self._used.popitem(last=False)
            assert block.parent is not None
            del block.parent.children[block.tokens]
            self.bytes -= block.nbytes


def _parts(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        yield tuple(tokens[start : start + BLOCK])
