"""config.json beside weights: what was published is accepted, every other value of every field is an error."""

import copy
import dataclasses
import json
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import layers as nn
from fnet import models
from fnet.models import _config, pretrained

LLAMA = {"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
         "initializer_range": 0.02, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
         "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
         "transformers_version": "4.31.0.dev0", "use_cache": True}
LLAMA_2 = LLAMA | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "vocab_size": 32000}
TINY_LLAMA = LLAMA | {
    "attention_bias": False, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 2048,
    "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "vocab_size": 32000}
SMOL = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_size": 576, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 2048, "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "rope_interleaved": False, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "vocab_size": 49152}
LLAMA_3 = LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256}
LLAMA_31 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000}
GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257}
BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522}
MINILM = BERT | {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"], "hidden_size": 384,
    "intermediate_size": 1536, "num_hidden_layers": 6}
BERT_CASED = {key: BERT[key] for key in BERT if key not in ("position_embedding_type", "use_cache")} | {
    "vocab_size": 28996}
VIT = {
    "_name_or_path": "google/vit-base-patch16-224-in21k", "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768,
    "id2label": {"0": "tench, Tinca tinca"}, "image_size": 224, "initializer_range": 0.02, "intermediate_size": 3072,
    "label2id": {"tench, Tinca tinca": 0}, "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12,
    "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
    "transformers_version": "4.13.0.dev0"}
TIMM = {"num_classes": 1000, "num_features": 2048, "pretrained_cfg": {"tag": "tv_in1k", "input_size": [3, 224, 224]}}

