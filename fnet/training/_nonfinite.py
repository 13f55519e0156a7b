"""A loss or a parameter that is not finite: seen on the device, and on a replay traced to its layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, transforms
from fnet.training._metrics import Mean


class Diverged(ArithmeticError):
    """The loss or the parameters are no longer finite; nothing non-finite was saved."""


def start(skipped: Any) -> dict[str, Any]:
    """The watch before anything has happened: the first bad step or -1, whether it was the loss, steps skipped."""
    return {"bad": np.array(-1, np.int32), "loss": np.array(False), "skipped": np.asarray(skipped, np.int32)}


def look(watch: Mapping[str, Any], old: Any, new: Any, metrics: Mapping[str, Any], *, skip: bool
         ) -> tuple[jax.Array, dict[str, Any]]:
    """(whether the step from `old` to `new` was sound, the watch after it), on the device."""
    loss = metrics.get("loss")
    loss = jnp.isfinite(loss.total).all() if isinstance(loss, Mean) else jnp.array(True)
    sound = loss & _finite(getattr(new, "params", new))
    first = ~sound & (watch["bad"] < 0)
    return sound, {
        "bad": jnp.where(first, old.step.astype(jnp.int32), watch["bad"]),
        "loss": jnp.where(first, ~loss, watch["loss"]),
        "skipped": watch["skipped"] + (~sound).astype(jnp.int32) if skip else jnp.asarray(watch["skipped"]),
    }


def _finite(tree):
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats] or [True]))


def kept(sound: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the step was sound, else `old`; the counter `step` goes on all the same."""
    def choose(path, a, b):
        if jax.tree_util.keystr(path, simple=True, separator="/") == "step":
            return a
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            chosen = jnp.where(sound, jax.random.key_data(a), jax.random.key_data(b))
            return jax.random.wrap_key_data(chosen, impl=jax.random.key_impl(a))
        return jnp.where(sound, a, b)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def sound(watch: Mapping[str, Any], skip: bool) -> Any:
    """Whether the state may be saved, a bool on the device: the host need not wait."""
    return None if skip else watch["bad"] < 0


def first_layer(step: Callable, inputs: tuple[Any, Any], before: tuple[Any, Any] | None) -> str:
    """A sentence that names the first operation of a step that makes what is not finite out of what is.

    What does so at the step before as well, when all was sound, is meant to be infinite and left out.

    Args:
      step: as `fit` takes it.
      inputs: (state, batch) of the step that broke.
      before: those of the step before it, or None.
    """
    origins = _tracer(step)
    usual = set() if before is None else {index for index, *_ in origins(*before)}
    made = [origin for origin in origins(*inputs) if origin[0] not in usual]
    state, batch = inputs
    given = [f"'{jax.tree_util.keystr(path, simple=True, separator='/')}'"
             for path, leaf in jax.tree.leaves_with_path({"batch": batch, "state": getattr(state, "params", state)})
             if _inexact(leaf) and not bool(jnp.isfinite(leaf).all())]
    if given:
        return f"On a replay of that step {', '.join(given[:4])} went into it already not finite"
    if not made:
        return "On a replay of that step nothing in it was at fault: the device may be"
    _, scope, primitive, what, shape = made[0]
    where = f"'{scope}'" if scope else "the step itself, outside of any layer"
    return f"On a replay of that step the first {what} came from '{primitive}' {shape} in {where}"


def _tracer(step) -> Callable[[Any, Any], list[tuple[int, str, str, str, str]]]:
    """A function of (state, batch): (number, scope, primitive, what, shape) of each operation that makes NaN or
    infinity from finite inputs."""
    known: list[tuple[str, str, str]] = []
    fired: dict[int, str] = {}
    lock = threading.Lock()

    def note(index, fires, nan):
        if fires:
            with lock:
                fired.setdefault(int(index), "NaN" if nan else "infinity")

    def rule(primitive, scope, inputs, equation):
        floats = [v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        if primitive in _ENTERED or primitive in _KEEP or not floats:
            return NotImplemented
        outputs = _jax.bind_again(equation, inputs)
        known.append((scope, primitive, f"{outputs[0].dtype}{list(outputs[0].shape)}"))
        nan = jnp.any(jnp.array([jnp.isnan(x).any() for x in outputs if _inexact(x)]))
        jax.debug.callback(note, len(known) - 1, _all_finite(inputs) & ~_all_finite(outputs), nan)
        return outputs

    looking = jax.jit(transforms.rewrite(lambda state, batch: step(state, batch), rule))

    def origins(state, batch):
        fired.clear()
        jax.block_until_ready(looking(state, batch))
        jax.effects_barrier()
        return [(index, *known[index][:2], fired[index], known[index][2]) for index in sorted(fired)]

    return origins


def _inexact(x):
    return jnp.issubdtype(getattr(x, "dtype", None) or np.result_type(x), jnp.inexact)


def _all_finite(arrays):
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in arrays if _inexact(x)] or [True]))


_ENTERED = {"jit", "closed_call", "core_call", "scan", "while", "cond", "remat2", "checkpoint", "shard_map",
            "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"}
_KEEP = {"broadcast_in_dim", "reshape", "transpose", "slice", "squeeze", "neg", "copy", "rev", "select_n",
         "concatenate", "dynamic_slice", "gather"}         # they make nothing that was not there
