"""TrainState: the state that each training step takes and returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fnet.training.optim._averaging import averages, narrowed, widened


@struct.dataclass
class TrainState:
    """The state of a run: a pytree, which you can jit, donate, shard and save.

    Fields:
      step: the number of completed updates, an int32 scalar.
      params: the model's parameters.
      state: the model's other arrays, such as batch statistics; `{}` if it has none.
      opt_state: the optimizer's state.
      ema: an exponential moving average of `params`, or None. The average of 16-bit parameters is
        stored in float32. Leaves without an average, such as integers and keys, are those of
        `params`.
      decay: the decay of this average, a float, or None. It is static: JAX does not trace it, and
        checkpoints do not contain it.

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
        """Returns the state before the first step.

        Args:
          params: the model's parameters.
          tx: an Optax gradient transformation.
          state: the model's other arrays, the second value of `model.init`. Default None: `{}`.
          ema: the decay of a moving average of `params`, in [0, 1). Default None: no average.

        Raises:
          ValueError: `ema` is outside [0, 1).
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
            ema=None if ema is None else jax.tree.map(widened, params),
            decay=ema,
        )

    def apply(
        self, tx: optax.GradientTransformation, grads: Any, *, state: Any = None, **extra: Any
    ) -> TrainState:
        """Returns the state after one update of the parameters, their average and the optimizer.

            ema' = d ema + (1 - d) params',    d = min(decay, (1 + step) / (10 + step))

        A prime denotes the new value. d is smaller than `decay` at first, so that the average soon
        forgets the initial parameters.

        Args:
          tx: the Optax transformation that was passed to `create`.
          grads: the gradient, a tree with the structure of `params`.
          state: the new value of the field `state`. Default None: the old one.
          **extra: more arguments for `tx.update`, such as `gradient=` for `tr.svrg`.
        """
        with jax.numpy_dtype_promotion("standard"):  # Adam's `decay ** step` needs it
            updates, opt_state = tx.update(grads, self.opt_state, self.params, **extra)
            params = optax.apply_updates(self.params, updates)
        ema = self.ema
        if ema is not None:
            t = self.step.astype(jnp.float32)
            move = 1 - jnp.minimum(self.decay, (1 + t) / (10 + t))

            def moved(old, new):
                return (
                    old + move.astype(old.dtype) * (new.astype(old.dtype) - old)
                    if averages(old)
                    else new
                )

            ema = jax.tree.map(moved, ema, params)
        return self.replace(
            step=self.step + 1,
            params=params,
            state=self.state if state is None else state,
            opt_state=opt_state,
            ema=ema,
        )

    @property
    def averaged(self) -> Any:
        """The parameters for evaluation: the moving average in the dtypes of `params` if there is
        one, otherwise `params`."""
        return self.params if self.ema is None else narrowed(self.ema, self.params)