PUBLISHED = {
    "llama2-7b": (models.Llama.preset("llama2-7b"), LLAMA_2),
    "tinyllama": (models.Llama.preset("tinyllama-1.1b"), TINY_LLAMA),
    "smollm": (models.Llama.preset("smollm-135m"), SMOL),
    "llama3-8b": (models.Llama.preset("llama3-8b"), LLAMA_3),
    "llama3.1-8b": (models.Llama.preset("llama3-8b", context=131072, rope_scaling=models.Llama3Scaling(8, 1, 4, 8192)),
                    LLAMA_31),
    "mistral-7b": (models.Llama(32000, 4096, 32, 32, 8, 14336, context=32768, window=4096), MISTRAL),
    "gpt2": (models.GPT.preset("gpt2"), GPT2),
    "gpt2-medium": (models.GPT.preset("gpt2-medium"), GPT2 | {
        "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}),
    "gpt2-xl": (models.GPT.preset("gpt2-xl"), GPT2 | {
        "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}),
    "bert-base-uncased": (models.Bert.preset("bert-base-uncased"), BERT),
    "bert-base-cased": (models.Bert.preset("bert-base-uncased", vocab_size=28996), BERT_CASED),
    "minilm": (models.Bert.preset("minilm-l6"), MINILM),
    "vit": (models.ViT.preset("vit_b_16", epsilon=1e-12), VIT),
    "timm resnet": (models.ResNet.preset("resnet50"), TIMM | {"architecture": "resnet50", "global_pool": "avg"}),
    "timm vit": (models.ViT.preset("vit_s_16"), TIMM | {"architecture": "vit_small_patch16_224",
                                                        "global_pool": "token"}),
    "timm mobilenet": (models.MobileNetV2(), TIMM | {"architecture": "mobilenetv2_100"}),
}


def written(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refused(folder, model, config, text):
    with pytest.raises(ValueError, match=text) as error:
        _config.check(model, written(folder, config))
    assert str(error.value).startswith(str(folder / "config.json")) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_those_of_the_presets(name, tmp_path):
    model, config = PUBLISHED[name]
    assert _config.check(model, written(tmp_path, config)) in type(model).CONFIGS.values()
    refused(tmp_path, model, config | {"new_field": [1.5]}, r"does not describe this \w+: 'new_field' is \[1.5\], "
            "which fnet does not know. If a field has no effect on the output, load with check_config=False$")


def others(value):
    """Values of the same kind, and of others."""
    yield from ("x", [], {"a": 1}, -1, 0.37, None)
    yield from [not value] if isinstance(value, bool) else [value + 1, 2 * value + 3] if isinstance(value, int) else []
    yield from [value * 1.5] if isinstance(value, float) else [f"{value}x"] if isinstance(value, str) else []


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_that_has_an_effect_is_compared(name, tmp_path):
    """Every field is either listed as irrelevant, or all of its other values are refused, by name."""
    model, config = PUBLISHED[name]
    table = _config.check(model, written(tmp_path, config))
    null = {"architectures", "rope_scaling", "num_key_value_heads", "sliding_window"}       # may mean what is there
    null |= {"intermediate_size"} if isinstance(model, models.ViT) else set()
    for field, value in config.items():
        if field in table.irrelevant:
            continue
        for other in others(value):
            if other is None and field in null and (field != "sliding_window" or model.window is None):
                continue
            if (field in ("architectures", "rope_scaling") and other in ([], None)) or other == value:
                continue
            if getattr(table.fields[field], "shorter", False) and isinstance(other, int) and other > value:
                continue                                                     # a model may be shorter
            refused(tmp_path, model, config | {field: other}, repr(field))


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_absent_field_has_transformers_default(name, tmp_path):
    """Leaving a field out changes what config.json means, except where the default is the same."""
    model, config = PUBLISHED[name]
    table = _config.check(model, written(tmp_path, config))
    for field, value in config.items():
        entry, rest = table.fields.get(field), {key: config[key] for key in config if key != field}
        if field in ("model_type", "architecture"):
            refused(tmp_path, model, rest, "has no 'model_type', so its model is unknown")
        elif isinstance(entry, _config.Use) and entry.absent not in (_config.SKIP, None) and not callable(entry.absent):
            if entry.absent == value or (entry.shorter and value < entry.absent):
                _config.check(model, written(tmp_path, rest))
            else:
                refused(tmp_path, model, rest, f"'{field}' is absent, i.e. {re.escape(str(entry.absent))}, the model")


SMALL = models.Llama(64, 32, 2, 4, 2, 48, context=64)
CONFIG = LLAMA | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
ENCODER = models.Bert(64, 32, 2, 4, 48, context=64)
ENCODER_CONFIG = BERT | {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "intermediate_size": 48, "max_position_embeddings": 64}


@pytest.mark.parametrize(("change", "text"), [
    ({"rope_scaling": LLAMA_31["rope_scaling"]},
     r"'rope_scaling' is \{'factor': 8.0, .*\}, the model has rope_scaling=None. Use dataclasses.replace\(model, "
     r"rope_scaling=Llama3Scaling\(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192\)\)$"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}},
     r"Use dataclasses.replace\(model, rope_scaling=LinearScaling\(factor=2.0\)\)$"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
     "'rope_scaling' is {'type': 'yarn', .*}, expected the rope_type 'default' or 'linear' or 'llama3'$"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "expected the rope_type"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}}, "expected the rope_type"),
    ({"rope_scaling": {"rope_type": ["linear"], "factor": 4.0}}, "expected the rope_type"),
    ({"rope_scaling": {"type": "linear"}}, "expected the fields factor for the rope_type 'linear'"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "expected numbers"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "LinearScaling: expected a factor above 0, got 0"),
    ({"rope_scaling": LLAMA_31["rope_scaling"] | {"high_freq_factor": 1.0}}, "low_freq_factor < high_freq_factor"),
    ({"rope_scaling": {"rope_type": "default", "mscale": 2}}, "expected the fields rope_theta and rope_type for"),
    ({"rope_scaling": [2]}, "expected an object or null"),
    ({"rope_theta": 500000.0}, r"'rope_theta' is 500000.0, the model has rotary_base=10000.0. Use dataclasses.replace"
     r"\(model, rotary_base=500000.0\)$"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "'rope_parameters' is .*, the model has rotary"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 5e5}, "'rope_theta' is 500000.0"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "expected the fields rope_theta and rope_type"),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "expected a partial_rotary_factor of 1"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5, expected 1.0 or null"),
    ({"rms_norm_eps": 1e-6}, "'rms_norm_eps' is 1e-06, the model has epsilon=1e-05"),
    ({"num_attention_heads": 8}, "'num_attention_heads' is 8, the model has heads=4"),
    ({"num_attention_heads": 8, "num_key_value_heads": None}, r"heads=8\)$"),
    ({"num_key_value_heads": 4}, "'num_key_value_heads' is 4, the model has kv_heads=2"),
    ({"head_dim": 16}, "'head_dim' is 16, the model has head_dim=None. Use .*head_dim=16"),
    ({"max_position_embeddings": 32}, "'max_position_embeddings' is 32, the model has context=64"),
    ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True, the model has tied=False"),
    ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu', expected 'silu' or 'swish'"),
    ({"attention_bias": True}, "'attention_bias' is True, expected False"),
    ({"mlp_bias": True}, "'mlp_bias' is True, expected False"),
    ({"sliding_window": 16}, "'sliding_window' is 16, the model has window=None"),
    ({"model_type": "mistral", "architectures": None},
     "'sliding_window' is absent, i.e. 4096, the model has window=None"),
    ({"model_type": "gemma"}, "'model_type' is 'gemma': these weights are for another model. A Llama reads "
     "'model_type' 'llama' or 'model_type' 'mistral'$"),
    ({"model_type": ["llama"]}, r"'model_type' is \['llama'\]: these weights"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "expected one of LlamaForCausalLM"),
    ({"quantization_config": {"bits": 4}}, "'quantization_config' is {'bits': 4}, expected null"),
    ({"hidden_size": "32"}, "'hidden_size' is '32', expected a value like 32$"),
    ({"hidden_size": None}, "'hidden_size' is null, expected a value like 32$"),
    ({"tie_word_embeddings": 0}, "'tie_word_embeddings' is 0, expected a value like False$"),
    ({"num_hidden_layers": True}, "'num_hidden_layers' is True, expected a value like 2$"),
    ({f"field{i}": i for i in range(10)}, "'field7' is 7, which fnet does not know; and 2 more"),
    ({"rope_theta": 1.0, "hidden_act": "x" * 1000}, "'x{100,120}"),
])
def test_other_configurations_of_a_decoder(change, text, tmp_path):
    model = dataclasses.replace(SMALL)
    refused(tmp_path, model, CONFIG | change, text)
    assert _config.check(model, written(tmp_path, CONFIG)) is not None
    changed = re.search(r"Use dataclasses\.replace\(model, (.*)\)$", text.replace("\\", ""))
    if changed and changed[1].endswith(")"):
        model = dataclasses.replace(model, **eval(f"dict({changed[1]})", vars(models)))
        assert _config.check(model, written(tmp_path, CONFIG | change)) is not None


