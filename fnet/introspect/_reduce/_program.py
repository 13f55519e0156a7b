"""A program with its arguments, of which parts can be cut out and run alone."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax
from fnet.jaxpr import Scope, Traced, cut_out, opened_calls, scopes_in
from fnet.jaxpr._scopes import TOP

Values = Mapping[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A jaxpr without constants, and an array for each of its inputs.

    Attributes:
        jaxpr: an open jaxpr.
        arrays: NumPy arrays; random keys and arrays on several devices are JAX's.
        outer: the scope of the loop or branch whose body this is.
        iterations: which iterations of the loops around it this is, from the outside in, as text.
    """

    jaxpr: Any
    arrays: tuple
    outer: Scope = TOP
    iterations: tuple[str, ...] = ()

    @property
    def equations(self) -> list:
        return self.jaxpr.eqns

    @functools.cached_property
    def function(self) -> Callable[..., tuple]:
        """The program as a function of its arrays that returns a tuple."""
        return _function(self.jaxpr)

    def run(self) -> list:
        """Compiles the program as a whole, and returns its outputs."""
        return jax.block_until_ready(list(_compiled_once(self.jaxpr)(*self.arrays)))

    @functools.cached_property
    def scopes(self) -> list[Scope]:
        """The scope of each equation."""
        scope_of = scopes_in(self.jaxpr, self.outer)
        return [scope_of(eqn) for eqn in self.equations]

    @functools.cached_property
    def key(self) -> str:
        """A digest of the program and of the values of its arguments."""
        digest = hashlib.sha256(str(self.jaxpr).encode())
        for x in self.arrays:
            digest.update(_digest(x))
        return digest.hexdigest()[:24]

    def with_arrays(self, arrays: Sequence) -> Program:
        return dataclasses.replace(self, arrays=tuple(arrays))

    def of(self, eqns: Sequence, outvars: Sequence, values: Values) -> Program | None:
        """Returns the program of those equations among `eqns` on which `outvars` depend. What other
        equations would compute is taken from `values`. None if no output is left."""
        made = {v for eqn in eqns for v in eqn.outvars}
        outvars = [v for v in outvars if not isinstance(v, _jax.Literal) and v in made]
        if not outvars:
            return None
        piece = cut_out(eqns, outvars)
        if any(v not in values for v in piece.invars):
            return None
        jaxpr = _jax.jaxpr_of(piece.eqns, piece.invars, outvars, self.jaxpr.debug_info)
        return dataclasses.replace(self, jaxpr=jaxpr, arrays=tuple(values[v] for v in piece.invars))

    def retraced(self, function: Callable, arrays: Sequence) -> Program:
        """Returns the program of another function, whose inputs are `arrays`."""
        closed = _jax.make_jaxpr(function)(*arrays)
        jaxpr, values = _without_consts(closed, list(map(held, arrays)))
        new = dataclasses.replace(self, jaxpr=jaxpr, arrays=values)
        kept = new.of(jaxpr.eqns, jaxpr.outvars, dict(zip(jaxpr.invars, values)))
        return new if kept is None else kept

    def opened(self) -> Program:
        """The program with the primitives of fnet written as those of JAX."""
        closed = opened_calls(_jax.close(self.jaxpr))
        jaxpr, values = _without_consts(closed, list(self.arrays))
        return dataclasses.replace(self, jaxpr=jaxpr, arrays=values)


def _function(jaxpr: Any) -> Callable[..., tuple]:
    closed = _jax.close(jaxpr)

    def program(*arrays: Any) -> tuple:
        return tuple(_jax.evaluate(closed, [], list(arrays)))

    return program


@functools.lru_cache(64)
def _compiled_once(jaxpr: Any) -> Callable[..., tuple]:
    """Programs with one jaxpr, such as the iterations of a loop, are compiled once."""
    return jax.jit(_function(jaxpr))


