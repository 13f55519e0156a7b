"""The child-sum Tree-LSTM. The structure of the trees is an input, so one compiled program is used
for all trees."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from fnet import layers as nn
from fnet.jaxpr import automatic
from fnet.layers._explicit import like, resharded
from fnet.models._model import Model

constant = jax.nn.initializers.constant


class Trees(NamedTuple):
    """A batch of trees as arrays, the input of `TreeLSTM`, from `pack_trees`.

    The nodes of a tree are in postorder: children come before their parent, and the root is last.
    `Trees` is registered with `jax.export` as "fnet.models.Trees".

    Attributes:
        labels: integers [batch, nodes], the index of each node's label in the vocabulary.
        parents: integers [batch, nodes], the index of each node's parent in its tree, or `nodes`
            (the length of the axis) for the root and for padding.
        lengths: integers [batch], the number of valid nodes of each tree. Later nodes are padding.

    >>> trees = models.pack_trees([("not", True)], {"not": 0, True: 1}, nodes=4)
    >>> trees.lengths.tolist()
    [2]
    """

    labels: np.ndarray
    parents: np.ndarray
    lengths: np.ndarray


export.register_namedtuple_serialization(Trees, serialized_name="fnet.models.Trees")


def pack_trees(
    trees: Sequence, vocabulary: Mapping[Hashable, int], nodes: int | None = None
) -> Trees:
    """Converts trees to arrays, for `TreeLSTM`.

    A tree is a tuple: the label of the root, then the subtrees. A single node may be its bare
    label.

    Args:
        trees: the trees.
        vocabulary: the token of each label, {label: token}.
        nodes: the length of the node axis, which makes all batches the same shape. Default: the
            number of nodes of the largest tree.

    Returns:
        The trees as `Trees`.

    Raises:
        ValueError: a label is not in the vocabulary, or a tree has more than `nodes` nodes.

    >>> trees = pack_trees([("and", True, ("not", False))], {"and": 0, "not": 1, True: 2, False: 3})
    >>> trees.labels.tolist(), trees.parents.tolist()
    ([[2, 3, 1, 0]], [[3, 2, 3, 4]])
    """
    rows = [_postorder(tree) for tree in trees]
    longest = max(map(len, rows), default=0)
    size = longest if nodes is None else nodes
    if longest > size:
        raise ValueError(
            f"pack_trees: the largest tree has {longest} nodes, more than nodes={size}"
        )
    labels = np.zeros((len(rows), size), np.int32)
    parents = np.full((len(rows), size), size, np.int32)
    for row, found in enumerate(rows):
        for place, (label, parent) in enumerate(found):
            if label not in vocabulary:
                raise ValueError(
                    f"pack_trees: tree {row} has the label {label!r}, which is not in the "
                    f"vocabulary: {', '.join(map(repr, list(vocabulary)[:8]))}"
                )
            labels[row, place] = vocabulary[label]
            parents[row, place] = size if parent is None else parent
    return Trees(labels, parents, np.array([len(found) for found in rows], np.int32))


def _postorder(tree):
    """Returns [(label, index of the parent)], without recursion, because a tree may exceed Python's
    recursion limit."""
    # Preorder with children from right to left is reversed postorder.
    order, stack = ([], [(tree, None)])
    while stack:
        node, parent = stack.pop()
        label, *children = node if isinstance(node, tuple) and node else (node,)
        stack.extend((child, len(order)) for child in children)
        order.append((label, parent))
    last = len(order) - 1
    return [(label, None if parent is None else last - parent) for label, parent in reversed(order)]


class TreeLSTM(Model):
    """The child-sum Tree-LSTM: an LSTM over the nodes of a tree, each of which receives the states
    of its children.

    The state (h_j, c_j) of node j with embedding x_j and children C(j) is:

        s = sum of h_k over k in C(j)
        i, o, u = sigmoid, sigmoid, tanh of x_j W + s U + b, with separate W, U and b for i, o and u
        f_k = sigmoid(x_j W_f + h_k U_f + b_f), for each child
        c_j = i * u + sum of f_k * c_k,  h_j = o * tanh(c_j)

    The parents are an input array, so one compiled program with static shapes computes trees of any
    depth and any number of children. A `lax.scan` visits the nodes in postorder, and its carry
    holds two sums for every node, of h_k and of f_k * c_k over the children that were already
    visited.

    Args:
        classes: number of logits.
        vocab_size: number of labels.
        width: number of features of a node.
        forget_bias: initial value of the bias b_f.

    Inputs: the three arrays of `Trees`, which `pack_trees` makes: labels and parents, integers
    [batch, nodes], and lengths, integers [batch].

    Output: logits [batch, nodes, classes] of every node. The logits of a tree are those of its
    root, the last node: `logits[jnp.arange(batch), lengths - 1]`. The logits of padding are
    meaningless.

    Source: Tai, Socher and Manning (2015), Improved Semantic Representations From Tree-Structured
    Long Short-Term Memory Networks, eq. 2 to 8.

    >>> vocabulary = {"and": 0, "not": 1, True: 2, False: 3}
    >>> trees = models.pack_trees([("and", True, ("not", False))], vocabulary, nodes=4)
    >>> model = models.TreeLSTM(classes=2, vocab_size=4, width=8)
    >>> params, _ = model.init(jax.random.key(0), *trees)
    >>> jax.eval_shape(model, params, *trees).shape
    (1, 4, 2)
    """

    classes: int
    vocab_size: int
    width: int = 64
    _: KW_ONLY
    forget_bias: float = 1.0

    def forward(
        self, scope: nn.Scope, labels: jax.Array, parents: jax.Array, lengths: jax.Array
    ) -> jax.Array:  # [batch, nodes]
        labels, parents = jnp.asarray(labels), jnp.asarray(parents)
        if (
            labels.ndim != 2
            or labels.shape != parents.shape
            or jnp.shape(lengths) != labels.shape[:1]
        ):
            raise ValueError(
                "TreeLSTM: expected labels and parents [batch, nodes] and lengths [batch]; got "
                f"{labels.shape}, {parents.shape} and {jnp.shape(lengths)}"
            )
        batch, nodes = labels.shape
        rows, order = jnp.arange(batch, dtype=jnp.int32), jnp.arange(nodes, dtype=jnp.int32)
        parents = jnp.where(
            order[None] < jnp.asarray(lengths)[:, None].astype(jnp.int32), parents, nodes
        )
        x = nn.Embed(self.vocab_size, self.width)(scope["embed"], labels)  # [batch, nodes, width]
        gates = nn.Dense(3 * self.width)(scope["gates"], x)  # i, o and u of every node
        forget = nn.Dense(self.width, bias_init=constant(self.forget_bias))(scope["forget"], x)
        of_parents = automatic(
            lambda x, at: jnp.take_along_axis(x, at[..., None], 1), like(labels, 0)
        )
        forget = of_parents(forget, jnp.minimum(parents, nodes - 1))  # the parent's x W_f
        add = automatic(
            lambda old, rows, parent, new: old.at[rows, parent].add(new), like(labels, 0)
        )

        def step(sums, node):
            place, parent, gates, forget = node
            hidden, cell = (
                lax.dynamic_index_in_dim(each, place, 1, keepdims=False) for each in sums
            )
            i, o, u = jnp.split(
                gates + nn.Dense(3 * self.width, use_bias=False)(scope["recurrent"], hidden), 3, -1
            )
            cell = jax.nn.sigmoid(i) * jnp.tanh(u) + cell
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)  # [batch, width]
            kept = jax.nn.sigmoid(
                forget + nn.Dense(self.width, use_bias=False)(scope["recurrent_forget"], hidden)
            )
            share = hidden, kept * cell
            return tuple(add(old, rows, parent, new) for old, new in zip(sums, share)), hidden

        # The sums of h_k and of f_k c_k over the children so far. The last node is for roots and
        # padding.
        sums = (resharded(jnp.zeros((batch, nodes + 1, self.width), x.dtype), like(labels, 0)),) * 2
        inputs = order, parents.T, gates.swapaxes(0, 1), forget.swapaxes(0, 1)
        _, hidden = lax.scan(step, sums, inputs)  # [nodes, batch, width]
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], hidden.swapaxes(0, 1))

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        row = jax.ShapeDtypeStruct((1, 32), jnp.int32)
        return row, row, jax.ShapeDtypeStruct((1,), jnp.int32)
