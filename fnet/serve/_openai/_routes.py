"""The paths of OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fnet.serve import _protocol
from fnet.serve._batching import Full
from fnet.serve._openai import _asked, _embeddings, _structured
from fnet.serve._openai._errors import Wrong, content
from fnet.serve._openai._generation import Generation
from fnet.serve._openai._language import Language
from fnet.serve._openai._responses import DONE, event
from fnet.serve._requests import read_body

_MOST_WAITING = 256  # requests whose grammars are not compiled


class OpenAI:
    """OpenAI's API over the language models and encoders of a server."""

    def __init__(self, server: Any):
        self._server = server
        self._repository, self._options = server.repository, server.options
        self._grammars = ThreadPoolExecutor(4, thread_name_prefix="fnet-grammar")
        self._grammars_wait = 0

    def routes(self) -> list[tuple[str, Callable, str]]:
        """Returns the (path, function, method)s."""
        return [
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{model:path}", self.model, "GET"),
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/embeddings", self.embeddings, "POST"),
        ]

    async def models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        ids = [*self._repository.languages, *self._repository.encoders]
        return JSONResponse({"object": "list", "data": [self._described(name) for name in ids]})

    async def model(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        return JSONResponse(self._described(request.path_params["model"]))

    async def chat(self, request: Any) -> Any:
        return await self._texts(request, _asked.chat)

    async def completions(self, request: Any) -> Any:
        return await self._texts(request, _asked.completion)

    async def embeddings(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        body = await self._body(request)
        encoder = self._found(body, "encoders")
        self._server.check_ready()
        asked = await asyncio.to_thread(_embeddings.read, encoder, body)
        async with asyncio.timeout(self._options.timeout):
            groups = encoder.submit(asked.texts)
            await asyncio.gather(*(asyncio.wrap_future(group.outputs) for group in groups))
        return JSONResponse(await asyncio.to_thread(_embeddings.content, asked, groups))

    async def _body(self, request: Any) -> dict:
        return _protocol.read_json(await read_body(request, self._options))

    def _described(self, name: str) -> dict:
        found = {**self._repository.languages, **self._repository.encoders}.get(name)
        if found is None:
            raise _unknown(name)
        root = {"parent": found.name} if name != found.name else {}
        return {
            "id": name,
            "object": "model",
            "created": found.created,
            "owned_by": "fnet",
            **root,
        }

    def _found(self, body: dict, table: str) -> Any:
        name = body.get("model")
        if not isinstance(name, str):
            raise Wrong("model: expected the id of a model", param="model")
        others = {"languages": "encoders", "encoders": "languages"}
        found = getattr(self._repository, table).get(name)
        if found is None and name in getattr(self._repository, others[table]):
            does = "embeds" if table == "languages" else "generates"
            raise Wrong(f"the model {name!r} {does} texts; see /v1/models", param="model")
        if found is None:
            raise _unknown(name)
        return found

    async def _texts(self, request: Any, read: Callable) -> Any:
        from starlette.responses import JSONResponse

        body = await self._body(request)
        language: Language = self._found(body, "languages")
        self._server.check_ready()
        job = await self._read(read, language, body)
        generation = Generation(language, job.asked)
        if not job.streams:
            async with _gone(request, generation):
                return JSONResponse(await self._whole(generation, job.answer))
        events = self._events(generation, job.answer, job.counts)
        try:
            first = await anext(events)  # errors before it have a status of their own
        except BaseException:
            generation.cancel()
            raise
        return _stream(first, events, generation)

    async def _read(self, read: Callable, language: Language, body: dict) -> Any:
        """Reads a request: with a grammar in threads of their own, so that no other waits for it."""
        if not _structured.asks(body):
            return await asyncio.to_thread(read, language, body)
        if self._grammars_wait >= _MOST_WAITING:
            raise Full(f"{self._grammars_wait} schemas and grammars wait; try again later")
        self._grammars_wait += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._grammars, read, language, body)
        finally:
            self._grammars_wait -= 1

    async def _whole(self, generation: Generation, answer: Any) -> dict:
        async for piece in generation.pieces(self._options.timeout):
            answer.add(piece)
            if answer.complete(piece.index):
                generation.stop(piece.index)
        return answer.whole(generation.usage)

    async def _events(
        self, generation: Generation, answer: Any, counted: bool
    ) -> AsyncIterator[str]:
        """Yields the events of a stream, the first when there is text."""
        more = {"usage": None} if counted else {}
        begun = False
        async for piece in generation.pieces(self._options.timeout):
            if not begun:
                begun = True
                for data in answer.begin():
                    yield event(data | more)
            for data in answer.events(piece):
                yield event(data | more)
            if answer.complete(piece.index):
                generation.stop(piece.index)
        if counted:
            yield event(answer.usage(generation.usage))
        yield DONE


@contextlib.asynccontextmanager
async def _gone(request: Any, generation: Generation) -> AsyncIterator[None]:
    """Cancels the texts when the client leaves, or whatever else ends the block."""
    from starlette.requests import ClientDisconnect

    async def wait():
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.cancel()

    waiting = asyncio.create_task(wait())
    try:
        yield
    except Wrong:
        if waiting.done():
            raise ClientDisconnect from None
        raise
    finally:
        waiting.cancel()
        generation.cancel()


def _stream(first: str, rest: AsyncIterator[str], generation: Generation) -> Any:
    from starlette.responses import StreamingResponse

    async def events():
        yield first
        try:
            async for each in rest:
                yield each
        except Exception as error:
            status = getattr(error, "status", 500)
            message = str(error) if isinstance(error, Wrong) else type(error).__name__
            yield event(content(status, message, error))

    class Stream(StreamingResponse):
        async def __call__(self, scope, receive, send):
            try:
                await super().__call__(scope, receive, send)
            finally:  # the client may have left
                generation.cancel()

    return Stream(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _unknown(name: str) -> Wrong:
    return Wrong(
        f"there is no model {name[:100]!r}; see /v1/models",
        param="model",
        code="model_not_found",
        status=404,
    )
