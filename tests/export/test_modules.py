"""Modules of flax.nnx and Equinox as programs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fnet import export
from fnet import layers as nn

pytestmark = pytest.mark.usefixtures("quickly", "lenient_ranks")
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@pytest.fixture
def lenient_ranks():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Net(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(self.fc(x)))

    def encode(self, x):
        return self.fc(x)


def net(train=False):
    model = Net(nnx.Rngs(0))
    model.train() if train else model.eval()
    return model


def test_a_bundle_of_a_module_has_its_arrays_without_random_streams(tmp_path):
    model = net()
    program = export.program(model, x=export.spec("b, 4"))
    names = {"fc/bias", "fc/kernel", "norm/bias", "norm/mean", "norm/scale", "norm/var"}
    assert set(program.weights) == {f"params/{name}" for name in names}
    program = program.entry("encode", Net.encode, x=export.spec("b, 4"))
    program.save(tmp_path / "net.fnet")
    bundle = export.load(tmp_path / "net.fnet", check=True)
    np.testing.assert_allclose(bundle(X), model(X), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(bundle.call("encode", X), model.encode(X), rtol=1e-6, atol=1e-6)


def test_a_method_of_a_module():
    model = net()
    program = export.program(model.encode, x=export.spec("b, 4"))
    np.testing.assert_allclose(program.call("predict", X)[0], model.fc(X), rtol=1e-6, atol=1e-6)


def test_training_mode_is_an_error_that_names_inference_mode():
    with pytest.raises(ValueError, match=r"changes norm/mean, norm/var of the module.*\.eval\(\)"):
        export.program(net(train=True), x=export.spec("b, 4"))
    model = net(train=True)
    model.norm.use_running_average = True
    with pytest.raises(ValueError, match=r"output is random.*drop/rngs/key.*model\.eval\(\)"):
        export.program(model, x=export.spec("b, 4"))
    drop = eqx.nn.Sequential([eqx.nn.Linear(4, 3, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    with pytest.raises(ValueError, match=r"layers/1, a Dropout, is in training mode; pass eqx\.nn"):
        export.program(drop, x=export.spec("4"))


def test_what_the_errors_say_works():
    model = net(train=True)
    graph, state = nnx.split(model)
    without = export.program(
        lambda state, x: nnx.merge(graph, state).encode(x), state, x=export.spec("b, 4")
    )
    np.testing.assert_allclose(without.call("predict", X)[0], model.fc(X), rtol=1e-6, atol=1e-6)

    def drawn(model, x, key):
        nnx.reseed(model, default=key)
        return model.drop(model.fc(x))

    program = export.program(
        drawn, net(train=True), x=export.spec("b, 4"), key=export.spec("", "key<fry>")
    )
    got = program.call("predict", X, jax.random.key(3))[0]
    np.testing.assert_allclose(got, drawn(net(train=True), X, jax.random.key(3)), rtol=1e-6)


def test_an_equinox_model_and_a_batch():
    model = eqx.nn.inference_mode(
        eqx.nn.Sequential([eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    )
    one = export.program(model, x=export.spec("4"))
    np.testing.assert_allclose(one.call("predict", X[0])[0], model(X[0]), rtol=1e-6, atol=1e-6)
    batched = export.program(lambda model, x: jax.vmap(model)(x), model, x=export.spec("b, 4"))
    assert set(batched.weights) == set(one.weights)
    np.testing.assert_allclose(
        batched.call("predict", X)[0], jax.vmap(model)(jnp.asarray(X)), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("f", [nn.Dense(3), lambda x: x])
def test_a_function_without_parameters(f):
    with pytest.raises(TypeError, match=r"expected the parameters after the function"):
        export.program(f, x=export.spec("b, 4"))
