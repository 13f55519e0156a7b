"""Storage of runs: a local folder (`pathlib.Path`), or objects under a prefix of S3, GCS or Azure
(`StorePath`).

`location` converts a path or a URL to a `Path` or a `StorePath`. A `StorePath` has the methods of
`Path` that fnet uses, and methods that only an object store needs, such as the conditional writes
`create` and `replace`. An object in an object store is written completely or not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fnet._util import _missing
from fnet._util._files import write

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_SCHEMES = {  # what to set if the store refuses access
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (AWS_ENDPOINT_URL for another server than Amazon's)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "memory": "",
}
_CHUNK = 8 << 20  # bytes of one request; a larger object is written in several parts
# Retries by obstore in each of our attempts: about half a minute in total.
_RETRIES, _ATTEMPTS = (8, 6)
_PAUSE = 0.5  # seconds before the second attempt, doubled for each further attempt
_LIMIT = 60.0  # seconds after which there is no further attempt, if a server does not answer


class StorageError(OSError):
    """An object store cannot be reached or refuses a request. The error message names the URL and
    says what to do."""


def location(where: str | os.PathLike) -> Path | StorePath:
    """Converts a path or a URL to a `Path` or a `StorePath`.

    Args:
      where: a local path, or a URL: s3://bucket/prefix, gs://bucket/prefix, az://container/prefix,
        or memory://name/prefix. Objects in memory:// are lost when the process ends.

    Raises:
      ValueError: the URL has an unsupported scheme, no bucket, or "." or ".." in its path.
      ModuleNotFoundError: obstore is not installed.
    """
    if isinstance(where, StorePath | Path):
        if isinstance(where, Path) and re.match(r"(s3|gs|az|memory):/", str(where)):
            url = str(where).replace(":/", "://", 1)
            raise ValueError(
                f"Path('{where}'): a pathlib.Path cannot hold a URL; pass '{url}' as a string"
            )
        return where
    match = _URL.fullmatch(os.fspath(where))
    if match is None:
        return Path(where)
    scheme, bucket, key = match.groups()
    expected = "use a local path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
    if scheme not in _SCHEMES:
        raise ValueError(f"{where}: the scheme '{scheme}' is not supported; {expected}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", bucket):
        raise ValueError(f"{where}: expected the name of a bucket after {scheme}://; {expected}")
    names = tuple(name for name in key.split("/") if name)
    if {".", ".."} & set(names) or any(ord(c) < 32 for c in key):
        raise ValueError(f"{where}: '.', '..' and control characters cannot be part of a key")
    return StorePath(_store(scheme, bucket), f"{scheme}://{bucket}", names)


def write_whole(path: Path | StorePath, data: bytes) -> None:
    """Writes a file or object. Readers find the old or the new content of the file, never a part of
    it."""
    if isinstance(path, StorePath):
        path.write_bytes(data)
    else:
        write(path, data)


def _store(scheme: str, bucket: str) -> Any:
    try:
        from obstore import store
    except ImportError as error:
        raise ModuleNotFoundError(
            _missing.message(f"{scheme}://{bucket}: object stores need", "obstore", error=error)
        ) from None
    if scheme == "memory":
        return _memory(bucket)
    endpoints = [
        value
        for name, value in os.environ.items()
        if re.fullmatch(r"(AWS|AZURE)_.*ENDPOINT.*", name)
    ]
    options: dict[str, Any] = {"timeout": "30s"}
    if any(value.startswith("http://") for value in endpoints) or os.environ.get(
        "AZURE_STORAGE_USE_EMULATOR"
    ):
        options["allow_http"] = True
    made = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[scheme]
    try:
        return made(bucket, client_options=options, retry_config=_retries())
    except Exception as error:
        raise StorageError(
            f"{scheme}://{bucket}: {_brief(error)}. Set {_SCHEMES[scheme]}"
        ) from None


def _retries() -> dict[str, Any]:
    from datetime import timedelta

    backoff = {
        "init_backoff": timedelta(seconds=0.1),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    }
    return {"max_retries": _RETRIES, "backoff": backoff, "retry_timeout": timedelta(seconds=60)}


@functools.cache
def _memory(name: str) -> Any:
    from obstore.store import MemoryStore

    return MemoryStore()


@dataclasses.dataclass(frozen=True)
class Meta:
    """The metadata of an object in an object store.

    Fields:
      size: the size in bytes.
      version: a dict that identifies the version of the object, with the keys "e_tag" and "version"
        if the store provides them. `StorePath.replace` writes an object only if its version is
        unchanged.
      modified: the time of the last write in seconds, by the clock of the object store.
    """

    size: int
    version: dict[str, str]
    modified: float


class StorePath:
    """A prefix or an object of an object store, with the methods of `pathlib.Path` that fnet uses.

    Args:
      store: an obstore store object, which gives access to one bucket.
      root: the URL of the bucket.
      names: the components of the key between slashes, a tuple of strings.
    """

    def __init__(self, store: Any, root: str, names: tuple[str, ...]):
        self._store, self._root, self._names = store, root, names

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self._store, self._root, (*self._names, *str(name).split("/")))

    def __str__(self) -> str:
        return "/".join((self._root, *self._names))

    def __repr__(self) -> str:
        return f"StorePath('{self}')"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return self._names[-1] if self._names else ""

    @property
    def parent(self) -> StorePath:
        return StorePath(self._store, self._root, self._names[:-1])

    @property
    def key(self) -> str:
        return "/".join(self._names)

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing, because an object store has no folders."""

    # Reading.

    def meta(self) -> Meta | None:
        """Returns the metadata of the object, or None if the object does not exist."""
        try:
            known = self._do(self._store.head, self.key)
        except FileNotFoundError:
            return None
        return Meta(known["size"], _version(known), known["last_modified"].timestamp())

    def exists(self) -> bool:
        return self.meta() is not None

    def read_bytes(self) -> bytes:
        return self.versioned()[0]

    def versioned(self) -> tuple[bytes, Meta]:
        """Returns the content of the object, and the metadata of the version that was read."""

        def whole():
            answer = self._store.get(self.key)
            return bytes(answer.bytes()), answer.meta

        data, known = self._do(whole)
        return data, Meta(known["size"], _version(known), known["last_modified"].timestamp())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, begin: int, end: int) -> Any:
        """Returns the bytes from `begin` to `end`, or fewer if the object ends before `end`."""
        return (
            memoryview(self._do(self._store.get_range, self.key, start=begin, end=end))
            if end > begin
            else b""
        )

    def keys(self) -> list[str]:
        """Returns the keys of all objects below this prefix, relative to the prefix."""

        def listed():
            prefix = f"{self.key}/" if self._names else None
            return [known["path"] for batch in self._store.list(prefix) for known in batch]

        return sorted(
            path[len(self.key) + 1 :] if self._names else path for path in self._do(listed)
        )

    # Writing.

    def write_bytes(self, data: Any) -> None:
        self.write_parts([memoryview(data)])

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def write_parts(self, parts: Iterable[Any]) -> None:
        """Writes the buffers in `parts` as one object, in the order of `parts`. `parts` must be
        iterable more than once."""
        total = sum(len(part) for part in parts)
        if total <= _CHUNK:
            data = b"".join(parts)
            self._do(self._store.put, self.key, data, use_multipart=False)
            return
        chunk = max(_CHUNK, -(-total // 9000))  # a store accepts at most 10,000 parts
        pieces = lambda: (
            part[at : at + chunk] for part in parts for at in range(0, len(part), chunk)
        )
        self._do(lambda: self._store.put(self.key, pieces(), chunk_size=chunk, max_concurrency=4))

    def create(self, data: bytes) -> Meta | None:
        """Writes the object if it does not exist, and returns its metadata. Returns None if it
        exists."""
        return self._conditional(data, "create")

    def replace(self, data: bytes, before: Meta) -> Meta | None:
        """Overwrites the object if its version is still the version in the metadata `before`.
        Returns the new metadata, or None if the object has changed."""
        return self._conditional(data, before.version)

    def _conditional(self, data: bytes, mode: Any) -> Meta | None:
        """Writes the object if the condition `mode` is met. `mode` is "create" (the object must not
        exist yet) or the version that the existing object must have. If the response to a
        successful write is lost, the write is repeated, and the store refuses the repeated write.
        Therefore, if the store refuses a write, the content of the object is compared with
        `data`."""
        from obstore import exceptions as refusals

        try:
            known = self._do(self._store.put, self.key, data, mode=mode, use_multipart=False)
            return Meta(len(data), _version(known), 0.0)
        except FileNotFoundError:
            if mode == "create":
                raise StorageError(
                    f"{self}: there is no such bucket; create {self._root}"
                ) from None
            return None
        except (refusals.AlreadyExistsError, refusals.PreconditionError):
            try:
                there, meta = self.versioned()
            except FileNotFoundError:  # removed in the meantime
                return None
            return meta if there == data else None

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._do(self._store.delete, self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def copy(self, to: StorePath) -> None:
        """Copies the object inside the object store."""
        self._do(self._store.copy, self.key, to.key)

    def _do(self, request: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Executes a request, repeats it after temporary failures, and converts errors to
        `StorageError`.

        obstore itself repeats requests after 5xx errors, and repeats read requests after a timeout
        or a closed connection. `_do` also repeats write requests whose response was lost, and all
        requests whose response was incomplete.
        """
        from obstore import exceptions as refusals

        final, began = (refusals.AlreadyExistsError, refusals.PreconditionError), time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                return request(*args, **options)
            except (*final, FileNotFoundError) as error:
                if "NoSuchBucket" in str(error):
                    raise StorageError(
                        f"{self}: there is no such bucket; create {self._root}"
                    ) from None
                raise
            except (refusals.PermissionDeniedError, refusals.UnauthenticatedError) as error:
                raise self._refused(error) from None
            except (refusals.BaseError, OSError) as error:
                text = str(error)
                if "NoSuchBucket" in text:
                    raise StorageError(
                        f"{self}: there is no such bucket; create {self._root}"
                    ) from None
                if _CREDENTIALS.search(text):
                    raise self._refused(error) from None
                hopeless = isinstance(error, refusals.NotSupportedError | refusals.InvalidPathError)
                if hopeless or attempt == _ATTEMPTS - 1 or time.monotonic() - began > _LIMIT:
                    raise StorageError(f"{self}: {_brief(error)}") from None
                time.sleep(_PAUSE * 2**attempt * random.uniform(0.5, 1))

    def _refused(self, error: Exception) -> StorageError:
        variables = _SCHEMES[self._root.partition(":")[0]]
        return StorageError(f"{self}: access was refused ({_brief(error)}). Set {variables}")


_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|metadata\.google|[Cc]redential|AccessDenied|InvalidAccessKeyId"
    r"|SignatureDoesNotMatch|Unauthorized|40[13] "
)


def _version(known: Any) -> dict[str, str]:
    return {name: known[name] for name in ("e_tag", "version") if known.get(name) is not None}


def _brief(error: Exception) -> str:
    """Returns one line that describes an error of obstore. The text of an obstore error is long: it
    contains XML and the client's configuration."""
    text = str(error).split("\n\nDebug source:")[0]
    code = re.search(r"status code: (\d{3}[^:<\n]*)", text)
    if code:
        detail = re.search(r"<Code>([^<]+)</Code>", text)
        return f"the server answered {code[1].strip()}" + (f", {detail[1]}" if detail else "")
    if lost := re.search(r"Error performing \w+ (\w+://[^/\s]+)\S* in .*? - (.*)", text):
        text = f"no answer from {lost[1]} ({lost[2]})"
    line = re.sub(r"<[^>]*>", " ", text.replace("\n", " "))
    return re.sub(r"\s+", " ", line).strip()[:200]


class Readable:
    """A file or object with a method `readinto`."""

    def read(self, size: int) -> bytearray:
        raw = bytearray(size)
        return raw[: self.readinto(memoryview(raw))]

    def readinto(self, view: memoryview) -> int:
        raise NotImplementedError


class Reader(Readable):
    """A reader of an object in an object store, with `read` and `seek`, and with a buffer for small
    reads."""

    _AHEAD = 4 << 20

    def __init__(self, path: StorePath, size: int):
        self._path, self._size = path, size
        self._at, self._begin, self._buffer = 0, 0, memoryview(b"")

    def seek(self, at: int) -> None:
        self._at = at

    def readinto(self, view: memoryview) -> int:
        got, wanted = 0, min(len(view), self._size - self._at)
        while got < wanted:
            skip = self._at - self._begin
            if not 0 <= skip < len(self._buffer):
                end = min(self._at + max(min(wanted - got, _CHUNK), self._AHEAD), self._size)
                self._begin, self._buffer, skip = (
                    self._at,
                    memoryview(self._path.read_range(self._at, end)),
                    0,
                )
                if not self._buffer:
                    break
            part = self._buffer[skip : skip + wanted - got]
            view[got : got + len(part)] = part
            got, self._at = got + len(part), self._at + len(part)
        return got
