"""Detects metrics and states that are not finite, on the device. Finds the layer that caused
non-finite values by replaying the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, jaxpr, transforms
from fnet.training.checkpoints import _leaves


class Diverged(ArithmeticError):
    """The state or a metric contains a NaN or infinity. `fit` never saves such a state.

    >>> diverges = lambda state, batch: (state.apply(optax.sgd(1.0), {"w": jnp.log(state.params["w"])}), {})
    >>> state = tr.TrainState.create({"w": -jnp.ones(3)}, optax.sgd(1.0))
    >>> try:
    ...     tr.fit(diverges, state, lambda i: jnp.ones(3), steps=2)
    ... except tr.Diverged as error:
    ...     print("params/w" in str(error))
    True
    """


def start(skipped: Any) -> dict[str, Any]:
    """Returns the initial value of the dict `watch`, which records non-finite steps (steps with NaN
    or infinity). The dict `watch` contains the number of the first non-finite step, the index of
    the first non-finite leaf of this step (both -1 if there is none), and the number of skipped
    steps."""
    return {
        "bad": np.array(-1, np.int32),
        "leaf": np.array(-1, np.int32),
        "skipped": np.asarray(skipped, np.int32),
    }


def watched(
    metrics: Mapping[str, Any], state: Any, exempt: Collection[str] = ()
) -> list[tuple[str, Any]]:
    """Returns the floating-point leaves to check, each with its name in messages: first the loss,
    then the other metrics, then the state."""
    found = []
    for name in sorted(metrics, key=lambda name: name != "loss"):
        called = "the loss" if name == "loss" else f"the metric '{name}'"
        found += [(called, leaf) for leaf in jax.tree.leaves(metrics[name])]
    for path, leaf in _leaves.paths(state).items():
        if path not in exempt:
            found.append(
                (f"the parameter '{path}'" if path.startswith("params/") else f"'{path}'", leaf)
            )
    return [(called, leaf) for called, leaf in found if _inexact(leaf)]


def exempt(state: Any) -> set[str]:
    """Returns the paths of the leaves of the state that contain NaN or infinity before the first
    step. For example, the state of `optax.contrib.reduce_on_plateau` starts with a best value of
    infinity. `exempt` checks neither the parameters nor other leaves of the state that are larger
    than 1 MiB."""

    def infinite(path, leaf):
        if (
            path.startswith("params/")
            or not _inexact(leaf)
            or leaf.nbytes > 1 << 20
            or not leaf.is_fully_replicated
        ):
            return False
        return not np.isfinite(np.asarray(leaf.addressable_data(0)).astype(np.complex128)).all()

    return {path for path, leaf in _leaves.paths(state).items() if infinite(path, leaf)}


def look(
    watch: Mapping[str, Any],
    old: Any,
    new: Any,
    metrics: Mapping[str, Any],
    *,
    skip: bool,
    exempt: Collection[str] = (),
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns whether the metrics and the state `new` after a step are finite, as a bool on the
    device. Also returns the updated `watch` (the record of non-finite steps)."""
    leaf = _first([leaf for _, leaf in watched(metrics, new, exempt)])
    sound = leaf < 0
    first = ~sound & (watch["bad"] < 0)
    return sound, {
        "bad": jnp.where(first, old.step.astype(jnp.int32), watch["bad"]),
        "leaf": jnp.where(first, leaf, watch["leaf"]),
        "skipped": watch["skipped"] + (~sound).astype(jnp.int32)
        if skip
        else jnp.asarray(watch["skipped"]),
    }


