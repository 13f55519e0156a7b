"""The code that the peers on JAX share: the training step, its compilation and its execution.

A peer defines `apply(params, stats, x, train) -> (logits, stats)`. `stats` contains the running
statistics of BatchNorm, or is {} without BatchNorm.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers import _workloads as spec
from fnet import transforms as ft


class Run:
    """Runs the steps of a peer. `step(i)` runs a training step on batch i and returns the loss, or
    a forward pass and returns the logits.

    The first call traces and compiles. Only `wait` waits for the results.

    Args:
        apply, params, stats: the function, parameters and running statistics of the model.
        wrap: a transformation that is applied to the gradient function, or for inference to the
            model. Default: none.
        rules: the argument `rules` of `ft.tune`. With {}, `tune` selects the rules. With None
            (default), the step is not tuned.
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
        jax.block_until_ready(value)  # also waits for the state, which the same program computes

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
    """Returns the training step `step((params, stats, opt_state), x, y) -> (state, loss)`. `wrap`
    is applied to the gradient function."""

    def loss(params, stats, x, y):
        logits, stats = apply(params, stats, x, True)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), y
        ).mean(), stats

    def step(state, x, y):
        params, stats, opt_state = state
        (value, stats), grads = wrap(jax.value_and_grad(loss, has_aux=True))(params, stats, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), value

    return step


def nested(weights, stats=False):
    """Converts {"a/b": array} to {"a": {"b": array}}. Returns only the parameters, or with `stats`
    only the running means and variances of BatchNorm."""
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
    """Returns the arrays of `tree` with the shapes of `like`. A shape of `like` may have two axes
    (heads, head_dim) instead of one axis.

    Raises:
        ValueError: the two trees have different paths.
    """
    if jax.tree.structure(like) != jax.tree.structure(tree):
        ours, theirs = (
            {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(t)}
            for t in (tree, like)
        )
        raise ValueError(
            f"weights that the model does not have: {sorted(ours - theirs)}; without weights: "
            f"{sorted(theirs - ours)}"
        )
    return jax.tree.map(lambda a, b: b.reshape(a.shape), like, tree)
