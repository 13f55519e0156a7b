"""The image models against torchvision's, timm's and transformers' own, through the files that
those write.

The logits stand in tests/reference/vision.npz; tests/reference/make_vision_fixtures.py made them.
"""

import dataclasses
import functools
import json
import math
import pathlib

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from safetensors.numpy import load_file, save_file

from fnet import models
from fnet.models import pretrained

REFERENCE = pathlib.Path(__file__).parents[1] / "reference"
SMALL_RESNET = dict(depths=(1, 2, 1, 1), classes=10)
SMALL_VIT = models.ViT(32, 2, 2, classes=10, patch=8, size=32, hidden=64)
MODELS = {
    "alexnet-torchvision": models.AlexNet(classes=10, width=4, hidden=32),
    "resnet_basic-torchvision": models.ResNet(**SMALL_RESNET, bottleneck=False),
    "resnet_bottleneck-torchvision": models.ResNet(**SMALL_RESNET),
    "mobilenet_v2-torchvision": models.MobileNetV2(classes=10, width=0.25),
    "mobilenet_v2-timm": models.MobileNetV2(classes=10, width=0.25),
    "vit-torchvision": SMALL_VIT,
    "vit-timm": SMALL_VIT,
    "vit-huggingface": dataclasses.replace(SMALL_VIT, epsilon=1e-12),
}
PUBLISHED = {  # parameters: torchvision's pages, and timm's for Ti and S
    (models.AlexNet, "alexnet"): 61_100_840,
    (models.MobileNetV2, "mobilenet_v2"): 3_504_872,
    (models.ResNet, "resnet18"): 11_689_512,
    (models.ResNet, "resnet34"): 21_797_672,
    (models.ResNet, "resnet50"): 25_557_032,
    (models.ResNet, "resnet101"): 44_549_160,
    (models.ResNet9, "resnet9"): 6_573_120,
    (models.ViT, "vit_ti_16"): 5_717_416,
    (models.ViT, "vit_s_16"): 22_050_664,
    (models.ViT, "vit_b_16"): 86_567_656,
    (models.ViT, "vit_b_32"): 88_224_232,
    (models.ConvNeXt, "convnext_tiny"): 28_589_128,  # timm's
    (models.ConvNeXt, "convnext_small"): 50_223_688,
    (models.ConvNeXt, "convnext_base"): 88_591_464,
    (models.ConvNeXt, "convnext_large"): 197_767_336,
    (models.EfficientNet, "efficientnet_b0"): 5_288_548,
    (models.EfficientNet, "efficientnet_b1"): 7_794_184,
    (models.EfficientNet, "efficientnet_b2"): 9_109_994,
    (models.EfficientNet, "efficientnet_b3"): 12_233_232,
    (models.EfficientNet, "efficientnet_b4"): 19_341_616,
    (models.EfficientNet, "efficientnet_lite0"): 4_652_008,
    (models.DeiT, "deit_ti_16_distilled"): 5_910_800,  # timm's
    (models.DeiT, "deit_s_16_distilled"): 22_436_432,
    (models.DeiT, "deit_b_16_distilled"): 87_338_192,
    (models.DINOv2, "dinov2_s_14"): 22_056_192,  # transformers' Dinov2Model, without its mask token
    (models.DINOv2, "dinov2_b_14"): 86_579_712,
    (models.DINOv2, "dinov2_l_14"): 304_367_616,
    (models.DINOv2, "dinov2_g_14"): 1_136_479_232,
    (models.CLIP, "clip-vit-base-patch32"): 151_277_313,  # transformers' CLIPModel
    (models.CLIP, "clip-vit-base-patch16"): 149_620_737,
    (models.CLIP, "clip-vit-large-patch14"): 427_616_513,
    (models.CLIP, "clip-vit-large-patch14-336"): 427_944_193,
}


@functools.cache
def fixture(name):
    with np.load(REFERENCE / "vision.npz") as arrays:
        return {key: arrays[f"{name}/{key}"] for key in ("logits", "shapes", "checksum", "size")}


def written(name, folder):
    """The file that the other library would write."""
    held = fixture(name)
    weights = drawn.weights(json.loads(str(held["shapes"])))
    assert drawn.checksum(weights) == held["checksum"], (
        "this NumPy draws other numbers: make vision.npz again"
    )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights, drawn.images(name, (2, int(held["size"]), int(held["size"]), 3))


@functools.partial(jax.jit, static_argnums=0)  # one program for all tests of a model
def logits(model, params, state, x):
    return model(params, x, state=state)[0]


def near(got, want, tolerance=2e-5):
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.quick_cases("resnet_bottleneck-torchvision", "vit-huggingface")
@pytest.mark.parametrize(
    "name",
    sampled(MODELS, ["resnet_bottleneck-torchvision", "mobilenet_v2-timm", "vit-huggingface"]),
)
def test_logits_and_the_way_back(name, tmp_path):
    model = MODELS[name]
    weights, x = written(name, tmp_path)
    names = pretrained.names_of(model, tmp_path)
    assert names == name.split("-")[1]
    params, state = pretrained.load(model, tmp_path)
    near(logits(model, params, state, x), fixture(name)["logits"])

    back = load_file(
        pretrained.save(
            model, params, state, tmp_path / "back.safetensors", names=names, like=tmp_path
        )
    )
    assert list(back) == list(load_file(tmp_path / "model.safetensors"))
    for key, array in weights.items():
        assert back[key].dtype == array.dtype
        np.testing.assert_array_equal(back[key], array, key)


