"""Starts and watches victims, the runs into which faults are injected, and reads their results.
Victims are forked from a process that has imported JAX and computed nothing with it, so that
hundreds of them start in a few minutes."""

import contextlib
import functools
import json
import os
import select
import sys
import tempfile
import time
import traceback
import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache

from fnet import training as tr
from fnet.training.checkpoints import _manifest
from fnet.training.checkpoints._storage import location
from tests.torture import victim


class Victim:
    """A run in a process of its own.

    Args:
      workdir: its folder.
      arguments: of victim.py.
      before: called in the new process before anything else.
      group: whether it leads a process group of its own, as a job of a shell does.
      compiled: whether it reads what an undisturbed run has compiled; "write": it writes this
        itself. Without it, most of a victim's life is compiling.
    """

    def __init__(self, workdir, *arguments, before=None, group=False, compiled=True):
        self.err = tempfile.TemporaryFile()
        self._read, write = os.pipe()
        cache = _compiled()
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks; here it has not begun
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.dup2(write, 1)
                os.dup2(self.err.fileno(), 2)
                if group:
                    os.setpgid(0, 0)
                try:
                    if compiled:  # a killed process never leaves half a file there
                        _use_compiled(cache, write=compiled == "write")
                    if before is not None:
                        before()
                    code = victim.main([str(workdir), *arguments])
                except SystemExit as end:
                    print(end, file=sys.stderr)
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
            os._exit(code)
        os.close(write)
        self.code, self.words, self.said = None, b"", ""

    def until(self, word, seconds=120.0, count=1):
        """Waits until the victim has printed this; returns whether it has."""
        end = time.monotonic() + seconds
        while self.words.count(word.encode() + b"\n") < count:
            ready, _, _ = select.select([self._read], [], [], max(end - time.monotonic(), 0))
            if not ready or not (read := os.read(self._read, 65536)):
                return False
            self.words += read
        return True

    def signal(self, number, *, group=False):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def kill_group(self):
        """Ends the workers that the victim has left running."""
        self.signal(9, group=True)

    def end(self, seconds=120.0):
        """Waits for its end, reaps it and returns its exit code: negative: the signal that killed
        it; None: it hangs."""
        finish = time.monotonic() + seconds
        while self.code is None:
            ready, _, _ = select.select([self._read], [], [], 0.01)
            if ready and (read := os.read(self._read, 65536)):
                self.words += read
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > finish:
                self.signal(9)
                os.waitpid(self.pid, 0)
                break
        os.close(self._read)
        self.err.seek(0)
        self.said = self.err.read().decode(errors="replace")
        self.err.close()
        return self.code


def one_sentence(text):
    """Whether it is one line without a traceback. What the C++ below says of its connections is not
    counted."""
    lines = [
        line
        for line in text.splitlines()
        if line and not line.startswith(("[Gloo]", "W0000", "E0000", "I0000"))
    ]
    return len(lines) == 1 and "Traceback" not in text


def newest(workdir):
    return tr.Checkpoints(location(workdir) / "checkpoints").latest() or 0


def remains(workdir):
    """Each leaf of the last checkpoint with its checksum, and the metrics without times: what a run
    comes to."""
    folder = location(workdir) / "checkpoints" / str(newest(workdir))
    leaves = {
        path: {key: value for key, value in leaf.items() if key != "pieces"}
        | {"crc32": [piece["crc32"] for piece in leaf["pieces"]]}
        for path, leaf in _manifest.read_manifest(folder)["leaves"].items()
    }
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in tr.read_metrics(workdir)
    ]
    return json.loads(json.dumps([leaves, rows]))


def whole(folder, *arguments):
    """What a run with these arguments comes to that nothing disturbs."""
    if arguments not in _WHOLE:
        unbroken = Victim(folder / "whole", *arguments, compiled="write")
        if (code := unbroken.end(300)) != 0:
            raise SystemExit(f"the undisturbed run ended with {code}: {unbroken.said}")
        _WHOLE[arguments] = remains(folder / "whole")
    return _WHOLE[arguments]


def _use_compiled(folder, *, write):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0 if write else 10**9)
    compilation_cache.reset_cache()


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="torture-compiled-")


def _compiled():
    """The folder of the programs that undisturbed runs have compiled."""
    return _folder().name


_WHOLE: dict[tuple[str, ...], list] = {}
