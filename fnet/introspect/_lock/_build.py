"""Reads the graph of a program from its jaxpr."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fnet import _jax, jaxpr
from fnet.introspect._lock import _parameters
from fnet.introspect._lock._program import (
    COMMUTATIVE,
    Node,
    Operand,
    Program,
    Ref,
    Section,
    ordered,
)
from fnet.introspect._lock._simplify import Simplifier
from fnet.jaxpr import Scope

KEPT = ("add_any", "sharding_constraint", "reshard", "mesh_cast")
"""What `flatten` must leave: sums of cotangents, whose order follows from the order of statements,
and the places of arrays."""
_SAME_OP = {"psum2": "psum", "psum_invariant": "psum", "all_gather_invariant": "all_gather"}
_SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def build(closed: Any, inputs: Sequence[str], outputs: Sequence[str]) -> tuple[Program, list]:
    """Returns the program of a closed jaxpr, and for each of its nodes what computes it: the index
    of an input, a constant as an array, or a variable of the jaxpr. It is None inside loops.

    Args:
        closed: a jaxpr that `flatten` has rewritten.
        inputs, outputs: the paths of its inputs and outputs.
    """
    builder = _Builder()
    body = closed.jaxpr
    numbers = {}
    env: dict[Any, Operand] = {}
    for i, (path, v) in enumerate(zip(_distinct(inputs), body.invars, strict=True)):
        env[v] = builder.put(
            "input", (), "", (type_text(v.aval),), (v.aval,), Section(), shared=False
        )
        numbers[path] = env[v].node
        builder.source[env[v].node] = i
    builder.constants(body.constvars, closed.consts, env)
    builder.body(body, env, Scope(), (), 1)
    results = {
        path: builder.read(env, atom)
        for path, atom in zip(_distinct(outputs), body.outvars, strict=True)
    }
    whole = Program(builder.nodes, numbers, results, builder.effects)
    live, first = ordered(whole)
    program, second = ordered(_with_sums(live))
    return program, [builder.source.get(first[number]) for number in second]


def type_text(aval: Any) -> str:
    """Returns a dtype and shape such as "f32[8,128]"."""
    if not hasattr(aval, "dtype"):
        return re.sub(r"\W", "", type(aval).__name__)
    sizes = ",".join(str(size).replace(" ", "") for size in aval.shape)
    kind = "ref:" if "Ref" in type(aval).__name__ else ""
    return f"{kind}{dtype_text(aval.dtype)}[{sizes}]"


def dtype_text(dtype: Any) -> str:
    name = str(dtype)
    for long, short in _SHORT:
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def number_text(value: Any) -> str:
    """Returns a number as text, such as "1e-05" or "true"."""
    return str(np.asarray(value)[()]).replace(" ", "").lower()


def digest(closed: Any) -> str:
    """Returns a text for the function that a jaxpr computes."""
    closed = jaxpr.flatten(_jax.close(closed), kept=KEPT)
    names = [[str(i) for i in range(len(each))] for each in (closed.in_avals, closed.out_avals)]
    program, _ = build(closed, *names)
    lines = [f"{node.key} {node.operands}" for node in program.nodes]
    lines += [str(program.outputs)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _distinct(paths: Sequence[str]) -> list[str]:
    """Returns the paths, with a number added to those that occur several times."""
    counts: dict[str, int] = {}
    distinct = []
    for path in paths:
        path = _path(path) or "result"
        counts[path] = counts.get(path, 0) + 1
        distinct.append(path if counts[path] == 1 else f"{path}#{counts[path]}")
    return distinct


class _Builder:
    """Adds the equations of a jaxpr to the nodes of a program.

    Attributes:
        nodes: the nodes so far.
        avals: the types of the results of each node.
        source: what computes a node (see `build`).
        effects: the nodes with side effects.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.avals: list[tuple] = []
        self.source: dict[int, Any] = {}
        self.effects: list[int] = []
        self.known: dict[tuple, int] = {}
        self.simplify = Simplifier(self)

    def put(
        self,
        op: str,
        operands: tuple[Operand, ...],
        options: str,
        types: tuple[str, ...],
        avals: tuple,
        section: Section,
        *,
        shared: bool = True,
        cost: tuple[int, int] = (0, 0),
    ) -> Ref:
        """Adds a node, or finds the equal one: computing a value twice costs nothing after
        compilation, unless the second time is a recomputation."""
        recomputed = section.phase == "recomputed"
        unordered = op in COMMUTATIVE or op == "add_any"
        reads = tuple(sorted(operands, key=str)) if unordered else operands
        key = op, reads, options, types, section.inside, recomputed
        if shared and key in self.known:
            return Ref(self.known[key])
        number = len(self.nodes)
        self.nodes.append(Node(op, operands, options, types, section, *cost))
        self.avals.append(avals)
        if shared:
            self.known[key] = number
        return Ref(number)

    def read(self, env: dict, atom: Any) -> Operand:
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        if not np.shape(atom.val):
            return number_text(np.asarray(atom.val).astype(atom.aval.dtype))
        return self.constant(atom.val, atom.aval)

    def constants(self, variables: Sequence, values: Sequence, env: dict) -> None:
        for v, x in zip(variables, values):
            env[v] = self.constant(x, v.aval)

    def constant(self, x: Any, aval: Any) -> Operand:
        types = (type_text(aval),)
        if isinstance(x, jax.Ref):
            return self.put("constant", (), "", types, (aval,), Section(), shared=False)
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            return self.put(
                "constant", (), _digits(jax.random.key_data(x)), types, (aval,), Section()
            )
        array = np.asarray(x)
        if not array.ndim:
            return number_text(array)
        if array.size and (array == array.flat[0]).all():
            return self.add("fill", number_text(array.flat[0]), "", aval, Section())
        exact = array.dtype.kind in "iub"
        ref = self.put(
            "constant",
            (),
            _digits(array) if exact else "",
            types,
            (aval,),
            Section(),
            shared=exact,
        )
        self.source[ref.node] = array
        return ref

    def add(self, op: str, operand: Operand, options: str, aval: Any, section: Section) -> Ref:
        """Adds a node with one operand and one result."""
        return self.put(op, (operand,), options, (type_text(aval),), (aval,), section)

    def body(self, body: Any, env: dict, outer: Scope, inside: tuple, times: int) -> None:
        """Adds the equations of an open jaxpr."""
        scope_of = jaxpr.scopes_in(body, outer)
        for eqn in body.eqns:
            at = scope_of(eqn)
            operands = tuple(self.read(env, atom) for atom in eqn.invars)
            section = Section(_path(at.path), at.phase, inside)
            name = eqn.primitive.name
            if name in _LOOPS:
                results = _LOOPS[name](self, eqn, operands, at, section, times)
            elif jaxpr.bodies(eqn):
                results = self.with_bodies(eqn, operands, at, section, times)
            else:
                results = self.operation(eqn, operands, section, times)
            for v, result in zip(eqn.outvars, results):
                env[v] = result
                if not inside and isinstance(result, Ref) and result.output == 0:
                    self.source.setdefault(result.node, v)

    def operation(self, eqn: Any, operands: tuple, section: Section, times: int) -> list[Operand]:
        name = _SAME_OP.get(eqn.primitive.name, eqn.primitive.name)
        options = _parameters.text(name, digest, **eqn.params)
        effects = _state_effects(eqn)
        if not effects:
            simpler = self.simplify(eqn, name, operands, options, section)
            if isinstance(simpler, list):
                return simpler
            name, operands, options = simpler
        else:
            operands = (*operands, *(Ref(each) for each in self.effects[-1:]))
        avals = tuple(v.aval for v in eqn.outvars)
        types = tuple(map(type_text, avals))
        cost = jaxpr.cost(eqn)
        flops = cost.flops * times
        costs = (flops, 0) if cost.kind == "matmul" else (0, flops)
        first = self.put(
            name, operands, options, types, avals, section, shared=not effects, cost=costs
        )
        if effects:
            self.effects.append(first.node)
        return [Ref(first.node, i) for i in range(len(avals))]

    def enter(self, body: Any, env: dict, at: Scope, inside: tuple, times: int) -> list[Operand]:
        """Adds the equations of a body, and returns its results."""
        self.constants(body.jaxpr.constvars, body.consts, env)
        self.body(body.jaxpr, env, at, inside, times)
        return [self.read(env, atom) for atom in body.jaxpr.outvars]

    def loop(self, op: str, options: str, section: Section) -> Ref:
        return self.put(op, (), options, ("loop",), (None,), section, shared=False)

    def result(self, op: str, operands: tuple, v: Any, section: Section) -> Ref:
        return self.put(op, operands, "", (type_text(v.aval),), (v.aval,), section)

    def carry(self, loop: Ref, first: Operand, v: Any, section: Section) -> Ref:
        operands = (loop, first, "?")
        types = (type_text(v.aval),)
        return self.put("carry", operands, "", types, (v.aval,), section, shared=False)

    def close(self, carry: Ref, following: Operand) -> None:
        node = self.nodes[carry.node]
        node.operands = (*node.operands[:2], following)

    def scan(self, eqn, operands, at, section, times) -> list[Operand]:
        parts = jaxpr.scan(eqn)
        (body,) = jaxpr.bodies(eqn)
        length = parts.length if isinstance(parts.length, int) else str(parts.length)
        options = f"length={length}" + (" reverse=true" if parts.options.get("reverse") else "")
        loop = self.loop("scan", options, section)
        within = section._replace(inside=(*section.inside, f"scan[{length}]"))
        consts, firsts, arrays = parts.split(operands)
        own_consts, carried, slices = parts.split(body.jaxpr.invars)
        env = dict(zip(own_consts, consts))
        carries = {}
        for i, (v, first) in enumerate(zip(carried, firsts)):
            if body.jaxpr.outvars[i] is v:
                env[v] = first  # the same in all iterations
            else:
                env[v] = carries[i] = self.carry(loop, first, v, within)
        for v, array in zip(slices, arrays):
            env[v] = self.result("each", (loop, array), v, within)
        often = times * (length if isinstance(length, int) else 1)
        results = self.enter(body, env, at, within.inside, often)
        for i, carry in carries.items():
            self.close(carry, results[i])
        outputs: list[Operand] = []
        for i, v in enumerate(eqn.outvars):
            if i < parts.carry and i not in carries:
                outputs.append(firsts[i])
                continue
            op = "last" if i < parts.carry else "stack"
            outputs.append(self.result(op, (loop, results[i]), v, section))
        return outputs

    def while_loop(self, eqn, operands, at, section, times) -> list[Operand]:
        test, step = jaxpr.bodies(eqn)
        effects = len(self.effects)
        loop = self.loop("while", "", section)
        within = section._replace(inside=(*section.inside, "while"))
        count = len(eqn.outvars)
        firsts = operands[len(operands) - count :]
        carried = step.jaxpr.invars[len(step.jaxpr.invars) - count :]
        carries: list[Operand] = []
        for i, (v, first) in enumerate(zip(carried, firsts)):
            same = step.jaxpr.outvars[i] is v
            carries.append(first if same else self.carry(loop, first, v, within))
        results = {}
        for body in (test, step):
            own = body.jaxpr.invars
            consts = [operands[i] for i in body.inputs[: len(own) - count]]
            env = dict(zip(own, [*consts, *carries]))
            results[body.kind] = self.enter(body, env, at, within.inside, times)
        (going,) = results[test.kind]
        if len(self.effects) > effects:  # of the body, and the test says how often
            types = (type_text(test.jaxpr.outvars[0].aval),)
            self.effects.append(self.put("test", (loop, going), "", types, (None,), section).node)
        outputs: list[Operand] = []
        for carry, first, following, v in zip(carries, firsts, results[step.kind], eqn.outvars):
            if carry is first:
                outputs.append(first)
                continue
            self.close(carry, following)
            outputs.append(self.result("end", (loop, carry, going), v, section))
        return outputs

    def cond(self, eqn, operands, at, section, times) -> list[Operand]:
        branches = []
        for i, body in enumerate(jaxpr.bodies(eqn)):
            inside = (*section.inside, f"branch[{i}]")
            env = dict(zip(body.jaxpr.invars, operands[1:]))
            branches.append(self.enter(body, env, at, inside, times))
        return [
            self.result("cond", (operands[0], *(each[i] for each in branches)), v, section)
            for i, v in enumerate(eqn.outvars)
        ]

    def shard_map(self, eqn, operands, at, section, times) -> list[Operand]:
        (body,) = jaxpr.bodies(eqn)
        axes, ins, outs = _places(**eqn.params)
        inside = (*section.inside, f"shard_map[{axes}]")
        within = section._replace(inside=inside)
        env = {}
        for v, operand, place in zip(body.jaxpr.invars, operands, ins):
            types = (type_text(v.aval),)
            env[v] = self.put("shard", (operand,), place, types, (v.aval,), within)
        results = self.enter(body, env, at, inside, times * (body.times or 1))
        return [
            self.put("unshard", (result,), place, (type_text(v.aval),), (v.aval,), section)
            for v, result, place in zip(eqn.outvars, results, outs)
        ]

    def with_bodies(self, eqn, operands, at, section, times) -> list[Operand]:
        """Adds an operation with programs inside, such as a linear solve."""
        name = _path(jaxpr.title(eqn))
        inner: list[Operand] = []
        for i, body in enumerate(jaxpr.bodies(eqn)):
            inside = (*section.inside, f"{name}[{i}]")
            within = section._replace(inside=inside)
            env = {}
            for k, v in enumerate(body.jaxpr.invars):
                if body.inputs is not None:
                    env[v] = operands[body.inputs[k]]
                else:
                    types = (type_text(v.aval),)
                    env[v] = self.put("inside", operands, f"input={k}", types, (v.aval,), within)
            inner += self.enter(body, env, at, inside, times * (body.times or 1))
        types = tuple(type_text(v.aval) for v in eqn.outvars)
        avals = tuple(v.aval for v in eqn.outvars)
        shared = not _state_effects(eqn)
        ref = self.put(name, (*operands, *inner), "", types, avals, section, shared=shared)
        if not shared:
            self.effects.append(ref.node)
        return [Ref(ref.node, i) for i in range(len(types))]


