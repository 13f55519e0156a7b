"""What the tests of precision share: the forms of a function, its equations, errors, and compiling
what runs once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from fnet.jaxpr import bodies

F32, BF16, F16 = (np.dtype(name) for name in ("float32", "bfloat16", "float16"))
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}  # code that runs once
NO_FUSIONS = {
    "xla_cpu_use_fusion_emitters": False
}  # a third of the time to compile; jaxlib 0.12 has no such option
UNSAFE = {"exp", "exp2", "log", "log1p", "reduce_sum", "rsqrt", "pow", "cumsum"}


def quick(lowered, options=()):
    """A lowered program compiled as fast as can be."""
    try:
        return lowered.compile(compiler_options=QUICK | NO_FUSIONS | dict(options))
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return lowered.compile(compiler_options=QUICK | dict(options))


def once(f, *args):
    return jax.block_until_ready(quick(jax.jit(f).lower(*args))(*args))


def to_the_letter(f, *args):
    """f(*args), every cast made; by itself XLA leaves out casts to a narrower type and back."""
    return quick(jax.jit(f).lower(*args), {"xla_allow_excess_precision": False})(*args)


def walk(jaxpr):
    """All equations of a jaxpr, at every depth."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in bodies(eqn):
            yield from walk(sub.jaxpr)


def equations(f, *args):
    return list(walk(jax.make_jaxpr(f)(*args).jaxpr))


def products(f, *args):
    """How often each (compute, out) occurs among lowered products; "plain" for the others."""
    count = collections.Counter()
    for eqn in equations(f, *args):
        if eqn.primitive.name == "lowered":
            count[eqn.params["compute"].name, eqn.params["out"].name] += 1
        elif eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            count["plain"] += 1
    return count


def whole(got, want):
    """|a - b| / |b| over all leaves together: the relative error of a gradient as one vector."""
    got, want = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def worst(got, want):
    """The largest |a - b| / |b| of a leaf. Gradients that vanish but for rounding (below a
    thousandth of the tree's), like that of a key's bias under softmax, have no relative error;
    `whole` counts them."""
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    least = 1e-3 * np.sqrt(sum((b**2).sum() for b in want))
    return max(
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for a, b in zip(got, want)
        if np.linalg.norm(b) >= least
    )


def twice(f, *, forward=True):
    """The Hessian of f times the parameters themselves."""

    def product(params, *inputs):
        grad = lambda p: jax.grad(f)(p, *inputs)
        if forward:
            return jax.jvp(grad, (params,), (params,))[1]
        dots = lambda p: sum(
            jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(grad(p)), jax.tree.leaves(params))
        )
        return jax.grad(dots)(params)  # custom_vjp has no forward mode

    return product


def batched(f):
    """f over the parameters twice."""

    def both(params, *inputs):
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)
        return jax.vmap(f, (0, *(None,) * len(inputs)))(stacked, *inputs)

    return both


def exact(f, *, forward=True):
    """{what: function of (params, *inputs)} in float32, which every form comes to."""
    return {"value": f, "gradient": jax.grad(f), "hvp": twice(f, forward=forward)}


def forms(f, cast, *, forward=True):
    """{form: function of (params, *inputs)}: f, its gradient inside and outside of a cast, each
    jitted and batched, and a second derivative."""
    grad, inside, outside = jax.grad(f), jax.grad(cast(f)), cast(jax.grad(f))
    return {
        "f": cast(f),
        "grad(ac f)": inside,
        "ac(grad f)": outside,
        "jit(grad(ac f))": jax.jit(inside),
        "jit(ac(grad f))": jax.jit(outside),
        "ac(jit(grad f))": cast(jax.jit(grad)),
        "vmap(grad(ac f))": batched(inside),
        "vmap(ac(grad f))": batched(outside),
        "ac(vmap(grad f))": cast(batched(grad)),
        "hvp": twice(cast(f), forward=forward),
    }


def check_form(form, result, want, bound, *, leaf_by_leaf):
    """A form's result has float32's shapes and dtypes, and an error within the bound."""
    want = want[{"f": "value", "hvp": "hvp"}.get(form, "gradient")]
    if "vmap" in form:
        first, result = (jax.tree.map(lambda x, i=i: x[i], result) for i in range(2))
        assert whole(first, result) <= 1e-3, form
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result) == jax.tree.map(
        lambda x: (x.shape, x.dtype), want
    ), form
    assert whole(result, want) <= bound, (form, f"{whole(result, want):.1e}")
    if leaf_by_leaf:
        assert worst(result, want) <= bound, (form, f"{worst(result, want):.1e} of a leaf")
