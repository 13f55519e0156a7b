"""Every operation of the stable form on special values: NaN, infinities, -0, subnormal and
saturating numbers, indices out of range, empty arrays and ties.

`CASES` has one function for each primitive, set of options and dtype. `judged` compares an
evaluator of the stable form with JAX: integers, booleans, NaN, infinities and the signs of zeros
bit for bit, other numbers element by element.
"""

import functools
import itertools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from fnet.export import _stable

FLOATS = "float32", "float16", "bfloat16", "float64"
SIGNED = "int32", "int8", "int16", "int64"
UNSIGNED = "uint32", "uint8", "uint16", "uint64"
INTEGERS = SIGNED + UNSIGNED
NUMBERS = FLOATS + INTEGERS
TOLERANCE = {
    "float32": 1e-5,
    "float64": 1e-10,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "complex64": 1e-5,
    "complex128": 1e-10,
}
SEEDS = np.random.default_rng(39)


def kind(dtype):
    return (
        "float"
        if dtype in FLOATS
        else "bool"
        if dtype == "bool"
        else "int"
        if dtype in SIGNED
        else "uint"
    )


def special(dtype):
    """The special values of a dtype, a vector."""
    if dtype == "bool":
        return np.array([False, True])
    if kind(dtype) != "float":
        info = np.iinfo(dtype)
        values = {
            info.min,
            info.min + 1,
            info.max,
            info.max - 1,
            info.max // 2,
            0,
            1,
            2,
            3,
            7,
            8,
            31,
            32,
            64,
            100,
        }
        values |= {-1, -2, -3, -7, -8} if info.min else set()
        return np.array(sorted(values), object).astype(dtype)
    info = ml_dtypes.finfo(dtype)
    tiny, small, most = float(info.smallest_subnormal), float(info.tiny), float(info.max)
    values = [
        0.0,
        tiny,
        small / 2,
        small,
        1e-8,
        1e-5,
        1e-3,
        0.3,
        0.49999997,
        0.5,
        0.9999999,
        1,
        1.5,
        2,
        2.5,
        3.5,
        10,
        20,
        88,
        89,
        127.5,
        128,
        200,
        255.5,
        256,
        300,
        1e4,
        32767,
        65504,
        2.0**31,
        2.0**31 - 129,
        3e9,
        2.0**32,
        2.0**63,
        2.0**64,
        1e20,
        1e30,
        most,
        math.inf,
    ]
    with np.errstate(all="ignore"):
        return np.array([x for y in values for x in (y, -y)] + [math.nan], np.float64).astype(dtype)


def pairs(dtype, subnormal=True):
    """All pairs of special values, two vectors. Without subnormal numbers for functions that XLA
    does not compute for them: its atan2(1e-45, 1e-45) is NaN in float32, its cbrt(1e-45) is
    negative."""
    values = special(dtype)
    if not subnormal:
        values = normal(values)
    return np.repeat(values, len(values)), np.tile(values, len(values))


def normal(values):
    return values[
        ~(np.abs(values) < values.dtype.type(ml_dtypes.finfo(values.dtype).tiny)) | (values == 0)
    ]


def ordinary(dtype, *shape):
    """Random numbers that overflow nowhere, with ties."""
    if dtype == "bool":
        return SEEDS.integers(0, 2, shape).astype(bool)
    if kind(dtype) == "float":
        return (SEEDS.integers(-20, 21, shape) / 4).astype(dtype)
    return SEEDS.integers(0 if kind(dtype) == "uint" else -5, 6, shape).astype(dtype)


def wide(dtype, *shape):
    """Random numbers of the whole range of a dtype: every tenth number is special."""
    values = special(dtype)
    if kind(dtype) == "float":
        numbers = SEEDS.normal(size=shape).astype(dtype)
        return np.where(
            SEEDS.random(shape) < 0.1,
            SEEDS.choice(values.astype(np.float64), shape).astype(dtype),
            numbers,
        )
    return SEEDS.choice(values, shape)


CASES: dict = {}


def case(name, dtype, f, *args):
    assert (name, dtype) not in CASES, (name, dtype)
    CASES[name, dtype] = f, [np.asarray(x) for x in args]


