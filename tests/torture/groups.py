"""Faults in the environment of a run: its process group, workers, source, evaluation, folder, log
and optimizer."""

import re
import shutil
import signal
import time

from fnet import training as tr
from tests.torture.victims import Victim, newest, one_sentence, remains, whole


def _ended(workdir, victim, *, within, code=0, seconds=None, again=()):
    """ "" if the run ended as promised and resumes to the bits of an undisturbed one; else what
    happened."""
    said = victim.said
    again = Victim(workdir, "--steps=60", *again)
    again.end()
    finished = newest(workdir) == 60 and not said
    if (
        victim.code != code
        or not (one_sentence(said) or finished)
        or (seconds is not None and seconds > within)
    ):
        return f"exit {victim.code} after {seconds} s: {said[-300:]}"
    if again.code != 0 or remains(workdir) != _expected:
        return f"resumed with exit {again.code} and another end: {again.said[-300:]}"
    return ""


def _config(workdir):
    """The configuration in the newest checkpoint. Not by `tr.load`: victims are forked from here,
    where JAX must not compute."""
    return tr.Checkpoints(workdir / "checkpoints").notes()["fit"]["config"]


_expected = None


def _each(count, folder, harm, *arguments):
    global _expected
    _expected = whole(folder, "--steps=60", *arguments)
    lost = [
        f"{number}: {wrong}"
        for number in range(count)
        if (wrong := harm(folder / str(number), number))
    ]
    return count, count - len(lost), lost


def forked_workers(count, folder, rng):
    """Ctrl-C to the whole group of a run whose batches come from forked workers, and again to the
    workers later."""

    def harm(workdir, number):
        victim = Victim(workdir, "--steps=60", "--workers=2", group=True)
        victim.until("step", count=rng.randint(4, 50))
        began = time.monotonic()
        victim.signal(signal.SIGINT, group=True)
        victim.end(60)
        seconds = time.monotonic() - began
        victim.kill_group()
        return _ended(workdir, victim, within=30, seconds=seconds)

    return _each(count, folder, harm)


def group_signals(count, folder, rng):
    """A signal to the process and at once to its group, as GNU timeout, a closed terminal or SLURM
    send it."""

    def harm(workdir, number):
        victim = Victim(workdir, "--steps=60", group=True)
        victim.until("step", count=rng.randint(4, 50))
        sent = rng.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
        victim.signal(sent)
        time.sleep(rng.uniform(0, 0.5))
        victim.signal(sent, group=True)
        victim.end(60)
        return _ended(workdir, victim, within=30)

    return _each(count, folder, harm)


def hanging_source(count, folder, rng):
    """A source that never returns: a signal ends the run, and the last finished step is there."""

    def harm(workdir, number):
        at = rng.randint(1, 59)
        victim = Victim(workdir, "--steps=60", f"--hang={at}", "--on-step=tell")
        victim.until(f"done {at}")  # the loop has used all batches that there are
        began = time.monotonic()
        victim.signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
        victim.end(60)
        seconds, reached = time.monotonic() - began, newest(workdir)
        if reached != at:
            return f"hung at batch {at}, saved step {reached}: {victim.said[-300:]}"
        return _ended(workdir, victim, within=10, seconds=seconds, again=["--on-step=tell"])

    return _each(count, folder, harm, "--on-step=tell")


def raising(count, folder, rng):
    """An evaluation, or the source, raises: the last finished step is saved."""

    def harm(workdir, number):
        what, at = (
            ("evaluation", rng.choice([20, 40]))
            if number % 2 == 0
            else ("source", rng.randint(1, 59))
        )
        victim = Victim(workdir, "--steps=60", f"--raise={what}:{at}")
        victim.end()
        if newest(workdir) != at:
            return f"the {what} raised at {at}, saved is step {newest(workdir)}"
        return _ended(workdir, victim, code=2, within=None)

    return _each(count, folder, harm)


def functions_of_on_step(count, folder, rng):
    """A function of on_step never returns and a signal comes, or it raises: the step is saved, and
    what is still to be done at it is done after the restart. A tenth of the steps is logged, a
    twentieth evaluated."""

    def harm(workdir, number):
        kind, at = (
            ["wait", "retry", "raise", "exit"][number % 4],
            rng.choice([10, 20, 40, rng.randint(1, 59)]),
        )
        victim = Victim(workdir, "--steps=60", f"--on-step={kind}:{at}")
        victim.until(f"on_step {at}")
        began = time.monotonic()
        if kind in ("wait", "retry"):
            time.sleep(rng.uniform(0, 0.2))
            victim.signal(rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        victim.end(60)
        seconds, reached = time.monotonic() - began, newest(workdir)
        if reached != at:
            return f"{kind} at step {at}, saved step {reached}: exit {victim.code}: {victim.said[-300:]}"
        code = {"raise": 2, "exit": 1}.get(kind, 0)
        return _ended(
            workdir, victim, code=code, within=10, seconds=seconds, again=["--on-step=none"]
        )

    return _each(count, folder, harm, "--on-step=none")


def signals_before_on_step(count, folder, rng):
    """A signal at any moment of a run whose on_step logs each step: no step's line is missing or
    there twice."""

    def harm(workdir, number):
        victim = Victim(workdir, "--steps=60", "--on-step=none")
        victim.until("step", count=rng.randint(2, 50))
        time.sleep(rng.uniform(0, 0.01))
        victim.signal(rng.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]))
        victim.end(60)
        return _ended(workdir, victim, within=None, again=["--on-step=none"])

    return _each(count, folder, harm, "--on-step=none")


