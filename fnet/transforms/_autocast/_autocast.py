"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

Only values that were traced as float32 get a low-precision dtype. An operation that autocast does
not know receives its inputs in the dtypes in which they were traced, so that it runs unchanged.
"""

from __future__ import annotations

import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, hardware, jaxpr
from fnet._util._nearest import nearest_to_pattern
from fnet.hardware import Policy
from fnet.jaxpr import Interpreter, Scope, Value, bind, description, plain, traits, wraps
from fnet.transforms._autocast._lowered import Saveable, lowered
from fnet.transforms._autocast._notes import (
    BRANCH,
    PRODUCT,
    VECTOR,
    WEIGHT,
    Size,
    branch,
    fits,
    sums_examples,
)
from fnet.transforms._patterns import compiled

F32 = np.dtype("float32")
_NAMES = ("float32", "bfloat16", "float16")
_STORED_FROM = 1 << 22  # minimum elements of a result: 16 MiB in float32
_FULL = "__full_precision__"


def autocast(
    f: Callable, policy: Policy | str = "auto", *, rules: Mapping[str, Any] | None = None
) -> Callable:
    """Converts `f` to mixed precision: matrix products and convolutions use the dtype of `policy`.

        step = ft.autocast(ft.value_and_grad(loss))                 # the dtype depends on the chip
        step = ft.autocast(ft.value_and_grad(loss), "bfloat16", rules={"head": "float32"})

    Products cast their operands and sum in float32. Reshapes and simple arithmetic run in the dtype
    of their inputs. What needs range or sums (exp, log, powers, sums over axes, and so norms,
    softmax and losses) runs in float32, and so does everything that `autocast` does not know. A
    value that is only read in float32 is float32.

    Your own casts stay, and so do products with `precision=`. The carries of loops, the outputs of
    branches and the outputs of `f` keep their dtypes; gradients of float32 parameters are float32.
    It matters little whether `f` is the loss or its `value_and_grad`: their gradients are equal up
    to 16-bit rounding. docs/precision.md has the details.

    Args:
        f: any JAX function: a model, a loss, a gradient or a complete step, written with any
            library.
        policy: a `hardware.Policy`, "float32", "bfloat16", "float16", the name of a chip, or "auto"
            (default), the policy that suits the chip of this machine.
        rules: {pattern: dtype}, dtypes for parts of `f`. A pattern is a regular expression for the
            whole path of a named scope, or for its beginning up to a `/`. The first one that
            matches is used, before the rules of the policy. Default None: no rules.

    Returns:
        A function with f's signature and dtypes. With float16, use `loss_scale` as well.

    Raises:
        ValueError: a dtype or chip is unknown, or a pattern in `rules` matches no scope of `f`, or
            only scopes that earlier patterns match.
        TypeError: `f` has no float32 values.

    >>> f = autocast(lambda x, w: jnp.tanh(x @ w), "bfloat16")
    >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    policy, rules = _resolve(policy, rules)
    interpreter = _Autocast(policy, rules)

    @wraps(f, "autocast")
    def cast(*args, **kwargs):
        if policy.compute == F32 and not rules:
            return f(*args, **kwargs)
        outputs = interpreter.run(f, args, kwargs)
        interpreter.check_rules()
        return outputs

    cast.autocast = f, policy, rules  # for explain
    return cast


def of_part(f: Callable, policy: Policy, rules: tuple, spared: Iterable[str] = ()) -> Callable:
    """Autocast of a part of a function, in which some of the function's rules have no scope.

    Args:
        f: the part.
        policy, rules: as in the attribute `autocast` of what `autocast` returns.
        spared: paths of scopes that stay in float32.
    """
    exactly = [f"{re.escape(path)}$" for path in spared]
    before = [(pattern, compiled("autocast", pattern), F32) for pattern in exactly]
    interpreter = _Autocast(policy, (*before, *rules))
    return lambda *args: interpreter.run(f, args, {})


