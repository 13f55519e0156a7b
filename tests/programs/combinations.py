"""Features of JAX combined: what works alone may fail inside, or next to, something else."""

import collections
import enum
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback, pallas, sparse
from jax.sharding import PartitionSpec as P

from .program import EVENTS, Made, Topic, integers, key, normal, positive_definite
from .sharded import mesh

topic = Topic("combinations")
x3, m43, w33 = normal(3), normal(4, 3), normal(3, 3)


@topic(x3, normal(4, 3).astype("float16"))
def scan_whose_body_changes_dtypes(c, xs):
    def body(c, x):
        h = (c.astype(jnp.bfloat16) * x.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.tanh(h + c), (h.astype(jnp.float16) + x, (h > 0).astype(jnp.int8))

    c, (hs, signs) = lax.scan(body, c, xs)
    return c, hs, signs


@topic(w33, integers(3, high=9), wrt=())
def while_that_carries_every_dtype(w, i):
    state = {
        "x": w[0],
        "low": w[1].astype(jnp.bfloat16),
        "i": i.astype(jnp.uint8),
        "b": w[2] > 0,
        "z": lax.complex(w[0], w[1]),
        "n": 0,
    }

    def body(s):
        x = jnp.where(s["b"], s["x"] @ w, s["low"].astype(jnp.float32))
        return {
            "x": jnp.tanh(x),
            "low": (s["low"] * 2).astype(jnp.bfloat16),
            "i": s["i"] << 1,
            "b": ~s["b"],
            "z": s["z"] * lax.complex(x, x),
            "n": s["n"] + 1,
        }

    return lax.while_loop(lambda s: (s["n"] < 3) & (jnp.abs(s["z"]).sum() < 1e3), body, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _applied(f, x, w, scale):
    return f(x @ w) * scale


def _applied_fwd(f, x, w, scale):
    return _applied(f, x.value, w.value, scale), (
        x.value,
        w.value,
        jnp.float32(x.perturbed),
        jnp.float32(w.perturbed),
    )


def _applied_bwd(f, scale, saved, g):  # the gradients show what fwd was told
    x, w, x_moves, w_moves = saved
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        return None, None
    g = g * scale * (1 + x_moves + 10 * w_moves)
    return g @ w.T, jnp.outer(x, g)


_applied.defvjp(_applied_fwd, _applied_bwd, symbolic_zeros=True)


@topic(x3, w33)
def custom_vjp_symbolic_zeros_nondiff_argnums_in_scan_in_checkpoint(x, w):
    @jax.checkpoint
    def run(x):
        return lax.scan(lambda c, _: (_applied(jnp.sin, c, w, 0.5), None), x, None, length=2)[0]

    return (
        run(x)
        + _applied(jnp.cos, jnp.ones(3), w, 2.0)
        + _applied(jnp.cos, x, lax.stop_gradient(w), 2.0)
    )


@topic(x3, w33, wrt=(0, 1))
def custom_jvp_symbolic_zeros_in_vmap(x, w):
    @jax.custom_jvp
    def f(x, w):
        return jnp.tanh(w @ x)

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def rule(primals, tangents):  # the tangent shows which inputs have one
        zeros = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        (x, w), (dx, dw) = primals, tangents
        y = f(x, w)
        return y, (1 - y * y) * ((0.0 if zeros[0] else w @ dx) + (0.0 if zeros[1] else dw @ x)) * (
            1.0 + zeros[1]
        )

    return jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w), f(x, lax.stop_gradient(w))


@topic(normal(), x3, w33, normal(4, 3, 3), wrt=(1, 2))
def nested_checkpoints_in_scan_in_cond(p, x, w, ws):
    save = jax.checkpoint_policies.save_only_these_names("kept")

    @functools.partial(jax.checkpoint, policy=save)
    def outer(c, u):
        inner = jax.checkpoint(lambda c: jnp.tanh(c @ w) @ u)
        return jax.ad_checkpoint.checkpoint_name(inner(c), "kept") * 0.5, c.sum()

    deep = lambda x: lax.scan(outer, x, ws)
    return lax.cond(p > -9.0, deep, lambda x: (x, jnp.zeros(4)), x)


@topic(
    normal(3, 4, 4), normal(3, 4), tolerance=1e-3, low=0.1
)  # solves amplify the rounding of a @ a.T
def linear_algebra_in_vmap_in_scan(a, b):
    def body(c, _):
        s = jax.vmap(lambda a, b: jnp.linalg.solve(a @ a.T + 8 * jnp.eye(4), b))(a, c)
        return s, jax.vmap(lambda a: jnp.linalg.slogdet(a @ a.T + jnp.eye(4))[1])(a)

    return lax.scan(body, b, None, length=2)


@topic(positive_definite(3, dtype="complex64"), normal(3, dtype="complex64"), tolerance=1e-3)
def complex_solve_in_checkpoint_and_cond(a, b):
    f = jax.checkpoint(lambda a, b: jnp.linalg.solve(a, b) * jnp.exp(lax.complex(b.imag, b.real)))
    return lax.cond(a[0, 0].real > 0, f, lambda a, b: b, a, b)


@topic(normal(3, dtype="float64"), normal(4, 3), normal(3, 3), wrt=(0, 2), x64=True)
def float64_carry_with_float32_products(c, xs, w):
    def body(c, x):
        y = x @ w
        return c + y.astype(jnp.float64) * 1e-9, y

    return lax.scan(body, c, xs)


@topic(integers(high=4, dtype="int64"), normal(3), wrt=(), x64=True)
def int64_bound_and_float32_under_x64(i, x):
    return lax.fori_loop(
        0, i + 2, lambda j, s: (s[0] + j, s[1] + x * j.astype(jnp.float32)), (i, x)
    ), x[i % 3]


@topic(normal(0, 3), normal(3, 3))
def empty_batch_through_scan_cond_and_vmap(x, w):
    def body(h, _):
        return lax.cond(h.shape[0] == 0, lambda h: h @ w, lambda h: h, h), h.sum()

    return lax.scan(jax.checkpoint(body), jax.vmap(jnp.sin)(x), None, length=2)


@topic(
    Made(lambda: sparse.BCOO.fromdense(jnp.asarray(normal(2, 4, 4)), n_batch=1)),
    normal(2, 4),
    wrt=(0, 1),
)
def bcoo_with_batch_axes_in_checkpoint(a, x):
    f = jax.checkpoint(
        lambda a, x: sparse.bcoo_dot_general(a, x, dimension_numbers=(((2,), (1,)), ((0,), (0,))))
    )
    return jnp.tanh(f(a, x))


@topic(
    Made(lambda: sparse.BCOO.fromdense(jnp.asarray(normal(3, 3) > 9.0, "float32"), nse=0)),
    x3,
    wrt=(1,),
)
def bcoo_without_elements(a, x):
    return a @ x + x, a.todense()


@topic(normal(8, 3), w33, wrt=(0, 1))
def shard_map_of_scan_of_checkpoint_with_collectives(x, w):
    def shard(x, w):
        @jax.checkpoint
        def body(c, _):
            h = jnp.tanh(c @ w)
            return h - lax.pmean(h, "data"), lax.psum(h.sum(), ("data", "model"))

        c, sums = lax.scan(body, lax.pcast(x, "model", to="varying"), None, length=2)
        return lax.pmean(c, "model"), sums

    return jax.shard_map(shard, mesh=mesh(), in_specs=(P("data"), P()), out_specs=(P("data"), P()))(
        x, w
    )


@topic(normal(8, 3), w33, wrt=(0, 1))
def custom_vjp_in_shard_map_in_jit(x, w):
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda saved, g: (g @ saved[1].T, lax.psum(saved[0].T @ g, "data")),
    )
    f = jax.shard_map(
        lambda x, w: jnp.sin(product(x, w)),
        mesh=mesh(),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    return jax.jit(f)(x, w)


@topic(x3, wrt=(), events="set", excluded={("*", "vmap"): "JAX cannot batch cond with effects"})
def io_callback_in_cond_in_scan_with_a_ref(x):
    log = jax.new_ref(jnp.zeros(3))
    host = lambda v: (EVENTS.append(np.round(np.asarray(v), 3).tolist()), np.float32(v).sum())[1]

    def body(c, t):
        log[...] += c
        y = lax.cond(
            t > 0.5,
            lambda c: io_callback(host, jax.ShapeDtypeStruct((), jnp.float32), c),
            lambda c: c.sum(),
            c * t,
        )
        return c * 0.5, y

    c, ys = lax.scan(body, x, jnp.arange(3.0))
    return c, ys, jax.freeze(log)


@topic(m43, w33, wrt=(0, 1))
def ref_of_low_precision_in_vmap(xs, w):
    def one(x):
        r = jax.new_ref(jnp.zeros(3, jnp.bfloat16))
        r[...] = (x @ w).astype(jnp.bfloat16)
        r[1:] *= 2
        return jax.freeze(r).astype(jnp.float32)

    return jax.vmap(one)(xs)


@topic(
    Made(lambda: jax.new_ref(jnp.zeros(3))),
    x3,
    w33,
    wrt=(),
    excluded={("*", "vmap"): "jnp.stack takes no Refs"},
)
def ref_accumulates_products_in_while(r, x, w):
    def body(s):
        r[...] += s[1] @ w
        return s[0] + 1, jnp.tanh(s[1])

    return lax.while_loop(lambda s: s[0] < 3, body, (0, x))


@topic(x3, w33, wrt=(0, 1))
def gradient_through_a_ref_in_scan(x, w):
    def body(r, x):
        r[...] = jnp.tanh(r[...] @ w + x)

    r = jax.new_ref(x)
    for i in range(3):
        body(r, x * i)
    return jax.freeze(r)


class Mode(enum.Enum):
    SINE = "sine"
    COSINE = "cosine"


class Settings(NamedTuple):
    mode: Mode
    width: int = 3


@topic(x3, Mode.SINE, others=[(x3, Mode.COSINE), (x3, Mode.SINE)], static=(1,))
def enumeration_argument(x, mode):
    return jnp.sin(x) if mode is Mode.SINE else jnp.cos(x)


@topic(
    normal(4, 3),
    w33,
    wrt=(1,),
    batched=(0,),
    others=[(normal(6, 3), w33), (normal(2, 3), w33)],
    excluded={("*", "vmap"): "the second call has other shapes"},
)
def calls_with_other_shapes(x, w):
    h = lax.scan(jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), None)), x, None, length=2)[0]
    return jnp.mean(h**2)


