"""Tokens per second of `models.generate` and of transformers' `generate` on PyTorch, with the same
random weights.

    python -m benchmarks.generation                      # in .venv-verify, which has PyTorch and transformers
    python -m benchmarks.generation stories15m --rows=1,16 --rounds=5
    python -m benchmarks.generation smollm-135m --rows=1 --peers=fnet,fnet-int8,fnet-int4
    python -m benchmarks.generation --size=small --peers=fnet      # a test of the benchmark, without PyTorch

Each library generates 64 tokens greedily for prompts of 32 tokens, in float32. fnet saves the
weights in a folder that transformers reads. Each library has its own process. In each round, the
libraries run one after the other. The first call for each shape compiles. Its time is not counted,
but its tokens are compared. The time includes the forward pass of the prompt. The time of a further
token is (time of 64 tokens - time of one token) / 63. Each further token reads all parameters once.
Therefore, its share of the bandwidth is bytes of parameters / time / rate. The rate is the bytes
per second that all cores together read from a large array. The peers fnet-int8 and fnet-int4 quantize all
kernels and the embedding, so that they read fewer bytes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time

from benchmarks._harness import header
from benchmarks._live import Live, PeerError, serve

# The arguments of models.Decoder.
MODELS = {
    "smollm-135m": dict(
        vocab_size=49152,
        width=576,
        depth=30,
        heads=9,
        kv_heads=3,
        hidden=1536,
        context=2048,
        tied=True,
    ),
    "stories15m": dict(
        vocab_size=32000,
        width=288,
        depth=6,
        heads=6,
        kv_heads=6,
        hidden=768,
        context=256,
        tied=True,
    ),
}
SMALL = dict(
    vocab_size=64, width=16, depth=2, heads=2, kv_heads=2, hidden=24, context=64, tied=True
)
PEERS = ("fnet", "torch", "fnet-int8", "fnet-int4")


def prompts(rows, length, vocab_size):
    import numpy as np

    return np.random.default_rng(rows).integers(3, vocab_size, (rows, length)).astype(np.int32)


class Fnet:
    """Answers the questions to fnet's process."""

    def __init__(self, bits=32):
        self.bits = bits

    def prepare(self, folder, fields):
        import jax

        from fnet import compress, models
        from fnet.models import pretrained

        model = models.Decoder(**fields)
        params, _ = model.init(jax.random.key(0), model.example())
        pretrained.save(model, params, {}, folder, names="huggingface")
        model, params, _ = pretrained.load(folder)
        model, params = models.unstack(model, params)
        if self.bits < 32:
            format = compress.Int8 if self.bits == 8 else functools.partial(compress.Int4, 32)
            recipe = {"embed": format(axes=-1), ".*kernel": format()}
            params = compress.quantize(params, recipe)
        self.model, self.params = model, params
        return compress.size(params)

    def generate(self, rows, length, new):
        import jax

        from fnet import models

        out = models.generate(
            self.model,
            self.params,
            prompts(rows, length, self.model.vocab_size),
            max_tokens=new,
            temperature=0,
        )
        return jax.device_get(out.tokens).tolist()


class Torch:
    """Answers the questions to the process of transformers on PyTorch."""

    def prepare(self, folder, fields):
        import transformers

        transformers.logging.set_verbosity_error()
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.network.generation_config.eos_token_id = None  # so that all texts have the same length
        self.vocab_size = fields["vocab_size"]

    def generate(self, rows, length, new):
        import torch

        tokens = torch.tensor(prompts(rows, length, self.vocab_size), dtype=torch.int64)
        with torch.inference_mode():
            out = self.network.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, length:].tolist()


def peer(name):
    """Runs the process of one library."""
    library = Torch() if name == "torch" else Fnet(int(name.partition("int")[2] or 32))

    def timed(**details):
        began = time.perf_counter()
        library.generate(**details)
        return time.perf_counter() - began

    serve({"prepare": library.prepare, "generate": library.generate, "time": timed})


def bandwidth() -> float:
    """Returns the bytes per second that all cores together read."""
    import numpy as np

    arrays = [np.ones(1 << 27, np.float32) for _ in range(len(os.sched_getaffinity(0)))]
    with concurrent.futures.ThreadPoolExecutor(len(arrays)) as pool:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.sum, arrays))
            times.append(time.perf_counter() - began)
    return sum(array.nbytes for array in arrays) / min(times)


