"""The shardings of a run's state, batches and metrics: on one device, or on the devices of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.parallel import Plan
from fnet.parallel._local_batches import LocalBatches
from fnet.parallel._plan import on_mesh
from fnet.training.record._metrics import placed


class Spread:
    """Transfers the arrays of a run to devices, with the shardings of a plan (the result of
    `parallel.plan`). Without a plan, arrays stay on their devices.

    Args:
      plan: the result of `parallel.plan`, or None.

    Attributes:
      alone: whether this is the only process of the run.

    Raises:
      ValueError: `plan` is for devices that are not attached.
    """

    def __init__(self, plan: Plan | None):
        if plan is not None and not plan.attached:
            raise ValueError(
                f"fit: this plan is for {plan.mesh.size} x {plan.chip.name} that are not here; "
                "plan for devices='local' or jax.devices() to run"
            )
        self.plan = plan
        self.alone = jax.process_count() == 1
        self.rows = None if plan is None else LocalBatches(plan, False)

    def __str__(self) -> str:
        if self.plan is None:
            return "none"
        axes = " x ".join(f"{name}={size}" for name, size in self.plan.mesh.shape.items())
        return f"{self.plan.strategy} over {axes}"

    def step(self, step: Callable) -> Callable:
        return step if self.plan is None else self.plan.jit(step)

    def traceable(self, step: Callable) -> Callable:
        """Returns the step as a function that can be traced with the arrays of the run."""
        return step if self.plan is None else on_mesh(self.plan, step)

    def state(self, state: Any) -> Any:
        """Copies the state to the devices of the plan, with the plan's shardings. The step donates
        the copied state, not the caller's state.

        Raises:
          ValueError: the state has another structure than the state for which the plan was made.
        """
        if self.plan is None:
            return jax.tree.map(_copy, state)
        if jax.tree.structure(state) != jax.tree.structure(self.plan.state):
            raise ValueError(
                "fit: the plan is for a state of another structure: plan with the init that makes "
                f"this one; it has {jax.tree.structure(state)}, the plan "
                f"{jax.tree.structure(self.plan.state)}"
            )
        placed = [
            getattr(x, "sharding", None) == place and x.committed
            for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(self.plan.state))
        ]
        return jax.tree.map(_copy, state) if all(placed) else self.plan.place(state)

    def batch(self, batch: Any, at: int) -> Any:
        """Transfers the batch to the devices of the plan, with the plan's sharding. Each row of the
        batch is copied only to its device."""
        if self.rows is None:
            return batch
        placed = self.rows.place(self.rows.fill(batch, at, whole=True))
        return jax.block_until_ready(placed)  # the source may reuse the arrays of the batch

    def shapes(self, batch: Callable[[], Any]) -> Any:
        """Returns a tree whose leaves have the shapes and dtypes of a batch. If there is a plan,
        the tree is `plan.shapes`. Without a plan, the tree is the batch that the function `batch`
        returns."""
        return batch() if self.plan is None else self.plan.shapes

    def whole(self, tree: Any) -> Any:
        """Replicates small arrays, such as the sums of the metrics, on all devices of the plan.

        The compiled step also replicates the updated sums of the metrics on all devices. Because
        the results of the step have the shardings of its arguments, JAX does not compile the step
        again when the results are passed to the next call.
        """
        return placed(tree, None if self.plan is None else NamedSharding(self.plan.mesh, P()))


def _copy(x):
    """Returns a copy of an array with the same sharding. `device_put` copies without a compiled
    program, but `jnp.copy` compiles a program for every shape, which took 0.4 s for ResNet-18."""
    if isinstance(x, jax.Array) and x.is_fully_addressable:
        return jax.device_put(x, may_alias=False)
    return jnp.copy(x)
