"""What a program of the table is, and short forms for its arguments."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TRANSFORMS = (
    "rewrite",
    "autocast",
    "autocast32",
    "autocast16",
    "tune",
    "microbatch",
    "rematerialize",
    "intervene",
)
CHECKS = ("value", "again", "jit", "vmap", "gradient", "gradient inside", "leaks", "cuda", "tpu")
EVENTS: list = []  # what host callbacks and Python side effects of a program have recorded


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, its arguments and what is expected of it.

    Attributes:
        name: topic/function.
        f: a function of `args()`.
        args: makes the arguments; called again for every call, so that f may mutate or donate them.
        others: makes further lists of arguments, for later calls of the same transformed function.
            By default
            there is one: the floating-point arrays scaled by 0.9, the random keys changed.
        wrt: the positions of the arguments that are differentiated; none if empty.
        batched: the positions of the arguments with a batch axis, of which f is a mean; microbatch
            needs them.
        slices: the number of slices for microbatch.
        weight: the `weight` argument of microbatch.
        inner: whether f(transform, *args) itself applies the transform to a part of the program.
        static: the positions of arguments that jit, vmap and grad do not trace.
        needs: the package that the program imports.
        x64: whether the program runs with 64-bit types.
        float32: whether anything in the program is float32. If not, autocast raises TypeError.
        float16: whether autocast to float16 is checked, too.
        rules: rules for autocast to float32; every scope by default.
        promotion: the JAX option of this name while the program runs.
        tolerance: relative to the largest value of a leaf; 1e-5 (1e-12 for float64) by default.
        low: the same for mixed precision, beyond the error of rounding the arguments.
        events: "list" if events happen in order, "set" if in any order.
        core: whether the program is part of the test suite.
        excluded: {(transform, check): reason}; "*" stands for every transform, or every check.
        refused: {(transform, check): regular expression}: the transform raises this error.
    """

    name: str
    f: Callable
    args: Callable[[], tuple]
    others: Callable[[], list] | None = None
    wrt: tuple[int, ...] = (0,)
    batched: tuple[int, ...] = ()
    slices: int = 2
    weight: Callable | None = None
    inner: bool = False
    static: tuple[int, ...] = ()
    needs: str | None = None
    x64: bool = False
    float32: bool = True
    float16: bool = False
    rules: Mapping[str, str] = dataclasses.field(default_factory=lambda: {".*": "float32"})
    promotion: str = "strict"
    tolerance: float | None = None
    low: float = 0.03
    events: str = "list"
    core: bool = False
    excluded: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    refused: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def listed(self, table: Mapping, transform: str, check: str) -> str | None:
        """The entry of `excluded` or `refused` for a transform and a check."""
        for key in ((transform, check), (transform, "*"), ("*", check), ("*", "*")):
            if key in table:
                return table[key]
        return None

    @property
    def topic(self) -> str:
        return self.name.partition("/")[0]

    def missing(self) -> bool:
        return self.needs is not None and importlib.util.find_spec(self.needs) is None


class Topic(list):
    """The programs of one topic; called with arguments, a decorator that adds one.

    topic = Topic("control_flow")

    @topic(normal(3), core=True)
    def cond(x): ...
    """

    def __init__(self, name: str, **options):
        super().__init__()
        self.name, self.options = name, options

    def __call__(self, *args, **options):
        def decorate(f):
            self.add(f.__name__.strip("_"), f, *args, **options)
            return f

        return decorate

    def add(self, name, f, *args, **options):
        """Adds a function that has no name of its own."""
        options = {**self.options, **options}
        others = options.pop("others", None)
        self.append(
            Program(
                f"{self.name}/{name}",
                f,
                lambda: tuple(map(made, args)),
                others and (lambda: [tuple(map(made, o)) for o in others]),
                **options,
            )
        )


def made(arg: Any) -> Any:
    """An argument: `Made` leaves are called, NumPy arrays become JAX arrays, everything else stays."""

    def leaf(x):
        if isinstance(x, Made):
            return x()
        return jnp.array(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(leaf, arg, is_leaf=lambda x: isinstance(x, Made))


class Made:
    """An argument that is made when it is needed: a key, a module, a sharded array."""

    def __init__(self, make: Callable):
        self.make = make

    def __call__(self):
        return self.make()


def normal(*shape, dtype="float32", seed=0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    x = rng.normal(size=shape)
    if np.issubdtype(np.dtype(dtype), np.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x).astype(dtype)


def uniform(*shape, low=0.1, high=0.9, seed=0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, size=shape).astype("float32")


def integers(*shape, high=5, dtype="int32", seed=0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(0, high, size=shape).astype(dtype)


def positive_definite(n, *batch, dtype="float32", seed=0) -> np.ndarray:
    a = normal(*batch, n, n, dtype=dtype, seed=seed)
    return a @ np.conj(np.swapaxes(a, -1, -2)) + 2 * np.eye(n, dtype=dtype)


def key(seed=0, impl=None) -> Made:
    return Made(lambda: jax.random.key(seed, impl=impl))


class Package:
    """A package that is imported when a program first uses it: it may be missing."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name):
        return getattr(importlib.import_module(self._name), name)
