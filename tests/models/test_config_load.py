"""config.json through pretrained.load, and the outputs of a Decoder with each of its fields."""

import copy
import dataclasses
import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_cases import CONFIG, ENCODER, ENCODER_CONFIG, SMALL, VIT, written

from fnet import layers as nn
from fnet import models
from fnet.models import pretrained
from fnet.models.weights import _config

# Through pretrained.load.


def test_load_compares(tmp_path):
    params, _ = SMALL.init(jax.random.key(0), SMALL.example())
    file = pretrained.save(SMALL, params, {}, tmp_path, names="huggingface")
    written(tmp_path, CONFIG)
    for path in (file, tmp_path):
        assert jax.tree.structure(pretrained.load(SMALL, path)[0]) == jax.tree.structure(params)
    written(tmp_path, CONFIG | {"rope_theta": 5e5})
    for path in (file, tmp_path):
        with pytest.raises(
            ValueError,
            match=r"config.json does not describe this Decoder: 'rope_theta' is 500000.0",
        ):
            pretrained.load(SMALL, path)
    pretrained.load(dataclasses.replace(SMALL, rotary_base=5e5), tmp_path)
    pretrained.load(SMALL, tmp_path, check_config=False)
    written(tmp_path, {"steps": 30})  # of a training run
    with pytest.raises(
        ValueError, match="not the configuration of these weights, load with check_config=False"
    ):
        pretrained.load(SMALL, tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    pretrained.load(SMALL, tmp_path)
    written(tmp_path, CONFIG | {"mlp_bias": True})
    with pytest.raises(ValueError, match="'mlp_bias' is True, the model has mlp_bias=False"):
        pretrained.load(SMALL, tmp_path)


def test_a_config_json_that_contradicts_itself(tmp_path):
    """The shapes of GPT-2's arrays do not show the number of heads."""
    model = models.GPT(vocab_size=12, width=8, depth=1, heads=4, context=6)
    params, _ = model.init(jax.random.key(0), model.example())
    pretrained.save(model, params, {}, tmp_path, names="huggingface")
    file = tmp_path / "config.json"
    written(tmp_path, json.loads(file.read_text()) | {"num_attention_heads": 2})
    with pytest.raises(ValueError, match="'n_head' is 4, the model has heads=2"):
        pretrained.load(tmp_path)


@pytest.mark.quick_cases("Decoder--")
@pytest.mark.parametrize(
    "model, config, names",
    [
        (SMALL, CONFIG, "huggingface"),
        (ENCODER, ENCODER_CONFIG, "huggingface"),
        (
            models.ResNet.preset("resnet18"),
            {"architecture": "resnet18", "num_classes": 1000, "num_features": 512},
            "torchvision",
        ),
        (
            models.ViT.preset("vit_ti_16", classes=7),
            {
                "architecture": "vit_tiny_patch16_224",
                "num_classes": 7,
                "global_pool": "token",
                "num_features": 192,
            },
            "timm",
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, models.Model) else "",
)
def test_a_folder_determines_its_model(model, config, names, tmp_path):
    trees = model.init(jax.random.key(0), model.example())
    pretrained.save(model, *trees, tmp_path, names=names)
    written(tmp_path, config)
    loaded, params, state = pretrained.load(tmp_path)
    assert loaded == model
    assert jax.tree.structure((params, state)) == jax.tree.structure(tuple(trees))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves(trees))
    )


def test_a_folder_without_a_known_model(tmp_path):
    params, _ = SMALL.init(jax.random.key(0), SMALL.example())
    pretrained.save(SMALL, params, {}, tmp_path / "model.safetensors", names="huggingface")
    with pytest.raises(
        FileNotFoundError, match=r"has no config\.json, so its model is unknown; pass the model"
    ):
        pretrained.load(tmp_path)
    written(tmp_path, {"model_type": "lama"})
    with pytest.raises(
        ValueError,
        match="'model_type' is 'lama', which fnet does not support; did you mean 'llama'",
    ):
        pretrained.load(tmp_path)
    written(tmp_path, CONFIG | {"mlp_bias": 1})
    with pytest.raises(
        ValueError,
        match=r"describes a \w+ that fnet does not support: 'mlp_bias' is 1, expected true",
    ):
        pretrained.load(tmp_path)
    written(tmp_path, {"architecture": "resnet9000"})
    with pytest.raises(ValueError, match="'architecture' is 'resnet9000', expected"):
        pretrained.load(tmp_path)
    with pytest.raises(
        ValueError, match="expected a model or the name of a preset before the path"
    ):
        pretrained.load(tmp_path, tmp_path)
    with pytest.raises(TypeError, match="pass the path of the weights for this Decoder"):
        pretrained.load(SMALL)


