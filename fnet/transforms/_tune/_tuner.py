"""An interpreter that applies the rewrite rules of tune to the equations of a program."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fnet import jaxpr
from fnet.jaxpr import Interpreter, Value, plain, restore
from fnet.transforms._tune import _cpu
from fnet.transforms._tune._layout import followed
from fnet.transforms._tune._native import view


class Fired(NamedTuple):
    """An equation that tune changed: its scope, its primitive, the name of the rule, and the
    reason."""

    scope: str
    primitive: str
    rule: str
    reason: str


class Tuner(Interpreter):
    """Evaluates the equations of a jaxpr, and applies the rewrite rules of tune to them. The
    attribute `note` of a value is True if the value can be read without a computation: a function
    argument, a view of an argument, or a broadcast scalar (see `_cpu`). The attribute `note`
    is a tuple if the value is a transposed array (see `_tune_layout`), and a frozenset of axes if
    the value was just reversed along them. For any other value, `note` is None."""

    def __init__(self, rules, rows=None):
        super().__init__()
        self.rows, self.all = rows, rules
        self.suited, self.rules = (), {}  # for the last program: its rules, {primitive: rules}
        self.warned = False

    @property
    def lost(self) -> dict:
        """The compiler options that the rules select for the last program that `run` or `examine`
        rewrote.

        `run` and `examine` do not compile the program. Therefore, these two methods do not apply
        the compiler options.
        """
        return _options(self.suited)

    def depends(self, at):
        return None if self.rows is None else object()  # explain needs every call

    def select(self, closed) -> list:
        """Returns the rewrite rules that are used for a program. If the program contains arrays
        with symbolic sizes, as for export, the function `when` of a rule is not called. For a
        program with symbolic sizes, all rules that rewrite equations are used, and none of the
        rules that only set compiler options."""
        equations = (
            list(jaxpr.equations(closed.jaxpr)) if any(rule.when for rule in self.all) else []
        )
        known = all(_known(v.aval) for eqn in equations for v in (*eqn.invars, *eqn.outvars))
        return [
            rule
            for rule in self.all
            if rule.when is None or (rule.when(equations) if known else not rule.options)
        ]

    def options(self, closed) -> dict:
        """Returns the compiler options for a program."""
        return _options(self.select(closed))

    def argument(self, x):
        return Value(x, True)

    def opened(self, closed):
        self.suited, self.rules = self.select(closed), {}
        for rule in self.suited:
            for primitive in rule.primitives if rule.apply or rule.prepare or rule.evaluate else ():
                self.rules.setdefault(primitive, []).append(rule)
        return jaxpr.opened(closed)

    def equation(self, eqn, at, inputs, plan):
        if jaxpr.is_tag(eqn):
            return [Value(plain(eqn, inputs)[0].x, inputs[0].note)]
        rules, prepared = self.rules.get(eqn.primitive.name, ()), []
        for rule in rules if all(_free(v.aval) for v in eqn.invars) else ():
            if rule.evaluate:
                result = rule.evaluate(self, eqn, at, inputs)
            else:
                result = (rule.prepare or rule.apply)(eqn, inputs)
            if result is not None:
                if self.rows is not None:
                    self.rows.append(Fired(at.path, eqn.primitive.name, rule.name, rule.reason))
                if rule.prepare:
                    eqn, inputs = result
                    prepared.append(rule)
                    continue
                values = [y if isinstance(y, Value) else Value(y) for y in result]
                return [Value(restore(y, v.aval), y.note) for y, v in zip(values, eqn.outvars)]
        if prepared:
            outputs = self.default(eqn, at, inputs, self.wanted(plan, eqn))
            for rule in prepared:
                outputs = rule.finish(eqn, outputs) if rule.finish else outputs
            return outputs
        if eqn.primitive.name in _cpu.VIEWS and (
            inputs[0].note is True or np.ndim(inputs[0].x) == 0
        ):
            return [view(eqn, inputs[0], y.x) for y in plain(eqn, inputs)]
        if eqn.primitive.name == "rev":
            axes = frozenset(jaxpr.options(eqn).dimensions)
            return [Value(y.x, axes) for y in plain(eqn, inputs)]
        return NotImplemented if (outputs := followed(eqn, inputs)) is None else outputs


def _options(rules) -> dict:
    return {name: value for rule in rules for name, value in rule.options.items()}


def _known(aval) -> bool:
    """Whether all sizes of the abstract value `aval` are known, not symbolic."""
    return all(isinstance(size, int) for size in getattr(aval, "shape", ()))


def _free(aval) -> bool:
    """Whether arrays of the type `aval` may be reshaped, that is, whether all sizes are known and
    the compiler determines the sharding."""
    return _known(aval) and not jaxpr.explicit(aval)
