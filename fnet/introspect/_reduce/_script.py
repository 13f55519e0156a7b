"""Writes a program and its arguments as a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fnet import _jax
from fnet._util import _files
from fnet.introspect._reduce import _arrays
from fnet.introspect._reduce._program import Program, is_spread
from fnet.introspect._reduce._write import WIDTH, Writer

DATA = "repro.npz"


@dataclasses.dataclass
class Script:
    """The text of a script, and the arrays of repro.npz, which may be none."""

    text: str
    data: dict[str, np.ndarray]

    def write(self, path: Path) -> None:
        data = path.parent / DATA
        if self.data:
            with _files.replacing(data) as new, new.open("wb") as file:
                np.savez(file, **self.data)
        elif data.exists():
            data.unlink()
        _files.write(path, self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


class Writing:
    """The parts of a script. `data` collects the arrays of repro.npz."""

    def __init__(self, program: Program):
        self.program = program
        self.data: dict[str, np.ndarray] = {}
        self.writer = Writer()
        self.inputs = self.writer.inputs(program)
        self.mesh = next((x.sharding.mesh for x in program.arrays if is_spread(x)), None)
        self.single = len(program.jaxpr.outvars) == 1

    def script(self, check: Callable[[Writing], list[str]]) -> Script:
        """Returns the script: arguments, the function f, and the lines of `check`.

        Raises:
            Unwritable: an equation cannot be written with public names of JAX.
        """
        arrays = self.arrays()
        functions = self.writer.function("f", self.program, self.inputs)
        body = [*arrays, *functions, *check(self)]
        lines = [line for each in [*self.head("\n".join(body)), *body] for line in wrapped(each)]
        return Script("\n".join([*lines, ""]), self.data)

    def head(self, body: str) -> list[str]:
        modules = ["sys"] + ["time"] * ("time." in body) + ["numpy as np", "jax"]
        modules += ["jax.numpy as jnp"] * ("jnp." in body)
        first = f"import {', '.join(modules)}"
        first += "; from jax import lax" * ("lax." in body)
        first += f"; {_jax.PUBLIC_PRIMITIVES}" * ("primitives." in body)
        if self.mesh is None:
            return [first, *self.loads()]
        sizes, axes = tuple(self.mesh.shape.values()), tuple(self.mesh.axis_names)
        quoted = str(axes).replace("'", '"')
        if self.mesh.devices.flat[0].platform == "cpu":
            devices = f'jax.config.update("jax_num_cpu_devices", {self.mesh.size})'
            together = f"{first}; {devices}"
            begin = [together] if len(together) <= WIDTH else [first, devices]
        else:
            begin = [first]
        return [
            *begin,
            *self.loads(),
            f"mesh = jax.make_mesh({sizes}, {quoted}, (jax.sharding.AxisType.Auto,) * {len(axes)})",
            "at = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))",
        ]

    def loads(self) -> list[str]:
        return [f'data = np.load("{DATA}")'] if self.data else []

    def arrays(self) -> list[str]:
        """The lines that make the arguments; short ones share a line."""
        lines: list[str] = []
        for name, x in zip(self.inputs, self.program.arrays):
            line = f"{name} = {self.array(name, x)}"
            if lines and len(lines[-1]) + len(line) + 2 <= WIDTH:
                lines[-1] += f"; {line}"
            else:
                lines.append(line)
        return lines

    def array(self, name: str, x: Any) -> str:
        """An array as code. A long one goes to the file of data, under a name."""
        written = _arrays.literal(x)
        if written is not None:
            return written
        self.data[name], restored = _arrays.stored(x)
        return f'data["{name}"]{restored}'

    def call(self, *, spread: bool = True) -> str:
        given = []
        for name, x in zip(self.inputs, self.program.arrays):
            axes = _arrays.placement(x) if spread else None
            given.append(name if axes is None else f"at({', '.join(filter(None, (name, axes)))})")
        return f"f({', '.join(given)})"


def evaluation(program: Program, file: str) -> Script:
    """Returns a script that stores the results of a program in a file of NumPy."""
    return Writing(program).script(
        lambda writing: [f'np.savez("{file}", *map(np.asarray, jax.tree.leaves({writing.call()})))']
    )


def wrapped(line: str) -> list[str]:
    """Breaks a line that is too long after a comma inside brackets."""
    if len(line) <= WIDTH:
        return [line]
    breaks, depth = [], 0
    for i, letter in enumerate(line[: WIDTH - 1]):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth > 0 and line[i + 1 : i + 2] == " ":
            breaks.append((depth, -i))
    if not breaks:
        return [line]
    inside = [i for depth, i in breaks if depth <= min(breaks)[0] + 1]
    at = -min(inside)
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return [line[: at + 1], *wrapped(indent + line[at + 1 :].strip())]
