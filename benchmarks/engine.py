"""Tokens per second and waiting times of `serve.Engine`, beside `models.generate`, the loop of the
server for bundles, and transformers' continuous batching.

    python -m benchmarks.engine                                    # SmolLM-135M's shape, 1, 4, 16 and 64 clients
    python -m benchmarks.engine --peers=engine,generate,transformers      # in .venv-verify, which has PyTorch
    python -m benchmarks.engine --prefix                           # 64 requests with 512 tokens in common
    python -m benchmarks.engine --exact                            # the price of exact=True
    python -m benchmarks.engine --pages                            # keys and values in slots and in pages
    python -m benchmarks.engine --size=small --clients=1,4         # a test of the benchmark

Weights are random and float32, texts greedy. A client sends a request, reads all of its tokens and
sends the next, until 32 requests are answered; their prompts have 8 to 128 tokens, and the texts 16
to 64. Each peer has its own process and answers the same requests once before the time counts, so
that its programs are compiled; in each round, the peers run one after the other. "generate" takes as
many requests at once as there are clients, and as many tokens as the longest of them needs, of which
only those asked for count; "equal" is `generate` with as many rows and tokens, all asked for, which
is the most that one program can make. "server" is the loop of `fnet serve` for bundles, one thread
for each client, without HTTP.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
import tempfile
import threading
import time

from benchmarks._harness import header
from benchmarks._live import Live, PeerError, serve

SHAPES = {
    "full": dict(
        vocab_size=49152, width=576, depth=30, heads=9, kv_heads=3, hidden=1536, context=2048
    ),
    "medium": dict(
        vocab_size=32000, width=288, depth=6, heads=6, kv_heads=6, hidden=768, context=2048
    ),
    "small": dict(vocab_size=64, width=16, depth=2, heads=2, kv_heads=2, hidden=24, context=1024),
}
PEERS = ("engine", "engine-int8", "generate", "equal", "server", "transformers")


def requests(count, vocab_size, longest=(128, 64)):
    """(prompt, number of new tokens) of each request."""
    import numpy as np

    draw = np.random.default_rng(0)
    prompt, new = longest
    return [
        (
            draw.integers(3, vocab_size, draw.integers(min(8, prompt), prompt + 1)).tolist(),
            int(draw.integers(min(16, new), new + 1)),
        )
        for _ in range(count)
    ]


def clients_of(count, work, read):
    """Answers the requests with `count` threads. `read(prompt, new)` yields tokens. Returns seconds,
    texts, and the waiting times of all requests."""
    waiting, texts, firsts, betweens = list(enumerate(work))[::-1], {}, [], []
    lock = threading.Lock()

    def client():
        while True:
            with lock:
                if not waiting:
                    return
                i, (prompt, new) = waiting.pop()
            before, tokens = time.perf_counter(), []
            for token in read(prompt, new):
                now = time.perf_counter()
                (betweens if tokens else firsts).append(now - before)
                before = now
                tokens.append(int(token))
            texts[i] = tokens

    began = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "texts": [texts[i] for i in range(len(work))],
        "first": firsts,
        "between": betweens,
    }


class Fnet:
    """A peer with fnet's model."""

    def prepare(self, folder, fields, slots):
        import jax

        from fnet import models
        from fnet.models import pretrained

        model = models.Decoder(**fields, tied=True)
        params, _ = model.init(jax.random.key(0), model.example())
        pretrained.save(model, params, {}, folder, names="huggingface")
        self.model, self.params, _ = pretrained.load(folder)
        self.slots = slots
        self.begin()

    def begin(self):
        from fnet import models

        self.model, self.params = models.unstack(self.model, self.params)


class Engine(Fnet):
    bits, options = 32, {}

    def begin(self):
        from fnet import compress, serve

        if self.bits == 8:
            recipe = {"embed": compress.Int8(axes=-1), ".*kernel": compress.Int8()}
            self.params = compress.quantize(self.params, recipe)
        self.engine = serve.Engine(
            self.model, self.params, slots=self.slots, prefix_cache=False, **self.options
        )
        self.engine.start()

    def run(self, work, clients):
        def read(prompt, new):
            request = self.engine.submit(prompt, max_tokens=new, temperature=0)
            return (token.id for token in request)

        return clients_of(clients, work, read)


