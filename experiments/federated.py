"""Trains with federated averaging on MNIST, Fashion-MNIST or the data set "digits". The images are
divided among the clients at random or by label.

    python experiments/federated.py --split=iid --rounds=25 --learning_rate=0.215
    python experiments/federated.py --split=sorted --rounds=40 --learning_rate=0.05 --also=runs/federated_iid
    python experiments/federated.py --dataset=digits --clients=20 --rounds=10
    python experiments/federated.py --server=adam --server_rate=0.01        # FedAdam
    python experiments/federated.py --proximal=0.01                         # FedProx
    python experiments/federated.py --clip=1 --noise=1.1                    # clipped gradients with noise

The defaults are those of McMahan et al. (2017), table 2: 100 clients, of which 10 take part in each
round, five local epochs, and batches of 10 images. In the sorted split, the images are sorted by
label and divided into 200 shards, two for each client, so that most clients have images of two
digits only. The run's folder receives the files of `fit`, and federated.png with the test accuracy
by round. The same command resumes an interrupted run.
"""

import dataclasses

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import federated, models
from fnet import layers as nn
from fnet import training as tr

option = tr.flags.option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    dataset: str = option(
        "mnist",
        "name of the data set: mnist, fashion_mnist or digits",
        choices=("mnist", "fashion_mnist", "digits"),
    )
    data_dir: str | None = option(
        None,
        "folder of the data set's files, to which missing files are downloaded; if not "
        "given, fnet's cache",
        decides=False,
    )
    model: str = option(
        "cnn",
        "model: cnn (of McMahan et al.) or mlp (two hidden layers of 200 units)",
        choices=("cnn", "mlp"),
    )
    split: str = option(
        "iid",
        "how the images are divided among the clients: iid (at random) or sorted (by label)",
        choices=("iid", "sorted"),
    )
    clients: int = option(100, "number of clients", within="[1, 10000]")
    sampled: int = option(10, "number of clients that train in each round", within="[1, 10000]")
    epochs: int = option(
        5, "number of passes of a client over its images in each round", within="[1, 10000]"
    )
    batch_size: int = option(
        10,
        "number of images in a batch of a client; 0: all images of the client",
        within="[0, 1000000]",
    )
    rounds: int = option(20, "number of rounds", within="[1, 1000000]", decides=False)
    learning_rate: float = option(0.1, "learning rate of the clients", within="(0, 1000]")
    server: str = option(
        "sgd", f"name of the server's optimizer: {', '.join(tr.OPTIMIZERS)}", choices=tr.OPTIMIZERS
    )
    server_rate: float = option(1.0, "learning rate of the server", within="(0, 1000]")
    proximal: float = option(
        0.0, "coefficient mu of the proximal term of FedProx; 0: no such term", within="[0, 1000]"
    )
    dropout: float = option(
        0.0, "probability that a client does not return an update", within="[0, 1)"
    )
    clip: float = option(
        0.0, "largest norm of the gradient of an example; 0: no clipping", within="[0, 1000000]"
    )
    noise: float = option(
        0.0,
        "standard deviation of the noise that is added to the gradients, as a multiple of --clip",
        within="[0, 1000]",
    )
    seed: int = option(
        0,
        "random seed of the weights, the division of the images, the choice of clients and the "
        "order of the images",
        within=tr.flags.SEED,
    )


class McMahanCNN(nn.Layer):
    """Two 5 x 5 convolutions with 32 and 64 channels, and a dense layer of 512 units: 1,663,370
    parameters on MNIST."""

    classes: int = 10

    def forward(self, scope, x):  # [batch, height, width, 1]
        for name, channels in (("conv1", 32), ("conv2", 64)):
            x = nn.MaxPool(2)(
                scope[f"{name}_pool"], jax.nn.relu(nn.Conv(channels, 5)(scope[name], x))
            )
        x = jax.nn.relu(nn.Dense(512)(scope["hidden"], nn.Flatten()(scope["flat"], x)))
        return nn.Dense(self.classes)(scope["head"], x)


def split(labels, config):
    """Returns the indices of each client's images."""
    rng = np.random.default_rng(config.seed)
    if config.split == "iid":
        return np.array_split(rng.permutation(len(labels)), config.clients)
    shards = np.array_split(np.argsort(labels, kind="stable"), 2 * config.clients)
    order = rng.permutation(2 * config.clients)
    return [np.concatenate([shards[i] for i in pair]) for pair in order.reshape(-1, 2)]


