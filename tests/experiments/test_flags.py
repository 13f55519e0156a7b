"""Whatever the flags: an exit code and one line, never a traceback unless --debug asks for one."""

import dataclasses
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torture import flags as torture

from fnet import training as tr

pytest.importorskip("sklearn")
ROOT = pathlib.Path(__file__).parents[2]

# One process imports the experiments; each command line is tried in a fork of it, before JAX has
# begun to compute. Training itself is left out: what flags alone decide is tried here.
SERVER = textwrap.dedent("""
    import importlib.util, json, os, sys, traceback, warnings
    warnings.simplefilter("ignore")
    sys.path.insert(0, sys.argv[1])
    import _common, jax, matplotlib, sklearn.datasets
    from fnet.models import pretrained

    def tried(name, arguments):
        sys.argv = [name + ".py", *arguments]
        source = open(f"{sys.path[0]}/{name}.py").read()
        stub = ("def train(*_, **__): raise _common.tr.Interrupted('trained')\\n"
                "compare_losses = fit_linear = train\\n")
        source = source.replace('if __name__ == "__main__":', f'import _common\\n{stub}\\nif __name__ == "__main__":')
        exec(compile(source, sys.argv[0], "exec"), {"__name__": "__main__", "__file__": f"{sys.path[0]}/{name}.py"})

    for line in sys.stdin:
        name, arguments, folder = json.loads(line)
        sys.stdout.flush()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writing, 2); os.dup2(os.open(os.devnull, os.O_WRONLY), 1); os.chdir(folder)
            code = 0
            try:
                tried(name, arguments)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 99
            except BaseException:
                code = 98
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        os.close(writing)
        said = b""
        while part := os.read(reading, 65536):
            said += part
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, said.decode(errors="replace")]), flush=True)
""")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    drop = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment |= {"FNET_PROBE": "0", "XLA_FLAGS": os.environ["FNET_TEST_XLA_FLAGS"]}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(ROOT / "experiments")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    folder = str(tmp_path_factory.mktemp("flags"))

    def run(name, arguments):
        server.stdin.write(json.dumps([name, arguments, folder]) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield run
    server.stdin.close()
    server.wait()
    server.stdout.close()


def checked(code, said, arguments):
    assert "Traceback" not in said, (arguments, said)
    assert code in (0, 1, 2), (arguments, code, said)
    if code == 2:
        assert said.startswith("error: ") and said.count("\n") == 1, (arguments, said)


words = st.sampled_from(
    [
        "dataset",
        "data_dir",
        "split",
        "model",
        "width",
        "depth",
        "dropout",
        "epochs",
        "steps",
        "batch_size",
        "optimizer",
        "schedule",
        "learning_rate",
        "warmup",
        "weight_decay",
        "augment",
        "ema",
        "early_stop",
        "precision",
        "seed",
        "config",
        "workdir",
        "nojit",
        "nonfinite",
        "preset",
        "tokens",
        "vocab_size",
        "heads",
        "context",
        "mode",
        "weights",
        "top",
        "size",
        "labels",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "file",
        "rate",
        "noise",
        "l2",
        "flagfile",
        "verbosity",
        "v",
        "undefok",
        "stderrthreshold",
        "print_every",
    ]
) | st.text(max_size=8)
values = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=12),
    st.booleans().map(str),
    st.sampled_from(
        [
            "",
            "auto",
            "digits",
            "cnn",
            "gpt",
            "0",
            "-1",
            "1e400",
            "nan",
            "/",
            "/dev/null",
            ".",
            "none",
        ]
    ),
)
flag = st.one_of(
    st.builds("--{}={}".format, words, values),
    st.builds("--{}".format, words),
    st.builds("--no{}".format, words),
    st.text(max_size=10),
)
HELP = ("--help", "--helpfull", "--helpshort", "--helpxml", "-help", "-?", "--only_check_args")


