"""Decompositions, solvers and matrix functions."""

import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax
from jax.scipy import optimize

from .program import Topic, normal, positive_definite

topic = Topic("linear_algebra", tolerance=1e-3)
pd, b4, m = positive_definite(4), normal(4), normal(5, 3)


@topic(pd)
def eigh(a):
    w, v = jnp.linalg.eigh(a + a.T)
    return w, jnp.abs(v)


@topic(m)
def svd(a):
    return jnp.linalg.svd(a, compute_uv=False), jnp.linalg.pinv(a)


@topic(m)
def qr(a):
    q, r = jnp.linalg.qr(a)
    return q @ r, jnp.abs(r)


@topic(pd, b4, core=True)
def cholesky_and_solves(a, b):
    c = jnp.linalg.cholesky(a)
    return (
        c,
        jsp.linalg.cho_solve((c, True), b),
        jsp.linalg.solve_triangular(c, b, lower=True, trans=1),
    )


@topic(pd, b4)
def solve_inverse_and_determinant(a, b):
    return jnp.linalg.solve(a, b), jnp.linalg.inv(a), jnp.linalg.det(a), jnp.linalg.slogdet(a)


@topic(pd, b4)
def lu(a, b):
    f = jsp.linalg.lu_factor(a)
    return jsp.linalg.lu_solve(f, b), jsp.linalg.lu(a)


@topic(normal(3, 3))
def expm_and_matrix_power(a):
    return jsp.linalg.expm(a), jnp.linalg.matrix_power(a, 3)


@topic(m, normal(5))
def least_squares(a, b):
    return jnp.linalg.lstsq(a, b)[0]


@topic(
    normal(3, 3),
    wrt=(),
    excluded={("*", "cuda"): "JAX has it for CPUs", ("*", "tpu"): "JAX has it for CPUs"},
)
def eig_of_a_general_matrix(a):
    return jnp.sort(jnp.abs(jnp.linalg.eigvals(a)))


@topic(pd, b4)
def conjugate_gradients(a, b):
    return jsp.sparse.linalg.cg(lambda x: a @ x, b, tol=1e-6)[0]


@topic(pd, b4)
def gmres_and_bicgstab(a, b):
    return jsp.sparse.linalg.gmres(lambda x: a @ x, b, tol=1e-6)[0], jsp.sparse.linalg.bicgstab(
        a, b, tol=1e-6
    )[0]


@topic(normal(5), normal(5, 1))
def tridiagonal_solve(d, b):
    return lax.linalg.tridiagonal_solve(jnp.ones(5) * 0.1, jnp.abs(d) + 2, jnp.ones(5) * 0.2, b)


@topic(positive_definite(3, 2), normal(2, 3, 1))
def batched_solve_and_cholesky(a, b):
    return jnp.linalg.solve(a, b), jnp.linalg.cholesky(a)


@topic(normal(4, 4), wrt=())
def schur_and_hessenberg(a):
    return jnp.abs(lax.linalg.schur(a)[0]).sum() > 0, jsp.linalg.hessenberg(a)


@topic(normal(3))
def kron_outer_cross_and_trace(x):
    a = jnp.outer(x, x)
    return (
        jnp.kron(a, a),
        jnp.cross(x, jnp.sin(x)),
        jnp.trace(a),
        jnp.tensordot(a, a, 2),
        jnp.linalg.multi_dot([a, a, a]),
    )


@topic(normal(2), wrt=())  # JAX has no reverse derivative of its loop
def minimize_bfgs(x):
    f = lambda x: jnp.sum((x - 1.0) ** 2 * jnp.array([1.0, 3.0]))
    return optimize.minimize(f, x, method="BFGS").x


@topic(normal(3))
def statistics(x):
    return (
        jsp.stats.norm.logpdf(x),
        jsp.stats.multivariate_normal.logpdf(x, jnp.zeros(3), jnp.eye(3)),
        jsp.stats.t.logpdf(x, jnp.float32(3.0)),
        jsp.special.logsumexp(x, b=jnp.ones(3)),
    )


@topic(positive_definite(3, dtype="complex64"), normal(3, dtype="complex64"), wrt=(0, 1), low=0.1)
def complex_cholesky_eigh_and_lstsq(a, b):
    values, vectors = jnp.linalg.eigh(a)
    y = jsp.linalg.solve_triangular(jnp.linalg.cholesky(a), b, lower=True, trans="C")
    same = (vectors * values[None].astype(jnp.complex64)) @ vectors.conj().T
    return values, same, y, jnp.linalg.slogdet(a)[1], jnp.linalg.inv(a) @ b