_LOOPS: dict[str, Callable] = {
    "scan": _Builder.scan,
    "while": _Builder.while_loop,
    "cond": _Builder.cond,
    "shard_map": _Builder.shard_map,
}


def _places(*, mesh: Any, in_specs: Any, out_specs: Any, **_: Any) -> tuple[str, list, list]:
    """Returns the sizes of the mesh axes, and the parameters of inputs and outputs of a shard_map,
    as text."""
    axes = ",".join(f"{name}:{size}" for name, size in dict(mesh.shape).items())
    spec = lambda each: _parameters.text("shard", digest, spec=each)
    return axes, list(map(spec, in_specs)), list(map(spec, out_specs))


def _path(path: str) -> str:
    """Returns a path without the signs that have a meaning in lock files."""
    return re.sub(r"[\s=%$~{};]+", "_", path)


def _digits(x: Any) -> str:
    return (
        f"sha256={hashlib.sha256(np.ascontiguousarray(np.asarray(x)).tobytes()).hexdigest()[:12]}"
    )


def _state_effects(eqn: Any) -> bool:
    """Whether an equation has side effects, such as a callback; names of mesh axes are none."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _with_sums(program: Program) -> Program:
    """Replaces sums of cotangents of several terms by one node each: their order follows from the
    order of the statements of the forward pass."""
    nodes, uses = (
        program.nodes,
        collections.Counter(ref.node for node in program.nodes for ref in node.refs),
    )
    uses.update(program.roots)

    def terms(operand: Operand, within: tuple) -> list[Operand]:
        if isinstance(operand, Ref):
            node = nodes[operand.node]
            if node.op == "add_any" and uses[operand.node] == 1 and node.section.inside == within:
                return [each for inner in node.operands for each in terms(inner, within)]
        return [operand]

    summed = []
    for node in nodes:
        if node.op == "add_any":
            operands = [
                each for inner in node.operands for each in terms(inner, node.section.inside)
            ]
            op = "add" if len(operands) == 2 else "sum"
            other = node.other * (len(operands) - 1)
            node = dataclasses.replace(node, op=op, operands=tuple(operands), other=other)
        summed.append(node)
    return dataclasses.replace(program, nodes=summed)
