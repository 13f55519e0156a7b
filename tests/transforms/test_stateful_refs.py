"""`jax.Ref`s under each transform: passed as arguments, closed over, and created inside."""

import re

import jax
import jax.numpy as jnp
import pytest
from checks import close, same
from jax import lax
from stateful import TRANSFORMS, X, each_transform

from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")

# Each function takes a Ref `c` that is closed over, and a Ref `r` and an array as arguments.


def at_the_top(c, r, x):
    r[...] = r[...] + x
    c[1:] += 2 * r[1:]
    jax.ref.addupdate(c, (slice(None),), x)
    return jnp.sin(x) * r[...]


def created(c, r, x):
    s = jax.new_ref(x)
    s[...] *= c[...] + 1
    s[0] = 9.0
    return s[...] * 2, jax.freeze(jax.new_ref(x))


def in_a_product(c, r, x):
    r[...] += jnp.ones((4, 4)) @ x
    return r[...] @ x


def in_a_scan(c, r, x):
    def body(total, y):
        c[...] += y * r[...]
        r[0] = total
        s = jax.new_ref(total)
        s[...] += y
        return s[...], c[1]

    return lax.scan(body, 0.0, x)


def in_a_while(c, r, x):
    def body(carried):
        i, y = carried
        r[...] += y
        c[i] = y[0]
        return i + 1, y * 2

    return lax.while_loop(lambda carried: carried[0] < 3, body, (0, x))[1]


def in_a_branch(c, r, x):
    def changes(x):
        r[...] += x
        return x + c[...]

    return lax.cond(x.sum() > 15, changes, lambda x: 2 * x, x)


def in_a_jit(c, r, x):
    @jax.jit
    def double(r, x):
        r[...] += x
        c[0] += 1
        return 2 * x

    return double(r, x) + double(r, 2 * x)


def in_remat(c, r, x):
    @jax.checkpoint
    def layer(x):
        return jnp.sin(jnp.sin(x) * r[...])

    r[...] += x
    return layer(x)


def in_vmap(c, r, x):
    def one(r, y):
        r[...] += y
        return r[...] * y

    return jax.vmap(one)(r, x)


def in_a_gradient(c, r, x):
    def loss(w):
        def body(h, y):
            h = jnp.sin(jnp.sin(h * w) + y)
            c[0] += lax.stop_gradient(h)
            return h, h * h

        return lax.scan(body, 1.0, x)[1].sum()

    return jax.value_and_grad(loss)(2.0)


def in_a_gradient_of_what_is_created(c, r, x):
    def loss(x):
        s = jax.new_ref(x)
        s[...] = jnp.sin(s[...])
        return (s[...] ** 2).sum()

    return jax.grad(loss)(x)


def in_a_backward_pass(c, r, x):
    @jax.custom_vjp
    def tap(x, r):
        return x

    def backward(r, g):
        r[...] = g
        return g, None

    tap.defvjp(lambda x, r: (x, r), backward)
    return jax.grad(lambda x: jnp.sin(tap(x * x, r)).sum())(x)


REFS = [
    at_the_top,
    created,
    in_a_product,
    in_a_scan,
    in_a_while,
    in_a_branch,
    in_a_jit,
    in_remat,
    in_vmap,
    in_a_gradient,
    in_a_gradient_of_what_is_created,
    in_a_backward_pass,
]


