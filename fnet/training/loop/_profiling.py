"""Profiles selected steps of a run, and writes the profile to the run's folder."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from fnet._util import _files, _page
from fnet.training.loop._reports import Reports
from fnet.training.loop._run_state import RunState

FOLDER = "profile"


def check(steps: Any, *, total: int, workdir: Any, jit: bool) -> None:
    """Raises ValueError if the given steps of the run cannot be profiled."""
    if (
        not isinstance(steps, range)
        or steps.step != 1
        or not 0 <= steps.start < steps.stop <= total
    ):
        raise ValueError(
            f"fit(..., profile_steps=): expected consecutive steps of the {total:,}, such as "
            f"range(1, 6); got {steps!r}"
        )
    if isinstance(workdir, str) and "://" in workdir:
        raise ValueError(
            f"fit(..., profile_steps=): expected a local workdir, got {workdir}; profile a short "
            f"run"
        )
    if workdir is None:
        raise ValueError(
            "fit(..., profile_steps=): the profile is written into the run's folder; name a workdir"
        )
    if not jit:
        raise ValueError(
            "fit(..., profile_steps=): with jit=False there is no compiled program to profile"
        )


class Profiling:
    """Runs JAX's profiler during selected steps of a run. The first step of a process is not
    profiled, because its time includes compilation.

    Args:
      steps: the steps to profile.
      folder: the run's folder, a local path.
      run: where the run stands.
      reports: told when the profile is written.
    """

    def __init__(self, steps: range, folder: Path, *, run: RunState, reports: Reports):
        self.steps, self.folder = steps, folder
        self.run, self.reports = run, reports
        self.begun: int | None = None
        self.done = False

    def __call__(self, advance: Callable) -> Callable:
        """Returns a function that runs `advance`, and starts and stops the profiler at the selected
        steps."""

        def profiled(*args):
            at = self.run.at
            if (
                self.begun is None
                and not self.done
                and at in self.steps
                and self.reports.clock.compiled is not None
            ):
                self.start(args)
            result = advance(*args)
            if self.begun is not None and at + 1 >= min(self.steps.stop, self.run.options.steps):
                self.finish(advance, result, at + 1)
            return result

        return profiled

    def start(self, args: tuple) -> None:
        from fnet.introspect import _trace

        jax.block_until_ready(args)
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        self.temporary = _trace.folder()
        _trace.start(self.temporary.name)
        self.begun = self.run.at
        self.mark = jax.profiler.TraceAnnotation(_trace.STEP)
        self.mark.__enter__()

    def finish(self, advance: Callable, result: Any, at: int) -> None:
        """Stops the profiler, and writes the profile of the steps since `start` was called."""
        from fnet import cost
        from fnet import hardware as hw
        from fnet.introspect import _profile, _trace

        jax.block_until_ready(result)
        begun, recorded = self.begun, self.temporary.name
        self.mark.__exit__(None, None, None)
        jax.profiler.stop_trace()
        self.begun, self.done = None, True
        leaves = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]
        bounds = cost.roofline(
            advance,
            *self.shapes,
            chip=hw.detect(min(leaves[0].devices(), key=lambda d: d.id)),
            measure=False,
            depth=None,
        )
        found = _profile.of_trace(
            _trace.read(recorded),
            bounds.scopes,
            bounds.chip,
            steps=at - begun,
            notes=bounds.count.notes,
        )
        self.temporary.cleanup()
        folder = self.folder / FOLDER / f"{begun}-{at}"
        folder.mkdir(parents=True, exist_ok=True)
        title = f"steps {begun} to {at}"
        body = f'<h1>{html.escape(title)}</h1><div class="scroll">{found.html()}</div>'
        page = _page.page(title, body, style="fnet._util/document.css")
        data = json.dumps(found.data(), indent=1)
        for name, content in {
            "profile.txt": f"{found}\n",
            "profile.html": page,
            "profile.json": data,
        }.items():
            _files.write(folder / name, content)
        found.trace.save(folder / "trace.json.gz")
        self.reports.say(self.run.at, f"profile of {title} in {folder}")

    def close(self) -> None:
        """Stops JAX's profiler if it is still running."""
        if self.begun is not None:
            self.mark.__exit__(None, None, None)
            jax.profiler.stop_trace()
            self.temporary.cleanup()
            self.begun = None
