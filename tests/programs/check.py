"""Compares a transformed program with plain JAX."""

from __future__ import annotations

import contextlib
import gc
import re
from collections import Counter
from collections.abc import Callable

import jax

from fnet import jaxpr
from fnet import transforms as ft
from fnet.transforms._capture import _capture, _inspect

from .arguments import Arguments, is_array, others, stacked
from .compare import Differs, largest, same_arguments, same_leaf, same_sharding, same_structure
from .forms import Forms, Plain, PlainFails, run
from .program import Program

NOT = lambda primitive, scope, inputs, equation: NotImplemented
WRAP = {
    "plain": lambda program: lambda f: f,  # tests the table itself
    "rewrite": lambda program: lambda f: ft.rewrite(f, NOT),
    "autocast": lambda program: lambda f: ft.autocast(f, "bfloat16"),
    "autocast32": lambda program: lambda f: ft.autocast(f, "bfloat16", rules=program.rules),
    "autocast16": lambda program: lambda f: ft.autocast(f, "float16"),
    "tune": lambda program: lambda f: ft.tune(f, "cpu"),
    "microbatch": lambda program: (
        lambda f: ft.microbatch(
            f, program.slices, argnums=program.batched, weight=program.weight, carry=()
        )
    ),
    "rematerialize": lambda program: ft.rematerialize,
    "intervene": lambda program: _identities,
}
LOW = ("autocast", "autocast16")
LIMITS = {  # what plain JAX says -> why the check means nothing
    "the platform for the specified backend": "JAX lowers callbacks for attached platforms alone",
    "MLIR translation rule for primitive": "plain JAX has no form of a primitive for the platform",
    "'NoneType' object has no attribute 'build_": "plain JAX needs the GPU plugin to lower it",
    "Leaked trace": "plain JAX leaks a tracer",
}


def _identities(f):
    """f with all its sites captured, and replaced by their own values."""

    def g(*args, **kwargs):
        program = _capture._Program(f, args, kwargs)
        sites = [site for site in program.level.sites if not site.obstacle]
        changed = [site for site in sites if not site.differentiated and not site.custom]
        same = dict.fromkeys(changed, lambda leaves, indices: leaves)
        return program.run(_inspect.Inspector(program.level, sites, same))[0]

    return jaxpr.wraps(f)(g)


class Comparison:
    """The checks of one program. What plain JAX computes, and what JAX traces, is kept for further
    checks."""

    def __init__(self, program: Program):
        self.program, self._forms = program, {}
        with settings(program):
            self._plain = Plain(program)

    def applies(self, transform: str, check: str) -> bool:
        """Whether a check of a transform means something for this program."""
        program = self.program
        if transform == "microbatch" and not program.batched:
            return False
        if transform == "autocast16" and not program.float16:
            return False
        if check == "gradient inside" and program.inner:
            return False
        if (
            check == "gradient inside"
            and transform == "microbatch"
            and {*program.wrt} & {*program.batched}
        ):
            return False  # it averages results, and the gradients of the rows of a batch are not to be averaged
        if check == "vmap":
            return bool(self._plain.arguments.arrays)
        return bool(program.wrt) or not check.startswith("gradient")

    def verify(self, transform: str, check: str) -> str:
        """Runs one check. Returns "ok" or "excluded: reason".

        Raises:
            Differs: if the results differ.
            PlainFails: if plain JAX does not pass the check, for no known reason.
            Exception: whatever the transformed program raises.
        """
        program = self.program
        if reason := program.listed(program.excluded, transform, check):
            return f"excluded: {reason}"
        error = program.listed(program.refused, transform, check)
        if error is None and transform.startswith("autocast") and not program.float32:
            error = "the function has none"
        with settings(program):
            if transform not in self._forms:
                self._forms[transform] = Forms(program, WRAP[transform](program))
            check_it = lambda: CHECKS[check](self._plain, self._forms[transform], transform)
            try:
                if error is not None:
                    # The runner makes a scalar of the results, possibly in float32.
                    return _refuses(check_it, error, optional=check == "gradient inside")
                check_it()
            except PlainFails as e:
                reason = next((reason for said, reason in LIMITS.items() if said in str(e)), None)
                if reason is None:
                    raise
                return f"excluded: {reason}"
        return "ok"


@contextlib.contextmanager
def settings(program: Program):
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion(program.promotion))
        stack.enter_context(
            jax.numpy_rank_promotion("raise" if program.promotion == "strict" else "allow")
        )
        if program.x64:
            stack.enter_context(jax.enable_x64(True))
        yield


def _refuses(check: Callable, error: str, *, optional: bool) -> str:
    try:
        check()
    except Differs:
        raise
    except Exception as e:
        if re.search(error, str(e)):
            return f"excluded: raises {type(e).__name__} by contract"
        raise
    if optional:
        return "ok"
    raise Differs(f"expected an error that matches {error!r}, got a result")