@pytest.mark.exhaustive
def test_the_two_versions_of_resnet_differ_in_their_strides_alone(tmp_path):
    name = "resnet_v1-torchvision"
    _, x = written(name, tmp_path)
    model = MODELS["resnet_bottleneck-torchvision"]
    params, state = pretrained.load(model, tmp_path)
    near(
        logits(dataclasses.replace(model, version="v1"), params, state, x), fixture(name)["logits"]
    )


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(
    ("cls", "preset"), PUBLISHED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_published_parameter_counts(cls, preset):
    model = cls.preset(preset)
    example = model.example()
    spec = model.spec(*(example if isinstance(example, tuple) else (example,)))
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(spec.params))
        == PUBLISHED[cls, preset]
    )


def test_every_preset_is_counted():
    classes = {cls for cls, _ in PUBLISHED}
    assert {(cls, preset) for cls in classes for preset in cls.PRESETS} == set(PUBLISHED)
    assert all(set(cls.HUB) <= set(cls.PRESETS) for cls in classes)


@pytest.mark.parametrize(
    ("name", "cls", "resize"), [("torchvision", models.ResNet, 28), ("timm", models.ViT, 26)]
)
@pytest.mark.parametrize("size", ["45x37", "37x61"])
def test_photos_are_prepared_as_the_weights_were_trained(name, cls, resize, size):
    Image = pytest.importorskip("PIL.Image")

    image = dataclasses.replace(cls.NAMES[name].image, size=24, resize=resize)
    with np.load(REFERENCE / "vision.npz") as arrays:
        pixels, want = (arrays[f"photo-{name}-{size}/{part}"] for part in ("pixels", "input"))
    got = image.normalize(image.crop(Image.fromarray(pixels)))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_photos_in_other_ways():
    Image = pytest.importorskip("PIL.Image")

    photo = Image.fromarray(np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3))
    caffe = models.ResNet.NAMES["keras"].image
    np.testing.assert_allclose(
        caffe.normalize(np.array(photo))[1, 2], np.array([20, 19, 18]) - caffe.mean, rtol=1e-6
    )
    np.testing.assert_array_equal(
        caffe.normalize(jnp.array(photo)), caffe.normalize(np.array(photo))
    )
    squashed = models.ViT.NAMES["huggingface"].image.at(2)
    assert squashed.crop(photo).shape == (2, 2, 3) and squashed.crop(photo.convert("L")).shape == (
        2,
        2,
        3,
    )
    assert (caffe.at(112).resize, caffe.at(112).size, squashed.resize) == (128, 112, None)


def test_resnet9_against_plain_jax():
    model, x = models.ResNet9(classes=3, width=4), drawn.images("resnet9", (2, 16, 16, 3))
    spec = model.spec(x)
    params, state = jax.tree.map(
        lambda leaf: 0.1 + 0.2 * drawn.images(str(leaf.shape), leaf.shape) ** 2, tuple(spec)
    )

    def conv(place, x):
        norm, stats = place[0]["norm"], place[1]["norm"]
        x = jax.lax.conv_general_dilated(
            x,
            place[0]["conv"]["kernel"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        row = lambda a: a[None, None, None]
        x = (x - row(stats["mean"])) / jnp.sqrt(row(stats["var"]) + 1e-5) * row(
            norm["scale"]
        ) + row(norm["bias"])
        return jax.nn.relu(x)

    @jax.jit
    def plain(x):
        for s in range(4):
            stage = params[f"stage{s}"], state[f"stage{s}"]
            x = conv(stage, x)
            if s:
                x = x.reshape(2, x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))
            if s in (1, 3):
                first, second = ([part[f"residual{i}"] for part in stage] for i in (1, 2))
                x = x + conv(second, conv(first, x))
        return x.max((1, 2)) @ params["head"]["kernel"] / 8

    near(logits(model, params, state, x), plain(x))


@pytest.mark.exhaustive
def test_features_are_what_the_last_layer_sees():
    model = SMALL_VIT
    draw = lambda leaf: drawn.images(str(leaf.shape), leaf.shape)
    params = jax.tree.map(draw, model.spec(model.example()).params)
    x = drawn.images("x", (2, 32, 32, 3))
    features = jax.jit(model.features)(params, x)
    assert features.shape == (2, 32)
    head = params["head"]
    near(features @ head["kernel"] + head["bias"][None], logits(model, params, {}, x))


@pytest.mark.parametrize(
    ("model", "shape", "text"),
    [
        (
            models.AlexNet(),
            (1, 200, 224, 3),
            r"reduce to 6 x 6, such as 224 x 224; \(1, 200, 224, 3\) is reduced to 5 x 6",
        ),
        (
            models.ViT(8, 1, 2),
            (1, 225, 224, 3),
            r"images \[batch, 224, 224, channels\], with a size that is a multiple of patch=16; "
            r"got \(1, 225, 224, 3\)",
        ),
        (models.ViT(8, 1, 2, size=30), (1, 30, 30, 3), "a multiple of patch=16"),
        (
            models.ResNet((1,), version="v2"),
            (1, 32, 32, 3),
            "ResNet: version must be 'v1' or 'v1.5'; got 'v2'",
        ),
    ],
)
def test_inputs_and_fields_without_sense(model, shape, text):
    with pytest.raises(ValueError, match=text):
        model.spec(jax.ShapeDtypeStruct(shape, jnp.float32))
