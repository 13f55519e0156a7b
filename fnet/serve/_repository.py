"""The models of a server, by name and version."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

from fnet.export.standalone._loaded import load
from fnet.serve._batching import Batcher
from fnet.serve._generate import ENTRIES, Generator, generates
from fnet.serve._metrics import Metrics
from fnet.serve._model import Model
from fnet.serve._openai._embeddings import Encoder
from fnet.serve._openai._language import Language
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
        languages: the models of OpenAI's API that generate text, {id: language}. Adapters are ids of
            their own.
        encoders: those that make embeddings, {id: encoder}.
        ready: whether the programs of all models have been compiled.
        error: the error that occurred when the programs were compiled, or None.
    """

    def __init__(self, files: Iterable[str], options: Options, metrics: Metrics):
        self.models: dict[str, dict[str, tuple[Model, Batcher]]] = {}
        self.generators: dict[str, dict[str, Generator]] = {}
        self.languages: dict[str, Language] = {}
        self.encoders: dict[str, Encoder] = {}
        self.ready, self.error = False, None
        for text in files:
            self._add(text, options, metrics)
        if not (self.models or self.generators or self.languages or self.encoders):
            raise ValueError(
                "serve: expected at least one bundle with an entry point, or a folder of weights"
            )
        self._offer_bundles(options)
        if options.adapters and not any(each.adapters for each in self.languages.values()):
            raise ValueError("serve: adapters: expected a folder with a language model")
        unused = set(options.pad) - {
            name
            for models in self.models.values()
            for model, _ in models.values()
            for name in model.variables
        }
        if unused:
            raise ValueError(f"serve: pad: no model has the size variable {sorted(unused)[0]!r}")

    def _add(self, text, options, metrics):
        """Adds the models of a bundle, which is given as FILE, NAME=FILE or NAME:VERSION=FILE, or that
        of a folder, as FOLDER or NAME=FOLDER."""
        left, _, path = text.rpartition("=")
        if Path(path).expanduser().is_dir():
            self._add_folder(text, left, Path(path).expanduser(), options, metrics)
            return
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
            entries = [entry for entry in entries if entry not in ENTRIES]
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
                    observe=_observer(metrics, model.name, model.version),
                    apart=_counter(metrics, model),
                )
                self.models.setdefault(full, {})[version] = model, batcher

    def _add_folder(self, text, name, folder, options, metrics):
        from fnet.serve._openai._folder import open_folder  # reads and compiles models

        name = name or folder.resolve().name
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"serve: {text!r}: expected FOLDER or NAME=FOLDER with a name of letters, digits, "
                "'.', '_' and '-'"
            )
        self._offer(open_folder(name, folder, options, _observer(metrics, name, "1")))

    def _offer(self, model: Language | Encoder) -> None:
        """Adds a model to those of OpenAI's API, under its name and those of its adapters."""
        table = self.languages if isinstance(model, Language) else self.encoders
        for name in (model.name, *getattr(model, "adapters", ())):
            if name in self.languages or name in self.encoders or not _NAME.fullmatch(name):
                raise ValueError(
                    f"serve: the name {name!r} of a model or an adapter is used twice, or has other "
                    "characters than letters, digits, '.', '_' and '-'"
                )
            table[name] = model

    def _offer_bundles(self, options):
        """Adds the newest versions of bundles with a tokenizer to the models of OpenAI's API."""
        from fnet.serve._openai import _bundle

        for name, versions in self.generators.items():
            generator = versions[max(versions, key=int)]
            if _bundle.offers_text(generator.bundle):
                self._offer(_bundle.language(name, generator.bundle, options))
        for name, versions in self.models.items():
            model, batcher = versions[max(versions, key=int)]
            if _bundle.offers_embeddings(model):
                self._offer(_bundle.encoder(name, model, batcher, options))

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
            for language in set(self.languages.values()):
                language.warm()
            self.ready = True
        except (
            Exception
        ) as error:  # of any type, for example of the compiler: clients wait for an answer
            self.error = error

    def all(self) -> list[tuple[Model, Batcher]]:
        return [pair for versions in self.models.values() for pair in versions.values()]

    def close(self) -> None:
        """Waits until all queued requests have been computed, and ends the threads of the batchers
        and of the language models."""
        others = {*self.languages.values(), *self.encoders.values()}
        ends = [batcher.close for _, batcher in self.all()] + [each.close for each in others]
        threads = [threading.Thread(target=end) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _observer(metrics, name, version):
    labels = {"model": name, "version": version}

    def observe(rows, seconds):
        metrics.observe("fnet_batch_rows", rows, **labels)
        metrics.observe("fnet_compute_seconds", seconds, **labels)

    return observe


def _counter(metrics, model):
    return lambda cause: metrics.add("fnet_unbatched_requests_total", model=model.name, cause=cause)
