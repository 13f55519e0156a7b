"""The ASGI application of the server: its paths, limits and error responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fnet
from fnet._util import _missing
from fnet.export.standalone._reader import BundleError
from fnet.serve import _protocol
from fnet.serve._batching import Full
from fnet.serve._metrics import Metrics, of_engine, times
from fnet.serve._openai import _errors
from fnet.serve._openai._routes import OpenAI
from fnet.serve._options import Options
from fnet.serve._protocol import Invalid
from fnet.serve._repository import Repository, Unknown
from fnet.serve._requests import Refused, admit, plain, read_body


def application(files: Iterable[str], options: Options | None = None) -> Any:
    """Returns the server as an ASGI application, to run it in your own ASGI server.

        app = serve.application(["digits.fnet"])            # uvicorn module:app

    Models are compiled when the application starts.

    Args:
        files: the bundles, as FILE, NAME=FILE or NAME:VERSION=FILE, and folders of language models
            or encoders of texts, as FOLDER or NAME=FOLDER.
        options: Default None: `serve.Options()`. `port`, `max_connections` and `drain` have no
            effect here. If `host` is a loopback address, such as the default 127.0.0.1, only
            requests whose header Host is a loopback address or localhost are accepted.

    Returns:
        A Starlette application.

    Raises:
        ImportError: Starlette is not installed.
        ValueError, BundleError, OSError: a file or an option is not valid.

    >>> import tempfile
    >>> program = export.program(lambda params, x: 2 * x, {}, x=export.spec("b"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     program.save(f"{folder}/double.fnet")
    ...     app = serve.application([f"{folder}/double.fnet"])
    >>> "/v2/models/{model}/infer" in [route.path for route in app.routes]
    True
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ImportError(
            _missing.message("fnet.serve needs", "starlette", "uvicorn", error=error)
        ) from None
    server = _Server(files, options or Options())
    add = lambda path, function, method="GET", **options: Route(
        path, server.endpoint(path, function, **options), methods=[method]
    )
    model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
    routes = [
        add("/", server.page),
        add("/metrics", server.metrics_text),
        add("/v2", server.metadata),
        add("/v2/health/live", server.live),
        add("/v2/health/ready", server.is_ready),
        add("/v2/repository/index", server.index, "POST"),
        *(add(root, server.model_metadata) for root in (model, version)),
        *(add(f"{root}/ready", server.model_ready) for root in (model, version)),
        *(add(f"{root}/infer", server.infer, "POST") for root in (model, version)),
        *(add(f"{root}/generate", server.generate, "POST") for root in (model, version)),
        *(
            add(f"{root}/generate_stream", server.generate_stream, "POST")
            for root in (model, version)
        ),
    ]

    async def failed(request, error):
        form = _errors.content if request.url.path.startswith("/v1/") else plain
        content = form(error.status_code, error.detail, error)
        return JSONResponse(content, error.status_code, server.headers)

    openai = OpenAI(server)
    for path, function, method in openai.routes():
        routes.append(add(path, function, method, wrong=_errors.content, busy=429))

    app = Starlette(
        routes=routes, lifespan=server.lifespan, exception_handlers={HTTPException: failed}
    )
    app.state.server = server
    return app


class _Server:
    """The state of an application.

    Attributes:
        draining: whether the server is shutting down. If `draining` is True, every response asks
            the client to close the connection.
    """

    def __init__(self, files, options):
        self.options, self.metrics = options, Metrics()
        self.repository = Repository(files, options, self.metrics)
        self.draining, self.streams = False, 0
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")

    @contextlib.asynccontextmanager
    async def lifespan(self, app):
        compiling = asyncio.create_task(asyncio.to_thread(self.repository.warm))
        yield
        await compiling
        await asyncio.to_thread(self.repository.close)
        self._texts.shutdown()

    @property
    def headers(self) -> dict[str, str]:
        return {"Connection": "close"} if self.draining else {}

    def endpoint(
        self, path: str, function: Callable, wrong: Callable = plain, busy: int = 503
    ) -> Callable:
        """Returns a function that responds to the requests for a URL path. The returned function
        performs the checks that are common to all URL paths of the server, calls `function`, and
        converts errors to responses, with `wrong(status, message, error)` as their JSON and with
        the status `busy` if too many requests wait."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response

        async def respond(request):
            start, headers = time.perf_counter(), {}
            try:
                admit(request, path, self.options)
                response = await function(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client is gone; counted in the metrics
            except Exception as error:
                status, message, headers = self._problem(error, busy)
                response = JSONResponse(wrong(status, message, error), status)
            response.headers.update({**self.headers, **headers})
            model = request.path_params.get("model", "")
            labels = (
                {"model": model}
                if model in {*self.repository.models, *self.repository.generators}
                else {}
            )
            self.metrics.add(
                "fnet_requests_total", path=path, code=str(response.status_code), **labels
            )
            if path.endswith("/infer") and response.status_code == 200:
                self.metrics.observe("fnet_request_seconds", time.perf_counter() - start, **labels)
            return response

        return respond

    def _problem(self, error: Exception, busy: int) -> tuple[int, str, dict[str, str]]:
        """Returns the status, the message and the headers of the answer to a request that failed."""
        match error:
            case Refused():
                return error.status, str(error), error.headers
            case Unknown():
                return 404, str(error), {}
            case Invalid() | BundleError():
                return 400, str(error), {}
            case Full():
                return busy, str(error), {"Retry-After": "1"}
            case TimeoutError():
                return 504, f"no result within {self.options.timeout:g} seconds", {}
        return 500, f"the computation failed: {type(error).__name__}", {}

    def check_ready(self):
        if self.repository.error is not None:
            raise Refused(503, f"the models cannot be served: {self.repository.error}")
        if not self.repository.ready:
            raise Refused(503, "the models are being compiled", **{"Retry-After": "1"})

    def _found(self, request, table="models"):
        return self.repository.find(
            request.path_params["model"], request.path_params.get("version"), table
        )

    # Paths.

    async def page(self, request):
        from starlette.responses import HTMLResponse

        from fnet.serve import _page  # here, because the import reads a file

        return HTMLResponse(
            _page.HTML,
            headers={"Content-Security-Policy": _page.POLICY, "Cache-Control": "no-store"},
        )

    async def metrics_text(self, request):
        from starlette.responses import PlainTextResponse

        engines = {each.name: each.engine.stats() for each in self.repository.languages.values()}
        gauges = [sample for name, stats in engines.items() for sample in of_engine(name, stats)]
        for model, batcher in self.repository.all():
            labels = {"model": model.name, "version": model.version}
            gauges += [
                ("fnet_queue_requests", labels, len(batcher)),
                ("fnet_programs", labels, model.programs),
            ]
        return PlainTextResponse(
            self.metrics.text(gauges, [each for pair in engines.items() for each in times(*pair)]),
            headers={"Content-Type": "text/plain; version=0.0.4"},
        )

    async def metadata(self, request):
        return _json(
            {
                "name": "fnet",
                "version": fnet.__version__,
                "extensions": list(_protocol.EXTENSIONS),
            }
        )

    async def live(self, request):
        return _json({"live": True})

    async def is_ready(self, request):
        ready = self.repository.ready and not self.draining
        return _json({"ready": ready}, 200 if ready else 503)

    async def index(self, request):
        error = self.repository.error
        state = "READY" if self.repository.ready else "LOADING" if error is None else "UNAVAILABLE"
        row = lambda name, version, kind: {
            "name": name,
            "version": version,
            "state": state,
            "reason": "" if error is None else str(error),
            "kind": kind,
        }
        tables = ("infer", self.repository.models), ("generate", self.repository.generators)
        return _json(
            [
                row(name, version, kind)
                for kind, table in tables
                for name, versions in table.items()
                for version in versions
            ]
        )

    async def model_metadata(self, request):
        model, _ = self._found(request)
        return _json(_protocol.metadata(model, sorted(self.repository.models[model.name], key=int)))

    async def model_ready(self, request):
        name = request.path_params["model"]
        self._found(request, "models" if name in self.repository.models else "generators")
        self.check_ready()
        return _json({"name": name, "ready": True})

    async def infer(self, request):
        from starlette.responses import Response

        model, batcher = self._found(request)
        self.check_ready()
        body = await read_body(request, self.options)
        read = lambda: _read(model, body, request.headers.get(_protocol.LENGTH))
        asked, arrays = read() if len(body) < 1 << 16 else await asyncio.to_thread(read)
        async with asyncio.timeout(self.options.timeout):
            outputs = await asyncio.wrap_future(batcher.submit(arrays))
        small = sum(y.size for y in outputs) < 1 << 14
        write = lambda: _protocol.write(model, asked, outputs)
        content, length = write() if small else await asyncio.to_thread(write)
        if length is None:
            return Response(content, media_type="application/json")
        return Response(
            content, media_type="application/octet-stream", headers={_protocol.LENGTH: str(length)}
        )

    async def generate(self, request):
        generator, names, tokens, stop = await self._started(request)
        try:
            async with asyncio.timeout(self.options.timeout):
                found = [token async for token in tokens]
        finally:
            stop()
        return _json({**names, "tokens": found, "text_output": "".join(map(generator.text, found))})

    async def generate_stream(self, request):
        from starlette.responses import StreamingResponse

        generator, names, tokens, stop = await self._started(request, streamed=True)

        async def events():
            try:
                async for token in tokens:
                    yield _event({**names, "token": token, "text_output": generator.text(token)})
                yield _event({**names, "finished": True})
            finally:
                stop()

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _started(self, request, streamed=False):
        """Returns four values: the text generator, what every answer begins with, an asynchronous
        iterator over the generated tokens, and a function that ends the generation. The first token
        is computed before `_started` returns."""
        generator = self._found(request, "generators")
        self.check_ready()
        asked = generator.read(
            _protocol.read_json(await read_body(request, self.options)), streamed=streamed
        )
        if self.streams >= self.options.max_streams:
            raise Full(f"{self.streams} texts are being generated; try again later")
        self.streams += 1
        ended = []

        def stop():
            if not ended:
                ended.append(True)
                self.streams -= 1

        tokens, loop = generator.tokens(asked), asyncio.get_running_loop()
        following = lambda: loop.run_in_executor(self._texts, next, tokens, None)
        try:
            async with asyncio.timeout(self.options.timeout):
                first = await following()
        except BaseException:
            stop()
            raise

        async def all_tokens():
            token = first
            while token is not None:
                self.metrics.add("fnet_generated_tokens_total", model=generator.name)
                yield token
                token = await following()

        names = {"model_name": generator.name, "model_version": generator.version}
        return generator, names | ({"id": asked.id} if asked.id else {}), all_tokens(), stop


def _read(model, body, length):
    asked, arrays = _protocol.read(model, body, length)
    _protocol.check_outputs(model, asked)
    return asked, model.bound(arrays)


def _json(data, status=200):
    from starlette.responses import JSONResponse

    return JSONResponse(data, status)


def _event(data) -> str:
    return f"data: {json.dumps(data)}\n\n"