def broken_logs(count, folder, rng):
    """A line of metrics.jsonl or TensorBoard is written by half, and then writing raises: no
    complete step is lost."""

    def harm(workdir, number):
        victim = Victim(workdir, "--steps=60", f"--log={rng.randint(0, 17)}")
        victim.end()
        broken = re.search(rb"broken (\d+)", victim.words)
        if broken is None or newest(workdir) != int(broken[1]):
            return f"{broken}, saved is step {newest(workdir)}: {victim.said[-300:]}"
        return _ended(workdir, victim, code=2, within=None)

    return _each(count, folder, harm)


def two_configurations(count, folder, rng):
    """Two configurations started together in a new folder: one trains and is what the folder says,
    one is refused."""

    def harm(workdir, number):
        pair = [Victim(workdir, "--steps=60", f"--config={name}") for name in "ab"]
        codes = [victim.end() for victim in pair]
        said = [victim.said for victim in pair if victim.code == 2]
        won = "ab"[codes.index(0)] if 0 in codes else None
        if sorted(map(str, codes)) != ["0", "2"] or not one_sentence(said[0]):
            return f"exits {codes}: {[victim.said[-600:] for victim in pair]}"
        if (config := _config(workdir)) != {"name": won}:
            return f"{won} has trained, the folder is of {config}"
        return "" if remains(workdir) == _expected else "another end"

    return _each(count, folder, harm)


def replaced_folder(count, folder, rng):
    """The folder is removed under a live run and another run begins there: nothing of the old one
    gets in."""

    def harm(workdir, number):
        old = Victim(workdir, "--steps=2000", "--config=old")
        old.until("step", count=rng.randint(4, 50))
        while workdir.exists():  # the old run may be writing into it
            shutil.rmtree(workdir, ignore_errors=True)
        new = Victim(workdir, "--steps=60", "--config=new")
        new.end()
        old.end(60)
        if (
            old.code != 2
            or not one_sentence(old.said)
            or new.code != 0
            or remains(workdir) != _expected
        ):
            return (
                f"old: exit {old.code}: {old.said[-300:]}; new: exit {new.code}: {new.said[-300:]}"
            )
        return "" if _config(workdir) == {"name": "new"} else "the folder is of the old run"

    return _each(count, folder, harm)


def damaged_logs(count, folder, rng):
    """metrics.jsonl with other bytes, lines that are none, lines without a step: the run is resumed
    all the same."""

    def harm(workdir, number):
        first = Victim(workdir, "--steps=60", f"--raise=source:{rng.randint(15, 55)}")
        if first.end() != 2 or "cannot be read" not in first.said:
            return f"the first half: exit {first.code}: {first.said[-300:]}"
        log = workdir / "metrics.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        bad = rng.choice(
            [
                b"\xff\xfe\n",
                b"3.5\n",
                b"{}\n",
                b"[]\n",
                b'{"step": "3"}\n',
                b"{\n",
                bytes(40) + b"\n",
                rng.randbytes(200).replace(b"\n", b"") + b"\n",
            ]
        )
        lines.insert(rng.randrange(len(lines)), bad)
        log.write_bytes(b"".join(lines))
        again = Victim(workdir, "--steps=60")
        again.end()
        kept = (workdir / "metrics.jsonl.damaged").exists()
        return (
            ""
            if again.code == 0 and kept and remains(workdir) == _expected
            else (f"{bad!r}: exit {again.code}, {kept}: {again.said[-300:]}")
        )

    return _each(count, folder, harm)


def nonfinite_optimizer(count, folder, rng):
    """A moment of the optimizer, the moving average or another leaf of the state becomes infinite;
    the parameters stay finite: no such state is saved, and the error names the step and the
    leaf."""

    def harm(workdir, number):
        at, leaf = (
            rng.randint(1, 59),
            rng.choice(["opt_state/1/0/nu/hidden", "opt_state/1/0/mu/head", "ema/head"]),
        )
        victim = Victim(workdir, "--steps=60", f"--infinite={at}:{leaf}")
        victim.end()
        named = f"'{leaf}'" in victim.said and f"at step {at} of 60" in victim.said
        if newest(workdir) >= at or not named:
            return f"infinite at {at}, saved step {newest(workdir)}: {victim.said[-300:]}"
        return _ended(workdir, victim, code=2, within=None)

    return _each(count, folder, harm)
