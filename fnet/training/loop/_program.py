"""Program: the user's step, as a run executes it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from fnet import cost
from fnet.training.checkpoints import _leaves
from fnet.training.loop import _advance, _compilation_cache, _contract, _nonfinite, _tuning
from fnet.training.loop._options import Options
from fnet.training.loop._reports import Reports
from fnet.training.loop._run_state import RunState
from fnet.training.loop._spread import Spread
from fnet.training.loop._utilization import utilization
from fnet.training.record import _metrics


class Program:
    """The user's step, as a run executes it: together with the check of its results and the sums of
    its metrics, divided among the devices, and rewritten by `tune`.

    Args:
      step: the user's step.
      state: the state that was passed to `fit`.

    Attributes:
      advance: the compiled function, see `_advance.function`. Set by `compile`.
      exempt: the paths of the leaves of the state that may be infinite. Set by `compile`.
      profiled: wraps `advance`, to profile some of its calls.
    """

    advance: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any, Any]]
    exempt: Collection[str] = ()
    profiled: Callable[[Callable], Callable] = staticmethod(lambda advance: advance)

    def __init__(self, step: Callable, state: Any, *, options: Options, spread: Spread):
        self.step = step
        self._options = options
        self._spread = spread
        # One traced function serves the checks, the count of operations and the run.
        self._traced = _contract.traced(spread.traceable(getattr(step, "plain", step)))
        function = getattr(step, "__qualname__", type(step).__name__)
        self._name = f"{function} with {[jnp.shape(x) for x in jax.tree.leaves(state)]}"
        _compilation_cache.preload(self._name)

    @property
    def compiled(self) -> bool:
        return hasattr(self, "advance")

    def zeros(self, state: Any, batch: Any) -> Any:
        """Checks the step, and returns the initial sums of its metrics.

        Raises:
          TypeError: see `_contract.metrics_of`.
        """
        return _metrics.zeros(_contract.metrics_of(self._traced, state, batch))

    def utilization(self, state: Any, batch: Any) -> Callable[[float], cost.MFU]:
        return utilization(self._traced, state, batch)

    def compile(self, run: RunState, example: Any, reports: Reports) -> None:
        """Prepares `advance`, which XLA compiles when it is first called."""
        step, state = self.step, run.state
        exempt = set()
        if hasattr(step, "prepare"):
            # A population measures how its members run, and handles those that diverge.
            run.facts["members"] = step.prepare(state, example, run.facts.get("members"))
            exempt = {path for path in _leaves.paths(state) if path.startswith("members/")}
        self.exempt = exempt | _nonfinite.exempt(state)
        plain = self._spread.plan is None and not hasattr(step, "plain")
        advance = _advance.function(
            self._traced if plain else self._spread.step(step),
            state,
            keeps=self._options.skips,
            exempt=self.exempt,
            metrics=bool(self._options.on_step),
        )
        tunes_itself = getattr(step, "separate", False)
        if self._options.tune and not tunes_itself:
            advance = self._tuned(advance, run, example, reports)
        self.advance = self.profiled(advance)

    def _tuned(self, advance: Callable, run: RunState, example: Any, reports: Reports) -> Callable:
        on_one_device = self._spread.plan is None and self._spread.alone
        steps = self._options.steps - run.at
        fast, found, rules = _tuning.tuned(
            advance,
            (run.state, run.loop["metrics"], run.watch, example),
            rules=run.rules,
            measure=on_one_device and _tuning.is_long(reports.utilization, run.facts, steps),
        )
        if found is not None:
            reports.say(run.at, found)
        run.facts["tune"] = rules
        return fast

    def remember(self) -> None:
        """Notes which compiled programs this step has loaded, so that a later process loads them
        early."""
        _compilation_cache.remember(self._name)