@example("image_classification", ["\n"])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(torture.NAMES), st.lists(flag, max_size=5))
def test_random_flags_never_give_a_traceback(command, name, arguments):
    # A process's arguments hold no NUL and no lone surrogate.
    arguments = [a.replace("\0", "").encode("utf-8", "replace").decode() for a in arguments]
    arguments = [
        a
        for a in arguments
        if "debug" not in a and "pdb" not in a and "profil" not in a and a not in HELP
    ]
    checked(*command(name, arguments), arguments)


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        (
            "image_classification",
            ["--learning_rate=nan"],
            "--learning_rate=nan: expected a finite number",
        ),
        (
            "image_classification",
            ["--learning_rate=-1"],
            "--learning_rate=-1.0: expected a number in (0, 1000]",
        ),
        (
            "image_classification",
            ["--label_smoothing=-3"],
            "--label_smoothing=-3.0: expected a number in [0, 1)",
        ),
        ("language_model", ["--seed=-1"], "--seed=-1: expected a number in [0, 4294967295]"),
        ("image_classification", ["--steps=inf"], "flag --steps=inf"),
        (
            "image_classification",
            ["--nonfinite=hope"],
            "flag --nonfinite=hope: value should be one of <stop",
        ),
        ("image_classification", ["--flagfile=/nowhere"], "/nowhere"),
        ("image_classification", ["--config=/dev"], "/dev cannot be read (Is a directory)"),
        ("language_model", ["--heads=3"], "--heads=3: expected a divisor of --width=128"),
        ("two_layer_net", ["--rate=-1"], "flag --rate=-1"),
        ("generate", ["--top_p=0"], "--top_p=0.0: expected a number in (0, 1]"),
        (
            "generate",
            ["--temperature=1e-300"],
            "--temperature=1e-300: expected a number in [0.001, 1000]",
        ),
        ("language_model", ["--temperature=nan"], "--temperature=nan: expected a finite number"),
        ("language_model", ["--batch_size=1e12"], "flag --batch_size=1e12"),
        (
            "language_model",
            ["--batch_size=1000000000000"],
            "--batch_size=1000000000000: expected a number in [1, 1048576]",
        ),
        (
            "language_model",
            ["--steps=100000000000000"],
            "--steps=100000000000000: expected a number in [1, 2147483647]",
        ),
        (
            "language_model",
            ["--weight_decay=-0.1"],
            "--weight_decay=-0.1: expected a number in [0, 1000]",
        ),
        (
            "language_model",
            ["--devices=v5e:4x4*99999999"],
            "--devices=v5e:4x4*99999999: use a number, or local for all",
        ),
        (
            "language_model",
            ["--model=llama", "--width=6", "--heads=2"],
            "a llama needs an even number of features in each",
        ),
        (
            "image_classification",
            ["--config=/dev/zero"],
            "--config=/dev/zero: expected a regular file",
        ),
        (
            "image_classification",
            ["--flagfile=/dev/zero"],
            "--flagfile=/dev/zero: expected a regular file",
        ),
        (
            "image_classification",
            ["--workdir=~nobody-at-all/x"],
            "/x: there is no such home directory",
        ),
        (
            "image_classification",
            ["--workdir=s3://bucket/x"],
            "--workdir=s3://bucket/x: expected a local path",
        ),
        ("image_classification", ["--dataset=mnist", "--split=last20"], "mnist has a fixed split"),
        ("linear_models", ["--steps=100000000000000"], "flag --steps=100000000000000"),
        (
            "finetune",
            ["--dataset=photos"],
            "--dataset=photos: --data_dir is the folder of DIR/CLASS/*.jpg",
        ),
        ("distil", ["--temperature=0"], "--temperature=0.0: expected a number in [0.1, 1000]"),
        ("two_layer_net", ["word"], "word: flags begin with --"),
    ],
)
def test_the_sentences(command, name, arguments, text):
    code, said = command(name, arguments)
    assert code == 2 and text in said and said.startswith("error: ") and said.count("\n") == 1, said


@pytest.mark.exhaustive
def test_random_combinations_in_one_process(tmp_path):
    """What `make torture` does 1,000 times for each experiment."""
    tried, survived, lost = torture.combinations(100, tmp_path, random.Random(0))
    assert tried == survived == 100 * len(torture.NAMES), lost[:5]
    accepted = int(re.search(r"note: (\d+) accepted", lost[-1])[1])
    assert 100 < accepted < 700, lost


@pytest.mark.exhaustive
def test_every_number_has_an_interval_and_every_default_lies_in_it():
    for name in torture.NAMES[:6]:
        with torture.experiment(name) as (module, _):
            for field in dataclasses.fields(module.Config):
                interval, number = (
                    field.metadata["within"],
                    {"int", "float"} & set(re.findall(r"\w+", str(field.type))),
                )
                assert bool(interval) == bool(number), (name, field.name)
                presets = (
                    module.PRESETS.values()
                    if isinstance(getattr(module, "PRESETS", None), dict)
                    else ()
                )
                for value in (field.default, *(preset.get(field.name) for preset in presets)):
                    if interval and value is not None:
                        tr.flags.check_within(field.name, value, interval)


@pytest.mark.exhaustive
def test_debug_shows_the_traceback(command):
    code, said = command("image_classification", ["--model=vit", "--debug"])
    assert code == 98 and "Traceback" in said and "--model=vit: use cnn, mlp" in said
