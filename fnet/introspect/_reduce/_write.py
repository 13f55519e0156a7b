"""Writes a program as a Python function of `jax.numpy` and `jax.lax` calls."""

from __future__ import annotations

import itertools
import keyword
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.introspect._reduce import _arrays
from fnet.introspect._reduce._program import Program, evaluated, is_number
from fnet.introspect._reduce._spell import Unwritable, spelled, text
from fnet.jaxpr import bodies, opened_calls, options, scan

WIDTH = 100
_TAKEN = {"jax", "jnp", "lax", "np", "os", "sys", "mesh", "at", "data", "primitives"}
_SAME = {"add_any": "add"}  # primitives of derivatives, and the ones that compute the same
_PLACES = ("sharding", "out_sharding", "weak_type", "accuracy", "dimensions", "out_dtype", "unroll")


def names() -> Iterator[str]:
    """a, b, ..., z, aa, ab, ..."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            name = "".join(letters)
            if (
                name not in _TAKEN
                and not keyword.iskeyword(name)
                and name not in ("f", "g", "k", "x", "y")
            ):
                yield name


class Writer:
    """Writes the functions of a script, whose names are all different."""

    def __init__(self) -> None:
        self._names = names()
        self._spelled: dict[str, tuple[str, bool]] = {}
        self._functions = (f"step{i or ''}" for i in itertools.count())

    def inputs(self, program: Program) -> list[str]:
        return [next(self._names) for _ in program.jaxpr.invars]

    def function(self, name: str, program: Program, inputs: Sequence[str]) -> list[str]:
        """The lines of the function `name` of arrays with the names `inputs`."""
        env = dict(zip(program.jaxpr.invars, inputs))
        lines, results = self.body(program.jaxpr, env, last=True)
        given = ", ".join(inputs)
        if not lines:
            return [f"{name} = jax.jit(lambda {given}: {results})"]
        inside = [f"    {line}" for line in [*lines, f"return {results}"]]
        return ["@jax.jit", f"def {name}({given}):", *inside]

    def body(self, jaxpr: Any, env: dict, *, last: bool) -> tuple[list[str], str]:
        """The lines of a jaxpr, and the text of its results."""
        lines: list[str] = []
        for i, eqn in enumerate(jaxpr.eqns):
            operands = [self._atom(v, env) for v in eqn.invars]
            short = [self._short(v, env) for v in eqn.invars]
            more, value, many = self._equation(eqn, operands, short)
            lines += more
            ends = last and i == len(jaxpr.eqns) - 1 and jaxpr.outvars == eqn.outvars
            if ends and not more:
                single = len(eqn.outvars) == 1 and many
                return lines, f"{value}[0]" if single else value
            targets = ["_" if _jax.is_dropped(v) else next(self._names) for v in eqn.outvars]
            env |= dict(zip(eqn.outvars, targets))
            lines.append(f"{_tuple(targets) if many else targets[0]} = {value}")
        results = [self._atom(v, env) for v in jaxpr.outvars]
        return lines, results[0] if len(results) == 1 and last else _tuple(results)

    def _atom(self, v: Any, env: Mapping) -> str:
        if not isinstance(v, _jax.Literal):
            return env[v]
        x = np.asarray(v.val).astype(v.aval.dtype)
        return _arrays.literal(x) or _arrays.listed(x)

    def _short(self, v: Any, env: Mapping) -> str:
        """The same, with a literal as a number of Python, whose dtype adapts."""
        if not isinstance(v, _jax.Literal) or v.aval.dtype == bool or np.ndim(v.val):
            return self._atom(v, env)
        number = _arrays.number(np.asarray(v.val).astype(v.aval.dtype))
        if jnp.issubdtype(v.aval.dtype, jnp.floating) and number.lstrip("-").isdigit():
            number += ".0"
        return f"({number})" if number.startswith("-") else number

    def _equation(
        self, eqn: Any, operands: list[str], short: list[str]
    ) -> tuple[list[str], str, bool]:
        """Returns lines before an equation, its expression, and whether that is a tuple."""
        write = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if eqn.primitive.name in write:
            return *write[eqn.primitive.name](eqn, operands), True
        if _only_changes_weak_type(eqn):
            return [], operands[0], False
        return [], *self._spell(eqn, operands, short)

    def _spell(self, eqn: Any, operands: list[str], short: list[str]) -> tuple[str, bool]:
        """The first expression that traces to the equation, and whether it is a tuple."""
        types = [(str(v.aval), isinstance(v, _jax.Literal)) for v in eqn.invars]
        repeats = [operands.index(operand) for operand in operands]
        key = str((eqn.primitive.name, eqn.params, types, repeats, operands))
        if key not in self._spelled:
            self._spelled[key] = _first_exact(eqn, operands, short)
        return self._spelled[key]

    def _inner(self, closed: Any, names: Sequence[str]) -> tuple[list[str], list[str], Any]:
        """The lines of the body of a loop, its constants first, and the names of its results."""
        lines, env = [], dict(zip(closed.jaxpr.invars, names))
        for v, x in zip(closed.jaxpr.constvars, closed.consts):
            env[v] = next(self._names)
            lines.append(f"{env[v]} = {_arrays.literal(x) or _arrays.listed(x)}")
        more, _ = self.body(closed.jaxpr, env, last=False)
        return [*lines, *more], [self._atom(v, env) for v in closed.jaxpr.outvars], env

    def _scan(self, eqn: Any, operands: list[str]) -> tuple[list[str], str]:
        parts = scan(eqn)
        consts, carry, slices = parts.split(operands)
        inner = [[next(self._names) for _ in each] for each in (carry, slices)]
        lines, results, _ = self._inner(parts.closed, [*consts, *inner[0], *inner[1]])
        name = next(self._functions)
        unpack = f"{_tuple(inner[0])}, {_tuple(inner[1])} = carry, xs"
        used = [unpack] if carry or slices else []
        end = f"return {_tuple(results[: parts.carry])}, {_tuple(results[parts.carry :])}"
        reverse = ", reverse=True" if parts.options.get("reverse") else ""
        call = (
            f"lax.scan({name}, {_tuple(carry)}, {_tuple(slices)}, length={parts.length}{reverse})"
        )
        head = f"def {name}(carry, xs):"
        targets = [next(self._names) for _ in range(2)]
        return [
            head,
            *(f"    {line}" for line in [*used, *lines, end]),
            f"{targets[0]}, {targets[1]} = {call}",
        ], f"(*{targets[0]}, *{targets[1]})"

    def _while(self, eqn: Any, operands: list[str]) -> tuple[list[str], str]:
        loop = options(eqn)
        a, b = loop.cond_nconsts, loop.cond_nconsts + loop.body_nconsts
        carry, lines, functions = operands[b:], [], []
        for closed, consts in (
            (bodies(eqn)[0].closed, operands[:a]),
            (bodies(eqn)[1].closed, operands[a:b]),
        ):
            inner = [next(self._names) for _ in carry]
            inside, results, _ = self._inner(closed, [*consts, *inner])
            name = next(self._functions)
            functions.append(name)
            ends = results[0] if not functions[1:] else _tuple(results)
            lines += [
                f"def {name}(carry):",
                f"    {_tuple(inner)} = carry",
                *(f"    {line}" for line in inside),
                f"    return {ends}",
            ]
        return lines, f"lax.while_loop({functions[0]}, {functions[1]}, {_tuple(carry)})"

    def _cond(self, eqn: Any, operands: list[str]) -> tuple[list[str], str]:
        lines, functions = [], []
        for branch in bodies(eqn):
            inner = [next(self._names) for _ in operands[1:]]
            inside, results, _ = self._inner(branch.closed, inner)
            name = next(self._functions)
            functions.append(name)
            lines += [
                f"def {name}({', '.join(inner)}):",
                *(f"    {line}" for line in inside),
                f"    return {_tuple(results)}",
            ]
        index, *rest = operands
        given = ", ".join(rest)
        if str(eqn.invars[0].aval.dtype) != "int32":
            index = f"{index}.astype(np.int32)"
        return lines, f"lax.switch({index}, [{', '.join(functions)}], {given})"


def _tuple(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _first_exact(eqn: Any, operands: list[str], short: list[str]) -> tuple[str, bool]:
    given = {
        name: v.aval for name, v in zip(operands, eqn.invars) if not isinstance(v, _jax.Literal)
    }
    both = itertools.chain.from_iterable(zip(spelled(eqn, short), spelled(eqn, operands)))
    for expression in dict.fromkeys(both):
        if (many := _traces_to(expression, eqn, given)) is not None:
            return expression, many
    raise Unwritable(
        f"the operation {eqn.primitive.name!r} cannot be written with public names of JAX"
    )


def _only_changes_weak_type(eqn: Any) -> bool:
    types = [(v.aval.shape, v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name == "convert_element_type" and types[0] == types[1]


def _traces_to(expression: str, eqn: Any, given: Mapping[str, Any]) -> bool | None:
    """Whether an expression of arrays returns a tuple, if it traces to one equation that is like
    `eqn`; None if it does not."""
    scope: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "lax": lax}
    exec(_jax.PUBLIC_PRIMITIVES, scope)
    mesh = _mesh_in(eqn)
    if mesh is not None:
        scope["mesh"] = mesh
    try:
        code = compile(f"lambda {', '.join(given)}: {expression}", "<equation>", "eval")
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given.values()]
        call = eval(code, scope)
        if not given:
            return _computes(call(), eqn)
        closed = opened_calls(_jax.make_jaxpr(call)(*types))
        many = isinstance(jax.eval_shape(call, *types), (tuple, list))
    except Exception:  # a speller may guess
        return None
    eqns = closed.jaxpr.eqns
    if len(eqns) != 1 or closed.consts or list(closed.jaxpr.outvars) != list(eqns[0].outvars):
        return None
    return many if _like(eqns[0], eqn) else None


def _computes(results: Any, eqn: Any) -> bool | None:
    """Whether the results of an expression of literals alone are a tuple, if they are those of the
    equation."""
    many = isinstance(results, (tuple, list))
    got = jax.tree.leaves(results)
    expected = evaluated(eqn, [v.val for v in eqn.invars])
    same = [
        x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in zip(got, expected)
    ]
    return many if all(same) and len(got) == len(expected) else None


def _mesh_in(eqn: Any) -> Any:
    return options_mesh(**eqn.params)


def options_mesh(*, sharding: Any = None, **_: Any) -> Any:
    return getattr(sharding, "mesh", None)


def _like(new: Any, eqn: Any) -> bool:
    called = lambda each: _SAME.get(each.primitive.name, each.primitive.name)
    types = lambda each: [(v.aval.shape, v.aval.dtype) for v in each.outvars]
    operands = lambda each: [
        (v.aval.shape, v.aval.dtype, isinstance(v, _jax.Literal) and str(v.val))
        for v in each.invars
    ]
    if called(new) != called(eqn) or types(new) != types(eqn):
        return False
    if operands(new) != operands(eqn):
        return False
    return _compared(new, **new.params) == _compared(eqn, **eqn.params)


def _compared(eqn: Any, *, preferred_element_type: Any = None, **params: Any) -> dict:
    """What of an equation's parameters changes its results, as text."""
    if preferred_element_type is None or not is_number(eqn.outvars[0]):
        preferred_element_type = eqn.outvars[0].aval.dtype
    else:
        preferred_element_type = np.dtype(preferred_element_type)
    kept = {k: _plain(v) for k, v in params.items() if k not in _PLACES and v is not None}
    kept.setdefault("mode", "lax.GatherScatterMode.FILL_OR_DROP")
    return {**kept, "preferred": str(preferred_element_type)}


def _plain(value: Any) -> str:
    try:
        return text(value)
    except Unwritable:
        return str(value)
