"""Three methods to run the members of a population (vmap, split and loop), and the choice of the
fastest method."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet import transforms as ft
from fnet.search import _members as _state
from fnet.search._identity import of_population
from fnet.training import Mean, MemberMean
from fnet.training.record._metrics import as_metrics

METHODS = ("vmap", "split", "loop")
# The measurement: maximal number of rounds, and approximate time for each method.
_ROUNDS, _SECONDS = (9, 3.0)
_TURN = 0.15  # seconds for which a method runs in a round, long enough to fill the CPU's caches
_CLOSE = 1.04  # a method earlier in METHODS is preferred if the times differ by less


@dataclasses.dataclass(frozen=True)
class Methods:
    """The method by which the members of a population run, and why. `str()` returns a table.

    Attributes:
      chosen: "vmap", "split" or "loop" (see `population`).
      members: the number of members.
      seconds: the measured time of a step in seconds, by method; {} if nothing was measured.
      reason: why the method was selected.

    >>> print(search.Methods("loop", 4, {"vmap": 0.004, "loop": 0.002}, "measured"))
    4 members, method 'loop': measured
    method  ms per step  ms per member
    vmap           4.00          1.000
    loop           2.00          0.500
    """

    chosen: str
    members: int
    seconds: Mapping[str, float]
    reason: str

    def __str__(self):
        lines = [f"{self.members} members, method '{self.chosen}': {self.reason}"]
        if self.seconds:
            lines.append(f"{'method':6}  ms per step  ms per member")
        lines += [
            f"{name:6}  {1e3 * s:11.2f}  {1e3 * s / self.members:13.3f}"
            for name, s in self.seconds.items()
        ]
        return "\n".join(lines)


class Step:
    """The step of a population, `step_n(state, batch) -> (state, metrics)`. It donates the state.

    Attributes:
      plain: the step of all members of the population as one function that JAX can trace.
      separate: True if a step calls several compiled programs. The value of `separate` is valid
        after the first call of the step, or after `prepare`.
    """

    def __init__(self, step: Callable, method: str, mesh: Mesh | None, own_batches: bool):
        self._step, self._method, self._mesh, self._own = step, method, mesh, own_batches
        self._methods: dict[int, Methods] = {}  # by the number of members
        self._programs: dict[str, Callable] = {}
        self.plain = self._traceable("vmap")
        self.__name__ = f"{getattr(step, '__name__', 'step')}_n"

    def __call__(self, state, batch):
        if jax.config.jax_disable_jit:
            return self.plain(state, batch)
        if not _jax.outermost():
            known = self._methods.get(_members(state))
            chosen = known.chosen if known else self._method
            return self._traceable("vmap" if chosen == "vmap" else "split")(state, batch)
        if _members(state) not in self._methods:
            self.prepare(state, batch)
        return self._program(self._methods[_members(state)].chosen)(state, batch)

    @property
    def separate(self) -> bool:
        return any(each.chosen == "loop" for each in self._methods.values())

    def prepare(
        self, state: Any, batch: Any, known: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Selects the method (vmap, split or loop) that trains the population `state`, by timing
        the methods if necessary.

        Args:
          state, batch: the arguments of a step. The state is not donated.
          known: None, or the result of `prepare` in an earlier process. If `known` is the result of
              an earlier `prepare`, the method in this result is used.

        Returns:
          A dict of the fields of `Methods`: the selected method, the measured time of each method,
          the reason for the selection, and the number of members (training runs) of the population.
        """
        n = _members(state)
        if n not in self._methods:
            if self._method != "auto":
                found = Methods(self._method, n, {}, "given as method=")
            elif known and known.get("members") == n and known.get("chosen") in METHODS:
                found = Methods(
                    known["chosen"], n, known.get("seconds", {}), "chosen when the run began"
                )
            else:
                found = self._measured(state, batch)
            self._methods[n] = found
        return {**dataclasses.asdict(self._methods[n]), "seconds": dict(self._methods[n].seconds)}

    def identity(self, state: Any, batch: Any) -> dict[str, Any]:
        """Returns a dict that identifies this population, for the comparison with a run that
        `tr.fit` resumes."""
        return of_population(self.plain, state, batch)

    def explained(self, state: Any, batch: Any) -> Methods:
        """Returns the `Methods`, for `ft.explain`."""
        self.prepare(state, batch)
        return self._methods[_members(state)]

    def _measured(self, state, batch) -> Methods:
        names = METHODS if _convolves(self._step, state, batch, self._own) else ("vmap", "loop")
        n = _members(state)
        if n == 1:
            return Methods("loop", 1, {}, "there is one member")
        times: dict[str, list[float]] = {name: [] for name in names}
        copies = {}

        def run(name, state):
            began = time.perf_counter()
            copies[name], metrics = self._program(name)(state, batch)
            jax.block_until_ready(metrics)  # waiting for the state would combine its members
            return time.perf_counter() - began

        for name in names:
            run(name, jax.tree.map(jnp.copy, state))  # compiles
        for _ in range(_ROUNDS):
            best = min((min(taken) for taken in times.values() if taken), default=math.inf)
            for name, taken in times.items():
                if sum(taken) > _SECONDS or (taken and min(taken) > 1.5 * best):
                    continue
                # Loads the data of this method into the CPU's caches.
                first = run(name, copies[name])
                steps = round(_TURN / first)
                taken.append(
                    statistics.fmean(run(name, copies[name]) for _ in range(steps))
                    if steps
                    else first
                )
        seconds = {name: statistics.median(taken) for name, taken in times.items()}
        chosen = next(name for name in names if seconds[name] <= _CLOSE * min(seconds.values()))
        for name in names:
            if name != chosen:
                del self._programs[name]
        return Methods(chosen, n, seconds, "the fastest one, measured")

    def _program(self, name: str) -> Callable:
        if name not in self._programs:
            if name == "loop":
                self._programs[name] = self._separate()
            else:
                self._programs[name] = ft.tune(jax.jit(self._traceable(name), donate_argnums=0))
        return self._programs[name]

    def _traceable(self, name: str) -> Callable:
        """Returns the step of all members of the population as one function that JAX can trace."""
        step = checked(split_convolutions(self._step) if name == "split" else self._step)

        def over(members, hyper, diverged, batch):
            members, metrics = jax.vmap(step, in_axes=(0, 0, 0 if self._own else None))(
                members, hyper, batch
            )
            return members, *marked(diverged, metrics)

        def step_n(state, batch):
            run = self._shards(over)
            members, diverged, metrics = run(state.members, state.hyper, state.diverged, batch)
            return state.replace(step=state.step + 1, members=members, diverged=diverged), metrics

        return step_n

    def _separate(self) -> Callable:
        """Returns a step that calls the same compiled program once for each member of the
        population. Between two steps, the arrays of the population's members are stored separately
        instead of stacked along a leading axis."""
        one, mesh = ft.tune(jax.jit(checked(self._step), donate_argnums=0)), self._mesh
        rows = None if mesh is None else NamedSharding(mesh, P(mesh.axis_names[0]))

        def end(step, diverged, metrics):
            if mesh is None:
                metrics = jax.tree.map(lambda *each: jnp.stack(each), *metrics)
            return step + 1, *marked(diverged, metrics)

        end = jax.jit(
            end,
            donate_argnums=0,
            out_shardings=None if mesh is None else (NamedSharding(mesh, P()), rows, rows),
        )

        def placed(batch, n, here):
            """Returns a list of batches, one for each member of the population on this process's
            devices."""
            if self._own:
                return _state.parts(batch, n, mesh)
            if mesh is None:
                return [
                    jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), batch)
                ] * n
            return [
                copy
                for device in mesh.local_devices
                for copy in [jax.device_put(batch, device)] * (here // len(mesh.local_devices))
            ]

        def step_n(state, batch):
            n, members = _members(state), _state.separate(state, mesh)
            here = len(members.states)
            batches, results = placed(batch, n, here), [None] * here
            each = here if mesh is None else n // mesh.size
            for i in sorted(
                range(here), key=lambda i: i % each
            ):  # alternates devices, so that all of them compute
                results[i] = one(members.states[i], members.hypers[i], batches[i])
            after, metrics = zip(*results)
            metrics = metrics if mesh is None else _state.stacked(metrics, mesh)
            step, diverged, together = end(state.step, state.diverged, metrics)
            separate = _state.Separate(after, members.hypers, members.hyper, mesh)
            return _state.Population(step, separate, state.hyper, diverged), together

        return step_n

    def _shards(self, f: Callable) -> Callable:
        """Returns the function `f`, sharded with `jax.shard_map` over the members of the
        population."""
        if self._mesh is None:
            return f
        rows = P(self._mesh.axis_names[0])
        places = (rows, rows, rows, rows if self._own else P())
        return jax.shard_map(
            f, mesh=self._mesh, in_specs=places, out_specs=(rows, rows, rows), check_vma=False
        )


def checked(step: Callable) -> Callable:
    """Returns a function `(state, hyper, batch) -> (state, metrics)` that calls `step` and checks
    its results.

    Each `Mean` in the metrics is converted to a `MemberMean`, which can contain one mean for each
    member of a population.

    Raises:
      TypeError: the step does not return (state, metrics), or the structure of the returned state
        differs from that of the given state.
    """

    def run(state, hyper, batch):
        result = step(state, batch, hyper)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"population: step(state, batch, hyper) must return (state, metrics); got a "
                f"{type(result).__name__}"
            )
        if jax.tree.structure(result[0]) != jax.tree.structure(state):
            raise TypeError(
                "population: step(state, batch, hyper) must return a state with the structure of "
                f"the one it takes; {jax.tree.structure(state)} became "
                f"{jax.tree.structure(result[0])}"
            )
        return result[0], of_members(as_metrics(result[1]))

    return run


