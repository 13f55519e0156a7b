"""explain: lists what a transform, such as autocast or tune, changes in a function, by scope and
with reasons."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from fnet import native
from fnet._util._text_table import aligned
from fnet.hardware import Chip, Policy
from fnet.jaxpr import opaque_operations, unsupported
from fnet.transforms._autocast._autocast import Row, _Autocast
from fnet.transforms._implicit import Uses, uses
from fnet.transforms._tune._cpu import Rule
from fnet.transforms._tune._measure import Measured
from fnet.transforms._tune._tuner import Fired, Tuner


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `autocast` does: the dtype of each floating-point equation, with the reason. `str()`
    returns a table.

    Attributes:
        policy: the policy of autocast.
        rows: one `Row` for each floating-point equation, with the fields scope, primitive, kind
            ("lower", "follow", "cast", "convolution", "float32", "author" or "opaque"), dtype and
            reason.
        disabled: one message (str) for each rule or kernel of fnet that this version of JAX does
            not support.
    """

    policy: Policy
    rows: tuple[Row, ...]
    disabled: tuple[str, ...] = ()

    def __str__(self):
        counts = collections.Counter(
            (row.scope, row.kind, row.dtype, row.reason, row.primitive) for row in self.rows
        )
        groups = {}
        for (scope, kind, dtype, reason, primitive), count in counts.items():
            groups.setdefault((scope, dtype, kind, reason), []).append(f"{count} {primitive}")
        order = {
            scope: number
            for number, scope in enumerate(dict.fromkeys(row.scope for row in self.rows))
        }
        table = [("scope", "dtype", "operations: why")]
        table += [
            (scope or "(no scope)", dtype, f"{', '.join(operations)}: {reason}")
            for (scope, dtype, _, reason), operations in sorted(
                groups.items(), key=lambda g: order[g[0][0]]
            )
        ]
        return "\n".join([str(self.policy), "", *aligned(table, left=range(3)), *self.disabled])


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `tune` does: the equations that rules change, and the compiler options. `str()` returns
    a table.

    Attributes:
        rows: one `Fired` for each equation that a rule changed, with the fields scope, primitive,
            rule and reason.
        rules: the enabled rules.
        options: the compiler options.
        opaque: {name of a primitive: number of equations}, the primitives that fnet does not know.
            No rule reaches the operations inside them.
        measured: the measured times by which `tune(measure=True)` selected the rules, or None with
            `measure=False`.
    """

    chip: Chip
    rules: tuple[Rule, ...]
    options: dict
    rows: tuple[Fired, ...]
    disabled: tuple[str, ...] = ()
    opaque: dict[str, int] = dataclasses.field(default_factory=dict)
    measured: Measured | None = None

    def __str__(self):
        above = [f"{self.chip.name}: {self.measured}"] if self.measured is not None else []
        if self.opaque:
            names = ", ".join(f"{count} {name}" for name, count in self.opaque.items())
            above.append(f"not known to fnet, so no rule reaches the operations inside: {names}")
        if not self.rules:
            return "\n".join(
                [*above, f"{self.chip.name}: no rules are on; the step is compiled as it is"]
            )
        counts = collections.Counter(self.rows)
        table = [
            ("scope", "rule", "operations"),
            *(
                (row.scope or "(no scope)", row.rule, f"{count} {row.primitive}: {row.reason}")
                for row, count in counts.items()
            ),
        ]
        silent = [
            rule.name
            for rule in self.rules
            if all(row.rule != rule.name for row in self.rows)
            and not (rule.options and rule.options.items() <= self.options.items())
        ]
        lines = [
            f"{self.chip.name}: {len(self.rows)} equations rewritten"
            + f"; compiler options {self.options} (not under an outer jit, which has its own)"
            * bool(self.options)
            + f"; not fired: {', '.join(silent)}" * bool(silent),
            "",
        ]
        return "\n".join([*above, *lines, *aligned(table, left=range(3)), *self.disabled])


def explain(f: Callable, *args: Any, **kwargs: Any) -> Explanation | Tuning | Uses:
    """Explains what autocast, tune, fold, bucket, pack, invariant or use_implicit_arrays does.

        step = ft.jit(ft.autocast(ft.value_and_grad(loss)))
        print(ft.explain(step, params, batch))

    The function is traced, but not run, with three exceptions: a step tuned with `measure=True`, and
    one of `search.population`, may be run and timed on copies of the arguments to select the
    fastest implementation, and an invariant function is timed beside the function itself. For a
    population, the explanation states how its members (the models that are trained together) are
    run.

    Args:
        f: the result of `autocast`, `tune`, `fold`, `bucket`, `pack`, `invariant` or
            `use_implicit_arrays`, or a step of `search.population`, also wrapped in `jit` or `functools.partial`. Of
            several transforms, the outermost is explained.
        args, kwargs: the arguments of f, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
        An `Explanation`, `Tuning`, `Folds`, `Buckets`, `Packing`, `Invariance` or `Uses` object,
        which `print` shows as a table.

    Raises:
        ValueError: `f` is not the result of `autocast`, `tune`, `fold`, `bucket`, `pack`,
            `invariant`, `use_implicit_arrays` or `search.population`.

    >>> half = ft.autocast(lambda x: jnp.exp(x @ x), "bfloat16")
    >>> [(row.primitive, row.dtype) for row in ft.explain(half, jnp.ones((2, 2))).rows]
    [('dot_general', 'bfloat16'), ('exp', 'float32')]
    """
    while isinstance(f, functools.partial):
        f, args, kwargs = f.func, (*f.args, *args), {**f.keywords, **kwargs}
    inner = f
    while not any(hasattr(inner, name) for name in ("autocast", "tuned", "implicit", "explained")):
        if not hasattr(inner, "__wrapped__"):
            raise ValueError(
                "explain: expected a function returned by autocast, tune or use_implicit_arrays; "
                f"got {getattr(f, '__name__', f)!r}. Call explain(ft.autocast(f), *args)"
            )
        inner = inner.__wrapped__
    if hasattr(inner, "explained"):
        return inner.explained(*args, **kwargs)
    if hasattr(inner, "implicit"):
        return uses(inner.implicit, args, kwargs)
    if hasattr(inner, "tuned"):
        return _tuning(*inner.tuned, args, kwargs)
    function, policy, rules = inner.autocast
    rows = []
    interpreter = _Autocast(policy, rules, rows)
    interpreter.examine(function, args, kwargs)
    interpreter.check_rules()
    return Explanation(policy, tuple(rows), unsupported())


def _tuning(step, chip, rules, measure, args, kwargs):
    measured, rows = measure(*args, **kwargs), []
    rules = (
        rules if measured is None else tuple(rule for rule in rules if rule.name in measured.rules)
    )
    tuner = Tuner(rules, rows)
    opaque = opaque_operations(tuner.examine(step, args, kwargs).jaxpr)
    disabled = *unsupported(), *native.missing()
    return Tuning(chip, rules, tuner.lost, tuple(rows), disabled, opaque, measured)
