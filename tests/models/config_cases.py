"""Configurations that model hubs publish, and checks of what fnet reads from them."""

import json

import pytest

from fnet import models
from fnet.models.weights import _config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
}
LLAMA_2 = LLAMA | {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}
TINY_LLAMA = LLAMA | {
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
SMOL = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 2048,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
LLAMA_3 = LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_31 = LLAMA_3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
MINILM = BERT | {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
}
BERT_CASED = {
    key: BERT[key] for key in BERT if key not in ("position_embedding_type", "use_cache")
} | {"vocab_size": 28996}
VIT = {
    "_name_or_path": "google/vit-base-patch16-224-in21k",
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(number): f"LABEL_{number}" for number in range(1000)},
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "label2id": {"tench, Tinca tinca": 0},
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
    "transformers_version": "4.13.0.dev0",
}
TIMM = {
    "num_classes": 1000,
    "num_features": 2048,
    "pretrained_cfg": {"tag": "tv_in1k", "input_size": [3, 224, 224]},
}

PUBLISHED = {
    "llama2-7b": (models.Decoder.preset("llama2-7b"), LLAMA_2),
    "tinyllama": (models.Decoder.preset("tinyllama-1.1b"), TINY_LLAMA),
    "smollm": (models.Decoder.preset("smollm-135m"), SMOL),
    "llama3-8b": (models.Decoder.preset("llama3-8b"), LLAMA_3),
    "llama3.1-8b": (
        models.Decoder.preset(
            "llama3-8b", context=131072, rope_scaling=models.Llama3Scaling(8, 1, 4, 8192)
        ),
        LLAMA_31,
    ),
    "mistral-7b": (
        models.Decoder(32000, 4096, 32, 32, 8, 14336, context=32768, window=4096),
        MISTRAL,
    ),
    "gpt2": (models.GPT.preset("gpt2"), GPT2),
    "gpt2-medium": (
        models.GPT.preset("gpt2-medium"),
        GPT2
        | {
            "n_embd": 1024,
            "n_head": 16,
            "n_layer": 24,
            "n_special": 0,
            "predict_special_tokens": True,
        },
    ),
    "gpt2-xl": (
        models.GPT.preset("gpt2-xl"),
        GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    ),
    "bert-base-uncased": (models.Bert.preset("bert-base-uncased"), BERT),
    "bert-base-cased": (models.Bert.preset("bert-base-uncased", vocab_size=28996), BERT_CASED),
    "minilm": (models.Bert.preset("minilm-l6"), MINILM),
    "vit": (models.ViT.preset("vit_b_16", epsilon=1e-12), VIT),
    "timm resnet": (
        models.ResNet.preset("resnet50"),
        TIMM | {"architecture": "resnet50", "global_pool": "avg"},
    ),
    "timm vit": (
        models.ViT.preset("vit_s_16"),
        TIMM | {"architecture": "vit_small_patch16_224", "global_pool": "token"},
    ),
    "timm mobilenet": (models.MobileNetV2(), TIMM | {"architecture": "mobilenetv2_100"}),
}


def written(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refused(folder, model, config, text):
    with pytest.raises(ValueError, match=text) as error:
        _config.Configuration(written(folder, config)).check(model)
    assert str(error.value).startswith(str(folder / "config.json")) and "\n" not in str(error.value)


SMALL = models.Decoder(64, 32, 2, 4, 2, 48, context=64)
CONFIG = LLAMA | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
ENCODER = models.Bert(64, 32, 2, 4, 48, context=64)
ENCODER_CONFIG = BERT | {
    "architectures": ["BertModel"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
