"""TrainState: everything that a training step carries to the next one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct


@struct.dataclass
class TrainState:
    """The state of a training run: a pytree that can be passed through `jit`, donated, sharded and saved.

    Fields:
      step: int32 scalar, the number of updates made.
      params: the model's parameters.
      state: the model's other arrays, such as batch statistics; `{}` if it has none.
      opt_state: the optimizer's state.
      ema: an exponential moving average of params, or None.
      decay: the decay of the moving average, or None. Static: not an array and not saved.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.sgd(0.5)
      >>> state = TrainState.create({"w": jnp.ones(2)}, tx)
      >>> state = state.apply(tx, {"w": jnp.ones(2)})
      >>> int(state.step), state.params["w"].tolist()
      (1, [0.5, 0.5])
    """

    step: jax.Array
    params: Any
    state: Any
    opt_state: Any
    ema: Any = None
    decay: float | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        params: Any,
        tx: optax.GradientTransformation,
        *,
        state: Any = None,
        ema: float | None = None,
    ) -> TrainState:
        """The state before the first step.

        Args:
          params: the model's parameters.
          tx: an Optax gradient transformation.
          state: the model's other arrays, the second value of `model.init`.
          ema: decay of a moving average of params, in [0, 1), or None for no average.

        Raises:
          ValueError: ema is outside [0, 1).
        """
        if ema is not None and not 0 <= ema < 1:
            raise ValueError(
                f"ema={ema}: the decay of the average must be in [0, 1), such as 0.999, or None"
            )
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            state={} if state is None else state,
            opt_state=tx.init(params),
            ema=None if ema is None else jax.tree.map(jnp.copy, params),
            decay=ema,
        )

    def apply(self, tx: optax.GradientTransformation, grads: Any, *, state: Any = None, **extra: Any) -> TrainState:
        """Returns the state after one update: new parameters, moving average and optimizer state, and step + 1.

            ema' = d ema + (1 - d) params',    d = min(decay, (1 + step) / (10 + step))

        In the first steps, d is smaller than `decay`, so the average does not retain the initial values.

        Args:
          tx: the transformation that was passed to `create`.
          grads: a tree like params.
          state: the model's new state; None keeps the old one.
          extra: further arguments of `tx.update`, such as `gradient=` of `tr.svrg`.
        """
        with jax.numpy_dtype_promotion("standard"):        # Adam's `decay ** step` needs it
            updates, opt_state = tx.update(grads, self.opt_state, self.params, **extra)
            params = optax.apply_updates(self.params, updates)
        ema = self.ema
        if ema is not None:
            t = self.step.astype(jnp.float32)
            move = 1 - jnp.minimum(self.decay, (1 + t) / (10 + t))
            ema = jax.tree.map(lambda old, new: old + move.astype(old.dtype) * (new - old), ema, params)
        return self.replace(
            step=self.step + 1,
            params=params,
            state=self.state if state is None else state,
            opt_state=opt_state,
            ema=ema,
        )

    @property
    def averaged(self) -> Any:
        """The parameters to evaluate with: the moving average if there is one, else params."""
        return self.params if self.ema is None else self.ema
