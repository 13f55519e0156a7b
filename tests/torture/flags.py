"""Random command lines for the experiments: each is accepted, or ends with one line and exit code
2."""

import contextlib
import dataclasses
import importlib
import io
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

from absl import flags

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NAMES = (
    "image_classification",
    "language_model",
    "finetune",
    "classify_image",
    "embed",
    "generate",
    "linear_models",
    "two_layer_net",
    "distil",
)
SECONDS = 20  # that a refusal may take
NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "64",
    "-1",
    "0.5",
    "0.1",
    "1e-3",
    "-0.1",
    "1e-300",
    "1e30",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "1e12",
    "1e14",
    "65536",
    "1000000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "1000000000000",
    "100000000000000",
    "9" * 30,
    "9" * 5000,
    "0x10",
    "1_0",
    "",
    " ",
    "one",
    "١",
]
TEXTS = [
    "",
    "auto",
    "none",
    "/",
    ".",
    "/dev/null",
    "/dev/zero",
    "~nobody-at-all/x",
    "~",
    "a" * 5000,
    "é",
    "\n",
    "-1",
    "v5e:4x4*99999999",
    "v5e:0x0",
    "h100:99999999x8",
    "v5e:4x4x4x4",
    ":",
    "local",
    "9" * 30,
]
ARGUMENTS = [
    "word",
    "",
    "-",
    "--",
    "-x",
    "--nothing",
    "--no",
    "--=",
    "--config",
    "--restart=maybe",
    "--undefok=x",
]
FILES = {
    "deep.json": b"[" * 10**6,
    "number.json": b'{"seed": ' + b"9" * 4000 + b"}",
    "text.json": b"\xff\xfe",
    "list.json": b"[]",
    "large.json": b'{"learning_rate": 1e400}',
    "integer.json": b'{"learning_rate": 1' + b"0" * 400 + b"}",
    "good.json": b"{}",
    "flags.txt": b"--seed=1\n--seed=x\n",
    "again.txt": b"--flagfile=again.txt\n",
}


@contextlib.contextmanager
def experiment(name):
    """The module of an experiment, with its flags and no other experiment's defined."""
    if str(EXPERIMENTS) not in sys.path:
        sys.path.insert(0, str(EXPERIMENTS))
    module, before = importlib.import_module(name), set(flags.FLAGS)
    try:
        module.define_flags()
        flags.DEFINE_bool("debug", False, "")
        yield module, sorted(set(flags.FLAGS) - before)
    finally:
        for flag in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, flag)


def outcome(module, arguments):
    """(exit code, what stderr says) of a command line's parser and validation, in this process."""
    from _common import _said, parse_flags

    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            _said(module.configured, parse_flags([module.__name__, *arguments]))
        except SystemExit as end:
            return end.code or 0, said.getvalue()
        except BaseException:
            return 98, traceback.format_exc()
    return 0, said.getvalue()


def wrong(code, said, seconds):
    """What is wrong with the end of a command, or None."""
    if "Traceback" in said or code not in (0, 2):
        return f"exit code {code}: {said[-300:]}"
    if code == 2 and not (said.startswith("error: ") and said.count("\n") == 1):
        return f"not one line: {said[-300:]!r}"
    if code == 2 and seconds > SECONDS:
        return f"refused after {seconds:.0f} s: {said}"
    return None


