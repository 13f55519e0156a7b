"""Refs, callbacks, prints, checks and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, io_callback

from .program import EVENTS, Made, Topic, integers, normal

topic = Topic("effects")
x3 = normal(3)
ref = lambda shape=(3,): Made(lambda: jax.new_ref(jnp.ones(shape)))


def _host(x):
    EVENTS.append(np.asarray(x).tolist())
    return np.sin(x)


@topic(x3, wrt=(), core=True)
def ref_inside(x):
    r = jax.new_ref(jnp.zeros(3))
    r[...] = x
    r[0] = 5.0
    r[1:] += x[1:] * 2
    return r[...], jax.freeze(r)


@topic(x3)
def ref_inside_scan(x):
    def body(c, t):
        r = jax.new_ref(c)
        r[...] = r[...] * t
        return jax.freeze(r), None

    return lax.scan(body, x, jnp.arange(1.0, 4.0))[0]


@topic(x3)
def ref_closed_over_by_scan(x):
    r = jax.new_ref(jnp.zeros(3))

    def body(c, t):
        r[...] += x * t
        return c, r[0]

    lax.scan(body, None, jnp.arange(1.0, 4.0))
    return jax.freeze(r)


@topic(x3, wrt=(), excluded={("*", "vmap"): "JAX cannot batch cond with Refs"})
def ref_in_jit_and_cond(x):
    r = jax.new_ref(x)

    @jax.jit
    def double(r):
        r[...] *= 2

    double(r)
    lax.cond(x[0] > -9.0, lambda: double(r), lambda: None)
    return jax.freeze(r)


@topic(ref(), x3, wrt=(), excluded={("*", "vmap"): "jnp.stack takes no Refs"})
def ref_argument(r, x):
    r[...] = r[...] * 3 + x
    return r[...].sum()


@topic(ref((4,)), x3, wrt=(), excluded={("*", "vmap"): "jnp.stack takes no Refs"})
def ref_argument_that_is_swapped(r, x):
    old = jax.ref.swap(r, 1, x[0])
    jax.ref.addupdate(r, 2, old)
    return old


@topic(x3, wrt=(), core=True)
def pure_callback(x):
    return jax.pure_callback(
        _host, jax.ShapeDtypeStruct((3,), jnp.float32), x * 2, vmap_method="sequential"
    )


@topic(x3)
def pure_callback_with_custom_jvp(x):
    @jax.custom_jvp
    def f(x):
        return jax.pure_callback(
            _host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
        )

    f.defjvp(lambda p, t: (f(*p), jnp.cos(*p) * t[0]))
    return f(x)


@topic(normal(4, 3), wrt=(), events="set")
def pure_callback_in_vmap(x):
    call = lambda x: jax.pure_callback(
        _host, jax.ShapeDtypeStruct((3,), jnp.float32), x, vmap_method="sequential"
    )
    return jax.vmap(call)(x)


@topic(x3, wrt=(), events="set")
def io_callback_unordered(x):
    io_callback(_host, jax.ShapeDtypeStruct((3,), jnp.float32), x)
    return x * 2


@topic(x3, wrt=(), core=True, excluded={("*", "vmap"): "ordered effects cannot be batched"})
def io_callback_ordered_in_scan(x):
    def body(c, t):
        y = io_callback(_host, jax.ShapeDtypeStruct((3,), jnp.float32), c * t, ordered=True)
        return c + 1, y

    return lax.scan(body, x, jnp.arange(3.0))


@topic(
    x3,
    wrt=(),
    excluded={
        ("*", "vmap"): "ordered effects cannot be batched",
        ("*", "leaks"): "plain JAX leaks",
    },
)
def ordered_callback_in_while_and_cond(x):
    call = lambda x: io_callback(_host, jax.ShapeDtypeStruct((3,), jnp.float32), x, ordered=True)
    x = lax.while_loop(lambda x: x.sum() < 20.0, lambda x: jnp.abs(call(x)) + x + 1.0, jnp.abs(x))
    return lax.cond(x[0] > 0, call, lambda x: x, x)


@topic(x3, events="set", core=True)
def debug_callback(x):
    jax.debug.callback(lambda x: EVENTS.append(round(float(x), 3)), x.sum())
    return jnp.sin(x)


@topic(x3, excluded={("*", "vmap"): "ordered effects cannot be batched"})
def debug_callback_ordered(x):
    for n in range(3):
        jax.debug.callback(
            lambda x, n=n: EVENTS.append((n, round(float(x), 3))), x.sum() * n, ordered=True
        )
    return x * 2


@topic(x3, events="set")
def debug_callback_in_jit_checkpoint_and_scan(x):
    def body(c, t):
        jax.debug.callback(lambda t: EVENTS.append(float(t)), t)
        return jnp.sin(c) * t, None

    return jax.jit(lambda x: lax.scan(jax.checkpoint(body), x, jnp.arange(3.0))[0])(x)


@topic(x3)
def debug_print(x):
    jax.debug.print("x = {}, {y}", jnp.round(x), y=x.astype(jnp.int32))
    return jnp.sin(x)


@topic(x3, events="set")
def debug_callback_of_cotangents(x):
    @jax.custom_vjp
    def watch(x):
        return x

    def bwd(_, g):
        jax.debug.callback(lambda g: EVENTS.append(np.round(g, 3).tolist()), g)
        return (g,)

    watch.defvjp(lambda x: (x, None), bwd)
    return jnp.sin(watch(x))


@topic(x3, wrt=())
def checkify_errors(x):
    def f(x):
        checkify.check(x[0] > 100.0, "too small: {}", x[0])
        return jnp.log(x)

    error, y = checkify.checkify(f)(x)
    return jax.tree.leaves(error)[
        0
    ], y  # whether there is one; the rest holds tracebacks and a counter


@topic(x3, wrt=())
def checkify_nan_and_index(x):
    f = lambda x, i: jnp.log(x)[i]
    error, y = checkify.checkify(f, errors=checkify.float_checks | checkify.index_checks)(
        x, jnp.int32(7)
    )
    return jax.tree.leaves(error)[0], y


@topic(integers(high=9), wrt=(), float32=False)
def callback_of_integers(i):
    return jax.pure_callback(
        lambda i: np.int32(i + 1), jax.ShapeDtypeStruct((), jnp.int32), i, vmap_method="sequential"
    )


@topic(x3, wrt=())
def callback_returns_a_tree(x):
    out = {"a": jax.ShapeDtypeStruct((3,), jnp.float32), "n": jax.ShapeDtypeStruct((), jnp.int32)}
    return jax.pure_callback(
        lambda x: {"a": np.cos(x), "n": np.int32(3)}, out, x, vmap_method="sequential"
    )


@topic(x3, wrt=())
def callback_with_static_arguments(x):
    call = functools.partial(jax.pure_callback, lambda x, *, scale: (x * scale).astype(np.float32))
    return call(jax.ShapeDtypeStruct((3,), jnp.float32), x, scale=3.0, vmap_method="sequential")


@topic(x3, wrt=(), excluded={("*", "vmap"): "ordered effects cannot be batched"})
def ordered_io_callback_in_nested_jit_and_cond(x):
    def host(tag, v):
        EVENTS.append((int(tag), np.round(np.asarray(v), 3).tolist()))
        return np.asarray(v) * np.float32(2)

    call = lambda tag, x: io_callback(
        host, jax.ShapeDtypeStruct((3,), jnp.float32), tag, x, ordered=True
    )
    inner = jax.jit(lambda x: call(1, x) + call(2, x * 2))
    y = inner(x)
    y = lax.cond(y[0] > -1e9, lambda y: call(3, y), lambda y: y, y)
    call(4, y)  # the result is unused
    return y


@topic(normal(4, 3), wrt=(), events="set")
def pure_callbacks_with_every_vmap_method(x):
    def call(x, method):
        return jax.pure_callback(
            lambda x: np.cos(np.asarray(x)),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            vmap_method=method,
        )

    return [
        jax.vmap(functools.partial(call, method=m))(x)
        for m in ("sequential", "expand_dims", "broadcast_all", "sequential_unrolled")
    ]


@topic(x3, normal(3, 3), wrt=(), excluded={("*", "vmap"): "JAX cannot batch while with Refs"})
def while_loop_over_two_refs(x, w):
    a, b = jax.new_ref(x), jax.new_ref(jnp.zeros((4, 3)))

    def body(i):
        a[...] = jnp.tanh(a[...] @ w)
        b[i] = a[...]
        return i + 1

    n = lax.while_loop(lambda i: i < 4, body, 0)
    return n, jax.freeze(a), jax.freeze(b)


@topic(x3, wrt=())
def checkify_in_vmap_scan_and_cond(x):
    def f(x):
        def body(c, t):
            checkify.check(t > 2.0, "t = {}", t)
            return lax.cond(t > 0.0, lambda c: c / t, lambda c: c, c), jnp.log(t)

        return lax.scan(body, 1.0, x)

    error, y = checkify.checkify(jax.vmap(f), errors=checkify.all_checks)(jnp.stack([x, x + 9.0]))
    return jax.tree.leaves(error)[0], y
