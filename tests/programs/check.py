"""Compares a transformed program with plain JAX."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fnet import jaxpr
from fnet import transforms as ft
from fnet.transforms import _capture

from .program import EVENTS, Program

NOT = lambda primitive, scope, inputs, equation: NotImplemented
WRAP = {
    "plain": lambda program: lambda f: f,    # tests the table itself
    "rewrite": lambda program: lambda f: ft.rewrite(f, NOT),
    "autocast": lambda program: lambda f: ft.autocast(f, "bfloat16"),
    "autocast32": lambda program: lambda f: ft.autocast(f, "bfloat16", rules=program.rules),
    "autocast16": lambda program: lambda f: ft.autocast(f, "float16"),
    "tune": lambda program: lambda f: ft.tune(f, "cpu"),
    "microbatch": lambda program: lambda f: ft.microbatch(
        f, program.slices, argnums=program.batched, weight=program.weight),
    "rematerialize": lambda program: ft.rematerialize,
    "intervene": lambda program: _identities,
}
LOW = ("autocast", "autocast16")


def _identities(f):
    """f with all its sites captured, and replaced by their own values."""
    def g(*args, **kwargs):
        program = _capture._Program(f, args, kwargs)
        sites = [site for site in program.level.sites if not site.obstacle]
        changed = [site for site in sites if not site.differentiated and not site.custom]
        same = dict.fromkeys(changed, lambda leaves, indices: leaves)
        return program.run(jaxpr.Inspector(program.level, sites, same))[0]
    return jaxpr.wraps(f)(g)


_LIMITS = {    # what plain JAX says -> why the check means nothing
    "the platform for the specified backend": "JAX lowers callbacks for attached platforms alone",
    "MLIR translation rule for primitive": "plain JAX has no form of a primitive for the platform",
    "'NoneType' object has no attribute 'build_": "plain JAX needs the GPU plugin to lower it",
    "Leaked trace": "plain JAX leaks a tracer",
}


class Differs(Exception):
    """The transformed program and plain JAX disagree."""


def applies(program: Program, transform: str, check: str) -> bool:
    """Whether a check of a transform means something for this program."""
    if transform == "microbatch" and not program.batched:
        return False
    if transform == "autocast16" and not program.float16:
        return False
    if check == "gradient inside" and program.inner:
        return False
    if check == "gradient inside" and transform == "microbatch" and {*program.wrt} & {*program.batched}:
        return False    # it averages results, and the gradients of the rows of a batch are not to be averaged
    if check == "vmap":
        with settings(program):
            return bool(Arguments(program, program.args()).arrays)
    return bool(program.wrt) or not check.startswith("gradient")


def verify(program: Program, transform: str, check: str) -> str:
    """Runs one check. Returns "ok" or "excluded: reason".

    Raises:
        Differs: if the results differ.
        Exception: whatever the transformed program raises.
    """
    if reason := program.listed(program.excluded, transform, check):
        return f"excluded: {reason}"
    with settings(program):
        wrap = WRAP[transform](program)
        error = program.listed(program.refused, transform, check)
        if error is None and transform.startswith("autocast") and not program.float32:
            error = "the function has none"
        if error is not None:
            # The runner makes a scalar of the results, possibly in float32.
            return _refuses(lambda: _CHECKS[check](program, transform, wrap), error, check == "gradient inside")
        try:
            _CHECKS[check](program, transform, wrap)
        except PlainFails as e:
            reason = next((reason for said, reason in _LIMITS.items() if said in str(e)), None)
            if reason is None:
                raise
            return f"excluded: {reason}"
    return "ok"


@contextlib.contextmanager
def settings(program: Program):
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion(program.promotion))
        stack.enter_context(jax.numpy_rank_promotion("raise" if program.promotion == "strict" else "allow"))
        if program.x64:
            stack.enter_context(jax.enable_x64(True))
        yield


def _refuses(run: Callable, error: str, optional: bool) -> str:
    try:
        run()
    except Differs:
        raise
    except Exception as e:
        if re.search(error, str(e)):
            return f"excluded: raises {type(e).__name__} by contract"
        raise
    if optional:
        return "ok"
    raise Differs(f"expected an error that matches {error!r}, got a result")


def _plain(program: Program) -> Callable:
    return functools.partial(program.f, lambda f: f) if program.inner else program.f


def _wrapped(program: Program, wrap: Callable) -> Callable:
    return functools.partial(program.f, wrap) if program.inner else wrap(program.f)


# The arguments of a program as arrays, which JAX's transforms trace, and the rest.

def _is_array(x) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not _is_ref(x)


def _is_ref(x) -> bool:
    return isinstance(x, jax.Ref)


class Arguments:
    """A list of arguments, split into the leaves that JAX traces and those that it does not."""

    def __init__(self, program: Program, args: tuple):
        self.args, marked = args, []
        for i, arg in enumerate(args):
            number = not isinstance(arg, bool) and isinstance(arg, (int, float, complex))    # not a leaf of a module
            marked += [(i, i not in program.static and (_is_array(x) or _is_ref(x) or number))
                       for x in jax.tree.leaves(arg)]
        self.leaves, self.structure = jax.tree.flatten(args)
        self.traced = [n for n, (_, traced) in enumerate(marked) if traced]
        inexact = lambda x: not _is_ref(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        self.wrt = [k for k, n in enumerate(self.traced)
                    if marked[n][0] in program.wrt and inexact(self.leaves[n])]

    @property
    def arrays(self) -> list:
        return [self.leaves[n] for n in self.traced]

    def flat(self, f: Callable) -> Callable:
        """f as a function of the traced leaves; its results without leaves that are no arrays."""
        def call(*arrays):
            leaves = list(self.leaves)
            for n, x in zip(self.traced, arrays):
                leaves[n] = x
            return _arrays_of(f(*jax.tree.unflatten(self.structure, leaves)))
        return call


def _arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if _is_array(x) or isinstance(x, (bool, int, float, complex))]


def _others(program: Program) -> list[tuple]:
    if program.others is not None:
        return program.others()
    return [jax.tree.map(_changed, program.args())]


def _changed(x):
    if not _is_array(x):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.clone(jax.vmap(lambda k: jax.random.fold_in(k, 1))(x.ravel()).reshape(x.shape)
                                if x.ndim else jax.random.fold_in(x, 1))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    y = (np.asarray(x) * np.asarray(0.9, x.dtype)).astype(x.dtype)
    return _placed(y, x)


def _placed(y, x):
    """y with the sharding of x, where x is on several devices."""
    if isinstance(x, jax.Array):
        return jax.device_put(y, x.sharding) if len(x.sharding.device_set) > 1 else jnp.asarray(y)
    return y


def rounded(x):
    """An array of float32 with values of bfloat16: shows how far a program amplifies such errors."""
    if _is_array(x) and x.dtype in (jnp.float32, jnp.complex64):
        y = np.asarray(x)
        f = lambda part: part.astype(jnp.bfloat16).astype(np.float32)
        y = f(y.real) + 1j * f(y.imag) if x.dtype == jnp.complex64 else f(y)
        return _placed(y.astype(x.dtype), x)
    return x


def _total(outputs):
    """A real number that depends on every element of every floating-point output."""
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    total = jnp.zeros((), dtype)
    for y in outputs:
        if not jnp.issubdtype(jnp.result_type(y), jnp.inexact) or not jnp.size(y):
            continue
        y = jnp.asarray(y).reshape(-1)
        weight = jnp.cos(jnp.arange(y.size, dtype=dtype))
        for part in [y.real, y.imag] if jnp.iscomplexobj(y) else [y]:
            total = total + jnp.sum(part.astype(dtype) * weight)
    return total


def _gradient(program, arguments, f):
    return jax.grad(lambda *arrays: _total(arguments.flat(f)(*arrays)), argnums=tuple(arguments.wrt))


# The checks.

def _run(call: Callable, *args):
    """(the result, the events)"""
    EVENTS.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = call(*args)
        jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
        jax.effects_barrier()
    events = [*EVENTS, *printed.getvalue().splitlines()]
    EVENTS.clear()
    return result, events


def _compare(program, transform, check, plain, g, args):
    """Runs both, each on arguments of its own, and compares results, events and mutated arguments."""
    want, wanted, reference, coarse = _reference(program, check, plain, args, transform in LOW)
    mine = args()
    got, events = _run(g, *mine)
    same_structure(got, want)
    # Leaves that are nearly zero, such as the gradient of a bias before a softmax, are compared with the others.
    floor = max((_largest(x) for x in jax.tree.leaves(want)), default=0.) * (0.1 if transform in LOW else 0.01)
    for (path, x), y, bound in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), coarse):
        same_leaf(jax.tree_util.keystr(path), y, x, program.tolerance, bound, floor)
    if not (transform == "tune" and check == "value"):    # tune compiles, which may choose other shardings
        for y, x in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            same_sharding(y, x)
    same_arguments(mine, reference, program.tolerance, transform in LOW)
    if transform in LOW:
        events, wanted = len(events), len(wanted)
    elif program.events == "set":
        events, wanted = Counter(map(str, events)), Counter(map(str, wanted))
    if events != wanted:
        raise Differs(f"events: expected {wanted}, got {events}")


class PlainFails(Exception):
    """Plain JAX itself cannot run this check: the table needs an exclusion."""


_kept: dict = {}    # what plain JAX makes of the latest program: the same for every transform


def _once(program, key, make: Callable):
    if _kept.get("program") is not program:
        _kept.clear()
        _kept["program"] = program
    if key not in _kept:
        try:
            _kept[key] = make()
        except Exception as e:
            _kept[key] = PlainFails(f"{type(e).__name__}: {e}")
    if isinstance(_kept[key], PlainFails):
        raise _kept[key]
    return _kept[key]


def _reference(program, check, plain, args, low):
    """(the result of plain JAX, its events, its arguments, leaves of the result for arguments rounded to bfloat16)"""
    def make():
        arguments = args()
        return *_run(plain, *arguments), arguments

    want, events, arguments = _once(program, check, make)
    if not low:
        return want, events, arguments, [None] * len(jax.tree.leaves(want))
    coarse = _once(program, (check, "rounded"), lambda: _run(plain, *jax.tree.map(rounded, args()))[0])
    return want, events, arguments, [(_leaf(x), program.low) for x in jax.tree.leaves(coarse)]


def _value(program, transform, wrap):
    g = _wrapped(program, wrap)
    _compare(program, transform, "value", _plain(program), g, program.args)
    if hasattr(g, "lower") and all(map(_is_array, jax.tree.leaves(program.args()))):
        same, _ = _run(g.lower(*program.args()).compile(), *program.args())
        for y, x in zip(jax.tree.leaves(same), jax.tree.leaves(g(*program.args()))):
            same_leaf("compiled by .lower", y, x, program.tolerance or 1e-3 if transform in LOW else 1e-5, None)


def _again(program, transform, wrap):
    g = _wrapped(program, wrap)
    _run(g, *program.args())
    for n in range(len(_others(program))):
        _compare(program, transform, ("again", n), _plain(program), g, lambda n=n: _others(program)[n])
    _compare(program, transform, "value", _plain(program), g, program.args)    # and as in the beginning


def _jit(program, transform, wrap):
    arguments = lambda: Arguments(program, program.args())
    f = jax.jit(arguments().flat(_plain(program)))
    g = jax.jit(arguments().flat(_wrapped(program, wrap)))
    _compare(program, transform, "jit", f, g, lambda: tuple(arguments().arrays))


def _stacked(program):
    first, second = Arguments(program, program.args()), Arguments(program, _others(program)[0])
    stack = lambda x, y: jnp.stack([jnp.asarray(x), jnp.asarray(y)])
    return tuple(stack(x, y) for x, y in zip(first.arrays, second.arrays))


def _vmap(program, transform, wrap):
    arguments = Arguments(program, program.args())
    f = jax.jit(jax.vmap(arguments.flat(_plain(program))))
    g = jax.jit(jax.vmap(arguments.flat(_wrapped(program, wrap))))
    _compare(program, transform, "vmap", f, g, lambda: _stacked(program))


def _gradient_outside(program, transform, wrap):
    arguments = Arguments(program, program.args())
    f = jax.jit(_gradient(program, arguments, _plain(program)))
    g = jax.jit(_gradient(program, arguments, _wrapped(program, wrap)))
    _compare(program, transform, "gradient", f, g, lambda: tuple(arguments.arrays))


def _gradient_inside(program, transform, wrap):
    arguments = Arguments(program, program.args())
    if transform == "microbatch":    # which needs the program's own arguments
        gradient = jax.grad(lambda *args: _total(_arrays_of(program.f(*args))), argnums=program.wrt, allow_int=True)
        return _compare(program, transform, "gradient of arguments", gradient, wrap(gradient), program.args)
    gradient = _gradient(program, arguments, _plain(program))
    arrays = lambda: tuple(Arguments(program, program.args()).arrays)
    g = wrap(gradient) if transform == "tune" else jax.jit(wrap(gradient))    # tune compiles by itself
    _compare(program, transform, "gradient", jax.jit(gradient), g, arrays)


def _leaks(program, transform, wrap):
    def trace(f):
        with jax.checking_leaks():
            arguments = Arguments(program, program.args())
            jax.jit(arguments.flat(f)).trace(*arguments.arrays)
            if arguments.wrt:
                jax.jit(_gradient(program, arguments, f)).trace(*arguments.arrays)
    _once(program, "leaks", lambda: trace(_plain(program)))
    trace(_wrapped(program, wrap))


def _lowering(platform):
    def check(program, transform, wrap):
        def lower(f):
            arguments = Arguments(program, program.args())
            jax.jit(arguments.flat(f)).trace(*arguments.arrays).lower(lowering_platforms=(platform,))
        _once(program, platform, lambda: lower(_plain(program)))
        lower(_wrapped(program, wrap))
    return check


_CHECKS = {"value": _value, "again": _again, "jit": _jit, "vmap": _vmap, "gradient": _gradient_outside,
           "gradient inside": _gradient_inside, "leaks": _leaks, "cuda": _lowering("cuda"), "tpu": _lowering("tpu")}


# Comparisons.

def same_structure(got, want):
    got, want = jax.tree.structure(got), jax.tree.structure(want)
    if got != want:
        raise Differs(f"structure: expected {want}, got {got}")


def same_arguments(mine, reference, tolerance, low):
    """Arguments that are mutated in place hold the same values."""
    for (path, y), x in zip(jax.tree.leaves_with_path(reference), jax.tree.leaves(mine)):
        if _is_ref(y):
            x, y = x[...], y[...]
        if _is_array(y) and not (isinstance(y, jax.Array) and y.is_deleted()):
            same_leaf(f"argument {jax.tree_util.keystr(path)} afterwards", x, y, 0.1 if low else tolerance, None)


def same_sharding(got, want):
    if isinstance(got, jax.Array) and isinstance(want, jax.Array) and len(want.sharding.device_set) > 1 and (
            not got.sharding.is_equivalent_to(want.sharding, want.ndim)):
        raise Differs(f"sharding: expected {want.sharding}, got {got.sharding}")


def _largest(x) -> float:
    if not _is_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.
    x = np.abs(_wide(x))
    return float(x[np.isfinite(x)].max(initial=0.))


def _leaf(x):
    if _is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if _is_array(x) and x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    return x


def same_leaf(where, got, want, tolerance, coarse, floor=0.):
    """One leaf of a result: kind, dtype, shape, weak type and values.

    Args:
        coarse: what plain JAX returns for arguments rounded to bfloat16, and a tolerance. If it is given, the error
            may be 4 times that of rounding the arguments, plus the tolerance times the largest value.
        floor: the least value that errors are relative to.
    """
    if not _is_array(want) and not isinstance(want, (bool, int, float, complex)):
        if not (got is want or got == want):
            raise Differs(f"{where}: expected {want!r}, got {got!r}")
        return
    types = jax.typeof(got), jax.typeof(want)
    for name in ("dtype", "shape", "weak_type"):
        mine, theirs = (getattr(t, name, None) for t in types)
        if mine != theirs and not (name == "weak_type" and types[1].dtype == bool):
            raise Differs(f"{where}: {name}: expected {theirs}, got {mine}")
    got, want = _leaf(got), _leaf(want)
    x, y = _wide(got), _wide(want)
    if not y.size:
        return
    z = None if coarse is None else _wide(coarse[0])
    if y.dtype.kind not in "fc":
        if not np.array_equal(x, y) and (z is None or np.array_equal(y, z)):
            raise Differs(f"{where}: expected {_short(y)}, got {_short(x)}")
        return
    finite = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), finite) or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        if z is None or np.array_equal(np.isfinite(z), finite):
            raise Differs(f"{where}: expected {_short(y)}, got {_short(x)}")
        return
    if not finite.any():
        return
    scale = max(np.abs(y[finite]).max(), floor, 1e-30)
    error = np.abs(x[finite] - y[finite]).max() / scale
    if z is None:
        bits = jnp.finfo(want.dtype).bits if hasattr(want, "dtype") else 32
        eps = float(jnp.finfo(jnp.result_type(want)).eps)
        bound = tolerance or (1e-12 if eps < 1e-10 else max(1e-5, 4 * eps))
        if bits < 32:
            bound = max(bound, 4 * eps)
    else:
        same = np.isfinite(z) & finite
        bound = coarse[1] + 4 * (np.abs(z[same] - y[same]).max(initial=0) / scale)
    if not error <= bound:
        raise Differs(f"{where}: expected {_short(y)}, got {_short(x)} (relative error {error:.1e}, bound {bound:.1e})")


def _wide(x):
    x = np.asarray(x)
    if (x.dtype.kind in "biufc" and x.dtype.itemsize >= 4) or x.dtype.kind in "biu":
        return x.astype(np.float64) if x.dtype.kind == "f" else x
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.int64)


def _short(x):
    flat = np.array2string(np.asarray(x).ravel()[:6], precision=6, separator=", ")
    return flat if np.size(x) <= 6 else f"{flat[:-1]}, ...]"
