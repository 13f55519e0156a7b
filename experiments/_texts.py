"""The part of finetune.py that fine-tunes language models on a text."""

import math
import shutil
import time
from pathlib import Path

import _adapters as adapters
import _common as common
import jax
import jax.numpy as jnp
import llama2c
import numpy as np

from fnet import compress, models
from fnet import layers as nn
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

PRESETS = tuple(preset for cls in (models.Decoder, models.GPT) for preset in cls.PRESETS)
TEMPEST = Path(__file__).parent / "data" / "tempest.txt"


def network(config):
    """Returns (model, parameters, tokenizer, names, folder). `folder` contains the file of weights.
    `names` is the framework of the names in this file, such as "huggingface", or "llama2c" for a
    model.bin."""
    path = pretrained.find(config.weights or config.model)
    folder = path if path.is_dir() else path.parent
    if config.model is None and not llama2c.is_file(path):
        model, params, _ = pretrained.load(path)
        if not hasattr(model, "cross_entropy"):
            raise ValueError(
                f"--weights={config.weights} has a {type(model).__name__}, but --dataset=text needs "
                "a language model"
            )
        names = pretrained.names_of(model, path)
    elif llama2c.is_file(path):
        names = "llama2c"
        model, params = llama2c.load(path)
    else:
        model = pretrained.model(config.model, path)
        names = pretrained.names_of(model, path)
        params, _ = pretrained.load(model, path)
    tokenizer = models.read_tokenizer(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}: use a "
            "tokenizer and a model of one vocabulary"
        )
    return model, params, tokenizer, names, folder


