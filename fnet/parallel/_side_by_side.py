"""compare: estimates the same training step on several chips, and shows the results side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet import hardware as hw
from fnet import transforms as ft
from fnet._util._text_table import aligned
from fnet._util._units import si
from fnet.cost import Count
from fnet.cost._roofline import seconds_text
from fnet.hardware import Chip
from fnet.parallel import _check, _cost, _mesh
from fnet.parallel._drafts import ROOM, Drafts
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target, target
from fnet.parallel._trace import Traced

_OPTIONS = Strategy("data"), Strategy("data", remat=True)


class Figure(NamedTuple):
    """A value as text, and its basis, which states how the value is known: "exact", "published",
    "derived", "estimated" or "unverified". If the value is not a number, `basis` is ""."""

    text: str
    basis: str = ""


@dataclasses.dataclass(frozen=True)
class OnChips:
    """One column of `compare`'s table: a training step on one kind of chips.

    Attributes:
        name: the name that was passed to `compare`.
        target: the kind and the number of the chips.
        policy: the dtypes that `hardware.policy` selects for the chips, a `hardware.Policy`.
        count: the FLOPs and bytes of the step, a `cost.Count`.
        time: the times of a step at the chips' peak rates; `time.seconds` is a lower bound.
        peak: the bytes that the step needs on each JAX device, estimated.
        memory: the bytes of memory of each JAX device, or None if unknown.
        rows: the largest numbers of rows that fit into memory, without and with `ft.rematerialize`,
            estimated; None if the memory is unknown.
        units: in what the size of a batch is stated, and how many a batch has, such as ("images",
            32).
        watts: the power of all chips together in watts, or None if unknown.
        values: a `hardware.Value`, with the FLOP per dollar, for each known price of the chips.

    >>> def step(w, batch):
    ...     return w - jax.grad(lambda w: ((batch @ w) ** 2).mean())(w), {}
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> table = parallel.compare(step, lambda key: jnp.ones((64, 8)), batch, ["T4"])
    >>> table.columns[0].fits
    True
    """

    name: str
    target: Target
    policy: hw.Policy
    count: Count
    time: _cost.Time
    peak: int
    memory: float | None
    rows: tuple[int, int] | None
    units: _cost.Units
    watts: float | None
    values: tuple[hw.Value, ...]

    @property
    def fits(self) -> bool | None:
        """Whether the step fits into the memory of each device without `ft.rematerialize`, or None
        if the memory is unknown.
        """
        return None if self.memory is None else self.peak <= ROOM * self.memory

    def watt_hours(self, steps: float) -> float | None:
        """The energy of `steps` steps in watt-hours, or None if the power or the time is unknown.
        Each step takes `time.seconds`, a lower bound, at full power.
        """
        if self.watts is None or not self.time.seconds:
            return None
        return self.watts * self.time.seconds * steps / 3600

    def dollars(self, steps: float) -> float | None:
        """The rent for `steps` steps in dollars, or None if the hourly price or the time is
        unknown. Each step takes `time.seconds`, a lower bound.
        """
        hourly = next((value.price.usd for value in self.values if value.price.per == "hour"), None)
        if hourly is None or not self.time.seconds:
            return None
        return hourly * self._priced * self.time.seconds * steps / 3600

    @property
    def _priced(self) -> float:
        """The number by which a price is multiplied: 1 if `name` is a system with its own price,
        otherwise the number of chips."""
        return (
            1
            if self.name in hw.systems and hw.systems[self.name].prices
            else self.target.chip.chips_of(self.target.count)
        )

    def figures(self, steps: float, period: str) -> dict[str, Figure]:
        """Returns the column as {quantity: `Figure`}: its value as text, and how it is known, such
        as "estimated". Energy and rent are for `steps` steps, which the table calls `period`, such
        as "1,000 steps".
        """
        chip, time = self.target.chip, self.time
        peak = chip.peak(self.count.dtype) if self.count.dtype else None
        names = ("as written", "recomputed")
        said = "unknown, no size of memory" if self.rows is None else "yes" if self.fits else "no"
        hours, dollars = self.watt_hours(steps), self.dollars(steps)
        unknown = Figure("unknown")
        return {
            "chips": Figure(str(self.target)),
            "dtype of products": Figure(str(self.count.dtype)),
            "peak of a chip": Figure(f"{si(peak.flops, digits=3)}FLOP/s", peak.basis)
            if peak
            else unknown,
            "FLOPs of a step": Figure(f"{si(self.count.flops)}F", "exact"),
            "bytes moved by a step": Figure(f"{si(self.count.total.fused_bytes)}B", "estimated"),
            "kernels and loop turns": Figure(
                f"{self.count.total.kernels + self.count.total.turns:,}", "estimated"
            ),
            "bound by": Figure(time.bound, "estimated"),
            "best possible time": Figure(seconds_text(time.seconds), "estimated")
            if time.seconds
            else unknown,
            f"{self.units.name} per second": Figure(
                f"{self.units.count / time.seconds:,.0f}", "estimated"
            )
            if time.seconds
            else unknown,
            "memory of a device": Figure(
                f"{self.memory / 2**30:.4g} GiB", chip.basis("memory_bytes")
            )
            if self.memory
            else unknown,
            "needed on a device": Figure(f"{self.peak / 2**30:.3g} GiB", "estimated"),
            "fits": Figure(said, "estimated" if self.rows else ""),
            **{
                f"largest batch, {name}": Figure(f"{self.rows[i]:,}", "estimated")
                if self.rows
                else unknown
                for i, name in enumerate(names)
            },
            f"energy per {period}": Figure(f"{hours:,.3g} Wh", "estimated")
            if hours is not None
            else unknown,
            f"rent per {period}": Figure(f"${dollars:,.3g}", "estimated")
            if dollars is not None
            else Figure("unknown"),
            "price": _price(self.values),
            "FLOP per dollar": Figure(f"{self.values[0].flop_per_dollar:.2g}", "derived")
            if self.values
            else unknown,
        }


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """The result of `compare`, which prints as a table with a column for each name.

    Attributes:
        columns: an `OnChips` for each name that was passed to `compare`.
        steps: the number of steps for which energy and rent are stated.
        period: the name of `steps` in the table, "1,000 steps" or "epoch".

    >>> def step(w, batch):
    ...     return w - jax.grad(lambda w: ((batch @ w) ** 2).mean())(w), {}
    >>> batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> table = parallel.compare(step, lambda key: jnp.ones((64, 8)), batch, ["T4", "TPU v5e"])
    >>> [column.name for column in table.columns]
    ['T4', 'TPU v5e']
    """

    columns: tuple[OnChips, ...]
    steps: float
    period: str

    def table(self) -> list[list[str]]:
        """Returns the rows of the table as lists of text, the heading first: the name of a
        quantity, its basis (such as "estimated"), and its value in each of the `columns`.
        """
        figures = [column.figures(self.steps, self.period) for column in self.columns]
        rows = [["", "basis", *(column.name for column in self.columns)]]
        quantities = list(dict.fromkeys(name for each in figures for name in each))
        for name in quantities:
            cells = [each.get(name, Figure("-")) for each in figures]
            bases = {cell.basis for cell in cells if cell.basis}
            shared = bases.pop() if len(bases) == 1 else ""
            rows.append(
                [
                    name,
                    shared,
                    *(
                        cell.text + (f" ({cell.basis})" if cell.basis and not shared else "")
                        for cell in cells
                    ),
                ]
            )
        return rows

    def __str__(self) -> str:
        table = self.table()
        return "\n".join([*aligned(table, left=range(len(table[0]))), "", *self.notes()])

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        head, *rows = self.table()
        lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])

    def notes(self) -> list[str]:
        """Returns the lines below the table, which explain the figures and cite the prices'
        sources.
        """
        notes = [
            "FLOPs are exact (convolutions: padding included). The best possible time is the "
            "longest of compute,",
            "memory traffic and transfers at the chips' peak rates, and of the latency of kernels, "
            "loops and",
            "messages (estimated); programs reach a part of these rates. Energy: this",
            "time at the chips' thermal design power, without host and cooling.",
        ]
        notes += [
            f"{column.name}: price of {value.price.date}, {value.price.source}; FLOP per dollar: "
            f"{value.assumption}"
            for column in self.columns
            for value in column.values[:1]
        ]
        return [
            *notes,
            *dict.fromkeys(
                f"note: {note}" for column in self.columns for note in column.count.notes
            ),
        ]


def compare(
    step: Callable,
    init: Callable,
    batch: Any,
    chips: Sequence[str],
    *,
    precision: str = "auto",
    examples: int | None = None,
) -> SideBySide:
    """Compares the time, memory and cost of one training step on several chips.

        print(parallel.compare(step, init, batch, ["RTX 2080 Ti", "TPU v2-8", "h100:8"]))

    The chips need not be attached, and nothing is compiled or run. A name with several devices
    means data parallelism: each device has the whole state and a part of the batch.

    Args:
        step, init, batch: as for `plan`.
        chips: names of chips, systems or slices, as for the argument `devices` of `plan`.
        precision: "auto" (default) casts the step with `ft.autocast` to the dtypes that
            `hardware.policy` selects for each chip; "float32", "bfloat16" or "float16" casts it to
            this dtype for all chips; "as written" leaves it alone.
        examples: the rows of an epoch, for the energy and rent of an epoch. Default None: those of
            1,000 steps.

    Returns:
        A `SideBySide`, a table in which each number is marked as exact, published, derived,
        estimated or unverified.

    Raises:
        ValueError: a chip is unknown, `chips` is empty, or the number of rows is not a multiple of
            the number of devices.

    >>> import jax.numpy as jnp
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), {}
    >>> init = lambda key: jax.random.normal(key, (784, 10))
    >>> table = compare(step, init, jax.ShapeDtypeStruct((64, 784), "float32"), ["i7-7700K", "Titan RTX"])
    >>> table.columns[0].time.bound, table.columns[0].count.model_flops
    ('memory', 2007040)
    """
    if not chips:
        raise ValueError(
            "compare: expected at least one name of a chip, such as 'RTX 2080 Ti'; got none"
        )
    batch = jax.tree.map_with_path(_check.shape, batch)
    rows = _check.rows(batch, 1)
    state = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    # Jitted functions are traced once, whatever is made of them.
    plain = Traced(jax.jit(step), state, batch)
    traced: dict[str, Traced] = {}
    columns = []
    for name in chips:
        on = _target(name)
        policy = hw.policy(
            on.chip if precision in ("auto", "as written") else precision, probe=False
        )
        key = "" if precision == "as written" else policy.compute.name
        if key not in traced:
            same = not key or policy.compute == jnp.float32
            cast = plain.step if same else jax.jit(ft.autocast(plain.step, policy))
            traced[key] = plain if same else Traced(cast, state, batch, plain=plain)
        columns.append(_column(name, on, policy, init, traced[key]))
    return SideBySide(
        tuple(columns),
        1000 if examples is None else examples / rows,
        "1,000 steps" if examples is None else "epoch",
    )


def _target(name: str) -> Target:
    try:
        return target(name)
    except ValueError as error:
        raise ValueError(f"compare: {str(error).removeprefix('plan: ')}") from None


def _column(name, on, policy, init, traced) -> OnChips:
    axes = _mesh.sizes(on, None)
    _check.rows(traced.batch, on.count)
    draft = Drafts(on, axes, _mesh.make(on, axes), traced.state, traced.batch, traced, {}, init)
    first, memory = draft.candidate(_OPTIONS[0]), draft.memory
    most = memory and tuple(map(draft.rows, _OPTIONS))
    system = hw.systems[on.name] if on.name in hw.systems else None
    chip: Chip = on.chip
    watts = (system and system.power_watts) or (
        chip.power_watts and chip.power_watts * chip.chips_of(on.count)
    )
    counted = traced.count(_OPTIONS[0])
    peak = chip.peak(counted.dtype) if counted.dtype else None
    values = hw.flop_per_dollar(system if system and system.prices else chip, peak and peak.dtype)
    return OnChips(
        name,
        on,
        policy,
        counted,
        first.time,
        first.estimate.peak,
        memory,
        most,
        _cost.units(traced.batch),
        watts,
        values,
    )


def _price(values) -> Figure:
    if not values:
        return Figure("unknown")
    price = values[0].price
    return Figure(
        f"${price.usd:,.6g} {'an hour' if price.per == 'hour' else f'a {price.per}'} "
        f"({price.date})",
        "published",
    )
