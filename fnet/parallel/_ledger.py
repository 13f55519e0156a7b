"""The transfers between chips in a compiled program, read from its HLO text after partitioning."""

from __future__ import annotations

import collections
import math
import re
from typing import NamedTuple

import jax

from fnet._util._text_table import aligned
from fnet.jaxpr import scope_of_operation
from fnet.layers._experts_apart import FURTHER

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"^\s+(?:ROOT )?%\S+ = (.*?) ({_KINDS})(-start)?\(")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|called_computations|true_computation|false_computation|"
    r"branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_TRIPS = re.compile(r"known_trip_count[^0-9]*(\d+)")
_CONSTANT = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_LESS = re.compile(r"^\s+ROOT %\S+ = pred\[\]\S* compare\(.*%([\w.\-]+)\), direction=LT")
_CHANNEL = re.compile(
    r"channel_id=(?!1\b)(\d+)"
)  # JAX gives all collectives of shard_map channel 1
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0}


class Transfer(NamedTuple):
    """One collective operation (a transfer between chips) of a compiled program or of an estimate.

    `sent` is the number of bytes that one chip sends for it in one run of the program, such as a
    training step.

    Attributes:
        collective: the kind of the collective, such as "all-reduce", "all-gather",
            "reduce-scatter", "all-to-all" or "collective-permute".
        scope: the path of the named scopes (`jax.named_scope`) that contain the operation, or "" if
            XLA does not state the path. An operation of the backward pass has the path of the
            corresponding forward operation. "conv/avoid_split_image_convolution" is a transfer with
            which the layer "conv" avoids a wrong result of XLA; the script
            `findings/split_image_convolution.sh` shows this wrong result.
        bytes: the size in bytes of the collective's result on one chip.
        group: the number of chips that take part in the collective.
        times: the number of times that one run of the program runs this collective.

    >>> transfer = parallel.Transfer("all-reduce", "head", 1_000_000, group=4, times=2)
    >>> transfer.sent                                          # 2 (4 - 1) / 4 of the bytes, twice
    3000000.0
    """

    collective: str
    scope: str
    bytes: int
    group: int
    times: int

    @property
    def sent(self) -> float:
        """The bytes that one chip sends for it in one run of the program, with the algorithm that
        sends the fewest (Chan et al., 2007, Collective communication, section 4).
        """
        n = self.group
        share = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
        }
        return self.bytes * self.times * share.get(self.collective, 1)


class Ledger(NamedTuple):
    """All transfers between chips in a program, the result of `parallel.ledger`. It prints as a
    table by kind and scope.

    Attributes:
        transfers: a `Transfer` for each collective.

    >>> program = jax.jit(lambda x: 2 * x).lower(jnp.ones(3)).compile()
    >>> parallel.ledger(program).transfers
    ()
    """

    transfers: tuple[Transfer, ...]

    @property
    def sent(self) -> float:
        """The bytes that one chip sends in one run of the program."""
        return sum(transfer.sent for transfer in self.transfers)

    @property
    def bytes(self) -> dict[str, int]:
        """{kind of collective: bytes}, the size of all its results on one chip in one run."""
        found = collections.Counter()
        for transfer in self.transfers:
            found[transfer.collective] += transfer.bytes * transfer.times
        return dict(found)

    def __str__(self):
        if not self.transfers:
            return "nothing is sent"
        rows = collections.defaultdict(lambda: [0, 0.0])
        for transfer in self.transfers:
            row = rows[transfer.collective, transfer.scope]
            row[0] += transfer.times
            row[1] += transfer.sent
        lines = [("collective", "times", "MiB sent", "scope")]
        for (collective, scope), (times, sent) in sorted(rows.items(), key=lambda row: -row[1][1]):
            lines.append((collective, f"{times:,}", f"{sent / 2**20:,.3f}", scope or "(no scope)"))
        return "\n".join(
            [
                f"{self.sent / 2**20:,.3f} MiB sent by each chip in a step",
                "",
                *aligned(lines, left=(0, 3)),
            ]
        )


