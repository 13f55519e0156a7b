"""Draws two kinds of pictures: saliency maps of photos, and images that are optimized to activate a
network's channels.

    python experiments/feature_visualization.py photo.jpg                         # saliency maps, and features by layer
    python experiments/feature_visualization.py --layers= photo.jpg other.png     # only saliency maps
    python experiments/feature_visualization.py --layers=stage2/block3 --channels=12 --steps=512

Four saliency maps show which pixels determine the most probable label. The first map is the
gradient. The SmoothGrad map is the root mean square of the gradients at several noisy copies of the
photo. The map of integrated gradients is the mean of the gradients along the path from a gray image
to the photo, multiplied by the difference between the photo and the gray image. The Grad-CAM map
shows the important positions in the output of one layer. The flag --cam names this layer, or
another site of the model (see `fnet.transforms.sites`).

For some channels of each layer, the program optimizes an image with fixed contrast to maximize the
mean of the channel. The first layers respond to edges and colors, and later layers respond to
textures and parts of objects. The channels of the last layer, the logits, respond to objects.

The flags --weights and --labels have the same meaning as in classify_image.py. The pictures are
written to the folder --workdir.

Simonyan et al., Deep Inside Convolutional Networks, 2013; Smilkov et al., SmoothGrad, 2017;
Sundararajan et al., Axiomatic Attribution for Deep Networks, 2017; Selvaraju et al., Grad-CAM,
2017; Olah et al., Feature
Visualization, 2017.
"""

import dataclasses
import functools
import time
from pathlib import Path

import _common as common
import _photos as photos
import classify_image
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import cost
from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option
# Colors of natural photos, as three uncorrelated components: the square root of the covariance of
# ImageNet's pixels.
COLORS = np.array([[0.26, 0.09, 0.02], [0.27, 0.00, -0.05], [0.27, -0.09, 0.03]], np.float32)
TOGETHER = 8  # images that are optimized at once
LABELS = (1, 130, 323, 954, 817, 985)  # goldfish, flamingo, monarch, banana, sports car, daisy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The values of the command-line flags."""

    model: str | None = option(
        None,
        f"name of the model: {', '.join(photos.PRESETS)}; if not given, resnet50",
        choices=photos.PRESETS,
    )
    weights: str | None = option(
        None, "file or folder of the weights, or folder of a run of finetune.py"
    )
    labels: str | None = option(None, "file with the names of the labels: one per line, or JSON")
    workdir: str = option("runs/features", "folder to which the pictures are written")
    layers: str = option(
        "stem/pool,stage1/block2,stage2/block3,stage3/block5,stage4/block2,head",
        "names of layers, or of other sites of the model, separated by commas; empty: draw only "
        "saliency maps",
    )
    cam: str = option("stage4/block2", "layer, or other site, whose values Grad-CAM shows")
    channels: int = option(
        6,
        "number of channels to visualize in each layer, chosen at random; for head, "
        + "number of labels from the list "
        + ", ".join(map(str, LABELS)),
        within="[1, 64]",
    )
    steps: int = option(128, "number of optimization steps for each channel", within="[1, 100000]")
    size: int = option(160, "height and width of the optimized images", within="[16, 4096]")
    learning_rate: float = option(
        0.05,
        "learning rate of Adam for the amplitudes of the frequencies; it decreases to "
        "a tenth of this value",
        within="(0, 100]",
    )
    jitter: int = option(
        16, "largest random shift of an image in each step, in pixels", within="[0, 4096]"
    )
    samples: int = option(
        24,
        "number of noisy copies for SmoothGrad, and of points on the path of integrated gradients",
        within="[1, 10000]",
    )
    noise: float = option(
        0.15,
        "standard deviation of SmoothGrad's noise, as a fraction of the range of the pixels",
        within="[0, 10]",
    )
    seed: int = option(
        0, "random seed of the channels, the noise and the initial images", within="[0, 4294967295]"
    )


def main(argv):
    files = argv[1:]
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        common.needs("matplotlib", "PIL")
        pictures = [photos.opened(file) for file in files]
        network = load(config)
        layers = [name.strip() for name in config.layers.split(",") if name.strip()]
        check_sites(network, [*layers, *([config.cam] if files else [])])
        workdir = common.user_path("workdir", config.workdir)
        workdir.mkdir(parents=True, exist_ok=True)
    for file, picture in zip(files, pictures):
        saliency(network, config, file, picture, workdir / f"saliency-{Path(file).stem}.png")
    for name in layers:
        features(network, config, name, workdir / f"features-{name.replace('/', '-')}.png")