def test_config_json_rather_than_the_names_says_what_epsilon_is(tmp_path):
    """Names imply a value where no config.json is there."""
    model = dataclasses.replace(ENCODER, epsilon=1e-5)
    pretrained.save(
        ENCODER,
        ENCODER.init(jax.random.key(0), ENCODER.example())[0],
        {},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ValueError, match="with the names of huggingface need a Bert with epsilon=1e-12"
    ):
        pretrained.load(model, tmp_path)
    written(tmp_path, ENCODER_CONFIG | {"layer_norm_eps": 1e-5})
    pretrained.load(model, tmp_path)
    with pytest.raises(ValueError, match="'layer_norm_eps' is 1e-05, the model has epsilon=1e-12"):
        pretrained.load(ENCODER, tmp_path)


def test_files_of_two_frameworks_in_one_folder(tmp_path):
    model = models.ViT(32, 1, 2, classes=3, patch=16, size=32)
    pretrained.save(
        model, model.init(jax.random.key(0), model.example())[0], {}, tmp_path, names="timm"
    )
    written(
        tmp_path,
        VIT
        | {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 32,
            "intermediate_size": 128,
            "layer_norm_eps": 1e-6,
            "id2label": {"0": "a", "1": "b", "2": "c"},
        },
    )
    with pytest.raises(
        ValueError,
        match=r"has the names of timm, but config.json next to it describes weights with "
        "the names of huggingface; move one of them to another folder",
    ):
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
    with pytest.raises(
        ValueError, match=r"is 'tower': .* A Tower reads none \(its class has no CONFIGS\)"
    ):
        pretrained.load(Tower(), tmp_path)
    Tower.CONFIGS = {
        "tower": _config.Config(
            {"model_type": _config.Must(("tower",)), "hidden_act": _config.Must(("none",))},
            names=("torch",),
        )
    }
    with pytest.raises(ValueError, match="'hidden_act' is 'relu', expected 'none'"):
        pretrained.load(Tower(), tmp_path)
    written(tmp_path, {"model_type": "tower", "hidden_act": "none"})
    pretrained.load(Tower(), tmp_path)


# What Decoder's fields compute.


def numpy_llama(params, tokens, model, rates):
    """Logits in float64, by the formulas: no scan, no cache, a mask made by comparing positions."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    dim = model.head_dim or model.width // model.heads

    def norm(scale, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.epsilon) * scale

    def turned(x):  # [time, heads, dim]
        angles = np.arange(len(x))[:, None, None] * rates
        a, b = np.split(x, 2, -1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1
        )

    x, time = params["embed"]["embedding"][tokens], len(tokens)
    ahead = np.arange(time)[:, None] - np.arange(time)[None]
    seen = (ahead >= 0) & (ahead < (model.window or time))
    for i in range(model.depth):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        kernels = {
            name: block["attention"][name]["kernel"] for name in ("query", "key", "value", "out")
        }
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
    slow = copy.copy(base)  # Llama 3.1's, branch by branch
    for i, rate in enumerate(base):
        wavelength = 2 * np.pi / rate
        if wavelength > 40 / 1.0:
            slow[i] = rate / 8
        elif wavelength >= 40 / 4.0:
            smooth = (40 / wavelength - 1) / (4 - 1)
            slow[i] = (1 - smooth) * rate / 8 + smooth * rate
    assert 0 < (slow == base).sum() < (slow != base / 8).sum() < 8  # all three branches
    numbers = np.random.default_rng(0)
    tokens = numbers.integers(0, 64, 40)
    for changes, rates in (
        ({"window": 5}, base),
        ({"rope_scaling": models.LinearScaling(4.0)}, base / 4),
        ({"rope_scaling": models.Llama3Scaling(8.0, 1.0, 4.0, 40), "window": 7}, slow),
    ):
        model = dataclasses.replace(SMALL, head_dim=16, **changes)
        params = jax.tree.map(
            lambda leaf: jnp.asarray(numbers.normal(0, 0.3, leaf.shape), jnp.float32),
            model.spec(model.example())[0],
        )
        logits, want = (
            jax.jit(model)(params, tokens[None])[0],
            numpy_llama(params, tokens, model, rates),
        )
        assert np.abs(logits - want).max() < 1e-5 * np.abs(want).max()
        plain = jax.jit(dataclasses.replace(SMALL, head_dim=16))(params, tokens[None])[0]
        assert np.abs(plain - want).max() > 1e-2 * np.abs(want).max()  # what was computed before


def test_scalings_are_checked():
    with pytest.raises(ValueError, match="LinearScaling: expected a factor above 0, got -1"):
        models.LinearScaling(-1)
    with pytest.raises(
        ValueError,
        match="Llama3Scaling: expected factor > 0, 0 < low_freq_factor < high_freq_factor",
    ):
        models.Llama3Scaling(8.0, 4.0, 1.0, 8192)
