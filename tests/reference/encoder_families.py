"""Encoders and vision models of transformers and timm with small configurations: for
verify_encoders.py, which compares fnet with them, and for make_encoder_fixtures.py, which writes
what some of them compute.

A case is (class of transformers or architecture of timm, fields of its configuration). Weights are
drawn from their keys (tests/drawn.py).
"""

import contextlib
import io
import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import drawn  # noqa: E402

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TEXT = SIZES | dict(vocab_size=69, max_position_embeddings=24)
DISTIL = dict(
    vocab_size=69, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=24
)
MODERN = TEXT | dict(num_hidden_layers=5, local_attention=6, pad_token_id=0)
BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=6)
IMAGE = SIZES | dict(image_size=32, patch_size=8)
DINO = {key: IMAGE[key] for key in IMAGE if key != "intermediate_size"}
CONVNEXT = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=64)
EFFICIENT = dict(width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320, image_size=64)
CLIP_TEXT = SIZES | dict(vocab_size=69, max_position_embeddings=24, eos_token_id=66)
CLIP_VISION = IMAGE | dict(hidden_size=24, intermediate_size=40)
CLIP = dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=16)
OTHER = dict(num_hidden_layers=3, num_attention_heads=2, intermediate_size=40)
TASKS = (
    ("Model", {}),
    ("ForMaskedLM", {}),
    ("ForSequenceClassification", dict(num_labels=3)),
    ("ForTokenClassification", dict(num_labels=5)),
    ("ForQuestionAnswering", {}),
)


def tasks(prefix, options, *more):
    return [*((f"{prefix}{task}", options | classes) for task, classes in TASKS), *more]