# The network.


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A model and its weights. A call maps pixels [batch, height, width, 3] in [0, 1] to logits
    [batch, labels]."""

    model: object
    params: dict
    state: dict
    prepare: object
    labels: list

    def __call__(self, weights, pixels):
        params, state = weights
        return self.model(params, self.prepare.normalize(255 * pixels), state=state)[0]

    @property
    def weights(self):
        """The weights, as an argument of the compiled functions. If they were constants, XLA would
        spend minutes on folding them."""
        return self.params, self.state


def load(config):
    path = pretrained.find(config.weights or config.model or "resnet50")
    labels = classify_image.read_labels(config, path)
    model = pretrained.model(config.model or "resnet50", path, classes=len(labels))
    names = pretrained.names_of(model, path)
    params, state = pretrained.load(model, path)
    network = Network(model, params, state, model.NAMES[names].image, labels)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    print(
        f"{config.model or 'resnet50'}, {names} names, from {path}: {parameters:,} parameters, "
        f"{len(labels)} labels; on {hw.detect().name}"
    )
    return network


def check_sites(network, names):
    """Raises ValueError if a name is not the name of a site (see `transforms.sites`)."""
    size = network.prepare.size
    known = ft.sites(network)(
        network.weights, jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
    ).names
    for name in names:
        if name not in known:
            raise tr.ConfigError(
                f"--layers or --cam: the model has no site {name!r}; it has {', '.join(known)}"
            )


# Saliency.


def saliency(network, config, file, picture, path):
    """Draws a photo and its four saliency maps."""
    began = time.perf_counter()
    x = jnp.asarray(network.prepare.crop(picture), jnp.float32)[None] / 255  # [1, height, width, 3]
    logits = jax.jit(network)(network.weights, x)[0]
    label = int(jnp.argmax(logits))
    share = float(jax.nn.softmax(logits)[label])
    maps = {
        "gradient": gradient(network, x, label),
        "SmoothGrad": smooth_grad(network, x, label, config),
        "integrated gradients": integrated_gradients(network, x, label, config)[0],
        f"Grad-CAM of {config.cam}": grad_cam(network, x, label, config.cam),
    }
    title = f"{Path(file).name}: {network.labels[label]} ({share:.2f})"
    draw(path, title, [("photo", x[0]), *((name, shown(map_)) for name, map_ in maps.items())])
    print(f"{title}; {path}; {time.perf_counter() - began:.1f} s")


@functools.cache
def slope(network, label):
    """Returns the compiled gradient of a label's logit with respect to the pixels."""
    return jax.jit(jax.grad(lambda x, weights: network(weights, x)[:, label].sum()))


def gradient(network, x, label):
    """Returns the maximum of |d logit / d pixel| over the three colors: [height, width]."""
    return jnp.abs(slope(network, label)(x, network.weights)[0]).max(-1)


def smooth_grad(network, x, label, config):
    """Computes the root mean square of the gradients at several noisy copies of the image x.
    Returns an array [height, width] that contains, for each pixel, the maximum of the root mean
    squares of the three colors."""
    keys = jax.random.split(jax.random.key(config.seed), config.samples)
    noisy = lambda key: x + config.noise * jax.random.normal(key, x.shape)
    total = sum(jnp.square(slope(network, label)(noisy(key), network.weights)[0]) for key in keys)
    return jnp.sqrt(total / config.samples).max(-1)


def integrated_gradients(network, x, label, config):
    """Returns (saliency map [height, width], sum of all attributions).

    The attribution of a pixel and color is the mean gradient on the path from a gray image to the
    image x, multiplied by the difference between x and the gray image. For each pixel, the saliency
    map contains the magnitude of the sum of the attributions over the three colors. The sum of all
    attributions approximates the difference between the logit of x and the logit of the gray image.
    """
    gray = jnp.full_like(x, 0.5)
    points = (np.arange(config.samples) + 0.5) / config.samples  # midpoints
    total = sum(
        slope(network, label)(gray + float(a) * (x - gray), network.weights) for a in points
    )
    parts = (x - gray) * total / config.samples  # [1, height, width, 3]
    return jnp.abs(parts[0].sum(-1)), float(parts.sum())


