"""Reports that memory ran out. The report lists the largest arrays and, for a training step,
estimates the largest batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from fnet import _jax
from fnet import hardware as hw
from fnet.parallel import Plan, _drafts
from fnet.parallel._drafts import ROOM
from fnet.parallel._estimate import Estimate, Split, estimate
from fnet.training.checkpoints import _leaves

_SHOWN = 6
_GUESSES = 6


class OutOfMemory(MemoryError):
    """The step or an evaluation needs more memory than the device has.

    The message lists the largest arrays by their paths and, for a step, estimates the largest batch
    that fits.

    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> too_large = lambda state: {"sum": jnp.ones(2**44).sum()}      # needs 64 TiB
    >>> try:
    ...     tr.fit(step, state, lambda i: jnp.ones(3), steps=1, evaluate={"test": too_large})
    ... except tr.OutOfMemory as error:
    ...     print(str(error)[:39])
    the evaluation 'test' ran out of memory
    """


def exhausted(error: BaseException) -> bool:
    """Whether XLA raised `error` because memory ran out, at compile time or at run time."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def error(
    reason: BaseException,
    during: str,
    *,
    evaluating: bool,
    step: Callable,
    state: Any,
    batch: Any,
    plan: Plan | None,
    command: str = "",
) -> OutOfMemory:
    """Returns an `OutOfMemory` error. XLA's own error does not name the arrays that use the memory.

    Args:
      reason: XLA's error.
      during: what the run was doing, such as "the first step".
      evaluating: whether this was an evaluation, whose own arrays are not known.
      step: the user's step.
      state: the state of the run, whose arrays may have been donated.
      batch: a tree with the shapes and dtypes of the last batch.
      command: a last line of the message.
    """
    lines = [f"{during} ran out of memory ({str(reason).strip().splitlines()[0][:160]})"]
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    device = next(iter(arrays[0].sharding.device_set))
    memory = hw.detect(device).per_device.memory_bytes
    state, batch = jax.tree.map(_shape, (state, batch))
    held_state, held_batch = state, batch
    if plan is not None:
        held_state = jax.tree.map(_part, state, plan.state)
        held_batch = jax.tree.map(_part, batch, plan.batch)
    largest = [
        (x.size * x.dtype.itemsize, f"{x.dtype.name}{list(x.shape)} {name}{path}")
        for name, tree in (("", held_state), ("batch/", held_batch))
        for path, x in _leaves.paths(tree).items()
        if not _leaves.is_key(x)
    ]
    if not evaluating:
        try:
            lines += _needs(step, state, batch, plan, memory, largest)
        except Exception as failed:  # an error in the report must not hide the original error
            lines.append(f"  (what it needs cannot be estimated: {type(failed).__name__})")
    largest.sort(key=lambda array: -array[0])
    where = " on each device" if plan else ""
    which = " of the state and batch" if evaluating else ""
    lines.append(f"  largest arrays{which}{where}:")
    lines += [f"    {_gib(size):>9}  {what}" for size, what in largest[:_SHOWN]]
    lines.append(
        "Use a smaller batch_size in tr.evaluator"
        if evaluating
        else "Use a smaller batch, ft.microbatch, ft.rematerialize, or more devices (parallel.plan)"
    )
    return OutOfMemory("\n".join([*lines, command] if command else lines))


def failing(state: Any) -> str:
    """Returns the predicate of `introspect.reduce` for a step that needs too much memory: half of
    that of the device, or 1 GB if that is not known."""
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    device = next(iter(arrays[0].sharding.device_set))
    memory = hw.detect(device).per_device.memory_bytes
    return f"uses more than {(memory or 2e9) / 2e6:.0f} MB"


def _needs(step, state, batch, plan, memory, largest) -> list[str]:
    """Returns the lines of the error message that state the peak memory and the largest batch that
    fits. Adds to the list `largest` the largest activations that are live when the memory use is at
    its peak."""
    rows = max((x.shape[0] for x in jax.tree.leaves(batch) if x.shape), default=0)
    unit = 1  # a batch has a multiple of so many rows
    if plan is not None:
        devices = math.prod(plan.mesh.shape[name] for name in plan.axes)
        unit = plan.options.microbatches * devices

    def estimated(number: int) -> Estimate:
        return _estimated(step, state, _resized(batch, rows, number), plan)

    need = estimated(rows)
    for held in need.largest:
        if held.line != "an argument":
            line = f", {held.line}" if held.line else ""
            largest.append((held.bytes, f"{held.what}{line} (estimated)"))
    needs = f"  the step needs {_gib(need.peak)}{' on each device' if plan else ''} (estimated)"
    if memory:
        needs += f", and {'each device' if plan else 'the device'} has {_gib(memory)}"
    if not memory or rows < 2 * unit or rows % unit:
        return [needs]
    if need.peak <= ROOM * memory:
        return [needs, "  which would fit: other arrays or programs hold memory of the device"]

    peak = lambda units: estimated(units * unit).peak
    fits = unit * _most_that_fit(peak, rows // unit, need.peak, ROOM * memory)
    if fits:
        which = f"{fits} (estimated{f', a multiple of {unit}' if unit > 1 else ''})"
    else:
        which = f"none: not even a batch of {unit} fits (estimated)"
    return [needs, f"  the largest batch that fits: {which}; this batch has {rows}"]


def _most_that_fit(peak: Callable[[int], int], fails: int, at_fails: int, room: float) -> int:
    """Returns the largest n below `fails` with `peak(n)` <= `room`, or a number that is nearly as
    large. Peak memory is roughly linear in n, so each guess is where a line through two known
    points reaches `room`."""
    fits, known = 0, {fails: at_fails}
    guess = fails // 2
    for _ in range(_GUESSES):
        known[guess] = at_guess = peak(guess)
        if at_guess <= room:
            fits = guess
        else:
            fails = guess
        if fails - fits <= 1 or at_guess > 0.97 * room >= 0.97 * at_guess:
            break
        (low, at_low), (high, at_high) = sorted(known.items())[:2]
        slope = max(1.0, (at_high - at_low) / (high - low))
        guess = min(max(int(low + (room - at_low) / slope), fits + 1), fails - 1)
    return fits


def _estimated(step, state, batch, plan) -> Estimate:
    if plan is not None:
        return _drafts.needs(plan, step, state, batch)
    closed = _jax.make_jaxpr(step)(state, batch)
    return estimate(closed, [Split()] * len(closed.jaxpr.invars), {"data": 1})


def _resized(batch, rows, to):
    resized = lambda x: (
        jax.ShapeDtypeStruct((to, *x.shape[1:]), x.dtype) if x.shape[:1] == (rows,) else x
    )
    return jax.tree.map(resized, batch)


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _part(x, place):
    """Returns the shape and dtype of the part of an array on each device."""
    return jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"
