"""Nothing that is loaded runs code: no module of fnet's or of the experiments unpickles or
evaluates."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted(path for folder in ("fnet", "experiments") for path in (ROOT / folder).rglob("*.py"))
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch",
    "yaml",
}
CALLS = {"eval", "exec", "compile", "__import__"}
# It traces the expressions that it writes itself, from a program that is in memory, and no file's.
WRITES = ROOT / "fnet" / "introspect" / "_reduce" / "_write.py"


@pytest.mark.exhaustive
def test_no_file_unpickles_or_evaluates():
    assert len(FILES) > 200
    for path in FILES:
        check(path, ast.parse(path.read_text(), str(path)))


def check(path, tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & MODULES, (
                path,
                ast.unparse(node),
            )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] not in MODULES, (path, ast.unparse(node))
        elif isinstance(node, ast.Call):
            evaluates = isinstance(node.func, ast.Name) and node.func.id in CALLS
            assert not evaluates or path == WRITES, (
                path,
                ast.unparse(node),
            )
            for word in node.keywords:
                assert not (
                    word.arg == "allow_pickle" and getattr(word.value, "value", None) is not False
                ), (path, ast.unparse(node))
            # numpy.load unpickles nothing unless it is told to, so it needs no keyword.


PROGRAM = """
import pickle, sys
def refuse(*_, **__):
    raise SystemExit("something was unpickled")
pickle.load = pickle.loads = pickle.Unpickler = refuse
import _pickle
_pickle.load = _pickle.loads = _pickle.Unpickler = refuse

import pathlib, tempfile
import jax, jax.numpy as jnp, numpy as np, optax
from fnet import models, training as tr
from fnet.models import pretrained

folder = pathlib.Path(tempfile.mkdtemp())
tree = {"w": jnp.ones(3), "key": jax.random.key(0), "n": 3}
with tr.Checkpoints(folder / "c") as checkpoints:
    checkpoints.save(1, tree)
checkpoints.restore(tree)
model = models.MLP((4, 2))
params, state = model.init(jax.random.key(0), jnp.ones((1, 3)))
step = lambda state, batch: (state.replace(step=state.step + 1), {"loss": batch["x"].sum()})
for steps in (1, 2):
    tr.fit(step, tr.TrainState.create(params, optax.sgd(0.1)), lambda i: {"x": np.ones(2, np.float32)}, steps=steps,
           workdir=folder / "run", tensorboard=False)
print("none")
"""


@pytest.mark.exhaustive
def test_saving_loading_and_resuming_unpickle_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "none\n", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["weights.pt", "weights.bin"])
def test_a_pickle_is_not_opened(tmp_path, name):
    """Not under its own name, and not under another's."""
    import pickle

    from fnet.models.weights import _tensors

    class Bomb:
        def __reduce__(self):
            return open, (str(tmp_path / "exploded"), "w")

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        ValueError, match="is a pickle, which can run arbitrary code when it is opened"
    ):
        _tensors.read(tmp_path / name)
    assert not (tmp_path / "exploded").exists()
