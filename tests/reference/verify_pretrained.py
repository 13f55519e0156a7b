"""Published weights of full size against published answers: what was compared, and how close it
came.

    make verify-pretrained
    make verify-pretrained ARGS="memory altered_decoders=gemma,phi3"
    python tests/reference/verify_pretrained.py [--photos=DIR] [CHECK[=PART,...] ...]

Each check is a function of CHECKS. It yields sentences that say what was compared and how close,
raises `Skip` where something is not on this disk, and AssertionError where the answer is another.
Photos come out of matplotlib, scikit-image and scikit-learn, where those are installed (or from
--photos=DIR); PyTorch is used where it is.
"""

import importlib.util
import json
import pathlib
import re
import sys
import tempfile
import time

import jax
import numpy as np
from safetensors.numpy import load_file, save_file
from verifying import CHECKS, Skip, check, needed, weights

from fnet.models import pretrained

HERE = pathlib.Path(__file__).parent
PHOTOS = {
    "grace_hopper": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    "coffee": ("skimage", "data/coffee.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
NAMED = {
    "grace_hopper": ("military_uniform", 0.70),
    "coffee": ("espresso", 0.99),
    "chelsea": ("Egyptian_cat", 0.73),
}
FLAGS = [flag for flag in sys.argv[1:] if flag.startswith("--photos=")]


def photos():
    """{name: PIL.Image} of the photos that are installed, and the packages that are not."""
    image = needed("PIL.Image", "Pillow, which reads photos,")
    found, lacking = {}, set()
    folder = pathlib.Path(FLAGS[0].partition("=")[2]) if FLAGS else None
    for name, (package, path) in PHOTOS.items():
        spec = importlib.util.find_spec(package)
        places = [] if spec is None else [pathlib.Path(spec.origin).parent / path]
        places += [] if folder is None else [folder / pathlib.Path(path).name]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            lacking.add(package)
        else:
            found[name] = image.open(place)
    if not found:
        raise Skip(f"no photo is here: {', '.join(sorted(lacking))} are not installed")
    return found, sorted(lacking)


def logits(name, names, pictures):
    """{photo: logits} of a preset's published weights, those that have these names."""
    path = weights(name)
    model = pretrained.model(name, path)
    if pretrained.names_of(model, path) != names:
        raise Skip(
            f"{path} holds the weights of {pretrained.names_of(model, path)}, not of {names}"
        )
    params, state = pretrained.load(model, path)
    prepare = model.NAMES[names].image
    predict = jax.jit(lambda params, state, x: model(params, x, state=state)[0])
    return {
        photo: np.asarray(predict(params, state, prepare.normalize(prepare.crop(picture))[None]))[0]
        for photo, picture in pictures.items()
    }


@check
def memory():
    """Weights are mapped and copied once: the process grows by their own size."""
    status = pathlib.Path("/proc/self/status")
    if not status.is_file():
        raise Skip("/proc/self/status is not on this system")
    path = weights("resnet50")
    model = pretrained.model("resnet50", path)
    held = lambda: next(
        int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "RssAnon" in line
    )
    jax.device_put(np.zeros(3)).block_until_ready()
    before, began = held(), time.perf_counter()
    trees = jax.block_until_ready(pretrained.load(model, path))
    seconds, grown, size = (
        time.perf_counter() - began,
        held() - before,
        sum(a.nbytes for a in jax.tree.leaves(trees)),
    )
    yield f"{size / 1e6:.1f} MB of weights in {seconds:.2f} s; the process grew by {grown / 1e6:.1f} MB"
    assert grown < 1.1 * size


@check
def resnet50_names_photos():
    """Keras' ResNet-50 says what is on the photos."""
    path = weights("resnet50")
    if not (path / "labels.json").is_file():
        raise Skip(f"{path}/labels.json, the labels of the classes, is not here")
    labels = {
        int(index): name for index, name in json.loads((path / "labels.json").read_text()).items()
    }
    pictures, lacking = photos()
    for photo, values in logits("resnet50", "keras", pictures).items():
        share = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
        best = int(share.argmax())
        name, published = NAMED.get(photo, (None, None))
        yield (
            f"{photo}: {labels[best]} {share[best]:.3f}"
            + (f", published {name} about {published:.2f}" if name else "")
        )
        assert (
            name in (None, labels[best]) and abs(share[best] - (published or share[best])) < 0.02
        ), photo
    for package in lacking:
        yield f"(without the photos of {package}, which is not installed)"


@check
def mobilenet_v2_logits():
    """MobileNetV2 by torchvision's names against torchvision's own logits for the photos."""
    pictures, lacking = photos()
    with np.load(HERE / "published_mobilenet_v2.npz") as reference:
        for photo, values in logits("mobilenet_v2", "torchvision", pictures).items():
            error = np.abs(values - reference[photo]).max()
            yield f"{photo}: logits up to {np.abs(values).max():.1f}, largest difference to torchvision's {error:.1e}"
            assert error < 1e-4, photo
    for package in lacking:
        yield f"(without the photos of {package}, which is not installed)"


@check
def mobilenet_v2_twin():
    """MobileNetV2 against a twin in torch.nn: logits of the photos; saved, loaded into the twin,
    and unchanged."""
    torch = needed("torch", "PyTorch")
    from safetensors.torch import load_file as load_torch
    from torch_networks import MobileNetV2

    path, (pictures, lacking) = weights("mobilenet_v2"), photos()
    model = pretrained.model("mobilenet_v2", path)
    twin, again = MobileNetV2().eval(), MobileNetV2().eval()
    twin.load_state_dict(
        load_torch(path / "model.safetensors" if path.is_dir() else path), strict=True
    )
    with tempfile.TemporaryDirectory() as folder:
        again.load_state_dict(
            load_torch(pretrained.save(model, *pretrained.load(model, path), folder, like=path))
        )
    prepare = model.NAMES["torchvision"].image
    for photo, values in logits("mobilenet_v2", "torchvision", pictures).items():
        x = torch.from_numpy(prepare.normalize(prepare.crop(pictures[photo]))).permute(2, 0, 1)[
            None
        ]
        with torch.no_grad():
            theirs, same = twin(x), torch.equal(twin(x), again(x))
        error = np.abs(values - theirs[0].numpy()).max()
        yield f"{photo}: largest difference to the twin's logits {error:.1e}; with the weights saved by fnet, none"
        assert error < 1e-4 and same, photo
    for package in lacking:
        yield f"(without the photos of {package}, which is not installed)"


@check
def image_weights_back():
    """ResNet-50 and MobileNetV2 saved and compared with the files they came from."""
    for name in ("resnet50", "mobilenet_v2"):
        path = weights(name)
        model = pretrained.model(name, path)
        params, state = pretrained.load(model, path)
        with tempfile.TemporaryDirectory() as folder:
            back = load_file(pretrained.save(model, params, state, folder, like=path))
        original = load_file(path / "model.safetensors" if path.is_dir() else path)
        assert back.keys() == original.keys()
        assert all(
            back[key].dtype == held.dtype and np.array_equal(back[key], held)
            for key, held in original.items()
        )
        yield f"{name}: {len(original)} arrays in, {len(back)} out, every one the same, bit for bit"


@check
def mobilenet_v2_errors():
    """A key renamed, dropped, added or reshaped in the real file is named."""
    path = weights("mobilenet_v2")
    model = pretrained.model("mobilenet_v2", path)
    arrays = load_file(path / "model.safetensors" if path.is_dir() else path)
    key = "features.5.conv.1.0.weight"
    changes = {
        "renamed": {
            **{k: v for k, v in arrays.items() if k != key},
            "features.5.conv.1.0.wieght": arrays[key],
        },
        "dropped": {k: v for k, v in arrays.items() if k != key},
        "added": {**arrays, "features.19.weight": arrays[key]},
        "reshaped": {**arrays, key: arrays[key].reshape(-1)},
    }
    for what, changed in changes.items():
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.safetensors"
            save_file(changed, file)
            try:
                pretrained.load(model, file)
            except ValueError as error:
                message = str(error).partition("torchvision: ")[2]
                yield f"{what}: {message}"
                assert ("features.19.weight" if what == "added" else key) in message
            else:
                raise AssertionError(f"{what}: no error")


import verify_adapters  # noqa: E402, F401    their checks come after these
import verify_chat  # noqa: E402, F401
import verify_config  # noqa: E402, F401
import verify_decoders  # noqa: E402, F401
import verify_encoders  # noqa: E402, F401
import verify_entrances  # noqa: E402, F401
import verify_families  # noqa: E402, F401
import verify_generation  # noqa: E402, F401
import verify_gguf  # noqa: E402, F401
import verify_lm_eval  # noqa: E402, F401
import verify_summary  # noqa: E402, F401
import verify_text  # noqa: E402, F401
import verify_tokenizers  # noqa: E402, F401


def main(names):
    selected = [
        (
            name,
            re.split(",(?! )", parts) if parts else [],
        )  # kinds of tokenizers have names with ", "
        for name, _, parts in (each.partition("=") for each in names)
    ]
    unknown = [name for name, _ in selected if name not in CHECKS]
    if unknown:
        sys.exit(f"error: there is no check {unknown[0]!r}: there are {', '.join(CHECKS)}")
    counts = {"ok": 0, "skipped": 0, "failed": 0}
    for name, parts in selected or [(name, []) for name in CHECKS]:
        print(f"{name}: {CHECKS[name].__doc__.splitlines()[0]}")
        outcome, began = "ok", time.perf_counter()
        try:
            for sentence in CHECKS[name](*parts):
                print(f"    {sentence}", flush=True)
        except Skip as reason:
            outcome = "skipped"
            print(f"    skipped: {reason}")
        except Exception as error:  # the other checks run, too
            outcome = "failed"
            print(f"    FAILED: {error or type(error).__name__}")
        counts[outcome] += 1
        print(f"    ({time.perf_counter() - began:.0f} s)", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main([name for name in sys.argv[1:] if name not in FLAGS]))
