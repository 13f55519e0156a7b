"""Compares random search, successive halving and population-based training with the same budget,
over several seeds.

    python experiments/hyperparameters.py                                   # digits
    python experiments/hyperparameters.py --dataset=fashion_mnist --examples=10000 --seeds=2

Each method trains MLPs with dropout. The optimizer is SGD with momentum. The hyperparameters to
optimize are the learning rate, the weight decay, the dropout rate and the label smoothing. The
budget is the total number of steps of all members: --members x --steps. Random search and
population-based training run --members members to the end. Halving starts with more members, and
drops two thirds of them at the end of each rung. The member with the best accuracy on a validation
set is selected; its accuracy on the test set is reported. --workdir receives results.csv and
hyperparameters.png.
"""

import csv

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import layers as nn
from fnet import search
from fnet import training as tr

SPACE = search.Space(
    learning_rate=search.LogUniform(1e-4, 1.0),
    weight_decay=search.LogUniform(1e-6, 1e-1),
    dropout=search.Uniform(0.0, 0.8),
    label_smoothing=search.Uniform(0.0, 0.3),
)
METHODS = ("random", "sobol", "halving", "pbt")


class Network(nn.Layer):
    width: int
    classes: int = 10

    def forward(self, scope, x, rate):  # [batch, features]
        for name in ("hidden1", "hidden2"):
            x = jax.nn.relu(nn.Dense(self.width)(scope[name], x))
            x = nn.Dropout()(scope[f"{name}_drop"], x, rate=rate)
        return nn.Dense(self.classes)(scope["head"], x)


class Problem:
    """A population of networks for one data set: the functions init_n and step_n, the batches, and
    the scores of the members."""

    def __init__(self, data, seed, *, width, batch_size, examples, method):
        flat = lambda images: images.reshape(len(images), -1).astype(np.float32) / 255
        train = {
            "x": flat(data.train_images)[: examples or None],
            "y": data.train_labels[: examples or None],
        }
        train, held = tr.split(train, 0.2, seed=seed)
        self.validation = jnp.asarray(held["x"]), jnp.asarray(held["y"])
        self.test = jnp.asarray(flat(data.test_images)), jnp.asarray(data.test_labels)
        self.batches = tr.Batches(train, batch_size=batch_size, seed=seed)
        self.model = model = Network(width)

        def tx(hyper):
            return optax.chain(
                optax.add_decayed_weights(hyper["weight_decay"], tr.decays),
                optax.sgd(hyper["learning_rate"], momentum=0.9),
            )

        def init(key, hyper):
            params, _ = model.init(key, train["x"][:1], rate=0.0)
            return tr.TrainState.create(params, tx(hyper))

        def step(state, batch, hyper):
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            targets = optax.smooth_labels(jax.nn.one_hot(batch["y"], 10), hyper["label_smoothing"])

            def loss(params):
                logits = model(params, batch["x"], rate=hyper["dropout"], key=key, train=True)
                return optax.softmax_cross_entropy(logits, targets).mean()

            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply(tx(hyper), grads), {"loss": value}

        self.init_n, self.step_n = search.population(init, step, method=method)
        self._measured = jax.jit(self._measure)

    def _measure(self, members, x, y):
        """Returns (accuracies, losses), each [members]."""
        logits = jax.vmap(lambda member: self.model(member.params, x, rate=0.0))(members)
        losses = jax.vmap(optax.softmax_cross_entropy_with_integer_labels, (0, None))(logits, y)
        return (logits.argmax(-1) == y[None]).mean(1), losses.mean(1)

    def score(self, state):
        """Returns the score of each member: the validation accuracy minus a small term. The term
        increases with the validation loss, and orders members of equal accuracy."""
        accuracies, losses = self._measured(state.members, *self.validation)
        return accuracies - losses / (1 + losses) / (2 * len(self.validation[1]))

    def selected(self, state):
        """Returns the validation and test accuracy of the member with the best score."""
        best = int(
            np.nanargmax(np.where(np.asarray(state.diverged), -1, np.asarray(self.score(state))))
        )
        return tuple(
            float(self._measured(state.members, *data)[0][best])
            for data in (self.validation, self.test)
        )