@pytest.mark.parametrize(("change", "text"), [
    ({"model_type": "roberta", "architectures": ["RobertaModel"]}, "'model_type' is 'roberta': these weights are for"),
    ({"position_embedding_type": "relative_key"}, "is 'relative_key', expected 'absolute'"),
    ({"is_decoder": True}, "'is_decoder' is True, expected False"),
    ({"hidden_act": "gelu_new"}, "'hidden_act' is 'gelu_new', expected 'gelu' or 'gelu_python'"),
    ({"layer_norm_eps": 1e-5}, r"the model has epsilon=1e-12. Use dataclasses.replace\(model, epsilon=1e-05\)"),
    ({"pruned_heads": {"0": [1]}}, "'pruned_heads' is {'0'"),
    ({"auto_map": {"AutoModel": "x.py"}}, "which fnet does not know"),
])
def test_other_configurations_of_an_encoder(change, text, tmp_path):
    refused(tmp_path, ENCODER, ENCODER_CONFIG | change, text)


@pytest.mark.parametrize(("model", "config", "text"), [
    (PUBLISHED["gpt2"][0], GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "is True, expected False"),
    (PUBLISHED["gpt2"][0], GPT2 | {"hidden_size": 1024}, "'hidden_size' is 1024, the model has width=768"),
    (PUBLISHED["gpt2"][0], GPT2 | {"n_inner": 1024}, "'n_inner' is 1024, the model has hidden=None"),
    (PUBLISHED["gpt2"][0], GPT2 | {"activation_function": "gelu"}, "expected 'gelu_new' or 'gelu_pytorch_tanh'"),
    (PUBLISHED["vit"][0], VIT | {"image_size": [224, 256]}, r"'image_size' is \[224, 256\], expected a value like 224"),
    (PUBLISHED["vit"][0], VIT | {"qkv_bias": False}, "'qkv_bias' is False, expected True"),
    (PUBLISHED["timm resnet"][0], TIMM | {"architecture": "resnet50d"}, "is 'resnet50d', expected resnet18, resnet34"),
    (PUBLISHED["timm resnet"][0], TIMM | {"architecture": "resnet34"}, r"depths=\(3, 4, 6, 3\)|bottleneck=True"),
    (PUBLISHED["timm resnet"][0], TIMM | {"architecture": "resnet50", "model_args": {"a": 1}}, "'model_args' is"),
    (PUBLISHED["timm resnet"][0], {"model_type": "resnet"}, "A ResNet reads timm's config.json .with 'architecture'"),
    (PUBLISHED["timm resnet"][0], {"model_type": "timm_wrapper", "architecture": "resnet50"}, "is 'timm_wrapper'"),
    (PUBLISHED["timm vit"][0], TIMM | {"architecture": "vit_base_patch16_clip_224"}, "expected vit_{tiny, small, base"),
    (PUBLISHED["timm mobilenet"][0], TIMM | {"architecture": "mobilenetv2_140"}, "the model has width=1.0"),
    (models.AlexNet(), {"model_type": "alexnet"}, r"A AlexNet reads none \(its class has no CONFIGS\)"),
])
def test_other_configurations_of_other_models(model, config, text, tmp_path):
    refused(tmp_path, model, config, text)