def hostile_files(folder):
    """Files for --config and --flagfile: their paths, and those of a pipe and a device."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    if not (folder / "pipe").exists():
        os.mkfifo(folder / "pipe")
    return [*(str(folder / name) for name in (*FILES, "pipe", "nothing")), "/dev/zero", str(folder)]


def command_line(module, names, files, rng):
    """Up to six flags of the experiment, half of them with values that it takes."""
    fields = (
        {field.name: field for field in dataclasses.fields(module.Config)}
        if hasattr(module, "Config")
        else {}
    )
    line = ["word"] if module.__name__ in ("embed", "classify_image") and rng.random() < 0.9 else []
    for _ in range(rng.randint(1, 6)):
        name, value = rng.choice(names), rng.choice(NUMBERS + TEXTS)
        if name in ("debug",):
            continue
        choices = name in fields and fields[name].metadata["choices"]
        if name == "config":
            value = rng.choice(files)
        elif choices and rng.random() < 0.8:
            value = rng.choice(sorted(choices))
        elif flags.FLAGS[name].flag_type() in ("int", "float"):
            value = rng.choice(NUMBERS[:6] if rng.random() < 0.5 else NUMBERS)
        line.append(f"--{name}={value}")
    if rng.random() < 0.1:
        line.append(rng.choice([*ARGUMENTS, *(f"--flagfile={file}" for file in files)]))
    rng.shuffle(line)
    return line


def combinations(count, folder, rng):
    """So many command lines for each experiment, through its parser and validation in this process."""
    warnings.simplefilter("ignore")
    files, lost, accepted, slowest = hostile_files(folder / "files"), [], 0, 0.0
    for name in NAMES:
        with experiment(name) as (module, names):
            for _ in range(count):
                line = command_line(module, names, files, rng)
                began = time.perf_counter()
                code, said = outcome(module, line)
                seconds = time.perf_counter() - began
                accepted, slowest = accepted + (code == 0), max(slowest, seconds)
                if problem := wrong(code, said, seconds):
                    lost.append(f"{name} {line}: {problem}")
    tried = count * len(NAMES)
    return (
        tried,
        tried - len(lost),
        [*lost, f"note: {accepted} accepted, the slowest took {slowest:.2f} s"],
    )


SMALL = {
    "image_classification": [
        "--width=4",
        "--batch_size=8",
        "--model=cnn",
        "--steps=2",
        "--nolast20",
        "--augment=flip",
    ],
    "language_model": [
        "--width=16",
        "--depth=1",
        "--heads=2",
        "--context=16",
        "--batch_size=4",
        "--steps=2",
    ],
    "finetune": ["--size=32", "--batch_size=8", "--steps=2"],
    "linear_models": ["--steps=2", "--width=4"],
    "two_layer_net": ["--steps=2", "--width=4", "--batch_size=8"],
}


def runs(count, folder, rng):
    """So many runs of two steps, from the command line to the end, with impossible flags among
    them."""
    files, lost, finished, slowest = hostile_files(folder / "files"), [], 0, 0.0
    names = [
        *SMALL,
        "image_classification",
        "language_model",
        "generate",
        "embed",
        "linear_models",
        "two_layer_net",
        "image_classification",
        "language_model",
    ]
    for number in range(count):
        name = names[number % len(names)]
        with experiment(name) as (module, known):
            extra = command_line(
                module,
                [
                    flag
                    for flag in known
                    if flag not in ("workdir", "steps", "plan", "epochs", "nojit")
                ],
                files,
                rng,
            )
        extra = extra[: rng.choice([0, 1, 1, 2, 3])]
        line = [*SMALL.get(name, []), *extra]
        if name in ("image_classification", "language_model", "finetune", "linear_models"):
            line.append(f"--workdir={folder / f'run{number}'}")
        environment = {
            key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "FNET_DATA")
        }
        environment |= {"FNET_PROBE": "0", "JAX_PLATFORMS": "cpu"}
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, str(EXPERIMENTS / f"{name}.py"), *line],
                capture_output=True,
                text=True,
                env=environment,
                timeout=900,
                cwd=folder,
            )
            code, said = done.returncode, done.stderr
        except subprocess.TimeoutExpired:
            code, said = 99, "no end after 900 s"
        seconds = time.perf_counter() - began
        finished += code == 0
        slowest = max(slowest, seconds if code == 2 else 0)
        if problem := wrong(code, said, seconds):
            lost.append(f"{name} {line}: {problem}")
    return (
        count,
        count - len(lost),
        [*lost, f"note: {finished} finished, the slowest refusal took {slowest:.1f} s"],
    )