@topic(
    functools.partial(lambda x, w, *, power, f=jnp.sin: f(x @ w) ** power, power=2),
    x3,
    w33,
    wrt=(1, 2),
)
def partial_with_keywords_in_jit_and_vmap(f, x, w):
    return jax.jit(functools.partial(f, f=jnp.cos))(x, w) + jax.vmap(f, (None, 0))(
        x, jnp.stack([w, w.T])
    ).sum(0)


class Point(NamedTuple):
    x: jax.Array
    y: jax.Array


@topic(Point(x3, normal(3, seed=1)))
def named_tuples_and_ordered_dicts(p):
    f = jax.jit(lambda p: Point(p.y, jnp.sin(p.x)))
    q = lax.scan(lambda c, _: (f(c), collections.OrderedDict(z=c.x, a=c.y)), p, None, length=2)
    return q, collections.defaultdict(list, {"k": [p.x, (p.y,)]})


@topic(x3, w33, wrt=(0, 1))
def vjp_function_crosses_jit_and_cond(x, w):
    y, pull = jax.jit(lambda x, w: jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w))(x, w)
    return lax.cond(y.sum() > -9.0, lambda: pull(y), lambda: jax.tree.map(jnp.zeros_like, (x, w)))


@topic(
    Made(lambda: jax.device_put(jnp.asarray(x3), jax.devices()[3])),
    Made(lambda: jax.device_put(jnp.asarray(w33), jax.devices()[3])),
    wrt=(0, 1),
)
def arguments_on_another_device(x, w):
    return jnp.tanh(x @ w), x * 2


