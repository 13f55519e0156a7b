"""Saliency maps and feature visualizations, with a small random network."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import feature_visualization as experiment  # noqa: E402

SMALL = models.ResNet((1, 1), bottleneck=False, width=8)
SITE = "stage2/block0"


@pytest.fixture(autouse=True)
def defaults():
    """JAX's own settings, under which the experiments run."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    return experiment.Config(
        model="tiny",
        weights=str(folder / "weights"),
        size=32,
        channels=2,
        steps=3,
        samples=40,
        jitter=2,
        layers=f"{SITE},head",
        cam=SITE,
        workdir=str(folder / "pictures"),
    )


@pytest.fixture(scope="module")
def network(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.ResNet.PRESETS, "tiny", dict(depths=(1, 1), bottleneck=False, width=8))
        params, state = SMALL.init(jax.random.key(0), SMALL.example())
        params["head"]["kernel"] = 10 * jax.random.normal(
            jax.random.key(1), params["head"]["kernel"].shape
        )
        pretrained.save(SMALL, params, state, config.weights)
        loaded = experiment.load(config)
    return dataclasses.replace(loaded, prepare=loaded.prepare.at(32))


@pytest.fixture(scope="module")
def x():
    return jax.random.uniform(jax.random.key(2), (1, 32, 32, 3))


@pytest.mark.exhaustive
def test_gradients_are_finite_differences(network, x):
    label, at = 3, (0, 10, 12, 1)
    slope = experiment.slope(network, label)(x, network.weights)
    moved = lambda h: float(network(network.weights, x.at[at].add(h))[0, label])
    assert float(slope[at]) == pytest.approx(
        (moved(1e-2) - moved(-1e-2)) / 2e-2, rel=0.05, abs=1e-3
    )
    map_ = experiment.gradient(network, x, label)
    assert map_.shape == (32, 32) and float(map_[10, 12]) == pytest.approx(
        float(jnp.abs(slope[0, 10, 12]).max())
    )


@pytest.mark.exhaustive
def test_integrated_gradients_are_complete(network, x, config):
    """Their sum is the change of the logit from the gray image."""
    label = 3
    map_, total = experiment.integrated_gradients(network, x, label, config)
    change = (
        network(network.weights, x)[0, label]
        - network(network.weights, jnp.full_like(x, 0.5))[0, label]
    )
    assert map_.shape == (32, 32) and total == pytest.approx(float(change), rel=0.05)


@pytest.mark.exhaustive
def test_smooth_grad_without_noise_is_the_gradient(network, x, config):
    plain = experiment.smooth_grad(network, x, 3, dataclasses.replace(config, noise=0.0, samples=2))
    assert np.allclose(plain, experiment.gradient(network, x, 3), rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
def test_grad_cam_equals_the_formula(network, x):
    """The head averages the block's output, so that the cotangent is the head's kernel over the
    positions."""
    label = 3
    cam = experiment.grad_cam(network, x, label, SITE)
    assert cam.shape == (32, 32) and float(cam.min()) >= 0
    seen = ft.capture(network, SITE)(network.weights, x)[1][SITE][0]  # [4, 4, channels]
    kernel = network.params["head"]["kernel"][:, label] / (seen.shape[0] * seen.shape[1])
    expected = jax.nn.relu(seen @ kernel)
    assert np.allclose(jax.image.resize(expected, (32, 32), "linear"), cam, rtol=1e-3, atol=1e-6)


@pytest.mark.exhaustive
def test_ascent_raises_the_channel_and_images_are_valid(network, config):
    more = dataclasses.replace(config, steps=30, jitter=0)
    channels = jnp.asarray(experiment.responding(network, more, SITE)[:2])
    spectra = experiment.start(jax.random.key(0), 2, 32)
    state = experiment.optimizer(more).init(spectra)
    ascend = jax.jit(lambda *args: experiment.step(network, more, SITE, *args))
    responses = []
    for i in range(more.steps):
        spectra, state, response = ascend(
            network.weights, spectra, state, channels, jax.random.key(i)
        )
        responses.append(np.asarray(response))
    assert (np.mean(responses[-5:], 0) > 1.3 * np.mean(responses[:5], 0)).all() and (
        responses[0] > 0
    ).all()
    pixels = experiment.image(spectra[1])
    assert pixels.shape == (32, 32, 3) and 0 <= float(pixels.min()) < float(pixels.max()) <= 1
    logits = jax.scipy.special.logit(pixels)  # the contrast is fixed
    assert float(logits.std()) == pytest.approx(1, rel=1e-3)


@pytest.mark.exhaustive
def test_each_image_is_optimized_for_its_own_channel(network, config):
    """Two images in one batch are those of two batches."""
    channels, spectra = jnp.array([1, 3]), experiment.start(jax.random.key(0), 2, 32)
    state = experiment.optimizer(config).init(spectra)
    together, _, _ = experiment.step(
        network, config, SITE, network.weights, spectra, state, channels, jax.random.key(4)
    )
    keys = jax.random.split(jax.random.key(4), 2)
    x = jax.vmap(lambda key, s: experiment.moved(key, experiment.image(s), config.jitter))(
        keys, spectra
    )
    assert not np.allclose(x[0], x[1])
    alone = jax.grad(
        lambda s: ft.capture(network, SITE)(
            network.weights, experiment.moved(keys[1], experiment.image(s), config.jitter)[None]
        )[1][SITE][..., 3].mean()
    )(spectra[1])
    moved = together[1] - spectra[1]  # Adam's first step has the sign of the gradient
    large = np.abs(alone) > 1e-3 * np.abs(alone).max()
    assert large.mean() > 0.1 and (np.sign(moved) == np.sign(alone))[large].mean() > 0.99


def test_flops_count_what_precedes_the_site(network):
    one, two, head = (experiment.flops_of(network, site, 32) for site in ("stem", SITE, "head"))
    assert 0 < one < two < head
    assert one == 2 * 2 * 16 * 16 * 8 * 7 * 7 * 3


@pytest.mark.exhaustive
def test_the_pictures(network, config, tmp_path, capsys):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 48, 3), np.uint8))
    few = dataclasses.replace(config, samples=2, steps=2)
    experiment.saliency(network, few, "a.png", photo, tmp_path / "saliency.png")
    experiment.features(network, few, SITE, tmp_path / "features.png")
    out = capsys.readouterr().out
    assert "a.png: " in out and f"{SITE} [4, 4, 16]: " in out and "GFLOP" in out
    for name in ("saliency.png", "features.png"):
        with Image.open(tmp_path / name) as picture:
            assert picture.width > 400


@pytest.mark.parametrize(
    ("names", "text"), [(["stage9"], "the model has no site 'stage9'; it has stem")]
)
def test_an_unknown_site(network, names, text):
    with pytest.raises(tr.ConfigError, match=text):
        experiment.check_sites(network, names)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(jitter=32), r"--jitter=32: expected fewer pixels than --size=32"),
        (dict(channels=0), "channels"),
        (dict(steps=0), "steps"),
        (dict(model="resnet51"), "resnet51"),
    ],
)
def test_a_configuration_without_sense(config, changes, text):
    with pytest.raises(ValueError, match=text):
        experiment.checked(dataclasses.replace(config, **{"model": "resnet50", **changes}))