def _elementwise():
    smooth = (
        "exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh cosh asinh acosh "
        "atanh sqrt rsqrt cbrt erf erfc erf_inv lgamma digamma floor ceil is_finite"
    ).split()
    for dtype in FLOATS:
        for name in smooth:
            x = special(dtype)
            if name in (
                "cbrt",
                "tan",
                "asin",
                "atan",
            ):  # versions of XLA differ for subnormal results
                x = x[
                    ~(np.abs(x) < x.dtype.type(4 * float(ml_dtypes.finfo(dtype).tiny))) | (x == 0)
                ]
            if name in ("lgamma", "digamma"):  # versions of XLA differ near zeros and subnormals
                x = normal(x)
                x = x[~((x > 0.9) & (x < 2.1)) & (x != 0)]  # digamma(0): NaN, -inf since jax 0.11
            if name in ("sin", "cos", "tan"):
                x = x[~(np.abs(x.astype(np.float64)) > 1e5) | ~np.isfinite(x)]
            case(name, dtype, getattr(lax, name), x)
        for method in lax.RoundingMethod:
            case(
                f"round {method.name}",
                dtype,
                functools.partial(lax.round, rounding_method=method),
                special(dtype),
            )
        for bits in (5, 10), (8, 7), (8, 23), (4, 3), (5, 2), (3, 4), (2, 1), (11, 52), (8, 0):
            case(
                f"reduce_precision {bits}",
                dtype,
                functools.partial(
                    lax.reduce_precision, exponent_bits=bits[0], mantissa_bits=bits[1]
                ),
                special(dtype)[
                    : None if bits[1] else -1
                ],  # versions of XLA differ for NaN without bits of a mantissa
            )
        case("nextafter", dtype, lax.nextafter, *pairs(dtype))
        for name in ("lt_to", "le_to"):
            case(name, dtype, getattr(lax, f"{name}_p").bind, *pairs(dtype))
        case("atan2", dtype, lax.atan2, *pairs(dtype, subnormal=False))
        case("pow", dtype, lax.pow, *pairs(dtype, subnormal=False))
        case(
            "pow int",
            dtype,
            lambda x, y: lax.pow(x, y),
            *(
                a.ravel()
                for a in np.meshgrid(
                    special(dtype), np.array([-3, -2, -1, 0, 1, 2, 3, 10], np.int32)
                )
            ),
        )
    for dtype in NUMBERS:
        for name in ("sign", "abs", "neg"):
            if name == "abs" and kind(dtype) == "uint":
                continue
            case(name, dtype, getattr(lax, name), special(dtype))
        for name in "add sub mul div rem max min eq ne lt le gt ge".split():
            # jaxlib 0.12 keeps subnormal numbers in these on some CPUs with AMX, and not on others.
            kept = dtype != "bfloat16" or name not in ("max", "min")
            case(name, dtype, getattr(lax, name), *pairs(dtype, subnormal=kept))
        for exponent in (-3, -1, 0, 1, 2, 3, 7):
            if exponent >= 0 or kind(dtype) == "float":
                case(
                    f"integer_pow {exponent}",
                    dtype,
                    functools.partial(lax.integer_pow, y=exponent),
                    special(dtype),
                )
        low, x, high = (
            a.ravel()
            for a in np.meshgrid(special(dtype)[::3], special(dtype)[::2], special(dtype)[::3])
        )
        case("clamp", dtype, lax.clamp, low, x, high)
        case(
            "clamp scalar",
            dtype,
            lambda low, x, high: lax.clamp(low, x, high),
            special(dtype)[3],
            special(dtype),
            special(dtype)[-2],
        )
        case("square", dtype, lax.square, special(dtype))
        for to in (*NUMBERS, "bool"):
            case(
                f"convert to {to}",
                dtype,
                functools.partial(lax.convert_element_type, new_dtype=jnp.dtype(to)),
                special(dtype),
            )
    for dtype in INTEGERS:
        for name in "shift_left shift_right_logical shift_right_arithmetic".split():
            case(name, dtype, getattr(lax, name), *pairs(dtype))
        case("population_count", dtype, lax.population_count, special(dtype))
        case(
            "mul wider",
            dtype,
            lambda x, y: lax.mul_p.bind(x, y, out_dtype=jnp.dtype("float32")),
            *pairs(dtype),
        )
    for dtype in (*INTEGERS, "bool"):
        case("not", dtype, lax.bitwise_not, special(dtype))
        for name in "and or xor".split():
            case(name, dtype, getattr(lax, f"bitwise_{name}"), *pairs(dtype))
    for name in "eq ne lt le gt ge max min".split():
        case(name, "bool", getattr(lax, name), *pairs("bool"))
    for to in NUMBERS:
        case(
            f"convert to {to}",
            "bool",
            functools.partial(lax.convert_element_type, new_dtype=jnp.dtype(to)),
            special("bool"),
        )
    for dtype in "complex64", "complex128":
        x = (SEEDS.normal(size=6) + 1j * SEEDS.normal(size=6)).astype(dtype)
        for name in "add sub mul div".split():
            case(name, dtype, getattr(lax, name), x, x[::-1])
        for name in "real imag neg abs exp".split():
            case(name, dtype, getattr(lax, name), x)
    case(
        "select_n",
        "bool",
        lambda w, x, y: lax.select_n(w, x, y),
        np.array([True, False]),
        *special("float32")[:4].reshape(2, 2),
    )
    case(
        "select_n",
        "int32",
        lambda w, x, y, z: lax.select_n(w, x, y, z),
        np.array([0, 1, 2], np.int32),
        *special("float32")[:9].reshape(3, 3),
    )
    case(
        "select_n scalar",
        "int32",
        lambda w, x, y, z: lax.select_n(w, x, y, z),
        np.int32(1),
        *special("float32")[:9].reshape(3, 3),
    )
    case(
        "select_n scalar",
        "bool",
        lambda w, x, y: lax.select_n(w, x, y),
        np.bool_(True),
        *special("float32")[:8].reshape(2, 4),
    )


