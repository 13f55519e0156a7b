"""Fine-tuning and classifying as a user runs them, with a backbone that is small enough for a test."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest
from checks import same

from fnet import compress, models, report
from fnet import hardware as hw
from fnet import training as tr
from fnet.models import pretrained

pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import classify_image as classify  # noqa: E402
import finetune  # noqa: E402

# The experiment itself, in a world where a small network is published, too.
TINY = """
import runpy, sys
from fnet import models
models.ResNet.PRESETS["tiny"] = dict(depths=(1, 1), bottleneck=False, width=8)
sys.argv = sys.argv[1:]
sys.path.insert(0, {folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = models.ResNet((1, 1), bottleneck=False, width=8)


def start(script, *flags, **variables):
    drop = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment |= {"XLA_FLAGS": os.environ["FNET_TEST_XLA_FLAGS"], **variables}
    folder = str(ROOT / "experiments")
    return subprocess.Popen(
        [sys.executable, "-c", TINY.format(folder=folder), f"{folder}/{script}", *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def finished(process, code=0):
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, out + err
    return out if code == 0 else err


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(
        models.ResNet.PRESETS, "tiny", dict(depths=(1, 1), bottleneck=False, width=8)
    )
    monkeypatch.setattr(finetune.photos, "PRESETS", (*finetune.photos.PRESETS, "tiny"))


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    numbers = np.random.default_rng(0)
    draw = lambda leaf: (
        numbers.standard_normal(leaf.shape) / np.sqrt(max(np.prod(leaf.shape[:-1]), 1))
    ).astype("f4")
    params, state = SMALL.spec(SMALL.example())
    params = jax.tree.map(
        lambda leaf: draw(leaf) if len(leaf.shape) > 1 else np.ones(leaf.shape, "f4"), params
    )
    pretrained.save(
        SMALL, params, jax.tree.map(lambda leaf: np.ones(leaf.shape, "f4"), state), folder
    )
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Ten photos of each of two colors, of several sizes and kinds."""
    folder, numbers = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, color in {"red": (220, 30, 30), "sea blue": (20, 60, 200)}.items():
        (folder / name).mkdir()
        for i in range(10):
            pixels = np.clip(numbers.normal(color, 20, (40 + 3 * i, 60 - 2 * i, 3)), 0, 255).astype(
                np.uint8
            )
            Image.fromarray(pixels).save(folder / name / f"{i}.{('png', 'jpg')[i % 2]}")
    return folder


def policy():
    return hw.policy("float32")


def config(weights, **changes):
    known = {"model": "tiny", "weights": str(weights), "precision": "float32"}
    return finetune.Config(**finetune.PRESETS[changes.get("mode", "linear")] | known | changes)


@pytest.mark.exhaustive
def test_a_probe_learns_photos_and_the_classifier_names_them(
    tiny, weights, photos, tmp_path, capsys
):
    probe = start(
        "finetune.py",
        "--model=tiny",
        f"--weights={weights}",
        "--dataset=photos",
        f"--data_dir={photos}",
        "--steps=60",
        "--size=64",
        "--learning_rate=0.05",
        "--precision=float32",
        f"--workdir={tmp_path}",
    )
    out = finished(probe)
    for words in (
        "chip: ",
        "policy: ",
        "tiny, torchvision names: ",
        "images of 64 x 64",
        "photos: 16 training images, 4 test images, 2 classes",
        "features: 16 of each image, 20 images in ",
    ):
        assert words in out
    assert out.splitlines()[-1] == "test accuracy 1.0000"
    assert json.loads((tmp_path / "config.json").read_text())["mode"] == "linear"
    assert json.loads((tmp_path / "labels.json").read_text()) == ["red", "sea blue"]
    for name in ("curves.png", "confusion.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert predictions["classes"] == ["red", "sea blue"] and np.trace(predictions["confusion"]) == 4

    # All but the last layer is what it was.
    params, _ = pretrained.load(dataclasses.replace(SMALL, classes=2), tmp_path)
    before, _ = pretrained.load(SMALL, weights)
    assert params["head"]["kernel"].shape == (16, 2)
    same({**params, "head": before["head"]}, before)

    named = start(
        "classify_image.py",
        f"--weights={tmp_path}",
        "--top=1",
        photos / "red" / "1.jpg",
        photos / "sea blue" / "0.png",
    )  # the run says which model and size
    again = finetune.train(
        config(
            weights, dataset="photos", data_dir=str(photos), steps=60, size=64, learning_rate=0.05
        ),
        tmp_path,
        policy(),
    )
    assert again["accuracy"] == 1 and "resumed at step 60" in capsys.readouterr().out
    lines = finished(named).splitlines()
    assert lines[0].endswith("64 x 64 pixels, 2 labels")
    assert [line.split("  ")[-1] for line in lines[2::2]] == ["red", "sea blue"]


@pytest.mark.exhaustive
def test_the_whole_network_is_trained(tiny, weights, tmp_path, capsys):
    options = config(
        weights, mode="full", size=32, steps=3, batch_size=64, augment="flip", ema=0.9, early_stop=5
    )
    finetune.train(options, tmp_path, policy())
    out = capsys.readouterr().out
    assert (
        "digits: 1437 training images, 360 test images, 10 classes" in out
        and "validation/accuracy" in out
    )
    params, state = pretrained.load(dataclasses.replace(SMALL, classes=10), tmp_path)
    before, were = pretrained.load(SMALL, weights)
    assert params["head"]["kernel"].shape == (16, 10)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params["stage1"], before["stage1"])
    assert all(jax.tree.leaves(moved))
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, state, were)))

    held, data = finetune.network(options), finetune.load(options, None)
    shifted = jax.eval_shape(
        finetune.AUGMENT["flip_crop"], jax.random.key(0), data.train_images[:2]
    )
    assert shifted.shape == (2, 8, 8, 1)
    frozen = dataclasses.replace(options, freeze_norms=True)
    model = dataclasses.replace(SMALL, classes=10)
    _, params, state, forward = finetune.everything(frozen, policy(), held, model, data)
    _, new = jax.jit(forward)(params, state, data.train_images[:2], jax.random.key(0))
    same(new, were)


@pytest.mark.exhaustive
def test_changes_of_low_rank(tiny, weights, tmp_path, capsys):
    """The result is the published network with small changes; PEFT's factors of a convolution give
    the same."""
    options = config(weights, mode="lora", lora=2, base="int4", size=32, steps=3, batch_size=64)
    finetune.train(options, tmp_path, policy())
    assert "base=int4: 1,034 parameters trained" in capsys.readouterr().out
    model = dataclasses.replace(SMALL, classes=10)
    params, _ = pretrained.load(model, tmp_path)
    before, _ = pretrained.load(SMALL, weights)
    same(params["stem"], before["stem"])
    base = compress.quantize(
        before, {"stage2/block0/conv2": compress.Int4(16), "stage.*/kernel": compress.Int4(8)}
    )
    read = compress.merge(
        pretrained.load_adapter(
            model, {**base, "head": params["head"]}, tmp_path / "adapter", names="torchvision"
        )
    )
    for name in ("conv1", "conv2"):
        kernel = read["stage2"]["block0"][name]["kernel"]
        np.testing.assert_allclose(
            kernel, params["stage2"]["block0"][name]["kernel"], rtol=1e-5, atol=1e-6
        )
        assert not np.array_equal(
            kernel, compress.materialize(base)["stage2"]["block0"][name]["kernel"]
        )
    finetune.train(dataclasses.replace(options, weights=str(weights)), tmp_path, policy())
    assert "resumed at step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(model="resnet5"), "--model=resnet5: use alexnet, resnet18"),
        (dict(dataset="mnst"), "--dataset=mnst: use digits, mnist, fashion_mnist, cifar10, photos"),
        (dict(size=0), r"--size=0: expected a number in \[1, 4096\]"),
        (
            dict(mode="lora"),
            "--mode=lora --lora=0: --mode=lora needs a rank, such as --lora=8, and a rank needs",
        ),
        (dict(lora=8), "--mode=linear --lora=8: --mode=lora needs a rank"),
        (dict(base="int4"), "--base=int4 is the format of the frozen kernels of --lora=RANK"),
        (dict(base="int3", lora=8), "--base=int3: use none, int8, int4, nf4"),
        (
            dict(dataset="text"),
            "--model=resnet50 --dataset=text: --dataset=text is for stories260k, stories15m",
        ),
        (
            dict(model="stories15m"),
            "--model=stories15m --dataset=digits: --dataset=text is for stories260k",
        ),
        (
            dict(model="stories15m", dataset="text"),
            "--mode=linear is for images: use --mode=full or --lora=8",
        ),
        (dict(model="stories15m", dataset="text", mode="full", size=8), "--size is for images"),
        (dict(context=8), "--context=8 is for --dataset=text"),
        (
            dict(augment="flip"),
            "--mode=linear sees each image once: --augment and --freeze_norms are for --mode=full",
        ),
    ],
)
def test_a_configuration_without_sense(tiny, changes, text):
    with pytest.raises(ValueError, match=text):
        finetune.checked(config("", **{"model": "resnet50"} | changes))


def test_weights_and_data_that_do_not_fit(tiny, weights, photos, tmp_path, monkeypatch):
    monkeypatch.setenv("FNET_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    vit = models.ViT(8, 1, 2, classes=3, hidden=8, patch=112)
    monkeypatch.setitem(
        models.ViT.PRESETS,
        "tiny_vit",
        dict(width=8, depth=1, heads=2, hidden=8, classes=3, patch=112),
    )
    params, state = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, "f4"), tuple(vit.spec(vit.example()))
    )
    pretrained.save(vit, params, state, tmp_path / "vit.safetensors", names="timm")
    for changes, text in {
        ("mobilenet_v2", str(weights)): "contains no weights of a MobileNetV2 with the names of "
        "torchvision or timm",
        (
            "alexnet",
            None,
        ): "the weights 'alexnet' are not on this disk: .* write its model.safetensors in Python",
        (
            "tiny_vit",
            str(tmp_path / "vit.safetensors"),
        ): "--size=64: tiny_vit takes images of 224 pixels alone",
    }.items():
        with pytest.raises((ValueError, OSError), match=text):
            finetune.network(finetune.Config(size=64, **dict(zip(("model", "weights"), changes))))
    image = models.ResNet.NAMES["torchvision"].image
    with pytest.raises(
        ValueError, match="--dataset=photos: --data_dir is the folder of DIR/CLASS/"
    ):
        finetune.checked(config("", dataset="photos", model="resnet50"))
    with pytest.raises(
        ValueError, match="two classes or more, two or more in each; found no folder"
    ):
        finetune.load(config(weights, dataset="photos", data_dir=str(photos / "red")), image)


def png(width, height, data=b""):
    chunk = lambda kind, body: (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def jpeg(width, height):
    return (
        b"\xff\xd8\xff\xc0"
        + struct.pack(">HBHHB", 17, 8, height, width, 3)
        + bytes(range(9))
        + b"\xff\xd9"
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (png(60_000, 60_000), "pixels"),  # beyond what Pillow itself opens
        (png(10_000, 10_000), "it has 10000 x 10000 pixels, at most 50,000,000 are read"),
        (png(2**31 - 1, 2**31 - 1), "pixels"),
        (jpeg(60_000, 60_000), "pixels"),
        (png(8, 8), "p.png: "),
        (png(8, 8, zlib.compress(bytes(99))), "p.png: "),
        (png(8, 8, b"x" * 99)[:60], "p.png: "),
        (png(0, 8), "p.png"),
        (b"\x89PNG\r\n\x1a\n" + bytes(99), "p.png"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify image file"),
        (b"", "cannot identify image file"),
    ],
    ids=range(11),
)
def test_hostile_photos(tmp_path, raw, text):
    (tmp_path / "p.png").write_bytes(raw)
    with pytest.raises((ValueError, OSError), match=text) as error:
        classify.photos.opened(tmp_path / "p.png")
    assert str(tmp_path / "p.png") in str(error.value)


def test_photos_come_split_or_are_split(photos, tmp_path):
    image = dataclasses.replace(models.ResNet.NAMES["torchvision"].image, size=8, resize=9)
    data = finetune.photos.dataset(photos, image)
    assert data.classes == ("red", "sea blue") and data.train_images.shape == (16, 8, 8, 3)
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == (
        [0] * 8 + [1] * 8,
        [0, 0, 1, 1],
    )
    assert (data.test_images[:2, ..., 0] > 150).all() and (data.test_images[2:, ..., 0] < 100).all()
    shutil.copytree(photos, tmp_path / "train")
    shutil.copytree(photos / "red", tmp_path / "test" / "red")
    with pytest.raises(ValueError, match="train has the classes red, sea blue, test has red"):
        finetune.photos.dataset(tmp_path, image)
    shutil.copytree(photos / "sea blue", tmp_path / "test" / "sea blue")
    assert len(finetune.photos.dataset(tmp_path, image).test_labels) == 20


def test_labels(tmp_path):
    def read(**changes):
        return classify.read_labels(classify.Config(**changes), tmp_path)

    assert (len(read()), read()[0], read()[999]) == (1000, "tench", "toilet tissue")
    (tmp_path / "config.json").write_text('{"steps": 3}')
    assert len(read()) == 1000
    (tmp_path / "config.json").write_text('{"id2label": {"0": "tabby_cat", "1": "dog"}}')
    assert read() == ["tabby cat", "dog"]
    (tmp_path / "labels.json").write_text('["a", "b", "c"]')
    assert read() == ["a", "b", "c"]
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    assert read(labels=str(tmp_path / "names.txt")) == ["one", "two"]
    for text in ('{"a": "b"}', '{"1": "b"}', "3", "{", "[" * 10**5):
        (tmp_path / "labels.json").write_text(text)
        with pytest.raises(
            ValueError,
            match=r"labels.json holds no labels: a list of names, or names by the numbers",
        ):
            read()
    with pytest.raises(ValueError, match=r"--top=0: expected a number in \[1, 1000000\]"):
        classify.checked(classify.Config(top=0))
    with pytest.raises(ValueError, match="--model=gpt2: use alexnet, "):
        classify.checked(classify.Config(model="gpt2"))


def saved(model, folder, names, preprocessor=None, **fields):
    """A folder of transformers or timm with random weights, with other fields in config.json."""
    draws = np.random.default_rng(1)
    params, state = jax.tree.map(
        lambda leaf: draws.normal(1, 0.1, leaf.shape).astype("f4"),
        tuple(model.spec(model.example())),
    )
    pretrained.save(model, params, state, folder, names=names)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return folder


VIT = models.ViT(8, 1, 2, classes=3, hidden=8, patch=8, size=16, epsilon=1e-12)
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
SQUARE = dict(
    do_resize=True,
    size=dict(height=16, width=16),
    resample=3,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    image_mean=MEAN,
    image_std=STD,
)
ANIMALS = {"0": "red_fox", "1": "sea", "2": "sun"}


@pytest.mark.exhaustive
def test_a_folder_of_an_image_classifier(photos, tmp_path):
    """config.json selects the model and the labels, preprocessor_config.json the preprocessing."""
    saved(VIT, tmp_path, "huggingface", SQUARE, id2label=ANIMALS)
    photo = photos / "red" / "0.png"
    running = start("classify_image.py", f"--weights={tmp_path}", "--top=3", photo)
    pixels = np.asarray(
        Image.open(photo).convert("RGB").resize((16, 16), Image.Resampling.BICUBIC), np.float32
    )
    model, params, _ = pretrained.load(tmp_path)
    assert model == VIT
    logits = np.asarray(model(params, ((pixels / 255 - MEAN) / STD).astype("f4")[None]))[0]
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    lines = finished(running).splitlines()
    assert lines[0] == f"ViT from {tmp_path}: 16 x 16 pixels, 3 labels" and lines[1] == str(photo)
    assert [line.split("  ")[-1] for line in lines[2:]] == [
        ["red fox", "sea", "sun"][i] for i in np.argsort(-shares)
    ]
    assert [float(line.split()[0]) for line in lines[2:]] == pytest.approx(
        sorted(shares)[::-1], abs=6e-4
    )


FOLDERS = {  # (model, names, preprocessing in a file, fields of config.json)
    "transformers": (VIT, "huggingface", SQUARE, dict(id2label=ANIMALS)),
    "timm": (
        models.MobileNetV2(classes=3, width=0.1),
        "timm",
        None,
        dict(pretrained_cfg=dict(input_size=[3, 16, 16], crop_pct=0.9, mean=MEAN, std=STD)),
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("mode", ["linear", "full", "lora"])
def test_any_folder_of_an_image_classifier_is_fine_tuned(kind, mode, photos, tmp_path, capsys):
    """The run's folder holds a folder of the same kind, which pretrained.load and classify_image.py
    read."""
    model, names, preprocessor, fields = FOLDERS[kind]
    folder = saved(model, tmp_path / "weights", names, preprocessor, **fields)
    settings = dict(model=None, mode=mode, dataset="photos", data_dir=str(photos), steps=3)
    settings |= {"lora": 2} if mode == "lora" else {}
    finetune.train(config(folder, **settings), tmp_path / "run", policy())
    assert f"{type(model).__name__}, {names} names: " in capsys.readouterr().out
    changed, params, state = pretrained.load(tmp_path / "run" / "merged")
    assert changed == dataclasses.replace(model, classes=2)
    read = classify.read(classify.Config(), tmp_path / "run")
    assert read[0] == changed and read[4] == ["red", "sea blue"]
    assert read[3] == models.ImageInput.read(folder)
    file = pretrained.load(changed, tmp_path / "run" / "model.safetensors")
    same(file, (params, state))
    before = pretrained.load(model, folder)[0]
    assert params["head"]["kernel"].shape == (before["head"]["kernel"].shape[0], 2)
    del params["head"], before["head"]
    kept = jax.tree.map(lambda a, b: bool((a == b).all()), params, before)
    assert all(jax.tree.leaves(kept)) == (mode == "linear")


def test_weights_that_describe_no_image_classifier(tmp_path):
    gpt = saved(models.GPT(9, 8, 1, 2, context=4), tmp_path / "gpt", "huggingface")
    with pytest.raises(
        ValueError,
        match="has a GPT, but --dataset=digits needs an image classifier: use --dataset=te",
    ):
        finetune.network(config(gpt, model=None))
    vit = saved(VIT, tmp_path / "vit", "huggingface", SQUARE)
    with pytest.raises(ValueError, match=r"ViT: expected images \[batch, 16, 16, channels\]"):
        finetune.network(config(vit, model=None, size=32))
    text = config(vit, model=None, dataset="text", mode="full", **finetune.TEXT_PRESETS["full"])
    with pytest.raises(ValueError, match="has a ViT, but --dataset=text needs a language model"):
        finetune.texts.network(text)
    deit = models.DeiT(8, 1, 2, classes=3, hidden=8, patch=8, size=16)
    params = dict(deit.spec(deit.example()).params)
    held = finetune.Network(deit, params, {}, "timm", deit.NAMES["timm"].image.at(16), tmp_path)
    with pytest.raises(ValueError, match="of DeiT would replace distillation_head, head; expected"):
        finetune.last_layer(config(vit), held, dataclasses.replace(deit, classes=2))


def test_the_model_that_is_trained_if_none_is_named(weights, tmp_path):
    assert finetune.described(str(saved(VIT, tmp_path / "vit", "huggingface")))
    assert finetune.described("org/name") and not finetune.described(None)
    shutil.copyfile(weights / "model.safetensors", tmp_path / "alone.safetensors")
    assert not finetune.described(str(tmp_path / "alone.safetensors"))


def test_help_lists_the_flags_of_a_script():
    process = start("finetune.py", "--help")  # absl exits with 1
    shown, err = process.communicate(timeout=180)
    assert process.returncode == 1 and not err
    for flag in (
        "--weights",
        "--mode",
        "--[no]freeze_norms",
        "--workdir",
        "--[no]restart",
        "--[no]debug",
    ):
        assert f"  {flag}: " in shown, flag


def test_a_folder_of_timm(tmp_path):
    cfg = dict(
        input_size=[3, 32, 32],
        crop_pct=0.8,
        crop_mode="center",
        interpolation="bicubic",
        mean=MEAN,
        std=STD,
    )
    small = models.MobileNetV2(classes=2, width=0.1)
    folder = saved(
        small,
        tmp_path,
        "timm",
        pretrained_cfg=cfg,
        label_names=["n01", "n02"],
        label_descriptions={"n01": "red fox"},
    )
    model, _, _, prepare, labels = classify.read(classify.Config(), folder)
    assert (
        model == small
        and labels == ["red fox", "n02"]
        and (prepare.size, prepare.resize) == (32, 40)
    )
    assert (prepare.resample, prepare.mean, prepare.std) == ("bicubic", tuple(MEAN), tuple(STD))
    assert classify.read(classify.Config(size=64), folder)[3].size == 64


def test_folders_that_the_classifier_cannot_read(tmp_path):
    folder, config = tmp_path / "vit", classify.Config()
    saved(VIT, folder, "huggingface")
    assert classify.read(config, folder)[3] == VIT.NAMES["huggingface"].image.at(
        16
    )  # no preprocessing is named
    (tmp_path / "two.txt").write_text("a\nb\n")
    for changes, preprocessor, text in (
        (
            dict(labels=str(tmp_path / "two.txt")),
            SQUARE,
            "two.txt has 2 labels, the model has 3 classes",
        ),
        (dict(size=32), SQUARE, r"ViT: expected images \[batch, 16, 16, channels\]"),
        (dict(), SQUARE | dict(resample=0), "the resampling is 0, expected bilinear"),
    ):
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        with pytest.raises(ValueError, match=text):
            classify.read(classify.Config(**changes), folder)
    bert = saved(models.Bert(9, 8, 1, 2, 8, context=4), tmp_path / "bert", "huggingface")
    with pytest.raises(
        ValueError, match="has a Bert without classes of images; expected an image classifier"
    ):
        classify.read(config, bert)
    (folder / "config.json").write_text(json.dumps({"num_classes": 3}))
    assert classify.read_labels(config, folder, 3) == ["class 0", "class 1", "class 2"]


@pytest.mark.exhaustive
def test_a_run_records_the_commit_of_its_weights(tiny, weights, tmp_path, monkeypatch):
    commit, hub = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub" / "models--org--tiny"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    shutil.copytree(weights, hub / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, expected in (("org/tiny", commit), (str(weights), None)):
        workdir = tmp_path / f"run {expected}"
        finetune.train(config(name, size=32, steps=2), workdir, policy())
        notes = tr.Checkpoints(workdir / "checkpoints").notes()
        assert notes.get("weights_revision") == expected
        assert notes["weights"] == str(hub / "snapshots" / commit if expected else weights)
        assert (expected or str(weights)) in report.write([workdir]).read_text(encoding="utf-8")


@pytest.mark.exhaustive
def test_errors_are_one_line_and_exit_2(weights, tmp_path):
    cases = [
        (
            ("classify_image.py", "--model=tiny", f"--weights={weights}", tmp_path / "no.jpg"),
            r"no\.jpg: No such file",
        ),
        (
            ("finetune.py", "--model=vit_s_16", f"--workdir={tmp_path}"),
            "the weights 'vit_s_16' are not on this disk",
        ),
    ]
    nowhere = {"FNET_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    running = [(start(*flags, **nowhere), text) for flags, text in cases]
    for err, text in [(finished(process, 2), text) for process, text in running]:
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert re.search(text, err), err
