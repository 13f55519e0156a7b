"""SVRG: stochastic gradients with reduced variance, as an Optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class SVRGState(NamedTuple):
    """The state of `svrg`.

    Attributes:
        anchor: the parameters at which the full gradient was computed.
        full: the gradient over all data, there.
        inner: the state of the wrapped optimizer.

    >>> tr.svrg(optax.sgd(0.1)).init({"w": jnp.ones(2)}).anchor["w"].tolist()
    [1.0, 1.0]
    """

    anchor: Any
    full: Any
    inner: Any


def svrg(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with stochastic variance-reduced gradients (SVRG).

        tx = tr.svrg(optax.sgd(0.1))
        state = tx.init(params)
        for step in range(steps):
            if step % 200 == 0:
                state = tr.refresh_anchor(state, params, lambda w: full_gradient(w, data))
            gradient = lambda w: jax.grad(loss)(w, batch, key)                  # the same batch and key at both points
            updates, state = tx.update(gradient(params), state, params, gradient=gradient)
            params = optax.apply_updates(params, updates)

    The anchor is an earlier value of the parameters w. With f the mean loss over all data and
    f_batch that of a batch, the wrapped optimizer gets g instead of the gradient of f_batch:

        g = grad f_batch(w) - grad f_batch(anchor) + full,        full = grad f(anchor) over all data

    g is unbiased, and its variance vanishes as w and the anchor approach the optimum. So for a
    strongly convex f, SVRG converges linearly with a constant step size. With n examples and
    batches of b, the anchor is usually replaced every 2n / b steps for a convex loss, and every 5n
    / b steps otherwise. SVRG does not improve the training of deep networks (Defazio and Bottou
    2019).

    Call `refresh_anchor` before the first update: until then the full gradient is zero, and the
    wrapped optimizer gets zero gradients.

    Args:
        optimizer: the Optax optimizer that gets g.

    Returns:
        A transformation whose `update` requires `gradient=`, a function that maps parameters to the
        gradient of the current batch.

    Source: Johnson and Zhang (2013), Accelerating Stochastic Gradient Descent using Predictive
    Variance Reduction.

    >>> x = jnp.array([1.0, 3.0])                       # minimize the mean of (w - x)^2 / 2, optimum 2
    >>> tx, w = tr.svrg(optax.sgd(0.5)), jnp.float32(0)
    >>> state = tr.refresh_anchor(tx.init(w), w, lambda w: (w - x).mean())
    >>> for i in (0, 1, 1, 0):
    ...     gradient = lambda w: w - x[i]
    ...     updates, state = tx.update(gradient(w), state, w, gradient=gradient)
    ...     w = w + updates
    >>> float(w)                                        # as gradient descent: 2 - 2 / 2^4
    1.875
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return SVRGState(
            jax.tree.map(jnp.copy, params),
            jax.tree.map(jnp.zeros_like, params),
            optimizer.init(params),
        )

    def update(updates, state, params=None, *, gradient: Callable | None = None, **extra):
        if gradient is None:
            raise ValueError(
                "svrg: call update(grads, state, params, gradient=f), where f(params) is the "
                "gradient of the same batch with the same random key"
            )
        old = gradient(state.anchor)
        if jax.tree.structure(old) != jax.tree.structure(updates):
            raise ValueError(
                f"svrg: gradient(params) returned {jax.tree.structure(old)}, expected the "
                f"structure of the gradient, {jax.tree.structure(updates)}"
            )
        reduced = jax.tree.map(lambda new, old, full: new - old + full, updates, old, state.full)
        updates, inner = optimizer.update(reduced, state.inner, params, **extra)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformationExtraArgs(init, update)


def refresh_anchor(state: SVRGState, params: Any, full_gradient: Callable[[Any], Any]) -> SVRGState:
    """Returns the state of `svrg` with `params` as the new anchor, and the full gradient there.

    In a jitted loop that replaces the anchor only at some steps, call it in a branch of
    `jax.lax.cond`.

    Args:
        state: the state of `svrg`.
        params: the new anchor.
        full_gradient: a function that maps parameters to the gradient over all data.

    Raises:
        TypeError: `state` is not a state of `svrg`.

    >>> state = tr.svrg(optax.sgd(0.1)).init(jnp.float32(1))
    >>> state = tr.refresh_anchor(state, jnp.float32(3), lambda w: 2 * w)
    >>> float(state.anchor), float(state.full)
    (3.0, 6.0)
    """
    if not isinstance(state, SVRGState):
        raise TypeError(
            f"refresh_anchor: expected the state of svrg; got a {type(state).__name__}. Apply svrg "
            "last: svrg(optax.chain(...))"
        )
    copied = jax.tree.map(jnp.copy, params)
    return state._replace(anchor=copied, full=full_gradient(copied))
