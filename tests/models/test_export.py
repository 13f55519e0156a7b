"""Every model is exported once, for all platforms, sizes and batches, and gives the same numbers as
the model."""

import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, sampled
from jax import export
from zoo import CONTEXT, DRAW, LSTM, MODELS, UNSTACKED, VOCABULARY, build, inputs

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")
PLATFORMS = "cpu", "cuda", "tpu"
SERIALIZABLE = (
    importlib.util.find_spec("flatbuffers") is not None
)  # jax.export needs it and jax does not install it


def exported(f, *specs, vjp_order=0, platforms=PLATFORMS):
    """`f`, exported and, where that is possible, serialized and read again."""
    program = export.export(f if hasattr(f, "lower") else jax.jit(f), platforms=platforms)(*specs)
    assert set(re.findall(r"custom_call @(\w+)", program.mlir_module())) <= {"shape_assertion"}
    return export.deserialize(program.serialize(vjp_order=vjp_order)) if SERIALIZABLE else program


def specs_of(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def near(got, want):
    """Leaf by leaf within 1e-6 of the largest number of the tree: gradients that are 0 in truth are
    rounding errors."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert all(
        jnp.abs(a - b).max() <= 1e-6 * largest for a, b in zip(*map(jax.tree.leaves, (got, want)))
    )


def narrow(params):
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)


@functools.cache
def program_of(name):
    f, params, shape, _ = build(name)
    return exported(f, specs_of(params), *inputs(name, shape))


def test_every_model_is_in_the_table():
    kinds = {
        name
        for name in models.__all__
        if isinstance(getattr(models, name), type) and issubclass(getattr(models, name), nn.Layer)
    } - {"Model"}
    # CLIPText and CLIPVision are the parts of CLIP, and CREPE is one of the experiments.
    assert kinds - {"CLIP"} == set(MODELS) - {"Crepe"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", sampled(MODELS, ["CNN", "GPT", "LSTMLanguageModel"]))
def test_equals_the_model_at_two_sizes(name):
    f, params, _, shapes = build(name)
    program = program_of(name)
    for each in shapes:
        x = inputs(name, each)
        close(program.call(params, *x), jax.jit(f)(params, *x), 1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sampled(["GPT", "Bert"], ["GPT"]))
def test_16_bit_attention_is_portable(name):
    f, params, shape, shapes = build(name)
    params = narrow(params)
    program = exported(f, specs_of(params), *inputs(name, shape))
    x = inputs(name, shapes[0])
    close(program.call(params, *x), jax.jit(f)(params, *x), 1e-6)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(
    "ignore:tune. the compiler options"
)  # of the jit that the program is compared with
@pytest.mark.parametrize("name", sampled(["GPT", "CNN"], ["CNN"]))
def test_of_autocast_and_tune(name):
    f, params, shape, shapes = build(name)
    f = ft.tune(ft.autocast(f, "bfloat16"), "cpu")
    program = exported(f, specs_of(params), *inputs(name, shape))
    x = inputs(name, shapes[1])
    close(program.call(params, *x), jax.jit(f)(params, *x), 1e-6)
    assert "bf16" in program.mlir_module()


@pytest.mark.exhaustive
def test_gradient_of_an_exported_model():
    params, _ = UNSTACKED.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    shape = export.symbolic_shape("b, t", constraints=(f"t <= {CONTEXT}",))
    program = exported(
        UNSTACKED, specs_of(params), jax.ShapeDtypeStruct(shape, jnp.int32), vjp_order=1
    )
    x = jnp.array([[1, 2, 3], [4, 5, 6]], jnp.int32)
    got, want = (
        jax.jit(jax.grad(lambda params, f=f: jnp.square(f(params, x)).sum()))(params)
        for f in (program.call, UNSTACKED)
    )
    near(got, want)


@pytest.mark.exhaustive
def test_training_step():
    """With a cross entropy that never holds all logits, and dropout from a typed key."""
    gpt = dataclasses.replace(UNSTACKED, dropout=0.5)
    params, _ = gpt.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))

    def step(params, tokens, labels, key):
        loss = lambda params: gpt.cross_entropy(params, tokens, labels, key=key, train=True).mean()
        loss, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    shape = export.symbolic_shape("b, t", constraints=(f"t <= {CONTEXT}",))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    key = jax.random.key(1)
    program = exported(step, specs_of(params), tokens, tokens, specs_of(key))
    x, y = (jnp.asarray(DRAW.integers(0, VOCABULARY, (3, 5)), jnp.int32) for _ in range(2))
    got, want = program.call(params, x, y, key), jax.jit(step)(params, x, y, key)
    near(
        [jax.tree.map(jnp.subtract, params, got[0]), got[1]],
        [jax.tree.map(jnp.subtract, params, want[0]), want[1]],
    )


@pytest.mark.exhaustive
def test_step_of_a_model_with_statistics():
    cnn = models.CNN(3, (4,), 1)
    params, state = cnn.init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))

    def step(params, state, x):
        loss = lambda params: (lambda y, state: (jnp.square(y).mean(), state))(
            *cnn(params, x, state=state, train=True)
        )
        return jax.grad(loss, has_aux=True)(params)

    shape = export.symbolic_shape("b, 8, 8, 3")
    program = exported(
        step, specs_of(params), specs_of(state), jax.ShapeDtypeStruct(shape, jnp.float32)
    )
    x = jnp.asarray(DRAW.normal(size=(5, 8, 8, 3)), jnp.float32)
    got, want = program.call(params, state, x), jax.jit(step)(params, state, x)
    close(got[1], want[1], 1e-6)
    near(got[0], want[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["GPT, unstacked", "LSTMLanguageModel"])
def test_steps_of_a_decoder(name):
    model = LSTM if name == "LSTMLanguageModel" else UNSTACKED
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    b, t = export.symbolic_shape("b, t", constraints=(f"t <= {CONTEXT}",))
    (lone,) = export.symbolic_shape("b")

    def prefill(params, tokens, lengths):
        cache = model.cache(jax.ShapeDtypeStruct((tokens.shape[0], CONTEXT), jnp.int32))
        return model(params, tokens, lengths=lengths, state=cache)

    def step(params, token, cache):
        return model(params, token, state=cache)

    cache = jax.eval_shape(lambda: model.cache(jax.ShapeDtypeStruct((lone, CONTEXT), jnp.int32)))
    first = exported(
        prefill,
        specs_of(params),
        jax.ShapeDtypeStruct((b, t), jnp.int32),
        jax.ShapeDtypeStruct((b,), jnp.int32),
    )
    later = exported(step, specs_of(params), jax.ShapeDtypeStruct((lone, 1), jnp.int32), cache)
    tokens, lengths = jnp.array([[1, 2, 3], [4, 5, 0]], jnp.int32), jnp.array([3, 2], jnp.int32)
    logits, cache = first.call(params, tokens, lengths)
    token = jnp.argmax(logits[jnp.arange(2), lengths - 1], -1).astype(jnp.int32)
    got, _ = later.call(params, token[:, None], cache)
    for row, length in enumerate(lengths):  # by the whole text, without a cache
        text = jnp.append(tokens[row, :length], token[row])[None]
        np.testing.assert_allclose(got[row, 0], model(params, text)[0, -1], rtol=1e-5, atol=1e-6)


def test_generate():
    model = UNSTACKED
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    shape = export.symbolic_shape("b, t", constraints=(f"t <= {CONTEXT - 2}", "t >= 2"))
    program = exported(
        lambda params, prompts, lengths: models.generate(
            model, params, prompts, lengths=lengths, max_tokens=3, temperature=0
        ),
        specs_of(params),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    )
    for prompts, lengths in ([[1, 2, 3], [4, 0, 0]], [3, 1]), ([[5, 6]], [2]):
        prompts, lengths = jnp.array(prompts, jnp.int32), jnp.array(lengths, jnp.int32)
        got = program.call(params, prompts, lengths)
        want = models.generate(model, params, prompts, lengths=lengths, max_tokens=3, temperature=0)
        assert (
            got.tokens.tolist() == want.tokens.tolist()
            and got.lengths.tolist() == want.lengths.tolist()
        )


@pytest.mark.quick_cases("LSTMClassifier", "CNN", "Decoder")
@pytest.mark.parametrize("name", MODELS)
def test_spec_of_symbolic_sizes(name):
    model, (_, params, shape, _) = MODELS[name][0], build(name)
    got, want = (
        jax.tree.map(lambda a: (a.shape, jnp.dtype(a.dtype)), tree)
        for tree in (model.spec(*inputs(name, shape)).params, params)
    )
    assert got == want


def test_time_without_a_constraint():
    for name in "GPT", "Bert":
        model, params = MODELS[name][0], build(name)[1]
        tokens = jax.ShapeDtypeStruct(export.symbolic_shape("b, time"), jnp.int32)
        with pytest.raises(ValueError) as caught:
            export.export(jax.jit(lambda params, x, model=model: model(params, x)))(params, tokens)
        assert str(caught.value) == (
            f"{name}: the symbolic size time must be at most {CONTEXT}, but is not constrained; "
            f"call jax.export.symbolic_shape with constraints=('time <= {CONTEXT}',)"
        )


READER = """
import sys
sys.modules["fnet"] = None
import jax, numpy as np
from jax import export
folder = sys.argv[1]
for name in sys.argv[2:]:
    data = np.load(f"{folder}/{name}.npz")
    program = export.deserialize(bytearray(data["program"]))
    leaves = [data[f"arg{i}"] for i in range(program.in_tree.num_leaves)]
    args, options = jax.tree.unflatten(program.in_tree, leaves)
    got = np.asarray(program.call(*args, **options))
    assert np.abs(got - data["want"]).max() <= 1e-6 * np.abs(data["want"]).max(), name
    print(name)
"""


def test_runs_where_fnet_is_not_installed(tmp_path):
    pytest.importorskip("flatbuffers")
    names = "GPT", "CNN"
    for name in names:
        f, params, _, shapes = build(name)
        args = params, *inputs(name, shapes[1])
        np.savez(
            tmp_path / f"{name}.npz",
            program=np.frombuffer(program_of(name).serialize(), np.uint8),
            want=jax.jit(f)(*args),
            **{f"arg{i}": leaf for i, leaf in enumerate(jax.tree.leaves(args))},
        )
    run = subprocess.run(
        [sys.executable, "-c", READER, tmp_path, *names], capture_output=True, text=True
    )
    assert run.stdout.split() == list(names), run.stderr
