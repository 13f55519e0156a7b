"""Runs the HTTP server of exported models until a signal ends the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from fnet._util import _missing
from fnet.serve._application import application
from fnet.serve._options import Options


def run(
    files: Iterable[str],
    options: Options | None = None,
    *,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves models until SIGTERM or SIGINT, and answers every accepted request before it returns.

        serve.run(["digits.fnet"], serve.Options(port=8000))

    After the signal, the server reports that it is not ready, and its responses ask the clients to
    close their connections; `options.drain` seconds later, it accepts no more. A second signal ends
    it immediately.

    Args:
        files: the bundles, as FILE, NAME=FILE or NAME:VERSION=FILE, and folders of language models
            or encoders of texts, as FOLDER or NAME=FOLDER.
        options: Default None: `serve.Options()`.
        started: called with the address of the server when all programs are compiled. Default: does
            nothing.

    Raises:
        ImportError: Starlette or uvicorn is not installed.
        ValueError, BundleError, OSError: a file or an option is not valid, or the port is in use.

    >>> serve.run(["absent.fnet"])
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'absent.fnet'
    """
    options = options or Options()
    app = application(files, options)
    try:
        import uvicorn
    except ImportError as error:
        raise ImportError(
            _missing.message("fnet.serve needs", "starlette", "uvicorn", error=error)
        ) from None
    config = uvicorn.Config(
        app,
        options.host,
        options.port,
        http=_protocol(options.read_timeout),
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=options.max_connections,
        lifespan="on",
        timeout_graceful_shutdown=int(2 * options.timeout) + 1,
    )
    repository = app.state.server.repository
    server = _server(uvicorn, config, app.state.server, started)
    try:
        server.run()
    except SystemExit:
        raise OSError(
            f"serve: cannot listen on {options.host}:{options.port}; is the port in use?"
        ) from None
    if repository.error is not None:
        raise repository.error


def _server(uvicorn, config, state, started) -> Any:
    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            if self.started:
                self.compiling = asyncio.create_task(self.announce())

        async def announce(self):
            while not state.repository.ready and state.repository.error is None:
                await asyncio.sleep(0.02)
            if state.repository.error is not None:
                self.should_exit = True
                return
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            started(f"http://{f'[{host}]' if ':' in host else host}:{port}")

        def handle_exit(self, sig, frame):
            if state.draining:
                self.should_exit = self.force_exit = True
                return
            state.draining = True
            asyncio.get_running_loop().call_soon_threadsafe(self.end_later)

        def end_later(self):
            asyncio.get_running_loop().call_later(
                state.options.drain, setattr, self, "should_exit", True
            )

    return Server(config)


def _protocol(seconds: float) -> type:
    """Returns a subclass of uvicorn's HTTP protocol that also closes a connection if the head of a
    request does not arrive within `seconds`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        timer: Any = None

        def connection_made(self, transport):
            super().connection_made(transport)
            self.wait()

        def data_received(self, data):
            super().data_received(data)
            self.wait()

        def connection_lost(self, error):
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(error)

        def wait(self):
            """Starts a timer while the connection waits for the head of a request, and stops it
            during a request."""
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self.timer is None:
                self.timer = self.loop.call_later(seconds, self.transport.close)
            elif not idle and self.timer is not None:
                self.timer.cancel()
                self.timer = None

    return Protocol