def ledger(program: jax.stages.Compiled | str) -> Ledger:
    """Lists the transfers between chips in a compiled program, with the bytes that each chip sends.

        print(parallel.ledger(jax.jit(step).lower(state, batch).compile()))

    A collective in a loop counts once for each iteration, or once in all if XLA does not know how
    many there are. Of a conditional, all branches count, except in "further_rounds": these run only
    if the tokens for some experts are far more than the mean, so they count zero times.

    Args:
        program: a compiled program, or the text of its HLO after partitioning.

    Returns:
        A `Ledger`.

    Raises:
        ValueError: the text is not an HLO module.

    >>> program = jax.jit(lambda x: 2 * x).lower(jnp.ones(3)).compile()
    >>> parallel.ledger(program).sent
    0
    """
    text = program if isinstance(program, str) else program.as_text()
    bodies, entry = {}, None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            bodies[name] = []
            entry = name if found[1] else entry
        elif bodies:
            bodies[name].append(line)
    if entry is None:
        raise ValueError(
            f"ledger: expected the HLO of a compiled program; got text that begins with "
            f"{text[:40]!r}"
        )
    default = int(found[1]) if (found := re.search(r"num_partitions=(\d+)", text)) else 1
    transfers: list[Transfer] = []
    at: dict[str, int] = {}  # the index of each channel's transfer
    # On TPUs, a collective may be divided into pieces in one channel.
    pieces = "AsyncCollective" in text

    def enter(name, times):
        for line in bodies.get(name, ()):
            if found := _COLLECTIVE.match(line):
                scope = _scope(line)
                each = Transfer(
                    found[2],
                    scope,
                    _bytes(found[1], found[2], bool(found[3])),
                    _group(line, default),
                    0 if FURTHER in scope.split("/") else times,
                )
                if name.startswith("all-reduce-scatter"):  # the reduce-scatter of TPUs
                    each = each._replace(
                        collective="reduce-scatter", bytes=each.bytes // each.group
                    )
                channel = _CHANNEL.search(line) if pieces else None
                if channel and channel[1] in at:
                    # A transfer may start before a loop and continue in the loop.
                    there = transfers[at[channel[1]]]
                    transfers[at[channel[1]]] = there._replace(
                        bytes=max(there.bytes, each.bytes), times=min(there.times, each.times)
                    )
                    continue
                if channel:
                    at[channel[1]] = len(transfers)
                transfers.append(each)
            trips = _trips(line, bodies) if " while(" in line else 1
            for called in _CALLED.findall(line):
                for inner in re.findall(r"%([\w.\-]+)", called):
                    enter(inner, times * trips)

    enter(entry, 1)
    return Ledger(tuple(transfers))


def _trips(line, bodies) -> int:
    """Returns the number of iterations of a loop. The number of iterations is read from XLA's
    annotation or, without an annotation, from the constant in the loop's condition. If neither
    exists, returns 1.
    """
    if found := _TRIPS.search(line):
        return int(found[1])
    condition = re.search(r"condition=%([\w.\-]+)", line)
    lines = bodies.get(condition[1], ()) if condition else ()
    constants = {found[1]: int(found[2]) for each in lines if (found := _CONSTANT.match(each))}
    less = next((found[1] for each in lines if (found := _LESS.match(each))), None)
    return constants.get(less, 1)


def _bytes(shapes, collective, started):
    sizes = [
        math.prod(map(int, filter(None, dims.split(",")))) * _bits(dtype) / 8
        for dtype, dims in _ARRAY.findall(shapes)
    ]
    if started and collective in ("all-gather", "collective-permute") and len(sizes) > 1:
        # The result of a start operation also lists its operands: (operands, results), and two
        # counters for a permute.
        sizes = sizes[1:2] if collective == "collective-permute" else sizes[len(sizes) // 2 :]
    return math.ceil(sum(sizes))


def _bits(dtype):
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)  # f32, bf16, s8, u4, f8e4m3fn, c64
    return int(found[1]) if found else 32


def _group(line, default):
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(
        r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", line
    ):  # by axes, or parts of axes
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in parts)
    return default


def _scope(line):
    found = re.search(r'op_name="([^"]*)"', line)
    return scope_of_operation(found[1]).path if found else ""
