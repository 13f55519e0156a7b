"""The preprocessing of photos, read from the files beside published weights."""

import io
import json

import numpy as np
import pytest

from fnet import models

VIT = {
    "do_normalize": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "size": 224,
    "image_processor_type": "ViTImageProcessor",
}
DINO = {
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 256},
}
CONVNEXT = DINO | {"crop_pct": 0.875, "size": {"shortest_edge": 224}}
TIMM = {
    "input_size": [3, 224, 224],
    "crop_pct": 0.9,
    "crop_mode": "center",
    "interpolation": "bicubic",
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "tag": "augreg",
}
HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def written(folder, config, timm=False):
    name = "config.json" if timm else "preprocessor_config.json"
    (folder / name).write_text(
        json.dumps({"architecture": "x", "pretrained_cfg": config} if timm else config)
    )
    return folder


@pytest.mark.parametrize(
    ("config", "timm", "expected"),
    [
        (VIT, False, models.ImageInput(resize=None, **HALF)),
        (
            VIT | {"size": {"height": 384, "width": 384}},
            False,
            models.ImageInput(size=384, resize=None, **HALF),
        ),
        (DINO, False, models.ImageInput(resample="bicubic", scale=0.00392156862745098)),
        (CONVNEXT, False, models.ImageInput(resample="bicubic", scale=0.00392156862745098)),
        (TIMM, True, models.ImageInput(resize=248, resample="bicubic", **HALF)),
    ],
)
def test_read(config, timm, expected, tmp_path):
    assert models.ImageInput.read(written(tmp_path, config, timm)) == expected


@pytest.mark.parametrize(
    ("config", "timm", "text"),
    [
        (VIT | {"do_normalize": False}, False, "'do_normalize' is False, expected True"),
        (
            VIT | {"resample": 1},
            False,
            r"the resampling is 1, expected bilinear \(2\) or bicubic \(3\)",
        ),
        (VIT | {"image_mean": [0.5]}, False, r"'image_mean' is \[0.5\], expected three numbers"),
        (VIT | {"size": {"height": 224, "width": 256}}, False, "expected a positive integer"),
        (DINO | {"do_center_crop": False}, False, "expected do_center_crop true"),
        (
            VIT | {"do_flip_channel_order": True},
            False,
            "'do_flip_channel_order' is True, expected False",
        ),
        (
            VIT | {"do_thumbnail": True},
            False,
            "the field 'do_thumbnail' is True, which may change the images",
        ),
        (
            VIT | {"pad_size": {"height": 9}},
            False,
            "the field 'pad_size' is {'height': 9}, which may change",
        ),
        (
            VIT | {"size": 224, "default_to_square": False},
            False,
            "'size' is the shortest edge, expected do_center_crop",
        ),
        (TIMM | {"label_offset": 1}, True, "'label_offset' is 1, expected 0"),
        (TIMM | {"to_bgr": True}, True, "the field 'to_bgr' is True, which may change the images"),
        (TIMM | {"input_size": [1, 28, 28]}, True, r"expected \[3, size, size\]"),
        (TIMM | {"crop_mode": "squash"}, True, "'crop_mode' is 'squash', expected 'center'"),
        (TIMM | {"crop_pct": 0}, True, r"'crop_pct' is 0, expected a number in \(0, 1\]"),
        ({"tag": "a"}, True, "does not describe a preprocessing that fnet supports"),
    ],
)
def test_other_values(config, timm, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        models.ImageInput.read(written(tmp_path, config, timm))


def test_unknown_fields_that_are_off(tmp_path):
    without = models.ImageInput.read(written(tmp_path, VIT))
    assert (
        models.ImageInput.read(written(tmp_path, VIT | {"do_thumbnail": False, "pad_size": None}))
        == without
    )


def test_a_folder_without_preprocessing(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"has no preprocessor_config.json, and no config.json with"
    ):
        models.ImageInput.read(tmp_path)


def _opened(array, kind):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return Image.open(file)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_gray_levels_of_16_bits_keep_their_contrast(kind):
    """Pillow's own conversion makes every level above 255 white."""
    pytest.importorskip("PIL")
    levels = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    photo = _opened(levels, kind)
    pixels = np.asarray(models.ImageInput.rgb(photo))
    np.testing.assert_array_equal(
        pixels, np.repeat(np.round(levels / 257.0).astype(np.uint8)[..., None], 3, axis=2)
    )
    assert models.ImageInput(size=64, resize=None).crop(photo)[[0, -1], [0, -1]].tolist() == [
        [0] * 3,
        [255] * 3,
    ]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_pixels_of_unknown_range_are_refused(dtype):
    pytest.importorskip("PIL")
    with pytest.raises(ValueError, match="has 32-bit values of unknown range: scale them to"):
        models.ImageInput().crop(_opened(np.full((4, 4), 70000, dtype), "TIFF"))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "RGB"])
def test_other_modes_are_those_of_pillow(mode):
    Image = pytest.importorskip("PIL.Image")
    photo = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    ).convert(mode)
    np.testing.assert_array_equal(
        np.asarray(models.ImageInput.rgb(photo)), np.asarray(photo.convert("RGB"))
    )
