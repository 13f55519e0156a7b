"""First trains linear models with three losses. Then trains networks with zero, one and two hidden
layers.

    python experiments/linear_models.py --workdir=runs/linear_models

Training searches for the parameters with the smallest empirical risk, the average loss plus
regularization. A model computes a score s(x) for each example x. The label y of an example is -1 or
+1. The empirical risk is

    risk = mean over examples of loss(s(x), y) + l2 / 2 · (sum of squared weights)

For a linear score s(x) = x @ kernel + bias, three well-known models differ only in the loss:

    linear regression       square   (s - y)²               optax.squared_error
    logistic regression     log      log(1 + exp(-y s))     optax.sigmoid_binary_cross_entropy
    linear SVM              hinge    max(0, 1 - y s)        optax.hinge_loss

The first half of the program fits these three models to 80 % of a data set of tumors: 569 examples
with 30 features (Wolberg, Street and Mangasarian, 1995). The other 20 % are the test set. The
program compares linear regression with the solution in closed form, and the other two models with
the solutions of scikit-learn. The second half of the program minimizes the log loss of networks
with zero, one and two hidden layers. The training data of these networks are the points of two
spirals, which no line can separate. The program writes a figure of the decision regions of these
networks to --workdir.
"""

import _common as common
import jax
import numpy as np
import optax
from absl import flags

from fnet import layers as nn
from fnet import transforms as ft


def log_loss(scores, labels):
    return optax.sigmoid_binary_cross_entropy(
        scores, (labels + 1) / 2
    )  # optax expects labels 0 and 1


LOSSES = {
    "linear regression": optax.squared_error,
    "logistic regression": log_loss,
    "linear SVM": optax.hinge_loss,
}


def network(*widths):
    """Returns a network with one output, the score, and with hidden layers of the given widths.
    Without hidden layers, the network is a linear model."""
    hidden = [layer for width in widths for layer in (nn.Dense(width), jax.nn.tanh)]
    return nn.Sequential(*hidden, head=nn.Dense(1))


def empirical_risk(model, loss, x, y, l2):
    """Returns the empirical risk as a function of the parameters."""

    def risk(params):
        scores = model(params, x)[:, 0]  # [examples]
        weights = [p for p in jax.tree.leaves(params) if p.ndim == 2]  # no penalty for biases
        return loss(scores, y).mean() + l2 / 2 * sum((w**2).sum() for w in weights)

    return risk


def minimise(risk, params, optimizer, steps):
    """Minimizes the risk with an Optax optimizer, on all examples in each step. Returns (params,
    the risk before each step)."""
    optimizer = optax.with_extra_args_support(optimizer)

    def step(carry, _):
        params, state = carry
        value, grads = ft.value_and_grad(risk)(params)
        # L-BFGS needs these arguments for its line search. The other optimizers ignore them.
        search = dict(value=value, grad=grads, value_fn=risk)
        updates, state = optimizer.update(grads, state, params, **search)
        return (optax.apply_updates(params, updates), state), value

    run = ft.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), length=steps))
    (params, _), risks = run(params)
    return params, risks


def accuracy(model, params, x, y):
    return float(np.mean(np.sign(model(params, x)[:, 0]) == y))


# First half: one problem, three losses.


def tumours():
    """Returns scikit-learn's breast cancer data, standardized: (x, y) for training and (x, y) for
    testing."""
    import sklearn.datasets
    from sklearn.model_selection import train_test_split

    x, y = sklearn.datasets.load_breast_cancer(return_X_y=True)
    y = 2.0 * y - 1
    split = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    train_x, test_x, train_y, test_y = (a.astype(np.float32) for a in split)
    mean, std = train_x.mean(axis=0), train_x.std(axis=0)
    return ((train_x - mean) / std, train_y), ((test_x - mean) / std, test_y)


def fit_linear(name, x, y, l2):
    """Returns the parameters of the linear model `name`."""
    model = network()
    params, _ = model.init(jax.random.key(0), x)
    risk = empirical_risk(model, LOSSES[name], x, y, l2)
    if name == "linear SVM":  # the hinge loss is not smooth: the step size must decrease
        optimizer, steps = optax.adam(optax.cosine_decay_schedule(0.1, 5000)), 5000
    else:
        optimizer, steps = optax.lbfgs(), 200
    return minimise(risk, params, optimizer, steps)[0]


def least_squares(x, y, l2):
    """Solves linear regression in closed form, by setting the gradient of the risk to zero. Returns
    (kernel, bias)."""
    centred = x - x.mean(axis=0)
    gram = 2 / len(x) * centred.T @ centred + l2 * np.eye(x.shape[1])
    kernel = np.linalg.solve(gram, 2 / len(x) * centred.T @ y)
    return kernel, y.mean() - x.mean(axis=0) @ kernel


