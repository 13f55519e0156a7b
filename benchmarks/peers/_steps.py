"""What the peers on JAX share: the training step, its compilation, and how one is driven.

A peer gives `apply(params, stats, x, train) -> (logits, stats)`; `stats` is what BatchNorm keeps, {} without one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers import _workloads as spec
from fnet import transforms as ft


class Run:
    """A peer at work: `step(i)` is a training step on a batch, giving the loss, or a forward pass, giving the logits.

    The first call traces and compiles. Nothing is waited for but by `wait`.

    Args:
        apply, params, stats: the model.
        wrap: put around the gradient, or in inference around the model.
        rules: what `ft.tune` is given, {} for its own choice; None: not tuned.
    """

    def __init__(self, apply, params, stats, batches, *, train, wrap=lambda f: f, rules=None):
        self.batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in batches]
        params, stats = jax.tree.map(jnp.array, (params, stats))
        self.train = train
        if train:
            tx = optimizer()
            self.state = params, stats, tx.init(params)
            f = training(apply, tx, wrap)
        else:
            self.state = params, stats
            f = wrap(lambda state, x: apply(*state, x, False)[0])
        self.f = jax.jit(f, donate_argnums=0 if train else ())
        if rules is not None:
            self.f = ft.tune(self.f, rules=rules)

    def step(self, i):
        x, y = self.batches[i % len(self.batches)]
        if not self.train:
            return self.f(self.state, x)
        self.state, loss = self.f(self.state, x, y)
        return loss

    def wait(self, value):
        jax.block_until_ready(value)    # and with it the state, which the same program makes

    def numpy(self, value):
        return np.asarray(value, np.float32)

    @staticmethod
    def platform():
        return jax.default_backend()

    @staticmethod
    def device():
        return jax.devices()[0].device_kind

    @staticmethod
    def memory():
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def optimizer():
    return optax.adamw(spec.LEARNING_RATE, weight_decay=spec.WEIGHT_DECAY)


def training(apply, tx, wrap=lambda f: f):
    """`step((params, stats, opt_state), x, y) -> (state, loss)`; `wrap` is put around the gradient."""

    def loss(params, stats, x, y):
        logits, stats = apply(params, stats, x, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean(), stats

    def step(state, x, y):
        params, stats, opt_state = state
        (value, stats), grads = wrap(jax.value_and_grad(loss, has_aux=True))(params, stats, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), value

    return step


def nested(weights, stats=False):
    """{"a/b": array} as {"a": {"b": array}}: the parameters, or BatchNorm's running mean and var."""
    tree = {}
    for path, array in weights.items():
        *parents, name = path.split("/")
        if (name in ("mean", "var")) == stats:
            place = tree
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = array
    return tree


def fitted(like, tree):
    """The arrays of `tree` in the shapes of `like`, which may split an axis in two (heads, head_dim).

    Raises:
        ValueError: where the two trees name different arrays.
    """
    if jax.tree.structure(like) != jax.tree.structure(tree):
        ours, theirs = ({jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(t)} for t in (tree, like))
        raise ValueError(f"weights that the model does not have: {sorted(ours - theirs)}; without weights: "
                         f"{sorted(theirs - ours)}")
    return jax.tree.map(lambda a, b: b.reshape(a.shape), like, tree)
