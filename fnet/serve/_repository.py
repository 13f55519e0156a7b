"""The models of a server, by name and version."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

from fnet.export.standalone._loaded import load
from fnet.serve._batching import Batcher
from fnet.serve._generate import Generator, generates
from fnet.serve._metrics import Metrics
from fnet.serve._model import Model
from fnet.serve._options import Options
from fnet.serve._protocol import Invalid, servable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class Unknown(Invalid):
    """Raised if there is no model with the requested name and version."""


class Repository:
    """The served models.

    Attributes:
        models: {name: {version: (model, batcher)}}, where the batcher combines waiting requests
            into batches. For the bundle NAME.fnet, the model of the function "predict" is called
            NAME, and the models of other functions are called NAME.ENTRY.
        generators: the text generators, {name: {version: generator}}. Each bundle with the
            functions "prefill" and "decode" has a text generator.
        ready: whether the programs of all models have been compiled.
        error: the error that occurred when the programs were compiled, or None.
    """

    def __init__(self, files: Iterable[str], options: Options, metrics: Metrics):
        self.models: dict[str, dict[str, tuple[Model, Batcher]]] = {}
        self.generators: dict[str, dict[str, Generator]] = {}
        self.ready, self.error = False, None
        for text in files:
            self._add(text, options, metrics)
        if not self.models and not self.generators:
            raise ValueError("serve: expected at least one bundle with an entry point")
        unused = set(options.pad) - {
            name
            for models in self.models.values()
            for model, _ in models.values()
            for name in model.variables
        }
        if unused:
            raise ValueError(f"serve: pad: no model has the size variable {sorted(unused)[0]!r}")

    def _add(self, text, options, metrics):
        """Adds the models of a bundle, which is given as FILE, NAME=FILE or NAME:VERSION=FILE."""
        left, _, path = text.rpartition("=")
        name, _, version = left.partition(":")
        name = name or Path(path).stem
        held = {**self.models.get(name, {}), **self.generators.get(name, {})}
        version = version or str(1 + max(map(int, held), default=0))
        if not _NAME.fullmatch(name) or not version.isdigit() or version in held:
            raise ValueError(
                f"serve: {text!r}: expected FILE, NAME=FILE or NAME:VERSION=FILE with a name of "
                "letters, digits, '.', '_' and '-', and a number that is not used twice"
            )
        bundle = load(path)
        entries = list(bundle.entries)
        if generates(bundle):
            self.generators.setdefault(name, {})[version] = Generator(name, version, bundle)
            entries = [entry for entry in entries if entry not in ("prefill", "decode")]
        for entry in entries:
            full = name if entry == "predict" or len(bundle.entries) == 1 else f"{name}.{entry}"
            model = Model(
                full,
                version,
                bundle,
                entry,
                options.max_batch,
                options.pad,
                options.assume_independent_rows,
            )
            if servable(model):
                batcher = Batcher(
                    model.compute,
                    model.run,
                    max_batch=model.max_batch,
                    max_delay=options.max_delay,
                    max_queue=options.max_queue,
                    observe=_observer(metrics, model),
                    apart=_counter(metrics, model),
                )
                self.models.setdefault(full, {})[version] = model, batcher

    def find(self, name: str, version: str | None, table: str = "models"):
        """Returns the model with the given name and version, or the newest version of the model if
        `version` is None.

        Raises:
            Unknown: there is no model with the given name and version.
        """
        versions = getattr(self, table).get(name)
        if not versions or (version is not None and version not in versions):
            what = "text generator" if table == "generators" else "model"
            raise Unknown(
                f"there is no {what} {name[:100]!r}"
                + (f" of version {version[:20]}" if versions else "")
            )
        return versions[version or max(versions, key=int)]

    def warm(self) -> None:
        """Tests and compiles the programs of all models. Then sets `ready` or, if a model cannot be
        served, `error`."""
        try:
            for model, batcher in self.all():
                model.warm()
                batcher.max_batch = model.max_batch
                batcher.cause = None if model.batched else "rows"
            self.ready = True
        except (
            Exception
        ) as error:  # of any type, for example of the compiler: clients wait for an answer
            self.error = error

    def all(self) -> list[tuple[Model, Batcher]]:
        return [pair for versions in self.models.values() for pair in versions.values()]

    def close(self) -> None:
        """Waits until all queued requests have been computed, and ends the threads of the batchers."""
        threads = [threading.Thread(target=batcher.close) for _, batcher in self.all()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _observer(metrics, model):
    labels = {"model": model.name, "version": model.version}

    def observe(rows, seconds):
        metrics.observe("fnet_batch_rows", rows, **labels)
        metrics.observe("fnet_compute_seconds", seconds, **labels)

    return observe


def _counter(metrics, model):
    return lambda cause: metrics.add("fnet_unbatched_requests_total", model=model.name, cause=cause)