def _reductions():
    for dtype in (*NUMBERS, "bool"):
        names = "reduce_and reduce_or reduce_xor".split() if kind(dtype) != "float" else []
        names += "reduce_max reduce_min".split()
        names += "reduce_sum reduce_prod".split() if dtype != "bool" else []
        for name in names:
            f = getattr(lax, name)
            case(f"{name} empty", dtype, lambda x, f=f: f(x, (0,)), wide(dtype, 0, 3))
            case(f"{name} of no axis", dtype, lambda x, f=f: f(x, ()), wide(dtype, 2, 3))
            case(
                name,
                dtype,
                lambda x, f=f: [f(x, (0,)), f(x, (1,)), f(x, (0, 2))],
                wide(dtype, 5, 3, 4),
            )
            case(f"{name} ordinary", dtype, lambda x, f=f: f(x, (1,)), ordinary(dtype, 3, 50))
        if dtype != "bool":
            for name in (
                "cumsum cumprod cummax cummin" + " cumlogsumexp" * (kind(dtype) == "float")
            ).split():
                f = getattr(lax, name)
                case(
                    name, dtype, lambda x, f=f: [f(x, 0), f(x, 1, reverse=True)], wide(dtype, 9, 4)
                )
                case(f"{name} ordinary", dtype, lambda x, f=f: f(x, 0), ordinary(dtype, 30, 2))
                case(f"{name} empty", dtype, lambda x, f=f: f(x, 0), wide(dtype, 0, 2))
        for name in "argmax argmin".split():
            f = getattr(lax, name)
            for index in "int32", "int8", "uint32", "int64":
                case(
                    f"{name} {index}",
                    dtype,
                    lambda x, f=f, i=index: f(x, 0, jnp.dtype(i)),
                    wide(dtype, 9, 6),
                )
            case(f"{name} ties", dtype, lambda x, f=f: f(x, 1, jnp.int32), ordinary(dtype, 5, 40))
            if kind(dtype) == "float":
                x = np.array(
                    [
                        [0.0, -0.0],
                        [-0.0, 0.0],
                        [np.nan, np.inf],
                        [np.inf, np.nan],
                        [np.nan, np.nan],
                        [-np.inf, -np.inf],
                    ]
                ).astype(dtype)
                case(f"{name} of zeros and NaN", dtype, lambda x, f=f: f(x, 1, jnp.int32), x)
    for dtype in "float16", "bfloat16":
        x = np.full((1, 3000), 1.0).astype(dtype)
        case("reduce_sum of many", dtype, lambda x: lax.reduce_sum(x, (1,)), x)
        case(
            "reduce_prod of many",
            dtype,
            lambda x: lax.reduce_prod(x, (1,)),
            np.full((1, 300), 1.01).astype(dtype),
        )
        case(
            "reduce_sum over the range",
            dtype,
            lambda x: lax.reduce_sum(x, (0,)),
            np.array([3e4, 3e4, 3e4, -3e4, -3e4], dtype),
        )
        case("cumsum of many", dtype, lambda x: lax.cumsum(x, 1), x[:, :300])