def marked(diverged: jax.Array, metrics: Any) -> tuple[jax.Array, Any]:
    """Marks the members of a population that have diverged. Returns (diverged, metrics). In the
    returned metrics, all values of the diverged members of the population are 0. If a metric is a
    `Mean`, both its `total` and its `count` are 0 for the diverged members.

    A member of a population has diverged if one of its metrics was NaN or infinite in this step or
    in an earlier step. The leaves of `metrics` have the shape [n, ...], where n is the number of
    members of the population. The states of the population's members are not checked for NaN,
    because such a check is slow: for a small MLP, it would take a third of the time of a step. NaN
    or infinite values in the state of one member do not affect the other members of the population,
    so no check of the states is needed.
    """
    for leaf in jax.tree.leaves(metrics):
        diverged = diverged | ~jnp.isfinite(leaf).reshape(len(leaf), -1).all(1)
    lost = lambda x: jnp.where(diverged.reshape(-1, *[1] * (x.ndim - 1)), jnp.zeros_like(x), x)
    return diverged, jax.tree.map(lost, metrics)


def as_members(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Converts each `Mean` in metrics to a `MemberMean`, whose leading axis is the axis of a
    population's members."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"each_member: expected a function that returns a dict of metrics; got a "
            f"{type(metrics).__name__}"
        )
    return of_members(metrics)


