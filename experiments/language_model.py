"""Trains a language model (a GPT, a Decoder or an LSTM) on characters, bytes or tokens, and
generates text with it.

    python experiments/language_model.py                              # The Tempest, minutes on two CPU cores
    python experiments/language_model.py --preset=10m --data_dir=DIR  # 10 million parameters, for an accelerator
    python experiments/language_model.py --model=lstm --tokens=byte
    python experiments/language_model.py --preset=124m --devices=local ...           # all attached devices
    python experiments/language_model.py --preset=124m --plan=v5e:4x4 --width=768    # prints a plan and exits

With --data_dir=DIR, the text is DIR/input.txt or, if this file does not exist, all files DIR/*.txt.
Without --data_dir, the text is The Tempest (experiments/data/tempest.txt). With --tokens=bin, the
tokens are read from DIR/train.bin and DIR/val.bin, 16-bit tokens in the format of nanoGPT's
scripts.

The run's folder (--workdir, else runs/language_model) receives config.json, metrics.jsonl, a
TensorBoard log, checkpoints, curves.png, sample.txt, and model.safetensors with the trained weights
and their vocabulary. experiments/generate.py --weights=runs/language_model reads these files. The
same command resumes an interrupted run; --restart starts again from the first step.
"""

import dataclasses
import math
import time
from pathlib import Path

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from fnet import export, models
from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option
TEMPEST = Path(__file__).parent / "data" / "tempest.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The hyperparameters, which determine the result of a run, and the path data_dir, which does
    not."""

    preset: str = option(
        "small",
        "preset of the sizes and the training: small, 10m or 124m",
        choices=("small", "10m", "124m"),
    )
    data_dir: str | None = option(
        None,
        "folder of the text: input.txt, other *.txt files, or train.bin and val.bin",
        decides=False,
    )
    tokens: str = option(
        "char",
        "unit of a token: char (character), byte, or bin (token files of nanoGPT)",
        choices=("char", "byte", "bin"),
    )
    vocab_size: int | None = option(
        None,
        "with --tokens=bin: number of tokens in the vocabulary (50304 is sufficient "
        "for GPT-2's tokens)",
        within="[1, 65536]",
    )
    model: str = option("gpt", "model: gpt, llama or lstm", choices=("gpt", "llama", "lstm"))
    width: int | None = option(None, "number of features of each token", within="[1, 65536]")
    depth: int | None = option(None, "number of blocks or LSTM layers", within="[1, 256]")
    heads: int | None = option(None, "number of attention heads", within="[1, 65536]")
    context: int | None = option(None, "number of tokens in an example", within="[1, 1048576]")
    dropout: float | None = option(
        None,
        "dropout rate of the embeddings, the attention and the residual branches",
        within="[0, 1)",
    )
    steps: int | None = option(None, "number of training steps", within=tr.flags.STEPS)
    batch_size: int | None = option(None, "number of texts in a batch", within="[1, 1048576]")
    optimizer: str = option(
        "adamw", f"name of the optimizer: {', '.join(tr.OPTIMIZERS)}", choices=tr.OPTIMIZERS
    )
    schedule: str = option(
        "cosine", f"schedule of the learning rate: {', '.join(tr.SCHEDULES)}", choices=tr.SCHEDULES
    )
    learning_rate: float | None = option(None, "largest learning rate", within="(0, 1000]")
    final: float = option(
        0.1, "last learning rate, as a fraction of the largest learning rate", within="[0, 1]"
    )
    warmup: float = option(
        0.02,
        "fraction of the training steps during which the learning rate increases",
        within="[0, 1)",
    )
    weight_decay: float = option(
        0.1,
        "coefficient of the weight decay, which applies to kernels and embeddings but "
        "not to biases and norm scales",
        within="[0, 1000]",
    )
    beta2: float = option(0.99, "for adamw: decay rate of the second moment", within="[0, 1)")
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", within="[0, 1000000]")
    ema: float = option(
        0.0,
        "decay rate of the moving average of the weights, which is evaluated instead of the "
        "weights; 0: no average",
        within="[0, 1)",
    )
    early_stop: int = option(
        0,
        "number of evaluations without improvement of the validation loss after which the "
        "training stops; 0: no early stopping",
        within="[0, 1000000]",
    )
    precision: str = option(
        "auto",
        "dtype of matrix products and convolutions: auto (chosen for the chip), float32, "
        "bfloat16 or float16",
        choices=common.PRECISIONS,
    )
    residual: str = option(
        "auto",
        "dtype of the residual stream: auto (bfloat16 if the products are in bfloat16) or float32",
        choices=common.RESIDUALS,
    )
    seed: int = option(
        0, "random seed of the initial weights, the batches and dropout", within=tr.flags.SEED
    )


PRESETS = tr.presets.LANGUAGE_MODEL


def make_model(config, vocab_size):
    if config.model == "lstm":
        return models.LSTMLanguageModel(
            vocab_size, config.width, config.depth, dropout=config.dropout, tied=True
        )
    sizes = vocab_size, config.width, config.depth, config.heads
    if config.model == "gpt":
        return models.GPT(*sizes, context=config.context, dropout=config.dropout)
    hidden = (
        -(-8 * config.width // 3 // 32) * 32
    )  # as many weights as an MLP of four times the width
    return models.Decoder(*sizes, config.heads, hidden, context=config.context, tied=True)


def read(config):
    """Returns (training tokens, validation tokens, the tokenizer or None).

    Raises:
      ValueError: a file has another format; the message names the file.
      FileNotFoundError: there is no text.
    """
    folder = common.user_path("data_dir", config.data_dir) if config.data_dir else None
    if config.tokens == "bin":
        if folder is None:
            raise tr.ConfigError(
                "--tokens=bin: name the folder of train.bin and val.bin with --data_dir"
            )
        tokenizer = models.read_tokenizer(folder) if (folder / "tokenizer.json").exists() else None
        return tr.read_tokens(folder / "train.bin"), tr.read_tokens(folder / "val.bin"), tokenizer
    paths = [TEMPEST] if folder is None else [folder / "input.txt"]
    if folder is not None and not paths[0].is_file():
        paths = sorted(path for path in folder.glob("*.txt") if path.is_file())
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no text: put input.txt or other *.txt there, or omit --data_dir"
        )
    text = "\n".join(map(common.read_text, paths))
    if not text:
        raise ValueError(f"{' and '.join(map(str, paths))}: expected a text, got an empty file")
    tokenizer = models.ByteTokenizer() if config.tokens == "byte" else models.CharTokenizer(text)
    if tokenizer.vocab_size > 65536:
        raise ValueError(
            f"the text has {tokenizer.vocab_size:,} different characters, at most 65,536 are "
            "supported: use --tokens=byte"
        )
    tokens = tokenizer.encode(text).astype(np.uint16 if tokenizer.vocab_size > 256 else np.uint8)
    train, validation = np.split(tokens, [len(tokens) * 9 // 10])
    return train, validation, tokenizer


def check_vocabulary(tokenizer, workdir):
    """Raises ConfigError if the folder contains weights for a vocabulary other than that of the
    text."""
    path = workdir / "characters.json"
    if common.restarting() or not path.exists():
        return
    if (
        not isinstance(tokenizer, models.CharTokenizer)
        or models.CharTokenizer.read(path).characters != tokenizer.characters
    ):
        raise tr.ConfigError(
            f"{workdir} holds a run on a text with other characters (characters.json): use that "
            "text, choose another --workdir, or --restart"
        )


def train(config, workdir, policy, **fit_options):
    """Trains a model, or resumes an interrupted run. A run that is already complete is only
    evaluated. After the training, the weights are written first, so that no later error can lose
    them.

    Returns:
      (the model, its parameters, its tokenizer, the validation loss).
    """
    train_tokens, test_tokens, tokenizer = read(config)
    vocab_size = config.vocab_size or tokenizer.vocab_size
    if not common.only_planned():
        check_vocabulary(tokenizer, workdir)
    batches = tr.Windows(
        train_tokens,
        length=config.context,
        batch_size=config.batch_size,
        seed=config.seed,
        vocab_size=vocab_size,
    )
    model, steps = make_model(config, vocab_size), config.steps
    rate = tr.schedule(
        config.schedule, config.learning_rate, steps, warmup=config.warmup, final=config.final
    )
    options = {"b2": config.beta2} if config.optimizer == "adamw" else {}
    axes = model.spec(jax.ShapeDtypeStruct((1, config.context), jnp.int32))
    tx = tr.optimizer(
        config.optimizer,
        rate,
        weight_decay=config.weight_decay,
        clip=config.clip or None,
        axes=axes,
        **options,
    )
    tx = ft.loss_scale(tx, policy)

    def step(state, batch):
        tokens = batch["tokens"]  # [batch, context + 1]
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)

        def loss(params):
            return model.cross_entropy(
                params, tokens[:, :-1], tokens[:, 1:], key=key, train=True
            ).mean()

        value, grads = ft.autocast(ft.scaled_value_and_grad(loss), policy)(
            state.opt_state, state.params
        )
        metrics = {"loss": value, "learning_rate": rate(state.step)}
        if scaler := ft.loss_scale_state(state.opt_state):
            metrics |= {"loss_scale": scaler.scale, "skipped": scaler.skipped.astype(jnp.float32)}
        return state.apply(tx, grads), metrics

    def measure(state, batch):
        tokens = batch["tokens"].astype(jnp.int32)
        each = ft.autocast(model.cross_entropy, policy)(
            state.averaged, tokens[:, :-1], tokens[:, 1:]
        )
        return {"loss": tr.mean(each, jnp.broadcast_to(batch["weight"][:, None], each.shape))}

    held_out = tr.stretches(test_tokens, config.context)[:2000]
    if held_out.max() >= vocab_size:
        raise ValueError(
            f"the validation text holds the token {held_out.max()}, outside a vocabulary of "
            f"{vocab_size}: set --vocab_size"
        )
    evaluate = {
        "validation": tr.evaluator(measure, {"tokens": held_out}, batch_size=config.batch_size)
    }
    stop = (
        tr.EarlyStop(metric="validation/loss", patience=config.early_stop, mode="min")
        if config.early_stop
        else None
    )

    def init(key):
        params, _ = model.init(key, jax.ShapeDtypeStruct((1, config.context), jnp.int32))
        return tr.TrainState.create(params, tx, ema=config.ema or None)

    common.check_memory(
        init,
        4 * config.batch_size * config.context * config.width,
        "--batch_size, --context, --width or --depth",
    )
    plan = common.plan(step, init, batches(0))
    state = (plan.init if plan else init)(jax.random.key(config.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(
        f"{len(train_tokens):,} tokens to train on, {held_out.shape[0] * config.context:,} to "
        f"validate on, {vocab_size} different"
    )
    print(
        f"{config.model}: {count:,} parameters, {steps} steps of {config.batch_size} x "
        f"{config.context} tokens"
    )

    every = max(math.ceil(steps / 20), 10)
    common.start(
        workdir,
        "model.safetensors",
        "model.json",
        "characters.json",
        "curves.png",
        "sample.txt",
        "summary.json",
    )
    where = () if config.model == "lstm" else f"t <= {config.context}"
    export.record(workdir, model, tokens=export.spec("b, t", "int32", where=where))
    if isinstance(tokenizer, models.CharTokenizer):
        tokenizer.write(workdir / "characters.json")  # before the weights, which need it
    began = time.perf_counter()
    state = tr.fit(
        step,
        state,
        batches,
        steps=steps,
        workdir=workdir,
        evaluate=evaluate,
        every=every,
        log_every=every,
        best="validation/loss",
        best_mode="min",
        early_stop=stop,
        progress=tr.Progress(),
        config=config,
        notes={"policy": str(policy)},
        plan=plan,
        **fit_options,
    )
    if getattr(model, "NAMES", None):
        pretrained.save(
            model, state.averaged, {}, workdir / "model.safetensors", names="huggingface"
        )
    common.save_summary(workdir, model, jax.ShapeDtypeStruct((1, config.context), jnp.int32))
    rows = tr.read_metrics(workdir)
    speed = common.median_speed(rows)
    print(
        f"trained to step {int(state.step)} in {tr.duration(time.perf_counter() - began)}, "
        f"{speed:.1f} steps/s, {speed * config.batch_size * config.context:.0f} tokens/s"
    )
    last = [row["validation/loss"] for row in rows if "validation/loss" in row][-1]
    tr.plots.curves(
        rows, workdir / "curves.png", title=f"{config.model}, {count:,} parameters: loss {last:.4f}"
    )
    return model, state.averaged, tokenizer, last


def sample(model, params, tokenizer, config, *, temperature, top_k):
    """Returns a generated text of about 500 tokens."""
    most = 500 if config.model == "lstm" else min(config.context, 500)
    first = np.zeros(1, np.int32)  # the first character, if the text has no line break
    if tokenizer is not None and "\n" in getattr(tokenizer, "characters", "\n"):
        first = tokenizer.encode("\n") if len(tokenizer.encode("\n")) else first
    prompts = np.tile(first, (-(-500 // most), 1))
    out = models.generate(
        model,
        params,
        prompts,
        jax.random.key(config.seed),
        max_tokens=most,
        temperature=temperature,
        top_k=top_k,
    )
    texts = [
        tokenizer.decode(row).strip("\n") if tokenizer else " ".join(map(str, row))
        for row in np.asarray(out.tokens)
    ]
    return "\n\n----\n".join(texts)


def define_flags():
    tr.flags.define(Config, flags.FLAGS, by="preset")
    flags.DEFINE_string("workdir", None, "folder of the run (default: runs/language_model)")
    common.define_run_flags()
    common.define_device_flags()
    flags.DEFINE_float(
        "temperature", 0.8, "temperature of the text that is sampled after the training"
    )
    flags.DEFINE_integer(
        "top_k",
        200,
        "number of the most probable tokens from which the tokens of this text are sampled",
        lower_bound=1,
        upper_bound=2**31 - 1,
    )


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    common.no_arguments(argv, "--preset=small")
    common.check_temperature(flags.FLAGS.temperature)
    return checked(tr.flags.read(Config, flags.FLAGS, PRESETS, by="preset"))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    if config.width % config.heads:
        raise tr.ConfigError(
            f"--heads={config.heads}: expected a divisor of --width={config.width}"
        )
    if config.model == "llama" and config.width // config.heads % 2:
        raise tr.ConfigError(
            f"--heads={config.heads}: a llama needs an even number of features in each head, and "
            f"--width={config.width} leaves {config.width // config.heads}"
        )
    if config.tokens == "bin" and config.vocab_size is None:
        config = dataclasses.replace(config, vocab_size=50304)
    elif config.tokens != "bin" and config.vocab_size is not None:
        raise tr.ConfigError(
            f"--vocab_size is for --tokens=bin; "
            f"the vocabulary size of {config.tokens} tokens is fixed"
        )
    tr.optimizer(config.optimizer, 0.1, weight_decay=config.weight_decay)
    return config


def main(argv):
    config = configured(argv)
    common.needs("matplotlib")
    workdir = common.user_path("workdir", flags.FLAGS.workdir or "runs/language_model")
    policy, config = common.decided(config, workdir, restart=flags.FLAGS.restart)
    if not common.only_planned() and not flags.FLAGS.restart:
        tr.same_config(config, workdir, but=("data_dir",))
    policy = common.with_residual(policy, config)
    print(f"chip: {hw.detect()}")
    print(f"policy: {policy}")
    model, params, tokenizer, loss = train(config, workdir, policy, **common.fit_options())
    options = {name: flags.FLAGS[name].value for name in ("temperature", "top_k")}
    text = sample(model, params, tokenizer, config, **options)
    (workdir / "sample.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    weights = ", model.safetensors" if (workdir / "model.safetensors").exists() else ""
    print(
        f"{workdir}: config.json, metrics.jsonl, tensorboard, checkpoints, curves.png, "
        f"sample.txt{weights}"
    )
    print(f"export the model: fnet export {workdir} --to=bundle,onnx")
    print(f"validation loss {loss:.4f}")


if __name__ == "__main__":
    define_flags()
    common.run(main)