class Int8(Engine):
    bits = 8


class Generate(Fnet):
    def run(self, work, clients):
        began, texts, firsts = time.perf_counter(), [], []
        for start in range(0, len(work), clients):
            batch = work[start : start + clients]
            texts += self.texts(batch)
            firsts += [time.perf_counter() - began] * len(batch)
        return {
            "seconds": time.perf_counter() - began,
            "texts": texts,
            "first": firsts,  # nobody sees a token before the end of the batch
            "between": [0.0],
        }

    def texts(self, batch):
        import numpy as np

        from fnet import models

        tokens, lengths = models.padded([prompt for prompt, _ in batch])
        longest = max(new for _, new in batch)
        out = models.generate(
            self.model, self.params, tokens, max_tokens=longest, temperature=0, lengths=lengths
        )
        rows = np.asarray(out.tokens).tolist()
        return [row[:new] for row, (_, new) in zip(rows, batch)]


class Equal(Generate):
    def run(self, work, clients):
        prompt = max((prompt for prompt, _ in work), key=len)
        new = max(new for _, new in work)
        return super().run([(prompt, new)] * clients, clients)


class Server(Fnet):
    def begin(self):
        from fnet import export
        from fnet.export.standalone import _loaded
        from fnet.serve._generate import Generator

        limit = self.model.context
        spec = export.spec("b, t", "int32", where=f"t <= {limit}")
        program = export.program(self.model, self.params, tokens=spec)
        program = export.generation(program, self.model, context=min(1024, limit))
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/model.fnet"
        program.save(path)
        self.generator = Generator("model", "1", _loaded.load(path))

    def run(self, work, clients):
        from fnet.serve._generate import Request

        def read(prompt, new):
            return self.generator.tokens(Request(prompt, new, 0.0, 0, 0))

        return clients_of(clients, work, read)


class Transformers:
    def prepare(self, folder, fields, slots):
        import transformers

        transformers.logging.set_verbosity_error()
        network = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="paged|sdpa"
        )
        network.generation_config.eos_token_id = None
        network.generation_config.do_sample = False
        self.network = network.eval()

    def run(self, work, clients):
        import torch

        manager = self.network.init_continuous_batching()
        waiting, sent, times, texts = list(enumerate(work))[::-1], {}, {}, {}

        def send():
            if waiting:
                i, (prompt, new) = waiting.pop()
                sent[str(i)], times[str(i)] = time.perf_counter(), []
                manager.add_request(
                    prompt, request_id=str(i), max_new_tokens=new, streaming=True, eos_token_id=-1
                )

        began = time.perf_counter()
        with torch.inference_mode():
            manager.start()
            for _ in range(clients):
                send()
            while len(texts) < len(work):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("transformers gave no result within 60 s")
                name, tokens = result.request_id, list(result.generated_tokens)
                times[name] += [time.perf_counter()] * (len(tokens) - len(times[name]))
                if result.is_finished():
                    texts[int(name)] = tokens
                    send()
            seconds = time.perf_counter() - began
            manager.stop(block=True)
        return {
            "seconds": seconds,
            "texts": [texts[i] for i in range(len(work))],
            "first": [each[0] - sent[name] for name, each in times.items()],
            "between": [b - a for each in times.values() for a, b in itertools.pairwise(each)],
        }


KINDS = {
    "engine": Engine,
    "engine-int8": Int8,
    "generate": Generate,
    "equal": Equal,
    "server": Server,
    "transformers": Transformers,
}


def peer(name):
    """Runs the process of one peer."""
    mine = KINDS[name]()
    serve({"prepare": mine.prepare, "run": mine.run})


