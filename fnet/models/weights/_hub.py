"""Finds weights on this disk, in fnet's cache and in Hugging Face's cache. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TORCHVISION = ("write its model.safetensors in Python (import torchvision, safetensors.torch; safetensors.torch."
                "save_file(torchvision.models.get_model({!r}, weights='IMAGENET1K_V1').state_dict(), "
                "'model.safetensors')) and put it into {}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def cache() -> Path:
    """fnet's cache of weights and data, with one folder for each name: $FNET_CACHE, or ~/.cache/fnet."""
    return _expanded(os.environ.get("FNET_CACHE") or "~/.cache/fnet")


def _expanded(path: str | os.PathLike) -> Path:
    """The path with ~ replaced by the home directory.

    Raises:
        FileNotFoundError: the home directory is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise FileNotFoundError(f"{path}: the home directory is unknown; pass an absolute path, or set FNET_CACHE and "
                                "HF_HUB_CACHE") from None


def hugging_face() -> Path:
    """The cache of Hugging Face's hub, as its client selects it: $HF_HUB_CACHE, $HF_HOME/hub, or ~/.cache/..."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return _expanded(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(os.environ.get("HF_HOME") or f"{base}/huggingface") / "hub"


def find(name: str | os.PathLike, repositories: tuple[str, ...] = ()) -> Path:
    """Returns the file or folder with this name.

    Args:
        name: a path, the name of a folder in fnet's cache, or a repository of Hugging Face's hub in its cache
            ("sentence-transformers/all-MiniLM-L6-v2").
        repositories: where the weights are published, as in `Model.HUB`.

    Raises:
        FileNotFoundError: it is not on this disk. The message lists the places searched, and what to download.
    """
    path = _expanded(name)
    if path.exists():
        return path
    if not isinstance(name, str) or not _REPOSITORY.fullmatch(name):
        raise FileNotFoundError(f"{path}: no such file or folder")
    own = cache() / name
    if own.is_dir() and any(own.iterdir()):
        return own
    hub = [each for each in repositories or (name,) if ":" not in each]
    for repository in hub:
        if snapshot := _snapshot(repository):
            return snapshot
    ways = [f"download it with 'hf download {each}', or copy its files to {own}" for each in hub[:1]]
    ways += [_TORCHVISION.format(each.partition(":")[2], own) for each in repositories if ":" in each]
    raise FileNotFoundError(
        f"the weights {name!r} are not on this disk: no such path, nothing in {own}"
        + (f", no {' or '.join(hub)} in Hugging Face's cache, {hugging_face()}" if hub else "")
        + f": {'; or '.join(ways)}")


def _snapshot(repository: str) -> Path | None:
    """The snapshot of a repository in Hugging Face's cache: that of its main branch, or the newest."""
    folder = hugging_face() / f"models--{repository.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file() and (found := folder / "snapshots" / main.read_text().strip()).is_dir():
        return found
    held = [each for each in (folder / "snapshots").glob("*") if each.is_dir()]
    return max(held, key=lambda each: each.stat().st_mtime, default=None)