def grad_cam(network, x, label, site):
    """Returns the Grad-CAM map of a site, an array [height, width]. Each channel of the site is
    multiplied by the mean of its cotangents over all positions. The map is the positive part of the
    sum over the channels, resized to the size of the image x."""
    logit = lambda weights, x: network(weights, x)[0, label]
    _, seen = jax.jit(ft.capture(logit, site))(network.weights, x)
    _, slopes = jax.jit(ft.capture_cotangents(logit, site))(network.weights, x)
    importance = slopes[site].mean((1, 2), keepdims=True)  # [1, 1, 1, channels]
    cam = jax.nn.relu((importance * seen[site]).sum(-1)[0])  # [rows, columns]
    return jax.image.resize(cam, x.shape[1:3], "linear")


def shown(values):
    """Scales the values of a saliency map to [0, 1]. The lowest and the highest hundredth of the
    values are clipped."""
    values = np.asarray(values)
    low, high = np.percentile(values, (1, 99))
    return np.clip((values - low) / max(high - low, 1e-12), 0, 1)


# Features.


def features(network, config, site, path):
    """Draws images optimized for some channels of a site, and prints the time, the FLOPs and the
    MFU."""
    began, processor = time.perf_counter(), time.process_time()
    value = jax.eval_shape(
        ft.capture(network, site),
        network.weights,
        jax.ShapeDtypeStruct((1, config.size, config.size, 3), np.float32),
    )[1][site]
    count = value.shape[-1]
    if site == "head" and len(network.labels) > max(LABELS):
        chosen = [label for label in LABELS if label < count][: config.channels]
    else:
        chosen = np.random.default_rng(config.seed).permutation(responding(network, config, site))[
            : config.channels
        ]
    ascend = jax.jit(functools.partial(step, network, config, site))
    images, seconds, steps = [], 0.0, 0
    for first in range(0, len(chosen), TOGETHER):
        channels = jnp.asarray(chosen[first : first + TOGETHER])
        key = jax.random.key(config.seed + first)
        spectrum = start(key, len(channels), config.size)
        state = optimizer(config).init(spectrum)
        for i in range(config.steps):
            if i == 1:  # the first step was compiled
                jax.block_until_ready(spectrum)
                clock = time.perf_counter()
            spectrum, state, responses = ascend(
                network.weights, spectrum, state, channels, jax.random.fold_in(key, i)
            )
        jax.block_until_ready(spectrum)
        if config.steps > 1:
            seconds, steps = (
                seconds + time.perf_counter() - clock,
                steps + (config.steps - 1) * len(channels),
            )
        named = site == "head" and len(network.labels) == count
        names = [
            network.labels[channel] if named else f"channel {channel}"
            for channel in channels.tolist()
        ]
        images += [
            (f"{name}: {float(response):.3g}", image(each))
            for name, response, each in zip(names, responses, spectrum)
        ]
    draw(path, f"{site}: {len(images)} of {count} channels", images)
    flops, chip = flops_of(network, site, config.size), hw.detect()
    each = seconds / max(1, steps)
    used = cost.mfu(flops, each, chip, "float32") if each else "one step alone was not timed"
    print(
        f"{site} {list(value.shape[1:])}: {each * 1e3:.1f} ms a step and image of "
        f"{flops / 1e9:.2f} GFLOP, {used}; {path}; {time.perf_counter() - began:.1f} s, of the "
        f"processor {time.process_time() - processor:.1f} s"
    )


def responding(network, config, site):
    """Returns the channels of a site that respond to a random image. Other channels may have a
    gradient of 0."""
    x = image(start(jax.random.key(config.seed), 1, config.size)[0])[None]
    value = jax.jit(lambda weights, x: ft.capture(network, site)(weights, x)[1][site])(
        network.weights, x
    )
    means = np.asarray(value).reshape(-1, value.shape[-1]).mean(0)
    return np.flatnonzero(means > 0) if (means > 0).any() else np.arange(len(means))


def optimizer(config):
    return optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps, 0.1))


def step(network, config, site, weights, spectra, state, channels, key):
    """Makes one step of gradient ascent on one image for each channel. Returns (spectra, optimizer
    state, channel means)."""

    def objective(spectra):
        keys = jax.random.split(key, len(channels))
        x = jax.vmap(lambda key, spectrum: moved(key, image(spectrum), config.jitter))(
            keys, spectra
        )
        value = ft.capture(network, site)(weights, x)[1][
            site
        ]  # the layers after the site are not computed
        value = value.reshape(len(channels), -1, value.shape[-1])  # [images, positions, channels]
        responses = jnp.take_along_axis(value, channels[:, None, None], 2).mean((1, 2))  # [images]
        return responses.sum(), responses

    (_, responses), slopes = jax.value_and_grad(objective, has_aux=True)(spectra)
    size = jnp.sqrt(jnp.square(slopes).mean((1, 2, 3, 4), keepdims=True))
    updates, state = optimizer(config).update(-slopes / (size + 1e-12), state)
    return optax.apply_updates(spectra, updates), state, responses


