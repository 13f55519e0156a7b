"""Runs on hosts that come and go. `python -m tests.training.elastic_drill` trains on them."""

import os
import signal
import subprocess
import sys
import time

import elastic_drill
import pytest

from fnet.training.elastic._board import FIELDS, Board
from fnet.training.elastic._host import environment
from fnet.training.elastic._membership import Round, Watch, due, over


@pytest.fixture(params=["folder", "store"])
def board(request, tmp_path):
    if request.param == "folder":
        return Board(tmp_path / "deep" / "hosts")
    pytest.importorskip("obstore")
    return Board(f"memory://{tmp_path.name}-{request.node.name[:20]}/hosts")


def test_board_keeps_the_last_note_of_a_host(board):
    assert board.hosts() == {} and board.last_round() is None
    first, second, other = ({**dict.fromkeys(FIELDS, ""), "count": n} for n in (1, 2, 5))
    board.write("a", first)
    board.write("b-1", other)
    board.write("a", second)
    assert board.hosts() == {"a": second, "b-1": other}
    board.remove("a")
    board.remove("a")
    assert board.hosts() == {"b-1": other}


def test_what_is_no_note_is_ignored(tmp_path):
    board = Board(tmp_path)
    board.write("old", {"count": 1})
    (tmp_path / "host-torn.json").write_text('{"count": 1')
    (tmp_path / "host-list.json").write_text("[]")
    (tmp_path / "round-last.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    assert board.hosts() == {} and board.last_round() is None


def test_a_round_is_written_once(board):
    assert board.begin(1, {"by": "a"})
    assert not board.begin(1, {"by": "b"})
    assert board.begin(10, {"by": "b"}) and board.begin(9, {"by": "c"})
    assert board.last_round() == {"by": "b"}
    assert board.hosts() == {}


def test_hosts_are_alive_while_their_counts_grow():
    now = [0.0]
    watch = Watch(10, clock=lambda: now[0])
    assert watch.alive({"a": {"count": 7}, "b": {"count": 1}}) == []
    assert watch.undecided("a") and watch.undecided("b") and not watch.undecided("c")
    now[0] = 3
    assert watch.alive({"a": {"count": 8}, "b": {"count": 1}}) == ["a"]
    assert watch.undecided("b") and not watch.undecided("a")
    now[0] = 11
    assert watch.alive({"a": {"count": 8}, "b": {"count": 1}, "c": {"count": 3}}) == ["a"]
    assert not watch.undecided("b") and watch.quiet("a") == 8
    now[0] = 14  # a clock that was set back, or a new run of the same name, counts too
    assert watch.alive({"a": {"count": 8}, "c": {"count": 2}}) == ["c"]


def note(status="running", round=1, code=0):
    return {"status": status, "round": round, "code": code, "count": 1}


ROUND = Round(1, ("a", "b"), "x:1", "")


@pytest.mark.parametrize(
    ("notes", "alive", "expected"),
    [
        ({"a": note(), "b": note()}, ["a", "b"], None),
        ({"a": note(), "b": note()}, ["a"], ("b is lost", False, False)),
        ({"a": note(), "b": note("leaving")}, ["a"], ("b leaves", True, False)),
        (
            {"a": note("failed", code=3), "b": note()},
            ["a", "b"],
            ("the program ended with status 3 on a", False, True),
        ),
        ({"a": note("failed"), "b": note()}, ["a"], ("b is lost", False, False)),
        ({"a": note("failed", round=0), "b": note()}, ["a", "b"], None),
        (
            {"a": note(), "b": note(), "c": note("waiting", 0)},
            ["a", "b", "c"],
            ("c joined", True, False),
        ),
        ({"a": note("finished"), "b": note(), "c": note("waiting", 0)}, ["a", "b", "c"], None),
        ({"a": note("finished"), "b": note()}, ["b"], None),
        (
            {"a": note("finished"), "b": note("finished"), "c": note("waiting", 0)},
            ["c"],
            ("c joined", True, False),
        ),
        ({"c": note("waiting", 0)}, ["c"], ("a, b are lost", False, False)),
    ],
)
def test_what_makes_a_new_round_due(notes, alive, expected):
    found = due(ROUND, notes, alive)
    assert (found and (found.why, found.gently, found.failed)) == expected


def test_a_round_needs_no_field_that_has_a_default():
    note = {"number": 3, "members": ["a", "b"], "address": "a:1", "why": "b joined"}
    assert Round.read(note) == Round(3, ("a", "b"), "a:1", "b joined")


@pytest.mark.parametrize("note", [{"number": 3, "members": [], "era": "new"}, ["a"], 7])
def test_a_round_of_another_version_names_its_fields(note):
    with pytest.raises(ValueError, match="run one version of fnet on all hosts, or name a new"):
        Round.read(note)


def test_a_round_is_over_when_all_have_finished():
    done = {"a": note("finished"), "b": note("finished")}
    assert over(ROUND, done) and not over(ROUND, {"a": note("finished"), "b": note()})
    assert not over(ROUND, {"a": note("finished"), "b": note("finished", round=0)})
    assert not over(Round.read(None), {})


def test_environment_names_the_place():
    assert environment(ROUND, 1) == {
        "JAX_COORDINATOR_ADDRESS": "x:1",
        "FNET_PROCESSES": "2",
        "FNET_PROCESS": "1",
    }


# Whole hosts. The program appends a line to a file and behaves as the file "orders" says.
PROGRAM = """
import os, pathlib, signal, sys, time
place, count = os.environ["FNET_PROCESS"], os.environ["FNET_PROCESSES"]
folder = pathlib.Path(sys.argv[1])
def say(what):
    with (folder / "log").open("a") as log:
        log.write(f"{what} {place}/{count}\\n")
def stop(*_):
    say("stopped")
    sys.exit(9)
signal.signal(signal.SIGTERM, stop)
say("began")
while not (folder / "end").exists():
    if (folder / "fail").exists():
        sys.exit(5)
    time.sleep(0.05)
say("ended")
"""
PATIENCE = 1.0


class Hosts:
    def __init__(self, folder):
        self.folder, self.running = folder, []
        (folder / "program.py").write_text(PROGRAM)

    def start(self, *options):
        host = subprocess.Popen(
            [
                *(sys.executable, "-m", "fnet.cli", "run", f"--elastic={self.folder / 'hosts'}"),
                *(f"--lost-after={PATIENCE}", *options, "--"),
                *(sys.executable, str(self.folder / "program.py"), str(self.folder)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(host)
        return host

    def log(self):
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, *lines):
        """Waits until all of these lines are in the log."""
        until = time.monotonic() + 120  # other tests may need the machine
        while not set(lines) <= set(self.log()):
            assert time.monotonic() < until, (lines, self.log())
            time.sleep(0.05)


@pytest.fixture
def hosts(tmp_path):
    found = Hosts(tmp_path)
    yield found
    for host in found.running:
        host.kill()
        host.communicate()


def test_hosts_begin_and_end_together(hosts):
    first, second = hosts.start("--min-hosts=2"), hosts.start("--min-hosts=2")
    hosts.wait("began 0/2", "began 1/2")
    (hosts.folder / "end").touch()
    for host in (first, second):
        _, said = host.communicate(timeout=60)
        assert host.returncode == 0 and "round 1: 2 host(s) are there" in said
    assert sorted(hosts.log()) == ["began 0/2", "began 1/2", "ended 0/2", "ended 1/2"]


@pytest.mark.exhaustive
def test_hosts_are_lost_join_and_leave(hosts):
    first, second = hosts.start("--min-hosts=2"), hosts.start("--min-hosts=2")
    hosts.wait("began 0/2", "began 1/2")
    second.kill()  # and with it, its program
    time.sleep(2 * PATIENCE)
    assert "began 0/1" not in hosts.log()  # two hosts were asked for
    third = hosts.start("--min-hosts=1")
    until = time.monotonic() + 120  # other tests may need the machine
    while len([line for line in hosts.log() if line.startswith("began")]) < 4:
        assert time.monotonic() < until, hosts.log()
        time.sleep(0.05)
    third.send_signal(signal.SIGTERM)
    _, said = third.communicate(timeout=60)
    assert third.returncode == 143 and "told to end; the others go on" in said
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 143
    assert "is lost; waiting for 2 hosts" in said
    assert not any(line.startswith("ended") for line in hosts.log())
    assert list((hosts.folder / "hosts").glob("host-*")) == []


def test_a_program_that_keeps_failing_is_given_up(hosts):
    (hosts.folder / "fail").touch()
    host = hosts.start("--restarts=1")
    _, said = host.communicate(timeout=90)
    assert host.returncode == 5
    assert "gave up: the program ended with status 5 on" in said and "2 times in a row" in said
    assert hosts.log() == ["began 0/1"] * 2
    (hosts.folder / "fail").unlink()  # what was given up does not bind the next run
    (hosts.folder / "end").touch()
    again = hosts.start()
    again.communicate(timeout=60)
    assert again.returncode == 0 and hosts.log()[-1] == "ended 0/1"


def test_a_folder_that_vanishes_does_not_end_a_run(hosts):
    host = hosts.start()
    hosts.wait("began 0/1")
    (hosts.folder / "hosts").rename(hosts.folder / "away")
    time.sleep(PATIENCE / 2)
    assert host.poll() is None
    (hosts.folder / "away").rename(hosts.folder / "hosts")
    (hosts.folder / "end").touch()
    _, said = host.communicate(timeout=60)
    assert host.returncode == 0 and "trying again" in said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_no_program_outlives_its_host(hosts):
    host = hosts.start()
    hosts.wait("began 0/1")
    children = subprocess.run(
        ["pgrep", "-P", str(host.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    host.kill()
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{child}/cwd") for child in children):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--elastic=x"], "expected a command after --"),
        (["--elastic=x", "--", "./no/program"], "-- ./no/program: there is no such program"),
        (["--elastic=x", "--min-hosts=0", "--", "true"], "--min-hosts=0: expected at least 1"),
        (["--elastic=x", "--lost-after=0", "--", "true"], "--lost-after=0: expected more than 0"),
        (["--elastic=x", "--restarts=-1", "--", "true"], "--restarts=-1: expected at least 0"),
    ],
)
def test_errors(capsys, argv, message):
    from fnet.cli import main

    assert main(["run", *argv]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["gpt"])
def test_training_on_changing_hosts_keeps_the_bits(model, tmp_path):
    options = ["--invariant", "--pause=0.2"]
    found = elastic_drill.drill(tmp_path, model, changes=2, steps=60, options=options, seed=3)
    alone = elastic_drill.undisturbed(tmp_path, model, 60, ["--invariant"])
    assert found.keys() == alone.keys()
    assert [name for name in alone if found[name].tobytes() != alone[name].tobytes()] == []
