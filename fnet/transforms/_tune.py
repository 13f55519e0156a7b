"""tune: a finished step rewritten into the forms that the chip's compiler runs fast, with the same numbers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jaxlib
import numpy as np

from fnet import _jax, hardware
from fnet.transforms import _tune_cpu
from fnet.transforms._rewrite import Interpreter, Value, plain, restore
from fnet.transforms._statics import boxed, holds_statics, unboxed
from fnet.transforms._tune_cpu import Rule
from fnet.transforms._tune_layout import followed

_NOT_TRACED = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
               jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError)
RULES = {"cpu": _tune_cpu.RULES}    # for GPUs and TPUs nothing has been measured to pay yet


def tune(step: Callable, chip: str | hardware.Chip = "auto", *, rules: Mapping[str, bool] | None = None) -> Callable:
    """`step`, rewritten into what the chip's compiler runs fast; numbers as before, up to rounding.

        step = ft.tune(jax.jit(step, donate_argnums=0))

    For a CPU: operands of matrix products are computed before the product reads them, products that vmap has turned
    round are turned back, weight gradients are products of two matrices with the smaller side leading, products of
    bfloat16, cast by whomever, have float32 sums and the form that there are kernels for, poolings that tile the image
    and their gradients are elementwise, weight gradients of convolutions have a forward convolution's layout. Where
    convolutions are most of the work, the compiler is told which library has them; those of bfloat16 are oneDNN's from
    jaxlib 0.12 on, on processors with AMX. NaN and Inf stay where they were, ties in a pooling go where XLA's go,
    dtypes and named scopes stay. For GPUs and TPUs there are no rules: the step is compiled as it is.

    Rules are applied to the whole program, hence after differentiation: give `tune` the step, not the model. Put it
    outermost: called with arrays it compiles by itself, with the compiler options that suit the program, and keeps the
    donation of a jitted step. Under another transformation (jit, vmap, grad) it is rewritten in place, and the options
    are the outer jit's.

    Args:
        step: a function of arrays, jitted or not; fnet's or not. Loops, branches, jit, remat, shard_map and custom
            derivatives inside it are entered. One that is not jitted by jax.jit may have other arguments and results,
            as a whole Equinox model has: it is traced for each value of theirs.
        chip: "auto" for this one, "cpu" for this machine's processor, the name of a chip, or a `hardware.Chip`.
        rules: {name of a rule: False} switches rules off; `ft.explain(ft.tune(step), *args)` names those that fire.

    Returns:
        A function with step's signature and results, and jit's `trace` and `lower`.

    Raises:
        ValueError: for an unknown chip or rule.
        TypeError: where `step` is no function, or cannot be traced.
    """
    if not callable(step):
        raise TypeError(f"tune: a step is a function of arrays; got a {type(step).__name__}")
    chip = _chip(chip)
    chosen = _chosen(chip, rules or {})
    return _Tuned(step, chip, chosen)


class _Tuned:
    """A tuned step. A class, and no function with `trace` and `lower` as attributes, since jax.jit hands a function's
    attributes on: they would stand in the place of its own."""

    def __init__(self, step, chip, rules):
        functools.update_wrapper(self, step)
        for name in vars(self).keys() & {"autocast", "lower", "trace"}:
            del vars(self)[name]
        self._plain = not hasattr(step, "trace")
        inner = jax.jit(_of_boxes(step)) if self._plain else step
        self._step, self._inner, self._tuner, self._programs = step, inner, _Tuner(rules), {}
        self.tuned = inner, chip, rules, self._given    # for explain

    def __call__(self, *args, **kwargs):
        if jax.config.jax_disable_jit:
            return self._step(*args, **kwargs)
        if not _jax.outermost():
            return self._tuner.run(self._inner, *self._given(args, kwargs))
        compiled, statics = self._program(args, kwargs)
        if not statics:
            return compiled(*args, **kwargs)
        args, kwargs = self._given(args, kwargs)
        return unboxed(compiled(*args, **kwargs))

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args, **kwargs):
        """As jit's: the way to compile ahead."""
        args, kwargs = self._given(args, kwargs)
        return self._program(args, kwargs)[0].trace(*args, **kwargs)

    def lower(self, *args, **kwargs):
        return self.trace(*args, **kwargs).lower()

    def _given(self, args, kwargs):
        return boxed((args, kwargs)) if self._plain else (args, kwargs)

    def _program(self, args, kwargs):
        key = len(args), frozenset(kwargs)
        if key not in self._programs:
            self._programs[key] = _program(self._tuner, self._step, self._inner, *self._given(args, kwargs))
        return self._programs[key]


def _chip(chip) -> hardware.Chip:
    if isinstance(chip, hardware.Chip):
        return chip
    if not isinstance(chip, str):
        raise TypeError(f"tune: a chip is 'auto', a name or a hardware.Chip; got a {type(chip).__name__}")
    if chip == "cpu":
        return hardware.detect(jax.local_devices(backend="cpu")[0])
    found = hardware.detect(None if chip == "auto" else chip)
    if not found.known and chip != "auto":
        raise ValueError(f"tune: no chip is called {chip!r}; nearest: "
                         f"{', '.join(map(repr, hardware.chips.nearest(chip)))}")
    return found