def run(method, problem, seed, *, members, steps, generations):
    """Runs one method, and returns (validation accuracy, test accuracy, steps). The accuracies are
    those of the selected member. The third value is the total number of training steps of all
    members."""
    key, fit = jax.random.key(seed), {"steps": steps, "log_every": steps}
    if method in ("random", "sobol"):
        points = (
            SPACE.random(members, seed=seed)
            if method == "random"
            else SPACE.sobol(members, seed=seed)
        )
        state, used = (
            tr.fit(
                problem.step_n, problem.init_n(key, SPACE.arrays(points)), problem.batches, **fit
            ),
            members * steps,
        )
    elif method == "halving":
        first = max(1, steps // 9)  # rungs of 1/9, 1/3 and all steps
        count = members
        while _halving_steps(count + 3, first, steps) <= members * steps:
            count += 3
        found = search.halving(
            problem.init_n,
            problem.step_n,
            SPACE.arrays(SPACE.random(count, seed=seed)),
            problem.batches,
            problem.score,
            steps=steps,
            first=first,
            key=key,
            log_every=steps,
        )
        state, used = found.state, found.member_steps
    else:
        step = search.pbt(
            problem.step_n, problem.score, SPACE, interval=max(1, steps // generations), seed=seed
        )
        points = SPACE.arrays(SPACE.random(members, seed=seed))
        state, used = (
            tr.fit(step, problem.init_n(key, points), problem.batches, **fit),
            members * steps,
        )
    return *problem.selected(state), used


def _halving_steps(count, first, steps):
    total, at, length = 0, 0, first
    while True:
        total += count * (length - at)
        if length == steps:
            return total
        count, at, length = max(1, count // 3), length, min(3 * length, steps)


def compared(name, results):
    """Describes the differences from random search with the same seeds."""
    if name == "random" or "random" not in results:
        return ""
    gains = np.array([a[1] - b[1] for a, b in zip(results[name], results["random"])])
    return (
        f"; to random search {gains.mean():+.4f} ± {gains.std():.4f}, better {(gains > 0).sum()}, "
        f"equal {(gains == 0).sum()}, worse {(gains < 0).sum()}"
    )


def plot(results, path, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for i, values in enumerate(results.values()):
        errors = [100 * (1 - test) for _, test, _ in values]
        axis.plot([i] * len(errors), errors, "o", alpha=0.5)
        axis.errorbar(i + 0.15, np.mean(errors), np.std(errors), fmt="_", color="black", capsize=4)
    axis.set_xticks(range(len(results)), list(results))
    axis.set(ylabel="test error, %", title=title)
    figure.savefig(path)


def define_flags():
    flags.DEFINE_enum(
        "dataset", "digits", ["digits", "fashion_mnist", "mnist"], "name of the data set"
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "folder of the data set's files, to which missing files are downloaded; if "
        "not given, fnet's cache",
    )
    flags.DEFINE_string(
        "workdir",
        "runs/hyperparameters",
        "folder to which results.csv and hyperparameters.png are written",
    )
    flags.DEFINE_list(
        "methods", list(METHODS), f"methods to compare, separated by commas: {', '.join(METHODS)}"
    )
    flags.DEFINE_integer(
        "members", 8, "number of members of random search and of population-based training"
    )
    flags.DEFINE_integer("steps", 300, "number of training steps of each member")
    flags.DEFINE_integer("generations", 10, "number of generations of population-based training")
    flags.DEFINE_integer("seeds", 5, "number of repetitions with different random seeds")
    flags.DEFINE_integer("first_seed", 0, "random seed of the first repetition")
    flags.DEFINE_integer("width", 64, "number of units in a hidden layer")
    flags.DEFINE_integer("batch_size", 64, "number of examples in a batch")
    flags.DEFINE_integer("examples", 0, "number of training examples to use; 0: all examples")
    flags.DEFINE_enum(
        "members_by",
        "vmap",
        ["auto", "vmap", "loop"],
        "how the members are computed: together (vmap), "
        "one after the other (loop), or the faster way (auto)",
    )


def main(argv):
    common.no_arguments(argv, "--methods=random,pbt")
    given = flags.FLAGS
    workdir = common.begin_comparison(
        METHODS,
        {
            "members": "[2, 10000]",
            "steps": "[1, 10000000]",
            "generations": "[1, 100000]",
            "seeds": "[1, 1000]",
            "first_seed": "[0, 1000000]",
            "width": "[1, 8192]",
            "batch_size": "[1, 65536]",
            "examples": "[0, 10000000]",
        },
    )
    data = tr.datasets.load(given.dataset, given.data_dir, announce=print)
    results = {name: [] for name in given.methods}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        problem = Problem(
            data,
            seed,
            width=given.width,
            batch_size=given.batch_size,
            examples=given.examples,
            method=given.members_by,
        )
        for name in given.methods:
            results[name].append(
                run(
                    name,
                    problem,
                    seed,
                    members=given.members,
                    steps=given.steps,
                    generations=given.generations,
                )
            )
            print(
                f"seed {seed}, {name}: validation {results[name][-1][0]:.4f}, test "
                f"{results[name][-1][1]:.4f}, {results[name][-1][2]:,} steps",
                flush=True,
            )
    for name, values in results.items():
        test = [each[1] for each in values]
        print(
            f"{name:8} validation {np.mean([each[0] for each in values]):.4f}, test accuracy "
            f"{np.mean(test):.4f} ± {np.std(test):.4f} over {len(test)} "
            "seeds" + compared(name, results)
        )
    with open(workdir / "results.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "seed", "validation", "test", "member_steps"])
        rows.writerows(
            [name, seed, *each]
            for name, values in results.items()
            for seed, each in enumerate(values, given.first_seed)
        )
    plot(
        results,
        workdir / "hyperparameters.png",
        f"{given.dataset}: {given.members} x {given.steps} steps",
    )
    print(f"{workdir}: hyperparameters.png, results.csv")


if __name__ == "__main__":
    define_flags()
    common.run(main)