def _sorts():
    for dtype in (*NUMBERS, "bool"):
        x, i = wide(dtype, 40, 2), np.arange(80, dtype=np.int32).reshape(40, 2)
        case("sort", dtype, lambda x, i: lax.sort((x, i), 0, num_keys=1), x, i)
        case(
            "sort of two keys",
            dtype,
            lambda x, y, i: lax.sort((x, y, i), 0, num_keys=2),
            ordinary(dtype, 40, 2),
            x,
            i,
        )
        case("sort one", dtype, lambda x: lax.sort(x, dimension=1), wide(dtype, 3, 20))
        case("sort empty", dtype, lambda x: lax.sort(x, dimension=0), wide(dtype, 0, 2))
        if kind(dtype) == "float":
            x = np.array([0.0, -0.0, np.nan, 0.0, -np.nan, -0.0, np.inf, -np.inf, np.nan]).astype(
                dtype
            )
            case(
                "sort of zeros and NaN",
                dtype,
                lambda x, i: lax.sort((x, i), num_keys=1),
                x,
                np.arange(9, dtype="i4"),
            )
        if dtype != "bool":
            case("top_k", dtype, lambda x: lax.top_k(x, 7), wide(dtype, 3, 20))
            case(
                "top_k of zeros and NaN",
                dtype,
                lambda x: lax.top_k(x, 6),
                np.array([0.0, -0.0, np.nan, -np.nan, 0.0, np.inf]).astype(dtype),
            ) if kind(dtype) == "float" else None
            case("top_k ties", dtype, lambda x: lax.top_k(x, 9), ordinary(dtype, 2, 30))
            case(
                "top_k of an axis",
                dtype,
                lambda x: lax.top_k_p.bind(x, **{**parameters("top_k"), "k": 3, "axis": 0}),
                wide(dtype, 9, 4),
            )
            case("top_k of 0", dtype, lambda x: lax.top_k(x, 0), wide(dtype, 3, 4))


@functools.cache
def parameters(name):
    """The parameters of an equation of this JAX."""
    examples = {"top_k": lambda x: lax.top_k(x, 1)}
    (eqn,) = jax.make_jaxpr(examples[name])(jnp.ones((3, 3))).eqns
    return eqn.params


def _layouts():
    for dtype in (*NUMBERS, "bool"):
        x = wide(dtype, 4, 5)
        case("transpose", dtype, lambda x: lax.transpose(x, (1, 0)), x)
        case("rev", dtype, lambda x: [lax.rev(x, (0,)), lax.rev(x, (0, 1)), lax.rev(x, ())], x)
        case(
            "reshape",
            dtype,
            lambda x: [lax.reshape(x, (2, 10)), lax.reshape(x, (20,), dimensions=(1, 0))],
            x,
        )
        case("broadcast_in_dim", dtype, lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 5), (1, 3)), x)
        case(
            "broadcast_in_dim of ones",
            dtype,
            lambda x: lax.broadcast_in_dim(x[:1], (3, 4, 5), (0, 2)),
            x,
        )
        case(
            "concatenate",
            dtype,
            lambda x: [lax.concatenate([x, x[:1], x[:0]], 0), lax.concatenate([x], 1)],
            x,
        )
        case(
            "pad",
            dtype,
            lambda x: [
                lax.pad(x, x[0, 0], ((1, 2, 3), (-1, 2, 0))),
                lax.pad(x, x[0, 1], ((-1, -2, 1), (0, -3, 2))),
                lax.pad(x[:0], x[0, 1], ((2, 1, 1), (0, 0, 0))),
            ],
            x,
        )
        case("pad to nothing", dtype, lambda x: lax.pad(x, x[0, 0], ((-2, -2, 0), (0, 0, 0))), x)
        case(
            "slice",
            dtype,
            lambda x: [lax.slice(x, (1, 0), (4, 5), (2, 3)), lax.slice(x, (1, 2), (3, 2))],
            x,
        )
        case(
            "iota",
            dtype,
            lambda x: [lax.broadcasted_iota(x.dtype, (3, 4), 1), lax.iota(x.dtype, 300)],
            x,
        ) if dtype != "bool" else None
        case("split", dtype, lambda x: lax.split(x, (2, 0, 2), 0), x)
        case(
            "tile and stack",
            dtype,
            lambda x: [
                jnp.tile(x, (2, 3)),
                jnp.stack([x, x], 1),
                jnp.squeeze(x[None], 0),
                jnp.expand_dims(x, 1),
            ],
            x,
        )


