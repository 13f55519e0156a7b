"""Validates the step, state and batch of a plan."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fnet import _jax


def shape(path, x):
    """Returns the shape of a leaf and the dtype that it has in JAX. NumPy's float64 becomes float32
    unless 64-bit types are enabled."""
    try:
        made = jax.eval_shape(lambda x: x, x)
    except TypeError:
        raise TypeError(
            f"plan: batch{jax.tree_util.keystr(path)} is a {type(x).__name__}; the leaves of a "
            "batch are arrays"
        ) from None
    return jax.ShapeDtypeStruct(made.shape, made.dtype)


def sizes(batch) -> set[int]:
    """Returns the numbers of rows of the leaves of a batch."""
    return {x.shape[0] for x in jax.tree.leaves(batch) if x.ndim}


def rows(batch, chips: int, over: str = "") -> int:
    """Returns the number of rows of a batch, after checking that it is a multiple of the number of
    devices. `over` states the mesh axes along which they lie."""
    found = 0
    for path, x in jax.tree.leaves_with_path(batch):
        if x.ndim and x.shape[0] % chips:
            below = x.shape[0] // chips * chips
            key = x.shape == (2,) and x.dtype == "uint32"
            hint = " (if it is a random key, use jax.random.key, which is a scalar)" if key else ""
            raise ValueError(
                f"plan: batch{jax.tree_util.keystr(path)} of shape {x.shape} has {x.shape[0]} "
                f"rows, not a multiple of {chips} devices{over}; use "
                f"{' or '.join(str(n) for n in (below, below + chips) if n)} rows{hint}"
            )
        found = max(found, x.shape[0] if x.ndim else 0)
    if not found:
        raise ValueError(
            "plan: the batch has no rows; the first axis of each leaf of a batch must be its rows"
        )
    return found


def state(state, out):
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(
            "plan: expected a step that returns (state, metrics); this one returns "
            f"{f'{len(out)} values' if isinstance(out, tuple) else type(out).__name__}"
        )
    if jax.tree.structure(out[0]) != jax.tree.structure(state):
        raise ValueError(
            f"plan: the step must return a state with the structure of init's: expected "
            f"{jax.tree.structure(state)}, got {jax.tree.structure(out[0])}"
        )
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(out[0])):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"plan: state{jax.tree_util.keystr(path)} must keep its shape and dtype: init "
                f"returns {x.dtype}{list(x.shape)}, and the step {y.dtype}{list(y.shape)}"
            )


def unused(inputs, jaxpr, tree) -> tuple[str, ...]:
    """Returns the paths of the unused leaves of a tree. A leaf is unused if the jaxpr does not read
    the input variable of the leaf. `inputs` are the jaxpr's input variables for the leaves of the
    tree.
    """
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    return tuple(path for path, v in zip(paths, inputs) if v not in read)


def call(plan, state, batch) -> str | None:
    """Returns the reason why a plan's step does not accept this state and batch, or None if it
    accepts them."""
    if not plan.attached:
        return (
            f"this plan is for {plan.target}, which are not attached; use devices='local' to run it"
        )
    parts = (
        ("state", state, plan.state, "plan.place(state)"),
        ("batch", batch, plan.batch, "jax.device_put(batch, plan.batch)"),
    )
    for name, tree, wanted, _ in parts:
        if jax.tree.structure(tree) != jax.tree.structure(wanted):
            return (
                f"the {name} has another structure than in the plan: {jax.tree.structure(tree)} "
                f"and {jax.tree.structure(wanted)}"
            )
    chips = math.prod(plan.mesh.shape[name] for name in plan.axes)
    for path, x in jax.tree.leaves_with_path(batch):
        if jnp.ndim(x) and jnp.shape(x)[0] % chips:
            return (
                f"batch{jax.tree_util.keystr(path)} of shape {jnp.shape(x)} has {jnp.shape(x)[0]} "
                f"rows, not a multiple of {chips} devices; parallel.feed pads short batches"
            )
    for (path, x), where in zip(jax.tree.leaves_with_path(batch), jax.tree.leaves(plan.batch)):
        for axis, name in enumerate(where.spec):
            if name == "context" and jnp.shape(x)[axis] % plan.mesh.shape[name]:
                return (
                    f"batch{jax.tree_util.keystr(path)} of shape {jnp.shape(x)} has "
                    f"{jnp.shape(x)[axis]} positions, not a multiple of the {plan.mesh.shape[name]} "
                    f"devices of the mesh axis {name!r}"
                )
    for name, tree, wanted, put in parts:
        for (path, x), where in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(wanted)):
            if isinstance(x, jax.Array) and x.committed and not _placed(x, where):
                return (
                    f"{name}{jax.tree_util.keystr(path)} does not have the plan's sharding, but "
                    f"{x.sharding}; call {put}"
                )
    return None


def _placed(x: jax.Array, where: jax.sharding.NamedSharding) -> bool:
    """Whether an array has a sharding. Devices with explicit axes and the same devices with
    automatic ones are different meshes for JAX, although an array lies in the same places."""
    kinds = getattr(getattr(x.sharding, "mesh", None), "axis_types", where.mesh.axis_types)
    return kinds == where.mesh.axis_types and x.sharding.is_equivalent_to(where, x.ndim)
