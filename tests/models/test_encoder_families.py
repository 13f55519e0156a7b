"""Encoders and vision models from a folder with config.json, against the outputs of transformers
and timm.

The outputs are in tests/reference/encoders.npz; tests/reference/make_encoder_fixtures.py wrote
them.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import drawn
import jax
import numpy as np
import pytest
from checks import sampled
from safetensors.numpy import load_file, save_file

from fnet import models
from fnet.models import pretrained

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
sys.path.insert(0, str(REFERENCE))
import encoder_families as families  # noqa: E402


@functools.cache
def reference():
    with np.load(REFERENCE / "encoders.npz") as arrays:
        return dict(arrays)


CASES = sorted({key.rpartition("/")[0] for key in reference() if "/" in key})
QUICK = [
    "bert/BertForMaskedLM",
    "roberta/RobertaForSequenceClassification",
    "distilbert/DistilBertForQuestionAnswering",
    "modernbert/ModernBertForSequenceClassification",
    "vit/ViTModel",
    "deit/DeiTForImageClassificationWithTeacher",
    "dinov2/Dinov2ForImageClassification",
    "convnext/ConvNextModel",
    "efficientnet/EfficientNetForImageClassification",
    "clip/CLIPModel",
    "clip/CLIPTextModelWithProjection",
    "clip/CLIPVisionModel",
]


def written(case, folder, **changes):
    """The folder that transformers or timm writes, with changed fields of config.json; returns its
    weights."""
    held = reference()
    weights = drawn.weights(json.loads(str(held[f"{case}/shapes"])))
    assert drawn.checksum(weights) == held[f"{case}/checksum"], (
        "this NumPy draws other numbers: make it again"
    )
    config = json.loads(str(held[f"{case}/config"])) | changes
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return weights, config


def outputs(case):
    held = reference()
    return [held[f"{case}/output{i}"] for i in range(9) if f"{case}/output{i}" in held]


@pytest.mark.quick_cases(
    "dinov2/Dinov2ForImageClassification", "efficientnet/EfficientNetForImageClassification"
)
@pytest.mark.parametrize("case", sampled(CASES, QUICK))
def test_outputs_and_the_way_back(case, tmp_path):
    weights, config = written(case, tmp_path)
    inputs = families.inputs_of(config)
    model, params, state = pretrained.load(tmp_path)
    assert (
        families.difference(families.ours(model, params, state, inputs), outputs(case), inputs)
        < 1e-5
    )
    back = load_file(
        pretrained.save(model, params, state, tmp_path / "back.safetensors", like=tmp_path)
    )
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[key], array) for key, array in weights.items())


def test_gamma_and_beta_of_old_files(tmp_path):
    weights, _ = written("bert/BertForMaskedLM", tmp_path)
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for key, array in weights.items()
    }
    save_file(
        old
        | {
            "cls.seq_relationship.weight": np.zeros((2, 32)),
            "bert.pooler.dense.weight": np.zeros((32, 32)),
            "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"],
        },
        tmp_path / "old.safetensors",
    )
    model, params, _ = pretrained.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    same, again, _ = pretrained.load(tmp_path)
    assert same == model and model.head == "masked_lm"
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(again)))


def test_an_encoder_reads_the_file_of_a_model_with_a_head(tmp_path):
    written("bert/BertForMaskedLM", tmp_path)
    _, params, _ = pretrained.load(tmp_path)
    encoder = models.Bert(69, 32, 2, 4, 48, context=24, pooler=False)
    held, _ = pretrained.load(encoder, tmp_path)
    assert np.array_equal(held["blocks"]["fc"]["kernel"], params["blocks"]["fc"]["kernel"])
    with pytest.raises(ValueError, match=r"'pooler.dense.weight' is missing|pooler/kernel"):
        pretrained.load(models.Bert(69, 32, 2, 4, 48, context=24), tmp_path)


def test_one_head_of_the_file_of_a_model_with_two(tmp_path):
    """Also if config.json names another head, as the published BERTs do; a head that the file lacks
    is an error."""
    weights, config = written("bert/BertForPreTraining", tmp_path)
    inputs = families.inputs_of(config)
    both, params, _ = pretrained.load(tmp_path)
    assert both.head == "pretraining"
    for name in ("BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction"):
        (tmp_path / "config.json").write_text(json.dumps(config | dict(architectures=[name])))
        for head, expected in zip(
            ("masked_lm", "next_sentence"), outputs("bert/BertForPreTraining"), strict=True
        ):
            model = dataclasses.replace(both, head=head)
            held, state = pretrained.load(model, tmp_path)
            assert held.keys() < params.keys()
            assert (
                families.difference(families.ours(model, held, state, inputs), [expected], inputs)
                < 1e-5
            )
            back = load_file(
                pretrained.save(model, held, state, tmp_path / "back.safetensors", like=tmp_path)
            )
            assert back.keys() == weights.keys()
    del weights["cls.seq_relationship.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"'cls.seq_relationship.weight' is missing"):
        pretrained.load(both, tmp_path)
    with pytest.raises(
        ValueError, match=r"'architectures' is .'BertForNextSentencePrediction'., expected a value"
    ):
        pretrained.load(dataclasses.replace(both, head="tokens", classes=2), tmp_path)


def test_images_of_other_sizes(tmp_path):
    _, config = written("dinov2/Dinov2Model", tmp_path)
    inputs = families.inputs_of(config | dict(image_size=[40, 56]))
    model, params, state = pretrained.load(tmp_path)
    with pytest.raises(ValueError, match=r"DINOv2: expected images \[batch, 32, 32, channels\]"):
        families.ours(model, params, state, inputs)
    model = dataclasses.replace(model, interpolate=True)
    hidden = families.ours(model, params, state, inputs)[:1]
    assert families.difference(hidden, [reference()["interpolated"]], {}) < 1e-5
    with pytest.raises(ValueError, match="with multiples of patch=8 as height and width; got"):
        model.spec(jax.ShapeDtypeStruct((1, 32, 36, 3), "float32"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda config: dict(
            text_config=config["text_config"] | dict(eos_token_id=2)
        ),  # 66 is the highest id
        lambda config: dict(text_config=dict(vocab_size=5), text_config_dict=config["text_config"]),
        lambda config: dict(vision_config=None, vision_config_dict=config["vision_config"]),
    ],
)
def test_older_config_json_of_clip(change, tmp_path):
    _, config = written("clip/CLIPModel", tmp_path)
    inputs, expected = families.inputs_of(config), outputs("clip/CLIPModel")
    (tmp_path / "config.json").write_text(json.dumps(config | change(config)))
    model, params, state = pretrained.load(tmp_path)
    assert families.difference(families.ours(model, params, state, inputs), expected, inputs) < 1e-5
    pretrained.save(model, params, state, tmp_path / "back")
    assert pretrained.load(tmp_path / "back")[0] == model


@pytest.mark.exhaustive
def test_features_of_a_text_do_not_depend_on_padding(tmp_path):
    written("clip/CLIPModel", tmp_path)
    model, params, _ = pretrained.load(tmp_path)
    text = np.array([[5, 9, 7, 66]], np.int32)
    want = model.text_features(params, text)
    for padding in (66, 0):
        padded = np.concatenate([text, np.full((1, 6), padding, np.int32)], 1)
        assert np.abs(model.text_features(params, padded) - want).max() < 1e-5 * np.abs(want).max()
    other = text.copy()
    other[0, 3] = 65  # without the end token, the first position is used
    assert np.abs(model.text_features(params, other) - want).max() > 0.1 * np.abs(want).max()


@pytest.mark.exhaustive
def test_logits_of_clip_in_bfloat16(tmp_path):
    _, config = written("clip/CLIPModel", tmp_path)
    model, params, _ = pretrained.load(tmp_path, dtype=jax.numpy.bfloat16)
    inputs = families.inputs_of(config)
    logits = model(
        params, inputs["pixel_values"].transpose(0, 2, 3, 1).astype("bfloat16"), inputs["input_ids"]
    )
    want = outputs("clip/CLIPModel")[0]
    assert (
        logits.dtype == "bfloat16"
        and np.abs(logits.astype("float32") - want).max() < 0.1 * np.abs(want).max()
    )


@pytest.mark.parametrize(
    ("case", "change", "text"),
    [
        (
            "clip/CLIPModel",
            dict(text_config=dict(hidden_act="relu")),
            "'hidden_act' is 'relu', expected 'quick_gelu' or",
        ),
        (
            "clip/CLIPModel",
            dict(text_config=dict(eos_token_id=[1])),
            "in which 'eos_token_id' is .1., expected an integer",
        ),
        (
            "clip/CLIPModel",
            dict(vision_config=dict(size=2)),
            "'vision_config' is .*'size' is 2, which fnet does not know",
        ),
        (
            "clip/CLIPModel",
            dict(text_config="openai"),
            "'text_config' is 'openai', expected an object",
        ),
        (
            "clip/CLIPModel",
            dict(text_config_dict=[]),
            "'text_config_dict' is .*, expected an object or null",
        ),
        ("clip/CLIPModel", dict(projection_dim=8), "expected shape"),
        (
            "clip/CLIPModel",
            dict(architectures=["CLIPForImageClassification"]),
            "expected one of CLIPModel",
        ),
        (
            "clip/CLIPTextModelWithProjection",
            dict(architectures=["CLIPTextModel"], hidden_act=["gelu"]),
            "'quick_gelu' or",
        ),
        (
            "vit/ViTModel",
            dict(image_size=[32, 48]),
            "'image_size' is .32, 48., expected a number, or two equal ones",
        ),
        ("vit/ViTModel", dict(pooler_act="relu"), "'pooler_act' is 'relu', expected 'tanh'"),
        ("vit/ViTModel", dict(pooler_output_size=16), "expected the value of hidden_size, or null"),
        (
            "vit/ViTModel",
            dict(architectures=["ViTForMaskedImageModeling"]),
            "expected one of ViTForImageClassification",
        ),
        ("convnext/ConvNextModel", dict(layer_scale_init_value=0), "expected a number above 0"),
        (
            "convnext/ConvNextModel",
            dict(depths=[1, 1, 1]),
            "'depths' is .1, 1, 1., expected four positive integers",
        ),
        (
            "efficientnet/EfficientNetForImageClassification",
            dict(hidden_dim=640),
            "expected 1280 times width_coefficient",
        ),
        (
            "efficientnet/EfficientNetForImageClassification",
            dict(depthwise_padding=[0.5]),
            "expected a list of integers",
        ),
        (
            "dinov2/Dinov2Model",
            dict(mlp_ratio="4"),
            "expected numbers in hidden_size and mlp_ratio",
        ),
        (
            "dinov2/Dinov2Model",
            dict(use_swiglu_ffn=True),
            "'encoder.layer.0.mlp.weights_in.weight' is missing",
        ),
        (
            "bert/BertForSequenceClassification",
            dict(architectures=["BertForMultipleChoice"]),
            "expected one of BertModel",
        ),
        (
            "bert/BertForSequenceClassification",
            dict(num_labels=4),
            "expected as many labels in id2label as num_labels",
        ),
        (
            "bert/BertForSequenceClassification",
            dict(id2label=["a", "b", "c"]),
            "expected an object of labels in id2label",
        ),
        ("bert/BertForSequenceClassification", dict(id2label={"0": "a"}), "expected shape"),
        (
            "bert/BertForMaskedLM",
            dict(tie_word_embeddings=False),
            "'tie_word_embeddings' is False, expected True for",
        ),
        (
            "bert/BertForPreTraining",
            dict(tie_word_embeddings=False),
            "'tie_word_embeddings' is False, expected True for",
        ),
        (
            "bert/BertForMaskedLM",
            dict(num_hidden_layers=0),
            "Bert: depth must be at least 1; got 0",
        ),
        (
            "bert/BertForMaskedLM",
            dict(architectures=["BertForMaskedLM", "BertModel"]),
            "classes with the same head",
        ),
        (
            "roberta/RobertaForMaskedLM",
            dict(pad_token_id=None),
            "expected integers for max_position_embeddings",
        ),
        (
            "modernbert/ModernBertModel",
            dict(num_hidden_layers=1, layer_types=["full_attention"]),
            "ModernBert: depth must be at least 2; got 1",
        ),
        (
            "modernbert/ModernBertModel",
            dict(local_attention=0),
            "'local_attention' is 0, expected a whole number",
        ),
        (
            "modernbert/ModernBertModel",
            dict(layer_types=["full_attention"]),
            "expected 5 times 'full_attention' or",
        ),
        (
            "modernbert/ModernBertModel",
            dict(rope_scaling=5, rope_parameters=None),
            "expected an object",
        ),
        (
            "modernbert/ModernBertModel",
            dict(classifier_pooling="max"),
            "pooling must be 'cls' or 'mean'; got 'max'",
        ),
        (
            "modernbert/ModernBertModel",
            dict(hidden_activation="tanh"),
            "'hidden_activation' is 'tanh', expected 'silu'",
        ),
        (
            "distilbert/DistilBertForMaskedLM",
            dict(activation="relu"),
            "'activation' is 'relu', expected 'gelu'",
        ),
    ],
)
def test_other_configurations(case, change, text, tmp_path):
    written(case, tmp_path, **change)
    with pytest.raises(ValueError, match=text):
        pretrained.load(tmp_path)


OLDER = dict(
    global_attn_every_n_layers=3,
    global_rope_theta=160000.0,
    local_rope_theta=10000.0,
    layer_norm_eps=1e-5,
    position_embedding_type="absolute",
    repad_logits_with_grad=False,
    reference_compile=None,
)


def test_modernbert_with_the_fields_of_published_files(tmp_path):
    _, config = written("modernbert/ModernBertModel", tmp_path)
    model, params, state = pretrained.load(tmp_path)
    assert model.window == (None, 6, 6) and model.rotary_base == (160000.0, 10000.0, 10000.0)
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config | OLDER))
    assert pretrained.load(tmp_path)[0] == model
    (tmp_path / "config.json").write_text(
        json.dumps(config | OLDER | dict(global_attn_every_n_layers=2, local_rope_theta=500.0))
    )
    other, *_ = pretrained.load(tmp_path)
    assert other.window == (None, 6) and other.rotary_base == (160000.0, 500.0)
    pretrained.save(other, params, state, tmp_path / "back")
    held = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        held["local_attention"] == 6 and held["pad_token_id"] is None
    )  # 50283 is not one of the 69 tokens
    assert pretrained.load(tmp_path / "back")[0] == other
    pretrained.save(other, params, state, tmp_path / "same", like=tmp_path)
    assert json.loads((tmp_path / "same" / "config.json").read_text())["pad_token_id"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [dict(window=(None, 6, 6)), dict(window=(6, None, None)), dict(window=5)]
)
def test_modernbert_is_equal_without_stacks_and_padding(options):
    model = models.ModernBert(
        9, 8, 5, 2, 8, rotary_base=(500.0, 20.0, 20.0), mlp_bias=True, **options
    )
    tokens = np.random.default_rng(0).integers(0, 9, (2, 12)).astype(np.int32)
    params, _ = model.init(jax.random.key(0), tokens)
    call = jax.jit(lambda *args: model(*args).hidden)
    hidden = call(params, tokens)
    single, apart = models.unstack(model, params)
    assert np.allclose(
        jax.jit(lambda *args: single(*args).hidden)(apart, tokens), hidden, atol=1e-5
    )
    short = call(params, tokens, np.array([12, 7], np.int32))[1, :7]
    assert np.allclose(short, call(params, tokens[1:, :7])[0], atol=1e-5)
    assert not np.allclose(short, hidden[1, :7], atol=1e-2)


@pytest.mark.exhaustive
def test_windows_of_modernbert():
    """A token reaches window // 2 positions for each block with a window, in both directions."""
    model = models.ModernBert(30, 8, 2, 2, 8, window=7)
    tokens = np.arange(30, dtype=np.int32)[None]
    params, _ = model.init(jax.random.key(0), tokens)
    vectors = jax.jacrev(
        lambda x: model(
            {**params, "embed": {**params["embed"], "words": {"embedding": x}}}, tokens
        ).hidden[0, 15, 0]
    )(params["embed"]["words"]["embedding"])
    reached = np.flatnonzero(np.abs(vectors).max(1))
    assert reached.tolist() == list(range(9, 22))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (dict(head="words"), "ModernBert: head must be 'masked_lm' or 'sequence'"),
        (dict(head="tokens"), "the heads 'sequence' and 'tokens' need classes"),
        (dict(activation="tanh"), "ModernBert: activation must be 'silu' or"),
        (dict(depth=1), "ModernBert: depth must be at least 2; got 1"),
    ],
)
def test_fields_of_modernbert(fields, text):
    with pytest.raises(ValueError, match=text):
        models.ModernBert(**(dict(vocab_size=9, width=8, depth=2, heads=2, hidden=8) | fields))