def _indexing():
    starts = [-(2**31), -7, -5, -2, -1, 0, 1, 3, 4, 5, 6, 100, 2**31 - 1]
    for dtype in "int32", "int8", "uint8", "uint32", "int64", "uint64":
        info = np.iinfo(dtype)
        i = np.array(
            [min(max(n, info.min), info.max) for n in starts] + [info.min, info.max], object
        ).astype(dtype)
        x, u = ordinary("float32", 5, 4), -ordinary("float32", 2, 3) - 50

        def each(x, i, f):
            return lax.map(lambda pair: f(x, *pair), (i, jnp.roll(i, 3)))

        case(
            "dynamic_slice bound",
            dtype,
            lambda x, i: each(
                x, i, lambda x, a, b: lax.dynamic_slice_p.bind(x, a, b, slice_sizes=(2, 3))
            ),
            x,
            i,
        )
        case(
            "dynamic_slice",
            dtype,
            lambda x, i: each(x, i, lambda x, a, b: lax.dynamic_slice(x, (a, b), (2, 3))),
            x,
            i,
        )
        case(
            "dynamic_slice as is",
            dtype,
            lambda x, i: each(
                x,
                i,
                lambda x, a, b: lax.dynamic_slice(x, (a, b), (2, 3), allow_negative_indices=False),
            ),
            x,
            i,
        )
        case(
            "dynamic_update_slice bound",
            dtype,
            lambda x, u, i: each(x, i, lambda x, a, b: lax.dynamic_update_slice_p.bind(x, u, a, b)),
            x,
            u,
            i,
        )
        case(
            "dynamic_update_slice",
            dtype,
            lambda x, u, i: each(x, i, lambda x, a, b: lax.dynamic_update_slice(x, u, (a, b))),
            x,
            u,
            i,
        )
        case(
            "dynamic_update_slice as is",
            dtype,
            lambda x, u, i: each(
                x,
                i,
                lambda x, a, b: lax.dynamic_update_slice(
                    x, u, (a, b), allow_negative_indices=False
                ),
            ),
            x,
            u,
            i,
        )
        # JAX converts indices to int32 before it tests the bounds: x.at[2**32 + 1].get(mode="fill")
        # is x[1].
        i = i[:-2] if i.itemsize == 8 else i
        for mode in "clip", "fill", "promise_in_bounds":
            inside = i if mode != "promise_in_bounds" else np.arange(5).astype(dtype)
            case(
                f"gather at {mode}",
                dtype,
                lambda x, i, m=mode: [
                    x.at[i].get(mode=m),
                    lax.gather(
                        x,
                        jnp.stack([i, i], 1) % 5 if m[0] == "p" else jnp.stack([i, i], 1),
                        lax.GatherDimensionNumbers((1, 2), (), (0, 1)),
                        (1, 1),
                        mode=m,
                    ),
                ],
                ordinary("float32", 5, 5),
                inside,
            )
            case(
                f"gather windows {mode}",
                dtype,
                lambda x, i, m=mode: lax.gather(
                    x, i[:, None], lax.GatherDimensionNumbers((0, 2), (), (0,)), (3, 4), mode=m
                ),
                x,
                inside if mode != "promise_in_bounds" else np.arange(3).astype(dtype),
            )
        for op in "set", "add", "mul", "min", "max":
            for mode in "clip", "drop":
                case(
                    f"scatter at {op} {mode}",
                    dtype,
                    lambda x, i, u, op=op, mode=mode: getattr(x.at[i], op)(
                        u, mode=mode, unique_indices=False
                    ),
                    ordinary("float32", 40, 2),
                    i[:-2] if op == "set" else i,
                    np.broadcast_to(np.float32(3), (len(i) - 2 * (op == "set"), 2)),
                )
        case(
            "scatter windows",
            dtype,
            lambda x, i, u: [
                f(x, i[:, None], u, lax.ScatterDimensionNumbers((1, 2), (), (0,)), mode=mode)
                for f in (lax.scatter_add, lax.scatter_max)
                for mode in ("clip", "drop")
            ],
            x,
            i,
            ordinary("float32", len(i), 2, 4),
        )
    for dtype in (*NUMBERS, "bool"):
        x, i = wide(dtype, 6, 3), np.array([-9, -6, -1, 0, 2, 5, 6, 7, 2, 2], np.int32)
        case(
            "gather fill",
            dtype,
            lambda x, i: [x.at[i].get(mode="fill"), jnp.take(x, i, 0, mode="clip")],
            x,
            i,
        )
        case("gather fill value", dtype, lambda x, i: x.at[i].get(mode="fill", fill_value=1), x, i)
        operations = (
            ["set", "add", "mul", "min", "max", "subtract"]
            if dtype != "bool"
            else ["set", "min", "max"]
        )
        for op in operations:
            index = i if op != "set" else i[[0, 1, 2, 3, 4, 6]]
            case(
                f"scatter {op}",
                dtype,
                lambda x, i, u, op=op: getattr(x.at[i], op)(u),
                x,
                index,
                wide(dtype, len(index), 3),
            )
            case(
                f"scatter {op} empty",
                dtype,
                lambda x, i, u, op=op: getattr(x.at[i], op)(u),
                x,
                i[:0],
                wide(dtype, 0, 3),
            )
        case(
            "scatter apply",
            dtype,
            lambda x, i: [
                x.at[i].apply(lambda x: ~x if x.dtype == bool else x * x + x),
                x.at[i[:3], i[:3]].apply(lambda x: x),
            ],
            x,
            i,
        )
    case(
        "scatter apply exp",
        "float32",
        lambda x, i: [
            x.at[i].apply(jnp.exp),
            x.at[i, 0].apply(lambda v: -v),
            x.at[1:3].apply(jnp.sin),
            x.at[i].apply(lambda v: v * 0 + 2),
        ],
        ordinary("float32", 6, 3),
        np.array([1, 4, 4, 9, -1], np.int32),
    )
    case(
        "scatter apply clip",
        "float32",
        lambda x, i: x.at[i].apply(jnp.exp, mode="clip"),
        ordinary("float32", 6, 3),
        np.array([1, 4, 4, 9, -1], np.int32),
    )
    case(
        "gather batched",
        "float32",
        lambda x, i: [
            jax.vmap(lambda x, i: x[i])(x, i),
            jnp.take_along_axis(x, i, 1),
            jax.vmap(lambda x, i: x.at[i].add(1.0))(x, i),
            jax.vmap(lambda x, i: x.at[i].get(mode="fill"))(x, i),
        ],
        ordinary("float32", 4, 6),
        np.array([[0, 5, 9], [-1, 3, 2], [-9, 6, 2], [1, 1, 1]], np.int32),
    )