def start(key, count, size):
    """Returns small random spectra, the real and imaginary parts of images in the frequency domain:
    [count, 2, size, size // 2 + 1, 3]."""
    return 0.1 * jax.random.normal(key, (count, 2, size, size // 2 + 1, 3))


def image(spectrum):
    """Converts a spectrum [2, size, size // 2 + 1, 3] to an image [size, size, 3] in [0, 1].

    Each element of the spectrum is divided by its frequency, because the amplitudes of natural
    photos decrease in the same way. Without the division, the optimized images would contain mostly
    high-frequency noise. The contrast is fixed. Otherwise, the optimization would mainly increase
    the contrast, until all pixels are black or white.
    """
    size = spectrum.shape[1]
    rows, columns = jnp.fft.fftfreq(size)[:, None], jnp.fft.rfftfreq(size)[None]
    scale = (
        1 / jnp.maximum(jnp.sqrt(rows**2 + columns**2), 1 / size)[..., None]
    )  # [size, size // 2 + 1, 1]
    amplitudes = jax.lax.complex(spectrum[0] * scale, spectrum[1] * scale)
    values = jnp.fft.irfft2(amplitudes, (size, size), axes=(0, 1), norm="ortho") @ COLORS.T
    return jax.nn.sigmoid(values / (values.std() + 1e-6))


def moved(key, x, jitter):
    """Returns the image, randomly shifted by up to `jitter` pixels, scaled by 0.7 to 1.2 and
    rotated by up to 11 degrees.

    A pattern that activates a channel only at one position, size and angle is mostly noise that no
    photo contains.
    """
    shift, scale, angle = jax.random.split(key, 3)
    size = x.shape[0]
    factor = jnp.exp(jax.random.uniform(scale, minval=np.log(0.7), maxval=np.log(1.2)))
    angle = jax.random.uniform(angle, minval=-0.2, maxval=0.2)
    center = (size - 1) / 2
    at = jnp.arange(size, dtype=jnp.float32) - center
    rows = factor * (jnp.cos(angle) * at[:, None] - jnp.sin(angle) * at[None]) + center
    columns = factor * (jnp.sin(angle) * at[:, None] + jnp.cos(angle) * at[None]) + center
    offset = (
        jax.random.uniform(shift, (2,), minval=-jitter, maxval=jitter) if jitter else jnp.zeros(2)
    )
    at = [rows + offset[0], columns + offset[1]]
    sample = lambda plane: jax.scipy.ndimage.map_coordinates(plane, at, 1, mode="reflect")
    return jnp.stack([sample(x[..., i]) for i in range(3)], -1)


def flops_of(network, site, size):
    """Returns the FLOPs of one forward pass from the pixels of an image to the site, and of the
    backward pass. Only matrix products and convolutions are counted."""
    spec = jax.ShapeDtypeStruct((1, size, size, 3), np.float32)
    counted = cost.count(network, network.weights, spec)
    paths = list(counted.scopes)
    inside = [i for i, path in enumerate(paths) if path == site or path.startswith(site + "/")]
    last = max(inside, default=len(paths) - 1)
    return 2 * sum(counted.scopes[path].matmul for path in paths[: last + 1])


# Pictures.


def draw(path, title, tiles):
    """Writes a figure with a title and named tiles. A tile is an image [height, width, 3] or a map
    [height, width], with values in [0, 1]."""
    from matplotlib.figure import Figure

    columns = min(6, len(tiles))
    rows = -(-len(tiles) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.9 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    for axis in figure.subplots(rows, columns, squeeze=False).flat:
        axis.axis("off")
        if tiles:
            (name, values), *tiles = tiles
            axis.imshow(np.asarray(values), cmap="inferno", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(name, fontsize=9)
    figure.savefig(path, dpi=110)


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    config = checked(tr.flags.read(Config, flags.FLAGS))
    if not argv[1:] and not config.layers.strip(", "):
        raise tr.ConfigError("nothing to draw: name a photo, or --layers")
    return config


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    if config.jitter >= config.size:
        raise tr.ConfigError(
            f"--jitter={config.jitter}: expected fewer pixels than --size={config.size}"
        )
    return config


if __name__ == "__main__":
    define_flags()
    common.run(main)
