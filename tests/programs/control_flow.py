"""Loops, branches and jit."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .program import Topic, integers, normal

topic = Topic("control_flow")
x3, m23 = normal(3), normal(2, 3)


@topic(normal(), x3)
def cond(p, x):
    return lax.cond(p > 0, lambda x: jnp.sin(x) @ x, lambda x: jnp.cos(x).sum(), x)


@topic(integers(high=4), x3, wrt=(1,))
def switch_with_integer_index(i, x):
    return lax.switch(i, [lambda x: x, jnp.sin, lambda x: x * x, lambda x: -x], x)


@topic(x3)
def switch_index_is_clamped(x):
    return lax.switch(7, [jnp.sin, jnp.cos], x), lax.switch(-3, [jnp.sin, jnp.cos], x)


@topic(normal(), x3)
def cond_returns_its_operand(p, x):
    return lax.cond(p > 0, lambda x, y: (x, y), lambda x, y: (y, y), x, jnp.sin(x))


@topic(normal(), x3)
def cond_with_one_branch_constant(p, x):
    return lax.cond(p > 0, lambda: jnp.ones(3), lambda: jnp.zeros(3)) * x


@topic(normal(4), x3, wrt=(1,))
def cond_in_vmap(p, x):
    return jax.vmap(lambda p: lax.cond(p > 0, jnp.sin, jnp.cos, x))(p)


@topic(x3, normal(5, 3))
def scan(c, xs):
    return lax.scan(lambda c, x: (jnp.tanh(c * x), c.sum()), c, xs)


@topic(x3, normal(5, 3))
def scan_reversed_and_unrolled(c, xs):
    return lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), c, xs, reverse=True, unroll=2)


@topic(x3)
def scan_without_xs(c):
    return lax.scan(lambda c, _: (jnp.sin(c), None), c, None, length=4)


@topic(x3, normal(0, 3), core=True)
def scan_of_length_zero(c, xs):
    return lax.scan(lambda c, x: (c * x, c), c, xs)


@topic(x3, normal(4, 3), core=True)
def scan_of_checkpointed_cond(c, xs):
    @jax.checkpoint
    def body(c, x):
        c = lax.cond(x[0] > 0, lambda: jnp.sin(c) * x, lambda: c)
        return c, c.sum()

    return lax.scan(body, c, xs)


@topic(m23, wrt=(), core=True)
def while_in_scan(xs):
    def body(c, x):
        more = lambda s: (s[0] < 4) & (jnp.abs(s[1]).sum() < 100.0)
        n, y = lax.while_loop(more, lambda s: (s[0] + 1, s[1] * 2), (0, x))
        return c + y, n

    return lax.scan(body, jnp.zeros(3), xs)


@topic(x3, wrt=())
def while_with_captured_values(x):
    y, k = jnp.cos(x), x.sum()
    return lax.while_loop(
        lambda s: s[0] < jnp.abs(k) + 3, lambda s: (s[0] + 1.0, s[1] * y), (0.0, x)
    )


@topic(x3, wrt=())
def jvp_through_while(x):
    f = lambda x: lax.while_loop(lambda s: s.sum() < 50.0, lambda s: s * s + 1.0, x)
    return jax.jvp(f, (x,), (jnp.ones(3),))


@topic(x3)
def fori_loop_with_static_bounds(x):
    return lax.fori_loop(0, 3, lambda i, x: x + i.astype(jnp.float32) * jnp.sin(x), x)


@topic(x3, integers(high=6), wrt=())
def fori_loop_with_traced_bound(x, n):
    return lax.fori_loop(0, n, lambda i, x: x + jnp.sin(x), x)


@topic(m23)
def map_with_batches(xs):
    return lax.map(lambda x: jnp.sin(x) @ x, xs, batch_size=1)


@topic(normal(5, 2))
def associative_scan(x):
    return lax.associative_scan(lambda a, b: a * 0.5 + b, x), lax.associative_scan(
        jnp.maximum, x, reverse=True
    )


@topic(x3, normal(4, 3))
def scan_carries_a_tree(c, xs):
    carry = {"a": c, "n": jnp.int32(0), "none": None, "pair": (c[0], c > 0)}

    def body(s, x):
        return {"a": s["a"] + x, "n": s["n"] + 1, "none": None, "pair": (s["a"].sum(), x > 0)}, (
            s["n"],
            s["pair"][1],
        )

    return lax.scan(body, carry, xs)


@topic(x3, normal(4, 3))
def scan_with_constant_outputs(c, xs):
    return lax.scan(lambda c, x: (c, (jnp.ones(2), 3)), c, xs)


@topic(x3, normal(3, 2, 3))
def scan_in_scan_with_shared_constant(w, xss):
    inner = lambda c, x: (jnp.tanh(c * w + x), c)
    return lax.scan(lambda c, xs: lax.scan(inner, c, xs), w, xss)


@topic(x3, core=True)
def jit_in_jit_called_twice(x):
    inner = jax.jit(lambda x, y: jnp.sin(x) * y)
    outer = jax.jit(lambda x: inner(x, x) + inner(x, 2 * x))
    return outer(x) + outer(x + 1)


@topic(x3)
def jit_with_static_arguments(x):
    f = jax.jit(
        lambda x, n, mode: x**n if mode == "power" else x * n,
        static_argnums=1,
        static_argnames="mode",
    )
    return f(x, 3, mode="power") + f(x, 2, mode="times")


@topic(x3)
def jit_that_donates(x):
    y = jnp.sin(x)
    return jax.jit(lambda x: x * 2, donate_argnums=0)(y)


@topic(x3)
def jit_with_keep_unused_and_inline(x):
    f = jax.jit(lambda x, unused: x * 2, keep_unused=True)
    return f(x, jnp.ones(2)) + jax.jit(jnp.sin, inline=True)(x)


@topic(x3)
def jit_without_outputs(x):
    jax.jit(lambda x: None)(x)
    return jax.jit(lambda: jnp.ones(3))() * x


@topic(x3)
def jit_forwards_its_inputs(x):
    a, b, c = jax.jit(lambda x, y: (y, x, x))(x, jnp.cos(x))
    return a + b * c, c


def _power(x, n):
    return x if n == 0 else jax.jit(_power, static_argnums=1)(x * x, n - 1)


@topic(x3)
def jit_recursion(x):
    return _power(x, 3)


@topic(x3)
def nested_functions_close_over_tracers(x):
    y = jnp.sin(x)
    return lax.cond(
        y.sum() > 0, lambda: lax.fori_loop(0, 2, lambda i, s: s * y + x, x), jax.jit(lambda: x - y)
    )


@topic(x3)
def partial_and_bound_method(x):
    class Scale:
        def __init__(self, s):
            self.s = s

        def apply(self, x):
            return x * self.s

    return functools.partial(jnp.power, x)(2) + jax.jit(Scale(x[0]).apply)(x)


@topic(x3)
def named_call_and_scope(x):
    with jax.named_scope("outer"):
        return jax.named_call(lambda x: jnp.sin(x), name="inner")(x)


@topic(m23)
def vmap_with_axis_name(x):
    return jax.vmap(
        lambda x: x / lax.psum(x, "i") + lax.axis_index("i").astype(jnp.float32), axis_name="i"
    )(x)


@topic(m23)
def vmap_in_and_out_axes(x):
    return jax.vmap(lambda x, s: (jnp.sin(x) * s, s), in_axes=(1, None), out_axes=(-1, None))(
        x, x[0, 0]
    )


@topic(m23)
def vmap_with_spmd_axis_name(x):
    mesh = jax.make_mesh(
        (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.vmap(
        lambda x: lax.with_sharding_constraint(jnp.sin(x), spec), spmd_axis_name="data"
    )(x)


@topic(x3)
def optimization_barrier(x):
    y, z = lax.optimization_barrier((jnp.sin(x), x))
    return y * z


@topic(x3)
def platform_dependent(x):
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


@topic(x3, wrt=(), excluded={("*", "vmap"): "JAX cannot batch it"})
def composite(x):
    return lax.composite(lambda x, scale: jnp.sin(x) * scale, "my.sine")(x, scale=2.0)


@topic(x3)
def compile_time_constants(x):
    with jax.ensure_compile_time_eval():
        n = int(jnp.arange(4).sum())
    return x * n


@topic(x3)
def unused_arguments_and_dead_code(x):
    jnp.linalg.inv(jnp.outer(x, x))  # singular: NaN, and unused
    return x * 2


@topic(integers(5), normal(5), wrt=(1,))
def scan_over_integers_and_booleans(i, x):
    return lax.scan(lambda c, s: (c + jnp.where(s[0] > 2, s[1], 0.0), s[0] > 2), 0.0, (i, x))


@topic(normal(4, 4), normal(8, 4), batched=(1,), core=True)
def microbatched_scan_over_layers(w, x):
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)
    return jnp.mean(h**2)


@topic(
    normal(3, 6, 6),
    normal(2, 5, 6),
    tolerance=1e-4,
    excluded={("autocast", "*"): "rounding decides which branch is taken"},
)
def vmapped_products_cond_remat_transposed(ws, x):
    def body(h, w):
        y = jax.vmap(jax.vmap(lambda r: w @ r))(h)
        y = jax.nn.relu(y) + jax.nn.silu(y)
        y = lax.cond(y[0, 0, 0] > 0, lambda y: y * 2, lambda y: -y, y)
        y = jax.jit(lambda y: y + jnp.exp(-(y**2)))(y)
        y = jax.checkpoint(lambda y: jnp.sin(y).transpose(1, 0, 2))(y).transpose(1, 0, 2)
        return y, y.transpose(2, 1, 0)

    h, ys = lax.scan(body, x, ws)
    return jnp.mean(h**2) + jnp.mean(ys[..., 0, 0])


@topic(x3, normal(3, 3), wrt=(0, 1))
def nested_jit_with_static_and_donated_arguments(x, w):
    @functools.partial(jax.jit, static_argnums=(1,), static_argnames=("mode",), donate_argnums=(0,))
    def inner(h, n, w, *, mode="sin", scale=1.0):
        return getattr(jnp, mode)(h @ w) * n * scale

    @functools.partial(jax.jit, static_argnames="n")
    def outer(x, w, *, n):
        return inner(x * 2, n, w, mode="cos", scale=0.5) + inner(x + 1.0, 2 * n, w)

    return outer(x, w, n=3), outer(x, w.T, n=2)


@topic(integers(high=3), integers(high=6, seed=3), normal(3), normal(3, 3), wrt=())
def fori_loop_with_both_bounds_traced(i, n, x, w):
    step = lambda j, h: jnp.tanh(h @ w) + j.astype(jnp.float32)
    grown = jax.vmap(lambda n: lax.fori_loop(i, n, step, x))(jnp.array([1, 4, 2]) + n)
    return grown, lax.fori_loop(n, i, step, x)


@topic(x3, normal(3, 3), wrt=(0, 1))
def switch_with_indices_out_of_range(x, w):
    branches = [lambda x: x @ w, lambda x: jnp.sin(x), lambda x: x * 2.0]
    pick = lambda i: lax.switch(i, branches, x)
    return [
        pick(jnp.int32(-7)),
        pick(jnp.uint8(200)),
        pick(jnp.int8(1)),
        jax.vmap(pick)(jnp.array([-1, 1, 5])),
        lax.select_n(jnp.array([0, 2, 1]), x, x * 2, x @ w),
    ]


@topic(x3, normal(3, 3), wrt=(0, 1))
def scopes_with_odd_names(x, w):
    for name in (
        "a/b",
        "jvp(f)",
        "transpose(x)",
        "rematted_computation",
        "checkpoint",
        "while",
        "body",
        "a b",
        "é",
        "vmap(g)/h",
        "[0]",
        "f#1",
        "x.y",
        "(",
        ")",
        "a)b(",
        "transpose(jvp(q))",
    ):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    return jax.vmap(lambda a: jax.named_call(lambda a: a @ w, name="vmap(x")(a))(jnp.stack([x, x]))


@topic(normal(4, 3), normal(3, 3), wrt=(0, 1))
def scan_inside_batched_while_inside_cond(xs, w):
    def one(x):
        def body(s):
            h, ys = lax.scan(
                lambda h, _: (jnp.tanh(h @ w), h.max()), s[1], None, length=2, unroll=True
            )
            return s[0] + 1, h + ys.sum()

        n, h = lax.while_loop(
            lambda s: (s[0] < 3) & (s[1].sum() < 4.0), body, (jnp.int32(0), lax.stop_gradient(x))
        )
        return lax.cond(n > 1, lambda: x @ w + lax.stop_gradient(h), lambda: x), n

    return jax.vmap(one)(xs)
