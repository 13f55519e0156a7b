"""The jaxpr interpreter: traces a function, then evaluates it equation by equation, where a rule
may replace equations.

Users call `rewrite(f, rule)`. Transforms such as autocast and tune are subclasses of `Interpreter`,
which can also attach a note (any hashable information) to each value, analyze each jaxpr before its
evaluation, and change the dtypes of values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fnet import _jax
from fnet.jaxpr import _scopes
from fnet.jaxpr._enter import ENTER
from fnet.jaxpr._scopes import TOP, Scope
from fnet.jaxpr._traced import Traced
from fnet.jaxpr._values import Value, arrays_of, as_array, bind, plain, restore
from fnet.jaxpr._wrapping import check_function, wraps

Rule = Callable[[str, str, list, Any], Any]


def rewrite(f: Callable, rule: Rule) -> Callable:
    """Rewrites `f` with a rule, which is called for each equation of its jaxpr and may replace it.

        def double_sines(primitive, scope, inputs, equation):
            if primitive == "sin":
                return [2 * jnp.sin(inputs[0])]
            return NotImplemented

        g = ft.rewrite(f, double_sines)

    The result is an ordinary JAX function: it can be differentiated, compiled, batched and
    rewritten again. Loops, branches, jit, remat, shard_map, custom derivatives and custom batching
    are preserved, and the rule is also called for the equations inside them. A jitted function
    inside `f` keeps its name, its donated arguments and its shardings.

    Args:
        f: any JAX function. Array arguments are traced. Arguments that are not arrays, and results
            that are not JAX arrays, are passed through unchanged.
        rule: a function `rule(primitive, scope, inputs, equation)` of the name of the primitive,
            the path of the named scopes around the equation, such as "block/fc" (the same in the
            forward and backward pass), the input arrays, and JAX's equation, whose `params` are the
            options of the primitive. It returns NotImplemented, which leaves the equation as it is,
            or a list of outputs: one array for each of `equation.outvars`, of the same shape and
            dtype. JAX may trace a body, such as that of a loop, more than once; the rule is then
            called again for its equations.

    Returns:
        A function with f's signature and results.

    Raises:
        TypeError: the rule does not return, for each output, an array with its shape and dtype.

    >>> def double_sines(primitive, scope, inputs, equation):
    ...     return [2 * jnp.sin(inputs[0])] if primitive == "sin" else NotImplemented
    >>> float(ft.rewrite(jnp.sin, double_sines)(jnp.pi / 2))
    2.0
    """
    check_function("rewrite", f)
    return _Rewriter(rule).applied(f)


class Interpreter:
    """Evaluates jaxprs equation by equation.

    Subclasses override `equation`, and what else they need. Rewritten jaxprs are cached, so that a
    jitted function that is called 60 times is rewritten only once.
    """

    def __init__(self) -> None:
        self._bodies: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        """Returns the outputs of an equation, a list of `Value`s, or NotImplemented.

        After NotImplemented, the interpreter rewrites the jaxprs inside the equation, such as the
        body of a loop, and then evaluates it. Without inner jaxprs, it is evaluated unchanged.
        """
        return NotImplemented

    def plan(self, jaxpr: Any, wanted: tuple) -> Any:
        """Analyzes a jaxpr before its evaluation. `equation` and `wanted` get the result as `plan`.

        `wanted` contains, for each output of the jaxpr, None or a requirement, for example that the
        output must be in float32: any hashable object, whose meaning the subclass defines.
        """
        return None

    def wanted(self, plan: Any, eqn: Any) -> tuple:
        """Returns the requirements (see `plan`) on the outputs of an equation with an inner jaxpr,
        such as a loop with its body, with None for an output without one."""
        return (None,) * len(eqn.outvars)

    def literal(self, atom: Any) -> Value:
        return Value(atom.val)

    def tangent(self, note: Any) -> Any:
        """Returns the note of a tangent that is an input of the JVP rule of a custom_jvp. `note` is
        that of its primal input."""
        return None

    def depends(self, at: Scope) -> Any:
        """Returns what a rewritten jaxpr depends on in the named scope `at`, such as its path: a
        key of the interpreter's cache. With equal keys, a jaxpr that is evaluated in two scopes may
        be rewritten only once."""
        return at

    def saveable(self, policy: Any) -> Any:
        """Returns the policy of jax.checkpoint for the rewritten body of a remat equation, given
        the policy of the equation."""
        return policy

    def applied(self, f: Callable) -> Callable:
        """Returns the rewritten function f."""

        @wraps(f)
        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return self.run(f, args, kwargs)

        return rewritten

    def run(self, f: Callable, args: tuple, kwargs: dict) -> Any:
        """Evaluates the rewritten f(*args, **kwargs)."""
        traced = Traced(f, args, kwargs)
        return traced.result(self.outputs(self.opened(traced.closed), traced.arrays))

    def examine(self, f: Callable, args: tuple, kwargs: dict) -> Any:
        """Rewrites f for the given arguments, without computing anything, and returns the closed
        jaxpr of f before the rewriting. `jax.ShapeDtypeStruct`s will do as arguments."""
        traced = Traced(f, args, kwargs)
        closed = self.opened(traced.closed)
        jax.eval_shape(lambda arrays: self.outputs(closed, arrays), traced.arrays)
        return closed

    def outputs(self, closed: Any, arrays: Iterable) -> list:
        """Evaluates the rewritten jaxpr of a whole function, and returns the outputs."""
        jaxpr = closed.jaxpr
        arguments = [self.argument(x) for x in arrays]
        outputs = self.evaluate(jaxpr, closed.consts, arguments, TOP, self.outer(jaxpr))
        return [restore(y, v.aval) for y, v in zip(outputs, jaxpr.outvars)]

    def argument(self, x: Any) -> Value:
        """Returns the `Value` (an array and its note) of an argument of the whole function."""
        return Value(x)

    def opened(self, closed: Any) -> Any:
        """Returns the closed jaxpr that the interpreter evaluates, by default the traced one of the
        whole function, `closed`. A subclass may return an equivalent one, for example with jitted
        functions inlined."""
        return closed

    def outer(self, jaxpr: Any) -> tuple:
        """Returns the requirements (see `plan`) on the outputs of the whole function."""
        return (None,) * len(jaxpr.outvars)

    @_jax.classic_tracing()  # here, because JAX calls the rules of derivatives later
    def evaluate(
        self,
        jaxpr: Any,
        consts: Iterable,
        args: list[Value],
        outer: Scope = TOP,
        wanted: tuple | None = None,
    ) -> list[Value]:
        """Evaluates an open jaxpr, and returns its outputs. JAX traces a rewritten loop to its older
        primitive, as it has traced the program."""
        if wanted is None:
            wanted = (None,) * len(jaxpr.outvars)
        plan = self.plan(jaxpr, wanted)
        names = _jax.current_names()
        scope_of = _scopes.in_jaxpr(jaxpr, outer)
        last = _last_uses(jaxpr)
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(Value, consts)))
        env.update(zip(jaxpr.invars, args))

        def read(atom: Any) -> Value:
            return self.literal(atom) if isinstance(atom, _jax.Literal) else env[atom]

        stacks: dict[Any, str] = {}
        i = 0
        # Consecutive equations of one source line share their context, which is entered once.
        for (stack, *_), group in itertools.groupby(jaxpr.eqns, _jax.origin):
            eqns = tuple(group)
            if stack not in stacks:
                stacks[stack] = _jax.name_stack(eqns[0])
            with _jax.equation_context(eqns[0], names):
                for eqn in eqns:
                    at = scope_of(eqn, stacks[stack])
                    inputs = [read(atom) for atom in eqn.invars]
                    outputs = self.equation(eqn, at, inputs, plan)
                    if outputs is NotImplemented:
                        outputs = self.default(eqn, at, inputs, self.wanted(plan, eqn))
                    env.update(zip(eqn.outvars, outputs))
                    for v in last.get(i, ()):  # its memory is free from here on
                        env.pop(v, None)
                    i += 1
        return [read(atom) for atom in jaxpr.outvars]

    def default(self, eqn: Any, at: Scope, inputs: list[Value], wanted: tuple) -> list[Value]:
        """Evaluates an equation, with its inner jaxprs, such as the body of a loop, rewritten."""
        enter = ENTER.get(eqn.primitive.name)
        return plain(eqn, inputs) if enter is None else enter(self, eqn, at, inputs, wanted)

    def body(
        self,
        closed: Any,
        at: Scope,
        wanted: tuple,
        notes: Sequence,
        *,
        pin: Sequence[bool] | None = None,
    ) -> Any:
        """Returns a rewritten closed jaxpr as a function of arrays. After a call, its attribute
        `notes` contains the notes of the outputs.

        `pin` states for each output whether it is converted to the dtype with which it was traced.
        Default None: all are.
        """
        outvars = closed.jaxpr.outvars
        pinned = [True] * len(outvars) if pin is None else pin
        assert len(pinned) >= len(outvars)  # zip would drop outputs

        def call(*arrays: Any) -> list:
            values = [Value(x, note) for x, note in zip(arrays, notes)]
            outputs = self.evaluate(closed.jaxpr, closed.consts, values, at, wanted)
            rewritten.notes = [y.note for y in outputs]
            return [
                restore(y, v.aval) if restores else y.x
                for y, v, restores in zip(outputs, outvars, pinned)
            ]

        rewritten: Any = call  # a function with an attribute
        rewritten.notes = []
        return rewritten

    def kept(self, jaxpr: Any, at: Scope, wanted: tuple, inputs: list[Value]) -> tuple[Any, list]:
        """Returns a rewritten closed jaxpr, and the note of each of its outputs.

        It depends on the types and notes of `inputs`, but not on their numbers, and comes from the
        interpreter's cache if possible.
        """
        notes = tuple(value.note for value in inputs)
        types = tuple(jax.typeof(value.x) for value in inputs)
        key = self.depends(at), types, notes, wanted
        cache = self._bodies.setdefault(jaxpr, {})
        if key in cache:
            return cache[key]
        closed = _jax.close(jaxpr)
        call = self.body(closed, at, wanted, notes, pin=[False] * len(closed.jaxpr.outvars))
        rewritten = _jax.make_jaxpr(call)(*types)
        # A jaxpr that closes over a value of an outer trace cannot be used again.
        if not any(isinstance(c, jax.core.Tracer) for c in rewritten.consts):
            cache[key] = rewritten, call.notes
        return rewritten, call.notes


class _Rewriter(Interpreter):
    def __init__(self, rule: Rule):
        super().__init__()
        self.rule = rule

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        name = eqn.primitive.name
        outputs = self.rule(name, at.path, [as_array(value.x) for value in inputs], eqn)
        if outputs is NotImplemented:
            return outputs
        expected = [_described(v.aval) for v in eqn.outvars]
        if isinstance(outputs, (list, tuple)):
            returned = [_described(y) for y in outputs]
            if returned == expected:
                return [Value(y) for y in outputs]
            what = f"a list of {', '.join(returned) or 'nothing'}"
        else:
            what = _described(outputs)
        raise TypeError(
            f"rewrite: for '{name}' at '{at.path}' the rule must return a list of "
            f"{', '.join(expected)}; it returned {what}"
        )


class Evaluator(Interpreter):
    """Evaluates jaxprs on arrays of any dtype, with a rule `rule(eqn, arrays) -> arrays or
    NotImplemented`. Inside loops, branches and calls, the rule is not called."""

    def __init__(self, rule: Callable[[Any, list], Any]):
        super().__init__()
        self.rule = rule

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> list[Value]:
        arrays = [value.x for value in inputs]
        outputs = self.rule(eqn, arrays)
        return bind(eqn, arrays) if outputs is NotImplemented else list(map(Value, outputs))

    def __call__(self, closed: Any, *arrays: Any) -> list:
        return arrays_of(self.evaluate(closed.jaxpr, closed.consts, list(map(Value, arrays))))


def _described(x: Any) -> str:
    if x is None:
        return "None (to decline, return NotImplemented)"
    if hasattr(x, "dtype"):
        return f"{x.dtype}{list(jnp.shape(x))}"
    if isinstance(x, (int, float, complex)):
        return f"{jnp.result_type(x)}{list(jnp.shape(x))}"
    return f"a {type(x).__name__}"


def _last_uses(jaxpr: Any) -> dict[int, list]:
    """Returns {index of an equation: the variables that are not needed after this equation}."""
    seen = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    last: dict[int, list] = {}
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        for v in (*eqn.invars, *eqn.outvars):
            if not isinstance(v, _jax.Literal) and v not in seen:
                seen.add(v)
                last.setdefault(i, []).append(v)
    return last