@topic(x3, w33, wrt=(0, 1))
def precision_set_by_a_context(x, w):
    with jax.default_matmul_precision("highest"):
        y = x @ w
    return jnp.sin(y) @ w


@topic(normal(4, 8), integers(8, 5, high=9, dtype="int8"), wrt=(0,))
def integer_and_boolean_products(x, w):
    q = jnp.round(x * 4).astype(jnp.int8)
    y = lax.dot(q, w, preferred_element_type=jnp.int32)
    return y, x @ w.astype(jnp.float32), (x > 0).astype(jnp.bfloat16) @ (w > 3).astype(jnp.bfloat16)


@topic(m43, w33, wrt=(0, 1))
def float8_values(x, w):
    q = x.astype(jnp.float8_e4m3fn)
    return q.astype(jnp.float32) @ w, q, (x @ w).astype(jnp.float8_e5m2).astype(jnp.float32)


@topic(
    normal(8, 128),
    wrt=(),
    excluded={("*", "vmap"): "the same kernel", ("*", "tpu"): "an interpreted kernel"},
)
def pallas_kernel(x):
    def kernel(x, y):
        y[...] = x[...] * 2.0 + 1.0

    call = pallas.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return call(x) @ jnp.ones((128, 2))


@functools.cache
def _exported():
    f = jax.jit(lambda x, w: jnp.tanh(x @ w))
    types = jax.ShapeDtypeStruct((3,), "float32"), jax.ShapeDtypeStruct((3, 3), "float32")
    return jax.export.export(f, platforms=("cpu", "cuda", "tpu"))(*types)


