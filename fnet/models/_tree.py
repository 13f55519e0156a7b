"""A network whose structure is its data: the child-sum Tree-LSTM, compiled once for trees of every shape."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from fnet import layers as nn
from fnet.models._model import Model

constant = jax.nn.initializers.constant


class Trees(NamedTuple):
    """A batch of trees as arrays: the nodes of each tree in postorder, children before their parent, the root last.

    It is registered with `jax.export` as "fnet.models.Trees".

    Attributes:
        labels: [batch, nodes], the token of each node.
        parents: [batch, nodes], the index of each node's parent in its row. It is `nodes`, one past the end, for the
            root and for padding.
        lengths: [batch], the number of real nodes.
    """

    labels: np.ndarray
    parents: np.ndarray
    lengths: np.ndarray


export.register_namedtuple_serialization(Trees, serialized_name="fnet.models.Trees")


def pack_trees(trees: Sequence, vocabulary: Mapping[Hashable, int], nodes: int | None = None) -> Trees:
    """Trees as arrays. A tree is a leaf's label, or a tuple: a node's label and then its children.

        pack_trees([("and", True, ("not", False))], {"and": 0, "not": 1, True: 2, False: 3})

    Args:
        trees: the trees.
        vocabulary: every label's token.
        nodes: the length of a row, for one shape over many batches; None: the largest tree's.

    Raises:
        ValueError: for a label that the vocabulary lacks, or a tree of more than `nodes` nodes.
    """
    rows = [_postorder(tree) for tree in trees]
    longest = max(map(len, rows), default=0)
    size = longest if nodes is None else nodes
    if longest > size:
        raise ValueError(f"the largest of these trees has {longest} nodes; rows have room for nodes={size}")
    labels = np.zeros((len(rows), size), np.int32)
    parents = np.full((len(rows), size), size, np.int32)
    for row, found in enumerate(rows):
        for place, (label, parent) in enumerate(found):
            if label not in vocabulary:
                raise ValueError(f"tree {row} has a node {label!r}, which the vocabulary does not: it has "
                                 f"{', '.join(map(repr, list(vocabulary)[:8]))}")
            labels[row, place] = vocabulary[label]
            parents[row, place] = size if parent is None else parent
    return Trees(labels, parents, np.array([len(found) for found in rows], np.int32))


def _postorder(tree):
    """[(label, place of the parent)], without recursion: a tree may be deeper than Python's stack."""
    order, stack = [], [(tree, None)]                # preorder, children from right to left: postorder backwards
    while stack:
        node, parent = stack.pop()
        label, *children = node if isinstance(node, tuple) and node else (node,)
        stack.extend((child, len(order)) for child in children)
        order.append((label, parent))
    last = len(order) - 1
    return [(label, None if parent is None else last - parent) for label, parent in reversed(order)]


class TreeLSTM(Model):
    """The child-sum Tree-LSTM: an LSTM whose steps follow a tree, each node after its children.

    For node j with the embedding x_j and the children C(j):

        s = sum of h_k over k in C(j)
        i, o, u = sigmoid, sigmoid, tanh of x_j W + s U + b, each with its own
        f_k = sigmoid(x_j W_f + h_k U_f + b_f), for each child
        c_j = i * u + sum of f_k * c_k,  h_j = o * tanh(c_j)

    The structure is in the arrays, not in the program: one `lax.scan` over the nodes in postorder carries, for every
    node, the two sums over its children, and a node that is done adds its share to its parent's. So any number of
    children, any depth and any mixture in a batch run in one compiled program of static shapes.

    Args:
        classes: how many logits.
        vocab_size: the number of labels.
        width: features of a node.
        forget_bias: where b_f begins.

    Input: labels, parents and lengths, as in `Trees`. Output: logits [batch, nodes, classes], of every node: a tree's
    own are its root's, `logits[jnp.arange(batch), lengths - 1]`. Those of padding mean nothing.

    Source: Tai, Socher and Manning (2015), Improved Semantic Representations From Tree-Structured Long Short-Term
    Memory Networks, eq. 2 to 8.
    """

    classes: int
    vocab_size: int
    width: int = 64
    _: KW_ONLY
    forget_bias: float = 1.0

    def forward(self, scope: nn.Scope, labels, parents, lengths):           # [batch, nodes]
        labels, parents = jnp.asarray(labels), jnp.asarray(parents)
        if labels.ndim != 2 or labels.shape != parents.shape or jnp.shape(lengths) != labels.shape[:1]:
            raise ValueError("TreeLSTM takes labels and parents [batch, nodes] and lengths [batch]; got "
                             f"{labels.shape}, {parents.shape} and {jnp.shape(lengths)}")
        batch, nodes = labels.shape
        rows, order = jnp.arange(batch, dtype=jnp.int32), jnp.arange(nodes, dtype=jnp.int32)
        parents = jnp.where(order[None] < jnp.asarray(lengths)[:, None].astype(jnp.int32), parents, nodes)
        x = nn.Embed(self.vocab_size, self.width)(scope["embed"], labels)   # [batch, nodes, width]
        gates = nn.Dense(3 * self.width)(scope["gates"], x)                 # i, o and u of every node
        forget = nn.Dense(self.width, bias_init=constant(self.forget_bias))(scope["forget"], x)
        forget = jnp.take_along_axis(forget, jnp.minimum(parents, nodes - 1)[..., None], 1)    # the parent's x W_f

        def step(sums, node):
            place, parent, gates, forget = node
            hidden, cell = (lax.dynamic_index_in_dim(each, place, 1, keepdims=False) for each in sums)
            i, o, u = jnp.split(gates + nn.Dense(3 * self.width, use_bias=False)(scope["recurrent"], hidden), 3, -1)
            cell = jax.nn.sigmoid(i) * jnp.tanh(u) + cell
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)                     # [batch, width]
            kept = jax.nn.sigmoid(forget + nn.Dense(self.width, use_bias=False)(scope["recurrent_forget"], hidden))
            share = hidden, kept * cell
            return tuple(old.at[rows, parent].add(new) for old, new in zip(sums, share)), hidden

        # What each node's children have left it so far: sums of h_k and of f_k c_k. The last row is nobody's.
        sums = (jnp.zeros((batch, nodes + 1, self.width), x.dtype),) * 2
        inputs = order, parents.T, gates.swapaxes(0, 1), forget.swapaxes(0, 1)
        _, hidden = lax.scan(step, sums, inputs)                            # [nodes, batch, width]
        return nn.Dense(self.classes)(scope["head"], hidden.swapaxes(0, 1))

    def example(self):
        row = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        return row, row, jax.ShapeDtypeStruct((1,), jnp.int32)
