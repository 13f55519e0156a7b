"""Heartbeat: lines while something long is under way."""

import time

import pytest

from fnet._util._heartbeat import Heartbeat


def test_it_names_the_stage_and_its_seconds():
    lines = []
    with Heartbeat(lines.append, "tracing", every=0.05) as heartbeat:
        while not lines:
            time.sleep(0.01)
        heartbeat.begin("compiling")
        while not lines[-1].startswith("compiling"):
            time.sleep(0.01)
    assert lines[0] == "tracing, 0 s so far" and lines[-1] == "compiling, 0 s so far"
    ended = len(lines)
    time.sleep(0.15)
    assert len(lines) == ended


def test_a_quick_block_says_nothing():
    lines = []
    with Heartbeat(lines.append, "tracing"):
        pass
    assert not lines


def test_errors_reach_the_caller():
    def broken(line):
        raise BrokenPipeError("closed")

    with pytest.raises(BrokenPipeError), Heartbeat(broken, "tracing", every=0.01):
        time.sleep(0.2)
    with pytest.raises(ZeroDivisionError), Heartbeat(broken, "tracing", every=0.01):
        time.sleep(0.2)
        raise ZeroDivisionError