def _exact(dtype, *shape):
    """Random numbers whose products and sums float32 holds exactly."""
    if kind(dtype) == "float":
        return (SEEDS.integers(-6, 7, shape) / 4).astype(dtype)
    return SEEDS.integers(*((0, 200) if kind(dtype) == "uint" else (-127, 128)), shape).astype(
        dtype
    )


def _products():
    wider = {
        "int8": ("int16", "int32", "float32", "int8"),
        "uint8": ("int32", "uint32", "float32", "uint8"),
        "int16": ("int32", "float32"),
        "int32": ("int32", "float32"),
        "uint32": ("uint32",),
        "float16": ("float16", "float32"),
        "bfloat16": ("bfloat16", "float32"),
        "float32": ("float32",),
        "float64": ("float64",),
        "int64": ("int64",),
        "uint64": ("uint64",),
    }
    for dtype, results in wider.items():
        values = functools.partial(_exact, dtype)
        x, y, image, kernel = (
            values(3, 5, 7),
            values(3, 7, 4),
            values(2, 6, 5, 4),
            values(3, 2, 4, 6),
        )
        for to in results:
            options = {"preferred_element_type": jnp.dtype(to)}
            case(
                f"dot to {to}",
                dtype,
                lambda x, y, o=options: [
                    lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), **o),
                    lax.dot_general(x, y, (((), ()), ((0,), (0,))), **o),
                    lax.dot_general(x[0], y[0], (((1,), (0,)), ((), ())), **o),
                    lax.dot_general(x[0, :, :0], y[0, :0], (((1,), (0,)), ((), ())), **o),
                ],
                x,
                y,
            )
            conv = lambda x, k, o=options, **more: lax.conv_general_dilated(
                x,
                k,
                **{
                    "window_strides": (1, 1),
                    "padding": "SAME",
                    "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
                    **o,
                    **more,
                },
            )
            case(
                f"convolution to {to}",
                dtype,
                lambda x, k, c=conv: [
                    c(x, k),
                    c(x, k, window_strides=(2, 3)),
                    c(x, k[:, :, :2], feature_group_count=2),
                    c(x, k, rhs_dilation=(2, 1)),
                    c(x, k, lhs_dilation=(2, 3), padding=((1, 2), (0, -1))),
                ],
                image,
                kernel,
            )
            case(
                f"convolution of batch groups to {to}",
                dtype,
                lambda x, k, c=conv: c(x, k, batch_group_count=2),
                image,
                kernel,
            )
        if kind(dtype) == "float":
            x, y = wide(dtype, 4, 5), ordinary(dtype, 5, 3)
            case("dot of special values", dtype, lambda x, y: x @ y, x, y)
    case(
        "dot of mixed dtypes",
        "int8",
        lambda x, y: lax.dot_general(
            x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
        ordinary("int8", 3, 4),
        ordinary("float32", 4, 2),
    )
    case(
        "convolution empty",
        "float32",
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID"),
        ordinary("float32", 1, 2, 2),
        ordinary("float32", 3, 2, 3),
    )


def _windows():
    for dtype in NUMBERS:
        x = wide(dtype, 2, 7, 6, 2)
        one = functools.partial(np.asarray, dtype=dtype)
        low, high = (
            (one(-np.inf), one(np.inf))
            if kind(dtype) == "float"
            else (one(np.iinfo(dtype).min), one(np.iinfo(dtype).max))
        )
        for name, start, f in (
            ("max", low, lax.max),
            ("min", high, lax.min),
            ("add", one(0), lax.add),
        ):
            case(
                f"reduce_window {name}",
                dtype,
                lambda x, s=start, f=f: [
                    lax.reduce_window(x, s, f, (1, 2, 3, 1), (1, 2, 1, 1), "SAME"),
                    lax.reduce_window(
                        x, s, f, (1, 3, 2, 1), (1, 1, 2, 1), ((0, 0), (2, 1), (0, 3), (0, 0))
                    ),
                    lax.reduce_window(
                        x, s, f, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 3, 2, 1)
                    ),
                    lax.reduce_window(
                        x, s, f, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", base_dilation=(1, 2, 3, 1)
                    ),
                ],
                x,
            )
            case(
                f"reduce_window {name} empty",
                dtype,
                lambda x, s=start, f=f: lax.reduce_window(
                    x, s, f, (1, 9, 2, 1), (1, 1, 1, 1), "VALID"
                ),
                x,
            )
        if kind(dtype) == "float":
            pool = lambda x, start, f, **o: lax.reduce_window(
                x,
                start,
                f,
                **{
                    "window_dimensions": (1, 3, 2, 1),
                    "window_strides": (1, 2, 1, 1),
                    "padding": "SAME",
                    **o,
                },
            )
            for values, y in (("ties", ordinary(dtype, 2, 7, 6, 2)), ("special", x)):
                for name, start, f in (("max", low, lax.max), ("min", high, lax.min)):
                    case(
                        f"select_and_scatter_add {name} of {values}",
                        dtype,
                        lambda x, g, s=start, f=f, pool=pool: [
                            jax.vjp(lambda x: pool(x, s, f), x)[1](g)[0],
                            jax.vjp(lambda x: pool(x, s, f, padding="VALID"), x)[1](g[:, :3, :5])[
                                0
                            ],
                        ],
                        y,
                        ordinary(dtype, 2, 4, 6, 2),
                    )


