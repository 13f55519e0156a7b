"""A lock for a folder in an object store. The owner must renew the lock regularly, because it
expires otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import weakref
from typing import Any

from fnet.training.checkpoints._lock import LOCK, Locked
from fnet.training.checkpoints._storage import Meta, StorageError, StorePath

# Seconds between two renewals; seconds after the last renewal until the lock expires.
BEAT, EXPIRY = (5.0, 30.0)


class Lease:
    """A lock for a folder in an object store.

    A folder in an object store is a set of objects whose keys have a common prefix. The lock is an
    object in the locked folder. The constructor of `Lease` creates the lock object, and `release`
    removes it.

    A thread of the owner renews the lock every `BEAT` seconds. If the owner has not renewed the
    lock for `EXPIRY` seconds, as measured by the store's clock, another run can take over the lock
    by a conditional write. A run on the owner's machine can take over the lock as soon as the
    owner's process has ended. A run that finds a lock of another run waits until the lock expires.
    If the waiting run detects that the owner of the lock is still running, the constructor raises
    `Locked`. An owner that was suspended for longer than `EXPIRY` seconds may have lost the lock,
    and detects the loss before it writes the manifest of a checkpoint.

    Args:
      folder: the folder to lock.

    Raises:
      Locked: another run holds the lock.
      OSError: the object store cannot be written to.
    """

    def __init__(self, folder: StorePath):
        self._path = folder / LOCK
        self._me = {"owner": secrets.token_hex(8), **_process()}
        self._data = json.dumps(self._me).encode()
        self._meta = self._take()
        self._done, self._lost = threading.Event(), threading.Event()
        self._free = weakref.finalize(
            self, _free, self._path, self._me["owner"], self._done, os.getpid()
        )
        threading.Thread(
            target=_renew,
            args=(self._path, self._me, self._meta, self._done, self._lost),
            name="lease",
            daemon=True,
        ).start()

    def _take(self) -> Meta:
        first, deadline = None, 0.0
        while True:
            if (mine := self._path.create(self._data)) is not None:
                return mine
            try:
                raw, meta = self._path.versioned()
            except FileNotFoundError:  # released in between
                continue
            owner = _parsed(raw)
            alive = _alive(owner)
            if first is None:
                first, deadline = meta.version, time.monotonic() + EXPIRY - self._age(meta)
            if alive or (alive is None and meta.version != first):
                raise Locked(f"process {owner.get('process')} on {owner.get('host')}")
            if alive is False or time.monotonic() >= deadline:
                if (mine := self._path.replace(self._data, meta)) is not None:
                    return mine
                raise Locked("a process that took it over at the same time")
            time.sleep(0.5)

    def _age(self, meta: Meta) -> float:
        """Returns the number of seconds since the last renewal of the lock, as measured by the
        object store's clock."""
        probe = self._path.parent / f"{LOCK}-probe-{self._me['owner']}"
        probe.write_bytes(b"")
        try:
            now = probe.meta()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        return 0.0 if now is None else max(0.0, now.modified - meta.modified)

    def holds(self) -> bool:
        """Returns whether this object still owns the lock.

        Raises:
          OSError: the object store cannot be reached.
        """
        try:
            return (
                not self._done.is_set()
                and _parsed(self._path.read_bytes()).get("owner") == self._me["owner"]
            )
        except FileNotFoundError:
            return False

    def kept(self) -> bool:
        """Returns whether this `Lease` owned the lock when it last tried to renew the lock. Sends
        no request to the object store."""
        return not (self._done.is_set() or self._lost.is_set())

    def release(self) -> None:
        self._free()


def _free(path, owner, done, pid):
    if os.getpid() != pid or done.is_set():  # a forked child has no lock to release
        return
    done.set()
    with contextlib.suppress(OSError):
        if _parsed(path.read_bytes()).get("owner") == owner:
            path.unlink(missing_ok=True)


def _renew(path, me, meta, done, lost):
    beat = 0
    while not done.wait(BEAT):
        beat += 1
        data = json.dumps(me | {"beat": beat}).encode()
        try:
            renewed = path.replace(data, meta)
            if renewed is None:  # taken over or removed, or a response was lost
                raw, meta = path.versioned()
                if _parsed(raw).get("owner") != me["owner"]:
                    lost.set()
                    return
            else:
                meta = renewed
        except FileNotFoundError:
            lost.set()
            return
        except StorageError:  # the next renewal tries again
            continue


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
        return content if isinstance(content, dict) else {}
    except ValueError:
        return {}


def _process() -> dict[str, Any]:
    """Returns values that identify this process. "boot", "namespace" and "started" are available
    only on Linux."""
    known: dict[str, Any] = {"host": socket.gethostname(), "process": os.getpid()}
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            known["boot"] = file.read().strip()
        known["namespace"] = os.readlink("/proc/self/ns/pid")
        known["started"] = _started(os.getpid())
    return known


def _started(pid: int) -> str | None:
    """Returns the start time of a process in kernel ticks, as text, or None if the process does not
    exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _alive(owner: dict[str, Any]) -> bool | None:
    """Returns whether the process that owns a lock is running, or None if this cannot be determined
    on this machine."""
    here = _process()
    if "started" not in here or any(
        owner.get(name) != here[name] for name in ("boot", "namespace")
    ):
        return None
    return isinstance(owner.get("process"), int) and _started(owner["process"]) == owner.get(
        "started"
    )
