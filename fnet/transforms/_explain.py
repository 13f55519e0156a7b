"""explain: what autocast makes of a function, per scope, with the reason."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import jax

from fnet.hardware import Policy
from fnet.transforms._autocast import Row, _Autocast


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast makes of a function. `str()` is a table; `rows` has one `Row` for each floating-point equation:
    scope, primitive, kind ("lower", "follow", "cast", "convolution", "float32", "author"), dtype, reason."""

    policy: Policy
    rows: tuple[Row, ...]

    def __str__(self):
        counts = collections.Counter((row.scope, row.kind, row.dtype, row.reason, row.primitive) for row in self.rows)
        groups = {}
        for (scope, kind, dtype, reason, primitive), count in counts.items():
            groups.setdefault((scope, dtype, kind, reason), []).append(f"{count} {primitive}")
        order = {scope: number for number, scope in enumerate(dict.fromkeys(row.scope for row in self.rows))}
        table = [("scope", "dtype", "operations", "why")]
        table += [(scope or "(no scope)", dtype, ", ".join(operations), reason)
                  for (scope, dtype, _, reason), operations in sorted(groups.items(), key=lambda g: order[g[0][0]])]
        widths = [max(len(row[i]) for row in table) for i in range(2)]
        lines = [str(self.policy), ""]
        for scope, dtype, operations, reason in table:
            lines.append(f"{scope:<{widths[0]}}  {dtype:<{widths[1]}}  {operations}: {reason}")
        return "\n".join(lines)


def explain(f: Callable, *args, **kwargs) -> Explanation:
    """What a function that autocast has wrapped does with these arguments; nothing is computed.

        step = ft.jit(ft.autocast(ft.value_and_grad(loss)))
        print(ft.explain(step, params, batch))

    Args:
        f: the result of `autocast`, also under `jit`.
        args, kwargs: its arguments; arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: where autocast has not wrapped `f`.
    """
    inner = f
    while not hasattr(inner, "autocast"):
        if not hasattr(inner, "__wrapped__"):
            raise ValueError(f"explain: {getattr(f, '__name__', f)!r} is not what autocast returned: "
                             "explain(ft.autocast(f), ...)")
        inner = inner.__wrapped__
    function, policy, rules = inner.autocast
    rows = []
    interpreter = _Autocast(policy, rules, rows)
    jax.eval_shape(lambda args, kwargs: interpreter.run(function, args, kwargs), args, kwargs)
    interpreter.check_rules()
    return Explanation(policy, tuple(rows))
