"""Requests per second of `fnet serve` before and after a batch had to be proved, or between any two
commits.

    git worktree add ../before 1fa0dcb2
    python -m benchmarks.proved_serving --before=../before
    python -m benchmarks.proved_serving --conditions             # what checking them costs

Both servers run at the same time, and the same clients ask them in turn, so that whatever else the
machine does affects both. "minilm" and "resnet50" are those of `benchmarks.serving`; their rows are
proved to be independent. "minilm-lengths" gets texts of 24 to 31 tokens, which are padded to 32. Its
padding is proved to be harmless under conditions, so the program computes these, too. `--conditions`
computes the same batches with and without them, in turn.
"""

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _harness
from benchmarks.serving import TIME, infer, load, minilm, process, resnet50
from fnet import export, models
from fnet.serve._model import Model


def minilm_lengths():
    """The program, the options of the server, and the inputs of requests."""
    model = models.Bert(**models.Bert.PRESETS["minilm-l6"])
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, TIME), jnp.int32))

    def embed(params, tokens, lengths):
        hidden = model(params, tokens, lengths).hidden
        inside = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        return jnp.where(inside[..., None], hidden, 0).sum(1) / lengths[:, None].astype(
            hidden.dtype
        )

    specs = {
        "tokens": export.spec("b, t", "int32", where="t <= 512"),
        "lengths": export.spec("b", "int32", where="t <= 512"),
    }
    draw = np.random.default_rng(0)
    sizes = [24 + i % 8 for i in range(16)]
    inputs = [
        {
            "tokens": draw.integers(0, model.vocab_size, (1, n)).astype(np.int32),
            "lengths": np.array([n], np.int32),
        }
        for n in sizes
    ]
    return export.program(embed, params, **specs), [f"--pad=t={TIME}"], inputs


def of_one_input(make):
    program, name, rows = make()
    return program, [], [{name: row} for row in rows]


MODELS = {
    "minilm": lambda: of_one_input(minilm),
    "resnet50": lambda: of_one_input(resnet50),
    "minilm-lengths": minilm_lengths,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--before", type=Path, help="folder of the other commit")
    parser.add_argument("--conditions", action="store_true")
    parser.add_argument("--seconds", type=float, default=5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-batch", type=int, default=16)
    args = parser.parse_args()
    if args.conditions:
        return conditions(20 * args.rounds, args.max_batch)
    if args.before is None:
        parser.error("expected --before=FOLDER, a worktree of the other commit")
    options = f"--before=../before --rounds={args.rounds} --seconds={args.seconds:g}"
    command = f"python -m benchmarks.proved_serving {options}"
    print(_harness.header(command, args.rounds, ("uvicorn",)))
    print("| model | requests/s before | requests/s now | ratio of a round |\n|---|---|---|---|")
    here = Path(__file__).parent.parent
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
            program, options, inputs = MODELS[name]()
            file = Path(folder) / f"{name}.fnet"
            program.save(file, tests={"predict": inputs[0]})
            bundle = export.load(file)
            want = [np.asarray(bundle(*each.values())) for each in inputs]
            options += ["--port=0", f"--max-batch={args.max_batch}", "--timeout=300"]
            serve = ["-m", "fnet.cli", "serve", str(file), *options]
            ports = [
                running.enter_context(
                    process(serve, "serving on", PYTHONPATH=str(root.resolve()), PYTHONSAFEPATH="1")
                )
                for root in (args.before, here)
            ]
            requests = [infer(name, each) for each in inputs]
            for port in ports:  # proofs are made, and programs compiled, once
                asyncio.run(load(port, requests, want, args.clients, args.seconds))
            rates = []
            for turn in range(args.rounds):
                rate = [0.0, 0.0]
                for i in (0, 1) if turn % 2 == 0 else (1, 0):
                    answers = load(ports[i], requests, want, args.clients, args.seconds)
                    times, wall = asyncio.run(answers)
                    rate[i] = len(times) / wall
                rates.append(rate)
        medians = [f"{statistics.median(column):.3g}" for column in zip(*rates)]
        ratios = [now / before for before, now in rates]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {' | '.join(medians)} | {spread} |", flush=True)


def conditions(turns, max_batch):
    """Prints the processor time of a batch with and without the conditions of its proofs."""
    program, _, inputs = minilm_lengths()
    print(_harness.header("python -m benchmarks.proved_serving --conditions", turns))
    print("| rows | CPU ms without | CPU ms with | microseconds of a request |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        program.save(f"{folder}/minilm.fnet")
        model = Model(
            "minilm",
            "1",
            export.load(f"{folder}/minilm.fnet"),
            "predict",
            max_batch,
            {"t": (TIME,)},
        )
        model.warm()
    for rows in (1, 4, max_batch):
        arrays = [np.repeat(x, rows, 0) for x in inputs[0].values()]
        padded = model.padded(arrays, model.sizes(arrays), [0, 0])
        without, checked = [], []
        for _ in range(turns):
            for run, x, taken in ((model.run, padded, without), (model.compute, arrays, checked)):
                start = time.process_time()  # other programs run on the machine
                run(x)
                taken.append(time.process_time() - start)
        before, now = statistics.median(without), statistics.median(checked)
        more = 1e6 * statistics.median(b - a for a, b in zip(without, checked)) / rows
        print(f"| {rows} | {1e3 * before:.2f} | {1e3 * now:.2f} | {more:.0f} |", flush=True)


if __name__ == "__main__":
    main()