CASES = {  # family: the cases that have to be equal
    "bert": tasks(
        "Bert",
        TEXT,
        ("BertForNextSentencePrediction", TEXT),
        ("BertForPreTraining", TEXT),
        ("BertForPreTraining", TEXT | OTHER | dict(layer_norm_eps=1e-3)),
        ("BertModel", TEXT | OTHER),
        ("BertModel", TEXT | dict(layer_norm_eps=1e-3, type_vocab_size=3)),
        ("BertForSequenceClassification", TEXT),
    ),
    "roberta": tasks(
        "Roberta",
        TEXT,
        ("RobertaModel", TEXT | OTHER | dict(pad_token_id=4, type_vocab_size=1)),
        ("RobertaForMaskedLM", TEXT | dict(layer_norm_eps=1e-5)),
    ),
    "xlm-roberta": tasks("XLMRoberta", TEXT | dict(type_vocab_size=1)),
    "camembert": tasks("Camembert", TEXT)[:3],
    "distilbert": tasks(
        "DistilBert",
        DISTIL,
        ("DistilBertModel", DISTIL | dict(n_layers=3, n_heads=2, hidden_dim=40)),
        ("DistilBertModel", DISTIL | dict(sinusoidal_pos_embds=True)),
    ),
    "modernbert": tasks(
        "ModernBert",
        MODERN,
        (
            "ModernBertForMaskedLM",
            MODERN
            | BIASES
            | dict(num_hidden_layers=8, local_attention=5, classifier_activation="relu"),
        ),
        (
            "ModernBertForMaskedLM",
            MODERN | dict(decoder_bias=False, norm_eps=1e-3, hidden_activation="silu"),
        ),
        (
            "ModernBertForSequenceClassification",
            MODERN
            | dict(
                num_labels=4,
                classifier_pooling="mean",
                num_hidden_layers=4,
                global_attn_every_n_layers=2,
            ),
        ),
        (
            "ModernBertModel",
            MODERN | dict(num_hidden_layers=2, num_attention_heads=2, local_attention=1),
        ),
        (
            "ModernBertModel",
            MODERN
            | dict(
                global_rope_theta=500.0,
                local_rope_theta=20.0,
                layer_types=[
                    f"{kind}_attention"
                    for kind in ("sliding", "full", "sliding", "sliding", "full")
                ],
            ),
        ),
        (
            "ModernBertModel",
            MODERN
            | dict(
                global_attn_every_n_layers=1,
                rope_parameters=dict(
                    full_attention=dict(rope_theta=300.0, rope_type="linear", factor=2.0)
                ),
            ),
        ),
        ("ModernBertModel", MODERN | dict(rope_parameters=dict(full_attention=YARN))),
    ),
    "vit": [
        ("ViTModel", IMAGE),
        ("ViTForImageClassification", IMAGE | dict(num_labels=5)),
        ("ViTForImageClassification", IMAGE | OTHER | dict(image_size=40, layer_norm_eps=1e-3)),
    ],
    "deit": [
        ("DeiTModel", IMAGE),
        ("DeiTForImageClassification", IMAGE | dict(num_labels=5)),
        ("DeiTForImageClassificationWithTeacher", IMAGE | OTHER | dict(num_labels=4)),
    ],
    "dinov2": [
        ("Dinov2Model", DINO),
        ("Dinov2ForImageClassification", DINO | dict(num_labels=5)),
        ("Dinov2Model", DINO | dict(use_swiglu_ffn=True, mlp_ratio=3, image_size=40)),
        ("Dinov2Model", DINO | dict(layer_norm_eps=1e-3, num_attention_heads=2)),
    ],
    "convnext": [
        ("ConvNextModel", CONVNEXT),
        ("ConvNextForImageClassification", CONVNEXT | dict(num_labels=5)),
        (
            "ConvNextForImageClassification",
            CONVNEXT | dict(depths=[1, 2, 1, 1], patch_size=2, layer_norm_eps=1e-3),
        ),
    ],
    "efficientnet": [
        ("EfficientNetForImageClassification", EFFICIENT | dict(num_labels=5)),
        (
            "EfficientNetForImageClassification",
            EFFICIENT | dict(depth_coefficient=0.6, batch_norm_eps=1e-2, depthwise_padding=[1, 3]),
        ),
        ("EfficientNetForImageClassification", EFFICIENT | dict(image_size=75)),
    ],
    "clip": [
        ("CLIPModel", CLIP),
        ("CLIPModel", CLIP | dict(text_config=CLIP_TEXT | dict(eos_token_id=2))),
        (
            "CLIPModel",
            CLIP
            | dict(text_config=CLIP_TEXT | OTHER | dict(hidden_act="gelu", layer_norm_eps=1e-3)),
        ),
        (
            "CLIPModel",
            CLIP | dict(vision_config=CLIP_VISION | OTHER | dict(image_size=36, projection_dim=9)),
        ),
        ("CLIPTextModel", CLIP_TEXT),
        ("CLIPTextModelWithProjection", CLIP_TEXT | dict(projection_dim=16)),
        ("CLIPVisionModel", CLIP_VISION),
        ("CLIPVisionModelWithProjection", CLIP_VISION | dict(projection_dim=8)),
    ],
}
ALTERED = {  # family: (case, the fields of config.json to alter, one at a time). Each is equal, or an error
    "bert": (
        ("BertForMaskedLM", TEXT),
        [
            dict(num_attention_heads=2),
            dict(layer_norm_eps=0.1),
            dict(hidden_act="relu"),
            dict(hidden_act="gelu_new"),
            dict(is_decoder=True),
            dict(tie_word_embeddings=False),
            dict(hidden_dropout_prob=0.5),
            dict(pad_token_id=5),
            dict(chunk_size_feed_forward=4),
            dict(classifier_dropout=0.3),
            dict(type_vocab_size=1),
            dict(num_hidden_layers=0),
        ],
    ),
    "roberta": (
        ("RobertaForSequenceClassification", TEXT),
        [
            dict(pad_token_id=0),
            dict(pad_token_id=3),
            dict(num_labels=7),
            dict(num_labels=1),
            dict(hidden_act="silu"),
            dict(problem_type="regression"),
            dict(layer_norm_eps=1e-2),
            dict(tie_word_embeddings=False),
        ],
    ),
    "distilbert": (
        ("DistilBertForSequenceClassification", DISTIL),
        [
            dict(activation="relu"),
            dict(n_heads=8),
            dict(seq_classif_dropout=0.7),
            dict(num_labels=4),
            dict(tie_word_embeddings=False),
        ],
    ),
    "modernbert": (
        ("ModernBertForSequenceClassification", MODERN),
        [
            dict(local_attention=4),
            dict(local_attention=0),
            dict(local_attention=100),
            dict(classifier_pooling="mean"),
            dict(global_attn_every_n_layers=2),
            dict(global_rope_theta=100.0),
            dict(local_rope_theta=50.0),
            dict(rope_scaling=dict(rope_type="linear", factor=2.0)),
            dict(rope_scaling=dict(type="linear", factor=2.0)),
            dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)),
            dict(rope_theta=300.0),
            dict(head_dim=4),
            dict(partial_rotary_factor=0.5),
            dict(layer_types=["full_attention"] * 5),
            dict(sliding_window=2),
            dict(layer_types=["full_attention", "chunked_attention"] * 2 + ["full_attention"]),
            dict(norm_eps=0.1),
            dict(layer_norm_eps=0.1),
            dict(norm_bias=True),
            dict(attention_bias=True),
            dict(mlp_bias=True),
            dict(classifier_bias=True),
            dict(decoder_bias=False),
            dict(hidden_activation="gelu_pytorch_tanh"),
            dict(hidden_activation="tanh"),
            dict(classifier_activation="silu"),
            dict(num_hidden_layers=1),
            dict(num_labels=3),
            dict(num_attention_heads=2),
            dict(embedding_dropout=0.5),
            dict(sparse_prediction=True),
            dict(position_embedding_type="relative_key"),
            dict(tie_word_embeddings=False),
            dict(is_decoder=True),
        ],
    ),
    "vit": (
        ("ViTModel", IMAGE),
        [
            dict(pooler_act="relu"),
            dict(pooler_output_size=16),
            dict(qkv_bias=False),
            dict(encoder_stride=8),
            dict(image_size=[32, 48]),
            dict(num_attention_heads=2),
        ],
    ),
    "deit": (
        ("DeiTForImageClassificationWithTeacher", IMAGE),
        [
            dict(pooler_act="relu"),
            dict(hidden_act="relu"),
            dict(num_labels=3),
            dict(num_channels=1),
        ],
    ),
    "dinov2": (
        ("Dinov2ForImageClassification", DINO),
        [
            dict(mlp_ratio=2),
            dict(use_swiglu_ffn=True),
            dict(layerscale_value=0.1),
            dict(hidden_act="relu"),
            dict(qkv_bias=False),
            dict(use_mask_token=False),
            dict(drop_path_rate=0.3),
        ],
    ),
}
ALTERED |= {
    "convnext": (
        ("ConvNextForImageClassification", CONVNEXT),
        [
            dict(hidden_act="relu"),
            dict(layer_scale_init_value=0.0),
            dict(layer_scale_init_value=0.5),
            dict(drop_path_rate=0.5),
            dict(num_labels=1),
            dict(num_channels=1),
            dict(num_stages=3, depths=[1, 1, 1], hidden_sizes=[8, 16, 24]),
        ],
    ),
    "efficientnet": (
        ("EfficientNetForImageClassification", EFFICIENT),
        [
            dict(hidden_act="relu"),
            dict(squeeze_expansion_ratio=0.5),
            dict(depth_divisor=4),
            dict(pooling_type="max"),
            dict(kernel_sizes=[3, 3, 3, 3, 5, 5, 3]),
            dict(strides=[1, 2, 1, 2, 1, 2, 1]),
            dict(batch_norm_eps=0.1),
            dict(drop_connect_rate=0.9),
            dict(depthwise_padding=[0, 1]),
            dict(batch_norm_momentum=0.5),
        ],
    ),
    "clip": (
        ("CLIPModel", CLIP),
        [
            dict(projection_dim=8),
            dict(logit_scale_init_value=1.0),
            dict(vision_config=None),
            dict(text_config_dict={}),
            dict(text_config_dict=CLIP_TEXT | dict(num_attention_heads=2)),
            dict(vision_config_dict=CLIP_VISION | OTHER),
            *(
                dict(text_config=CLIP_TEXT | change)
                for change in (
                    dict(hidden_act="relu"),
                    dict(hidden_act="gelu_new"),
                    dict(num_attention_heads=8),
                    dict(eos_token_id=65),
                    dict(eos_token_id=[65, 66]),
                    dict(eos_token_id=None),
                    dict(attention_dropout=0.5),
                    dict(layer_norm_eps=0.1),
                    dict(projection_dim=None),
                    dict(is_decoder=True),
                    dict(num_hidden_layers=0),
                    dict(vocab_size=80),
                    dict(pad_token_id=66),
                    dict(max_position_embeddings=30),
                )
            ),
            *(
                dict(vision_config=CLIP_VISION | change)
                for change in (
                    dict(hidden_act="silu"),
                    dict(num_channels=1),
                    dict(image_size=[32, 32]),
                    dict(patch_size=16),
                    dict(num_attention_heads=2),
                    dict(hidden_act="gelu"),
                )
            ),
        ],
    ),
}
REFUSED = [
    ("BertForMultipleChoice", TEXT),
    ("BertLMHeadModel", TEXT | dict(is_decoder=True)),
    ("RobertaForMultipleChoice", TEXT),
    ("XLMRobertaXLModel", TEXT),
    ("ModernBertForMultipleChoice", MODERN),
    ("CLIPForImageClassification", CLIP),
    ("ViTForMaskedImageModeling", IMAGE | dict(encoder_stride=8)),
    ("DeiTForMaskedImageModeling", IMAGE),
]


