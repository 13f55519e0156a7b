"""Whatever the flags: an exit code and one line, never a traceback unless --debug asks for one."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn")
ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("image_classification", "language_model", "finetune", "classify_image", "embed", "generate", "linear_models",
         "two_layer_net")

# One process imports the experiments; each command line is tried in a fork of it, before JAX has begun to compute.
# Training itself is left out: what flags alone decide is tried here.
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
                "compare_losses = fit_linear = load = train\\n")
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
    drop = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {k: v for k, v in os.environ.items() if k not in drop} | {"FNET_PROBE": "0"}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT / "experiments")], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, env=environment)
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


words = st.sampled_from([
    "dataset", "data_dir", "split", "model", "width", "depth", "dropout", "epochs", "steps", "batch_size", "optimizer",
    "schedule", "learning_rate", "warmup", "weight_decay", "augment", "ema", "early_stop", "precision", "seed",
    "config", "workdir", "nojit", "nonfinite", "preset", "tokens", "vocab_size", "heads", "context", "mode", "weights",
    "top", "size", "labels", "max_tokens", "temperature", "top_k", "top_p", "file", "rate", "noise", "l2", "flagfile",
    "verbosity", "v", "undefok", "stderrthreshold", "print_every",
]) | st.text(max_size=8)
values = st.one_of(
    st.integers().map(str), st.floats().map(str), st.text(max_size=12), st.booleans().map(str),
    st.sampled_from(["", "auto", "digits", "cnn", "gpt", "0", "-1", "1e400", "nan", "/", "/dev/null", ".", "none"]),
)
flag = st.one_of(st.builds("--{}={}".format, words, values), st.builds("--{}".format, words),
                 st.builds("--no{}".format, words), st.text(max_size=10))
HELP = ("--help", "--helpfull", "--helpshort", "--helpxml", "-help", "-?", "--only_check_args")


@example("image_classification", ["\n"])
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(NAMES), st.lists(flag, max_size=5))
def test_random_flags_never_give_a_traceback(command, name, arguments):
    # A process's arguments hold no NUL and no lone surrogate.
    arguments = [a.replace("\0", "").encode("utf-8", "replace").decode() for a in arguments]
    arguments = [a for a in arguments if "debug" not in a and "pdb" not in a and "profil" not in a and a not in HELP]
    checked(*command(name, arguments), arguments)


@pytest.mark.parametrize("name, arguments, text", [
    ("image_classification", ["--learning_rate=nan"], "--learning_rate=nan: it has to be a finite number"),
    ("image_classification", ["--learning_rate=-1"], "--learning_rate=-1.0: it has to be more than 0"),
    ("image_classification", ["--label_smoothing=-3"], "--label_smoothing=-3.0: it is a share, from 0 to below 1"),
    ("language_model", ["--seed=-1"], "--seed=-1: it has to be between 0 and 2^32 - 1"),
    ("image_classification", ["--steps=inf"], "flag --steps=inf"),
    ("image_classification", ["--nonfinite=hope"], "flag --nonfinite=hope: value should be one of <stop"),
    ("image_classification", ["--flagfile=/nowhere"], "/nowhere"),
    ("image_classification", ["--config=/dev"], "/dev cannot be read (Is a directory)"),
    ("language_model", ["--heads=3"], "--heads=3: they have to divide --width=128"),
    ("two_layer_net", ["--rate=-1"], "flag --rate=-1"),
    ("generate", ["--top_p=0"], "--top_p above 0"),
])
def test_the_sentences(command, name, arguments, text):
    code, said = command(name, arguments)
    assert code == 2 and text in said and said.startswith("error: ") and said.count("\n") == 1, said


def test_debug_shows_the_traceback(command):
    code, said = command("image_classification", ["--model=vit", "--debug"])
    assert code == 98 and "Traceback" in said and "--model=vit: use cnn, mlp" in said