def measured(answer):
    """(tokens per second, percentiles of the times to the first token and between two), in ms."""
    tokens = sum(map(len, answer["texts"]))
    quantile = lambda values, q: sorted(values)[min(len(values) - 1, int(q * len(values)))]
    return [tokens / answer["seconds"]] + [
        1e3 * quantile(answer[kind], q) for kind in ("first", "between") for q in (0.5, 0.99)
    ]


def throughput(options):
    fields = SHAPES[options.size]
    longest = (24, 12) if options.size == "small" else (128, 64)
    work = requests(options.requests, fields["vocab_size"], longest)
    columns = "tokens/s (min to max) | first token p50, p99 ms | between tokens p50, p99 ms"
    print(f"| clients | peer | {columns} | equal tokens |\n" + "|---" * 6 + "|")
    with contextlib.ExitStack() as alive:
        live = []
        with tempfile.TemporaryDirectory() as folder:
            for name in options.peers:
                command = [sys.executable, "-m", "benchmarks.engine", "serve", name]
                each = alive.enter_context(Live(name, command, {"JAX_PLATFORMS": "cpu"}))
                each.ask("prepare", limit=900, folder=folder, fields=fields, slots=options.slots)
                live.append(each)
        for clients in options.clients:
            ask = lambda each, clients=clients: each.ask(
                "run", limit=3600, work=work, clients=clients
            )
            texts = {each.name: ask(each)["texts"] for each in live}  # compiles
            figures = {each.name: [] for each in live}
            for _ in range(options.rounds):
                for each in live:
                    figures[each.name].append(measured(ask(each)))
            for name, rows in figures.items():
                rates, *times = zip(*rows)
                first, late, between, slow = map(statistics.median, times)
                same = [
                    a == b
                    for one, other in zip(texts[live[0].name], texts[name])
                    for a, b in zip(one, other)
                ]
                cells = [
                    str(clients),
                    name,
                    f"{statistics.median(rates):.4g} ({min(rates):.4g} to {max(rates):.4g})",
                    f"{first:.0f}, {late:.0f}",
                    f"{between:.1f}, {slow:.1f}" if slow else "",
                    "" if name == "equal" else f"{sum(same) / len(same):.1%}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)


def engine_of(options, **more):
    """The model of the benchmark, and an engine."""
    import jax

    from fnet import models, serve

    model = models.Decoder(**SHAPES[options.size], tied=True)
    params, _ = model.init(jax.random.key(0), model.example())
    return serve.Engine(model, params, **{"slots": options.slots, **more})


def answer(engine, work):
    waiting = [engine.submit(prompt, max_tokens=new, temperature=0) for prompt, new in work]
    for request in waiting:
        request.result()


def seconds_of(engine, work, rounds):
    """The median time in which an engine generates texts, once its programs are compiled."""

    def run():
        began = time.perf_counter()
        answer(engine, work)
        return time.perf_counter() - began

    run()
    return statistics.median(run() for _ in range(rounds))


def prefix(options):
    """64 requests with a common beginning, with a warm, a cold and no prefix cache."""
    vocab_size = SHAPES[options.size]["vocab_size"]
    common, count = (64, 8) if options.size == "small" else (512, 64)
    [(beginning, _)] = requests(1, vocab_size, (common, 1))
    beginning = (beginning * common)[:common]
    work = [(beginning + prompt, 8) for prompt, _ in requests(count, vocab_size, (16, 1))]
    print("| prefix cache | seconds | ratio |\n|---|---|---|")
    without = seconds_of(engine_of(options, prefix_cache=False), work, options.rounds)
    engine = engine_of(options)
    warm = seconds_of(engine, work, options.rounds)
    colds = []
    for _ in range(options.rounds):
        engine._loop.prefixes.clear()
        began = time.perf_counter()
        answer(engine, work)
        colds.append(time.perf_counter() - began)
    for name, seconds in ("none", without), ("cold", statistics.median(colds)), ("warm", warm):
        print(f"| {name} | {seconds:.3g} | {seconds / without:.2f} |", flush=True)


def exact(options):
    """The price of bits that do not depend on company."""
    work = requests(options.slots, SHAPES[options.size]["vocab_size"], (16, 16))
    print("| engine | seconds | ratio |\n|---|---|---|")
    plain = None
    for name, more in (
        ("default", {}),
        ("full table", {"context": 256}),
        ("exact=True", {"context": 256, "exact": True}),
    ):
        seconds = seconds_of(engine_of(options, **more), work, options.rounds)
        plain = plain or seconds
        print(f"| {name} | {seconds:.3g} | {seconds / plain:.2f} |", flush=True)


def pages(options):
    """One attention layer of a decode step, with the keys and values of each row in one piece, and in
    pages of 32 tokens that are gathered."""
    import jax
    import jax.numpy as jnp

    from fnet import layers as nn

    fields = SHAPES[options.size]
    groups, dim = fields["kv_heads"], fields["width"] // fields["heads"]
    rows, length, page = options.slots, 1024, 32
    q = jnp.ones((rows, 1, fields["heads"], dim))
    starts = jnp.full(rows, length - 1, jnp.int32)
    table = jax.random.permutation(jax.random.key(0), rows * length // page).astype(jnp.int32)
    attend = functools.partial(nn.dot_product_attention, causal=True)
    new = jnp.ones((rows, groups, dim))
    line = jnp.arange(rows)

    def slots(q, k, v, starts):
        k, v = (x.at[line, :, starts].set(new) for x in (k, v))  # [rows, groups, time, dim]
        y = attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2), starts=starts)
        return y, k, v

    def paged(q, k, v, starts):
        at = table.reshape(rows, -1)
        where = at[line, starts // page], slice(None), starts % page
        k, v = (x.at[where].set(new) for x in (k, v))  # [pages, groups, page, dim]
        whole = (x[at].transpose(0, 1, 3, 2, 4).reshape(rows, length, groups, dim) for x in (k, v))
        return attend(q, *whole, starts=starts), k, v

    print("| keys and values | ms | ratio |\n|---|---|---|")
    base = None
    shapes = (rows, groups, length, dim), (rows * length // page, groups, page, dim)
    for name, run, shape in zip(("slots", "pages"), (slots, paged), shapes):
        compiled = jax.jit(run, donate_argnums=(1, 2))
        k, v = jnp.ones(shape), jnp.ones(shape)
        times = []
        for _ in range(20 * options.rounds):
            began = time.perf_counter()
            _, k, v = jax.block_until_ready(compiled(q, k, v, starts))
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[3:])
        base = base or seconds
        print(f"| {name} | {1e3 * seconds:.3g} | {seconds / base:.2f} |", flush=True)


def parser():
    numbers = lambda text: [int(number) for number in text.split(",")]
    flags = argparse.ArgumentParser(prog="benchmarks.engine", description="Texts of many requests.")
    flags.add_argument("--size", choices=SHAPES, default="full")
    flags.add_argument("--clients", type=numbers, default=[1, 4, 16, 64])
    flags.add_argument("--requests", type=int, default=32)
    flags.add_argument("--slots", type=int, default=16)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=["engine", "engine-int8", "generate", "equal", "server"],
        help=f"of {', '.join(PEERS)}",
    )
    for table in (prefix, exact, pages):
        flags.add_argument(f"--{table.__name__}", action="store_true", help=table.__doc__)
    return flags


def main(arguments):
    options = parser().parse_args(arguments)
    for name in set(options.peers) - set(PEERS):
        parser().error(f"no {name!r} among {', '.join(PEERS)}")
    command = " ".join(["python -m benchmarks.engine", *arguments])
    print(header(command, options.rounds, ("torch", "transformers"), allocator="default"))
    tables = [each for each in (prefix, exact, pages) if getattr(options, each.__name__)]
    for table in tables or [throughput]:
        table(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        peer(sys.argv[2])
    else:
        try:
            main(sys.argv[1:])
        except PeerError as error:
            sys.exit(f"benchmarks.engine: {error}")
