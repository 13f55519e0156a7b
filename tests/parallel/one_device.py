"""Compares steps that are divided over devices with one device."""

import jax
import jax.numpy as jnp
import numpy as np

from fnet import parallel


def close(got, want, tolerance):
    """Relative to the largest element of each leaf, or of all leaves where a leaf is 0 but for
    rounding, such as the gradient of a key's bias."""
    most = max(np.abs(np.asarray(x, float)).max() for x in jax.tree.leaves(want))
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        a, b = np.asarray(a, float), np.asarray(b, float)
        scale = np.abs(b).max(initial=0)
        scale = scale if scale > 1e-4 * most else most
        assert np.abs(a - b).max(initial=0) <= tolerance * scale, jax.tree_util.keystr(path)


def in_float64(tree):
    return jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def compared(case, mesh, tolerance, strategy="fsdp+pins", cast=lambda tree: tree, **options):
    """Runs two steps of a case on the mesh and on one device, and returns the plan."""
    step, init_state, batch = case()
    init, batch, key = lambda key: cast(init_state(key)), cast(batch), jax.random.key(0)
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % mesh["data"]:
        batch = jax.tree.map(lambda x: np.concatenate([x] * mesh["data"]), batch)
    options = {"devices": jax.devices(), "compile": False, "mesh": mesh} | options
    plan = parallel.plan(step, init, batch, strategy=strategy, **options)
    state, other, split = plan.init(key), init(key), plan.jit(step)
    for _ in range(2):
        if isinstance(state, tuple) and not hasattr(state, "_fields"):  # modules
            close(split(*state, batch), step(*other, batch), tolerance)
            continue
        state, metrics = split(state, batch)
        other, expected = jax.jit(step)(other, batch)
        close((state, metrics), (other, expected), tolerance)
    return plan
