"""Custom derivatives, custom batching, checkpoint policies and derivatives of derivatives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .program import Topic, integers, normal, positive_definite

topic = Topic("custom_rules")
x3 = normal(3)


@jax.custom_jvp
def _twice_sloped(x):
    return jnp.sin(x)


_twice_sloped.defjvps(lambda t, y, x: 2 * t * jnp.cos(x))


@topic(x3)
def custom_jvp(x):
    return _twice_sloped(x) * jnp.exp(x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _apply(f, x, n):
    return f(x) * n


@_apply.defjvp
def _(f, n, primals, tangents):
    return f(primals[0]) * n, 3 * tangents[0] * n


@topic(x3, core=True)
def custom_jvp_nondiff_argnums(x):
    return _apply(jnp.sin, x, 2.0) + _apply(lambda y: y * y, x, 1.0)


@jax.custom_vjp
def _clipped(x, lo):
    return x


_clipped.defvjp(lambda x, lo: (x, lo), lambda lo, g: (jnp.clip(g, -lo, lo), jnp.zeros_like(lo)))


@topic(x3)
def custom_vjp(x):
    return _clipped(x * 3, jnp.float32(0.5)) * x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scaled_gradient(x, s):
    return x


_scaled_gradient.defvjp(lambda x, s: (x, None), lambda s, _, g: (g * s,))


@topic(x3, normal(4, 3))
def custom_vjp_nondiff_argnums_in_scan(x, xs):
    return lax.scan(lambda c, x: (_scaled_gradient(jnp.sin(c * x), 0.5), c), x, xs)


@jax.custom_vjp
def _with_integers(x, i):
    return {"y": x[i], "i": i + 1}


_with_integers.defvjp(
    lambda x, i: (_with_integers(x, i), (x, i)),
    lambda r, g: (jnp.zeros_like(r[0]).at[r[1]].set(g["y"]), None),
)


@topic(x3, integers(high=3))
def custom_vjp_of_integers_and_dicts(x, i):
    return _with_integers(x, i)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    y: bool
    i: bool


@jax.custom_vjp
def _observed(x, y, i):
    return x * y * i


def _observed_bwd(saved, g):  # the gradient shows what fwd was told
    x, y, i, perturbed = saved
    return (
        g * y * i * (10.0 if perturbed.y else 1.0) * (100.0 if perturbed.i else 1.0),
        g * x * i,
        g * x * y,
    )


_observed.defvjp(
    lambda x, y, i: (
        x.value * y.value * i.value,
        (x.value, y.value, i.value, _Perturbed(y.perturbed, i.perturbed)),
    ),
    _observed_bwd,
    symbolic_zeros=True,
)


@topic(normal(), core=True)
def custom_vjp_symbolic_zeros(x):
    return _observed(x, jnp.float32(2.0), jnp.float32(3.0))


@topic(x3)
def custom_gradient(x):
    @jax.custom_gradient
    def f(x):
        return x**2, lambda g: (g * x * 5,)

    return f(x)


@topic(x3, core=True)
def relu_in_scan(x):
    return lax.scan(lambda c, t: (jax.nn.relu(c) * t, c), x, jnp.arange(3.0))[0].sum()


@jax.custom_batching.custom_vmap
def _batched_twice(x):
    return jnp.sin(x)


@_batched_twice.def_vmap
def _(size, batched, x):
    return 2 * jnp.sin(x), batched[0]


@topic(x3, wrt=(), core=True)
def custom_vmap(x):
    return _batched_twice(x), jax.vmap(_batched_twice)(x)


@topic(x3)
def custom_vmap_in_custom_jvp(x):
    @jax.custom_jvp
    def f(x):
        return _batched_twice(x)

    f.defjvp(lambda p, t: (f(p[0]), t[0] * 3))
    return jax.vmap(f)(x)


@topic(normal(4, 3), wrt=())
def sequential_vmap(x):
    return jax.vmap(jax.custom_batching.sequential_vmap(lambda x: jnp.sin(x).sum()))(x)


@topic(x3, excluded={("*", "vmap"): "JAX cannot batch it"})
def linear_call(x):
    f = lambda r, x: x * r
    return jax.custom_derivatives.linear_call(f, lambda r, g: 7 * g * r, jnp.arange(3.0), x)


@topic(x3, normal(3, seed=1))
def closure_convert(x, y):
    f, consts = jax.closure_convert(lambda x: jnp.sin(x * y), x)
    return f(x, *consts)


@topic(x3)
def linear_transpose(x):
    w = jnp.sin(x)
    return jax.linear_transpose(lambda v: v * w, x)(jnp.ones(3))[0]


@topic(x3)
def hessian(x):
    return jax.hessian(lambda x: jnp.prod(jnp.sin(x)))(x)


@topic(x3, core=True)
def jacfwd_of_jacrev(x):
    return jax.jacfwd(jax.jacrev(lambda x: jnp.tanh(x) * x[0]))(x)


@topic(x3)
def jvp_of_grad(x):
    return jax.jvp(jax.grad(lambda x: jnp.sum(jnp.exp(x) * x)), (x,), (jnp.ones(3),))


@topic(x3)
def linearize_and_vjp(x):
    y, f = jax.linearize(jnp.sin, x)
    z, g = jax.vjp(lambda x: {"a": jnp.cos(x), "b": x[0]}, x)
    return f(y), g(jax.tree.map(jnp.ones_like, z))


@topic(normal())
def fourth_derivative(x):
    f = lambda x: jnp.sin(x) * jnp.exp(x)
    for _ in range(4):
        f = jax.grad(f)
    return f(x)


@topic(x3, normal(4, 3), wrt=())
def value_and_grad_with_aux(w, x):
    return jax.value_and_grad(
        lambda w: (jnp.sum((x @ w) ** 2), {"pred": x @ w, "n": 4}), has_aux=True
    )(w)


@topic(integers(3), x3, wrt=(1,))
def float0_tangents(i, x):
    grads = jax.grad(
        lambda i, x: jnp.sum(i.astype(jnp.float32) * x**2), argnums=(0, 1), allow_int=True
    )(i, x)
    return grads[1], grads[0].dtype == jax.dtypes.float0


@topic(
    integers(3),
    x3,
    wrt=(),
    excluded={("*", "jit"): "jit cannot return float0", ("*", "vmap"): "float0"},
)
def float0_results(i, x):
    return jax.grad(lambda i, x: jnp.sum(i.astype(jnp.float32) * x), argnums=0, allow_int=True)(
        i, x
    )


def _layers(w, x, name="h"):
    for _ in range(3):
        x = checkpoint_name(jnp.tanh(x @ w), name)
    return jnp.mean(x**2)


@topic(normal(4, 4), normal(6, 4), batched=(1,))
def checkpoint(w, x):
    return jax.checkpoint(_layers)(w, x)


@topic(normal(4, 4), normal(6, 4), batched=(1,))
def checkpoint_saves_names(w, x):
    return jax.checkpoint(_layers, policy=jax.checkpoint_policies.save_only_these_names("h"))(w, x)


@topic(normal(4, 4), normal(6, 4))
def checkpoint_saves_products(w, x):
    return jax.checkpoint(_layers, policy=jax.checkpoint_policies.dots_saveable)(w, x)


@topic(normal(4, 4), normal(6, 4))
def checkpoint_offloads(w, x):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return jax.checkpoint(_layers, policy=policy)(w, x)


@topic(normal(4, 4), normal(6, 4))
def checkpoint_static_argnums_and_prevent_cse(w, x):
    return jax.checkpoint(lambda w, x, n: _layers(w, x) * n, static_argnums=2, prevent_cse=False)(
        w, x, 3
    )


@topic(normal(4, 4), normal(5, 4), core=True)
def checkpointed_scan_body(w, x):
    body = jax.checkpoint(lambda c, x: (jnp.tanh(c @ w + x), c[0]))
    return lax.scan(body, x[0], x)


@topic(normal(4, 4), normal(5, 4), wrt=())
def gradient_of_checkpointed_layers_in_scan(w, x):
    def loss(w):
        return lax.scan(jax.checkpoint(lambda c, x: (jnp.tanh(c @ w + x), c[0])), x[0], x)[0].sum()

    return jax.value_and_grad(loss)(w)


@topic(x3)
def stop_gradient_and_straight_through(x):
    return x + lax.stop_gradient(jnp.round(x) - x)


@topic(positive_definite(3), x3, core=True, tolerance=1e-4)
def custom_linear_solve(a, b):
    solve = lambda matvec, b: jnp.linalg.solve(a, b)
    return lax.custom_linear_solve(lambda v: a @ v, b, solve, symmetric=True)


@topic(positive_definite(3), x3, tolerance=1e-4)
def custom_linear_solve_with_transpose_and_aux(a, b):
    return lax.custom_linear_solve(
        lambda v: a @ v,
        b,
        lambda mv, b: (jnp.linalg.solve(a, b), 3),
        transpose_solve=lambda mv, b: (jnp.linalg.solve(a.T, b), 3),
        has_aux=True,
    )


@topic(normal())
def custom_root(a):
    f = lambda x: x**3 - jnp.abs(a) - 1.0
    newton = lambda f, x: lax.fori_loop(0, 20, lambda _, x: x - f(x) / (3 * x**2), x)
    return lax.custom_root(f, jnp.float32(1.0), newton, lambda g, y: y / g(jnp.float32(1.0)))


@topic(x3)
def second_derivative_of_custom_jvp_in_checkpoint(x):
    return jax.grad(lambda x: jax.grad(lambda x: jax.checkpoint(_twice_sloped)(x).sum())(x).sum())(
        x
    )


@topic(x3)
def nan_safe_where(x):
    return jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0)


@topic(x3)
def custom_jvp_with_jit_inside(x):
    @jax.custom_jvp
    def f(x):
        return jax.jit(jnp.sin)(x)

    f.defjvp(lambda p, t: (f(p[0]), jax.jit(lambda t: 2 * t)(t[0])))
    return jax.jit(f)(x) + lax.map(f, x)


@topic(x3)
def functions_of_jax_nn_with_custom_rules(x):
    return (
        jax.nn.relu(x),
        jax.nn.silu(x),
        jax.nn.gelu(x),
        jax.nn.softmax(x),
        jax.nn.logsumexp(x),
        jax.nn.relu6(x),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _bounded(f, x, bound, w):
    return f(x @ w)


_bounded.defvjp(
    lambda f, x, bound, w: (f(x @ w), (x, w)),
    lambda f, bound, saved, g: ((jnp.clip(g, -bound, bound) @ saved[1].T), jnp.outer(saved[0], g)),
)


@topic(normal(4, 3), normal(3, 3), wrt=(0, 1))
def custom_vjp_nondiff_argnums_in_scan_in_vmap(xs, w):
    def one(x):
        return lax.scan(
            lambda h, b: (_bounded(jnp.tanh, h, 0.1, w) * b, h.sum()), x, jnp.arange(1.0, 4.0)
        )

    return jax.vmap(one)(xs)


@topic(x3, normal(3, 3), wrt=())
def custom_vmap_that_calls_itself_in_scan(x, w):
    @jax.custom_batching.custom_vmap
    def f(x, w):
        return x @ w

    @f.def_vmap
    def rule(size, batched, x, w):
        if batched[1]:
            return jax.vmap(lambda x, w: x @ w, [0 if b else None for b in batched])(x, w), True
        return x @ w * 2.0, True

    return lax.scan(
        lambda c, _: (jnp.tanh(jax.vmap(f, (0, None))(c, w)), None),
        jnp.stack([x, 2 * x]),
        None,
        length=2,
    )[0], f(x, w)


@topic(x3, normal(3, 3), wrt=(0, 1))
def derivatives_inside_loops(x, w):
    f = lambda x: jnp.tanh(x @ w)

    def body(h, _):
        y, tangent = jax.jvp(f, (h,), (x,))
        _, linear = jax.linearize(f, h)
        _, pull = jax.vjp(f, h)
        return y + 0.1 * linear(x), (
            tangent,
            pull(x)[0],
            jax.jacrev(f)(h),
            jax.linear_transpose(lambda v: v @ w, h)(x),
        )

    return lax.scan(body, x, None, length=2)
