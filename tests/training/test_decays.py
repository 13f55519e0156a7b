"""Weight decay spares biases and scales of every library."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from fnet import compress, models
from fnet import layers as nn
from fnet import training as tr

KEY, X = jax.random.key(0), jnp.ones((1, 3, 16))


def decayed(tree, axes=None):
    """The paths of the leaves to which weight decay applies."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return {name(path) for path, value in jax.tree.leaves_with_path(tr.decays(tree, axes)) if value}


def stacked(module, *args, **kwargs):
    make = eqx.filter_vmap(lambda key: module(*args, key=key, **kwargs))
    return eqx.filter(make(jax.random.split(KEY, 3)), eqx.is_array)


def test_flax():
    want = {
        f"{name}/kernel" for name in ("query", "key", "value", "out")
    }  # all biases but one have two axes
    params = linen.MultiHeadDotProductAttention(4).init(KEY, X)["params"]
    module = nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0), decode=False)
    assert decayed(params) == want
    assert decayed(nnx.state(module, nnx.Param)) == {f"{name}/value" for name in want}
    assert decayed(module) == {f"{name}/value" for name in want}
    boxed = {
        "kernel": linen.Partitioned(jnp.ones((2, 2)), ("a", "b")),
        "bias": linen.Partitioned(X, ("a", "b", "c")),
    }
    assert decayed(boxed) == {"kernel/value"}
    assert decayed(nnx.state(nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(0)))) == {
        "lora_a/value",
        "lora_b/value",
    }
    norms = nnx.vmap(lambda key: nnx.BatchNorm(4, rngs=nnx.Rngs(key)))(jax.random.split(KEY, 3))
    assert not decayed(nnx.state(norms, nnx.Param))


def test_equinox():
    assert not decayed(stacked(lambda key: eqx.nn.LayerNorm(8)))
    assert not decayed(stacked(lambda key: eqx.nn.GroupNorm(2, 8)))
    assert decayed(stacked(eqx.nn.Linear, 4, 4)) == {"weight"}
    assert decayed(stacked(eqx.nn.GRUCell, 4, 4)) == {"weight_ih", "weight_hh"}
    assert decayed(stacked(eqx.nn.Embedding, 4, 4)) == {"weight"}
    assert decayed(stacked(eqx.nn.Conv2d, 3, 4, 3)) == {"weight"}

    class Norm(eqx.nn.RMSNorm):
        """The class of the user's module may be a subclass."""

    assert not decayed(stacked(lambda key: Norm(8)))


def test_haiku():
    def net(x):
        return hk.LayerNorm(-1, True, True)(
            hk.MultiHeadAttention(2, 4, w_init=hk.initializers.Constant(1.0))(x, x, x)
        )

    params = jax.eval_shape(hk.transform(net).init, KEY, X)
    stack = jax.tree.map(lambda x: jnp.ones((3, *x.shape)), params)
    assert {path.split("/")[-1] for path in decayed(stack)} == {"w"}


def test_plain_dicts():
    names = (
        "w",
        "W1",
        "kernel",
        "w_q",
        "token_embedding",
        "b",
        "b1",
        "beta",
        "gamma",
        "ln_scale",
        "bias_q",
    )
    tree = dict.fromkeys(names, jnp.ones((2, 3)))
    assert decayed(tree) == {"w", "W1", "kernel", "w_q", "token_embedding"}
    assert decayed({"w": jnp.ones((2, 2), int), "kernel": jnp.ones(2)}) == {
        "kernel"
    }  # an integer; one output
    with pytest.raises(
        ValueError,
        match=r"whether 'net/theta' float32\[3\] is a bias or a scale is not known from its "
        r"name. Say .* tr.optimizer\(\.\.\., axes=\{'net/theta': \"in out\"\}\)",
    ):
        tr.optimizer("sgd", 0.1, weight_decay=0.1).init({"net": {"theta": jnp.ones(3)}})
    tree = {"net": {"theta": jnp.ones((3, 4)), "weight": jnp.ones((3, 4))}}
    assert decayed(tree, {"net/theta": "layers out", "net/weight": "out in"}) == {"net/weight"}
    tr.optimizer("sgd", 0.1).init(tree)
    tr.optimizer("sgd", 0.1, weight_decay=0.1, decay_all=True).init(tree)


def test_fnet():
    block = nn.Residual(nn.RMSNorm(), nn.GRU(16))
    spec = nn.Stack(block, 3).spec(X)
    params = jax.tree.map(lambda each: jnp.ones(each.shape), spec.params)
    want = {"1/kernel", "1/recurrent_kernel"}
    assert decayed(params) == decayed(params, spec) == want
    lora = compress.lora(
        KEY, {"blocks": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}, {".*/kernel": 2}
    )
    assert decayed(lora) == {f"blocks/kernel/{part}" for part in ("base", "a", "b")}
    assert decayed(nn.partition(lora, ".*/[ab]")[0]) == {"blocks/kernel/a", "blocks/kernel/b"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "model, inputs",
    [
        (
            models.ViT(size=16, patch=8, width=16, depth=2, heads=2, classes=3),
            jnp.ones((1, 16, 16, 3)),
        ),
        (models.GPT(24, 16, 3, 4, context=16), jnp.zeros((1, 8), int)),
    ],
)
def test_axes_and_names_of_models_agree(model, inputs):
    spec = model.spec(inputs)
    params = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), spec.params)
    assert decayed(params) == decayed(params, spec)
