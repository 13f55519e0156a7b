"""Models against transformers' own, with every field of config.json altered in turn; a part of
verify_pretrained.py.

transformers writes each folder, with random weights. fnet computes transformers' logits or raises
an error; where the error says how to change the model, the changed model must compute transformers'
logits.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import pathlib
import random
import re
import tempfile

import numpy as np
from verifying import check, needed

from fnet import models
from fnet.models import pretrained

SIZES = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
ROPES = [
    dict(rope_type="linear", factor=4.0),
    LLAMA3,
    LLAMA3 | dict(original_max_position_embeddings=64, factor=2.0),
    dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8),
    dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    dict(
        rope_type="longrope",
        short_factor=[1.0] * 4,
        long_factor=[2.0] * 4,
        factor=4.0,
        original_max_position_embeddings=16,
    ),
]
DECODER = {
    "num_attention_heads": [2, 8],
    "hidden_act": ["gelu", "relu", "gelu_new"],
    "rms_norm_eps": [1e-5, 1e-2],
    "num_hidden_layers": [3],
    "intermediate_size": [40],
    "hidden_size": [64],
    "vocab_size": [65],
    "num_key_value_heads": [1, 4],
    "head_dim": [16],
    "tie_word_embeddings": [True],
    "max_position_embeddings": [32, 128],
    "use_cache": [False],
    "initializer_range": [0.5],
    "attention_dropout": [0.3],
    "bos_token_id": [3],
    "eos_token_id": [[3, 4]],
    "pad_token_id": [7],
    "rope_parameters": [{"rope_theta": base, "rope_type": "default"} for base in (5e5, 100.0)]
    + [{"rope_theta": base, **rope} for rope in ROPES for base in (1e4, 5e5)],
}
# (fnet's model, the class of transformers, its configuration, {field: other values})
FAMILIES = {
    "llama": (
        models.Decoder(64, 32, 2, 4, 2, 48, context=64, epsilon=1e-6),
        "LlamaForCausalLM",
        SIZES | dict(num_key_value_heads=2, max_position_embeddings=64),
        DECODER | {"attention_bias": [True], "mlp_bias": [True], "pretraining_tp": [2]},
    ),
    "mistral": (
        models.Decoder(64, 32, 2, 4, 2, 48, context=64, epsilon=1e-6, window=7),
        "MistralForCausalLM",
        SIZES | dict(num_key_value_heads=2, max_position_embeddings=64, sliding_window=7),
        DECODER | {"sliding_window": [None, 1, 3, 64, 4096]},
    ),
    "gpt2": (
        models.GPT(64, 32, 2, 4, context=64),
        "GPT2LMHeadModel",
        dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        {
            "n_head": [2, 8],
            "n_layer": [3],
            "n_embd": [64],
            "vocab_size": [65],
            "n_positions": [80],
            "n_inner": [48],
            "activation_function": [
                "gelu",
                "gelu_pytorch_tanh",
                "gelu_fast",
                "relu",
                "silu",
                "quick_gelu",
            ],
            "layer_norm_epsilon": [1e-6, 1e-1],
            "scale_attn_weights": [False],
            "scale_attn_by_inverse_layer_idx": [True],
            "reorder_and_upcast_attn": [True],
            "add_cross_attention": [True],
            "tie_word_embeddings": [False],
            "attn_pdrop": [0.5],
            "resid_pdrop": [0.5],
            "embd_pdrop": [0.5],
            "summary_type": ["mean"],
            "summary_use_proj": [False],
            "summary_activation": ["tanh"],
            "use_cache": [False],
            "initializer_range": [0.3],
            "bos_token_id": [1],
            "eos_token_id": [1],
            "pad_token_id": [1],
        },
    ),
    "bert": (
        models.Bert(64, 32, 2, 4, 48, context=64),
        "BertModel",
        SIZES | dict(max_position_embeddings=64),
        {
            "num_attention_heads": [2, 8],
            "num_hidden_layers": [3],
            "hidden_size": [64],
            "intermediate_size": [40],
            "vocab_size": [65],
            "max_position_embeddings": [80],
            "type_vocab_size": [3],
            "layer_norm_eps": [1e-5, 1e-1],
            "hidden_act": ["gelu_new", "relu", "gelu_python", "silu"],
            "is_decoder": [True],
            "hidden_dropout_prob": [0.5],
            "attention_probs_dropout_prob": [0.5],
            "classifier_dropout": [0.5],
            "pad_token_id": [5],
            "tie_word_embeddings": [False],
            "use_cache": [False],
            "initializer_range": [0.3],
        },
    ),
    "vit": (
        models.ViT(32, 2, 4, classes=5, patch=8, size=32, hidden=48, epsilon=1e-12),
        "ViTForImageClassification",
        {key: SIZES[key] for key in SIZES if key != "vocab_size"}
        | dict(image_size=32, patch_size=8, num_labels=5),
        {
            "num_attention_heads": [2, 8],
            "num_hidden_layers": [3],
            "hidden_size": [64],
            "intermediate_size": [40],
            "layer_norm_eps": [1e-6, 1e-1],
            "hidden_act": ["gelu_new", "relu", "gelu_python"],
            "qkv_bias": [False],
            "num_channels": [1],
            "image_size": [40, [32, 32]],
            "patch_size": [16, [8, 8]],
            "encoder_stride": [8],
            "hidden_dropout_prob": [0.5],
            "attention_probs_dropout_prob": [0.5],
            "pooler_act": ["relu"],
            "pooler_output_size": [8],
            "num_labels": [6],
            "initializer_range": [0.3],
        },
    ),
}
# What other families write, with the arrays of those above.
OTHERS = {
    "gemma": ("GemmaForCausalLM", FAMILIES["llama"], dict(head_dim=8)),
    "qwen2": ("Qwen2ForCausalLM", FAMILIES["llama"], {}),
    "granite": ("GraniteForCausalLM", FAMILIES["llama"], dict(residual_multiplier=0.5)),
    "olmo": ("OlmoForCausalLM", FAMILIES["llama"], {}),
    "electra": ("ElectraModel", FAMILIES["bert"], dict(embedding_size=32)),
}


def made(transformers, torch, name, options, folder, seed):
    """(the input, the output) of one of transformers' models with random weights, which it writes
    to a folder."""
    cls = getattr(transformers, name)
    twin = cls(cls.config_class(**options, attn_implementation="eager")).eval()
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=draws))
        with contextlib.redirect_stderr(io.StringIO()):
            twin.save_pretrained(folder)
        if "image_size" in options:
            channels, size = options.get("num_channels", 3), options["image_size"]
            x = torch.randn(
                (2, channels, *(size if isinstance(size, list) else [size, size])), generator=draws
            )
            return x.permute(0, 2, 3, 1).numpy(), twin(x).logits.numpy()
        x = torch.randint(0, 64, (2, 48), generator=draws)
        out = twin(x)
        return x.numpy().astype(np.int32), (
            out.logits if hasattr(out, "logits") else out.last_hidden_state
        ).numpy()


def outcome(model, folder, x, expected):
    """The relative error of fnet's output, or the message of fnet's error."""
    try:
        params, _ = pretrained.load(model, folder)
        out = model(params, x)
    except ValueError as error:
        return str(error)
    out = np.asarray(out.hidden if isinstance(model, models.Bert) else out)
    return np.abs(out - expected).max() / np.abs(expected).max()


def changed(model, message):
    """The model, changed as an error advises; None if the error does not say how."""
    advice = re.search(r"Use (dataclasses\.replace\(.*\))$", message)
    return advice and eval(advice[1], {"model": model, "dataclasses": dataclasses, **vars(models)})


@check
def altered_configurations():
    """config.json altered, one field at a time, in folders that transformers writes: its logits, or
    an error."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    transformers.logging.set_verbosity_error()
    for family, (model, name, options, fields) in FAMILIES.items():
        cases = [{}, *({field: value} for field, values in fields.items() for value in values)]
        equal, advised, refused, worst, skipped = 0, 0, [], 0.0, 0
        for seed, case in enumerate(cases):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    x, expected = made(transformers, torch, name, {**options, **case}, folder, seed)
                except (TypeError, ValueError, KeyError, RuntimeError, IndexError, AttributeError):
                    skipped += 1  # transformers does not make this one
                    continue
                result = outcome(model, folder, x, expected)
                if isinstance(result, str):
                    other = changed(model, result)
                    if other is None:
                        refused.append(", ".join(f"{key}={value}" for key, value in case.items()))
                        assert (
                            "config.json does not describe" in result or "does not fit" in result
                        ), result
                        continue
                    result, advised = outcome(other, folder, x, expected), advised + 1
                    assert not isinstance(result, str), (
                        f"{family}, {case}: changed as advised, still {result}"
                    )
                else:
                    equal += 1
                assert result < 1e-5, f"{family}, {case}: {result:.1e}"
                worst = max(worst, result)
        yield (
            f"{family}: {len(cases) - skipped} configurations: {equal} equal, {advised} equal once "
            f"changed as the error says, within {worst:.1e}; {len(refused)} refused "
            f"({'; '.join(refused)}); {skipped} not made"
        )


