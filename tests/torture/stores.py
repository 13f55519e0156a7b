"""Harm to runs in an object store: an S3 server on 127.0.0.1 that fails, processes that are killed
while they save.

Victims are forked from this process, and obstore's threads do not survive a fork: so the store is
read in children.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests.torture import harms
from tests.torture.victims import Victim, newest, one_sentence, remains, whole

sys.path.insert(0, str(Path(__file__).parents[1]))

import s3

PASSING = [  # of each request so many
    {"status": 503, "chance": 0.05},
    {"status": 500, "method": "PUT", "chance": 0.05},
    {"reset": "before", "chance": 0.05},
    {"reset": "after", "method": "PUT", "chance": 0.1},
    {"reset": "after", "method": "POST", "chance": 0.1},
]


def asked(function, *arguments):
    """What `function` returns in a child of this process."""
    with tempfile.TemporaryFile() as file:
        with warnings.catch_warnings(action="ignore"):
            pid = os.fork()
        if pid == 0:
            try:
                file.write(json.dumps(function(*arguments)).encode())
                file.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(pid, 0)
        file.seek(0)
        return json.loads(file.read() or b"null")


def _count(number):
    return [{**each, "count": number} for each in PASSING]


def _each(count, folder, harm, notes=lambda: []):
    """(tried, survived, what was lost) of `harm(server, url, number, expected)`, which returns what
    went wrong or ""."""
    if s3.MISSING:
        return 0, 0, [f"note: skipped, {s3.REASON}"]
    expected = whole(folder, "--steps=60")
    server, lost = s3.Server(), []
    os.environ.update(server.environment)
    try:
        for number in range(count):
            if wrong := harm(server, f"s3://bucket/{folder.name}/{number}", number, expected):
                lost.append(f"{number}: {wrong}")
    finally:
        server.close()
        for name in server.environment:
            os.environ.pop(name)
    return count, count - len(lost), lost + notes()


def kills(count, folder, rng, faults):
    """SIGKILL at a random moment, most of them while a checkpoint is saved; every restart resumes,
    to the same end.

    Each number is one kill; a run is killed three times and then finished.
    """
    state = {"before": 0, "killed": 0}

    def harm(server, url, number, expected):
        url = f"{url.rpartition('/')[0]}/{number // 3}"
        state["before"] *= number % 3 > 0
        server.faults(*(_count(10**9) if faults else ()))
        victim = Victim(url, "--steps=60")
        kind = rng.choice(["save", "save", "step", ""])
        if kind:
            victim.until(kind, count=rng.randint(1, 9))
        time.sleep(rng.expovariate(10 if kind else 1))
        victim.signal(signal.SIGKILL)
        code = victim.end()
        server.faults()
        at = asked(newest, url)
        state["killed"] += code != 0
        if code not in (0, -signal.SIGKILL) or at is None or at < state["before"]:
            return f"exit {code}, step {state['before']} was there, {at} is: {victim.said[-300:]}"
        state["before"] = at
        if number % 3 == 2 or number == count - 1:
            again = Victim(url, "--steps=60")
            again.end()
            if again.code != 0 or asked(remains, url) != expected:
                return (
                    f"resumed from step {at}: exit {again.code}, another end: {again.said[-400:]}"
                )
        return ""

    return _each(
        count,
        folder,
        harm,
        lambda: [f"note: {state['killed']} of {count} were killed before their end"],
    )


def errors(count, folder, rng):
    """A tenth of the reads and a fifth of the writes fail, in different ways: the run ends as if
    none had."""

    def harm(server, url, number, expected):
        server.faults(*_count(10**9))
        victim = Victim(url, "--steps=60")
        victim.end(300)
        server.faults()
        same = asked(remains, url) == expected
        return (
            ""
            if victim.code == 0 and same
            else f"exit {victim.code}, same end: {same}: {victim.said[-400:]}"
        )

    return _each(count, folder, harm)


def outages(count, folder, rng):
    """From some request on nothing succeeds: one sentence and exit code 2; then the server is back,
    and on."""

    def impatient():
        from fnet.training.checkpoints import _storage

        _storage._RETRIES, _storage._PAUSE = 1, 0.05

    def harm(server, url, number, expected):
        server.faults(
            {
                "status": 503,
                "skip": rng.randint(0, 120),
                "count": 10**9,
                **rng.choice([{}, {"method": "PUT"}, {"match": "manifest"}, {"match": "arrays"}]),
            }
        )
        victim = Victim(url, "--steps=60", before=impatient)
        victim.end()
        server.faults()
        at = asked(newest, url)
        again = Victim(url, "--steps=60")
        again.end()
        said = (victim.code == 2 and one_sentence(victim.said)) or (
            victim.code == 0 and not victim.said
        )
        if not said or again.code != 0 or at is None or asked(remains, url) != expected:
            return f"exit {victim.code} at step {at}: {victim.said[-400:]}; then {again.code}: {again.said[-300:]}"
        return ""

    return _each(count, folder, harm)


def races(count, folder, rng):
    """Two processes for one prefix: one has it, the other says so in a sentence with exit code 2."""

    def harm(server, url, number, expected):
        pair = [Victim(url, "--steps=60"), Victim(url, "--steps=60")]
        codes = [victim.end() for victim in pair]
        said = [victim.said for victim in pair if victim.code == 2]
        if (
            sorted(map(str, codes)) != ["0", "2"]
            or not one_sentence(said[0])
            or "another run is using" not in said[0]
        ):
            return f"exits {codes}: {[victim.said for victim in pair]}"
        return "" if asked(remains, url) == expected else "another end"

    return _each(count, folder, harm)


def workers(count, folder, rng):
    """One of two processes killed; undisturbed, two in the store come to the same as two in a
    folder."""
    whole = []

    def harm(server, url, number, expected):
        if not whole:
            for where in (folder / "pair", f"{url}-whole"):
                if [code for _, code in map(harms.ended, harms.pair(where, 60))] != [0, 0]:
                    return "two undisturbed processes did not end well"
            whole.append(remains(folder / "pair"))
            if asked(remains, f"{url}-whole") != whole[0]:
                return "two undisturbed processes came to another end than in a folder"
        return harms.one_of_two(url, whole[0], asked, rng)

    return _each(count, folder, harm)


def every(many):
    """The table's rows: (what, how often, function of (count, folder, random))."""
    return [
        ("S3: kills", many(40), lambda *a: kills(*a, False)),
        ("S3: kills and errors", many(40), lambda *a: kills(*a, True)),
        ("S3: errors and lost answers", many(20), errors),
        ("S3: an outage", many(10), outages),
        ("S3: two runs, one prefix", many(6), races),
        ("S3: a worker of two killed", many(4), workers),
    ]
