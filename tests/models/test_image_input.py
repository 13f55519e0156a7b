"""The preprocessing of photos, read from the files beside published weights."""

import json

import pytest

from fnet import models

VIT = {"do_normalize": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
       "resample": 2, "size": 224, "image_processor_type": "ViTImageProcessor"}
DINO = {"crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_rescale": True, "do_resize": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3,
        "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 256}}
CONVNEXT = DINO | {"crop_pct": 0.875, "size": {"shortest_edge": 224}}
TIMM = {"input_size": [3, 224, 224], "crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic",
        "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "tag": "augreg"}
HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def written(folder, config, timm=False):
    name = "config.json" if timm else "preprocessor_config.json"
    (folder / name).write_text(json.dumps({"architecture": "x", "pretrained_cfg": config} if timm else config))
    return folder


@pytest.mark.parametrize(("config", "timm", "expected"), [
    (VIT, False, models.ImageInput(resize=None, **HALF)),
    (VIT | {"size": {"height": 384, "width": 384}}, False, models.ImageInput(size=384, resize=None, **HALF)),
    (DINO, False, models.ImageInput(resample="bicubic", scale=0.00392156862745098)),
    (CONVNEXT, False, models.ImageInput(resample="bicubic", scale=0.00392156862745098)),
    (TIMM, True, models.ImageInput(resize=248, resample="bicubic", **HALF)),
])
def test_read(config, timm, expected, tmp_path):
    assert models.ImageInput.read(written(tmp_path, config, timm)) == expected


@pytest.mark.parametrize(("config", "timm", "text"), [
    (VIT | {"do_normalize": False}, False, "'do_normalize' is False, expected True"),
    (VIT | {"resample": 1}, False, r"the resampling is 1, expected bilinear \(2\) or bicubic \(3\)"),
    (VIT | {"image_mean": [0.5]}, False, r"'image_mean' is \[0.5\], expected three numbers"),
    (VIT | {"size": {"height": 224, "width": 256}}, False, "expected a positive integer"),
    (DINO | {"do_center_crop": False}, False, "expected do_center_crop true"),
    (TIMM | {"input_size": [1, 28, 28]}, True, r"expected \[3, size, size\]"),
    (TIMM | {"crop_mode": "squash"}, True, "'crop_mode' is 'squash', expected 'center'"),
    (TIMM | {"crop_pct": 0}, True, r"'crop_pct' is 0, expected a number in \(0, 1\]"),
    ({"tag": "a"}, True, "does not describe a preprocessing that fnet supports"),
])
def test_other_values(config, timm, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        models.ImageInput.read(written(tmp_path, config, timm))


def test_a_folder_without_preprocessing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no preprocessor_config.json, and no config.json with"):
        models.ImageInput.read(tmp_path)
