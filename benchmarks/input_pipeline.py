"""How many photos per second a training run can read, and how long ResNet-50 waits for them.

    python -m benchmarks.input_pipeline
    python -m benchmarks.input_pipeline --photos=16 --batch=8 --rounds=1 --peers=fnet --model=resnet18 --size=32

The photos are JPEG files of 500 x 375 pixels, made from the two photos of scikit-learn. Each peer
decodes a photo with Pillow, resizes a random crop of it, flips it at random, and returns batches of
float32 arrays. fnet does so in threads, in a function of the step that `fit` calls ahead of the
step; torch in the processes of a DataLoader. Both use as many workers as there are cores.

The last line is the fraction of time that `fit` waited for batches while it trained a ResNet on the
same photos, on the CPU that also decodes them ("time/data" in metrics.jsonl).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks._harness import header, table
from benchmarks._live import Live, PeerError, serve

CORES = len(os.sched_getaffinity(0))
AHEAD = 2 * CORES  # batches that may be prepared before the clock starts, and after it stops


def write_photos(folder: Path, count: int) -> None:
    """Writes crops of scikit-learn's two photos, each with a different size and position, as JPEG
    files."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    sources = [Image.fromarray(image) for image in load_sample_images().images]
    random = np.random.default_rng(0)
    for i in range(count):
        source = sources[i % 2]
        width = int(random.integers(320, 560))
        height = width * 3 // 4
        left, top = (
            int(random.integers(source.width - width + 1)),
            int(random.integers(source.height - height + 1)),
        )
        source.crop((left, top, left + width, top + height)).resize((500, 375)).save(
            folder / f"{i}.jpg", quality=90
        )


def read_photo(file: Path, random: np.random.Generator, size: int) -> np.ndarray:
    """Returns a random crop of a photo, flipped at random: uint8 [size, size, 3]. The crop has 0.08
    to 1 of the area, as in Szegedy et al. (2015), Going Deeper with Convolutions."""
    from PIL import Image

    with Image.open(file) as photo:
        area = random.uniform(0.08, 1) * photo.width * photo.height
        ratio = np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        width, height = (
            min(int(np.sqrt(area * ratio)), photo.width),
            min(int(np.sqrt(area / ratio)), photo.height),
        )
        left, top = (
            int(random.integers(photo.width - width + 1)),
            int(random.integers(photo.height - height + 1)),
        )
        image = np.asarray(
            photo.convert("RGB").resize(
                (size, size), Image.BILINEAR, box=(left, top, left + width, top + height)
            )
        )
    return image[:, ::-1] if random.random() < 0.5 else image


def as_floats(images: list[np.ndarray]) -> np.ndarray:
    return np.stack(images).astype(np.float32) / 255


class Photos:
    """`photos(i)` returns the batch of step i, as for `fit`: {"x": float32 [batch, size, size, 3],
    "y": labels}."""

    def __init__(self, folder: Path, batch: int, size: int):
        self.files, self.batch, self.size = sorted(folder.glob("*.jpg")), batch, size
        self.threads = ThreadPoolExecutor(CORES)

    def __call__(self, i: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng((0, i))
        rows = random.integers(len(self.files), size=self.batch)
        read = lambda row, seed: read_photo(self.files[row], np.random.default_rng(seed), self.size)
        seeds = random.integers(1 << 32, size=self.batch)
        return {
            "x": as_floats(list(self.threads.map(read, rows, seeds))),
            "y": np.asarray(rows % 2, np.int32),
        }


def fnet(folder: str, batch: int, size: int, steps: int) -> float:
    """Returns the seconds to prepare `steps` batches and to move them to the device, as `fit` does."""
    import jax

    from fnet.training.loop._prefetch import Prefetch

    feed = Prefetch(Photos(Path(folder), batch, size), 0, steps + 2 * AHEAD)
    with contextlib.closing(feed):
        for _ in range(AHEAD):
            feed()
        start = time.perf_counter()
        for _ in range(steps):
            jax.block_until_ready(feed())
        return time.perf_counter() - start


def torch(folder: str, batch: int, size: int, steps: int) -> float:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Files(Dataset):
        files = sorted(Path(folder).glob("*.jpg"))

        def __len__(self):
            return batch * (steps + 2 * AHEAD)

        def __getitem__(self, i):
            return read_photo(self.files[i % len(self.files)], np.random.default_rng((1, i)), size)

    collate = lambda images: torch.from_numpy(as_floats(images))
    batches = iter(DataLoader(Files(), batch, num_workers=CORES, collate_fn=collate))
    for _ in range(AHEAD):
        next(batches)
    start = time.perf_counter()
    for _ in range(steps):
        next(batches)
    return time.perf_counter() - start


def waiting(folder: str, batch: int, size: int, model: str, steps: int) -> float:
    """Returns the fraction of time that `fit` waits for photos, without the first step."""
    import jax
    import optax

    from fnet import models
    from fnet import training as tr

    net, data = models.ResNet.preset(model), Photos(Path(folder), batch, size)
    params, stats = net.init(jax.random.key(0), data(0)["x"])
    tx = optax.sgd(1e-3)

    def loss(params, stats, batch):
        logits, stats = net(params, batch["x"], state=stats, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), stats

    def step(state, batch):
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, state.state, batch
        )
        return state.apply(tx, grads, state=stats), {"loss": value}

    with tempfile.TemporaryDirectory() as workdir:
        tr.fit(
            step,
            tr.TrainState.create(params, tx, state=stats),
            data,
            steps=1 + 2 * steps,
            log_every=steps,
            workdir=workdir,
            tensorboard=False,
        )
        rows = [
            row["time/data"] for row in tr.read_metrics(workdir) if row.get("time/data") is not None
        ]
    return rows[-1]


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.input_pipeline", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--photos", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side of the crops")
    parser.add_argument("--steps", type=int, default=16, help="batches in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="fnet,torch")
    parser.add_argument("--model", default="resnet50", help="the ResNet that waits for photos")
    options = parser.parse_args(arguments)
    print(
        header(
            " ".join(
                [
                    "python -m benchmarks.input_pipeline",
                    *(sys.argv[1:] if arguments is None else arguments),
                ]
            ),
            options.rounds,
            ("torch",),
            allocator="default",
        )
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as alive:
        write_photos(Path(folder), options.photos)
        details = {"folder": folder, "batch": options.batch, "size": options.size}
        command, environment = (
            [sys.executable, "-m", "benchmarks.input_pipeline", "serve"],
            {"JAX_PLATFORMS": "cpu"},
        )
        live = {
            name: alive.enter_context(Live(name, command, environment))
            for name in options.peers.split(",")
        }
        seconds: dict[str, list[float]] = {name: [] for name in live}
        try:
            for _ in range(options.rounds):
                for name, process in live.items():
                    taken = process.ask(name, limit=300, steps=options.steps, **details)
                    seconds[name].append(taken / (options.steps * options.batch))
            rates = {
                name: f"{1 / statistics.median(values):.0f}" for name, values in seconds.items()
            }
            print(
                table(
                    seconds,
                    unit="ms per photo",
                    scale=1e3,
                    bases=[list(live)[-1]],
                    more={"photos/s": rates},
                )
            )
            fraction = next(iter(live.values())).ask(
                "waiting", limit=1200, steps=2, model=options.model, **details
            )
        except PeerError as error:
            sys.exit(str(error))
    print(
        f"\n`fit` of {options.model} with these photos waits for batches {100 * fraction:.2f} % of "
        f"the time."
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"fnet": fnet, "torch": torch, "waiting": waiting})
    else:
        main()
