"""Reads a bundle (the file of an exported model), which is a zip archive with checksums.

Every bundle (file of an exported model) contains a copy of this module as reader.py. Besides the
standard library it needs only NumPy and the copy of `fnet._util._safetensors` beside it,
tensor_table.py. The reader treats the file as untrusted: it checks every size before it allocates
memory, and it executes and unpickles nothing in the file.
"""

import hashlib
import json
import mmap
import re
import struct
import zipfile
import zlib
from pathlib import Path

if __package__:
    from fnet._util import _safetensors as tensor_table
else:  # in a bundle, whose copy has a name that hides no library
    import tensor_table

FORMAT, VERSION = "fnet bundle", 1
MANIFEST, WEIGHTS, TESTS = "manifest.json", "weights.safetensors", "tests.safetensors"
_COMMENT = b"sha256:"  # the archive's comment: the digest of everything before it
_DIGEST = len(_COMMENT) + 64
_DIRECTORY = 1 << 22  # bytes of the archive's directory
_SMALL = 1 << 26  # bytes of a file other than tensors; large tokenizers have 33 million
_JSON = 1 << 24  # bytes of a JSON file
_LISTS = 500_000  # lists and objects in a JSON file
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_INVALID = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    RecursionError,
)


def test_name(entry, number):
    """Returns the beginning of the names of a test's arrays in the file of tests. The first test of
    an entry point has the name of the entry point, as in files that have only one."""
    return f"{entry}.{number}" if number else entry


class BundleError(ValueError):
    """Raised if a file is not a complete bundle, or if a call does not match a bundle's signature.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "digits.fnet")
    ...     _ = file.write_bytes(b"")
    ...     try:
    ...         export.load(file)
    ...     except export.BundleError as error:
    ...         print(str(error).endswith("digits.fnet is empty; expected a bundle"))
    True
    """


