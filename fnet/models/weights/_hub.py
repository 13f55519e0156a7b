"""Finds weights on this disk, in fnet's cache or in Hugging Face's cache, or downloads them to
Hugging Face's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fnet.models.weights import _download

_TORCHVISION = (
    "write its model.safetensors in Python (import torchvision, safetensors.torch; "
    "safetensors.torch.save_file(torchvision.models.get_model({!r}, "
    "weights='IMAGENET1K_V1').state_dict(), 'model.safetensors')) and put it into {}"
)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def cache() -> Path:
    """Returns fnet's cache of weights and data, $FNET_CACHE or ~/.cache/fnet. The cache contains
    one folder for each name of weights or data."""
    return _expanded(os.environ.get("FNET_CACHE") or "~/.cache/fnet")


def _expanded(path: str | os.PathLike) -> Path:
    """Returns the path with ~ replaced by the home directory.

    Raises:
        FileNotFoundError: the home directory is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            f"{path}: the home directory is unknown; pass an absolute path, or set FNET_CACHE and "
            "HF_HUB_CACHE"
        ) from None


def hugging_face() -> Path:
    """Returns the cache of Hugging Face's hub: $HF_HUB_CACHE, $HF_HOME/hub, or a folder in
    ~/.cache."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return _expanded(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(os.environ.get("HF_HOME") or f"{base}/huggingface") / "hub"


def find(
    name: str | os.PathLike, repositories: tuple[str, ...] = (), revision: str | None = None
) -> Path:
    """Returns the path of the file or folder of the weights `name`. A repository that is not in a
    cache is downloaded.

    Args:
        name: a path, the name of a folder in fnet's cache, or a repository of Hugging Face's hub
            ("sentence-transformers/all-MiniLM-L6-v2").
        repositories: the sources of the weights, as in `Model.HUB`.
        revision: a branch, tag or commit of the repository. Default: the revision in the cache, or
            "main" if the cache has no revision.

    Raises:
        FileNotFoundError: the file is not on this disk and cannot be downloaded. The error message
            lists the paths searched and says what to download.
        OSError, ValueError: as for `_download.download`.
    """
    path = _expanded(name)
    if path.exists() and revision is None:
        return path
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
        if path.exists():
            raise ValueError(
                f"{path}: a revision can be given for a repository of Hugging Face's hub, not for "
                f"a path"
            )
        raise FileNotFoundError(f"{path}: no such file or folder")
    own = cache() / name
    if own.is_dir() and any(own.iterdir()) and revision is None:
        return own
    hub = [each for each in repositories or (name,) if ":" not in each]
    partial = None
    for repository in hub:
        if snapshot := _snapshot(repository, revision):
            if _download.complete(snapshot):
                return snapshot
            partial = partial or snapshot
    remote = [each for each in hub if "/" in each and not each.endswith((".safetensors", ".bin"))]
    reason = _download.unavailable() if remote else None
    if remote and reason is None:
        try:
            return _download.download(remote[0], revision, hugging_face())
        except ConnectionError as error:
            reason = str(error)
    if partial is not None:
        return partial  # the snapshot is not complete; `load` raises an error that states what is missing
    option = "" if revision is None else f" --revision {revision}"
    ways = [
        f"download it with 'hf download {each}{option}', or copy its files to {own}"
        for each in hub[:1]
    ]
    ways += [
        _TORCHVISION.format(each.partition(":")[2], own) for each in repositories if ":" in each
    ]
    raise FileNotFoundError(
        f"the weights {name!r} are not on this disk: no such path, nothing in {own}"
        + (f", no {' or '.join(hub)} in Hugging Face's cache, {hugging_face()}" if hub else "")
        + (f" ({reason})" if reason else "")
        + f": {'; or '.join(ways)}"
    )


def commit(path: Path) -> str | None:
    """Returns the commit of a path in Hugging Face's cache, or None for other paths."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            return folder.name
    return None


def _snapshot(repository: str, revision: str | None) -> Path | None:
    """Returns the snapshot of a revision in Hugging Face's cache, or None. If `revision` is None,
    returns the snapshot of the branch main if the cache contains it, and otherwise the newest
    snapshot."""
    snapshots = _download.snapshots(hugging_face(), repository)
    if revision is not None and (snapshots / revision).is_dir():
        return snapshots / revision
    ref = snapshots.parent / "refs" / (revision or "main")
    if ref.is_file() and (found := snapshots / ref.read_text().strip()).is_dir():
        return found
    held = [each for each in snapshots.glob("*") if each.is_dir()] if revision is None else []
    return max(held, key=lambda each: each.stat().st_mtime, default=None)
