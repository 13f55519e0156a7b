"""Differential equations and implicit functions: diffrax, JAX's odeint."""

import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint

from .program import Made, Package, Topic, key, normal

diffrax, optimistix, lineax, eqx = (
    Package("diffrax"),
    Package("optimistix"),
    Package("lineax"),
    Package("equinox"),
)
topic = Topic("solvers", tolerance=1e-3)
y0 = normal(2)
needs = {"needs": "diffrax", "promotion": "standard"}


@topic(y0)
def jax_odeint(y):
    return odeint(
        lambda y, t, k: -k * y + jnp.sin(t), y, jnp.linspace(0.0, 1.0, 3), jnp.float32(0.5)
    )


def _solve(y, vector_field, **options):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(vector_field),
        options.pop("solver", diffrax.Tsit5()),
        0.0,
        1.0,
        options.pop("dt0", 0.25),
        y,
        **options,
    )


@topic(y0, **needs)
def diffrax_tsit5(y):
    return _solve(y, lambda t, y, args: -y + jnp.sin(t)).ys


@topic(y0, normal(), wrt=(0, 1), **needs)
def diffrax_adaptive_with_saves(y, k):
    return _solve(
        y,
        lambda t, y, args: -args * y,
        args=k,
        saveat=diffrax.SaveAt(ts=jnp.array([0.3, 0.7])),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-4),
        max_steps=32,
    ).ys


@topic(y0, **needs)
def diffrax_backsolve_adjoint(y):
    return _solve(y, lambda t, y, args: -y * y, adjoint=diffrax.BacksolveAdjoint(), max_steps=16).ys


@topic(y0, **needs)
def diffrax_direct_adjoint(y):
    return _solve(y, lambda t, y, args: jnp.cos(y), adjoint=diffrax.DirectAdjoint(), max_steps=8).ys


@topic(y0, wrt=(), **needs)
def diffrax_whole_solution(y):
    return _solve(y, lambda t, y, args: -y, max_steps=8)


@topic(y0, **needs)
def diffrax_implicit_solver(y):
    return _solve(
        y,
        lambda t, y, args: -10.0 * y,
        solver=diffrax.Kvaerno3(),
        max_steps=16,
        stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-3),
    ).ys


@topic(y0, key(), **needs)
def diffrax_stochastic(y, k):
    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=0.1, shape=(), key=k)
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, args: -y),
        diffrax.ControlTerm(lambda t, y, args: 0.1 * y, path),
    )
    return diffrax.diffeqsolve(terms, diffrax.Euler(), 0.0, 1.0, 0.25, y, max_steps=8).ys


@topic(
    Made(lambda: eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))),
    normal(3, 2),
    **needs,
)
def neural_ode(model, ys):
    solve = lambda y: _solve(y, lambda t, y, args: model(y), max_steps=8).ys[-1]
    return jnp.mean(jax.vmap(solve)(ys) ** 2)


@topic(y0, inner=True, **needs)
def diffrax_of_transformed_vector_field(transform, y):
    return _solve(y, transform(lambda t, y, args: -y + jnp.sin(t)), max_steps=8).ys


@topic(normal(), needs="optimistix", promotion="standard")
def optimistix_newton(a):
    f = lambda y, args: y - jnp.cos(y) * args
    return optimistix.root_find(
        f, optimistix.Newton(rtol=1e-5, atol=1e-5), jnp.float32(0.5), jnp.tanh(a)
    ).value


@topic(normal(3, 3), normal(3), needs="lineax", promotion="standard")
def lineax_solve(a, b):
    return lineax.linear_solve(lineax.MatrixLinearOperator(a + 4 * jnp.eye(3)), b).value
