"""Damage to the files of a checkpoint: flipped bits, and truncated, lengthened, deleted or
exchanged files."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

from fnet import training as tr

STEPS = (1, 2, 3)


def tree(step):
    rng = np.random.default_rng(step)
    return {
        "step": step,
        "kernel": rng.normal(size=(300, 40)).astype(np.float32),
        "half": np.float16(step),
        "none": np.zeros((0, 3)),
        "mask": rng.integers(0, 2, 77).astype(bool),
    }


def saved(folder):
    with tr.Checkpoints(folder) as checkpoints:
        for step in STEPS:
            checkpoints.save(step, tree(step), metrics={"loss": 1 / step}, notes={"chip": "any"})
    return checkpoints


def same(a, b):
    return (
        all(np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes() for name in b)
        and a.keys() == b.keys()
    )


def outcome(checkpoints, damaged):
    """ "" where the damage was found and the step before used with a warning; else what happened."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with checkpoints:
            try:
                back = checkpoints.restore(tree(0))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    said = [str(warning.message) for warning in caught if warning.category is tr.CheckpointWarning]
    if back["step"] == damaged:
        return "accepted, the same bits" if same(back, tree(damaged)) else "accepted, other numbers"
    if len(said) != 1 or f"step {damaged} is damaged" not in said[0]:
        return f"not said: {said}"
    if not same(back, tree(STEPS[-2])) or not (checkpoints.folder / f"{damaged}.damaged").is_dir():
        return "something else was restored, or nothing set aside"
    return ""


def flips(count, folder, rng):
    """One bit of one file each time, spread over every file."""
    sound, lost = saved(folder / "sound").folder, []
    last = sound / str(STEPS[-1])
    files = sorted(path.name for path in last.iterdir())
    for number in range(count):
        work = folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(sound, work)
        path = work / last.name / files[number % len(files)]
        raw = bytearray(path.read_bytes())
        place = rng.randrange(8 * len(raw))
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)
        if wrong := outcome(tr.Checkpoints(work), STEPS[-1]):
            lost.append(f"{path.name}, bit {place}: {wrong}")
    return count, count - len(lost), lost


def files(count, folder, rng):
    """Each file cut short anywhere, lengthened, emptied, deleted, exchanged with another step's;
    folders exchanged."""
    sound, lost, tried = saved(folder / "sound").folder, [], 0
    names = sorted(path.name for path in (sound / str(STEPS[-1])).iterdir())
    kinds = {
        "cut short": lambda file: file.write_bytes(
            file.read_bytes()[: rng.randrange(file.stat().st_size)]
        ),
        "lengthened": lambda file: file.write_bytes(
            file.read_bytes() + rng.randbytes(rng.randint(1, 99))
        ),
        "emptied": lambda file: file.write_bytes(b""),
        "deleted": lambda file: file.unlink(),
        "of zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
        "of another step": lambda file: shutil.copy(file.parent.parent / "1" / file.name, file),
        "a folder": lambda file: (file.unlink(), file.mkdir()),
        "a link": lambda file: (shutil.move(file, work / "aside"), file.symlink_to(work / "aside")),
        "a page of garbage": lambda file: overwrite(file, rng),
    }
    while tried < count:
        for kind, harm in kinds.items():
            for name in names:
                work = folder / "work"
                shutil.rmtree(work, ignore_errors=True)
                shutil.copytree(sound, work)
                harm(work / str(STEPS[-1]) / name)
                tried += 1
                if wrong := outcome(tr.Checkpoints(work), STEPS[-1]):
                    lost.append(f"{name} {kind}: {wrong}")
    return tried, tried - len(lost), lost


def overwrite(file, rng):
    raw = bytearray(file.read_bytes())
    begin = rng.randrange(len(raw))
    raw[begin : begin + 64] = rng.randbytes(len(raw[begin : begin + 64]) - 1) + b"\xa5"
    file.write_bytes(raw if raw != file.read_bytes() else bytes(len(raw)))


def apart(name, count, folder, seed):
    """The same in a process of its own, since JAX computes here and the other harms are forked from
    this one."""
    module, function = name.split(".")
    code = (
        f"from tests.torture import {module}; import json, pathlib, random; "
        f"print(json.dumps({module}.{function}("
        f"{count}, pathlib.Path({str(folder)!r}), random.Random({seed}))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        return 1, 0, [done.stderr[-2000:]]
    return json.loads(done.stdout)
