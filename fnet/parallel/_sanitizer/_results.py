"""What `parallel.check` returns: the equations that XLA divides wrongly."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable

import jax
import jaxlib
import numpy as np
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.parallel._sanitizer import _spelled

_STATUS = {
    "aborts": "ends the process",
    "hangs": "does not end",
    "raises": "raises an error on several devices alone",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """An equation whose result on several devices is not that of one device.

    Attributes:
        primitive: the name of the equation's primitive, such as "conv_general_dilated".
        scope: the path of the layer, such as "stage2/conv"; "" outside of all named scopes.
        phase: "forward", "backward" or "recomputed".
        line: the line of the code that made the equation, such as "model.py:58 (forward)".
        what: "the result", "the gradient of input 1", ...
        status: "wrong", "aborts" (the process ends), "hangs" or "raises".
        error: the largest difference, relative to the largest element; 0.0 unless it is "wrong".
        factor: by how much the result is too large, if by the same factor everywhere, or None.
        text: the elements that differ, or what XLA said.
        mesh: {axis: length}.
        program: the equation as a function of arrays, or its gradient as a function of its inputs
            and cotangents. It returns a list.
        arguments: arrays with which the program shows the error.
        shardings: the `PartitionSpec` of each argument. None: XLA chooses.
        out_shardings: the `PartitionSpec` of each result, or None.
        modes: where the cotangents and results lay when the error was seen.
        known: the names of the scripts in `findings/` that may explain it.
        times: the number of equations of the step that are alike.
        code: the program by `jax.export`, in base64.
        written: the program as an expression of plain JAX, or "".
        count: the number of arguments that are inputs of the equation; the others are cotangents.

    >>> from jax.sharding import PartitionSpec as P
    >>> gradient = jax.grad(lambda x: (x[1::2] ** 2).sum())
    >>> found = parallel.check(gradient, jnp.ones(12), mesh={"data": 4}, shardings=P("data"))
    >>> [(each.primitive, each.known) for each in found.findings]
    [('slice', ('interior_padding',)), ('pad', ('interior_padding',))]
    """

    primitive: str
    scope: str
    phase: str
    line: str
    what: str
    status: str
    error: float
    factor: float | None
    text: str
    mesh: dict[str, int]
    program: Callable = dataclasses.field(repr=False)
    arguments: tuple = dataclasses.field(repr=False)
    shardings: tuple[P | None, ...]
    out_shardings: tuple[P | None, ...]
    modes: tuple[str, ...]
    known: tuple[str, ...]
    times: int
    code: str = dataclasses.field(repr=False)
    written: str = dataclasses.field(repr=False)
    count: int = dataclasses.field(repr=False)

    def explain(self) -> str:
        """Says in a few lines what is wrong, and where."""
        where = f" in {self.scope}" if self.scope else ""
        line = f" ({self.line})" if self.line else ""
        times = f", {self.times} equations of this kind" if self.times > 1 else ""
        mesh = ", ".join(f"{name}={length}" for name, length in self.mesh.items())
        places = ", ".join(map(_placed, self.shardings))
        known = ""
        if self.known:
            known = f"; known as {' or '.join(self.known)}, which plan.jit avoids"
        lines = [
            f"{self.primitive}{where}{line}{times}: {self._fault()}{known}",
            f"  mesh {mesh}; arguments {places}; {'; '.join(self.modes)}",
            f"  {self.text}",
        ]
        return "\n".join(lines)

    def _fault(self) -> str:
        if self.status != "wrong":
            return f"{self.what} {_STATUS[self.status]}"
        if self.factor is not None:
            return f"{self.what} is multiplied by {self.factor:g}"
        return f"{self.what} is wrong by {self.error:.2g} of its largest element"

    def script(self) -> str:
        """Returns a script of plain JAX that shows the error. Its exit code is 0 if it does."""
        values = [_spelled.array(x) for x in self.arguments]
        function = (
            _SPELLED.format(expression=self.written)
            if self.written
            else _EXPORTED.format(code="\n".join(textwrap.wrap(self.code, 100)))
        )
        backward = len(self.arguments) > self.count
        if backward:
            function += _GRADIENT.format(count=self.count)
        return _SCRIPT.format(
            title=self.explain().replace("\\", "/"),
            function=function,
            devices=int(np.prod(list(self.mesh.values()))),
            lengths=tuple(self.mesh.values()),
            names=tuple(self.mesh),
            rank=len(self.mesh),
            run="gradient" if backward else "f",
            primitives=_jax.PUBLIC_PRIMITIVES,
            x64=bool(jax.config.jax_enable_x64),
            arguments="".join(f"    {value},\n" for value in values),
            inputs="".join(f"{_placed(spec, 'place')}, " for spec in self.shardings),
            outputs="".join(f"{_placed(spec, 'place')}, " for spec in self.out_shardings),
        )

    __str__ = explain


def _placed(spec: P | None, name: str = "P") -> str:
    if spec is None:
        return "None" if name == "place" else "free"
    return f"{name}({', '.join(map(repr, spec))})"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of `parallel.check`. `print(result)` says what is wrong.

    Attributes:
        equations: the number of equations of the step, those inside of loops and calls included.
        divided: how many of them XLA divides.
        different: how many different ones these are: those that differ in the operation, its
            options, the shapes or the shardings.
        runs: how often these ran, forward and gradient, with other places of cotangents and
            results.
        findings: a `Finding` for each that differs from one device.
        skipped: (primitive, scope, why) for each divided equation that was not run.
        mesh: {axis: length}.

    >>> nothing = parallel.Checked(3, 2, 1, 4, findings=(), skipped=(), mesh={"data": 4})
    >>> nothing.ok
    True
    """

    equations: int
    divided: int
    different: int
    runs: int
    findings: tuple[Finding, ...]
    skipped: tuple[tuple[str, str, str], ...]
    mesh: dict[str, int]

    @property
    def ok(self) -> bool:
        """Whether nothing differs from one device."""
        return not self.findings

    def check(self) -> None:
        """Raises ValueError, with the findings, if there are some."""
        if not self.ok:
            raise ValueError(f"parallel.check: {self}")

    def explain(self) -> str:
        """Says what was run, what is wrong, and what was not run."""
        devices = " x ".join(map(str, self.mesh.values()))
        wrong = f"{len(self.findings)} {'is' if len(self.findings) == 1 else 'are'} wrong"
        lines = [
            f"{self.different} different equations that XLA divides ({self.divided} of "
            f"{self.equations}) ran on {devices} devices and on one, forward and gradient, "
            f"{self.runs} runs, with jaxlib {jaxlib.__version__}: "
            f"{wrong + ':' if self.findings else 'all are equal up to rounding.'}"
        ]
        lines += [textwrap.indent(str(finding), "  ") for finding in self.findings]
        reasons = Counter((primitive, why) for primitive, _, why in self.skipped)
        lines += [
            f"not run: {primitive} ({count}), because {why}"
            for (primitive, why), count in reasons.items()
        ]
        return "\n".join(lines)

    __str__ = explain


