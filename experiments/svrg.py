"""Compares SVRG with SGD, Lookahead and SAM on logistic regression, and plots how fast each method
converges.

    python experiments/svrg.py --workdir=runs/svrg
    python experiments/svrg.py --optimizer=momentum --learning_rate=0.1
    python experiments/svrg.py --methods=svrg,sgd,lookahead,sam

    risk(w) = mean of log(1 + exp(-y x·w)) + l2 / 2 |w|²

With a constant step size, SGD does not reach the optimum: the variance of its gradients determines
how close it comes. SVRG (Johnson and Zhang 2013) reduces this variance, and converges linearly to
the optimum. The data are 569 tumors with 30 features (Wolberg, Street and Mangasarian 1995),
standardized, in float64. The optimum is computed by Newton's method. The plot shows the gap (the
risk minus the risk of the optimum) against the number of passes over the data. The number of passes
is the number of gradients of single examples, divided by the number of examples in the data. For
each example of a batch, SVRG computes two gradients. For each new anchor, SVRG computes the
gradients of all examples in the data, which is one pass. The script writes gaps.csv and svrg.png to
the folder --workdir.
"""

import csv

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import training as tr

METHODS = ("svrg", "sgd", "lookahead", "sam")


def tumors():
    """Returns standardized features with an additional constant column, and labels of -1 and 1."""
    common.needs("sklearn")
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    return np.concatenate([x, np.ones((len(x), 1))], 1), 2.0 * y - 1


def risk(w, x, y, l2):
    return jnp.logaddexp(0.0, -y * (x @ w)).mean() + l2 / 2 * (w @ w)


def optimum(x, y, l2):
    """Returns the parameters that minimize the risk, computed by Newton's method."""
    w = jnp.zeros(x.shape[1])
    for _ in range(50):
        w = w - jnp.linalg.solve(jax.hessian(risk)(w, x, y, l2), jax.grad(risk)(w, x, y, l2))
    return w


def train(method, optimizer, x, y, l2, *, batch_size, passes, seed, refresh=2):
    """Returns (passes, gaps): the number of passes over the data so far, and the risk minus its
    minimum. The arrays have one element for each pass, or for SVRG one element for each anchor.

    Args:
      method: one of METHODS.
      optimizer: an Optax optimizer.
      refresh: for SVRG, the number of passes over the data between two anchors. Default 2.
    """
    n, least = len(x), risk(optimum(x, y, l2), x, y, l2)
    per_pass = n // batch_size
    tx = {
        "svrg": tr.svrg,
        "lookahead": lambda tx: optax.lookahead(tx, 5, 0.5),
        "sam": lambda tx: optax.contrib.sam(
            tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.01)), 2
        ),
    }.get(method, lambda tx: tx)(optimizer)
    w = jnp.zeros(x.shape[1])
    if method == "lookahead":
        w = optax.LookaheadParams(w, w)
    state = tx.init(w)

    @jax.jit
    def epoch(w, state, rows):  # rows: [steps, batch]
        def step(carry, batch):
            w, state = carry
            gradient = lambda w: jax.grad(risk)(w, x[batch], y[batch], l2)
            extra = {"gradient": gradient} if method == "svrg" else {}
            point = w.fast if method == "lookahead" else w
            updates, state = tx.update(gradient(point), state, w, **extra)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, state), rows)[0]

    anchor = jax.jit(
        lambda w, state: tr.refresh_anchor(state, w, lambda w: jax.grad(risk)(w, x, y, l2))
    )
    rng, spent, used, gaps = np.random.default_rng(seed), 0.0, [0.0], []
    value = jax.jit(lambda w: risk(w.slow if method == "lookahead" else w, x, y, l2))
    gaps.append(float(value(w) - least))
    while spent < passes:
        count = per_pass
        if method == "svrg":
            state, count = anchor(w, state), refresh * per_pass
            spent += 1
        w, state = epoch(w, state, rng.integers(0, n, (count, batch_size)))
        spent += count * batch_size / n * (2 if method == "svrg" else 1)
        used.append(spent)
        gaps.append(float(value(w) - least))
    return np.array(used), np.array(gaps)


def rate(used, gaps):
    """Returns the factor by which the gap changes in each pass, fitted to the gaps above 1e-13
    (larger than rounding errors)."""
    keep = gaps > 1e-13
    return float(np.exp(np.polyfit(used[keep], np.log(gaps[keep]), 1)[0]))


def plot(results, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for method, (used, gaps) in results.items():
        axis.semilogy(used, np.maximum(gaps, 1e-17), marker=".", label=method)
    axis.set(xlabel="passes over the data (gradients of examples)", ylabel="risk above the optimum")
    axis.legend()
    figure.savefig(path)


def define_flags():
    flags.DEFINE_string("workdir", "runs/svrg", "folder to which svrg.png and gaps.csv are written")
    flags.DEFINE_list(
        "methods", list(METHODS), f"methods to compare, separated by commas: {', '.join(METHODS)}"
    )
    flags.DEFINE_enum(
        "optimizer", "sgd", list(tr.OPTIMIZERS), "name of the optimizer that each method uses"
    )
    flags.DEFINE_float("learning_rate", 0.05, "learning rate, which is constant")
    flags.DEFINE_float(
        "l2",
        0.1,
        "coefficient of the squared weights in the risk, which makes the risk strongly convex",
    )
    flags.DEFINE_integer("batch_size", 8, "number of examples in a batch")
    flags.DEFINE_integer("passes", 60, "number of passes over the data")
    flags.DEFINE_integer("seed", 0, "random seed of the order of the examples")


def main(argv):
    common.no_arguments(argv, "--methods=svrg,sgd")
    given = flags.FLAGS
    workdir = common.begin_comparison(
        METHODS,
        {
            "learning_rate": "(0, 1000]",
            "l2": "(0, 1000]",
            "batch_size": "[1, 569]",
            "passes": "[1, 100000]",
            "seed": tr.flags.SEED,
        },
    )
    jax.config.update("jax_enable_x64", True)
    x, y = map(jnp.asarray, tumors())
    results = {}
    for method in given.methods:
        optimizer = tr.optimizer(given.optimizer, given.learning_rate, axes={"": "in"})
        results[method] = used, gaps = train(
            method,
            optimizer,
            x,
            y,
            given.l2,
            batch_size=given.batch_size,
            passes=given.passes,
            seed=given.seed,
        )
        print(
            f"{method}: gap {gaps[-1]:.2e} after {used[-1]:.0f} passes, "
            f"factor {rate(used, gaps):.3f} per pass"
        )
    with open(workdir / "gaps.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["method", "passes", "gap"])
        rows.writerows(
            [method, a, b] for method, values in results.items() for a, b in zip(*values)
        )
    plot(results, workdir / "svrg.png")
    print(f"{workdir}: svrg.png, gaps.csv")


if __name__ == "__main__":
    define_flags()
    common.run(main)
