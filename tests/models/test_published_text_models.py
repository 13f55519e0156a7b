"""The text models against transformers' own, through the files that it writes, and against PyTorch
in training.

What they must give stands in tests/reference/text.npz; tests/reference/make_text_fixtures.py made
it.
"""

import functools
import json
import math
import pathlib

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close
from safetensors.numpy import load_file, save_file

from fnet import models
from fnet import training as tr
from fnet.models import pretrained

ROOT = pathlib.Path(__file__).parents[2]
MODELS = {
    "gpt": models.GPT(69, 32, 2, 4, context=32),
    "llama": models.Decoder(69, 32, 2, 4, 2, 48, context=64),
    "llama_tied": models.Decoder(69, 32, 2, 4, 4, 48, context=64, tied=True),
    "bert": models.Bert(69, 32, 2, 4, 48, context=20),
}
DECODERS = ("gpt", "llama", "llama_tied")
PUBLISHED = {
    (models.GPT, "gpt2"): 124_439_808,  # the four: transformers' GPT2LMHeadModel
    (models.GPT, "gpt2-medium"): 354_823_168,
    (models.GPT, "gpt2-large"): 774_030_080,
    (models.GPT, "gpt2-xl"): 1_557_611_200,
    (models.Decoder, "stories260k"): 260_032,  # llama2.c's sizes, counted from its model.py
    (models.Decoder, "stories15m"): 15_191_712,
    (models.Decoder, "stories42m"): 41_689_600,
    (models.Decoder, "stories110m"): 109_529_856,
    (
        models.Decoder,
        "smollm-135m",
    ): 134_515_008,  # the hub's count of the published file, as all below
    (models.Decoder, "tinyllama-1.1b"): 1_100_048_384,
    (models.Decoder, "llama2-7b"): 6_738_415_616,
    (models.Decoder, "llama3-8b"): 8_030_261_248,
    (models.Decoder, "smollm2-135m"): 134_515_008,
    (models.Decoder, "smollm2-360m"): 361_821_120,
    (models.Decoder, "qwen3-0.6b"): 596_049_920,
    (models.Decoder, "gemma3-270m"): 268_098_176,
    (models.Decoder, "gemma3-1b"): 999_885_952,
    (models.Decoder, "pythia-70m"): 70_426_624,
    (models.Decoder, "pythia-160m"): 162_322_944,
    (models.Bert, "bert-base-uncased"): 109_482_240,
    (models.Bert, "bert-large-uncased"): 335_141_888,
    (models.Bert, "bert-base-cased"): 108_310_272,
    (models.Bert, "minilm-l6"): 22_713_216,
    (models.Bert, "minilm-l12"): 33_360_000,
    (models.Roberta, "roberta-base"): 124_645_632,  # transformers' RobertaModel and DistilBertModel
    (models.Roberta, "roberta-large"): 355_359_744,
    (models.Roberta, "distilroberta-base"): 82_118_400,
    (models.Roberta, "xlm-roberta-base"): 278_043_648,
    (models.Roberta, "xlm-roberta-large"): 559_890_432,
    (models.DistilBert, "distilbert-base-uncased"): 66_362_880,
    (models.DistilBert, "distilbert-base-cased"): 65_190_912,
    (models.ModernBert, "modernbert-base"): 149_014_272,  # transformers' ModernBertModel
    (models.ModernBert, "modernbert-large"): 394_781_696,
    (
        models.LSTMLanguageModel,
        "zaremba-small",
    ): 4_651_600,  # 20 and 66 million in the paper, without biases' twins
    (models.LSTMLanguageModel, "zaremba-medium"): 19_775_200,
    (models.LSTMLanguageModel, "zaremba-large"): 66_022_000,
}


@functools.cache
def reference():
    with np.load(ROOT / "tests" / "reference" / "text.npz") as arrays:
        return dict(arrays)


