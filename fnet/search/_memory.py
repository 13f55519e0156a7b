"""Estimates how many members (training runs) of a population fit into the memory of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fnet import parallel


@dataclasses.dataclass(frozen=True)
class Fits:
    """How many members of a population fit into the memory of one device. `str()` returns one line.

    Attributes:
      state: the exact size of a member's state and hyperparameters, in bytes.
      working: the estimated size of a member's gradients and activations in a step, in bytes.
      memory: the memory of the device, in bytes.
      vmap: how many members fit if all run at the same time (methods vmap and split).
      loop: how many members' states fit if one is trained at a time (method loop).

    >>> print(search.Fits(4 << 20, 12 << 20, 1 << 30, 57, 202))
    57 members with vmap, 202 one by one (1.0 GiB of memory; each 4.0 MiB of state, 12.0 MiB of activations)
    """

    state: int
    working: int
    memory: int
    vmap: int
    loop: int

    def __str__(self):
        return (
            f"{self.vmap:,} members with vmap, {self.loop:,} one by one "
            f"({self.memory / 2**30:,.1f} GiB of memory; each {self.state / 2**20:,.1f} MiB of "
            f"state, {self.working / 2**20:,.1f} MiB of activations)"
        )


def fits(init: Callable, step: Callable, hyper: Any, batch: Any, *, devices: Any = "local") -> Fits:
    """Estimates how many members of a population fit into the memory of one device, without running
    the step.

    One fifth of the memory is reserved for the runtime and for fragmentation.

    Args:
      init, step: the functions of one member, as for `population`.
      hyper: the hyperparameters of one member, a tree of arrays or `jax.ShapeDtypeStruct`s.
      batch: the batch of one step.
      devices: "local" for this device, or the name of a chip, such as "v5e:1x1" or "T4", which need
        not be attached. Default "local".

    Raises:
      ValueError: the memory of the device is unknown.

    >>> init = lambda key, hyper: {"w": jax.random.normal(key, (512, 512))}
    >>> step = lambda state, batch, hyper: ({"w": state["w"] - hyper * (batch.T @ (batch @ state["w"]))}, {})
    >>> plan = search.fits(init, step, jnp.float32(0.1), jnp.ones((8, 512)), devices="T4")
    >>> plan.state, plan.vmap < plan.loop
    (1048580, True)
    """
    begin = lambda key: {"state": init(key, _zeros(hyper)), "hyper": _zeros(hyper)}

    def one(both, batch):
        new, metrics = step(both["state"], batch, both["hyper"])
        return {"state": new, "hyper": both["hyper"]}, metrics

    devices = [jax.local_devices()[0]] if devices == "local" else devices
    plan = parallel.plan(one, begin, batch, devices=devices, compile=False)
    memory = plan.target.chip.per_device.memory_bytes
    if not memory:
        raise ValueError(
            f"fits: the memory of {plan.target.chip.name} is unknown; name a chip of hardware.chips"
        )
    state = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(
            jax.eval_shape(begin, jax.eval_shape(lambda: jax.random.key(0)))
        )
    )
    working = max(int(plan.chosen.peak) - state, 0)
    room = int(0.8 * memory)
    return Fits(
        state, working, memory, max(room // (state + working), 0), max((room - working) // state, 0)
    )


def _zeros(tree):
    return jax.tree.map(
        lambda x: jax.numpy.zeros(jax.numpy.shape(x), jax.numpy.result_type(x)), tree
    )