def test_what_config_json_may_say_in_two_ways(tmp_path):
    for change in ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, {"head_dim": 8},
                   {"rope_scaling": {}}, {"max_position_embeddings": 2048}, {"rope_scaling": {"type": "default"}},
                   {"rope_parameters": {"rope_theta": 10000.0}}, {"hidden_act": "swish"}):
        assert _config.check(SMALL, written(tmp_path, CONFIG | change)) is not None
    assert _config.check(PUBLISHED["gpt2"][0], written(tmp_path, GPT2 | {"n_inner": 3072})) is not None
    assert _config.check(PUBLISHED["vit"][0], written(tmp_path, VIT | {"image_size": [224, 224]})) is not None


# Files that are no configuration.


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not valid JSON"), ("{", "is not valid JSON"), ("[1]", r"expected a JSON object, got \[1\]"),
    ("null", "expected a JSON object, got null"), ('{"a": 1, "a": 1}', "the field 'a' appears more than once"),
    ('{"rope_scaling": {"factor": 1, "factor": 2}}', "the field 'factor' appears more than once"),
    ('{"rms_norm_eps": NaN}', "'rms_norm_eps' is nan, expected a finite number"),
    ('{"rope_theta": [Infinity]}', "'rope_theta' is inf, expected a finite number"),
    ('{"rope_theta": 1e999}', "'rope_theta' is inf"), ('{"a": ' + "[" * 100000, "nested too deeply"),
    ('{"a": [' + "[]," * 2**20, "it contains more than 1,048,576 lists and objects"),
    ('{"a": ' + "9" * 5000 + "}", "config.json: .*digit"), ("\ufeff{}", "is not valid JSON"),
    ("{}", "has no 'model_type'"),
])
def test_files_that_are_no_configuration(text, message, tmp_path):
    refused(tmp_path, SMALL, text, message)


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        _config.check(SMALL, tmp_path)
    with path.open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(ValueError, match="has 16,777,217 bytes, expected at most 16,777,216"):
        _config.check(SMALL, tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "absent")                  # a cache whose file was lost is not a folder without one
    with pytest.raises(FileNotFoundError):
        _config.check(SMALL, tmp_path)