def written(name, folder):
    """The file that transformers would write."""
    weights = drawn.weights(json.loads(str(reference()[f"{name}/shapes"])))
    assert drawn.checksum(weights) == reference()[f"{name}/checksum"], (
        "this NumPy draws other numbers"
    )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def near(got, want, tolerance=2e-5):
    """At the places that are real: the rows' lengths are the fixture's."""
    real = np.arange(want.shape[1])[None] < reference()["lengths"][:, None]
    got, want = np.asarray(got)[real], want[real]
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "stacked",
    [True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["stacked", "one by one"],
)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_the_way_back(name, stacked, tmp_path):
    weights = written(name, tmp_path)
    model = MODELS[name]
    params, state = pretrained.load(model, tmp_path)
    assert state == {}
    if not stacked:
        apart, taken = models.unstack(model, params)
        model, params = apart, pretrained.load(apart, tmp_path)[0]
        close(params, taken, 0)
    logits = jax.jit(model)(params, reference()["tokens"], reference()["lengths"])
    near(logits, reference()[f"{name}/logits"])

    path = pretrained.save(
        model, params, state, tmp_path / "back.safetensors", names="huggingface", like=tmp_path
    )
    back = load_file(path)
    assert set(back) == set(weights)
    for key, array in weights.items():
        np.testing.assert_array_equal(back[key], array, key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_text_is_transformers_own(name, tmp_path):
    written(name, tmp_path)
    params, _ = pretrained.load(MODELS[name], tmp_path)
    held = reference()
    out = models.generate(
        MODELS[name], params, held["tokens"], max_tokens=16, temperature=0, lengths=held["lengths"]
    )
    np.testing.assert_array_equal(out.tokens, held[f"{name}/more"])


@pytest.mark.exhaustive
def test_bert(tmp_path):
    written("bert", tmp_path)
    params, _ = pretrained.load(MODELS["bert"], tmp_path)
    tokens, lengths = reference()["tokens"], reference()["lengths"]
    hidden, pooled = jax.jit(MODELS["bert"])(params, tokens, lengths)
    near(hidden, reference()["bert/hidden"])
    np.testing.assert_allclose(pooled, reference()["bert/pooled"], atol=2e-5)
    second = jax.jit(MODELS["bert"])(
        params, tokens, None, reference()["bert/segment"].astype(np.int32)
    ).hidden
    near(second, reference()["bert/second"])


def test_what_old_files_carry_along(tmp_path):
    """GPT-2's causal masks, Llama's frequencies and tied head, BERT's position numbers and prefix."""
    for name, prefix, more in (
        ("gpt", "", {f"h.{i}.attn.bias": (1, 1, 32, 32) for i in range(2)}),
        (
            "llama_tied",
            "",
            {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (4,) for i in range(2)},
        ),
        ("bert", "bert.", {"bert.embeddings.position_ids": (1, 20)}),
    ):
        weights = {
            prefix + key.removeprefix("transformer."): value
            for key, value in written(name, tmp_path).items()
        }
        if name == "llama_tied":
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        old = tmp_path / f"{name}.safetensors"
        save_file(weights | {key: np.zeros(shape, np.float32) for key, shape in more.items()}, old)
        close(pretrained.load(MODELS[name], old), pretrained.load(MODELS[name], tmp_path), 0)
        if name == "llama_tied":
            save_file(weights | {"lm_head.weight": weights["lm_head.weight"] + 1}, old)
            with pytest.raises(ValueError, match=r"'lm_head\.weight' must equal 'embed/embedding'"):
                pretrained.load(MODELS[name], old)


@pytest.mark.exhaustive
def test_adamw_follows_pytorch_for_100_steps(tmp_path):
    """GPT-2's and its twin's loss, from the same weights on the same batches: 4.66 falls to 3.07."""
    written("gpt", tmp_path)
    model, held = MODELS["gpt"], reference()
    params, _ = pretrained.load(model, tmp_path)
    text = (ROOT / "experiments" / "data" / "tempest.txt").read_text(encoding="utf-8")
    row = models.CharTokenizer(text).encode(text)
    tx = tr.optimizer("adamw", 1e-3, weight_decay=0.1, decay_all=True, b2=0.95)

    @jax.jit
    def step(state, tokens):
        def loss(params):
            logits = model(params, tokens[:, :-1], key=jax.random.key(0), train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), value

    state, losses = tr.TrainState.create(params, tx), []
    for starts in held["curve/starts"]:
        state, value = step(state, np.stack([row[at : at + 33] for at in starts]))
        losses.append(value)
    np.testing.assert_allclose(losses, held["curve/losses"], atol=1e-3)
    assert losses[-1] < 3.2 < 4.6 < losses[0]


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(
    ("cls", "preset"), PUBLISHED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_published_parameter_counts(cls, preset):
    model = cls.preset(preset)
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.spec(model.example()).params))
        == PUBLISHED[cls, preset]
    )