@check
def altered_tokenizers():
    """BERT's tokenizer with all of its options, in folders that transformers writes: its tokens for
    random texts."""
    transformers = needed("transformers", "transformers")
    held = json.loads(
        (pathlib.Path(__file__).parent / "tokenizers.json").read_text(encoding="utf-8")
    )["wordpiece"]
    vocabulary = [
        *held["vocabulary"],
        *(
            token
            for token in ("A", "B", "##A", "É", "##É", "e\u0301", "中", "##中")
            if token not in held["vocabulary"]
        ),
    ]
    vocabulary += [] if "[MASK]" in vocabulary else ["[MASK]"]
    words = "".join(
        dict.fromkeys("".join(held["texts"]) + "ABéÉàÅß中文字𠀀 .,-!?'\t\u00a0\u0130ſ")
    ).replace("[", "")
    draws, count, folders = random.Random(0), 0, 0
    for lower, strip, chinese in itertools.product(
        (True, False), (None, True, False), (True, False)
    ):
        texts = ["".join(draws.choices(words, k=draws.randint(0, 60))) for _ in range(200)]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "vocab.txt")
            path.write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
            theirs = transformers.BertTokenizer.from_pretrained(
                folder, do_lower_case=lower, strip_accents=strip, tokenize_chinese_chars=chinese
            )
            theirs.save_pretrained(folder)
            files = [
                pathlib.Path(folder, name) for name in ("tokenizer_config.json", "tokenizer.json")
            ]
            texts_of = [file.read_text(encoding="utf-8") for file in files]
            for kept in ((0,), (1,), (0, 1)):  # either file says it, or both
                for number, file in enumerate(files):
                    file.unlink(missing_ok=True)
                    if number in kept:
                        file.write_text(texts_of[number], encoding="utf-8")
                ours = models.read_tokenizer(folder)
                for text in texts:
                    assert ours.encode(text).tolist() == theirs(text).input_ids, (
                        lower,
                        strip,
                        chinese,
                        text,
                    )
                count, folders = count + len(texts), folders + 1
    yield f"{folders} folders, {count} texts: the same tokens"


@check
def other_families():
    """Folders that transformers writes for models with the same arrays but another forward pass:
    each is refused."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    for family, (name, (model, _, options, _), more) in OTHERS.items():
        with tempfile.TemporaryDirectory() as folder:
            made(transformers, torch, name, {**options, **more}, folder, 0)
            try:
                pretrained.load(model, folder)
            except ValueError as error:
                message = str(error).partition("config.json")[2]
                assert f"'model_type' is {family!r}" in message, message
                yield f"{family}: config.json{message}"
            else:
                raise AssertionError(f"{family} was loaded")
