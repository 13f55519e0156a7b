"""pretrained.save into a folder: config.json, shards, dtypes, and the files that are copied."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_cases import ENCODER, PUBLISHED, SMALL
from safetensors.numpy import load_file

from fnet import compress, models
from fnet.models import pretrained
from fnet.models.weights import _config, _folder

GPT = models.GPT(64, 32, 2, 4, context=64)
SAVED = {
    "llama": (SMALL, "huggingface"),
    "llama3": (
        dataclasses.replace(
            SMALL,
            rope_scaling=models.Llama3Scaling(8.0, 1.0, 4.0, 32),
            rotary_base=5e5,
            tied=True,
            head_dim=16,
            epsilon=1e-6,
        ),
        "huggingface",
    ),
    "linear": (dataclasses.replace(SMALL, rope_scaling=models.LinearScaling(4.0)), "huggingface"),
    "mistral": (dataclasses.replace(SMALL, window=8), "huggingface"),
    "gpt2": (GPT, None),
    "n_inner": (dataclasses.replace(GPT, hidden=40, epsilon=1e-5), None),
    "bert": (dataclasses.replace(ENCODER, segments=3), None),
    "vit": (
        models.ViT(32, 1, 2, classes=7, patch=8, size=32, hidden=48, epsilon=1e-12),
        "huggingface",
    ),
    "timm vit": (models.ViT.preset("vit_ti_16", classes=2, depth=12), "timm"),
    "timm resnet": (models.ResNet.preset("resnet18", classes=4), "torchvision"),
    "timm mobilenet": (models.MobileNetV2(classes=4, width=0.35), "timm"),
}


def trees(model, dtype=jnp.float32):
    spec = model.spec(model.example())
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), dtype), tree)
        for tree in spec
    ]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", SAVED)
def test_a_saved_folder_loads_as_the_same_model(name, tmp_path):
    model, names = SAVED[name]
    params, state = trees(model)
    pretrained.save(model, params, state, tmp_path, names=names)
    loaded, *again = pretrained.load(tmp_path)
    assert loaded == model
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves([params, state])))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("model_type", "timm") == {
        "llama3": "llama",
        "linear": "llama",
        "n_inner": "gpt2",
    }.get(name, name.split()[0])
    if name.startswith("timm"):
        assert set(config) == {"architecture", "num_classes", "global_pool"}
    else:
        assert config["dtype"] == "float32" and len(config["architectures"]) == 1


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_back(name):
    """Every field of a published config.json is written again, or is one that the framework
    assumes."""
    model, config = PUBLISHED[name]
    table = model.CONFIGS[_config.kind_of(config)]
    names = _config.names_for(table, model)
    written = _folder.describe(model, names, config)
    table.check(model, written)
    for field in config:
        if field in written:
            assert field in ("architectures", "rope_scaling") or written[field] == config[field], (
                field
            )
        else:
            assert (
                not isinstance(table.fields[field], _config.Use)
                or config[field] is None
                or field in ("n_ctx", "hidden_size")
            ), field


def test_shards(tmp_path):
    params, _ = trees(SMALL)
    index = pretrained.save(SMALL, params, {}, tmp_path, names="huggingface", max_shard_size=20_000)
    assert index == tmp_path / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    files = sorted(set(held["weight_map"].values()))
    assert (
        files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        and len(files) > 2
    )
    assert held["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for file in files:
        arrays = load_file(tmp_path / file)
        assert all(held["weight_map"][key] == file for key in arrays)
        assert len(arrays) == 1 or sum(array.nbytes for array in arrays.values()) <= 20_000
    assert all(
        map(np.array_equal, jax.tree.leaves(pretrained.load(tmp_path)[1]), jax.tree.leaves(params))
    )
    # Later weights replace the earlier ones in either form.
    other = jax.tree.map(lambda leaf: leaf + 1, params)
    pretrained.save(SMALL, other, {}, tmp_path, names="huggingface", max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) < len(files)
    assert np.array_equal(pretrained.load(tmp_path)[1]["norm"]["scale"], other["norm"]["scale"])
    assert (
        pretrained.save(SMALL, params, {}, tmp_path, names="huggingface").name
        == "model.safetensors"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    pretrained.save(SMALL, params, {}, tmp_path, names="huggingface", max_shard_size="20 KB")
    assert not (tmp_path / "model.safetensors").exists()
    for wrong in ("5 apples", 0, "-1GB", None):
        with pytest.raises(
            ValueError, match=r"expected max_shard_size in bytes, or as .5GB. or .500MB.; got"
        ):
            pretrained.save(SMALL, params, {}, tmp_path, names="huggingface", max_shard_size=wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_and_implicit_arrays(dtype, tmp_path):
    params, _ = trees(SMALL, dtype)
    pretrained.save(SMALL, params, {}, tmp_path, names="huggingface")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == dtype
    _, again, _ = pretrained.load(tmp_path)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(again)} == {dtype}
    params["norm"]["scale"] = params["norm"]["scale"].astype(jnp.float32)
    pretrained.save(SMALL, params, {}, tmp_path, names="huggingface")
    assert pretrained.load(tmp_path)[1]["norm"]["scale"].dtype == jnp.float32
    full, _ = trees(SMALL)
    small = compress.quantize(full, {"blocks/.*/kernel": compress.Int8()})
    pretrained.save(SMALL, small, {}, tmp_path, names="huggingface")
    assert all(
        map(
            np.array_equal,
            jax.tree.leaves(pretrained.load(tmp_path)[1]),
            jax.tree.leaves(compress.materialize(small)),
        )
    )


def test_files_beside_are_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    params, _ = trees(SMALL)
    pretrained.save(SMALL, params, {}, source, names="huggingface")
    config = json.loads((source / "config.json").read_text())
    config |= {"eos_token_id": [1, 2], "torch_dtype": "bfloat16", "attention_dropout": 0.1}
    (source / "config.json").write_text(json.dumps(config))
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "train.py",
    ):
        (source / name).write_text("{}")
    pretrained.save(SMALL, params, {}, target, like=source)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    held = json.loads((target / "config.json").read_text())
    assert held["eos_token_id"] == [1, 2] and held["attention_dropout"] == 0.1
    assert held["dtype"] == "float32" and "torch_dtype" not in held
    pretrained.save(SMALL, params, {}, source, like=source)  # into itself
    assert (source / "tokenizer.json").read_text() == "{}"
    window = dataclasses.replace(SMALL, window=8)
    pretrained.save(window, params, {}, tmp_path / "window", like=source)  # another model_type
    assert "eos_token_id" not in json.loads((tmp_path / "window" / "config.json").read_text())
    assert pretrained.load(tmp_path / "window")[0] == window


def test_models_that_no_config_json_describes(tmp_path):
    model = dataclasses.replace(SMALL, interleaved=True, rotary_base=2e4, head_dim=16)
    image = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    pretrained.save(image, *trees(image), tmp_path / "image", names="torchvision")
    assert [path.name for path in (tmp_path / "image").iterdir()] == ["model.safetensors"]
    with pytest.raises(ValueError, match=r"need a .* with interleaved=False"):
        pretrained.save(model, trees(model)[0], {}, tmp_path / "model", names="huggingface")
    resnet = models.ResNet.preset("resnet18", classes=2)
    pretrained.save(resnet, *trees(resnet), tmp_path / "resnet", names="torchvision")
    with pytest.raises(ValueError, match=r"config.json describes another model than this one"):
        pretrained.save(image, *trees(image), tmp_path / "resnet", names="torchvision")
    assert pretrained.load(tmp_path / "resnet")[0] == resnet


def test_the_config_json_of_a_run_stays(tmp_path):
    (tmp_path / "config.json").write_text(text := json.dumps({"steps": 3}))
    (tmp_path / "metrics.jsonl").touch()
    params, _ = trees(SMALL)
    with pytest.raises(
        ValueError,
        match=r"belongs to a training run, and would be replaced; save into another folder",
    ):
        pretrained.save(SMALL, params, {}, tmp_path, names="huggingface")
    pretrained.save(SMALL, params, {}, tmp_path / "model.safetensors", names="huggingface")
    assert (tmp_path / "config.json").read_text() == text