_SPELLED = """

def f(*x):
    return {expression}
"""
_EXPORTED = '''

import base64  # noqa: E402
from jax import export  # noqa: E402

CODE = """
{code}
"""  # the equation, as jax.export writes it
f = export.deserialize(bytearray(base64.b64decode(CODE))).call
'''
_GRADIENT = """

def inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def gradient(*arrays):
    x, cotangents = list(arrays[:{count}]), list(arrays[{count}:])
    live = [i for i in range({count}) if inexact(x[i])]

    def of_live(*values):
        for i, value in zip(live, values):
            x[i] = value
        return [y for y in f(*x) if inexact(y)]

    return jax.vjp(of_live, *(x[i] for i in live))[1](cotangents)
"""
_SCRIPT = '''"""{title}
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
{primitives}
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_enable_x64", {x64})
inf, nan = np.inf, np.nan
mesh = Mesh(np.array(jax.devices()[:{devices}]).reshape({lengths}), {names}, axis_types=(AxisType.Auto,) * {rank})


def place(*axes):
    return NamedSharding(mesh, P(*axes))
{function}

run = {run}
arguments = (
{arguments})
one = jax.jit(lambda *x: list(run(*x)))(*arguments)
many = jax.jit(
    lambda *x: list(run(*x)), in_shardings=({inputs}), out_shardings=[{outputs}]
)(*arguments)

print(f"Python {{sys.version.split()[0]}}, jax {{jax.__version__}}, jaxlib {{jaxlib.__version__}}")
wrong = False
for i, (a, b) in enumerate(zip(map(np.asarray, one), map(np.asarray, many))):
    equal = np.allclose(b.astype(a.dtype), a, rtol=1e-3, atol=1e-3, equal_nan=True)
    wrong |= not equal
    if not equal:
        print("result", i)
        print("one device:     ", a.ravel()[:8])
        print("several devices:", b.ravel()[:8])
print("the results differ" if wrong else "the results are equal")
sys.exit(not wrong)
'''