def test_windows_that_config_json_cannot_describe(tmp_path):
    model = models.ModernBert(9, 8, 3, 2, 8, context=4, window=(None, 4, 6))
    params, state = model.init(jax.random.key(0), model.example())
    pretrained.save(model, params, state, tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            models.Bert(9, 8, 1, 2, 8, context=4, head="words"),
            "head must be None or one of masked_lm, sequence",
        ),
        (
            models.Bert(9, 8, 1, 2, 8, context=4, head="sequence"),
            "the heads 'sequence' and 'tokens' need classes",
        ),
        (
            models.Bert(9, 8, 1, 2, 8, context=4, head="questions", classes=2),
            "and no other head has them",
        ),
        (
            models.EfficientNet(0.1, 0.1, padding="valid"),
            "padding must be 'same', 'symmetric' or 'after'; got 'valid'",
        ),
        (models.ConvNeXt((1, 1), (4,)), r"as many depths as widths; got \(1, 1\) and \(4,\)"),
        (
            models.Roberta(9, 8, 1, 2, 8, context=4, head="next_sentence"),
            "Roberta: expected another head",
        ),
        (
            models.Roberta(9, 8, 1, 2, 8, context=4, head="pretraining"),
            "head than 'pretraining', which RoBERTa does not",
        ),
        (
            models.DistilBert(9, 8, 1, 2, 8, context=4, head="pretraining"),
            "expected a head without a pooler",
        ),
        (
            models.DistilBert(9, 8, 1, 2, 8, context=4, segments=2),
            "segments=0 and pooler=False; got head=None, segments=2",
        ),
        (
            models.CLIPText(8, 1, 2, 8, activation="relu"),
            "activation must be 'quick_gelu' or 'gelu'; got 'relu'",
        ),
        (
            models.CLIP(models.CLIPText(8, 1, 2, 8, dim=4), models.CLIPVision(8, 1, 2, 8, dim=3)),
            "text.dim=4 and vision.dim=3",
        ),
    ],
)
def test_fields_of_encoders(model, text):
    example = model.example()
    with pytest.raises(ValueError, match=text):
        model.spec(*(example if isinstance(example, tuple) else (example,)))


def test_inputs_of_clip():
    with pytest.raises(
        ValueError, match=r"CLIPText: expected tokens .* with time <= context=4; got shape .1, 5"
    ):
        models.CLIPText(8, 1, 2, 8, context=4).spec(jax.ShapeDtypeStruct((1, 5), "int32"))
    with pytest.raises(
        ValueError, match=r"CLIPVision: expected images .batch, 224, 224, 3.; got .1, 3, 224, 224"
    ):
        models.CLIPVision(8, 1, 2, 8).spec(jax.ShapeDtypeStruct((1, 3, 224, 224), "float32"))


def test_segments_of_a_model_without_them():
    model = models.DistilBert(9, 8, 1, 2, 8, context=4)
    with pytest.raises(ValueError, match="expected no segment, because this model has none"):
        model.spec(model.example(), segment=np.zeros((1, 4), np.int32))