def full_precision(f: Callable) -> Callable:
    """Excludes `f` from autocast: its operations run in the dtypes in which you wrote them.

    >>> product = ft.full_precision(lambda x: x @ x)
    >>> [row.dtype for row in ft.explain(ft.autocast(lambda x: product(x) @ x, "bfloat16"), jnp.ones((2, 2))).rows]
    ['float32', 'bfloat16']
    """

    def __full_precision__(*args, **kwargs):
        return f(*args, **kwargs)

    return wraps(f, "full_precision")(jax.jit(__full_precision__))


def _resolve(policy, rules) -> tuple[Policy, tuple]:
    if isinstance(policy, str):
        name, policy = policy, hardware.policy(None if policy == "auto" else policy)
        if (
            policy.compute == F32
            and name not in ("auto", *_NAMES)
            and not hardware.detect(name).known
        ):
            raise ValueError(
                f"autocast: expected policy 'auto', {', '.join(map(repr, _NAMES))} or the name of "
                f"a chip in hardware.chips; got {name!r}. Nearest: "
                f"{', '.join(hardware.chips.nearest(name))}"
            )
    if not isinstance(policy, Policy):
        raise TypeError(
            f"autocast: expected a hardware.Policy or a string as policy; got a "
            f"{type(policy).__name__}"
        )
    if not isinstance(rules or {}, Mapping):
        raise TypeError(f"autocast: expected a dict {{pattern: dtype}} as rules; got {rules!r}")
    every = []
    for pattern, given in (*(rules or {}).items(), *policy.rules):
        try:
            dtype = jnp.dtype(given)
        except TypeError:
            dtype = None
        if dtype is None or dtype.name not in _NAMES:
            raise ValueError(
                f"autocast: expected a dtype for the rule {pattern!r} ({', '.join(_NAMES)}); got "
                f"{given!r}"
            )
        every.append((pattern, compiled("autocast", pattern), dtype))
    return policy, tuple(every)


class _Result(NamedTuple):
    """The outputs of an equation, the dtype in which it was evaluated, and the reason."""

    outputs: list[Value]
    dtype: np.dtype
    reason: str


