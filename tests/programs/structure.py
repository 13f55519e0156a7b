"""Empty arrays, results of every structure, numbers, and arguments that are no arrays."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program import Made, Topic, integers, key, normal

topic = Topic("structure")
x3 = normal(3)
Pair = collections.namedtuple("Pair", ["first", "second"])
NOTHING = {
    ("autocast32", "*"): "a program without operations, and a rule that matches nothing is an error"
}
NUMBERS = {("tune", "*"): "tune traces numbers, by contract"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: jax.Array
    params: dict
    name: str = dataclasses.field(metadata={"static": True}, default="state")


@topic(normal(0))
def empty(x):
    return x * 2, x.sum(), jnp.concatenate([x, jnp.ones(2)]), jnp.prod(x)


@topic(normal(0, 3), normal(3, 2), core=True)
def empty_product(x, w):
    return x @ w, w[:, :0] @ jnp.ones((0, 2)), jnp.einsum("ij,jk->", x, w)


@topic(normal(2, 0, 3))
def empty_axes(x):
    return (
        jnp.max(x, axis=2),
        x.transpose(1, 0, 2),
        jnp.sort(x, axis=1),
        jnp.pad(x, 1),
        x.reshape(0),
    )


@topic(normal(0, 5, 5, 2), normal(3, 3, 2, 4))
def empty_batch_through_conv_and_pooling(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@topic(normal(4, 4), normal(0, 4))
def empty_batch_through_scan_of_checkpoint(w, x):
    return lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), h.sum())), x, jnp.stack([w, w]))


@topic(normal(0), integers(0))
def empty_gather_and_scatter(x, i):
    return (
        jnp.ones(3)[i] * x,
        jnp.zeros(3).at[i].add(x),
        jax.ops.segment_sum(x, i, 2),
        lax.top_k(x, 0),
    )


@topic(normal())
def scalars_only(x):
    return jnp.sin(x) * 2, x, -x


@topic(wrt=(), float32=False, core=True)
def no_arguments_no_arrays():
    return None


@topic(wrt=())
def no_arguments():
    return jnp.arange(3.0) * 2, jnp.eye(2)


@topic("name", wrt=(), float32=False)
def only_strings(s):
    return s.upper()


@topic(x3)
def results_of_every_structure(x):
    return {
        "pair": Pair(x, None),
        "list": [x * 2, ()],
        "none": None,
        "tuple": (x[0], {"b": x, "a": -x}),
        "ordered": collections.OrderedDict(z=x, a=x),
    }


@topic(x3, core=True)
def results_are_inputs_duplicated(x):
    y = jnp.sin(x)
    return x, y, x, y, (y, x)


@topic(State(normal(), {"w": normal(3)}), core=True)
def dataclass_in_and_out(state):
    return dataclasses.replace(
        state, step=state.step + 1, params={"w": state.params["w"] * state.step}
    )


@topic({"b": normal(2), "a": [normal(3), None, ()]}, wrt=(0,))
def trees_with_none(tree):
    return jax.tree.map(jnp.sin, tree), tree["a"][1]


@topic(x3, "sin", others=[(x3, "cos"), (x3, "sin")], static=(1,))
def string_argument(x, name):
    return getattr(jnp, name)(x), name


@topic(x3, jnp.sin, others=[(x3, jnp.cos), (x3, None)], static=(1,), core=True)
def callable_or_none_argument(x, f):
    return x if f is None else f(x)


@topic(x3, 2.0, others=[(x3, jnp.sin), (x3, 3.0)], static=(1,), promotion="standard")
def callable_or_number_argument(x, f):
    return f(x) if callable(f) else x * f


@topic(x3, None, others=[(x3, "b"), (x3, None)], static=(1,), excluded=NOTHING)
def none_then_string_argument(x, mode):
    return x if mode is None else x * 2


@topic(
    {"a": normal(1)},
    others=[({"a": normal(1), "flag": 1.0},), ({"a": normal(1)},)],
    promotion="standard",
    excluded=NOTHING,
)
def result_with_a_string_at_times(d):
    return {"y": d["a"], **({"note": "big"} if "flag" in d else {})}


@topic(x3, 3, static=(1,), excluded=NUMBERS)
def python_integer_as_length(x, n):
    return [x * i for i in range(n)], n


@topic(x3, True, others=[(x3, False), (x3, True)], static=(1,), excluded=NUMBERS)
def python_boolean_as_switch(x, train):
    return jnp.sin(x) if train else jnp.cos(x)


@topic(2.5, 3, promotion="standard", core=True)
def python_numbers(a, b):
    return a * b + jnp.float32(1), a * 2, b + 1, b > 2, jnp.sin(a)


@topic(np.float32(2.5), np.int32(3), wrt=(0,), promotion="standard")
def numpy_scalars(a, b):
    return a * b, jnp.sin(a), b


@topic(Made(lambda: np.arange(3, dtype=np.float32)), promotion="standard")
def numpy_arrays(x):
    return jnp.asarray(x) * np.ones(3, np.float32), np.float32(2)


@topic(x3, wrt=(), promotion="standard", excluded=NOTHING)
def results_that_are_numbers(x):
    return 3, 2.5, True, x.shape[0], x


@topic(x3, wrt=())
def results_that_are_strings_and_functions(x):
    return {"name": "x", "f": jnp.sin, "x": x * 2, "type": float}


@topic(x3, np.float32([1, 2, 3]))
def captured_numpy_arrays(x, y):
    table = np.arange(3, dtype=np.float32)
    return x * table + y, jnp.asarray(table)


@topic(x3)
def captured_jax_array_of_the_outside(x):
    return x * _constant()


@functools.cache
def _constant():
    with jax.ensure_compile_time_eval():
        return jnp.arange(3.0)


@topic(x3)
def keyword_and_default_arguments(x, *, scale=2.0, shift=(1.0, 2.0)):
    return x * scale + shift[0]


@topic(x3, normal(3, seed=1), normal(3, seed=2), wrt=(0, 2))
def variable_arguments(*xs):
    return sum(x * (i + 1.0) for i, x in enumerate(xs))


@topic(functools.partial(jnp.multiply, np.float32(2)), x3, wrt=(1,))
def partial_argument(f, x):
    return f(x)


@topic(Made(lambda: jax.tree_util.Partial(jnp.multiply, jnp.ones(3))), x3, wrt=(0, 1))
def partial_that_is_a_tree(f, x):
    return f(x), jax.tree_util.Partial(f.func, x)


@topic(
    x3,
    types.SimpleNamespace(width=3, rate=0.5),
    wrt=(0,),
    static=(1,),
    refused={("tune", "value"): "nor hashable", ("tune", "again"): "nor hashable"},
)
def configuration_without_a_hash(x, config):
    return x * config.rate


@topic(jax.ShapeDtypeStruct((3,), "float32"), x3, wrt=(1,), static=(0,))
def shape_argument(spec, x):
    return jnp.zeros(spec.shape, spec.dtype) + x


@topic({1: normal(2), 0: normal(2, seed=1)})
def dict_with_integer_keys(d):
    return {k + 1: v * (k + 1.0) for k, v in d.items()}


@topic(x3, wrt=(), excluded=NOTHING)
def shapes_and_types_as_results(x):
    return jax.eval_shape(lambda x: x @ x, x).shape, x.dtype, x.shape


@topic(x3, wrt=())
def made_jaxpr_inside(x):
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(x)
    return (
        jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)
        if hasattr(jax.core, "eval_jaxpr")
        else [jnp.sin(x) * 2]
    )


@topic(normal(8, 3), wrt=(), batched=(0,))
def microbatched_counts_and_means(x):
    return {
        "mean": x.mean(),
        "positive": (x > 0).sum(),
        "none": None,
        "low": x.mean().astype(jnp.bfloat16),
    }


_b = {"x": np.float32([1, 2, 3, 4]), "w": np.float32([0, 2, 0, 2])}
_weight = lambda p, b: b["w"].sum()


@topic(normal(), _b, batched=(1,), weight=_weight, core=True)
def microbatched_with_a_slice_of_weight_zero(p, b):
    return ((p * b["x"]) * b["w"]).sum() / b["w"].sum()


@topic(normal(), {**_b, "w": np.float32([-1, 2, -1, 2])}, batched=(1,), weight=_weight)
def microbatched_with_a_slice_of_negative_weight(p, b):
    return ((p * b["x"]) * b["w"]).sum() / b["w"].sum()


@topic(normal(3), normal(8, 3), normal(8, seed=1), batched=(1, 2), slices=4)
def microbatched_linear_regression(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@topic(normal(3), {"x": normal(6, 3), "y": normal(6)}, batched=(1,), slices=3)
def microbatched_tree_with_auxiliary_results(w, batch):
    error = batch["x"] @ w - batch["y"]
    return jnp.mean(error**2), {
        "mae": jnp.mean(jnp.abs(error)),
        "n": jnp.int32(1) * (error > 0).sum(),
    }


@topic(normal(3), normal(8, 3), batched=(1,))
def microbatched_value_and_grad(w, x):
    return jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


@topic(key(), normal(3), wrt=(1,), excluded=NOTHING)
def key_among_results_and_static(k, x):
    return k, x, "done"


@topic(
    {"w": normal(3, 3), "none": None, "empty": {}, "list": [], "t": (None, {"b": x3})},
    x3,
    wrt=(0, 1),
)
def none_leaves_and_empty_containers(params, x):
    def body(c, _):
        return {**c, "h": jnp.tanh(c["h"] @ params["w"])}, {"none": None, "empty": ()}

    c, ys = lax.scan(body, {"h": x, "none": None, "empty": {}}, None, length=2)
    z = lax.cond(
        x[0] > -9.0, lambda p: {"p": p, "n": None}, lambda p: {"p": p, "n": None}, params["t"]
    )
    return c, ys, z, {}, [], None, types.SimpleNamespace


@topic(x3, normal(3, 3), wrt=(), inner=True)
def keyword_only_and_default_arguments(transform, x, w):
    def f(x, /, w=None, *rest, mode, scale=2.0, flag=False, **more):
        h = (x if w is None else x @ w) * scale + sum(more.values(), 0.0)
        return {"y": getattr(jnp, mode)(h), "mode": mode, "flag": flag, "n": len(rest)}

    g = transform(f)
    return [
        g(x, mode="sin"),
        g(x, w, mode="cos", flag=True),
        g(x, w, x, x, mode="tanh", scale=0.5, extra=x),
        g(x, w=w, mode="exp", b=1.0, a=x),
        jax.grad(lambda x: g(x, w=w, mode="sin")["y"].sum())(x),
    ]


@topic(
    {"a": x3},
    None,
    wrt=(),
    others=[
        ({"a": x3, "b": x3}, normal(3, 3)),
        ({"a": None}, normal(3, 3)),
        ({}, None),
        ({"a": x3}, None),
    ],
    excluded={
        ("*", "vmap"): "the second call has another structure",
        **dict.fromkeys(
            [("autocast", "again"), ("autocast32", "again")],
            "one call has no operations of float32",
        ),
    },
)
def calls_with_other_structures(d, w):
    total = sum((v.sum() for v in d.values() if v is not None), jnp.float32(0))
    return {
        k: None if v is None else v * 2 for k, v in d.items()
    }, total if w is None else total * (w @ w)


@topic(
    {"x": normal(6, 3), "mask": np.array([1, 1, 0, 1, 0, 1], bool), "name": "train"},
    normal(3, 3),
    wrt=(1,),
    batched=(0,),
    weight=lambda batch, w: batch["mask"].sum(),
    slices=3,
)
def microbatched_masked_mean_with_a_string(batch, w):
    h = (jnp.tanh(batch["x"] @ w) ** 2).sum(-1)
    m = batch["mask"].astype(jnp.float32)
    return (h * m).sum() / m.sum()


class _Named:
    def __init__(self, x, name):
        self.x, self.name = x, name


jax.tree_util.register_pytree_with_keys(
    _Named,
    lambda p: (((jax.tree_util.GetAttrKey("x"), p.x),), p.name),
    lambda name, xs: _Named(xs[0], name),
)


@topic(
    Made(
        lambda: collections.OrderedDict(
            b=_Named(jnp.asarray(x3), "b"), a=_Named(jnp.asarray(normal(3, 3)), "a")
        )
    )
)
def own_classes_with_static_fields_in_loops(d):
    p, w = d["b"], d["a"]
    step = jax.checkpoint(lambda p, _: (_Named(jnp.tanh(p.x @ w.x), p.name), None))
    q, _ = lax.scan(step, p, None, length=2)
    r = lax.cond(q.x.sum() > -9.0, lambda p: p, lambda p: _Named(-p.x, p.name), q)
    return r.x, q.name + r.name, jax.tree.structure(d).num_leaves
