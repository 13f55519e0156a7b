"""LoRA adapters in PEFT's files, against weights to which the changes were added with NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fnet import compress, models
from fnet import transforms as ft
from fnet.models import pretrained

TOKENS = jnp.array([[1, 5, 9, 2], [3, 3, 0, 7]])
MODELS = {
    "llama": models.Decoder(24, 16, 3, 4, 2, 20, context=16),
    "gpt": models.GPT(24, 16, 2, 4, context=16),
    "unstacked": models.Decoder(24, 16, 2, 4, 2, 20, context=16, stacked=False),
}


def start(name):
    model = MODELS[name]
    return model, model.init(jax.random.key(0), TOKENS)[0]


def write(folder, factors, **config):
    """An adapter as PEFT writes it."""
    folder.mkdir(exist_ok=True)
    save_file(
        {
            f"base_model.model.{name}.lora_{side}.weight": array
            for name, pair in factors.items()
            for side, array in zip("AB", pair)
        },
        folder / "adapter_model.safetensors",
    )
    fields = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 8,
        "bias": "none",
        "use_dora": False,
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def is_change(leaf):
    return isinstance(leaf, compress.LowRank)


def pair(inputs, outputs, rank=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rank, inputs)).astype(np.float32), rng.normal(
        size=(outputs, rank)
    ).astype(np.float32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "unstacked"])
def test_an_adapter_equals_added_weights(name, tmp_path):
    """Some layers have no change, one has another rank and alpha."""
    model, params = start(name)
    factors = {
        "model.layers.0.self_attn.q_proj": pair(16, 16),
        "model.layers.1.self_attn.q_proj": pair(16, 16, 3, 1),
        "model.layers.1.mlp.down_proj": pair(20, 16, seed=2),
        "lm_head": pair(16, 24, seed=3),
    }
    folder = write(
        tmp_path / "adapter",
        factors,
        rank_pattern={"model.layers.1.self_attn.q_proj": 3},
        alpha_pattern={"layers.1.self_attn.q_proj": 1.5},
    )
    weights = load_file(pretrained.save(model, params, {}, tmp_path / "base", names="huggingface"))
    for module, (a, b) in factors.items():
        weights[f"{module}.weight"] += (0.5 if len(a) == 3 else 4) * b @ a
    save_file(weights, tmp_path / "added.safetensors")
    want, _ = pretrained.load(model, tmp_path / "added.safetensors", names="huggingface")
    adapted = pretrained.load_adapter(model, params, folder)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        compress.merge(adapted),
        want,
    )
    np.testing.assert_allclose(
        ft.use_implicit_arrays(model)(adapted, TOKENS), model(want, TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.exhaustive
def test_a_fused_kernel(tmp_path):
    """GPT-2's c_attn is [in, 3 out] in the file, and its factors have the orientation of torch's."""
    model, params = start("gpt")
    a, b = pair(16, 48)
    folder = write(
        tmp_path / "adapter", {"transformer.h.1.attn.c_attn": (a, b)}, fan_in_fan_out=True
    )
    merged = compress.merge(pretrained.load_adapter(model, params, folder))
    weights = load_file(pretrained.save(model, params, {}, tmp_path / "base", names="huggingface"))
    key = next(key for key in weights if key.endswith("h.1.attn.c_attn.weight"))
    weights[key] += 4 * (b @ a).T
    save_file(weights, tmp_path / "added.safetensors")
    want, _ = pretrained.load(model, tmp_path / "added.safetensors", names="huggingface")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), merged, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name, tmp_path):
    model, params = start(name)
    rules = {".*attention/query.*": 2, ".*attention/value.*": 3}
    adapted = compress.lora(jax.random.key(1), params, rules, alpha=6)
    adapted = jax.tree.map(
        lambda w: dataclasses.replace(w, b=w.b + 0.1) if is_change(w) else w,
        adapted,
        is_leaf=is_change,
    )
    folder = pretrained.save_adapter(model, adapted, tmp_path / "adapter", base="someone/model")
    keys = load_file(folder / "adapter_model.safetensors")
    start_of_keys = f"base_model.model.{'transformer.h' if name == 'gpt' else 'model.layers'}"
    assert all(key.startswith(start_of_keys) for key in keys)
    read = pretrained.load_adapter(model, params, folder)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        compress.merge(read),
        compress.merge(adapted),
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/model" and config["fan_in_fan_out"] is (
        name == "gpt"
    )
    quantized = compress.quantize(params, {".*attention/query.*": compress.Int8()})
    adapted = jax.tree.leaves(pretrained.load_adapter(model, quantized, folder), is_leaf=is_change)
    assert any(isinstance(leaf.base, compress.Quantized) for leaf in adapted if is_change(leaf))


@pytest.mark.parametrize(
    ("factors", "config", "message"),
    [
        (
            {"model.layers.9.self_attn.q_proj": pair(16, 16)},
            {},
            "no kernel of this Decoder has the keys 'model.layers.9",
        ),
        (
            {"lm_head": pair(16, 25)},
            {},
            r"expected factors for a kernel \(16, 24\), got \(2, 16\) and \(25, 2\)",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"use_dora": True},
            "use_dora=True is not supported; expected False",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"peft_type": "LOHA"},
            "peft_type='LOHA' is not supported; expected 'LORA'",
        ),
        ({"lm_head": pair(16, 24)}, {"r": "two"}, "expected the fields r and lora_alpha"),
        ({"lm_head": pair(16, 24)}, {"r": True}, "expected the fields r and lora_alpha"),
        *(
            (
                {"lm_head": pair(16, 24)},
                {"init_lora_weights": kind},
                f"init_lora_weights='{kind}' is not supported; expected True; it changes the base "
                f"weights",
            )
            for kind in (
                "pissa",
                "pissa_niter_16",
                "olora",
                "OLoRA",
                "corda",
                "loftq",
                "lora_ga",
                "mica",
            )
        ),
        (
            {"lm_head": pair(16, 24)},
            {"init_lora_weights": 1},
            "init_lora_weights=1 is not supported",
        ),
        *(
            (
                {"lm_head": pair(16, 24)},
                {field: {}},
                rf"{field}=\{{\}} is not supported; expected None",
            )
            for field in (
                "velora_config",
                "kasa_config",
                "arrow_config",
                "monteclora_config",
                "megatron_config",
            )
        ),
        ({"lm_head": pair(16, 24)}, {"use_bdlora": {}}, r"use_bdlora=\{\} is not supported"),
        (
            {"lm_head": pair(16, 24)},
            {"ensure_weight_tying": True},
            "ensure_weight_tying=True is not supported",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"trainable_token_indices": [1]},
            r"trainable_token_indices=\[1\] is not supported",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"target_parameters": ["w"]},
            "target_parameters=.* is not supported",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"modules_to_save": ["score"]},
            "modules_to_save=.* is not supported",
        ),
        ({"lm_head": pair(16, 24)}, {"use_newest": True}, "the field use_newest=True is unknown"),
        (
            {"lm_head": pair(16, 24)},
            {"r": 3},
            "give 'lm_head' the rank 3, but its weights have rank 2",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"rank_pattern": {"head": 3, "lm_.*": 4}},
            "the rank 4, but its weights have rank 2",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"rank_pattern": [2]},
            "expected rank_pattern as an object of numbers",
        ),
        (
            {"lm_head": pair(16, 24)},
            {"use_rslora": "no"},
            "expected use_rslora=true or false, got 'no'",
        ),
        ({"lm_head": pair(16, 24)}, {"target_modules": ["q_proj"]}, "do not select 'lm_head'"),
        ({"lm_head": pair(16, 24)}, {"target_modules": "head"}, "do not select 'lm_head'"),
        ({"lm_head": pair(16, 24)}, {"exclude_modules": ["lm_head"]}, "do not select 'lm_head'"),
        (
            {"model.layers.1.self_attn.q_proj": pair(16, 16)},
            {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
            "do not select 'model.layers.1.self_attn.q_proj'",
        ),
        (
            {"model.layers.1.self_attn.q_proj": pair(16, 16)},
            {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "blocks"},
            "do not select",
        ),
        (
            {"model.norm": pair(16, 16)},
            {},
            "are supported for dense layers, convolutions in one group and tables",
        ),
    ],
)
def test_errors(factors, config, message, tmp_path):
    model, params = start("llama")
    with pytest.raises(ValueError, match=message):
        pretrained.load_adapter(model, params, write(tmp_path / "adapter", factors, **config))


@pytest.mark.parametrize(
    "config",
    [{"init_lora_weights": kind} for kind in (True, False, None, "gaussian", "orthogonal", "eva")]
    + [
        {"target_modules": ["q_proj"], "exclude_modules": [], "use_newest": None},
        {"target_modules": "model.*q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {
            "target_modules": ["self_attn.q_proj"],
            "layers_to_transform": 1,
            "layers_pattern": ["h", "layers"],
        },
        {
            "loftq_config": {},
            "lora_dropout": 0.1,
            "task_type": "CAUSAL_LM",
            "fan_in_fan_out": True,
            "revision": None,
        },
    ],
)
def test_fields_that_change_nothing(config, tmp_path):
    model, params = start("llama")
    factors = {"model.layers.1.self_attn.q_proj": pair(16, 16)}
    got = compress.merge(
        pretrained.load_adapter(model, params, write(tmp_path / "adapter", factors, **config))
    )
    a, b = factors["model.layers.1.self_attn.q_proj"]
    change = np.asarray(got["blocks"]["attention"]["query"]["kernel"]) - np.asarray(
        params["blocks"]["attention"]["query"]["kernel"]
    )
    np.testing.assert_allclose(change[1].reshape(16, 16), 4 * (b @ a).T, rtol=1e-4, atol=1e-5)
    assert not change[0].any()


def test_missing_files_and_changes(tmp_path):
    model, params = start("llama")
    with pytest.raises(
        FileNotFoundError, match=r"adapter_config.json does not exist; PEFT's save_pretrained"
    ):
        pretrained.load_adapter(model, params, tmp_path)
    with pytest.raises(ValueError, match="the parameters have no LowRank leaf"):
        pretrained.save_adapter(model, params, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"expected a prefix of \('',\); got 'transformer.'"):
        pretrained.save_adapter(model, params, tmp_path / "adapter", prefix="transformer.")


def test_convolutions_and_tables(tmp_path):
    """PEFT's factors of a Conv2d are a convolution and one of width 1; those of an Embedding have
    other names."""
    model = models.ResNet((1, 1), bottleneck=False, classes=3, width=4)
    params, state = model.init(jax.random.key(0), jnp.ones((1, 16, 16, 3)))
    adapted = jax.tree.map(
        lambda w: dataclasses.replace(w, b=w.b + 0.1) if is_change(w) else w,
        compress.lora(jax.random.key(1), params, {"stage.*": 2, "head": 3}),
        is_leaf=is_change,
    )
    folder = pretrained.save_adapter(model, adapted, tmp_path / "images", names="torchvision")
    factors = load_file(folder / "adapter_model.safetensors")
    weights = load_file(
        pretrained.save(model, params, state, tmp_path / "base", names="torchvision")
    )
    name = "layer2.0.conv1"
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    assert a.shape == (2, 4, 3, 3) and b.shape == (8, 2, 1, 1)
    weights[f"{name}.weight"] += 2 * np.einsum(
        "orij,rcij->ocij", np.broadcast_to(b, (8, 2, 3, 3)), a
    )
    save_file(weights, tmp_path / "added.safetensors")
    want, _ = pretrained.load(model, tmp_path / "added.safetensors", names="torchvision")
    read = pretrained.load_adapter(model, params, folder, names="torchvision")
    for tree in (adapted, read):
        np.testing.assert_allclose(
            compress.merge(tree)["stage2"]["block0"]["conv1"]["kernel"],
            want["stage2"]["block0"]["conv1"]["kernel"],
            rtol=1e-5,
            atol=1e-6,
        )
    with pytest.raises(
        ValueError, match="ResNet has no names 'huggingface'; it has torchvision, keras"
    ):
        pretrained.save_adapter(model, adapted, folder)

    llama, params = start("llama")
    table = compress.lora(jax.random.key(1), params, {"embed": 2})
    folder = pretrained.save_adapter(llama, table, tmp_path / "table")
    shapes = {
        key: array.shape for key, array in load_file(folder / "adapter_model.safetensors").items()
    }
    assert shapes == {
        "base_model.model.model.embed_tokens.lora_embedding_A": (2, 24),
        "base_model.model.model.embed_tokens.lora_embedding_B": (16, 2),
    }
    read = pretrained.load_adapter(llama, params, folder)
    np.testing.assert_array_equal(read["embed"]["embedding"].a, table["embed"]["embedding"].a)


def test_a_tied_table(tmp_path):
    """PEFT changes the table and the head separately, so the file has the change twice, once
    transposed."""
    model = dataclasses.replace(MODELS["llama"], tied=True)
    params, _ = model.init(jax.random.key(0), TOKENS)
    adapted = jax.tree.map(
        lambda w: dataclasses.replace(w, b=w.b + 0.1) if is_change(w) else w,
        compress.lora(jax.random.key(1), params, {"embed": 2}),
        is_leaf=is_change,
    )
    folder = pretrained.save_adapter(model, adapted, tmp_path)
    factors = load_file(folder / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    np.testing.assert_allclose(
        params["embed"]["embedding"] + 2 * b @ a,
        compress.merge(adapted)["embed"]["embedding"],
        rtol=1e-5,
        atol=1e-6,
    )
    read = pretrained.load_adapter(model, params, folder)
    np.testing.assert_array_equal(read["embed"]["embedding"].a, adapted["embed"]["embedding"].a)


def test_rotary_pairs(tmp_path):
    """Changes of a model with pairs (0, 1), (2, 3), ... are written for transformers' pairs (i, i +
    head_dim / 2)."""
    model, params = start("llama")
    pairs = dataclasses.replace(model, interleaved=True)
    adapted = jax.tree.map(
        lambda w: (
            dataclasses.replace(w, b=w.b + jax.random.normal(jax.random.key(2), w.b.shape))
            if is_change(w)
            else w
        ),
        compress.lora(jax.random.key(1), params, {".*(query|key|value)": 2}),
        is_leaf=is_change,
    )
    folder = pretrained.save_adapter(pairs, adapted, tmp_path / "adapter")

    def halves(path, kernel):
        rotated = path[-2].key in ("query", "key")
        return (
            kernel.reshape(*kernel.shape[:2], -1, 2, 2).swapaxes(-1, -2).reshape(kernel.shape)
            if rotated
            else kernel
        )

    theirs = pretrained.load_adapter(
        model, jax.tree_util.tree_map_with_path(halves, params), folder
    )
    want = ft.use_implicit_arrays(pairs)(adapted, TOKENS)
    np.testing.assert_allclose(
        ft.use_implicit_arrays(model)(theirs, TOKENS), want, rtol=1e-4, atol=1e-5
    )
    ours = pretrained.load_adapter(pairs, params, folder)
    np.testing.assert_allclose(
        ft.use_implicit_arrays(pairs)(ours, TOKENS), want, rtol=1e-4, atol=1e-5
    )