def plot(folders, path, title):
    """Plots the test accuracy of each run against the round. `folders` contains the folders of the
    runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for folder in folders:
        rows = [row for row in tr.read_metrics(folder) if "test/accuracy" in row]
        config = tr.load_config(Config, folder / "config.json")
        axis.plot(
            [row["step"] for row in rows],
            [100 * row["test/accuracy"] for row in rows],
            marker=".",
            label=f"{config.split} split, step size {config.learning_rate:g}",
        )
    axis.axhline(99, color="tab:gray", linestyle=":")
    axis.legend()
    axis.set(xlabel="round", ylabel="test accuracy, %", title=title)
    figure.savefig(path)


def train(config, workdir, others=(), **fit_options):
    data = tr.datasets.load(config.dataset, config.data_dir, announce=print)
    scale = lambda images: images.astype(jnp.float32) / 255
    model = models.MLP((200, 200, 10)) if config.model == "mlp" else McMahanCNN()
    chosen = split(data.train_labels, config)
    parts = federated.clients(
        [{"x": data.train_images[i], "y": data.train_labels[i]} for i in chosen]
    )

    def loss(params, batch, weight, key):
        logits = model(params, scale(batch["x"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (losses * weight).sum() / weight.sum()

    def measure(state, batch):
        logits = model(state.params, scale(batch["image"]))
        return {
            "accuracy": tr.mean(logits.argmax(-1) == batch["label"], batch["weight"]),
            "loss": tr.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
                batch["weight"],
            ),
        }

    server = tr.optimizer(
        config.server, config.server_rate, axes=model.spec(scale(data.train_images[:1]))
    )
    local = federated.local(
        loss,
        optax.sgd(config.learning_rate),
        proximal=config.proximal,
        clip=config.clip or None,
        noise=config.noise,
    )
    round = federated.fedavg(
        local,
        parts,
        server=server,
        sampled=config.sampled,
        epochs=config.epochs,
        batch_size=config.batch_size or None,
        dropout=config.dropout,
    )
    params, _ = model.init(jax.random.key(config.seed), scale(data.train_images[:1]))
    state = federated.init(jax.random.key(config.seed), params, server)
    print(
        f"{config.dataset}, {config.split} split: {config.clients} clients with "
        f"{parts.sizes.min()} to {parts.sizes.max()} images, "
        f"{sum(p.size for p in jax.tree.leaves(params)):,} parameters"
    )
    test = tr.evaluator(
        measure, {"image": data.test_images, "label": data.test_labels}, batch_size=500
    )
    common.start(workdir, "federated.png")
    state = tr.fit(
        round,
        state,
        federated.no_batches,
        steps=config.rounds,
        workdir=workdir,
        evaluate={"test": test},
        every=1,
        log_every=1,
        progress=tr.Progress(),
        config=config,
        **fit_options,
    )
    title = f"{config.dataset}, {config.sampled} of {config.clients} clients"
    plot([workdir, *others], workdir / "federated.png", title)
    print(
        f"test accuracy {test(state)['accuracy']:.4f} after {int(state.step)} rounds, "
        f"{float(state.bytes) / 1e6:,.1f} MB sent"
    )
    print(f"{workdir}: metrics.jsonl, checkpoints, federated.png")


def define_flags():
    tr.flags.define(Config, flags.FLAGS)
    flags.DEFINE_string("workdir", None, "folder of the run (default: runs/federated_SPLIT)")
    flags.DEFINE_list(
        "also", [], "folders of other runs whose curves are plotted in the same figure"
    )
    common.define_run_flags()


def main(argv):
    common.no_arguments(argv, "--split=sorted")
    config = tr.flags.read(Config, flags.FLAGS)
    tr.flags.check(config)
    if config.sampled > config.clients:
        raise tr.ConfigError(
            f"--sampled={config.sampled}: expected at most --clients={config.clients}"
        )
    if config.noise and not config.clip:
        raise tr.ConfigError(f"--noise={config.noise}: give --clip, the largest norm of a gradient")
    common.needs("matplotlib")
    workdir = common.user_path("workdir", flags.FLAGS.workdir or f"runs/federated_{config.split}")
    others = [common.user_path("also", folder) for folder in flags.FLAGS.also]
    train(config, workdir, others, **common.fit_options())


if __name__ == "__main__":
    define_flags()
    common.run(main)
