"""The arguments of a program as arrays, which JAX's transforms trace, and the rest."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .program import Program


def is_array(x) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic)) and not is_ref(x)


def is_ref(x) -> bool:
    return isinstance(x, jax.Ref)


class Arguments:
    """A list of arguments, split into the leaves that JAX traces and those that it does not."""

    def __init__(self, program: Program, args: tuple):
        marked = []
        for i, arg in enumerate(args):
            number = not isinstance(arg, bool) and isinstance(
                arg, (int, float, complex)
            )  # not a leaf of a module
            marked += [
                (i, i not in program.static and (is_array(x) or is_ref(x) or number))
                for x in jax.tree.leaves(arg)
            ]
        self.leaves, self.structure = jax.tree.flatten(args)
        self.traced = [n for n, (_, traced) in enumerate(marked) if traced]
        inexact = lambda x: not is_ref(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)
        self.wrt = [
            k
            for k, n in enumerate(self.traced)
            if marked[n][0] in program.wrt and inexact(self.leaves[n])
        ]

    @property
    def arrays(self) -> tuple:
        return tuple(self.leaves[n] for n in self.traced)

    def flat(self, f: Callable) -> Callable:
        """f as a function of the traced leaves; its results without leaves that are no arrays."""

        def call(*arrays):
            leaves = list(self.leaves)
            for n, x in zip(self.traced, arrays):
                leaves[n] = x
            return arrays_of(f(*jax.tree.unflatten(self.structure, leaves)))

        return call

    def gradient(self, f: Callable) -> Callable:
        """The gradient of `total` of f with respect to the leaves that are differentiated, a
        function of the traced leaves."""
        return jax.grad(lambda *arrays: total(self.flat(f)(*arrays)), argnums=tuple(self.wrt))


def arrays_of(tree) -> list:
    """The leaves that a jitted function can return."""
    leaves = [
        x
        for x in jax.tree.leaves(tree)
        if is_array(x) or isinstance(x, (bool, int, float, complex))
    ]
    return [x for x in leaves if getattr(x, "dtype", None) != jax.dtypes.float0]


def total(outputs):
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


def others(program: Program) -> list[tuple]:
    """The arguments of further calls."""
    if program.others is not None:
        return program.others()
    return [jax.tree.map(_changed, program.args())]


def stacked(program: Program) -> tuple:
    """The arrays of two calls, stacked for vmap."""
    calls = Arguments(program, program.args()), Arguments(program, others(program)[0])
    return tuple(map(_stacked, *(arguments.arrays for arguments in calls)))


def _stacked(x, y):
    if is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.stack([x, y])
    dtype = jnp.result_type(x)
    return jax.device_put(
        np.stack([np.asarray(x, dtype), np.asarray(y, dtype)])
    )  # compiles nothing


def _changed(x):
    if not is_array(x):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.clone(
            jax.vmap(lambda k: jax.random.fold_in(k, 1))(x.ravel()).reshape(x.shape)
            if x.ndim
            else jax.random.fold_in(x, 1)
        )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    y = (np.asarray(x) * np.asarray(0.9, x.dtype)).astype(x.dtype)
    return _placed(y, x)


def rounded(x):
    """An array of float32 with values of bfloat16: shows how far a program amplifies such errors."""
    if is_array(x) and x.dtype in (jnp.float32, jnp.complex64):
        y = np.asarray(x)
        f = lambda part: part.astype(jnp.bfloat16).astype(np.float32)
        y = f(y.real) + 1j * f(y.imag) if x.dtype == jnp.complex64 else f(y)
        return _placed(y.astype(x.dtype), x)
    return x


def _placed(y, x):
    """y with the sharding of x, where x is on several devices."""
    if isinstance(x, jax.Array):
        return jax.device_put(y, x.sharding if len(x.sharding.device_set) > 1 else None)
    return y
