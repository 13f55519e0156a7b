"""config.json beside weights: what was published is accepted, every other value of every field is
an error."""

import dataclasses
import re

import pytest
from config_cases import (
    CONFIG,
    ENCODER,
    ENCODER_CONFIG,
    GPT2,
    LLAMA_31,
    PUBLISHED,
    SMALL,
    TIMM,
    VIT,
    refused,
    written,
)

from fnet import models
from fnet.models.weights import _config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_those_of_the_presets(name, tmp_path):
    model, config = PUBLISHED[name]
    assert (
        _config.Configuration(written(tmp_path, config)).check(model)
        in type(model).CONFIGS.values()
    )
    refused(
        tmp_path,
        model,
        config | {"new_field": [1.5]},
        r"does not describe this \w+: 'new_field' is \[1.5\], "
        "which fnet does not know. If a field has no effect on the output, load with "
        "check_config=False$",
    )


def others(value):
    """Values of the same kind, and of others."""
    yield from ("x", [], {"a": 1}, -1, 0.37, None)
    yield from (
        [not value]
        if isinstance(value, bool)
        else [value + 1, 2 * value + 3]
        if isinstance(value, int)
        else []
    )
    yield from (
        [value * 1.5]
        if isinstance(value, float)
        else [f"{value}x"]
        if isinstance(value, str)
        else []
    )


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_that_has_an_effect_is_compared(name, tmp_path):
    """Every field is either listed as irrelevant, or all of its other values are refused, by name."""
    model, config = PUBLISHED[name]
    table = _config.Configuration(written(tmp_path, config)).check(model)
    null = {
        "architectures",
        "rope_scaling",
        "num_key_value_heads",
        "sliding_window",
    }  # may mean what is there
    null |= {"intermediate_size"} if isinstance(model, models.ViT) else set()
    for field, value in config.items():
        if field in table.irrelevant:
            continue
        for other in others(value):
            if (
                other is None
                and field in null
                and (field != "sliding_window" or model.window is None)
            ):
                continue
            if (
                field in ("architectures", "rope_scaling") and other in ([], None)
            ) or other == value:
                continue
            if (
                getattr(table.fields[field], "shorter", False)
                and isinstance(other, int)
                and other > value
            ):
                continue  # a model may be shorter
            refused(tmp_path, model, config | {field: other}, repr(field))


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_absent_field_has_transformers_default(name, tmp_path):
    """Leaving a field out changes what config.json means, except where the default is the same."""
    model, config = PUBLISHED[name]
    table = _config.Configuration(written(tmp_path, config)).check(model)
    for field, value in config.items():
        entry, rest = table.fields.get(field), {key: config[key] for key in config if key != field}
        if field in ("model_type", "architecture"):
            refused(tmp_path, model, rest, "has no 'model_type', so its model is unknown")
        elif (
            isinstance(entry, _config.Use)
            and entry.absent not in (_config.SKIP, None)
            and not callable(entry.absent)
        ):
            if entry.absent == value or (entry.shorter and value < entry.absent):
                _config.Configuration(written(tmp_path, rest)).check(model)
            else:
                refused(
                    tmp_path,
                    model,
                    rest,
                    f"'{field}' is absent, i.e. {re.escape(str(entry.absent))}, the model",
                )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rope_scaling": LLAMA_31["rope_scaling"]},
            r"'rope_scaling' is \{'factor': 8.0, .*\}, the model has rope_scaling=None. Use "
            r"dataclasses.replace\(model, "
            r"rope_scaling=Llama3Scaling\(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, "
            r"original_context=8192\)\)$",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"Use dataclasses.replace\(model, rope_scaling=LinearScaling\(factor=2.0\)\)$",
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            "'rope_scaling' is {'type': 'yarn', .*}, the model has rope_scaling=None",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, "expected numbers, such as factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}},
            "expected true or false as truncate",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": 2}},
            "a list of numbers as long_fact",
        ),
        ({"rope_scaling": {"type": "axial", "factor": 4.0}}, "expected the rope_type"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 4.0}},
            "expected the rope_type",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 4.0}}, "expected the rope_type"),
        (
            {"rope_scaling": {"type": "linear"}},
            "expected the fields factor for the rope_type 'linear'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": True}},
            "expected numbers above 0, such as factor",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "expected numbers above 0, such as factor",
        ),
        (
            {"rope_scaling": LLAMA_31["rope_scaling"] | {"high_freq_factor": 1.0}},
            "low_freq_factor < high_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "mscale": 2}},
            "expected the fields rope_theta and rope_type for",
        ),
        ({"rope_scaling": [2]}, "expected an object or null"),
        (
            {"rope_theta": 500000.0},
            r"'rope_theta' is 500000.0, the model has rotary_base=10000.0. Use dataclasses.replace"
            r"\(model, rotary_base=500000.0\)$",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            "'rope_parameters' is .*, the model has rotary",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_theta": 5e5},
            "'rope_theta' is 500000.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "expected the fields rope_theta and rope_type",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "expected a partial_rotary_factor of 1",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "'partial_rotary_factor' is 0.5, expected a partial_rotary_factor of 1",
        ),
        ({"rms_norm_eps": 1e-6}, "'rms_norm_eps' is 1e-06, the model has epsilon=1e-05"),
        ({"num_attention_heads": 8}, "'num_attention_heads' is 8, the model has heads=4"),
        ({"num_attention_heads": 8, "num_key_value_heads": None}, r"heads=8\)$"),
        ({"num_key_value_heads": 4}, "'num_key_value_heads' is 4, the model has kv_heads=2"),
        ({"head_dim": 16}, "'head_dim' is 16, the model has head_dim=None. Use .*head_dim=16"),
        (
            {"max_position_embeddings": 32},
            "'max_position_embeddings' is 32, the model has context=64",
        ),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True, the model has tied=False"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu', expected a value like 'silu'"),
        ({"attention_bias": True}, "'attention_bias' is True, the model has qkv_bias=False"),
        ({"mlp_bias": True}, "'mlp_bias' is True, the model has mlp_bias=False"),
        ({"sliding_window": 16}, "'sliding_window' is 16, expected null"),
        (
            {"model_type": "mistral", "architectures": None},
            "'sliding_window' is absent, i.e. 4096, the model has window=None",
        ),
        (
            {"model_type": "bloom"},
            "'model_type' is 'bloom': these weights are for another model. A Decoder reads "
            "'model_type' 'llama' or 'model_type' 'mistral' or ",
        ),
        ({"model_type": ["llama"]}, r"'model_type' is \['llama'\]: these weights"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "expected one of LlamaForCausalLM"),
        (
            {"quantization_config": {"bits": 4}},
            "'quantization_config' is {'bits': 4}, expected null",
        ),
        ({"hidden_size": "32"}, "'hidden_size' is '32', expected a whole number of at least 1$"),
        ({"hidden_size": None}, "'hidden_size' is null, expected a whole number of at least 1$"),
        ({"tie_word_embeddings": 0}, "'tie_word_embeddings' is 0, expected true or false$"),
        (
            {"num_hidden_layers": True},
            "'num_hidden_layers' is True, expected a whole number of at least 1$",
        ),
        (
            {f"field{i}": i for i in range(10)},
            "'field7' is 7, which fnet does not know; and 2 more",
        ),
        ({"rope_theta": 1.0, "hidden_act": "x" * 1000}, "'x{100,120}"),
    ],
)
def test_other_configurations_of_a_decoder(change, text, tmp_path):
    model = dataclasses.replace(SMALL)
    refused(tmp_path, model, CONFIG | change, text)
    assert _config.Configuration(written(tmp_path, CONFIG)).check(model) is not None
    changed = re.search(r"Use dataclasses\.replace\(model, (.*)\)$", text.replace("\\", ""))
    if changed and changed[1].endswith(")"):
        model = dataclasses.replace(model, **eval(f"dict({changed[1]})", vars(models)))
        assert _config.Configuration(written(tmp_path, CONFIG | change)).check(model) is not None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"model_type": "roberta", "architectures": ["RobertaModel"]},
            "'model_type' is 'roberta': these weights are for",
        ),
        ({"position_embedding_type": "relative_key"}, "is 'relative_key', expected 'absolute'"),
        ({"is_decoder": True}, "'is_decoder' is True, expected False"),
        (
            {"hidden_act": "gelu_new"},
            "'hidden_act' is 'gelu_new', expected 'gelu' or 'gelu_python'",
        ),
        (
            {"layer_norm_eps": 1e-5},
            r"the model has epsilon=1e-12. Use dataclasses.replace\(model, epsilon=1e-05\)",
        ),
        ({"pruned_heads": {"0": [1]}}, "'pruned_heads' is {'0'"),
        ({"auto_map": {"AutoModel": "x.py"}}, "which fnet does not know"),
    ],
)
def test_other_configurations_of_an_encoder(change, text, tmp_path):
    refused(tmp_path, ENCODER, ENCODER_CONFIG | change, text)