def measure(live, name, options):
    """Prints the table rows of a model: the tokens per second of each peer, and the ratio of fnet
    to the last peer."""
    fields = SMALL if options.size == "small" else MODELS[name]
    length, new = (4, 8) if options.size == "small" else (32, 64)
    with tempfile.TemporaryDirectory() as folder:
        sizes = [each.ask("prepare", limit=600, folder=folder, fields=fields) for each in live]
        sizes = [size or sizes[0] for size in sizes]
    rate = bandwidth()
    for rows in options.rows:
        shape = dict(rows=rows, length=length, new=new)
        texts = [each.ask("generate", limit=600, **shape) for each in live]
        equal = [
            sum(a == b for row, other in zip(texts[0], text) for a, b in zip(row, other))
            for text in texts
        ]
        if any(len(row) != new for text in texts for row in text):
            raise PeerError("a peer generated fewer tokens than the others")
        for each in live:
            each.ask("generate", limit=600, **shape | dict(new=1))
        seconds, firsts = ({each.name: [] for each in live} for _ in range(2))
        for _ in range(options.rounds):
            for each in live:
                seconds[each.name].append(each.ask("time", limit=600, **shape))
                firsts[each.name].append(each.ask("time", limit=600, **shape | dict(new=1)))
        rates = {peer: [rows * new / value for value in values] for peer, values in seconds.items()}
        last = live[-1].name
        ratio = statistics.median(a / b for a, b in zip(rates[live[0].name], rates[last]))
        cells = [
            name,
            str(rows),
            *(
                f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
                for values in rates.values()
            ),
            f"{ratio:.2f}",
            f"{equal[-1] / (rows * new):.0%}",
        ]
        more = {
            peer: statistics.median(a - b for a, b in zip(values, firsts[peer])) / (new - 1)
            for peer, values in seconds.items()
        }
        cells += [
            " / ".join(f"{1e3 * statistics.median(firsts[peer]):.0f}" for peer in firsts),
            " / ".join(f"{1e3 * each:.1f}" for each in more.values()),
            " / ".join(f"{n / each / rate:.0%}" for n, each in zip(sizes, more.values()))
            + f" of {rate / 1e9:.0f} GB/s",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def parser():
    numbers = lambda text: [int(number) for number in text.split(",")]
    flags = argparse.ArgumentParser(
        prog="benchmarks.generation", description="Tokens per second of text generation."
    )
    flags.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    flags.add_argument("--rows", type=numbers, default=[1, 4, 16], help="numbers of prompts")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--size", choices=("full", "small"), default="full")
    flags.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=["fnet", "torch"],
        help=f"of {', '.join(PEERS)}; the first is fnet",
    )
    return flags


def main(arguments):
    options = parser().parse_args(arguments)
    for given, known in (options.models, MODELS), (options.peers, PEERS):
        for name in set(given) - set(known):
            parser().error(f"no {name!r} among {', '.join(known)}")
    if options.peers[0] != "fnet" or min([options.rounds, *options.rows]) < 1:
        parser().error(
            "expected fnet as the first of --peers, and --rounds and --rows of at least 1"
        )
    with contextlib.ExitStack() as alive:
        live = [
            alive.enter_context(
                Live(
                    name,
                    [sys.executable, "-m", "benchmarks.generation", "serve", name],
                    {"JAX_PLATFORMS": "cpu"},
                )
            )
            for name in options.peers
        ]
        print(
            header(
                " ".join(["python -m benchmarks.generation", *arguments]),
                options.rounds,
                ("torch", "transformers"),
                allocator="default",
            )
        )
        print(
            "| model | rows | "
            + " | ".join(f"{name} tokens/s" for name in options.peers)
            + f" | ratio to {options.peers[-1]} | equal tokens | ms to the first token | ms for a further one "
            + "| share of the bandwidth |\n"
            + "|---" * (len(live) + 7)
            + "|"
        )
        for name in options.models:
            measure(live, name, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        peer(sys.argv[2])
    else:
        try:
            main(sys.argv[1:])
        except PeerError as error:
            sys.exit(f"benchmarks.generation: {error}")
