"""autocast: mixed precision for any JAX function, as a rewrite of its jaxpr.

Only values that were traced as float32 are ever lowered, and an operation that is in no list gets its inputs back in
the dtypes they were traced with: what is not known here runs as it did.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax, hardware
from fnet.hardware import Policy
from fnet.transforms._lowered import BILINEAR, Saveable, lowered
from fnet.transforms._rewrite import Interpreter, Value, bind, plain

F32 = np.dtype("float32")
_NAMES = ("float32", "bfloat16", "float16")
_LOWER = {op.name: op for op in BILINEAR}
_STRUCTURE = frozenset("""
    reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice dynamic_update_slice concatenate pad rev
    gather copy copy_p select_n split stack unstack tile name optimization_barrier sharding_constraint reshard
    all_gather all_to_all ppermute pvary pbroadcast stop_gradient device_put""".split())
_ARITHMETIC = frozenset("""
    add sub mul div neg abs sign max min clamp add_any tanh logistic erf reduce_max reduce_min argmax argmin eq ne lt le
    gt ge is_finite floor ceil round sort top_k cummax cummin reduce_window_max psum psum_invariant pmax pmin
    reduce_scatter""".split())
_POWERS = frozenset({"square", "integer_pow", "one_minus_square"})    # they overflow float16 early
_FULL = "__full_precision__"


def autocast(f: Callable, policy: Policy | str = "auto", *, rules: Mapping[str, Any] | None = None) -> Callable:
    """`f` in mixed precision: matrix products and convolutions in the policy's low dtype, what needs range in float32.

        step = ft.autocast(ft.value_and_grad(loss))                 # the chip decides
        step = ft.autocast(ft.value_and_grad(loss), "bfloat16", rules={"head": "float32"})

    Products take operands of the low dtype and sum in float32. Structure and simple arithmetic follow what they are
    given; exp, log, powers, sums over axes, norms, softmax and everything not known here run in float32. A value that
    is only wanted in float32 is produced in float32. Loop carries, branches and the outputs of `f` keep their dtypes,
    gradients of float32 parameters are float32, explicit casts and an explicit `precision=` are the author's and stay.
    Around `value_and_grad` or inside it, it comes to the same.

    Args:
        f: any JAX function: a model, a loss, a gradient, a whole step; fnet's or not.
        policy: a `hardware.Policy`, "float32", "bfloat16", "float16", the name of a chip, or "auto": this chip's.
        rules: {pattern: dtype} over the paths of named scopes, before the policy's own. A pattern matches a whole path
            or any prefix of it; the first that matches decides.

    Returns:
        A function with f's signature and dtypes. `float16` also needs loss scaling: see `loss_scale`.

    Raises:
        ValueError: for an unknown dtype or chip, or a rule that matches no scope of `f`.
        TypeError: where `f` has no float32 in it.
    """
    policy, rules = _resolve(policy, rules)
    interpreter = _Autocast(policy, rules)

    @functools.wraps(f)
    def cast(*args, **kwargs):
        if policy.compute == F32 and not rules:
            return f(*args, **kwargs)
        outputs = interpreter.run(f, args, kwargs)
        interpreter.check_rules()
        return outputs

    vars(cast).pop("tuned", None)
    cast.autocast = f, policy, rules    # for explain, in place of what `wraps` brought along
    return cast


def full_precision(f: Callable) -> Callable:
    """Marks `f` for autocast: inside it every operation runs as it was written."""

    def __full_precision__(*args, **kwargs):
        return f(*args, **kwargs)

    return functools.wraps(f)(jax.jit(__full_precision__))


def _resolve(policy, rules) -> tuple[Policy, tuple]:
    if isinstance(policy, str):
        name, policy = policy, hardware.policy(None if policy == "auto" else policy)
        if policy.compute == F32 and name not in ("auto", *_NAMES) and not hardware.detect(name).known:
            raise ValueError(f"autocast: {name!r} is neither 'auto', nor {', '.join(map(repr, _NAMES))}, nor a chip "
                             f"that is known; nearest: {', '.join(hardware.chips.nearest(name))}")
    if not isinstance(policy, Policy):
        raise TypeError(f"autocast: a policy is a hardware.Policy or a string; got a {type(policy).__name__}")
    every = []
    for pattern, dtype in (*(rules or {}).items(), *policy.rules):
        try:
            dtype = jnp.dtype(dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in _NAMES:
            raise ValueError(f"autocast: the rule {pattern!r} gives {(rules or {}).get(pattern)!r}; a dtype is one of "
                             f"{', '.join(_NAMES)}")
        every.append((pattern, re.compile(pattern), dtype))
    return policy, tuple(every)


class _Autocast(Interpreter):
    """Notes are magnitudes: a scalar constant, and what is only it, takes the dtype of what it meets if it fits."""

    def __init__(self, policy, rules, rows=None):
        super().__init__()
        self.policy, self.rules, self.rows = policy, rules, rows
        self.matched, self.scopes, self.kinds = set(), {}, {}
        self.demands = weakref.WeakKeyDictionary()

    def depends(self, scope):
        if self.rows is not None:
            return object()    # every call is explained
        return scope if self.rules else None

    def saveable(self, policy):
        return policy if policy is None or isinstance(policy, Saveable) else Saveable(policy)

    def compute(self, scope) -> np.dtype:
        """The dtype that products take at this path."""
        if scope not in self.scopes:
            self.scopes[scope] = self.policy.compute
            parts = scope.split("/")
            prefixes = ["/".join(parts[:i + 1]) for i in range(len(parts))]
            for pattern, compiled, dtype in self.rules:
                if any(compiled.fullmatch(prefix) for prefix in prefixes):
                    self.scopes[scope] = dtype
                    self.matched.add(pattern)
                    break
        return self.scopes[scope]

    def check_rules(self):
        for pattern, _, _ in self.rules:
            if pattern not in self.matched:
                paths = sorted(filter(None, self.scopes))
                near = difflib.get_close_matches(pattern, paths, 3, 0.3) or paths[:3]
                raise ValueError(f"autocast: the rule {pattern!r} matches no scope; nearest: "
                                 f"{', '.join(map(repr, near)) or 'the function has no named scopes'}")

    def literal(self, atom):
        scalar = np.ndim(atom.val) == 0 and getattr(atom.aval, "dtype", None) == F32
        return Value(atom.val, abs(float(atom.val)) if scalar else None)

    def outer(self, jaxpr):
        if not any(_wide(v) for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars)):
            given = sorted({str(v.aval) for v in jaxpr.invars})
            raise TypeError(f"autocast lowers what is float32, and the function has none; its inputs are "
                            f"{', '.join(given) or 'no arrays'}")
        return (True,) * len(jaxpr.outvars)

    def plan(self, jaxpr, wanted):
        """{variable: whether everything that uses it wants float32}, from the end to the beginning; and
        {id of an equation: its kind, and whether its outputs are all wanted in float32}."""
        kept = self.demands.setdefault(jaxpr, {})
        if wanted not in kept:
            kept[wanted] = self._demand(jaxpr, wanted)
        return kept[wanted]

    def _demand(self, jaxpr, wanted):
        uses = {}

        def use(v, wide):
            if not isinstance(v, _jax.Literal):
                uses[v] = uses.get(v, True) and wide

        for v, wide in zip(jaxpr.outvars, wanted):
            use(v, wide)
        for eqn in reversed(jaxpr.eqns):
            kind, wide = self.kind(eqn), True
            for v in eqn.outvars:
                wide = bool(wide and uses.get(v, True))
            uses[id(eqn)] = kind, wide
            for v, w in zip(eqn.invars, self._inputs_wanted(eqn, kind, wide, uses)):
                use(v, w)
        return uses

    def _inputs_wanted(self, eqn, kind, wide, uses):
        count, name = len(eqn.invars), eqn.primitive.name
        if kind == "follow":
            return [wide] * count
        if kind == "lower":
            return [False] * count
        if name in ("jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint",
                    "shard_map") and not _marked(eqn):
            inner = _jax.close(next(eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params)).jaxpr
            plan = self.plan(inner, tuple(uses.get(v, True) for v in eqn.outvars))
            return [plan.get(v, True) for v in inner.invars]
        if name == "scan":
            consts, carry, rest = _jax.scan_parts(eqn)
            return [False] * consts + [True] * carry + [False] * rest
        if name == "while":
            return [False] * (count - len(eqn.outvars)) + [True] * len(eqn.outvars)
        return [name not in ("cond", "custom_vmap_call")] * count

    def wanted(self, plan, eqn):
        outs = tuple(plan.get(v, True) for v in eqn.outvars)
        if eqn.primitive.name == "scan":
            carry = _jax.scan_parts(eqn)[1]
            return (True,) * carry + outs[carry:]
        return (True,) * len(outs) if eqn.primitive.name in ("while", "cond", "custom_vmap_call") else outs

    def kind(self, eqn) -> str:
        """"lower", "follow", "cast", "convolution" or "float32"."""
        name = eqn.primitive.name
        if name in _LOWER:
            if name == "conv_general_dilated" and self.policy.convolution == F32 != self.policy.compute:
                return "convolution"
            default = eqn.params.get("precision") in (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)
            return "lower" if default and all(map(_wide, (*eqn.invars[:2], *eqn.outvars))) else "float32"
        if hasattr(eqn.primitive, "lower"):    # it holds products, and a parameter that says what they compute in
            return "lower" if eqn.primitive.lower(eqn.params, F32, F32) else "float32"
        if name in _STRUCTURE or name in _ARITHMETIC:
            return "follow"
        if name in _POWERS:
            return "follow" if self.policy.compute != np.float16 else "float32"
        if name == "convert_element_type":
            source, target = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            if source == F32 == target:
                return "follow"
            return "cast" if source == np.bool_ and target == F32 else "float32"
        return "float32"

    def equation(self, eqn, scope, inputs, plan):
        name, compute, marked = eqn.primitive.name, self.compute(scope), _marked(eqn)
        if name in _ENTERED and not marked:
            return NotImplemented
        kind, wide = plan[id(eqn)]
        if marked or compute == F32:
            kind = "author"
        dtype, reason = F32, _REASONS[kind]
        if kind == "lower":
            dtype, reason = compute, reason + _WIDE * wide
            out = F32 if wide else compute
            if name in _LOWER:
                x, y = inputs[0].x, inputs[1].x
                outputs = [Value(lowered(eqn.primitive, x, y, eqn.params, compute=compute, out=out))]
            else:
                outputs = bind(eqn, [value.x for value in inputs], **eqn.primitive.lower(eqn.params, compute, out))
        elif kind == "follow":
            outputs, dtype, reason = self._follow(eqn, inputs, wide, compute)
        else:
            outputs = plain(eqn, inputs)
            if kind == "cast":    # a mask or a one-hot vector is exact in any dtype
                outputs = [Value(y.x, 1.0) for y in outputs]
        if self.rows is not None and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars):
            if hasattr(eqn.primitive, "explain"):
                changes = eqn.primitive.lower(eqn.params, compute, F32) if kind == "lower" else {}
                reason += "; " + eqn.primitive.explain(*(v.aval for v in eqn.invars), **{**eqn.params, **changes})
            self.rows.append(Row(scope, name, kind, dtype.name, reason))
        return outputs

    def _follow(self, eqn, inputs, wide, compute):
        name = eqn.primitive.name
        if wide and name in _ARITHMETIC:
            return plain(eqn, inputs), F32, "is only used in float32"
        floats, strong, largest = [], [], 0.0
        for value, v in zip(inputs, eqn.invars):
            if _wide(v):
                floats.append(value)
                if value.note is None:
                    strong.append(value)
                elif largest < value.note < math.inf:
                    largest = value.note
        overflow = largest > _largest(compute)
        if wide or overflow or not strong or any(value.x.dtype == F32 for value in strong):
            outputs = plain(eqn, inputs)
            if floats and not strong and (name in _STRUCTURE or name == "convert_element_type"):
                note = max(value.note for value in floats)
                outputs = [Value(y.x, note) for y in outputs]
            return outputs, F32, ("is only used in float32" if wide else "meets a constant that does not fit the low "
                                  "dtype" if overflow else "is given float32")
        if name == "convert_element_type":
            return [inputs[0]], compute, "is given the low dtype"
        arrays = [_to(value.x, compute) if _wide(v) else value.x for value, v in zip(inputs, eqn.invars)]
        return bind(eqn, arrays), compute, "is given the low dtype"


_ENTERED = frozenset(("jit", "closed_call", "core_call", "scan", "while", "cond", "remat2", "checkpoint", "shard_map",
                      "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"))


def _wide(v) -> bool:
    return getattr(v.aval, "dtype", None) == F32


def _marked(eqn) -> bool:
    return eqn.primitive.name == "jit" and eqn.params["name"] == _FULL


@functools.cache
def _largest(dtype) -> float:
    return float(jnp.finfo(dtype).max)


def _to(x, dtype):
    return x if getattr(x, "dtype", None) == dtype else lax.convert_element_type(x, dtype)


class Row(NamedTuple):
    """What autocast makes of one equation: its scope, primitive, class, dtype, and why."""

    scope: str
    primitive: str
    kind: str
    dtype: str
    reason: str


_WIDE = "; the result is only used in float32"
_REASONS = {
    "lower": "a product: low-precision operands, float32 sums",
    "follow": "",
    "cast": "a mask, exact in any dtype",
    "float32": "needs float32's range or sums, or is in no list",
    "convolution": "the policy keeps convolutions in float32",
    "author": "kept in float32 by a rule or full_precision",
}