@pytest.mark.parametrize(
    ("model", "config", "text"),
    [
        (
            PUBLISHED["gpt2"][0],
            GPT2 | {"scale_attn_by_inverse_layer_idx": True},
            "scale_by_depth=True",
        ),
        (
            PUBLISHED["gpt2"][0],
            GPT2 | {"hidden_size": 1024},
            "'hidden_size' is 1024, the model has width=768",
        ),
        (
            PUBLISHED["gpt2"][0],
            GPT2 | {"n_inner": 1024},
            "'n_inner' is 1024, the model has hidden=None",
        ),
        (
            PUBLISHED["gpt2"][0],
            GPT2 | {"activation_function": "mish"},
            "expected 'silu' or 'swish' or 'gelu' or",
        ),
        (
            PUBLISHED["vit"][0],
            VIT | {"image_size": [224, 256]},
            r"'image_size' is \[224, 256\], expected a number, or two",
        ),
        (PUBLISHED["vit"][0], VIT | {"qkv_bias": False}, "'qkv_bias' is False, expected True"),
        (
            PUBLISHED["timm resnet"][0],
            TIMM | {"architecture": "resnet50d"},
            "is 'resnet50d', expected resnet18, resnet34",
        ),
        (
            PUBLISHED["timm resnet"][0],
            TIMM | {"architecture": "resnet34"},
            r"depths=\(3, 4, 6, 3\)|bottleneck=True",
        ),
        (
            PUBLISHED["timm resnet"][0],
            TIMM | {"architecture": "resnet50", "model_args": {"a": 1}},
            "'model_args' is",
        ),
        (
            PUBLISHED["timm resnet"][0],
            {"model_type": "resnet"},
            "A ResNet reads timm's config.json .with 'architecture'",
        ),
        (
            PUBLISHED["timm resnet"][0],
            {"model_type": "timm_wrapper", "architecture": "resnet50"},
            "is 'timm_wrapper'",
        ),
        (
            PUBLISHED["timm vit"][0],
            TIMM | {"architecture": "vit_base_patch16_clip_224"},
            "expected {vit, deit}_{tiny, ",
        ),
        (
            PUBLISHED["timm mobilenet"][0],
            TIMM | {"architecture": "mobilenetv2_140"},
            "the model has width=1.0",
        ),
        (
            models.AlexNet(),
            {"model_type": "alexnet"},
            r"A AlexNet reads none \(its class has no CONFIGS\)",
        ),
    ],
)
def test_other_configurations_of_other_models(model, config, text, tmp_path):
    refused(tmp_path, model, config, text)


