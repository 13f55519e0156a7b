"""`fnet compare MODEL --chips "A,B,C"`: compares a training step on several chips."""

from __future__ import annotations

import argparse
from typing import Any

from fnet._util._nearest import nearest
from fnet.cli import _plan
from fnet.cli._console import still

_DESCRIPTION = (
    __doc__
    + """

MODEL is the name of a published configuration (resnet50, gpt2, ...) or module:function as for `fnet plan`. A named
image classifier is trained with SGD and momentum, a language model with AdamW. The products have the dtype of each
chip's policy. Nothing is compiled or run, and no chip needs to be attached.

    fnet compare resnet50 --chips "i7-7700K,RTX 2080 Ti,Titan RTX,TPU v2-8"
    fnet compare gpt2 --batch 16 --chips "A100 SXM4 80GB,h100:8,TPU v5e"
    fnet compare train.py:make --chips "T4,L4" --examples 50000
"""
)
_EPOCH = 1_281_167  # images of ImageNet


def define(commands: Any) -> None:
    """Adds the command `compare` to the parser of `fnet`."""
    compare = commands.add_parser(
        "compare",
        help="compare the estimated cost of a training step on several chips",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    compare.add_argument(
        "model", help="name of a model (resnet50, gpt2, ...), module:function or file.py:function"
    )
    compare.add_argument(
        "--chips",
        required=True,
        help="names, separated by commas, of chips, systems (TPU v2-8, "
        "DGX-1), slices (v5e:4x4) or machines of GPUs (h100:4x8)",
    )
    compare.add_argument(
        "--batch",
        type=int,
        help="number of rows in a batch of a named model (default: 64 images or 8 texts)",
    )
    compare.add_argument(
        "--examples",
        type=int,
        help="number of rows in an epoch, from which energy and rent are "
        "computed (default: the size of ImageNet for image classifiers, otherwise 1,000 batches)",
    )
    compare.add_argument(
        "--precision",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "as-written"),
        help="dtype of products; auto (default) uses the policy of each chip",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table of chips.

    Raises:
        ValueError: the model, a chip or a number is invalid.
    """
    from fnet import parallel

    for name in ("batch", "examples"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: expected a number >= 1")
    chips = [name.strip() for name in args.chips.split(",") if name.strip()]
    examples = args.examples
    if ":" in args.model:
        if args.batch:
            raise ValueError(
                f"--batch={args.batch}: the batch of {args.model} is what the function returns"
            )
        step, init, batch = _plan.found(args.model)
    else:
        step, init, batch, images = training(args.model, args.batch)
        examples = examples or (_EPOCH if images else None)
    with still("compare", "estimating"):
        compared = parallel.compare(
            step, init, batch, chips, precision=args.precision.replace("-", " "), examples=examples
        )
    print(compared)
    return 0


def training(name: str, rows: int | None = None) -> tuple:
    """Returns (step, init, batch, images) for a published configuration of a model. `images` is
    whether the model classifies images.

    Raises:
        ValueError: no image classifier or language model has a configuration of this name.
    """

    import jax
    import jax.numpy as jnp
    import optax

    from fnet import models
    from fnet import training as tr

    classifiers = models.AlexNet, models.MobileNetV2, models.ResNet, models.ViT
    classes = [
        each
        for each in vars(models).values()
        if isinstance(each, type) and issubclass(each, models.Model)
    ]
    presets = {
        preset: cls
        for cls in classes
        for preset in cls.PRESETS
        if hasattr(cls, "cross_entropy") or cls in classifiers
    }
    if name not in presets:
        near = ", ".join(nearest(name, presets, 3, similar=0.4) or presets)
        raise ValueError(
            f"{name!r} is not a known model: expected one such as {near}, or module:function"
        )
    model = presets[name].preset(name)
    images = not hasattr(model, "cross_entropy")
    tx = optax.sgd(0.1, momentum=0.9) if images else optax.adamw(3e-4)
    example = model.example()
    key = jax.random.key(0)

    def init(key):
        params, state = model.init(key, example)
        return tr.TrainState.create(params, tx, state=state)

    def step(state, batch):
        def loss(params):
            if not images:
                return model.cross_entropy(params, batch[:, :-1], batch[:, 1:]).mean(), {}
            logits, new = model(params, batch["image"], state=state.state, key=key, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            ).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx, grads, state=new), {"loss": value}

    rows = rows or (64 if images else 8)
    if images:
        batch = {
            "image": jax.ShapeDtypeStruct((rows, *example.shape[1:]), jnp.float32),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }
    else:
        batch = jax.ShapeDtypeStruct((rows, min(model.context, 1024) + 1), jnp.int32)
    return step, init, batch, images