def twice(f, transform):
    """The results and contents of both Refs after two calls."""
    c, r = jax.new_ref(jnp.ones(4)), jax.new_ref(jnp.zeros(4))
    run = transform(lambda r, x: f(c, r, x))
    return [[run(r, x), jnp.copy(r[...]), jnp.copy(c[...])] for x in (X, 2 * X)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("f", REFS)
@each_transform
def test_refs_change_as_without_a_transform(f, transform):
    close(
        twice(f, TRANSFORMS[transform]),
        twice(f, lambda f: f),
        1e-2 if transform == "autocast" else 1e-5,
    )


@pytest.mark.exhaustive
def test_a_rule_may_write_to_a_ref():
    for wrap in (
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.cond(x > 0, f, f, x),
        lambda f: lambda x: lax.fori_loop(0, 1, lambda i, y: f(y), x),
    ):
        count = jax.new_ref(jnp.int32(0))

        def rule(primitive, scope, inputs, equation, count=count):
            if primitive == "sin":
                count[...] += 1
            return NotImplemented

        g = ft.rewrite(wrap(jnp.sin), rule)
        same([g(0.5), jax.jit(g)(1.5)], [jnp.sin(0.5), jnp.sin(1.5)])
        assert count[...] == 2


def test_microbatch_updates_a_ref_for_each_slice():
    for outer in (lambda f: f, jax.jit):
        total, count = jax.new_ref(jnp.float32(0)), jax.new_ref(jnp.int32(0))

        def f(scale, seen, x, count=count):
            seen[...] += x.sum()
            count[...] += 1
            return (scale * x).mean()

        step = outer(ft.microbatch(f, 2, argnums=2))
        same([step(2.0, total, X), step(2.0, total, 3 * X)], [jnp.float32(5), jnp.float32(15)])
        assert (total[...], count[...]) == (40, 4)


@pytest.mark.exhaustive
def test_a_weighted_microbatch_closes_over_a_ref():
    def f(x):
        seen = jax.new_ref(jnp.float32(0))

        def ratio(scale, x):
            seen[...] += x.sum()
            return (scale * x * x).sum() / x.sum()

        return ft.microbatch(ratio, 2, weight=lambda scale, x: x.sum())(2.0, x), seen[...]

    close(jax.jit(f)(X), f(X))
    close(f(X), (2 * (X * X).sum() / 10, jnp.float32(10)))
    close(jax.grad(lambda x: f(x)[0])(X), jax.grad(lambda x: 2 * (x * x).sum() / x.sum())(X))


@pytest.mark.exhaustive
def test_recomputation_beside_a_ref_of_the_backward_pass():
    @jax.custom_vjp
    def wave(x):
        return jnp.sin(x)

    def backward(x, g):
        total = jax.new_ref(g)
        slope = jnp.cos(x)  # of a value that is computed again
        total[...] *= slope
        return (total[...],)

    wave.defvjp(lambda x: (jnp.sin(x), x), backward)

    def loss(w):
        h = jnp.ones((8, 8))
        for _ in range(8):
            h = wave(jnp.exp(-jnp.square(jnp.tanh(h @ w))))
        return h.sum()

    w, step = jnp.full((8, 8), 0.1), ft.rematerialize(jax.grad(loss))
    assert "optimization_barrier" in str(jax.make_jaxpr(step)(w))
    close(step(w), jax.grad(loss)(w))


def returned(r, x):
    r[...] += x
    return r, x


ERRORS = {
    "an argument is returned": (
        returned,
        lambda r: (r, X),
        "mutable array references cannot be returned",
    ),
    "a new one is returned": (
        lambda r, x: jax.new_ref(x),
        lambda r: (r, X),
        "mutable array references cannot be re",
    ),
    "one is passed twice": (
        lambda r, s, x: r[...] + s[...],
        lambda r: (r, r, X),
        "only one reference to a mutable array may be passed",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
@each_transform
def test_misuse_of_refs_is_jaxs_error_at_the_users_function(name, transform):
    f, arguments, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as error:
        TRANSFORMS[transform](f)(*arguments(jax.new_ref(jnp.zeros(4))))
    assert f"{f.__name__} at {__file__}" in str(error.value)


def test_microbatch_refuses_a_ref_as_batch_and_effects_of_weights():
    message = (
        "microbatch: argument 1['x'] is a jax.Ref, which has no slices; expected arrays. Pass "
        "ref[...], or exclude this argument from argnums="
    )
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        ft.microbatch(lambda p, d: p * d["x"][...].sum(), 2)(1.0, {"x": jax.new_ref(X)})

    def weight(p, x):
        jax.debug.callback(lambda x: None, x)
        return x.sum()

    message = (
        "microbatch: weight= must not have side effects, since it is evaluated twice for each "
        "slice; got DebugEffect. Move callbacks and uses of a jax.Ref into the function itself"
    )
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        ft.microbatch(lambda p, x: p * x.mean(), 2, weight=weight)(1.0, X)