def test_what_config_json_may_say_in_two_ways(tmp_path):
    for change in (
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
        {"head_dim": 8},
        {"rope_scaling": {}},
        {"max_position_embeddings": 2048},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"hidden_act": "swish"},
    ):
        assert _config.Configuration(written(tmp_path, CONFIG | change)).check(SMALL) is not None
    assert (
        _config.Configuration(written(tmp_path, GPT2 | {"n_inner": 3072})).check(
            PUBLISHED["gpt2"][0]
        )
        is not None
    )
    assert (
        _config.Configuration(written(tmp_path, VIT | {"image_size": [224, 224]})).check(
            PUBLISHED["vit"][0]
        )
        is not None
    )


# Files that are no configuration.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1]", r"expected a JSON object, got \[1\]"),
        ("null", "expected a JSON object, got null"),
        ('{"a": 1, "a": 1}', "the field 'a' appears more than once"),
        (
            '{"rope_scaling": {"factor": 1, "factor": 2}}',
            "the field 'factor' appears more than once",
        ),
        ('{"rms_norm_eps": NaN}', "'rms_norm_eps' is nan, expected a finite number"),
        ('{"rope_theta": [Infinity]}', "'rope_theta' is inf, expected a finite number"),
        ('{"rope_theta": 1e999}', "'rope_theta' is inf"),
        ('{"a": ' + "[" * 100000, "nested too deeply"),
        ('{"a": [' + "[]," * 2**20, "it contains more than 1,048,576 lists and objects"),
        ('{"a": ' + "9" * 5000 + "}", "config.json: .*digit"),
        ("\ufeff{}", "is not valid JSON"),
        ("{}", "has no 'model_type'"),
    ],
)
def test_files_that_are_no_configuration(text, message, tmp_path):
    refused(tmp_path, SMALL, text, message)


def test_files_of_another_kind(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        _config.Configuration(tmp_path).check(SMALL)
    with path.open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(ValueError, match="has 16,777,217 bytes, expected at most 16,777,216"):
        _config.Configuration(tmp_path).check(SMALL)
    path.unlink()
    path.symlink_to(tmp_path / "absent")  # a cache whose file was lost is not a folder without one
    with pytest.raises(FileNotFoundError):
        _config.Configuration(tmp_path).check(SMALL)


@pytest.mark.parametrize(
    ("want", "have", "comparable"),
    [
        (8, 16, True),
        (1e-5, 1, True),
        (True, False, True),
        (8, None, True),
        (8, True, False),
        (True, 8, False),
        ("gelu", "relu", False),
        (None, 8, False),
        (True, None, False),
    ],
)
def test_errors_suggest_only_values_of_the_same_type(want, have, comparable):
    assert _config._comparable(want, have) is comparable