def traced(f: Callable, args: tuple) -> Program:
    """Traces f(*args), with the calls inside it inlined."""
    call = Traced(f, args, {})
    closed = opened_calls(call.closed)
    jaxpr, arrays = _without_consts(closed, list(map(held, call.arrays)))
    program = Program(jaxpr, arrays)
    numbers = [v for v in jaxpr.outvars if is_number(v)]
    kept = program.of(jaxpr.eqns, numbers, dict(zip(jaxpr.invars, arrays)))
    if kept is None:
        raise ValueError(
            "reduce: f computes no array of numbers from its arguments, so there is nothing to "
            "reduce"
        )
    return kept


class Recorded(dict):
    """The values of the variables of a program, {variable: array}.

    Attributes:
        failed: the index of the first equation that raised an error, or None. The values after it
            are made up.
    """

    failed: int | None = None


def recorded(program: Program) -> Recorded:
    """Runs a program, one equation after the other, and returns all of its values."""
    values = Recorded(zip(program.jaxpr.invars, program.arrays))
    if any(map(is_spread, program.arrays)):
        values.update(_compiled(program))
        return values
    for i, eqn in enumerate(program.equations):
        inputs = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars]
        try:
            values.update(zip(eqn.outvars, map(held, evaluated(eqn, inputs))))
        except Exception:
            rest = made_up(program)
            rest.update(values)
            rest.failed = i
            return rest
    return values


def evaluated(eqn: Any, inputs: list) -> list:
    return _jax.bind(eqn.primitive, inputs, eqn.primitive.get_bind_params(eqn.params))


def _compiled(program: Program) -> dict:
    """The values of a program on several devices, divided as XLA divides them."""
    made = [v for eqn in program.equations for v in eqn.outvars if not _jax.is_dropped(v)]
    whole = program.of(program.equations, made, dict(zip(program.jaxpr.invars, program.arrays)))
    return {} if whole is None else dict(zip(made, map(held, whole.run())))


def made_up(program: Program) -> Recorded:
    """Returns values of the right types for the variables of a program, without running it: for a
    program that must not run in this process. Arrays that are too large have none."""
    values = Recorded(zip(program.jaxpr.invars, program.arrays))
    draw = np.random.default_rng(0)
    for eqn in program.equations:
        for v in eqn.outvars:
            if v.aval.size <= _LARGEST:
                values[v] = _drawn(v.aval, draw)
    return values


_LARGEST = 2**30  # elements of an array that is made up


def _drawn(aval: Any, draw: np.random.Generator) -> Any:
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0, impl=str(aval.dtype._impl.name)), aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.inexact):
        return draw.uniform(0.5, 1.5, aval.shape).astype(aval.dtype)
    return np.zeros(aval.shape, aval.dtype)


def held(x: Any) -> Any:
    """Returns an array as NumPy's, unless it is a random key or lies on several devices."""
    if is_spread(x) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return np.asarray(x)


def is_spread(x: Any) -> bool:
    return isinstance(x, jax.Array) and len(x.sharding.device_set) > 1


def is_number(v: Any) -> bool:
    dtype = getattr(getattr(v, "aval", None), "dtype", None)
    return dtype is not None and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def is_float(x: Any) -> bool:
    """Whether an array or a variable has a floating-point dtype (or a complex one)."""
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _without_consts(closed: Any, arrays: list) -> tuple[Any, tuple]:
    """Returns an open jaxpr whose first inputs are the constants of a closed one, and its values."""
    return _jax.consts_as_inputs(closed), (*map(held, closed.consts), *arrays)


_DIGESTS: dict[int, tuple[Any, bytes]] = {}


def _digest(x: Any) -> bytes:
    """A digest of an array, which is computed once for each array."""
    known = _DIGESTS.get(id(x))
    if known is None or known[0] is not x:
        data = x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            data = jax.random.key_data(x)
        spread = str(x.sharding) if is_spread(x) else ""
        text = f"{x.dtype}{x.shape}{spread}".encode()
        known = _DIGESTS[id(x)] = x, text + hashlib.sha256(np.asarray(data).tobytes()).digest()
    return known[1]
