"""Sparse arrays."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from .program import Made, Topic, normal

topic = Topic("sparse")
dense = normal(4, 4) * (normal(4, 4, seed=1) > 0)
bcoo = Made(lambda: sparse.BCOO.fromdense(jnp.asarray(dense)))


@topic(bcoo, normal(4), wrt=(1,), core=True)
def bcoo_times_vector(a, x):
    return a @ x, a.T @ x


@topic(bcoo, normal(4, 3), wrt=(0, 1))
def bcoo_times_matrix_differentiated_by_its_values(a, x):
    return jnp.tanh(a @ x).sum()


@topic(bcoo, wrt=())
def bcoo_results(a):
    return a * 2.0, a.T, a.sum(0)


@topic(normal(4, 4), wrt=())
def bcoo_from_dense(x):
    a = sparse.BCOO.fromdense(x, nse=9)
    return a.todense(), a.data


@topic(normal(4, 4), normal(4), wrt=(1,))
def sparsify(a, x):
    return sparse.sparsify(lambda a, x: a @ x * 2.0)(sparse.BCOO.fromdense(a, nse=16), x)


@topic(Made(lambda: sparse.BCSR.fromdense(jnp.asarray(dense))), normal(4), wrt=(1,))
def bcsr_times_vector(a, x):
    return a @ x


@topic(
    Made(lambda: sparse.CSR.fromdense(jnp.asarray(dense))),
    normal(4),
    wrt=(1,),
    excluded={("*", "vmap"): "JAX cannot batch it"},
)
def csr_times_vector(a, x):
    return a @ x


@topic(bcoo, Made(lambda: sparse.BCOO.fromdense(jnp.asarray(np.abs(dense)))), wrt=())
def bcoo_times_bcoo(a, b):
    return (a @ b).todense()


@topic(bcoo, normal(4), wrt=(1,))
def bcoo_in_scan(a, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(a @ c), c), x, None, length=3)


@topic(
    Made(lambda: sparse.BCOO.fromdense(jnp.asarray(normal(4, 3)))),
    normal(3, 2),
    normal(2, 4),
    wrt=(0, 1, 2),
    excluded={("*", "vmap"): "JAX batches the indices"},
)
def bcoo_sums_transposes_and_products(a, x, y):
    b = a.T
    c = sparse.bcoo_reduce_sum(a, axes=(0,))
    return (
        jnp.tanh(a @ x),
        y @ a,
        (b @ (a @ x)),
        c.todense(),
        sparse.bcoo_multiply_dense(a, jnp.ones((4, 3))),
    )