def _loops():
    x = wide("float32", 5, 3)
    case(
        "scan",
        "float32",
        lambda x: [
            lax.scan(lambda c, a: (jnp.maximum(c, a), c + a), x[0], x, reverse=r)
            for r in (False, True)
        ],
        x,
    )
    case("scan of nothing", "float32", lambda x: lax.scan(lambda c, a: (c + a, c), x[0], x[:0]), x)
    case(
        "scan without inputs",
        "int32",
        lambda i: lax.scan(lambda c, _: (c * 3 + 1, c), i, None, length=30),
        np.int32(7),
    )
    case(
        "while",
        "int32",
        lambda i: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 2, c[1] * 5), (i, i)),
        np.int32(1),
    )
    case(
        "while never",
        "int32",
        lambda i: lax.while_loop(lambda c: c < -9, lambda c: c + 2, i),
        np.int32(1),
    )
    for dtype in "int32", "bool", "int8", "uint8", "int64", "uint32":
        if dtype == "bool":
            case(
                "cond",
                dtype,
                lambda i, x: [lax.cond(p, lambda x: x, lambda x: -x, x) for p in (i[0], i[1])],
                special("bool"),
                x,
            )
        else:
            case(
                "switch",
                dtype,
                lambda i, x: [
                    lax.switch(i[k], [lambda x: x, lambda x: -x, lambda x: x * 2], x)
                    for k in range(i.shape[0])
                ],
                np.array([-(2**31), -1, 0, 1, 2, 3, 2**31 - 1, 2**40], object)
                .astype(np.int64)
                .clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
                .astype(dtype),
                x,
            )
    case(
        "literals",
        "float32",
        lambda x: [
            jnp.float32(np.inf) + x,
            x * np.float32(-0.0),
            jnp.float32(2),
            x,
            jnp.full((2,), jnp.nan),
            np.float32(0.1) + x,
        ],
        x,
    )
    case(
        "literals",
        "uint64",
        lambda x: [x + np.uint64(2**64 - 1), jnp.uint64(2**63 + 1)],
        special("uint64"),
    )
    case(
        "literals",
        "bfloat16",
        lambda x: [x + np.asarray(1.5, x.dtype), jnp.asarray(np.inf, x.dtype) - x],
        special("bfloat16"),
    )


