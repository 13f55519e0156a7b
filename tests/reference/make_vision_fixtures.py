"""Writes vision.npz: the logits of torchvision's, timm's and transformers' own image models, and
their keys and shapes.

    python -m venv torch-env
    torch-env/bin/pip install torch==2.13.0 torchvision==0.28.0 timm==1.0.31 transformers==5.23.0 numpy pillow
    torch-env/bin/python tests/reference/make_vision_fixtures.py [published FOLDER PHOTO ...]

Weights are drawn from their keys (tests/drawn.py); models compute in float64. With `published`, it
writes published_mobilenet_v2.npz instead: the logits of torchvision's MobileNetV2 for photos,
computed in float32 from FOLDER/model.safetensors, each through torchvision's own transforms.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import resnet, vision_transformer

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import drawn  # noqa: E402

CLASSES = 10


def small_alexnet():
    """torchvision's AlexNet with narrower layers in the same places."""
    model = torchvision.models.AlexNet(CLASSES)
    channels = {0: (3, 4), 3: (4, 12), 6: (12, 24), 8: (24, 16), 10: (16, 16)}
    for at, (inputs, outputs) in channels.items():
        old = model.features[at]
        model.features[at] = nn.Conv2d(inputs, outputs, old.kernel_size, old.stride, old.padding)
    for at, (inputs, outputs) in {1: (16 * 36, 32), 4: (32, 32), 6: (32, CLASSES)}.items():
        model.classifier[at] = nn.Linear(inputs, outputs)
    return model


def version_1(model):
    """The stride of a bottleneck in its first convolution."""
    for block in model.modules():
        if isinstance(block, resnet.Bottleneck):
            block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    return model


def small_vit():
    return vision_transformer.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)


def timm_vit():
    return timm.models.vision_transformer.VisionTransformer(
        32, 8, num_classes=CLASSES, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2.0
    )


def hugging_face_vit():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def timm_mobilenet():
    return timm.models.efficientnet._gen_mobilenet_v2("mobilenetv2_100", 0.25, num_classes=CLASSES)


CASES = {  # name: (model, size of its images)
    "alexnet-torchvision": (small_alexnet, 224),
    "resnet_basic-torchvision": (
        lambda: resnet.ResNet(resnet.BasicBlock, [1, 2, 1, 1], CLASSES),
        48,
    ),
    "resnet_bottleneck-torchvision": (
        lambda: resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], CLASSES),
        48,
    ),
    "resnet_v1-torchvision": (
        lambda: version_1(resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1], CLASSES)),
        48,
    ),
    "mobilenet_v2-torchvision": (lambda: torchvision.models.MobileNetV2(CLASSES, 0.25), 48),
    "mobilenet_v2-timm": (timm_mobilenet, 48),
    "vit-torchvision": (small_vit, 32),
    "vit-timm": (timm_vit, 32),
    "vit-huggingface": (hugging_face_vit, 32),
}


TRANSFORMS = {
    "torchvision": torchvision.transforms._presets.ImageClassification(
        crop_size=24, resize_size=28
    ),
    "timm": timm.data.create_transform(
        (3, 24, 24), interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9
    ),
}


def filled(model):
    """The model with drawn weights, their shapes, and the weights, by the keys of its own files."""
    if not isinstance(model, transformers.PreTrainedModel):
        shapes = {key: list(value.shape) for key, value in model.state_dict().items()}
        weights = drawn.weights(shapes)
        model.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
        return model, shapes, weights
    with tempfile.TemporaryDirectory() as folder:  # its files have other keys than its modules
        file = pathlib.Path(folder) / "model.safetensors"
        model.save_pretrained(folder)
        shapes = {key: list(value.shape) for key, value in load_file(file).items()}
        weights = drawn.weights(shapes)
        save_file(
            {key: torch.from_numpy(value) for key, value in weights.items()}, file, {"format": "pt"}
        )
        return type(model).from_pretrained(folder).eval(), shapes, weights


def small():
    arrays = {}
    for name, (make, size) in CASES.items():
        model, shapes, weights = filled(make().eval())
        x = drawn.images(name, (2, size, size, 3))
        with torch.no_grad():
            logits = model.double()(torch.from_numpy(x).double().permute(0, 3, 1, 2))
        logits = logits if isinstance(logits, torch.Tensor) else logits.logits
        arrays[f"{name}/logits"] = logits.numpy().astype(np.float32)
        arrays[f"{name}/shapes"] = np.array(json.dumps(shapes))
        arrays[f"{name}/checksum"] = np.array(drawn.checksum(weights))
        arrays[f"{name}/size"] = np.array(size)
        print(
            name,
            sum(value.size for value in weights.values()),
            "numbers, logits",
            arrays[f"{name}/logits"][0, :3],
        )
    for name, transform in TRANSFORMS.items():
        for width, height in ((45, 37), (37, 61)):
            pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
            x = transform(Image.fromarray(pixels)).permute(1, 2, 0).numpy()
            arrays |= {
                f"photo-{name}-{width}x{height}/pixels": pixels,
                f"photo-{name}-{width}x{height}/input": x,
            }
    np.savez_compressed(HERE / "vision.npz", **arrays)
    print(f"vision.npz: {(HERE / 'vision.npz').stat().st_size / 1e3:.0f} kB")


def published(folder):
    model = torchvision.models.mobilenet_v2().eval()
    model.load_state_dict(load_file(pathlib.Path(folder).expanduser() / "model.safetensors"))
    transform = torchvision.models.MobileNet_V2_Weights.IMAGENET1K_V1.transforms()
    arrays = {}
    for path in map(pathlib.Path, sys.argv[3:]):
        with torch.no_grad():
            arrays[path.stem] = model(transform(Image.open(path).convert("RGB"))[None])[0].numpy()
    np.savez_compressed(HERE / "published_mobilenet_v2.npz", **arrays)


if __name__ == "__main__":
    published(sys.argv[2]) if sys.argv[1:2] == ["published"] else small()
