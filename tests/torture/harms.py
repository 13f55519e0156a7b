"""Faults injected into runs: each function injects one kind `count` times and returns (tried,
survived, what was lost)."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.torture import groups
from tests.torture.victims import Victim, newest, one_sentence, remains, whole

STEPS = "--steps=200"
VICTIM = Path(__file__).with_name("victim.py")


def kills(count, folder, rng):
    """SIGKILL at a random moment, from the start of the process to its end; every restart resumes,
    to the same end."""
    expected, lost, tried, run = whole(folder, STEPS), [], 0, 0
    while tried < count or run_is_open(folder / f"run{run}"):
        workdir = folder / f"run{run}"
        before, victim = newest(workdir), Victim(workdir, STEPS)
        if tried < count:
            if rng.random() < 0.8:
                victim.until("step", count=2)
            time.sleep(rng.expovariate(3))
            victim.signal(signal.SIGKILL)
        code = victim.end()
        if code == -signal.SIGKILL:
            tried += 1
            if newest(workdir) < before:
                lost.append(f"kill {tried}: step {before} was there, {newest(workdir)} is")
            continue
        if code != 0:
            lost.append(f"after kill {tried}: exit {code}: {victim.said[-300:]}")
            if len(lost) > 20:
                break
            shutil.rmtree(workdir)
            continue
        if remains(workdir) != expected:
            lost.append(f"run {run}, after kill {tried}: another end than the unbroken run's")
        (workdir / "finished").touch()
        run += 1
    return tried, tried - len(lost), lost


def run_is_open(workdir):
    return workdir.exists() and not (workdir / "finished").exists()


def terms(count, folder, rng, phase):
    """SIGTERM in a phase: exit 0 within 30 seconds, a checkpoint, and on to the same end."""
    expected, lost = whole(folder, "--steps=60"), []
    for number in range(count):
        workdir = folder / f"{phase}{number}"
        slow = f"--slow={phase}" if phase in ("evaluation", "save") else "--slow="
        victim = Victim(workdir, "--steps=60", slow, compiled=phase != "compile")
        often = {
            "compile": 1,
            "step": rng.randint(4, 50),
            "evaluation": rng.randint(1, 3),
            "save": rng.randint(1, 11),
        }
        victim.until(phase, count=often[phase])
        time.sleep(rng.uniform(0, 0.2 if phase == "compile" else 0.05))
        victim.signal(rng.choice([signal.SIGTERM, signal.SIGTERM, signal.SIGINT]))
        began = time.monotonic()
        code = victim.end(60)
        seconds, at = time.monotonic() - began, newest(workdir)
        again = Victim(workdir, "--steps=60").end()
        said = one_sentence(victim.said) or (at == 60 and not victim.said)  # it was about to end
        if code != 0 or seconds > 30 or not said or again != 0 or remains(workdir) != expected:
            lost.append(
                f"{number}: exit {code} after {seconds:.1f} s at step {at}, then {again}: "
                f"{victim.said}"
            )
    return count, count - len(lost), lost


def races(count, folder, rng):
    """Two processes for one folder: one has it and ends well, the other says so in a sentence with
    exit code 2."""
    expected, lost = whole(folder, "--steps=60"), []
    for number in range(count):
        workdir = folder / f"race{number}"
        pair = [Victim(workdir, "--steps=60"), Victim(workdir, "--steps=60")]
        codes = [victim.end() for victim in pair]
        sentences = [victim.said for victim in pair if victim.code == 2]
        said = (
            len(sentences) == 1
            and one_sentence(sentences[0])
            and "another run is using" in sentences[0]
        )
        if sorted(map(str, codes)) != ["0", "2"] or not said or remains(workdir) != expected:
            lost.append(f"race {number}: exits {codes}: {[victim.said for victim in pair]}")
    return count, count - len(lost), lost


def full_disk(count, folder, rng):
    """A small tmpfs that fills; where nothing can be mounted, files that may not grow. Then room
    again, and on."""
    import resource

    expected, lost, mounted = whole(folder, "--steps=60"), [], 0
    for number in range(count):
        workdir = folder / f"full{number}"
        workdir.mkdir()
        kib = rng.randint(30, 170)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(workdir)]
        has = number % 2 == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        mounted += has
        limit = rng.randint(3000, 16000)
        before = (
            None
            if has
            else lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        )
        try:
            victim = Victim(workdir, "--steps=60", before=before)
            code, at = victim.end(), newest(workdir)
            if has:
                subprocess.run(["mount", "-o", "remount,size=10m", str(workdir)], check=True)
            again = Victim(workdir, "--steps=60")
            if (
                not ((code == 2 and one_sentence(victim.said)) or code == 0)
                or again.end() != 0
                or (newest(workdir) < at or remains(workdir) != expected)
            ):
                lost.append(
                    f"disk {number} ({kib if has else limit}): exit {code} at step {at}: "
                    f"{victim.said[-400:]}; then {again.code}: {again.said[-300:]}"
                )
        finally:
            if has:
                subprocess.run(["umount", "-l", str(workdir)], check=False)
    return (
        count,
        count - len(lost),
        lost or ([] if mounted else ["note: nothing could be mounted; RLIMIT_FSIZE alone"]),
    )


def read_only(count, folder, rng):
    """A folder that may only be read, new or with a run in it: a sentence and exit code 2; then
    writable, and on."""
    expected, lost = whole(folder, "--steps=60"), []
    root = os.geteuid() == 0  # who may write where nobody may, except on what is mounted read-only
    for number in range(count):
        workdir = folder / f"read{number}"
        workdir.mkdir()
        if (
            root
            and subprocess.run(
                ["mount", "-t", "tmpfs", "none", str(workdir)], capture_output=True
            ).returncode
        ):
            return (
                0,
                0,
                ["note: skipped, since root writes everywhere and nothing can be mounted here"],
            )
        try:
            if number % 2:
                Victim(workdir, "--steps=40").end()
            allow(workdir, root, False)
            victim = Victim(workdir, "--steps=60")
            code = victim.end()
            allow(workdir, root, True)
            again = Victim(workdir, "--steps=60")
            if (
                code != 2
                or not one_sentence(victim.said)
                or again.end() != 0
                or remains(workdir) != expected
            ):
                lost.append(
                    f"{number}: exit {code}: {victim.said[-300:]}; then {again.code}: "
                    f"{again.said[-300:]}"
                )
        finally:
            if root:
                subprocess.run(["umount", "-l", str(workdir)], check=False)
    return count, count - len(lost), lost


def allow(workdir, root, writing):
    if root:
        subprocess.run(
            ["mount", "-o", f"remount,{'rw' if writing else 'ro'}", str(workdir)], check=True
        )
        return
    for path in [workdir, *workdir.rglob("*")]:
        path.chmod(
            (0o755 if path.is_dir() else 0o644) if writing else (0o555 if path.is_dir() else 0o444)
        )


def pair(workdir, steps):
    """Two processes of one run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [
                sys.executable,
                VICTIM,
                workdir,
                f"--steps={steps}",
                f"--process={i}",
                "--of=2",
                f"--port={port}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def ended(process):
    """(what it said, its exit code)."""
    try:
        return process.communicate(timeout=180)[1], process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1], None


