"""The jaxpr interpreter: a function is traced, then evaluated equation by equation, and a rule may
replace equations.

`rewrite(f, rule)` is the public function of this module. Transforms such as autocast and tune use
subclasses of `Interpreter`. A subclass of `Interpreter` can also attach a note (any hashable
information) to each value, analyze each jaxpr before its evaluation, and change the dtypes of
values.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
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
    """Rewrites `f` with a rule, which is called for each equation of the jaxpr of `f` and may
    replace the equation.

        def double_sines(primitive, scope, inputs, equation):
            if primitive == "sin":
                return [2 * jnp.sin(inputs[0])]
            return NotImplemented

        g = ft.rewrite(f, double_sines)

    The rewritten function is an ordinary JAX function: it can be differentiated, compiled, batched
    and rewritten again. Loops, branches, jit, remat, shard_map, custom derivatives and custom
    batching are preserved, and the rule is also called for the equations inside them. A jitted
    function inside `f` keeps its name, its donated arguments and its shardings. Equations for which
    the rule returns NotImplemented do not change.

    Args:
        f: any JAX function. Array arguments are traced. Arguments that are not arrays, and results
            that are not JAX arrays, are passed through unchanged.
        rule: a function `rule(primitive, scope, inputs, equation)`. `primitive` is the name of the
            primitive, and `inputs` are the input arrays. `scope` is the path of the named scopes
            that contain the equation, such as "block/fc". The path of a named scope is the same in
            the forward and backward pass. `equation` is JAX's equation, whose `params` contain the
            options of the primitive. The rule returns NotImplemented, or a list of outputs with one
            array for each of `equation.outvars`, of the same shape and dtype. If JAX traces a body
            (such as the body of a loop) more than once, the rule may be called several times for an
            equation in this body.

    Returns:
        A function with f's signature and results.

    Raises:
        TypeError: the rule does not return, for each output, an array with the shape and dtype of
            this output.

    >>> def double_sines(primitive, scope, inputs, equation):
    ...     return [2 * jnp.sin(inputs[0])] if primitive == "sin" else NotImplemented
    >>> float(ft.rewrite(jnp.sin, double_sines)(jnp.pi / 2))
    2.0
    """
    check_function("rewrite", f)
    return _Rewriter(rule).applied(f)


class Interpreter:
    """Evaluates jaxprs equation by equation.

    Subclasses of `Interpreter` override the method `equation`, and other methods if necessary.

    An `Interpreter` caches rewritten jaxprs, so that a jitted function that is called 60 times is
    rewritten only once.
    """

    def __init__(self, rule: Callable | None = None):
        # `rule`: for subclasses that apply one function.
        self._bodies, self.rule = (weakref.WeakKeyDictionary(), rule)

    def equation(self, eqn, at: Scope, inputs: list[Value], plan) -> Any:
        """Returns the outputs of an equation, a list of `Value`s, or NotImplemented.

        If the method `equation` returns NotImplemented, the interpreter first rewrites the jaxprs
        inside the equation, such as the body of a loop, and then evaluates the equation. An
        equation without inner jaxprs is evaluated unchanged.
        """
        return NotImplemented

    def plan(self, jaxpr, wanted: tuple) -> Any:
        """Analyzes a jaxpr before its evaluation.

        The methods `equation` and `wanted` get the result of the method `plan` as the argument
        `plan`.

        The tuple `wanted` contains, for each output of the jaxpr, None or a requirement, for
        example that the output must be in float32. Each subclass of `Interpreter` defines which
        hashable objects it uses as requirements on outputs, and what these objects mean.
        """
        return None

    def wanted(self, plan, eqn) -> tuple:
        """Returns a requirement, such as "must be in float32", for each output of an equation with
        an inner jaxpr.

        The inner jaxpr is, for example, the body of a loop. The returned tuple contains None for
        each output without a requirement (see `plan`).
        """
        return (None,) * len(eqn.outvars)

    def literal(self, atom) -> Value:
        return Value(atom.val)

    def tangent(self, note) -> Any:
        """Returns the note (attached information) for a tangent that is an input of the JVP rule of
        a custom_jvp.

        `note` is the note (attached information) of the primal input to which the tangent belongs.
        """
        return None

    def depends(self, at: Scope) -> Any:
        """Returns the key that represents the named scope `at` in the interpreter's cache of
        rewritten jaxprs.

        If the same jaxpr is evaluated in two named scopes, and `depends` returns equal keys for the
        two scopes, the rewritten jaxpr may be reused. If the rewritten jaxpr depends on a property
        of the named scope, such as its path, the key must therefore contain this property.
        """
        return at

    def saveable(self, policy):
        """Returns the policy of jax.checkpoint for the rewritten body of a remat equation, given
        the policy of the equation."""
        return policy

    def applied(self, f: Callable) -> Callable:
        """Returns the rewritten function f."""

        @wraps(f)
        def rewritten(*args, **kwargs):
            return self.run(f, args, kwargs)

        return rewritten

    def run(self, f, args, kwargs):
        """Evaluates the rewritten f(*args, **kwargs)."""
        traced = Traced(f, args, kwargs)
        return traced.result(self.outputs(self.opened(traced.closed), traced.arrays))

    def examine(self, f, args, kwargs) -> None:
        """Rewrites f for the given arguments, without computing anything. The arguments may contain
        `jax.ShapeDtypeStruct`s instead of arrays."""
        traced = Traced(f, args, kwargs)
        jax.eval_shape(
            lambda arrays: self.outputs(self.opened(traced.closed), arrays), traced.arrays
        )

    def outputs(self, closed, arrays) -> list:
        """Evaluates the rewritten jaxpr of a whole function, and returns the outputs."""
        outputs = self.evaluate(
            closed.jaxpr,
            closed.consts,
            list(map(self.argument, arrays)),
            TOP,
            self.outer(closed.jaxpr),
        )
        return [restore(y, v.aval) for y, v in zip(outputs, closed.jaxpr.outvars)]

    def argument(self, x) -> Value:
        """Returns the `Value` (array and attached information) of an argument of the whole
        function."""
        return Value(x)

    def opened(self, closed):
        """Returns the closed jaxpr that the interpreter evaluates. `closed` is the traced jaxpr of
        the whole function.

        By default, `opened` returns `closed` unchanged. A subclass may override `opened` to return
        an equivalent jaxpr, for example a jaxpr in which jitted functions are inlined.
        """
        return closed

    def outer(self, jaxpr) -> tuple:
        """Returns a requirement, such as "must be in float32", for each output of the whole
        function.

        The returned tuple contains None for each output without a requirement (see `plan`).
        """
        return (None,) * len(jaxpr.outvars)

    def evaluate(
        self, jaxpr, consts, args: list[Value], outer: Scope = TOP, wanted: tuple | None = None
    ) -> list[Value]:
        plan = self.plan(jaxpr, (None,) * len(jaxpr.outvars) if wanted is None else wanted)
        names = _jax.current_names()
        env = dict(zip(jaxpr.constvars, map(Value, consts)))
        env.update(zip(jaxpr.invars, args))
        scope_of = _scopes.in_jaxpr(jaxpr, outer)
        last, stacks, i = _last_uses(jaxpr), {}, 0
        # Consecutive equations of one source line share their context, which is entered once.
        for (stack, *_), group in itertools.groupby(jaxpr.eqns, _jax.origin):
            group = tuple(group)
            if stack not in stacks:
                stacks[stack] = _jax.name_stack(group[0])
            with _jax.equation_context(group[0], names):
                for eqn in group:
                    at = scope_of(eqn, stacks[stack])
                    inputs = [
                        self.literal(v) if isinstance(v, _jax.Literal) else env[v]
                        for v in eqn.invars
                    ]
                    outputs = self.equation(eqn, at, inputs, plan)
                    if outputs is NotImplemented:
                        outputs = self.default(eqn, at, inputs, self.wanted(plan, eqn))
                    env.update(zip(eqn.outvars, outputs))
                    for v in last.get(i, ()):
                        env.pop(v, None)
                    i += 1
        return [self.literal(v) if isinstance(v, _jax.Literal) else env[v] for v in jaxpr.outvars]

    def default(self, eqn, at: Scope, inputs: list[Value], wanted: tuple) -> list[Value]:
        """Evaluates an equation. The jaxprs inside the equation, such as the body of a loop, are
        rewritten first."""
        enter = ENTER.get(eqn.primitive.name)
        return plain(eqn, inputs) if enter is None else enter(self, eqn, at, inputs, wanted)

    def body(self, closed, at, wanted, notes, *, pin=None):
        """Returns a rewritten closed jaxpr as a function of arrays.

        `pin` states for each output whether it is converted to the dtype that it had when the jaxpr
        was traced. If `pin` is None, all outputs are converted to their traced dtypes.
        """

        def call(*arrays):
            values = [Value(x, note) for x, note in zip(arrays, notes)]
            outputs = self.evaluate(closed.jaxpr, closed.consts, values, at, wanted)
            call.notes = [y.note for y in outputs]
            return [
                restore(y, v.aval) if pin is None or pin[i] else y.x
                for i, (y, v) in enumerate(zip(outputs, closed.jaxpr.outvars))
            ]

        call.notes = []
        return call

    def kept(self, jaxpr, at, wanted, inputs: list[Value]):
        """Returns a rewritten closed jaxpr, and a note (hashable information about the value) for
        each of its outputs.

        The rewritten jaxpr depends on the types and the notes (attached information) of the arrays
        in `inputs`, but not on the numbers in these arrays. The rewritten jaxpr is read from the
        interpreter's cache if possible.
        """
        notes = tuple(value.note for value in inputs)
        types = tuple(jax.typeof(value.x) for value in inputs)
        key = self.depends(at), types, notes, wanted
        cache = self._bodies.setdefault(jaxpr, {})
        if key not in cache:
            closed = _jax.close(jaxpr)
            call = self.body(closed, at, wanted, notes, pin=[False] * len(closed.jaxpr.outvars))
            rewritten = jax.make_jaxpr(call)(*types), call.notes
            if any(isinstance(c, jax.core.Tracer) for c in rewritten[0].consts):
                return (
                    rewritten  # it closes over a value of an outer trace and cannot be used again
                )
            cache[key] = rewritten
        return cache[key]


class _Rewriter(Interpreter):
    def equation(self, eqn, at, inputs, plan):
        outputs = self.rule(
            eqn.primitive.name, at.path, [as_array(value.x) for value in inputs], eqn
        )
        if outputs is NotImplemented:
            return outputs
        listed = isinstance(outputs, (list, tuple))
        returned = [_described(y) for y in (outputs if listed else [outputs])]
        expected = [_described(v.aval) for v in eqn.outvars]
        if returned != expected or not listed:
            what = f"a list of {', '.join(returned) or 'nothing'}" if listed else returned[0]
            raise TypeError(
                f"rewrite: for '{eqn.primitive.name}' at '{at.path}' the rule must return a list "
                f"of "
                f"{', '.join(expected)}; it returned {what}"
            )
        return [Value(y) for y in outputs]


class Evaluator(Interpreter):
    """Evaluates jaxprs on arrays of any dtype, with a rule `rule(eqn, arrays) -> arrays or
    NotImplemented`. Inside loops, branches and calls, the rule is not called."""

    def equation(self, eqn, at, inputs, plan):
        arrays = [value.x for value in inputs]
        outputs = self.rule(eqn, arrays)
        return bind(eqn, arrays) if outputs is NotImplemented else list(map(Value, outputs))

    def __call__(self, closed, *arrays) -> list:
        return arrays_of(self.evaluate(closed.jaxpr, closed.consts, list(map(Value, arrays))))


def _described(x):
    if not hasattr(x, "dtype") and not isinstance(x, (int, float, complex)):
        return "None (to decline, return NotImplemented)" if x is None else f"a {type(x).__name__}"
    return f"{jnp.result_type(x) if not hasattr(x, 'dtype') else x.dtype}{list(jnp.shape(x))}"


def _last_uses(jaxpr) -> dict:
    """Returns {index of an equation: the variables that are not needed after this equation}."""
    keep = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    seen, last = set(keep), {}
    for i in range(len(jaxpr.eqns) - 1, -1, -1):
        eqn = jaxpr.eqns[i]
        for v in (*eqn.invars, *eqn.outvars):
            if not isinstance(v, _jax.Literal) and v not in seen:
                seen.add(v)
                last.setdefault(i, []).append(v)
    return last
