"""tune: rewrites a complete step into forms for which the chip's compiler generates fast code, with
equal results up to rounding."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Mapping

import jax
import jaxlib

from fnet import _jax, hardware, jaxpr
from fnet.jaxpr import (
    boxed,
    check_function,
    is_array,
    mutable,
    results_boxed,
    statics,
    unboxed,
    wraps,
)
from fnet.transforms._tune import _accelerators, _cpu
from fnet.transforms._tune._cpu import Rule
from fnet.transforms._tune._measure import Measured, measure
from fnet.transforms._tune._tuner import Tuner

_NOT_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
RULES = {
    "cpu": _cpu.RULES,
    "gpu": _accelerators.GPU_RULES,
    "tpu": _accelerators.TPU_RULES,
}


def tune(
    step: Callable,
    chip: str | hardware.Chip = "auto",
    *,
    rules: Mapping[str, bool] | None = None,
    measure: bool = False,
) -> Callable:
    """Rewrites a training step so that XLA compiles it to faster code, with equal results up to
    rounding.

        step = ft.tune(jax.jit(step, donate_argnums=0))

    Pass the complete step, since `tune` rewrites the program after differentiation, and apply it
    after all other transforms. Which operations change, such as convolutions or loops over layers,
    depends on the chip: docs/transforms.md says what each rule does, and
    `print(ft.explain(step, *args))` which ones apply to your step, and where. NaN and Inf stay at
    the same positions. Dtypes, named scopes and donated arguments stay, too.

    `tune` also selects compiler options, which JAX accepts only at the outermost jit. Inside
    another transformation (jit, vmap, grad), a tuned step is therefore a part of the outer program
    without these options, and a warning lists them.

    Args:
        step: a function of arrays, jitted or not, written with any library. Rules also apply inside
            loops, branches, jit, remat, shard_map and custom derivatives. Arguments and results of
            a step that is not jitted may be other things than arrays, such as a whole Equinox
            model. The step is traced again for each new value of an argument that is not an array.
        chip: "auto" (this device), "cpu" (this machine's CPU), the name of a chip, or a
            `hardware.Chip`. Default "auto".
        rules: {name of a rule: False}, the rules to disable. Default None: no rule is disabled.
        measure: whether to select the rules by timing. The first call with arrays then times the
            program, on copies of the arguments, with all rules, with none, and with each one
            disabled in turn. The fastest selection is used, and stored in FNET_CACHE or
            ~/.cache/fnet for later processes. docs/performance.md lists when all rules are used
            without timing. Default False.

    Returns:
        A function with step's signature and results, and with the methods `trace` and `lower` as in
        `jax.jit`.

    Raises:
        ValueError: the chip or a rule is unknown.
        TypeError: `step` is not a function, or cannot be traced.

    >>> step = tune(lambda w, x: jnp.tanh(x @ w), "cpu")
    >>> step(jnp.zeros((3, 2)), jnp.ones((1, 3))).tolist()
    [[0.0, 0.0]]
    """
    check_function("tune", step)
    if type(step).__name__ == "JitWrapped" or not getattr(step, "direct", True):
        step = _called(
            step
        )  # the result of nnx.jit or of `plan.jit`, whose program has arrays alone
    chip = _chip(chip)
    chosen = _chosen(chip, rules or {})
    return _Tuned(step, chip, chosen, measure)


def _called(step):
    return wraps(step)(lambda *args, **kwargs: step(*args, **kwargs))


class _Tuned:
    """A tuned step, a callable object with the methods `trace` and `lower`.

    A tuned step is not a function with the attributes `trace` and `lower`, because `jax.jit` copies
    the attributes of a function to the jitted function. The copied attributes would replace the
    methods `trace` and `lower` of the jitted function.
    """

    def __init__(self, step, chip, rules, measure):
        wraps(step)(self)
        self._step, self._own = mutable.opened(step)
        self._tuner, self._programs = Tuner(rules), {}
        self._measure = measure
        self.tuned = step, chip, rules, self.measured  # for explain

    def __call__(self, *args, **kwargs):
        args = (*self._own, *args)
        if jax.config.jax_disable_jit:
            return self._step(*args, **kwargs)
        if not _jax.outermost():
            return self._inside(args, kwargs)
        return self._program(args, kwargs)(args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args, **kwargs):
        """Traces the program, like `trace` of a jitted function, for ahead-of-time compilation."""
        args = (*self._own, *args)
        return self._program(args, kwargs).trace(args, kwargs)

    def lower(self, *args, **kwargs):
        return self.trace(*args, **kwargs).lower()

    def _inside(self, args, kwargs):
        """Evaluates the rewritten step as a part of an outer program, without compiler options."""
        result = self._tuner.run(self._step, args, kwargs)
        if self._tuner.lost and not self._tuner.warned:
            self._tuner.warned = True
            warnings.warn(
                f"tune: the compiler options {self._tuner.lost} suit this program, but options "
                "belong to the outermost jit: call ft.tune(step) itself instead of jitting it, or "
                "pass compiler_options= to your jit",
                stacklevel=3,
            )
        return result

    def _program(self, args, kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        plain = not hasattr(self._step, "trace") or isinstance(self._step, _Tuned)
        if plain and not all(map(is_array, leaves)):
            # One program for each value of static leaves.
            structure = jax.tree.structure(boxed((args, kwargs)))
        if self._measure and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            structure = structure, "abstract"  # abstract arguments cannot be timed
        if structure not in self._programs:
            tuner, measured = self._tuner, None
            if self._measure:
                measured = self._timed(plain, args, kwargs)
                tuner = Tuner([rule for rule in self.tuned[2] if rule.name in measured.rules])
            self._programs[structure] = _Program(self._step, tuner, plain, args, kwargs, measured)
        return self._programs[structure]

    def measured(self, *args, **kwargs) -> Measured | None:
        """Returns the rewrite rules that were selected by timing for the given arguments.

        If no rules have been selected yet for these arguments, the method first selects the rules
        (see the argument `measure` of `tune`). Returns None if `measure` is False.
        """
        args = (*self._own, *args)
        return self._program(args, kwargs).measured if self._measure else None

    def _timed(self, plain, args, kwargs):
        step, chip, rules, _ = self.tuned

        def compiled(rules):
            program = _Program(step, Tuner(rules), plain, args, kwargs)
            return lambda arguments: program(*arguments)

        def fired():
            tuner = Tuner(rules, rows := [])
            tuner.examine(step, args, kwargs)
            return {row.rule for row in rows} | {rule.name for rule in tuner.suited if rule.options}

        lowered = lambda: (
            (step if hasattr(step, "lower") else jax.jit(step)).lower(*args, **kwargs).as_text()
        )
        return measure(compiled, lowered, fired, rules, chip, (args, kwargs))


class _Program:
    """A step compiled for one structure of its arguments."""

    def __init__(self, step, tuner, plain, args, kwargs, measured=None):
        self.measured = measured
        tree, modules, _ = mutable.extract((args, kwargs)) if plain else ((args, kwargs), None, ())
        self._direct = modules is None and (not plain or not statics(boxed(tree)))
        self._statics = False  # whether a trace returned results that are not arrays
        if not self._direct:

            def functional(args, kwargs, modules):
                given = args, kwargs
                (args, kwargs), new = mutable.insert(unboxed(given), modules)
                with mutable.explained():
                    result = mutable.returned(step(*args, **kwargs), new)
                return self._boxed(result, given), mutable.updates(new, modules)
        elif plain:
            functional = wraps(step)(lambda *args, **kwargs: self._boxed(step(*args, **kwargs)))
        inner = jax.jit(functional) if plain else step
        self._compiled = _compiled(
            inner,
            tuner,
            *self._arguments(args, kwargs)[:2],
            plain=plain,
            name=getattr(step, "__name__", type(step).__name__),
        )

    def __call__(self, args, kwargs):
        return self.call(self._compiled, args, kwargs)

    def call(self, compiled, args, kwargs):
        """Calls a compiled form of the program with the step's arguments."""
        args, kwargs, found = self._arguments(args, kwargs)
        result = compiled(*args, **kwargs)
        if not self._direct:
            result, state = result
            result = mutable.apply(result, found, state)
        return unboxed(result) if self._statics else result

    def trace(self, args, kwargs):
        args, kwargs, _ = self._arguments(args, kwargs)
        traced = self._compiled.trace(*args, **kwargs)
        return traced if self._direct and not self._statics else _Stage(self, traced)

    def _arguments(self, args, kwargs):
        """Returns (args, kwargs) of the compiled function, and the flax.nnx modules in the step's
        arguments."""
        if self._direct:
            return args, kwargs, ()
        tree, modules, found = mutable.extract((args, kwargs))
        return (*boxed(tree), modules), {}, found

    def _boxed(self, result, given=()):
        result = results_boxed(result, given)
        # Checked in every trace: may depend on shapes.
        self._statics = self._statics or bool(statics(result))
        return result


class _Stage:
    """A stage of ahead-of-time compilation (traced, lowered or compiled). `_Stage` is used for a
    program that has arguments or results that are not arrays. A compiled `_Stage` is called with
    the same arguments as the step
    itself."""

    def __init__(self, program, stage):
        self._program, self._stage = program, stage

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def lower(self, *args, **kwargs):
        return _Stage(self._program, self._stage.lower(*args, **kwargs))

    def compile(self, *args, **kwargs):
        return _Stage(self._program, self._stage.compile(*args, **kwargs))

    def __call__(self, *args, **kwargs):
        return self._program.call(self._stage, args, kwargs)


def _chip(chip) -> hardware.Chip:
    if isinstance(chip, hardware.Chip):
        return chip
    if not isinstance(chip, str):
        raise TypeError(
            f"tune: expected a chip that is 'auto', a name or a hardware.Chip; got a "
            f"{type(chip).__name__}"
        )
    if chip == "cpu":
        return hardware.detect(jax.local_devices(backend="cpu")[0])
    found = hardware.detect(None if chip == "auto" else chip)
    if not found.known and chip != "auto":
        raise ValueError(
            f"tune: chip {chip!r} is not in hardware.chips; nearest: "
            f"{', '.join(map(repr, hardware.chips.nearest(chip)))}"
        )
    return found


def _chosen(chip, rules) -> tuple[Rule, ...]:
    if not isinstance(rules, Mapping):
        raise TypeError(f"tune: expected a dict {{name of a rule: False}} as rules; got {rules!r}")
    every = {rule.name: rule for platform in RULES.values() for rule in platform}
    for name, on in rules.items():
        if name not in every:
            raise ValueError(f"tune: unknown rule {name!r}; the rules are {', '.join(every)}")
        if not isinstance(on, bool):
            raise ValueError(
                f"tune: the value of rule {name!r} must be True (on) or False (off); got {on!r}"
            )
    return tuple(rule for rule in RULES.get(chip.kind, ()) if rules.get(rule.name, _pays(rule)))


def _pays(rule) -> bool:
    """Whether the rewrite rule is enabled for the installed version of XLA."""
    return rule.below is None or _version(jaxlib.__version__) < _version(rule.below)


def _version(text) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _compiled(inner, tuner, args, kwargs, *, plain, name):
    """Returns a jitted function that runs the tuned program. The compiled function donates the
    arguments that the step donates. `plain` states whether the step is not jitted itself."""
    try:
        traced = _jax.classically(lambda: inner.trace(*args, **kwargs))
    except _NOT_TRACED as error:
        raise TypeError(
            f"tune: '{name}' cannot be traced with abstract arrays: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    if not isinstance(traced, jax.stages.Traced):
        raise TypeError(
            f"tune: expected a plain function or the result of jax.jit; '{name}' is a "
            f"{type(inner).__module__}.{type(inner).__name__}"
        )
    where, named = traced.args_info
    if len(where) != len(args) or len(named) != len(kwargs):
        raise TypeError(
            "tune: a jitted step with static arguments is not supported; bind them with "
            "functools.partial"
        )
    given = _donated(traced) if plain else jax.tree.map(lambda info: info.donated, traced.args_info)
    return jax.jit(
        wraps(inner)(lambda *args, **kwargs: tuner.run(inner, args, kwargs)),
        donate_argnums=[i for i, info in enumerate(given[0]) if _all(info)],
        donate_argnames=[name for name, info in given[1].items() if _all(info)],
        compiler_options=tuner.options(_jax.without_hi_primitives(traced.jaxpr)) or None,
    )


def _donated(traced) -> tuple:
    """Returns a tree of bools: whether a step that is not jitted donates each leaf of its
    arguments.

    If the step consists of one call of a jitted function (for example, a `functools.partial` of a
    jitted function), it donates the arguments that the jitted function donates. Within another jit,
    JAX ignores this.
    """
    leaves, structure = jax.tree.flatten(traced.args_info)
    program, donated = traced.jaxpr.jaxpr, [leaf.donated for leaf in leaves]
    if len(program.eqns) == 1 and jaxpr.call_name(program.eqns[0]) is not None:
        eqn = program.eqns[0]
        inner = {id(v) for v, given in zip(eqn.invars, jaxpr.donated(eqn)) if given}
        donated = [given or id(v) in inner for given, v in zip(donated, program.invars)]
    return jax.tree.unflatten(structure, donated)


def _all(donated) -> bool:
    leaves = jax.tree.leaves(donated)
    return bool(leaves) and all(leaves)