class _Autocast(Interpreter):
    """Evaluates the equations of a jaxpr for autocast. `_autocast_notes` describes the values of
    `Value.note`."""

    def __init__(self, policy, rules, rows=None):
        super().__init__()
        self.policy, self.rules, self.rows = policy, rules, rows
        self.scopes, self.kinds = {}, {}
        self.matching = {}  # {scope: indices of its rules}; the first one is used
        self.demands = weakref.WeakKeyDictionary()
        # Shapes of residual streams; shapes of the function's arguments.
        self.streams, self.arguments = (set(), set())

    def depends(self, at):
        if self.rows is not None:
            return object()  # explain needs every call
        return at if self.rules else None

    def saveable(self, policy):
        return policy if policy is None or isinstance(policy, Saveable) else Saveable(policy)

    def compute(self, scope) -> np.dtype:
        """Returns the dtype to which matrix products and convolutions in the scope `scope` cast
        their operands."""
        if scope not in self.scopes:
            self.scopes[scope] = self.policy.compute
            parts = scope.split("/")
            prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
            self.matching[scope] = [
                i
                for i, (_, compiled, _) in enumerate(self.rules)
                if any(map(compiled.fullmatch, prefixes))
            ]
            if self.matching[scope]:
                self.scopes[scope] = self.rules[self.matching[scope][0]][2]
        return self.scopes[scope]

    def check_rules(self):
        """Raises ValueError if a rule is not used. The rules of a policy may be overridden."""
        used = {found[0] for found in self.matching.values() if found}
        own = len(self.rules) - len(self.policy.rules)
        for i, (pattern, _, _) in enumerate(self.rules):
            if i in used:
                continue
            scopes = {scope: found[0] for scope, found in self.matching.items() if i in found}
            if not scopes:
                paths = sorted(filter(None, self.scopes))
                raise ValueError(
                    f"autocast: the rule {pattern!r} matches no scope; nearest: "
                    f"{nearest_to_pattern(pattern, paths) or 'the function has no named scopes'}"
                )
            if i >= own and max(scopes.values()) < own:
                continue
            earlier = dict.fromkeys(repr(self.rules[first][0]) for first in scopes.values())
            raise ValueError(
                f"autocast: the rule {pattern!r} is not used, because all that it matches "
                f"({', '.join(map(repr, sorted(scopes)[:4]))}{', ...' if len(scopes) > 4 else ''}) "
                f"matches the earlier {', '.join(earlier)}: move {pattern!r} up, or remove it"
            )

    def literal(self, atom):
        scalar = np.ndim(atom.val) == 0 and getattr(atom.aval, "dtype", None) == F32
        return Value(atom.val, Size.of(abs(float(atom.val))) if scalar else None)

    def outer(self, program):
        values = itertools.chain(
            program.invars,
            program.outvars,
            (v for eqn in jaxpr.equations(program) for v in (*eqn.invars, *eqn.outvars)),
        )
        if not any(map(_wide, values)):
            types = sorted({str(v.aval) for v in program.invars})
            raise TypeError(
                "autocast changes only float32 values, and the function has none; its inputs are "
                f"{', '.join(types) or 'no arrays'}"
            )
        self.arguments = {v.aval.shape for v in program.invars if _wide(v)}
        if (
            self.policy.residual != F32
        ):  # the streams of an earlier program must not affect this one
            self.streams.clear()
            self._bodies.clear()
        return (True,) * len(program.outvars)

    def plan(self, jaxpr, wanted):
        """Returns a dict that describes how a jaxpr uses its values. The keys are variables of the
        jaxpr and ids of its equations. For a variable, the dict contains a bool: whether the
        variable is used only in float32. For an equation, the dict contains a tuple: the kind (see
        `Row`), whether the outputs are used only in float32, and whether the outputs are used only
        as operands of low-precision matrix products or convolutions."""
        kept = self.demands.setdefault(jaxpr, {})
        if wanted not in kept:
            kept[wanted] = self._demand(jaxpr, wanted)
        return kept[wanted]

    def _demand(self, jaxpr, wanted):
        uses, others = {}, set()

        def use(v, wide, operand=False):
            if not isinstance(v, _jax.Literal):
                uses[v] = uses.get(v, True) and wide
                if not operand:
                    others.add(v)

        for v, wide in zip(jaxpr.outvars, wanted):
            use(v, wide)
        for eqn in reversed(jaxpr.eqns):
            kind, wide = self.kind(eqn), True
            for v in eqn.outvars:
                wide = bool(wide and uses.get(v, True))
            uses[id(eqn)] = kind, wide, others.isdisjoint(eqn.outvars)
            for v, w in zip(eqn.invars, self._inputs_wanted(eqn, kind, wide, uses)):
                use(v, w, kind == "lower")
        return uses

    def _inputs_wanted(self, eqn, kind, wide, uses):
        count, name = len(eqn.invars), eqn.primitive.name
        if kind == "follow":
            return [wide] * count
        if kind == "lower":
            return [False] * count
        if name in _ENTERED_ONCE and not _marked(eqn):
            inner = jaxpr.bodies(eqn)[0].jaxpr
            plan = self.plan(inner, tuple(uses.get(v, True) for v in eqn.outvars))
            return [plan.get(v, True) for v in inner.invars]
        if name == "scan":
            parts = jaxpr.scan(eqn)
            return [False] * parts.consts + [True] * parts.carry + [False] * parts.slices
        if name == "while":
            return [False] * (count - len(eqn.outvars)) + [True] * len(eqn.outvars)
        return [name not in ("cond", "custom_vmap_call")] * count

    def wanted(self, plan: dict, eqn: Any) -> tuple[bool, ...]:
        outs = tuple(plan.get(v, True) for v in eqn.outvars)
        name = eqn.primitive.name
        if name == "scan":
            carry = jaxpr.scan(eqn).carry
            return (True,) * carry + outs[carry:]
        if name in ("while", "cond", "custom_vmap_call"):
            return (True,) * len(outs)
        return outs

    def kind(self, eqn: Any) -> str:
        """Returns the kind of an equation, which states how autocast evaluates it (see `Row`). The
        kind "author" (excluded from autocast) is never returned, because it depends on the named
        scope of the equation."""
        name = eqn.primitive.name
        if name in jaxpr.BILINEAR:
            return self._product_kind(eqn)
        lower = description(eqn.primitive).lower
        if lower:  # contains products and has a parameter for their dtype
            return "lower" if lower(eqn.params, F32, F32) else "float32"
        if jaxpr.opaque(eqn):
            return "opaque"
        if name == "reduce_precision" and jaxpr.kept_bits(eqn) == _F32_BITS:
            return "follow"  # jax.checkpoint's mark of saved values
        precision = traits(name).precision
        if precision == "power":
            return "follow" if self.policy.compute != np.float16 else "float32"
        if precision:
            return "follow"
        if name == "convert_element_type":
            source, target = eqn.invars[0].aval.dtype, jaxpr.new_dtype(eqn)
            if source == F32 == target:
                return "follow"
            if source == np.bool_ and target == F32:
                return "cast"
        return "float32"

    def _product_kind(self, eqn: Any) -> str:
        product = jaxpr.product(eqn)
        if (
            product.op is jaxpr.CONVOLUTION
            and self.policy.compute != self.policy.convolution == F32
        ):
            return "convolution"
        in_float32 = all(map(_wide, (*eqn.invars[:2], *eqn.outvars)))
        return "lower" if product.default_precision and in_float32 else "float32"

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: dict) -> Any:
        name, compute, marked = eqn.primitive.name, self.compute(at.path), _marked(eqn)
        if name in jaxpr.ENTERED and not marked:
            return NotImplemented
        kind, wide, operand = plan[id(eqn)]
        if marked or compute == F32:
            kind = "author"
        if kind == "lower":
            result = self._lowered(eqn, at, inputs, wide, compute)
        elif kind == "follow" and operand and name == "rev" and inputs[0].x.dtype == F32:
            # Compilers recognize the gradient of a convolution by its reversed kernel, unless a
            # cast follows the reversal.
            outputs = bind(eqn, [_to(inputs[0].x, compute)])
            result = _Result(outputs, compute, "is the kernel of a convolution")
        elif kind == "follow":
            result = self._follow(eqn, at, inputs, wide, compute)
        else:
            outputs = plain(eqn, inputs)
            if kind == "cast":  # masks and one-hot vectors are exact in any dtype
                outputs = [Value(y.x, Size(1.0, 1.0)) for y in outputs]
            result = _Result(outputs, F32, _REASONS[kind])
        if self.rows is not None:
            self._explain(eqn, at, kind, compute, result)
        return result.outputs

    def _lowered(
        self, eqn: Any, at: Scope, inputs: list[Value], wide: bool, compute: np.dtype
    ) -> _Result:
        """Evaluates an equation of kind "lower". If `wide`, its output is only used in float32."""
        reason = _REASONS["lower"] + (_WIDE if wide else "")
        out = F32 if wide else compute
        arrays = [value.x for value in inputs]
        if eqn.primitive.name not in jaxpr.BILINEAR:
            changes = description(eqn.primitive).lower(eqn.params, compute, out)
            return _Result(bind(eqn, arrays, **changes), compute, reason)

        stored = out
        if wide and self.policy.activations != F32 and _activation(eqn, at):
            stored = compute
            reason += _STORED
        z = lowered(eqn.primitive, *arrays, eqn.params, compute=compute, out=out, stored=stored)
        backward = at.phase == "backward"
        if backward and sums_examples(eqn):
            note = WEIGHT
        elif not wide:
            note = PRODUCT
        else:
            note = None if backward else BRANCH
        return _Result([Value(z, note)], compute, reason)

    def _explain(self, eqn: Any, at: Scope, kind: str, compute: np.dtype, result: _Result) -> None:
        """Adds a row to the table of `explain` if the equation is opaque, or if an output is
        floating-point."""
        if kind != "opaque" and not any(map(_floating, eqn.outvars)):
            return
        reason, own = result.reason, description(eqn.primitive)
        if own.explain:
            changes = own.lower(eqn.params, compute, F32) if kind == "lower" else {}
            types = [v.aval for v in eqn.invars]
            reason += "; " + own.explain(*types, **{**eqn.params, **changes})
        self.rows.append(Row(at.path, jaxpr.title(eqn), kind, result.dtype.name, reason))

    def _follow(
        self, eqn: Any, at: Scope, inputs: list[Value], wide: bool, compute: np.dtype
    ) -> _Result:
        """Evaluates an equation of kind "follow", and treats the residual stream and weight
        gradients as the policy states."""
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        backward, residual = at.phase == "backward", self.policy.residual != F32
        # A weight gradient may have the shape of the stream, if there are as many tokens as
        # features.
        weight = any(value.note == WEIGHT for value in inputs)
        stream = name == "add_any" and backward and shape in self.streams - self.arguments
        if residual and stream and not weight:
            outputs = bind(eqn, [_to(value.x, compute) for value in inputs])
            return _Result(outputs, compute, "adds to the gradient of the residual stream")

        of_branch = residual and not backward and branch(eqn, inputs)
        full_arrays = all(value.note in (None, PRODUCT, BRANCH) for value in inputs)  # no bias
        if of_branch and name == "add" and full_arrays:
            self.streams.add(shape)
            outputs = bind(eqn, [_to(value.x, compute) for value in inputs])
            return _Result(outputs, compute, "adds to the residual stream")

        result = self._followed(eqn, inputs, wide, compute)
        outputs = result.outputs
        if of_branch:
            outputs = [Value(y.x, y.note or BRANCH) for y in outputs]
        if weight and (name == "add_any" or traits(name).kind in ("layout", "alias", "cast")):
            outputs = [Value(y.x, WEIGHT) for y in outputs]
        return result._replace(outputs=outputs)

    def _followed(self, eqn: Any, inputs: list[Value], wide: bool, compute: np.dtype) -> _Result:
        """Evaluates an equation in the low dtype if its inputs have it, and in float32 otherwise."""
        name = eqn.primitive.name
        if wide and traits(name).precision == "arithmetic":
            return _Result(plain(eqn, inputs), F32, "is only used in float32")
        floats = [value for value, v in zip(inputs, eqn.invars) if _wide(v)]
        strong = [value for value in floats if not isinstance(value.note, Size)]
        constants = [value.note for value in floats if isinstance(value.note, Size)]

        terms = {(value.note, value.x.dtype) for value in strong}
        if name == "add" and not wide and terms == {(PRODUCT, compute), (VECTOR, F32)}:
            # The bias is broadcast before the cast, so that its gradient is summed in float32.
            shape = eqn.outvars[0].aval.shape
            arrays = [_to(jnp.broadcast_to(value.x, shape), compute) for value in inputs]
            (y,) = bind(eqn, arrays)
            return _Result([Value(y.x, PRODUCT)], compute, "adds a bias to a product")

        if wide:
            return self._in_float32(eqn, inputs, strong, constants, "is only used in float32")
        if not all(fits(name, constant, compute) for constant in constants):
            why = "has a constant that does not fit the low dtype"
            return self._in_float32(eqn, inputs, strong, constants, why)
        if not strong or any(value.x.dtype == F32 for value in strong):
            return self._in_float32(eqn, inputs, strong, constants, "is given float32")

        if name == "convert_element_type":
            return _Result([inputs[0]], compute, "is given the low dtype")
        if name == "reduce_precision":
            info = jnp.finfo(compute)
            outputs = bind(eqn, [inputs[0].x], exponent_bits=info.nexp, mantissa_bits=info.nmant)
            return _Result(outputs, compute, "is given the low dtype")
        arrays = [
            _to(value.x, compute) if _wide(v) else value.x for value, v in zip(inputs, eqn.invars)
        ]
        outputs = bind(eqn, arrays)
        moves = traits(name).kind in ("layout", "alias")
        same_size = math.prod(inputs[0].x.shape) == math.prod(outputs[0].x.shape)
        if inputs[0].note == PRODUCT and moves and same_size:
            outputs = [Value(y.x, PRODUCT) for y in outputs]
        return _Result(outputs, compute, "is given the low dtype")

    def _in_float32(
        self,
        eqn: Any,
        inputs: list[Value],
        strong: list[Value],
        constants: list[Size],
        reason: str,
    ) -> _Result:
        """Evaluates an equation in float32. `strong` are the inputs that are not constants."""
        name = eqn.primitive.name
        outputs = plain(eqn, inputs)
        exact = traits(name).precision == "exact" or name == "convert_element_type"
        if constants and not strong and exact:
            smallest, largest = zip(*constants)
            outputs = [Value(y.x, Size(min(smallest), max(largest))) for y in outputs]
        elif name == "broadcast_in_dim" and strong:
            x, y = inputs[0].x, outputs[0].x
            if x.ndim < y.ndim or 1 in x.shape:
                outputs = [Value(y, VECTOR)]
        return _Result(outputs, F32, reason)