def solved_otherwise(name, x, y, l2):
    """Computes the parameters of the linear model `name` in closed form or with scikit-learn,
    instead of Optax. Returns (name of the method, params)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import SVC

    x, y = x.astype(np.float64), y.astype(np.float64)
    if name == "linear regression":
        how, (kernel, bias) = "closed form", least_squares(x, y, l2)
    else:  # scikit-learn minimises  sum of losses · C + |kernel|² / 2
        c = 1 / (l2 * len(x))
        smooth = name == "logistic regression"
        other = (
            LogisticRegression(C=c, tol=1e-8, max_iter=1000)
            if smooth
            else SVC(C=c, kernel="linear", tol=1e-6)
        )
        how, other = type(other).__name__, other.fit(x, y)
        kernel, bias = other.coef_[0], other.intercept_[0]
    kernel, bias = np.float32(kernel)[:, None], np.float32(bias)[None]
    return how, {"head": {"kernel": kernel, "bias": bias}}


def apart(params, theirs):
    """Returns the largest difference between the weights of two linear models, relative to the
    largest weight."""
    ours, theirs = params["head"]["kernel"], theirs["head"]["kernel"]
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def compare_losses(l2):
    (x, y), (test_x, test_y) = tumours()
    model = network()
    print(f"three losses: {len(x)} tumours to train on, {len(test_x)} to test on, l2 = {l2}")
    print("                         risk    train     test   risk by other means        apart")
    for name, loss in LOSSES.items():
        params = fit_linear(name, x, y, l2)
        how, theirs = solved_otherwise(name, x, y, l2)
        risk = empirical_risk(model, loss, x, y, l2)
        print(
            f"{name:20} {risk(params):8.6f} {accuracy(model, params, x, y):8.4f} "
            f"{accuracy(model, params, test_x, test_y):8.4f}   {risk(theirs):8.6f} {how:18} "
            f"{apart(params, theirs):.0e}"
        )


# Second half: one loss, more layers.


def spirals(n, noise, seed):
    """Returns two spirals of two turns, with n / 2 points each: x [n, 2], and y [n] of -1 and +1."""
    rng = np.random.default_rng(seed)
    y = np.where(np.arange(n) % 2 == 0, 1.0, -1.0)
    radius = np.sqrt(rng.uniform(0.02, 1, n))  # evenly along the arm
    angle = 4 * np.pi * radius
    x = (radius * y)[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x += noise * rng.standard_normal((n, 2))
    return x.astype(np.float32), y.astype(np.float32)


def compare_depths(width, steps, noise, seed):
    """Prints the accuracies. Returns [(title, function from points to scores)], and the training
    points with their labels."""
    (x, y), (test_x, test_y) = spirals(400, noise, seed), spirals(2000, noise, seed + 1)
    print(f"\nhidden layers of {width} tanh units: two spirals, {len(x)} and {len(test_x)} points")
    print("                         risk    train     test")
    panels = []
    for depth in range(3):
        model = network(*[width] * depth)
        params, _ = model.init(jax.random.key(seed), x)
        risk = empirical_risk(model, log_loss, x, y, 0.0)
        optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))
        params, _ = minimise(risk, params, optimizer, steps)
        train, test = accuracy(model, params, x, y), accuracy(model, params, test_x, test_y)
        name = ("no hidden layer", "one hidden layer", "two hidden layers")[depth]
        print(f"{name:20} {risk(params):8.6f} {train:8.4f} {test:8.4f}")
        panels.append((f"{name}\ntest accuracy {test:.1%}", lambda p, m=model, w=params: m(w, p)))
    return panels, (x, y)


def draw(panels, points, path):
    """Draws one panel for each model. A panel shows the probability of the label +1 at each point
    of the plane, the decision boundary, and the training points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y = points
    edge = 1.05 * np.abs(x).max()
    axis = np.linspace(-edge, edge, 300, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1)  # [300, 300, 2]
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for panel, (title, scores) in zip(axes, panels):
        probability = jax.nn.sigmoid(scores(grid.reshape(-1, 2))).reshape(300, 300)
        shades = panel.imshow(
            probability,
            extent=(-edge, edge, -edge, edge),
            origin="lower",
            cmap="RdBu",
            vmin=-0.4,
            vmax=1.4,  # pale, so that the points stand out
        )
        panel.contour(axis, axis, probability, [0.5], colors="black", linewidths=1.2)
        for label, colour in ((1, "#10407f"), (-1, "#8c1023")):
            panel.scatter(*x[y == label].T, s=12, color=colour, edgecolors="white", linewidths=0.4)
        panel.set(title=title, xticks=[], yticks=[])
    bar = figure.colorbar(
        shades, ax=axes, shrink=0.85, ticks=[0, 0.5, 1], boundaries=np.linspace(0, 1, 101)
    )
    bar.set_label("probability of blue")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def define_flags():
    flags.DEFINE_string("workdir", "runs/linear_models", "folder to which the figure is written")
    flags.DEFINE_float(
        "l2",
        0.1,
        "coefficient of the squared weights in the risk",
        lower_bound=1e-6,
        upper_bound=1e6,
    )
    flags.DEFINE_integer(
        "width", 12, "number of units in a hidden layer", lower_bound=1, upper_bound=4096
    )
    flags.DEFINE_integer(
        "steps",
        3000,
        "number of training steps for each number of layers",
        lower_bound=1,
        upper_bound=10**7,
    )
    flags.DEFINE_float(
        "noise",
        0.03,
        "standard deviation of the noise that is added to the points of the spirals",
        lower_bound=0,
        upper_bound=1000,
    )
    flags.DEFINE_integer(
        "seed", 0, "random seed of the points and the weights", lower_bound=0, upper_bound=2**32 - 2
    )


def configured(argv):
    """Raises ConfigError if there is a positional argument."""
    common.no_arguments(argv, "--seed=1")


def main(argv):
    configured(argv)
    common.needs("matplotlib", "sklearn")
    options = flags.FLAGS
    path = common.user_path("workdir", options.workdir) / "decision_regions.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        common.stop(
            f"--workdir={options.workdir} cannot be created ({error.strerror}): choose another "
            f"folder"
        )
    compare_losses(options.l2)
    panels, points = compare_depths(options.width, options.steps, options.noise, options.seed)
    draw(panels, points, path)
    print(f"\ndecision regions: {path}")


if __name__ == "__main__":
    define_flags()
    common.run(main)