def made(name, options, folder):
    """Writes a folder with drawn weights; returns the model that reads it back, and the shapes of
    its arrays."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.logging.set_verbosity_error()
    cls, file = getattr(transformers, name), pathlib.Path(folder) / "model.safetensors"
    with contextlib.redirect_stderr(io.StringIO()):
        cls(cls.config_class(**options)).save_pretrained(folder)
        shapes = {key: list(value.shape) for key, value in load_file(file).items()}
        save_file(
            {
                key: torch.from_numpy(np.asarray(value))
                for key, value in drawn.weights(shapes).items()
            },
            file,
            {"format": "pt"},
        )
        return loaded(name, folder), shapes


def loaded(name, folder):
    import transformers

    with contextlib.redirect_stderr(io.StringIO()):
        model, notes = getattr(transformers, name).from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
    assert not any(
        notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), notes
    return model.eval()


def inputs_of(config):
    """{input of transformers' model: array}."""
    rng = np.random.default_rng(0)
    if "vision_config" in config:
        return inputs_of(config["vision_config"]) | inputs_of(config["text_config"])
    if config["model_type"] == "clip_text_model":
        tokens, end = rng.integers(3, 60, (3, 12)), config["eos_token_id"]
        end = config["vocab_size"] - 1 if end == 2 else end
        return dict(
            input_ids=np.where(np.arange(12)[None] < np.array([11, 4, 8])[:, None], tokens, end)
        )
    if "image_size" in config:
        size = config["image_size"]
        height, width = size if isinstance(size, list) else (size, size)
        return dict(
            pixel_values=rng.standard_normal(
                (2, config.get("num_channels", 3), height, width), np.float32
            )
        )
    lengths, time = np.array([12, 5, 9]), 12
    tokens = rng.integers(6, config["vocab_size"], (3, time))
    real = np.arange(time)[None] < lengths[:, None]
    padding = config.get("pad_token_id") or 0
    inputs = dict(input_ids=np.where(real, tokens, padding), attention_mask=real.astype(np.int64))
    if config["model_type"] == "bert" and config["type_vocab_size"] > 1:
        inputs["token_type_ids"] = (np.arange(time) >= 4).astype(np.int64)[None].repeat(3, 0)
    return inputs


def outputs(model, inputs, double=True):
    """The outputs of transformers' model that fnet's has, as one array each. Padded tokens are left
    out."""
    import torch

    # ModernBERT's softmax is in float32, where the mask of float64 is -inf: NaN for padding without
    # a valid neighbour.
    double = double and model.config.model_type != "modernbert"
    model, real = (model.double(), torch.float64) if double else (model, torch.float32)
    values = {key: torch.from_numpy(np.asarray(value)) for key, value in inputs.items()}
    with torch.no_grad():
        out = model(
            **{
                key: value.to(real) if value.is_floating_point() else value
                for key, value in values.items()
            }
        )
    if "start_logits" in out:
        found = [torch.stack([out.start_logits, out.end_logits], -1)]
    elif "prediction_logits" in out:
        found = [out.prediction_logits, out.seq_relationship_logits]
    elif "logits_per_image" in out:
        found = [
            out.logits_per_image,
            out.vision_model_output.pooler_output,
            out.text_model_output.pooler_output,
        ]
    elif "logits" in out:
        found = [out.logits]
    else:
        found = [
            out[name]
            for name in ("last_hidden_state", "pooler_output", "image_embeds", "text_embeds")
            if out.get(name) is not None
        ]
    found = [value.numpy() for value in found]
    return [value.transpose(0, 2, 3, 1) if value.ndim == 4 else value for value in found]


def ours(model, params, state, inputs):
    """fnet's outputs for the same inputs."""
    import jax

    def call(params, state, *x, **options):
        out = model(params, *x, state=state, **options)[0]
        return [each for each in out if each is not None] if isinstance(out, tuple) else [out]

    pixels = inputs["pixel_values"].transpose(0, 2, 3, 1) if "pixel_values" in inputs else None
    if pixels is not None and "input_ids" in inputs:
        tokens = inputs["input_ids"].astype(np.int32)
        return [
            *jax.jit(call)(params, state, pixels, tokens),
            *(
                np.asarray(jax.jit(f)(params, x))
                for f, x in ((model.image_features, pixels), (model.text_features, tokens))
            ),
        ]
    if pixels is not None:
        return [np.asarray(each) for each in jax.jit(call)(params, state, pixels)]
    tokens = inputs["input_ids"].astype(np.int32)
    lengths = (
        [inputs["attention_mask"].sum(1).astype(np.int32)] if "attention_mask" in inputs else []
    )
    options = (
        {"segment": inputs["token_type_ids"].astype(np.int32)} if "token_type_ids" in inputs else {}
    )
    return [np.asarray(each) for each in jax.jit(call)(params, state, tokens, *lengths, **options)]


def difference(got, want, inputs):
    """The largest difference of valid values, relative to the largest value of each output."""
    worst = 0.0
    if len(got) != len(want):
        return float("inf")
    for a, b in zip(got, want):
        if a.shape != b.shape:
            return float("inf")
        if "attention_mask" in inputs and a.ndim == 3:
            real = inputs["attention_mask"].astype(bool)
            a, b = a[real], b[real]
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return worst


def config_of(folder):
    return json.loads((pathlib.Path(folder) / "config.json").read_text())