_ENTERED_ONCE = (jaxpr.CALLS - {"custom_vmap_call"}) | {"shard_map"}
_F32_BITS = 8, 23


def _wide(v) -> bool:
    return getattr(v.aval, "dtype", None) == F32


def _floating(v) -> bool:
    return jnp.issubdtype(getattr(v.aval, "dtype", np.bool_), jnp.floating)


def _marked(eqn) -> bool:
    return jaxpr.call_name(eqn) == _FULL


def _activation(eqn, at) -> bool:
    """Whether the result of a matrix product is large, and is an activation or the gradient of an
    activation.

    A weight gradient is a matrix product that sums over the examples, on axis 0 of both operands.
    In the backward pass, a matrix product is the gradient of an activation under these conditions:
    One operand is a matrix. The other operand has three or more axes, and the product sums over
    exactly one of these axes, but not over axis 0.
    """
    product, shape = jaxpr.product(eqn), eqn.outvars[0].aval.shape
    if (
        product.op is not jaxpr.DOT
        or any(product.dimensions[1])
        or not all(isinstance(size, int) for size in shape)
    ):
        return False
    if math.prod(shape) < _STORED_FROM:
        return False
    if at.phase != "backward":
        return True
    (rank, _), (larger, summed) = sorted(
        (v.aval.ndim, axes) for v, axes in zip(eqn.invars, product.dimensions[0])
    )
    return rank == 2 < larger and len(summed) == 1 and summed[0] > 0


