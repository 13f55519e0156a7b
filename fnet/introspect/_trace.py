"""The operations in a trace of `jax.profiler`: when each operation ran, the path of its named
scopes, and its phase (such as forward or backward).

The trace is an XSpace message of XLA's profiler. `jax.profiler.ProfileData` reads its events. The
compiled programs are in the metadata of the trace's plane "/host:metadata", which
`jax.profiler.ProfileData` does not expose.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from fnet._util import _files
from fnet.introspect._hlo import OTHER, Operation, operations
from fnet.introspect._protobuf import fields, text

STEP = "fnet.profile step"  # the annotation around each profiled step


class Event(NamedTuple):
    """One run of an operation on a thread or stream. Times are in nanoseconds of the trace's clock."""

    start: float
    end: float
    operation: Operation
    device: str
    line: str


class Trace(NamedTuple):
    """A trace: the operations that ran, and the time of each profiled step (start, end)."""

    events: tuple[Event, ...]
    steps: tuple[tuple[float, float], ...]

    def save(self, path: str | os.PathLike) -> None:
        """Writes the operations as a trace for ui.perfetto.dev and chrome://tracing. The name of
        each event in the written file is the path of its named scopes and its phase (such as
        forward). The file is compressed if its name ends in .gz."""
        lines = {
            line: number
            for number, line in enumerate(
                dict.fromkeys(("steps", *((event.device, event.line) for event in self.events)))
            )
        }
        origin = min(
            (start for start, _ in self.steps),
            default=min((event.start for event in self.events), default=0),
        )
        rows = [
            {
                "ph": "M",
                "pid": 0,
                "tid": number,
                "name": "thread_name",
                "args": {"name": line if isinstance(line, str) else " ".join(line)},
            }
            for line, number in lines.items()
        ]
        rows += [
            {
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "name": f"step {i}",
                "ts": (start - origin) / 1e3,
                "dur": (end - start) / 1e3,
            }
            for i, (start, end) in enumerate(self.steps)
        ]
        rows += [
            {
                "ph": "X",
                "pid": 0,
                "tid": lines[event.device, event.line],
                "ts": (event.start - origin) / 1e3,
                "dur": (event.end - event.start) / 1e3,
                "cat": event.operation.phase,
                "name": f"{event.operation.path or '(no scope)'} {event.operation.phase}",
                "args": {"operation": event.operation.name, "opcode": event.operation.opcode},
            }
            for event in self.events
        ]
        content = json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}).encode()
        _files.write(Path(path), gzip.compress(content) if str(path).endswith(".gz") else content)


@contextlib.contextmanager
def recording(folder: str | os.PathLike) -> Iterator[None]:
    """Runs JAX's profiler and writes its trace below the folder `folder`.

    Raises:
        RuntimeError: a profiler is already running in this process.
    """
    start(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def start(folder: str | os.PathLike) -> None:
    """Starts JAX's profiler. The profiler records the operations of all devices, but no calls of
    Python functions."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 2
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except RuntimeError as error:
        raise RuntimeError(
            "profile: another profile is running in this process, and JAX runs one at a time; stop "
            f"it first (jax.profiler.stop_trace()): {error}"
        ) from error


def read(folder: str | os.PathLike) -> Trace:
    """Reads the newest trace below a folder.

    Raises:
        ValueError: the folder contains no trace, or the trace has no operations.
    """
    files = sorted(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(f"profile: {folder} contains no trace of jax.profiler (*.xplane.pb)")
    programs = _Programs(files[-1].read_bytes())
    events, steps, started, ended = [], [], {}, []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has no __module__ attribute", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
            lines = list(plane.lines)
            device = plane.name.startswith("/device:")
            if device and any(line.name == "XLA Ops" for line in lines):
                lines = [line for line in lines if line.name == "XLA Ops"]
            for line in lines:
                _line(plane.name, line, programs, events, steps, started, ended)
    for (
        key,
        end,
    ) in ended:  # an operation of several threads ends after the function that started it
        if key in started:
            event = events[started[key]]
            events[started[key]] = event._replace(end=max(event.end, end))
    if not events:
        raise ValueError(
            "profile: the trace has no operations of a compiled program; this JAX backend reports "
            "none"
        )
    return Trace(tuple(events), tuple(sorted(steps)))


def _line(plane, line, programs, events, steps, started, ended) -> None:
    """Adds the operations and steps of one thread or stream to `events` and `steps`.

    An operation can start on one thread and end on another. At the start of an operation, {id of
    the operation: index of its event} is added to `started`. At the end of an operation, (id of the
    operation, end time) is added to `ended`.
    """
    device = plane.startswith("/device:")
    for event in line.events:
        name, begin, end = event.name, event.start_ns, event.start_ns + event.duration_ns
        if name == STEP:
            steps.append((begin, end))
        elif name.startswith("end: "):
            ended.append((dict(event.stats).get("_c", -1), end))
        elif device or "::" not in name:
            stats = dict(event.stats)
            if "hlo_op" in stats or (device and line.name == "XLA Ops"):
                operation = programs(
                    str(stats.get("hlo_op", name)), stats.get("program_id"), stats.get("hlo_module")
                )
                where = f"{plane}:{stats['device_ordinal']}" if "device_ordinal" in stats else plane
                if "_p" in stats:
                    started[stats["_p"]] = len(events)
                events.append(Event(begin, end, operation, where, line.name))


class _Programs:
    """The operations of the compiled programs in a trace. A compiled program in the trace is
    decoded only when an operation is looked up in it for the first time."""

    def __init__(self, space: bytes):
        self._data: dict[tuple[str, int], memoryview] = {}
        self._read: dict[tuple[str, int], dict[str, Operation]] = {}
        for number, plane in fields(memoryview(space)):
            if number != 1:
                continue
            parts = list(fields(plane))
            if any(key == 2 and text(value) == "/host:metadata" for key, value in parts):
                for key, entry in parts:
                    if key == 4:
                        self._add(dict(fields(entry))[2])

    def _add(self, metadata) -> None:
        name, proto = "", None
        for number, value in fields(metadata):
            if number == 2:
                name = text(value)
            elif number == 5:
                proto = dict(fields(value)).get(6, proto)
        if (found := re.fullmatch(r"(.*)\((\d+)\)", name)) and isinstance(proto, memoryview):
            self._data[found[1], int(found[2])] = proto

    def __call__(self, name: str, program: int | None, module: str | None) -> Operation:
        name = name.removeprefix("%").partition(" = ")[0]
        likely = [
            key for key in self._data if program in (None, key[1]) and module in (None, key[0])
        ]
        for key in likely:
            if key not in self._read:
                module = next(
                    (value for number, value in fields(self._data[key]) if number == 1),
                    memoryview(b""),
                )
                self._read[key] = operations(module)
            if name in self._read[key]:
                return self._read[key][name]
        return Operation(name, "", "", OTHER, frozenset(("",)))


def folder() -> tempfile.TemporaryDirectory:
    """Returns a temporary folder for a trace. The temporary folder is removed after the trace was
    read."""
    return tempfile.TemporaryDirectory(prefix="fnet-profile-")