def one_of_two(workdir, expected, asked, rng):
    """Kills one process of two: "" if the other ends in bounded time with a sentence and both
    resume to `expected`."""
    both = pair(workdir, 60)
    for _ in range(rng.randint(8, 55)):
        while both[1].stdout.readline() not in ("step\n", ""):
            pass
    both[1].kill()
    began = time.monotonic()
    said, code = ended(both[0])
    seconds, at = time.monotonic() - began, asked(newest, workdir)
    ended(both[1])
    again = [ended(process) for process in pair(workdir, 60)]
    if (
        code != 2
        or not one_sentence(said)
        or "lost the others" not in said
        or seconds > 60
        or ([code for _, code in again] != [0, 0])
        or asked(remains, workdir) != expected
    ):
        return f"exit {code} after {seconds:.0f} s at step {at}: {said[-400:]}; then {again}"
    return ""


def workers(count, folder, rng):
    """One of two processes killed: the other ends in bounded time, the first one's with a sentence;
    both resume."""
    for process in pair(folder / "whole", 60):
        said, code = ended(process)
        if code != 0:
            return 1, 0, [f"two undisturbed processes ended with {code}: {said[-500:]}"]
    asked, expected = lambda function, workdir: function(workdir), remains(folder / "whole")
    lost = [
        f"worker {number}: {wrong}"
        for number in range(count)
        if (wrong := one_of_two(folder / f"pair{number}", expected, asked, rng))
    ]
    return count, count - len(lost), lost


def every(many):
    """The table's rows: (what, how often, function of (count, folder, random))."""
    rows = [("SIGKILL at a random moment", many(200), kills)]
    for phase in ("compile", "step", "evaluation", "save"):
        rows.append(
            (f"SIGTERM or SIGINT, {phase}", many(20), lambda *a, phase=phase: terms(*a, phase))
        )
    return [
        *rows,
        ("two processes, one folder", many(10), races),
        ("full disk", many(10), full_disk),
        ("read-only folder", many(4), read_only),
        ("worker of two killed", many(4), workers),
        ("forked data workers, Ctrl-C", many(20), groups.forked_workers),
        ("signals to the group as well", many(20), groups.group_signals),
        ("a source that hangs", many(20), groups.hanging_source),
        ("an evaluation or source raises", many(20), groups.raising),
        ("on_step waits or raises", many(20), groups.functions_of_on_step),
        ("a signal before on_step", many(20), groups.signals_before_on_step),
        ("a log that cannot be written", many(20), groups.broken_logs),
        ("two configurations, one folder", many(10), groups.two_configurations),
        ("folder replaced under a run", many(10), groups.replaced_folder),
        ("a damaged metrics.jsonl", many(20), groups.damaged_logs),
        ("infinite optimizer state", many(20), groups.nonfinite_optimizer),
    ]