# Through pretrained.load.


def test_load_compares(tmp_path):
    params, _ = SMALL.init(jax.random.key(0), SMALL.example())
    file = pretrained.save(SMALL, params, {}, tmp_path, names="huggingface")
    written(tmp_path, CONFIG)
    for path in (file, tmp_path):
        assert jax.tree.structure(pretrained.load(SMALL, path)[0]) == jax.tree.structure(params)
    written(tmp_path, CONFIG | {"rope_theta": 5e5})
    for path in (file, tmp_path):
        with pytest.raises(ValueError, match=r"config.json does not describe this Llama: 'rope_theta' is 500000.0"):
            pretrained.load(SMALL, path)
    pretrained.load(dataclasses.replace(SMALL, rotary_base=5e5), tmp_path)
    pretrained.load(SMALL, tmp_path, check_config=False)
    written(tmp_path, {"steps": 30})                       # of a training run
    with pytest.raises(ValueError, match="not the configuration of these weights, load with check_config=False"):
        pretrained.load(SMALL, tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    pretrained.load(SMALL, tmp_path)
    written(tmp_path, CONFIG | {"mlp_bias": True})
    with pytest.raises(ValueError, match="'mlp_bias' is True, expected False"):
        pretrained.load(SMALL, tmp_path)


def test_config_json_rather_than_the_names_says_what_epsilon_is(tmp_path):
    """Names imply a value where no config.json is there."""
    model = dataclasses.replace(ENCODER, epsilon=1e-5)
    pretrained.save(ENCODER, ENCODER.init(jax.random.key(0), ENCODER.example())[0], {}, tmp_path)
    with pytest.raises(ValueError, match="with the names of huggingface need a Bert with epsilon=1e-12"):
        pretrained.load(model, tmp_path)
    written(tmp_path, ENCODER_CONFIG | {"layer_norm_eps": 1e-5})
    pretrained.load(model, tmp_path)
    with pytest.raises(ValueError, match="'layer_norm_eps' is 1e-05, the model has epsilon=1e-12"):
        pretrained.load(ENCODER, tmp_path)


def test_files_of_two_frameworks_in_one_folder(tmp_path):
    model = models.ViT(32, 1, 2, classes=3, patch=16, size=32)
    pretrained.save(model, model.init(jax.random.key(0), model.example())[0], {}, tmp_path, names="timm")
    written(tmp_path, VIT | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
                             "intermediate_size": 128, "layer_norm_eps": 1e-6})
    with pytest.raises(ValueError, match=r"has the names of timm, but config.json next to it describes weights with "
                       "the names of huggingface; move one of them to another folder"):
        pretrained.load(model, tmp_path)


