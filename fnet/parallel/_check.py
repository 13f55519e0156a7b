"""What a step and its batch must be for a plan, with a sentence where they are not."""

from __future__ import annotations

import jax

from fnet import _jax


def shape(x):
    """What JAX makes of a leaf of a batch: NumPy's float64 is float32 unless 64 bits are enabled."""
    made = jax.eval_shape(lambda x: x, x)
    return jax.ShapeDtypeStruct(made.shape, made.dtype)


def rows(batch, chips: int) -> int:
    """How many rows a batch has, which the chips must divide."""
    found = 0
    for path, x in jax.tree.leaves_with_path(batch):
        if x.ndim and x.shape[0] % chips:
            below = x.shape[0] // chips * chips
            raise ValueError(f"plan: batch{jax.tree_util.keystr(path)} of shape {x.shape} has {x.shape[0]} rows, which "
                             f"{chips} devices do not divide; nearest that do: "
                             f"{' or '.join(str(n) for n in (below, below + chips) if n)}")
        found = max(found, x.shape[0] if x.ndim else 0)
    if not found:
        raise ValueError("plan: the batch has no rows: of each leaf of a batch the first axis is the rows")
    return found


def state(state, out):
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError("plan: a step returns (state, metrics); this one returns "
                         f"{f'{len(out)} values' if isinstance(out, tuple) else type(out).__name__}")
    if jax.tree.structure(out[0]) != jax.tree.structure(state):
        raise ValueError(f"plan: the step returns a state of another structure than init makes: "
                         f"{jax.tree.structure(out[0])} and {jax.tree.structure(state)}")
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(out[0])):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"plan: init makes state{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}, and the "
                             f"step returns it as {y.dtype}{list(y.shape)}")


def unused(jaxpr, leaves: int, batch) -> tuple[str, ...]:
    """Paths of the batch's leaves that nothing reads."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    return tuple(path for path, v in zip(paths, jaxpr.invars[leaves:]) if v not in read)