def read(config, tokenizer):
    """Returns (training tokens, validation tokens): the first nine tenths and the last tenth of a
    text."""
    paths = [TEMPEST]
    if config.data_dir:
        folder = common.user_path("data_dir", config.data_dir)
        paths = sorted(path for path in folder.glob("*.txt") if path.is_file())
        if not paths:
            raise FileNotFoundError(f"{folder} has no text: put *.txt there, or omit --data_dir")
    text = "\n".join(map(common.read_text, paths))
    tokens = tokenizer.encode(text)
    return np.split(tokens, [len(tokens) * 9 // 10])


def task(config, model, params):
    """Returns (trainable, arrays, evaluate): the trainable parameters, the other arrays, and a
    function.

    `evaluate` converts a function `f` of the model's parameters to a function of `trainable` and
    `arrays`. `evaluate(f)(trainable, arrays, ...)` combines `trainable` and `arrays` into the
    parameters `params` of the model, and returns `f(params, ...)`.
    """
    if not config.lora:
        return params, {}, lambda f: lambda params, arrays, *inputs: f(params, *inputs)
    trainable, frozen = adapters.adapted(
        jax.random.key(config.seed), params, config.lora, config.base
    )

    def evaluate(f):
        run = ft.use_implicit_arrays(f)
        return lambda trainable, frozen, *inputs: run(nn.combine(trainable, frozen), *inputs)

    return trainable, frozen, evaluate


def train(config, workdir, policy, **fit_options):
    """Trains a model, or resumes an interrupted run. A run that is already complete is only
    evaluated.

    Returns:
      {"loss": the lowest validation loss}.
    """
    model, published, tokenizer, names, folder = network(config)
    train_tokens, test_tokens = read(config, tokenizer)
    context = min(config.context, model.context)
    params, arrays, evaluate = task(config, model, published)
    total, trained = adapters.count(published), adapters.count(params)
    batches = tr.Windows(
        train_tokens, length=context, batch_size=config.batch_size, seed=config.seed
    )
    steps = config.steps or common.check_steps(
        math.ceil(config.epochs * len(train_tokens) / (context * config.batch_size))
    )
    rate = tr.schedule(config.schedule, config.learning_rate, steps, warmup=config.warmup)
    axes = model.spec(jax.ShapeDtypeStruct((1, context), jnp.int32))
    tx = tr.optimizer(config.optimizer, rate, weight_decay=config.weight_decay, clip=1.0, axes=axes)
    tx = ft.loss_scale(tx, policy)
    cross_entropy = evaluate(
        lambda params, tokens: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:])
    )

    def step(state, batch):
        def loss(params):
            return cross_entropy(params, state.state, batch["tokens"]).mean()

        value, grads = ft.autocast(ft.scaled_value_and_grad(loss), policy)(
            state.opt_state, state.params
        )
        return state.apply(tx, grads), {"loss": value, "learning_rate": rate(state.step)}

    def measure(state, batch):
        each = ft.autocast(cross_entropy, policy)(
            state.averaged, state.state, batch["tokens"]
        )  # [batch, time]
        return {"loss": tr.mean(each, jnp.broadcast_to(batch["weight"][:, None], each.shape))}

    held_out = tr.stretches(test_tokens, context)[:2000]
    test = tr.evaluator(measure, {"tokens": held_out}, batch_size=config.batch_size)
    stop = (
        tr.EarlyStop(metric="validation/loss", patience=config.early_stop, mode="min")
        if config.early_stop
        else None
    )
    init = lambda key: tr.TrainState.create(params, tx, state=arrays, ema=config.ema or None)
    common.check_memory(
        init, 4 * config.batch_size * context * model.width, "--batch_size or --context"
    )
    name = config.model or type(model).__name__
    print(
        f"{name}, {names} names: {total:,} parameters, {trained:,} trained "
        f"({100 * trained / total:.2f} %)"
    )
    if config.lora:
        whole = nn.combine(params, arrays)
        print(
            f"base={config.base}: {compress.size(whole) / 1e6:.1f} MB with adapters, of "
            f"{compress.size(published) / 1e6:.1f} MB"
        )
    print(
        f"{len(train_tokens):,} tokens to train on, {held_out.shape[0] * context:,} to validate "
        f"on; {steps} steps of {config.batch_size} x {context} tokens"
    )
    common.start(workdir, "curves.png")
    every, began = max(math.ceil(steps / 20), 5), time.perf_counter()
    state = tr.fit(
        step,
        init(None),
        batches,
        steps=steps,
        workdir=workdir,
        evaluate={"validation": test},
        every=every,
        log_every=every,
        best="validation/loss",
        best_mode="min",
        early_stop=stop,
        progress=tr.Progress(),
        notes={"policy": str(policy), **common.weights_notes(folder)},
        config=config,
        **fit_options,
    )
    best = tr.restore(workdir, jax.eval_shape(init, None), which="best")
    params = nn.combine(best.averaged, best.state) if config.lora else best.averaged
    if config.lora:
        pretrained.save_adapter(model, params, workdir / "adapter")
    save(model, params, names, folder, workdir / "merged")
    rows = tr.read_metrics(workdir)
    loss = min(row["validation/loss"] for row in rows if "validation/loss" in row)
    title = f"{name}, {config.mode}: validation loss {loss:.4f}"
    tr.plots.curves(rows, workdir / "curves.png", title=title)
    print(
        f"trained to step {int(state.step)} in {tr.duration(time.perf_counter() - began)}; the "
        f"best state is that of step {int(best.step)}"
    )
    print(
        f"{workdir}: config.json, metrics.jsonl, tensorboard, checkpoints, curves.png, merged"
        + (", adapter" if config.lora else "")
    )
    return {"loss": loss}


def save(model, params, names, published, folder):
    """Writes the weights and the tokenizer to `folder`, so that generate.py --weights=FOLDER can
    read them.

    Args:
      names: the name of a framework, as returned by `network`. The parameters in the written file
        have the names of this framework.
      published: the folder that contains the pretrained weights and the tokenizer.
    """
    folder.mkdir(exist_ok=True)
    if names == "llama2c":
        llama2c.save(model, params, folder)
    else:
        pretrained.save(model, params, {}, folder, names=names)
    beside = ("config.json", "vocab.txt", "vocab.json", "merges.txt", "characters.json")
    for file in published.glob("*"):
        if file.is_file() and (file.name.startswith("tokenizer") or file.name in beside):
            shutil.copyfile(file, folder / file.name)
