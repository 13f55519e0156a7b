"""Locks: what a step computes, its values and its cost, as a file for later comparisons."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fnet
from fnet import jaxpr, parallel
from fnet._util import _files
from fnet._util._units import si
from fnet.cost._count import count_jaxpr
from fnet.introspect._lock import _parameters, _text
from fnet.introspect._lock._build import KEPT, build, digest
from fnet.introspect._lock._program import Program
from fnet.introspect._lock._sketch import add_sketches
from fnet.jaxpr import Traced, flatten
from fnet.parallel._estimate import NOWHERE, estimate
from fnet.transforms._modules import items_of

_NUMBERS = ("peak", "moved", "sent")


@dataclasses.dataclass(frozen=True)
class Lock:
    """What a step computes, as `lock` records it. It prints as a few lines, and `save` writes it.

    Attributes:
        step: the name of the step.
        made: the versions that recorded it, and the platform, such as "jax 0.12.0, fnet 0.3.0, cpu".
        program: its equations, as a graph.
        peak: the estimated peak memory of a device in bytes, with the arguments.
        moved: the estimated bytes that the step reads from and writes to memory.
        sent: the estimated bytes that a device sends to others in a step, 0 without a plan.
        plan: how the plan divides the step: lines of text.
        shardings: those that jitted functions in the step state: lines of text.
        target: what `fnet lock` was called with, for `fnet diff`.
        notes: what the lock does not contain, and why.

    >>> print(introspect.lock(jnp.tanh, jnp.ones((2, 3))))
    tanh: 1 equation in 1 layer, 0 FLOPs in products, 6 FLOPs in the rest; peak 24 B
    """

    step: str
    made: str
    program: Program = dataclasses.field(repr=False)
    peak: int
    moved: int
    sent: int
    plan: tuple[str, ...] = ()
    shardings: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The content of the file that `save` writes."""
        head = {
            "step": [self.step],
            "made": [self.made],
            "target": self.target,
            **{name: [str(getattr(self, name))] for name in _NUMBERS},
            "plan": self.plan,
            "shardings": self.shardings,
            "note": self.notes,
        }
        return _text.write(head, self.program)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the lock to a file, which `read_lock` reads. Equal steps give equal bytes."""
        _files.write(Path(path), self.text)

    def __str__(self) -> str:
        nodes = [node for node in self.program.nodes if node.op != "input"]
        layers = {node.section.path for node in nodes}
        matmul, other = sum(node.matmul for node in nodes), sum(node.other for node in nodes)
        counted = f"{len(nodes)} equation{'s'[: len(nodes) != 1]}"
        where = f"{len(layers)} layer{'s'[: len(layers) != 1]}"
        return (
            f"{self.step}: {counted} in {where}, {si(matmul)}FLOPs in products, {si(other)}FLOPs "
            f"in the rest; peak {si(self.peak)}B"
        )


def lock(
    step: Callable,
    *args: Any,
    plan: parallel.Plan | None = None,
    values: bool = True,
    target: Sequence[str] = (),
    **kwargs: Any,
) -> Lock:
    """Records what a step computes, so that `diff` can say what an upgrade of JAX, or a change of
    the code, has changed.

        introspect.lock(step, state, batch).save("step.lock")                    # before the upgrade
        print(introspect.diff("step.lock", introspect.lock(step, state, batch)))     # after it

    The lock has each equation, by layer, in a form that depends neither on the version of JAX, nor
    on the names of functions, variables and parameters, nor on the order of independent statements
    (computations without use and no-ops are left out); its FLOPs; and, where a value leaves a layer, a
    few numbers from a run that say which values it has. Values inside loops are not among them.

    Args:
        step: any JAX function, such as a training step.
        args, kwargs: its arguments. The step runs three times on them, of which two have other last
            digits, to see how much rounding matters. Arrays that are only described, as
            `jax.ShapeDtypeStruct`s, are drawn: from a normal distribution, and 0 and 1 for integers.
        plan: the plan of the step. The lock then has the shardings, and the peak memory and the
            transfers of the plan's estimate. Default None: peak memory on one device.
        values: whether to run the step. A step with side effects never runs. Default True.
        target: lines of text that `diff` ignores.

    Returns:
        A `Lock`.

    Raises:
        ValueError: an argument has a symbolic size.

    >>> f = lambda x: jnp.tanh(2 * x)
    >>> def g(values):
    ...     doubled = values * 2
    ...     return jax.jit(jnp.tanh)(doubled)
    >>> introspect.diff(introspect.lock(f, jnp.ones(3)), introspect.lock(g, jnp.ones(3))).same
    True
    """
    jaxpr.check_function("lock", step)
    _check_sizes((args, kwargs))
    traced = Traced(step, args, kwargs)
    closed = flatten(traced.closed, kept=KEPT)
    inputs, outputs = traced.names()
    program, sources = build(closed, inputs, outputs)
    notes = []
    if traced.closed.jaxpr.effects and values:
        notes.append("no values, because the step has side effects")
    elif values:
        add_sketches(program, sources, closed, traced.arrays)
    else:
        notes.append("no values: they were not asked for")
    if plan is None:
        estimated = estimate(traced.closed, [NOWHERE] * len(traced.arrays), {})
    else:
        estimated = plan.chosen.estimate
    transfers = (*estimated.ledger.transfers, *estimated.between.transfers)
    return Lock(
        getattr(step, "__name__", type(step).__name__),
        _versions(),
        program,
        estimated.peak,
        count_jaxpr(traced.closed).total.fused_bytes,
        round(sum(each.sent for each in transfers)) if plan else 0,
        _planned(plan) if plan else (),
        _shardings(traced.closed),
        tuple(target),
        tuple(notes),
    )


def _check_sizes(arguments: Any) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(arguments)[0]:
        shape = getattr(x, "shape", ())
        if not all(isinstance(size, int | np.integer) for size in shape):
            raise ValueError(
                f"lock: the argument {jax.tree_util.keystr(path[1:])} has the shape {shape}; expected "
                "numbers. Lock the step with a batch of a fixed size"
            )


def step_arguments(step: Callable, state: Any, batch: Any) -> tuple:
    """Returns the arguments of a step `step(state, batch)`, or of one whose arguments are the items
    of the state."""
    items = items_of(step, state)
    return (*state, batch) if items else (state, batch)


def read_lock(path: str | os.PathLike) -> Lock:
    """Reads a lock file that `Lock.save` wrote. Nothing in the file is executed.

    Args:
        path: the file.

    Returns:
        The `Lock`.

    Raises:
        ValueError: the file is no lock file, has an unknown version, or was changed.
        OSError: the file cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     introspect.lock(jnp.tanh, jnp.ones((2, 3))).save(f"{folder}/tanh.lock")
    ...     introspect.read_lock(f"{folder}/tanh.lock").step
    'tanh'
    """
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError:
        raise _text.Damaged(f"{path} is no lock file: it is not text in UTF-8") from None
    head, program = _text.parse(text, str(path))
    many = lambda name: tuple(head.get(name, ()))
    try:
        numbers = [int(head[name][0]) for name in _NUMBERS]
        return Lock(
            head["step"][0],
            head["made"][0],
            program,
            *numbers,
            many("plan"),
            many("shardings"),
            many("target"),
            many("note"),
        )
    except (KeyError, ValueError) as error:
        raise _text.Damaged(f"{path} cannot be read: its head lacks {error}") from None


def _versions() -> str:
    return f"jax {jax.__version__}, fnet {fnet.__version__}, {jax.default_backend()}"


def _planned(plan: parallel.Plan) -> tuple[str, ...]:
    """Returns the devices, the strategy, the mesh, and the sharding of each array that is split."""
    mesh = ", ".join(f"{name}={size}" for name, size in dict(plan.mesh.shape).items())
    lines = [f"{plan.target}, {plan.strategy}, mesh {mesh}"]
    for place, tree in (("state", plan.state), ("batch", plan.batch)):
        for path, sharding in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if any(axis is not None for axis in sharding.spec):
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                lines.append(f"{place}/{name} {_parameters.text('', digest, spec=sharding)}")
    return tuple(lines)


def _shardings(closed: Any) -> tuple[str, ...]:
    lines = [
        _stated(**eqn.params)
        for eqn in jaxpr.equations(closed.jaxpr)
        if jaxpr.call_name(eqn) is not None and jaxpr.has_shardings(eqn)
    ]
    return tuple(dict.fromkeys(lines))


def _stated(*, in_shardings: Any, out_shardings: Any, **_: Mapping) -> str:
    return _parameters.text("", digest, arguments=in_shardings, results=out_shardings)