@topic(x3, w33, wrt=(), excluded={("*", "vmap"): "JAX cannot batch exported programs"})
def exported_program(x, w):
    return jax.jit(lambda x: _exported().call(x, w) + x)(x @ w)


@topic(m43, key(), wrt=(0,))
def random_while_in_vmap(xs, k):
    def one(x, k):
        more = lambda s: s[0] < 3

        def body(s):
            k, sub = jax.random.split(s[1])
            return s[0] + jax.random.randint(sub, (), 1, 3), k

        n, k = lax.while_loop(more, body, (0, k))
        return x * jax.random.uniform(k, (3,)) + n.astype(jnp.float32)

    return jax.vmap(one)(xs, jax.random.split(k, 4))


@topic(normal(4, 3), w33, wrt=(0, 1))
def collectives_of_vmap_in_checkpoint(x, w):
    @jax.checkpoint
    def f(x):
        h = jnp.tanh(x @ w)
        others = lax.all_gather(h, "i")
        return (
            h
            - lax.pmean(h, "i")
            + lax.ppermute(h, "i", [(j, (j + 1) % 4) for j in range(4)]) * others.max(0)
        )

    return jax.vmap(f, axis_name="i")(x)


@topic(normal(6), wrt=())
def unique_nonzero_and_multi_operand_reduce(x):
    def larger(a, b):
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    best = lax.reduce((x, jnp.arange(6)), (jnp.float32(-jnp.inf), jnp.int32(-1)), larger, (0,))
    return (
        best,
        jnp.nonzero(x > 0, size=4, fill_value=-1),
        jnp.unique(jnp.round(x), size=6, fill_value=0.0),
    )


@topic(m43, w33, wrt=(0, 1))
def weakly_typed_scalars_and_promotion_in_loops(x, w):
    def body(i, s):
        return s * 0.5 + (x @ w) * (2 if i is None else 1.5)

    h = lax.fori_loop(0, 3, body, x)
    scale = jnp.asarray(2.0)  # weakly typed
    return h * scale, scale, lax.cond(h.sum() > 0, lambda s: s * 2, lambda s: s, scale)


@topic(normal(5, 3), w33, wrt=(0, 1))
def associative_scan_of_products(x, w):
    ms = jax.vmap(lambda x: jnp.outer(x, x) * 0.3 + w)(x)
    return lax.associative_scan(jnp.matmul, ms), lax.map(lambda m: m @ w, ms, batch_size=2)


@topic(x3, w33, wrt=(0, 1))
def hessian_in_scan_in_jit(x, w):
    loss = lambda x: jnp.sum(jnp.tanh(x @ w) ** 2)
    step = jax.jit(
        lambda x: (
            x - 0.1 * jnp.linalg.solve(jax.hessian(loss)(x) + 4 * jnp.eye(3), jax.grad(loss)(x))
        )
    )
    return lax.scan(lambda x, _: (step(x), loss(x)), x, None, length=2)


@topic(normal(8, 3), normal(3, 3), key(), wrt=(1,), batched=(0,), promotion="standard")
def microbatched_checkpointed_scan_with_aux(x, w, k):
    h, norms = lax.scan(
        jax.checkpoint(lambda h, _: (jnp.tanh(h @ w), jnp.mean(h**2))), x, None, length=2
    )
    return jnp.mean(h**2), {
        "norms": norms,
        "n": jnp.int32(x.shape[0]),
        "draw": jax.random.uniform(k, (2,)),
    }