# The checks: functions of the plain forms, the transformed forms and the transform.


def _compare(plain, transform, check, f, g, args):
    """Runs both, each on arguments of its own, and compares results, events and mutated arguments."""
    program, low = plain.program, transform in LOW
    want, wanted, reference = plain.reference(check, f, args)
    coarse = [None] * len(jax.tree.leaves(want))
    if low:
        coarse = [(x, program.low) for x in plain.rounded(check, f, args)]
    mine = args()
    got, events = run(g, *mine)
    same_structure(got, want)
    # Leaves that are nearly zero, such as the gradient of a bias before a softmax, are compared
    # with the others.
    floor = max((largest(x) for x in jax.tree.leaves(want)), default=0.0) * (0.1 if low else 0.01)
    for (path, x), y, bound in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), coarse):
        same_leaf(jax.tree_util.keystr(path), y, x, program.tolerance, bound, floor)
    if not (
        transform == "tune" and check == "value"
    ):  # tune compiles, which may choose other shardings
        for y, x in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            same_sharding(y, x)
    same_arguments(mine, reference, program.tolerance, low)
    if low:
        events, wanted = len(events), len(wanted)
    elif program.events == "set":
        events, wanted = Counter(map(str, events)), Counter(map(str, wanted))
    if events != wanted:
        raise Differs(f"events: expected {wanted}, got {events}")
    return got


def _value(plain, mine, transform):
    program, g = plain.program, mine.function
    got = _compare(plain, transform, "value", plain.function, g, program.args)
    if hasattr(g, "lower") and all(map(is_array, jax.tree.leaves(program.args()))):
        same, _ = run(g.lower(*program.args()).compile(), *program.args())
        for y, x in zip(jax.tree.leaves(same), jax.tree.leaves(got)):
            same_leaf(
                "compiled by .lower",
                y,
                x,
                program.tolerance or 1e-3 if transform in LOW else 1e-5,
                None,
            )


def _again(plain, mine, transform):
    program = plain.program
    run(mine.function, *program.args())
    for n in range(len(others(program))):
        _compare(
            plain,
            transform,
            ("again", n),
            plain.function,
            mine.function,
            lambda n=n: others(program)[n],
        )
    _compare(
        plain, transform, "value", plain.function, mine.function, program.args
    )  # and as in the beginning


def _arrays(program) -> tuple:
    return Arguments(program, program.args()).arrays


def _jit(plain, mine, transform):
    _compare(plain, transform, "jit", plain.jit, mine.jit, lambda: _arrays(plain.program))


def _vmap(plain, mine, transform):
    _compare(plain, transform, "vmap", plain.vmap, mine.vmap, lambda: stacked(plain.program))


def _gradient_outside(plain, mine, transform):
    _compare(
        plain, transform, "gradient", plain.gradient, mine.gradient, lambda: _arrays(plain.program)
    )


def _gradient_inside(plain, mine, transform):
    program, arguments = plain.program, mine.arguments
    if transform == "microbatch":  # which needs the program's own arguments

        def gradient(*args):
            own = Arguments(program, args)
            return own.gradient(program.f)(*own.arrays)

        f, g = (jax.jit(arguments.flat(each)) for each in (gradient, mine.wrap(gradient)))
        _compare(plain, transform, "gradient of arguments", f, g, lambda: _arrays(program))
        return
    g = mine.wrap(arguments.gradient(plain.function))
    g = g if transform == "tune" else jax.jit(g)  # tune compiles by itself
    _compare(plain, transform, "gradient", plain.gradient, g, lambda: _arrays(program))


def _leaks(plain, mine, transform):
    def trace(forms):
        # For every trace that is still alive, JAX collects garbage and searches all objects. Older
        # ones are exempt.
        gc.freeze()
        try:
            with jax.checking_leaks():
                forms.jit.trace(*forms.arguments.arrays)
                if forms.arguments.wrt:
                    forms.gradient.trace(*forms.arguments.arrays)
        finally:
            gc.unfreeze()

    plain.once("leaks", lambda: trace(Forms(plain.program, plain.wrap)))
    trace(Forms(plain.program, mine.wrap))


def _lowering(platform):
    def lower(forms):
        forms.jit.trace(*forms.arguments.arrays).lower(lowering_platforms=(platform,))

    def check(plain, mine, transform):
        plain.once(platform, lambda: lower(plain))
        lower(mine)

    return check


CHECKS = {
    "value": _value,
    "again": _again,
    "jit": _jit,
    "vmap": _vmap,
    "gradient": _gradient_outside,
    "gradient inside": _gradient_inside,
    "leaks": _leaks,
    "cuda": _lowering("cuda"),
    "tpu": _lowering("tpu"),
}