def test_every_preset_is_counted():
    classes = {cls for cls, _ in PUBLISHED}
    assert {(cls, preset) for cls in classes for preset in cls.PRESETS} == set(PUBLISHED)
    assert all(set(cls.HUB) <= set(cls.PRESETS) for cls in classes)


def filled(model):
    """Parameters of a model, none of them 0 or 1, in less time than `init` takes to compile."""
    rng = np.random.default_rng(0)
    draw = lambda spec: (rng.uniform(-2, 2, spec.shape) / np.sqrt(spec.shape[-1])).astype(
        np.float32
    )
    return jax.tree.map(draw, model.spec(model.example()).params)


@pytest.mark.exhaustive
def test_gpt_begins_as_gpt2_does():
    """Radford et al. (2019), section 2.3: residual layers scaled by 1 / sqrt(their number)."""
    model = models.GPT(500, 64, 8, 4, context=128)
    params, _ = model.init(jax.random.key(0), model.example())
    blocks = params["blocks"]
    for kernel, deviation in (
        (params["embed"]["embedding"], 0.02),
        (params["positions"]["embedding"], 0.02),
        (blocks["attention"]["query"]["kernel"], 0.02),
        (blocks["fc"]["kernel"], 0.02),
        (blocks["attention"]["out"]["kernel"], 0.005),
        (blocks["proj"]["kernel"], 0.005),
    ):
        np.testing.assert_allclose(np.std(kernel), deviation, rtol=0.03)
    assert not np.any(blocks["fc"]["bias"])


def test_inputs_that_do_not_fit():
    for model in (MODELS["gpt"], MODELS["bert"]):
        wrong = jnp.zeros((1, model.context + 1), jnp.int32)
        says = rf"tokens \[batch, time\] with time <= context={model.context}; got shape \(1, {model.context + 1}\)"
        with pytest.raises(ValueError, match=says):
            model.spec(wrong)
    with pytest.raises(
        ValueError, match=r"Bert: segment must have the shape of tokens, \(1, 5\); got \(1, 4\)"
    ):
        model.spec(wrong[:, :5], segment=wrong[:, :4])
    with pytest.raises(
        ValueError,
        match=r"hidden \[batch, time, width\] and lengths \[batch\]; got \(1, 5, 32\) and ",
    ):
        models.sentence_embedding(jnp.zeros((1, 5, 32)), np.array([5, 5]))
    with pytest.raises(
        TypeError, match=r"unstack: expected a model with stacked=True, .*; got LSTMLanguageModel"
    ):
        models.unstack(models.LSTMLanguageModel(5, 4), {})


def test_sentence_embedding():
    hidden = np.random.default_rng(0).standard_normal((2, 4, 3), np.float32)
    got = models.sentence_embedding(
        np.where([[[1]] * 4, [[1], [1], [0], [0]]], hidden, np.nan), np.array([4, 2])
    )
    for row, given, length in zip(got, hidden, (4, 2)):
        mean = given[:length].mean(0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), rtol=1e-5)
    assert (
        models.sentence_embedding(jnp.asarray(hidden, jnp.bfloat16), np.array([4, 2])).dtype
        == jnp.float32
    )