def test_a_model_of_your_own(tmp_path):
    class Tower(models.Model):
        NAMES: ClassVar = {"torch": pretrained.Names((pretrained.torch.dense("stem", "stem"),))}

        def forward(self, scope, x):
            return nn.Dense(3)(scope["stem"], x)

        def example(self):
            return jax.ShapeDtypeStruct((1, 4), jnp.float32)

    pretrained.save(Tower(), Tower().init(jax.random.key(0), Tower().example())[0], {}, tmp_path)
    written(tmp_path, {"model_type": "tower", "hidden_act": "relu"})
    with pytest.raises(ValueError, match=r"is 'tower': .* A Tower reads none \(its class has no CONFIGS\)"):
        pretrained.load(Tower(), tmp_path)
    Tower.CONFIGS = {"tower": _config.Config({"model_type": _config.Must(("tower",)),
                                              "hidden_act": _config.Must(("none",))}, names=("torch",))}
    with pytest.raises(ValueError, match="'hidden_act' is 'relu', expected 'none'"):
        pretrained.load(Tower(), tmp_path)
    written(tmp_path, {"model_type": "tower", "hidden_act": "none"})
    pretrained.load(Tower(), tmp_path)


# What Llama's new fields compute.


def numpy_llama(params, tokens, model, rates):
    """Logits in float64, by the formulas: no scan, no cache, a mask made by comparing positions."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    dim = model.head_dim or model.width // model.heads

    def norm(scale, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.epsilon) * scale

    def turned(x):                                                          # [time, heads, dim]
        angles = np.arange(len(x))[:, None, None] * rates
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1)

    x, time = params["embed"]["embedding"][tokens], len(tokens)
    ahead = np.arange(time)[:, None] - np.arange(time)[None]
    seen = (ahead >= 0) & (ahead < (model.window or time))
    for i in range(model.depth):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        kernels = {name: block["attention"][name]["kernel"] for name in ("query", "key", "value", "out")}
        y = norm(block["norm1"]["scale"], x)
        q, k, v = ((y @ kernels[name]).reshape(time, -1, dim) for name in ("query", "key", "value"))
        k, v = (np.repeat(each, model.heads // model.kv_heads, 1) for each in (turned(k), v))
        scores = np.where(seen, np.einsum("thd,shd->hts", turned(q), k) / np.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(time, -1)
        x = x + y @ kernels["out"]
        y = norm(block["norm2"]["scale"], x)
        gate, up = (y @ block[name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ block["down"]["kernel"]
    return norm(params["norm"]["scale"], x) @ params["head"]["kernel"]


def test_fields_of_llama_against_numpy():
    base = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    slow = copy.copy(base)                                                  # Llama 3.1's, branch by branch
    for i, rate in enumerate(base):
        wavelength = 2 * np.pi / rate
        if wavelength > 40 / 1.0:
            slow[i] = rate / 8
        elif wavelength >= 40 / 4.0:
            smooth = (40 / wavelength - 1) / (4 - 1)
            slow[i] = (1 - smooth) * rate / 8 + smooth * rate
    assert 0 < (slow == base).sum() < (slow != base / 8).sum() < 8          # all three branches
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, 64, 40)
    for changes, rates in (({"window": 5}, base), ({"rope_scaling": models.LinearScaling(4.0)}, base / 4),
                           ({"rope_scaling": models.Llama3Scaling(8.0, 1.0, 4.0, 40), "window": 7}, slow)):
        model = dataclasses.replace(SMALL, head_dim=16, **changes)
        params = jax.tree.map(lambda leaf: jnp.asarray(numbers.normal(0, 0.3, leaf.shape), jnp.float32),
                              model.spec(model.example())[0])
        logits, want = jax.jit(model)(params, tokens[None])[0], numpy_llama(params, tokens, model, rates)
        assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()
        plain = jax.jit(dataclasses.replace(SMALL, head_dim=16))(params, tokens[None])[0]
        assert np.abs(plain - want).max() > 1e-2 * np.abs(want).max()       # what was computed before


def test_scalings_are_checked():
    with pytest.raises(ValueError, match="LinearScaling: expected a factor above 0, got -1"):
        models.LinearScaling(-1)
    with pytest.raises(ValueError, match="Llama3Scaling: expected factor > 0, 0 < low_freq_factor < high_freq_factor"):
        models.Llama3Scaling(8.0, 4.0, 1.0, 8192)