def _to(x, dtype):
    return x if getattr(x, "dtype", None) == dtype else jaxpr.converted(x, dtype)


class Row(NamedTuple):
    """What autocast does with one equation: scope, primitive, kind, dtype and reason.

    The kind says how the equation is evaluated:

    - "lower": with low-precision operands and float32 sums, as matrix products and convolutions are.
    - "follow": in the dtype of its inputs.
    - "float32": in the dtype in which it was traced.
    - "convolution": a convolution that the policy keeps in float32.
    - "author": kept in float32 by a rule or `full_precision`.
    - "cast": a cast from bool to float32, whose result is exact in any dtype.
    - "opaque": a primitive that fnet does not know. Operations inside it are not reached.
    """

    scope: str
    primitive: str
    kind: str
    dtype: str
    reason: str


_STORED = ", stored in the low dtype by GPUs and TPUs, because it is large"
_WIDE = "; the result is only used in float32"
_REASONS = {
    "lower": "a product: low-precision operands, float32 sums",
    "follow": "",
    "cast": "a mask, exact in any dtype",
    "float32": "needs float32's range or sums, or is in no list",
    "opaque": "is not known to fnet, so the operations inside it, if any, stay as they are",
    "convolution": "the policy keeps convolutions in float32",
    "author": "kept in float32 by a rule or full_precision",
}