def of_members(metrics):
    return {
        name: MemberMean(metric.total, metric.count) if isinstance(metric, Mean) else metric
        for name, metric in metrics.items()
    }


def split_convolutions(step: Callable) -> Callable:
    """Returns `step` with a custom vmap rule for convolutions whose input and kernel are both
    batched.

    By default, vmap converts convolutions with a batched input and a batched kernel to one grouped
    convolution, for which XLA has slow kernels. With the custom vmap rule, a separate convolution
    is computed for each index of the batched axis.
    """

    def rule(primitive, scope, inputs, equation):
        if primitive != "conv_general_dilated":
            return NotImplemented
        single = lambda x, kernel: _jax.bind_again(equation, [x, kernel])[0]

        @jax.custom_batching.custom_vmap
        def convolve(x, kernel):
            return single(x, kernel)

        @convolve.def_vmap
        def _(size, batched, x, kernel):
            if all(batched):
                return jnp.stack([convolve(x[i], kernel[i]) for i in range(size)]), True
            return jax.vmap(single, in_axes=tuple(0 if each else None for each in batched))(
                x, kernel
            ), True

        return [convolve(*inputs)]

    return ft.rewrite(step, rule)


def _convolves(step, state, batch, own) -> bool:
    """Whether the training step contains convolutions."""
    seen = []

    def rule(primitive, scope, inputs, equation):
        seen.append(primitive)
        return NotImplemented

    first = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)
    batch = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), batch)
    jax.eval_shape(
        ft.rewrite(step, rule),
        first(state.members),
        first(batch) if own else batch,
        first(state.hyper),
    )
    return "conv_general_dilated" in seen


def _members(state) -> int:
    return state.diverged.shape[0]