class Archive:
    """The files of a bundle.

    Args:
        path: the path of the bundle.
        verify: whether to read the whole file and compare its SHA-256 with the SHA-256 at its end.
            Default True.

    Raises:
        BundleError: the file is damaged or not a bundle.
        OSError: the file cannot be read.
    """

    def __init__(self, path, verify=True):
        self.path = Path(path)
        with self.path.open("rb") as opened:
            try:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise BundleError(f"{path} is empty; expected a bundle") from None
        try:
            self._check_end(verify)
            self._entries = self._directory()
            self.manifest = self.json(MANIFEST, known=False)
            self._check_manifest()
        except BundleError:
            raise
        except _INVALID as error:
            raise self.error(f"{error or type(error).__name__}") from None

    def error(self, why):
        return BundleError(f"{self.path} is not a complete bundle: {why}")

    def names(self, folder=""):
        return sorted(name for name in self._entries if name.startswith(folder))

    def read(self, name, known=True):
        """Returns the bytes of a file in the bundle. If `known` is true, the SHA-256 of the bytes
        must be equal to that in manifest.json."""
        if name not in self._entries:
            raise self.error(f"there is no {name}")
        info, start = self._entries[name]
        data = self._map[start : start + info.compress_size]
        if info.compress_type == zipfile.ZIP_DEFLATED:
            inflate = zlib.decompressobj(-15)
            try:
                data = inflate.decompress(data, info.file_size + 1)
            except zlib.error as error:
                raise self.error(f"{name}: {error}") from None
        if len(data) != info.file_size:
            raise self.error(f"{name} has {len(data):,} bytes or more, expected {info.file_size:,}")
        if known and hashlib.sha256(data).hexdigest() != self.manifest["files"][name]["sha256"]:
            raise self.error(f"{name} does not have the digest that {MANIFEST} states")
        return data

    def json(self, name, known=True):
        if self._entries.get(name, (zipfile.ZipInfo(),))[0].file_size > _JSON:
            raise self.error(f"{name} has more than {_JSON:,} bytes")
        data = self.read(name, known)
        if data.count(b"[") + data.count(b"{") > _LISTS:
            raise self.error(f"{name} contains more than {_LISTS:,} lists and objects")
        try:
            data = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise self.error(f"{name} is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise self.error(f"{name} is a JSON {type(data).__name__}, expected an object")
        return data

    def tensors(self, name):
        """Returns the arrays of a safetensors file in the bundle, {key: array}. The arrays are
        views of the memory-mapped bundle."""
        if name not in self._entries:
            raise self.error(f"there is no {name}")
        info, start = self._entries[name]
        if info.compress_type != zipfile.ZIP_STORED:
            raise self.error(f"{name} is compressed; tensors must not be")
        try:
            table = tensor_table.read(self._map, start=start, total=info.file_size, most=_JSON)
            return table.arrays(self._map)
        except _INVALID as error:
            raise self.error(
                f"{name}: its header is invalid ({error or type(error).__name__})"
            ) from None

    def _check_end(self, verify):
        """Checks the end of the archive before its directory is read. If `verify` is true, also
        checks the SHA-256 of the whole file."""
        total = len(self._map)
        tail = self._map[max(0, total - 22 - _DIGEST) :]
        if (
            len(tail) != 22 + _DIGEST
            or tail[:4] != b"PK\5\6"
            or tail[22 : 22 + len(_COMMENT)] != _COMMENT
        ):
            raise self.error(
                "it does not end with a bundle's digest; the file is truncated, or not a bundle"
            )
        size = struct.unpack("<I", tail[12:16])[0]
        if size == 0xFFFFFFFF or struct.unpack("<I", tail[16:20])[0] == 0xFFFFFFFF:  # zip64
            locator = self._map[total - 22 - _DIGEST - 20 : total - 22 - _DIGEST]
            offset = struct.unpack("<4sIQI", locator)[2]
            size = struct.unpack("<Q", self._map[offset + 40 : offset + 48])[0]
        if size > _DIRECTORY:
            raise self.error(f"its directory has {size:,} bytes")
        if verify:
            digest = hashlib.sha256(memoryview(self._map)[: total - _DIGEST]).hexdigest()
            if digest.encode() != tail[22 + len(_COMMENT) :]:
                raise self.error(
                    "its content does not have the digest at its end; the file is damaged"
                )

    def _directory(self):
        with self.path.open("rb") as opened, zipfile.ZipFile(opened) as archive:
            infos = archive.infolist()
        entries, end = {}, 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            name, tensors = info.filename, info.filename.endswith(".safetensors")
            if not _NAME.fullmatch(name) or name in entries:
                raise self.error(f"it contains a file named {name[:80]!r}")
            if info.flag_bits & 1 or info.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise self.error(f"{name} is encrypted or compressed in an unknown way")
            if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
                raise self.error(f"{name} states two sizes")
            if not tensors and info.file_size > _SMALL:
                raise self.error(
                    f"{name} has {info.file_size:,} bytes, expected at most {_SMALL:,}"
                )
            header = self._map[info.header_offset : info.header_offset + 30]
            lengths = struct.unpack("<HH", header[26:30])
            start = info.header_offset + 30 + sum(lengths)
            if (
                header[:4] != b"PK\3\4"
                or info.header_offset < end
                or start + info.compress_size > len(self._map)
            ):
                raise self.error(f"{name} overlaps another file, or ends outside of the archive")
            if (
                self._map[info.header_offset + 30 : info.header_offset + 30 + lengths[0]]
                != name.encode()
            ):
                raise self.error(f"{name} has another name in its header")
            end = start + info.compress_size
            entries[name] = info, start
        return entries

    def _check_manifest(self):
        if self.manifest.get("format") != FORMAT:
            raise self.error(f"{MANIFEST} does not describe a bundle")
        if self.manifest["version"] > VERSION:
            raise self.error(
                f"it has version {self.manifest['version']} of the format, and this reader knows "
                f"{VERSION}; install a newer fnet"
            )
        files = {name: entry["bytes"] for name, entry in self.manifest["files"].items()}
        held = {
            name: info.file_size for name, (info, _) in self._entries.items() if name != MANIFEST
        }
        if files != held:
            odd = sorted(name for name in {*files, *held} if files.get(name) != held.get(name))
            raise self.error(
                f"{MANIFEST} and the archive differ in {', '.join(map(repr, odd[:4]))}"
            )
        for entry in self.manifest["entries"].values():
            # KeyError: incomplete.
            (entry["inputs"], entry["output"], entry["weights"], entry["constraints"])
