"""The catalog of chips, read from chips.json on first use."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

from fnet._util._nearest import similarity
from fnet.hardware._chip import Chip, FrozenTable, Links, Price, Quote
from fnet.hardware._latency import Latency, read_latency

_GIB = 2**30
_FIGURES = (  # what "unverified": ["all"] in chips.json means, beside the peaks
    "memory_bytes",
    "memory_kind",
    "caches",
    "bandwidth",
    "links",
    "power_watts",
    "clock",
    "units",
    "device_kinds",
    "year",
)


@dataclasses.dataclass(frozen=True)
class System:
    """Several chips that are sold or rented together, such as a DGX-1, a TPU board or a pod.

    Attributes:
        name: the name in the catalog.
        chip: the `Chip` of which it consists.
        count: the number of chips.
        year: the year of its introduction, or None if unknown.
        quoted: published peaks of the whole system, `Quote` objects.
        prices: prices of the whole system, `Price` objects.
        power_watts: the power of the whole system in watts, or None if unknown.
        power_source: where `power_watts` was published.

    >>> system = hw.systems["TPU v3-8"]
    >>> system.count, system.chip.name
    (4, 'TPU v3')
    """

    name: str
    chip: Chip
    count: int
    year: int | None = None
    quoted: tuple[Quote, ...] = ()
    prices: tuple[Price, ...] = ()
    power_watts: float | None = None
    power_source: str = ""

    def flops(self, dtype: Any) -> float | None:
        """Returns the peak rate of all chips together in FLOP/s, or None if they have none for
        `dtype`.
        """
        peak = self.chip.peak(dtype)
        return peak and peak.flops * self.count


def _short(name: str) -> str:
    """Returns a name without the words in parentheses."""
    return re.sub(r"\s*\(.*\)", "", name)


class _Catalog(Mapping):
    """A mapping from names to chips or systems, read on first use. A lookup ignores case and words
    in parentheses."""

    def __init__(self, what: str, read: Callable[[], Iterable[Any]]):
        self._what, self._read = what, read

    @functools.cached_property
    def _rows(self) -> dict[str, Any]:
        return {row.name: row for row in self._read()}

    @functools.cached_property
    def _index(self) -> dict[str, str]:
        index: dict[str, str] = {}
        same = collections.Counter(map(_short, self._rows))
        for name, row in self._rows.items():
            keys = [name, *getattr(row, "aliases", ()), *getattr(row, "device_kinds", ())]
            if same[_short(name)] == 1:
                keys.insert(1, _short(name))
            for key in keys:
                index.setdefault(key.lower(), name)
        return index

    def __getitem__(self, name: str) -> Any:
        try:
            return self._rows[self._index[name.strip().lower()]]
        except KeyError:
            raise KeyError(self._unknown(name)) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.strip().lower() in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"<{len(self)} {self._what}s: {', '.join(self)}>"

    def nearest(self, name: str, n: int = 3) -> list[str]:
        """Returns the `n` names that are most similar to `name`, the most similar first."""
        want = name.strip().lower()
        score = {key: similarity(want, key) + 0.5 * (want in key) for key in self._index}
        best = sorted(self._index, key=score.__getitem__, reverse=True)
        return list(dict.fromkeys(self._index[key] for key in best))[:n]

    def variants(self, name: str) -> list[str]:
        """Returns the names in the catalog that contain `name` as one or several complete words.
        For example, `variants("V100")` returns four names."""
        whole = re.compile(rf"(?<!\w){re.escape(name.strip())}(?!\w)", re.IGNORECASE)
        return [each for each in self if name.strip() and whole.search(each)]

    def _unknown(self, name: str) -> str:
        variants = self.variants(name)
        if len(variants) > 1:
            names = ", ".join(map(repr, variants))
            return f"the catalog has {len(variants)} {self._what}s {name!r}: {names}; choose one"
        similar = ", ".join(map(repr, self.nearest(name)))
        return f"the catalog has no {self._what} {name!r}; the most similar names are {similar}"


class Chips(_Catalog):
    """The catalog: a mapping from names to `Chip`s, in the order of the file chips.json.

    A name in `chips[name]` is that of a chip, an alias, or a device kind of the catalog. Words in
    parentheses at its end, as in "TPU v6e (Trillium)", may be left out unless several chips share
    the rest. `chips.find(kind)` also takes some device kinds that are not in the catalog, such as
    that of a MIG slice, a part of an NVIDIA GPU.
    """

    def find(self, kind: str) -> Chip:
        """Returns the chip whose `jax.Device.device_kind` is `kind`.

        For a MIG slice ("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), it is scaled to the multiprocessors
        and the memory of the slice. "VF" (virtual function) at the end of AMD names is ignored.

        Raises:
            KeyError: no chip has this device kind. The message lists the most similar names.

        >>> from fnet import hardware as hw
        >>> hw.chips.find("NVIDIA H100 80GB HBM3").name
        'H100 SXM5 80GB'
        """
        plain, slice_ = split_mig(kind)
        candidates = (
            plain,
            re.sub(r"\s+VF$", "", plain),
            f"NVIDIA {plain}",
            plain.removeprefix("NVIDIA "),
        )
        for candidate in candidates:
            if candidate in self:
                chip = self[candidate]
                return _slice(chip, slice_) if slice_ else chip
        raise KeyError(self._unknown(kind))


def split_mig(kind: str) -> tuple[str, tuple[int, float, str] | None]:
    """Separates the suffix of a MIG slice (a part of an NVIDIA GPU) from a device kind. Returns two
    values: the device kind without the suffix, and the tuple (number of compute slices, memory in
    GiB, suffix). The second value is None if the device kind has no MIG suffix."""
    match = re.search(r"\s+MIG\s+((?:(\d+)c\.)?(\d+)g\.(\d+)gb\S*)$", kind)
    if not match:
        return kind.strip(), None
    compute = int(match[2] or match[3])
    return kind[: match.start()].strip(), (compute, float(match[4]), f"MIG {match[1]}")


def _slice(chip: Chip, slice_: tuple[int, float, str]) -> Chip:
    """Returns a MIG slice of a chip: `slice_` is (compute slices, memory in GiB, suffix of the
    name)."""
    g, gib, suffix = slice_
    total = chip.units.get("multiprocessors")
    visible = raw()["mig_multiprocessors"].get(chip.architecture or "", {}).get(str(g))
    units = chip.units
    why = f"{g} of 7 compute slices"
    if visible:
        units = FrozenTable({**chip.units, "multiprocessors": visible})
        why = f"{visible} of {total} multiprocessors"
    compute = visible / total if visible and total else g / 7
    memory = gib * _GIB / chip.memory_bytes if chip.memory_bytes else g / 8
    memory = max(1, round(memory * 8)) / 8  # memory and bandwidth are divided into eighths
    return dataclasses.replace(
        chip.scaled(compute, memory, basis="estimated"),
        name=f"{chip.name} {suffix}",
        prices=(),
        quoted=(),
        links=None,
        power_watts=None,
        units=units,
        notes=f"A slice: {why}, {memory:.3g} of the memory. {chip.notes}",
    )


@functools.cache
def raw() -> dict[str, Any]:
    """Returns the content of chips.json (the catalog of chips), in the vendors' units."""
    return json.loads(
        resources.files("fnet.hardware").joinpath("chips.json").read_text(encoding="utf-8")
    )


def _fields(cls: type, row: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries of `row` (a chip or system of the catalog) whose keys are fields of the
    dataclass `cls`. Lists become tuples."""
    known = {field.name: row[field.name] for field in dataclasses.fields(cls) if field.name in row}
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in known.items()
    }


def _system(row: dict[str, Any]) -> System:
    fields = dict(chip=chips[row["chip"]], quoted=_quotes(row), prices=_prices(row))
    return System(**_fields(System, row) | fields)


def _chip(row: dict[str, Any]) -> Chip:
    units = dict(row["units"])
    if "flop_per_cycle" in units:
        units["flop_per_cycle"] = FrozenTable(units["flop_per_cycle"])
    fields = _fields(Chip, row) | dict(
        known=True,
        architecture=row.get("architecture") or units.get("isa"),
        peaks=FrozenTable({name: tera * 1e12 for name, tera in row["peak_tflops"].items()}),
        memory_bytes=row["memory_gib"] * _GIB if "memory_gib" in row else None,
        caches=FrozenTable({name: mib * 2**20 for name, mib in row.get("caches_mib", {}).items()}),
        bandwidth=_giga(row, "bandwidth_gbs"),
        links=_links(row),
        latency=latency_of(row["kind"], row["vendor"], row.get("latency", {})),
        prices=_prices(row),
        quoted=_quotes(row),
        explained=FrozenTable(row.get("explained", {})),
        units=FrozenTable(units),
        bases=FrozenTable(_bases(row)),
    )
    return Chip(**fields)


def _bases(row: dict[str, Any]) -> dict[str, str]:
    """Returns {field or dtype: basis}. A field without an entry is published, see `Chip.basis`."""
    bases = dict.fromkeys(row["peak_tflops"], "published")
    bases |= dict.fromkeys(row.get("derived", ()), "derived")
    unverified = row.get("unverified", ())
    if "all" in unverified:
        unverified = {*_FIGURES, *bases}
    return bases | dict.fromkeys(unverified, "unverified") | {"latency": "estimated"}


def _links(row: dict[str, Any]) -> Links | None:
    links = row.get("links")
    if not links:
        return links
    rates = {name: _giga(links, f"{name}_gbs") for name in ("each_way", "total", "network")}
    return Links(**_fields(Links, links) | rates)


def latency_of(kind: str, vendor: str, own: Mapping[str, Any] = FrozenTable()) -> Latency | None:
    """Returns what steps cost on a kind of chip; `own` has the figures of one chip."""
    tables = raw()["latency"]
    shared = tables.get(vendor if kind == "gpu" else kind)
    return read_latency({**shared, **own}) if shared else None


def _giga(table: dict[str, Any], key: str) -> float | None:
    return table[key] * 1e9 if table.get(key) is not None else None


def _prices(row: dict[str, Any]) -> tuple[Price, ...]:
    return tuple(Price(**price) for price in row.get("prices", ()))


def _quotes(row: dict[str, Any]) -> tuple[Quote, ...]:
    return tuple(
        Quote(
            quote["dtype"],
            quote["tflops"] * 1e12,
            quote["source"],
            quote.get("explanation", ""),
            quote.get("at_boost", False),
        )
        for quote in row.get("quoted", ())
    )


chips = Chips("chip", lambda: map(_chip, raw()["chips"]))
systems = _Catalog("system", lambda: map(_system, raw()["systems"]))