with np.errstate(all="ignore"):
    for _fill in (
        _elementwise,
        _reductions,
        _sorts,
        _layouts,
        _indexing,
        _products,
        _windows,
        _loops,
    ):
        _fill()


@functools.cache
def wanted(key):
    """JAX's results."""
    f, args = CASES[key]
    return jax.tree.leaves(jax.jit(f)(*args))


def stable(key, more=None):
    """The stable form of a case, written as JSON and read again: (program, constants, arguments)."""
    f, args = {**CASES, **(more or {})}[key]
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(f(*args)))(*args)
    program, constants = _stable.stable(closed)
    return json.loads(json.dumps(program, allow_nan=False)), constants, args


def judged(got, want, *, exact=False):
    """ "" if an array is equal to JAX's, otherwise what differs."""
    got, want = np.asarray(got), np.asarray(want)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{list(got.shape)} for {want.dtype}{list(want.shape)}"
    tolerance = TOLERANCE.get(str(want.dtype))
    if tolerance is None:
        same = got == want
    else:
        x, y = (
            got.astype(np.complex128 if got.dtype.kind == "c" else np.float64),
            want.astype(np.complex128 if want.dtype.kind == "c" else np.float64),
        )
        with np.errstate(all="ignore"):
            near = x == y if exact else np.abs(x - y) <= tolerance * np.abs(y)
            if want.dtype.kind == "c":
                same = near
            else:
                same = np.where(
                    (y == 0) | np.isinf(y) | np.isnan(y),
                    (x == y) & (np.signbit(x) == np.signbit(y)) | np.isnan(x) & np.isnan(y),
                    near,
                )
    if np.all(same):
        return ""
    at = tuple(np.argwhere(~same)[0])
    return f"{int((~same).sum())} of {same.size}, first {got[at]} for {want[at]} at {tuple(map(int, at))}"


def verdict(key, evaluate, *, exact=False):
    """What an evaluator of the stable form makes of a case: "equal", "refused: why" or "wrong:
    what"."""
    try:
        program, constants, args = stable(key)
    except _stable.Unsupported as error:
        return f"refused: {error}"
    try:
        results = evaluate(program, constants, args)
    except NotImplementedError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    for i, (got, want) in enumerate(itertools.zip_longest(results, wanted(key))):
        if why := judged(got, want, exact=exact):
            return f"wrong: output {i}: {why}"
    return "equal"


def by_numpy(program, constants, args):
    from fnet.export.standalone import _interpret

    return _interpret.run(program, constants, args, {})


def by_jax(program, constants, args):
    from fnet.export import _evaluate

    return jax.jit(lambda *args: _evaluate.sized(program, constants, {}).body(program, args))(*args)


def main():
    import collections
    import sys
    import warnings

    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", True)
    which = {"numpy": by_numpy, "jax": by_jax}
    words = sys.argv[2:]
    for target in sys.argv[1].split(","):
        counts = collections.Counter()
        for key in CASES:
            if words and not any(word in " ".join(key) for word in words):
                continue
            try:
                wanted(key)
            except Exception as error:
                print("INVALID", key, str(error)[:200])
                continue
            answer = verdict(key, which[target], exact=target == "jax")
            counts[answer.partition(":")[0]] += 1
            if answer != "equal":
                print(target, *key, "|", answer[:230])
        print(target, dict(counts), flush=True)


if __name__ == "__main__":
    main()