def _first(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the index of the first array that contains NaN or infinity, or -1.

    If the sum of squares of an array is finite, all elements are finite. On a CPU, the sum of
    squares is computed four times as fast as `isfinite(x).all()`. If a sum of squares is not
    finite, each element is checked, because the square of a finite element may overflow.
    """
    if not arrays:
        return jnp.int32(-1)

    def exact(arrays):
        finite = jnp.stack([jnp.isfinite(x).all() for x in arrays])
        return jnp.where(finite.all(), -1, jnp.argmin(finite)).astype(jnp.int32)

    sums = jnp.stack([jnp.isfinite(_square(x)) for x in arrays])
    return jax.lax.cond(sums.all(), lambda arrays: jnp.int32(-1), exact, list(arrays))


def _square(x):
    spread = any(axes is not None for axes in jax.typeof(x).sharding.spec)  # on an explicit mesh
    if x.ndim and x.dtype in (jnp.float32, jnp.float64) and not spread:
        axes = tuple(range(x.ndim))
        return jax.lax.dot_general(x, x, ((axes, axes), ((), ())))
    return jnp.where(jnp.isfinite(x).all(), 0.0, jnp.nan).astype(jnp.float32)


def kept(sound: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` if the step was finite, otherwise `old`. The counter `step` increases whether
    or not the step is skipped."""

    def choose(path, a, b):
        if jax.tree_util.keystr(path, simple=True, separator="/") == "step":
            return a
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            chosen = jnp.where(sound, jax.random.key_data(a), jax.random.key_data(b))
            return jax.random.wrap_key_data(chosen, impl=jax.random.key_impl(a))
        return jnp.where(sound, a, b)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def sound(watch: Mapping[str, Any], skip: bool) -> Any:
    """Returns whether the state may be saved, or None if `skip` is True. The result is a boolean
    array on the device, so that the host need not wait for its value."""
    return None if skip else watch["bad"] < 0


def first_layer(step: Callable, inputs: tuple[Any, Any], before: tuple[Any, Any] | None) -> str:
    """Names the first operation of a step that produces NaN or infinity from finite inputs.

    `first_layer` ignores operations that also produced NaN or infinity in the previous step,
    because the new state and the metrics of the previous step were finite nevertheless.

    Args:
      step: the step function, as in `fit`.
      inputs: (state, batch) of the step that produced a NaN or infinite metric or state.
      before: (state, batch) of the previous step, or None.
    """
    origins = _tracer(step)
    usual = set() if before is None else {index for index, *_ in origins(*before)}
    made = [origin for origin in origins(*inputs) if origin[0] not in usual]
    state, batch = inputs
    given = [
        f"'{jax.tree_util.keystr(path, simple=True, separator='/')}'"
        for path, leaf in jax.tree.leaves_with_path(
            {"batch": batch, "state": getattr(state, "params", state)}
        )
        if _inexact(leaf) and not bool(jnp.isfinite(leaf).all())
    ]
    if given:
        return f"On a replay of that step {', '.join(given[:4])} went into it already not finite"
    if not made:
        return "On a replay of that step nothing in it was at fault: the device may be"
    _, scope, primitive, what, shape = made[0]
    where = f"'{scope}'" if scope else "the step itself, outside of any layer"
    return f"On a replay of that step the first {what} came from '{primitive}' {shape} in {where}"


def _tracer(step) -> Callable[[Any, Any], list[tuple[int, str, str, str, str]]]:
    """Returns a function of (state, batch) that finds the operations of the step that produce NaN
    or infinity from finite inputs. For each of the operations that are found, the result contains
    (number of the operation, scope, primitive, "NaN" or "infinity", dtype and shape)."""
    known: list[tuple[str, str, str]] = []
    fired: dict[int, str] = {}
    lock = threading.Lock()

    def note(index, fires, nan):
        if fires:
            with lock:
                fired.setdefault(int(index), "NaN" if nan else "infinity")

    def rule(primitive, scope, inputs, equation):
        floats = [v for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        # It produces no new values.
        same = jaxpr.traits(primitive).precision == "exact" or primitive == "neg"
        if primitive in jaxpr.ENTERED or same or not floats:
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
        return [
            (index, *known[index][:2], fired[index], known[index][2]) for index in sorted(fired)
        ]

    return origins


def _inexact(x):
    return jnp.issubdtype(getattr(x, "dtype", None) or np.result_type(x), jnp.inexact)


def _all_finite(arrays):
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in arrays if _inexact(x)] or [True]))