def _chosen(chip, rules) -> tuple[Rule, ...]:
    every = {rule.name: rule for platform in RULES.values() for rule in platform}
    for name, on in rules.items():
        if name not in every:
            raise ValueError(f"tune: no rule is called {name!r}; there are {', '.join(every)}")
        if not isinstance(on, bool):
            raise ValueError(f"tune: the rule {name!r} is True (on) or False (off); got {on!r}")
    return tuple(rule for rule in RULES.get(chip.kind, ()) if rules.get(rule.name, _pays(rule)))


def _pays(rule) -> bool:
    """Whether the rule is on for the XLA that is installed."""
    return rule.below is None or _version(jaxlib.__version__) < _version(rule.below)


def _version(text) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _of_boxes(step):
    return functools.wraps(step, updated=())(lambda *args, **kwargs: boxed(step(*unboxed(args), **unboxed(kwargs))))


def _program(tuner, step, inner, args, kwargs):
    """(the step compiled for itself, whether anything in it is no array): with the donation of the jitted one, and the
    compiler options that suit it."""
    name = getattr(step, "__name__", type(step).__name__)
    try:
        traced = inner.trace(*args, **kwargs)
    except _NOT_TRACED as error:
        raise TypeError(f"tune traces the step with arrays in place of numbers, and '{name}' cannot be traced: "
                        f"{str(error).strip().splitlines()[0]}") from error
    if not isinstance(traced, jax.stages.Traced):
        raise TypeError(f"tune: a step is a function of arrays, jitted by jax.jit or not at all; '{name}' is a "
                        f"{type(step).__module__}.{type(step).__name__}")
    where, named = traced.args_info
    if len(where) != len(args) or len(named) != len(kwargs):
        raise TypeError("tune: a step takes arrays alone; bind its static arguments with functools.partial")
    given = _donated(traced)
    compiled = jax.jit(
        functools.wraps(step, updated=())(lambda *args, **kwargs: boxed(tuner.run(inner, args, kwargs))),
        donate_argnums=[i for i, info in enumerate(given[0]) if _all(info)],
        donate_argnames=[name for name, info in given[1].items() if _all(info)],
        compiler_options=tuner.options(traced.jaxpr) or None)
    return compiled, holds_statics((args, kwargs, traced.out_info))


def _donated(traced) -> tuple:
    """Which leaves of the arguments are donated; by a jitted function too that the step only calls, as
    functools.partial does."""
    leaves, structure = jax.tree.flatten(traced.args_info)
    jaxpr, donated = traced.jaxpr.jaxpr, [leaf.donated for leaf in leaves]
    if len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name == "jit":
        eqn = jaxpr.eqns[0]
        inner = {id(v) for v, given in zip(eqn.invars, eqn.params["donated_invars"]) if given}
        donated = [given or id(v) in inner for given, v in zip(donated, jaxpr.invars)]
    return jax.tree.unflatten(structure, donated)


def _all(donated) -> bool:
    leaves = jax.tree.leaves(donated)
    return bool(leaves) and all(leaves)


class Fired(NamedTuple):
    """What tune made of one equation: its scope, primitive, the rule that fired, and what it does."""

    scope: str
    primitive: str
    rule: str
    reason: str


class _Tuner(Interpreter):
    """A note says that a value costs nothing to read as it is, see `_tune_cpu`, or how it is transposed."""

    def __init__(self, rules, rows=None):
        super().__init__()
        self.rows, self.rules, self.compiling = rows, {}, [rule for rule in rules if rule.options]
        for rule in rules:
            for primitive in rule.primitives if rule.apply else ():
                self.rules.setdefault(primitive, []).append(rule)

    def depends(self, scope):
        return None if self.rows is None else object()    # every call is explained

    def options(self, closed) -> dict:
        """The compiler options for a program; none for symbolic sizes, since an exported program has no options."""
        equations = list(_equations(closed.jaxpr)) if self.compiling else []
        if not all(_known(v.aval) for eqn in equations for v in (*eqn.invars, *eqn.outvars)):
            return {}
        return {name: value for rule in self.compiling if rule.when(equations) for name, value in rule.options.items()}

    def argument(self, x):
        return Value(x, True)

    def opened(self, closed):
        return _jax.opened(closed)

    def equation(self, eqn, scope, inputs, plan):
        rules = self.rules.get(eqn.primitive.name, ())
        for rule in rules if all(_free(v.aval) for v in eqn.invars) else ():
            outputs = rule.apply(eqn, inputs)
            if outputs is not None:
                if self.rows is not None:
                    self.rows.append(Fired(scope, eqn.primitive.name, rule.name, rule.reason))
                values = [y if isinstance(y, Value) else Value(y) for y in outputs]
                return [Value(restore(y, v.aval), y.note) for y, v in zip(values, eqn.outvars)]
        if eqn.primitive.name in _tune_cpu.VIEWS and (inputs[0].note is True or np.ndim(inputs[0].x) == 0):
            return [Value(y.x, True) for y in plain(eqn, inputs)]
        return NotImplemented if (outputs := followed(eqn, inputs)) is None else outputs


def _known(aval) -> bool:
    """Whether no size of this type is symbolic."""
    return all(isinstance(size, int) for size in getattr(aval, "shape", ()))


def _free(aval) -> bool:
    """Whether arrays of this type may be given another shape: their sizes are known, and JAX leaves it to the compiler
    which axes lie on which devices."""
    return _known(aval) and all(axis is None for axis in getattr(aval.sharding, "spec", ()))


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in _jax.sub_jaxprs(eqn):
            yield from _equations(sub.jaxpr)
