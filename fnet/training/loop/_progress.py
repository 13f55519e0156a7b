"""Displays the progress of a run by lines in a log, and by a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from fnet._util._heartbeat import Heartbeat


def duration(seconds: float) -> str:
    """Formats a number of seconds as text, such as "7.2 s", "3:05" or "2:03:05".

    Example:
      >>> duration(7.24), duration(185), duration(7385)
      ('7.2 s', '3:05', '2:03:05')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _is_terminal(stream: Any) -> bool:
    """Whether the stream is a terminal, which can redraw lines. A process without a terminal may
    have None as its standard output."""
    return stream is not None and not getattr(stream, "closed", False) and stream.isatty()


class Progress:
    """Prints the progress of a run. Without one, `fit` prints nothing.

    If the stream is closed (a closed terminal or pipe), or the process has no standard output, the
    run goes on silently.

    Args:
      stream: the text stream to write to. Default None: the standard output.
      bar: show a progress bar below the lines. Default None: if the stream is a terminal.
      refresh: how many times per second the bar is redrawn at most. Default 4.

    >>> import io
    >>> log = io.StringIO()
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {"loss": batch.sum()})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=2, progress=tr.Progress(log, bar=False))
    >>> "loss 3" in log.getvalue()
    True
    """

    def __init__(self, stream: Any = None, *, bar: bool | None = None, refresh: float = 4.0):
        self._stream = sys.stdout if stream is None else stream
        self._wants_bar = _is_terminal(self._stream) if bar is None else bar
        self._refresh = refresh
        self._bar: Any = None
        self._drawn = 0.0
        self._explained = False

    def start(self, step: int, steps: int) -> None:
        """Starts the display of a run that begins or resumes at `step` and ends at `steps`."""
        self._steps = steps
        if self._wants_bar:
            from rich import progress
            from rich.console import Console

            class Raising(Console):
                def on_broken_pipe(self):  # rich would end the process here
                    raise BrokenPipeError

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.description}"),
                console=Raising(file=self._stream),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("compiling", total=steps, completed=step)
            self._written(self._bar.start)

    def line(self, text: str) -> None:
        """Prints `text` on a separate line."""
        text = self._encodable(text)
        if self._bar is not None:
            self._written(
                lambda: self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            )
        else:
            self._written(lambda: print(text, file=self._stream, flush=True))

    def _encodable(self, text: str) -> str:
        """Escapes the characters that cannot be represented in the encoding of the stream."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _written(self, write: Callable[[], None]) -> None:
        if self._stream is None:
            return
        try:
            write()
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not getattr(self._stream, "closed", False):
                raise
            self._stream, bar, self._bar = None, self._bar, None
            if bar is not None:
                with contextlib.suppress(OSError, ValueError):
                    bar.stop()

    def waiting(self, for_what: str) -> Heartbeat:
        """Returns a context that shows what the run waits for, and since when: on the bar every
        second, otherwise in a line every half minute.

        Args:
          for_what: such as "compiling".
        """

        def on_bar(text: str) -> None:
            if self._bar is not None:
                self._bar.update(self._task, description=text, refresh=True)

        if self._bar is None:
            return Heartbeat(self.line, for_what, every=30.0)
        return Heartbeat(lambda text: self._written(lambda: on_bar(text)), for_what, every=1.0)

    def tick(self, step: int, rate: float | None, left: float | None) -> None:
        """Redraws the bar after a step, at most `refresh` times per second, without waiting for the
        device.

        Args:
          step: the number of steps so far.
          rate: the steps per second, or None if it is unknown.
          left: the estimated remaining time in seconds, or None if it is unknown.
        """
        now = time.monotonic()
        if self._bar is None or now - self._drawn < 1 / self._refresh:
            return
        self._drawn = now
        words = [f"step {step}/{self._steps}"]
        words += [] if rate is None else [f"{rate:.1f} steps/s"]
        words += [] if left is None else [f"ETA {duration(left)}"]
        self._written(
            lambda: self._bar.update(
                self._task, completed=step, description="  ".join(words), refresh=True
            )
        )

    def log(
        self,
        step: int,
        values: Mapping[str, float],
        rate: float | None,
        left: float | None,
        mfu: Any = None,
        joules: float | None = None,
    ) -> None:
        """Prints one line: the metrics at a step, the steps per second, the MFU, the energy of a
        step and the remaining time.

        The first call also prints to which peak rate the MFU refers, or why it is unknown.

        Args:
          step: the number of steps so far.
          values: a dict {name: value} of metrics.
          rate: the steps per second, or None if it is unknown.
          left: the estimated remaining time in seconds, or None if it is unknown.
          mfu: a `cost.MFU` (model FLOPs utilization), or None.
          joules: the measured energy of a step in joules, or None.
        """
        if mfu is not None and not self._explained:
            self._explained = True
            self.line(str(mfu))
        words = [f"step {step:{len(str(self._steps))}}/{self._steps}"]
        words += [f"{name} {value:.4g}" for name, value in values.items()]
        words += [] if rate is None else [f"{rate:.1f} steps/s"]
        words += [] if mfu is None or mfu.value is None else [f"MFU {mfu.value:.1%}"]
        words += [] if joules is None else [f"{joules:.3g} J/step"]
        words += [] if left is None or step == self._steps else [f"ETA {duration(left)}"]
        self.line("  ".join(words))

    def close(self) -> None:
        if self._bar is not None:
            self._written(self._bar.stop)
            self._bar = None
