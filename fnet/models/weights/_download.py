"""Downloads repositories of Hugging Face's hub into Hugging Face's cache, with the library
huggingface_hub."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
from pathlib import Path

from fnet._util import _missing
from fnet._util._files import write
from fnet.models.weights import _folder, _tensors

_TRUE = ("1", "ON", "YES", "TRUE")
_CHUNK = 1 << 22


class _Refused(Exception):
    """Base class of errors whose message is written by fnet, not by huggingface_hub."""


class _Unsupported(_Refused, ValueError):
    pass


class _Damaged(_Refused, OSError):
    pass


def unavailable() -> str | None:
    """Returns the reason why nothing can be downloaded, or None if downloads are possible."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        return "HF_HUB_OFFLINE is set"
    try:
        # Not an attribute of the package until it is imported.
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return _missing.message("a download needs", "huggingface_hub")
    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None


def download(repository: str, revision: str | None, cache: Path) -> Path:
    """Downloads the files that fnet reads: configurations, tokenizers and safetensors. Files in the
    cache are kept.

    The revision is resolved to a commit once, and every file is of that commit. If the connection
    is interrupted, huggingface_hub resumes the download of the file. If the download is
    interrupted, the next call of `download` downloads the files that are not complete. The checksum
    of each downloaded file is compared with the checksum that the hub lists.

    Args:
        repository: "organization/name".
        revision: a branch, tag or commit. Default: "main".
        cache: Hugging Face's cache.

    Returns:
        The folder of the snapshot.

    Raises:
        FileNotFoundError: the repository or the revision does not exist.
        ConnectionError: the hub cannot be reached.
        PermissionError: the repository is gated or private.
        ValueError: the repository has no safetensors files.
        OSError: the download was interrupted, or a file is damaged.
    """
    import huggingface_hub
    from huggingface_hub import errors

    server = {"endpoint": os.environ.get("HF_ENDPOINT") or None, "library_name": "fnet"}
    what = repository if revision is None else f"{repository} at {revision}"
    files = None
    try:
        info = huggingface_hub.HfApi(**server).model_info(
            repository, revision=revision, files_metadata=True
        )
        files = {file.rfilename: file for file in info.siblings or ()}
        # One after the other, verified at once, and not by snapshot_download: it compares no
        # checksums and downloads the weights beside the other files, so that a snapshot looks
        # complete when config.json was damaged or has yet to come.
        for name in _needed(what, list(files)):
            cached = huggingface_hub.try_to_load_from_cache(
                repository, name, cache_dir=cache, revision=info.sha
            )
            if not isinstance(cached, str):
                path = huggingface_hub.hf_hub_download(
                    repository, name, revision=info.sha, cache_dir=cache, **server
                )
                _verify(Path(path), files[name], what)
    except errors.GatedRepoError:
        raise PermissionError(
            f"{repository} is gated: accept its conditions on its page of the hub, and log in with "
            "'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"the hub has no public repository {repository}; for a private one, log in with "
            "'hf auth login'"
        ) from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{repository} has no revision {revision!r}") from None
    except _Refused:
        raise
    except (
        Exception
    ) as error:  # connection errors have types of the HTTP library, which depends on the version
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if files is None:
            raise ConnectionError(f"the hub cannot be reached ({reason})") from error
        raise OSError(
            f"the download of {what} stopped: {reason}. Call again to continue it"
        ) from error
    _record(cache, repository, revision or "main", info.sha)
    return snapshots(cache, repository) / info.sha


def snapshots(cache: Path, repository: str) -> Path:
    """Returns the folder with the snapshots (one for each commit) of a repository in Hugging Face's
    cache."""
    return cache / f"models--{repository.replace('/', '--')}" / "snapshots"


def complete(snapshot: Path) -> bool:
    """Whether a snapshot has all of its weights. The result is False after an interrupted download."""
    index = snapshot / _tensors.INDEX
    try:
        if index.exists():
            return all((snapshot / name).exists() for name in _tensors.shards(index)[1])
        if any(snapshot.glob("model-*-of-*.safetensors")):
            return False
        return bool(_tensors.weights_file(snapshot))
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def _needed(what, names):
    """Returns the names of the files to download, the weights last."""
    top = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    if "model.safetensors" in top:
        weights = ["model.safetensors"]
    elif _tensors.INDEX in names:
        weights = [*fnmatch.filter(top, "model-*-of-*.safetensors"), _tensors.INDEX]
    else:
        weights = top
    if not weights:
        raise _Unsupported(
            f"{what} has no safetensors files; it has {', '.join(sorted(names)[:8])}. Pickles "
            "(.bin, .pt) are never downloaded: convert them"
        )
    return [
        *(name for name in names if name == _folder.CONFIG or _folder.is_beside(name)),
        *weights,
    ]


def _verify(path, file, what):
    """Compares the hash of a file with the hub's: the SHA-256 for large files, the Git object's
    hash for others."""
    size = path.stat().st_size
    if file.lfs is not None:
        expected, digest = file.lfs.sha256, hashlib.sha256()
    else:
        expected, digest = file.blob_id, hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if expected is None:
        return
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        blob = path.resolve()
        path.unlink()
        with contextlib.suppress(FileNotFoundError):
            blob.unlink()
        raise _Damaged(
            f"{file.rfilename} of {what} was damaged during the download and is deleted: its "
            f"checksum is {digest.hexdigest()}, expected {expected}. Call again to download it"
        )


def _record(cache, repository, revision, commit):
    """Records the commit of a branch or tag, after all files are complete."""
    if revision == commit:
        return
    path = snapshots(cache, repository).parent / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, commit)
