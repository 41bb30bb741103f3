"""The routes: /v1/models, /v1/completions, /v1/chat/completions and /health; the key, streams, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mcore_rl.server.answers import Answer, as_json, error_object, server_sent
from mcore_rl.server.asked import Asked, BadRequest, Serving, read_request
from mcore_rl.server.worker import EngineWorker, Event, Stopped
from parallel.errors import UserError
from trtllm_rollout.protocol import Completion, EngineRefuses, Progress

LARGEST_BODY = 32 << 20  # bytes
LOOPBACK_NAMES = ["localhost", "127.0.0.1", "[::1]"]


class _Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content)


class Gone(Exception):
    """The client closed the connection."""


def make_app(worker: EngineWorker, serving: Serving, api_key: str | None = None, hosts: list[str] | None = None) -> Starlette:
    """The application. With `api_key` all routes but /health ask for it as a bearer token.

    `hosts`: names that requests may have in their Host header. Without a key it keeps web pages that are open on the same machine from
    reaching the server under a name of their own.
    """
    routes = _Routes(worker, serving)
    return Starlette(
        routes=[Route("/health", routes.health), Route("/v1/models", routes.models), Route("/v1/models/{name:path}", routes.model),
                Route("/v1/completions", routes.completions, methods=["POST"]),
                Route("/v1/chat/completions", routes.chat, methods=["POST"])],
        middleware=[Middleware(_Guard, key=api_key, hosts=hosts)],
        exception_handlers={HTTPException: _http_error, BadRequest: _bad_request, Stopped: _unavailable, EngineRefuses: _unavailable,
                            ClientDisconnect: _gone, Exception: _internal})


class _Guard:
    """Lets requests through that carry the key, compared in constant time, and call the server by a name it has."""

    def __init__(self, app: Any, key: str | None, hosts: list[str] | None) -> None:
        self._app, self._key, self._hosts = app, key, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(dict(scope["headers"]), scope["path"])):
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes], path: str) -> Response | None:
        name = re.sub(r":\d+$", "", headers.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and name not in self._hosts:
            message = f"the Host header names {name!r}; without an API key this server answers to {', '.join(self._hosts)}"
            return _Json(error_object(message), 400)
        if self._key is not None and path != "/health":
            if not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._key.encode()):
                message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
                return _Json(error_object(message, code="invalid_api_key"), 401, {"WWW-Authenticate": "Bearer"})
        return None


def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _Json(error_object(f"{request.method} {request.url.path}: {error.detail}"), error.status_code)


def _bad_request(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return _Json(error_object(str(error), param=error.param, code=error.code), error.status)


def _unavailable(request: HttpRequest, error: Exception) -> Response:
    return _Json(error_object(str(error), "service_unavailable"), 503)


def _gone(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # before its request was whole; nobody reads it


def _internal(request: HttpRequest, error: Exception) -> Response:
    return _Json(error_object(f"{type(error).__name__} in the server; its log has the traceback", "internal_error"), 500)


class _Routes:
    def __init__(self, worker: EngineWorker, serving: Serving) -> None:
        self._worker, self._serving = worker, serving

    async def health(self, request: HttpRequest) -> Response:
        """200 while the engine takes work; 503 where its thread died."""
        failed = self._worker.failure
        return _Json({"status": "ok" if failed is None else f"failed: {failed!r}", "model": self._serving.name,
                             "weights_version": self._worker.engine.version, "unfinished_requests": self._worker.unfinished},
                            200 if failed is None else 503)

    def _card(self) -> dict[str, Any]:
        return {"id": self._serving.name, "object": "model", "created": 0, "owned_by": "mcore-rl", "max_model_len": self._serving.max_seq_len}

    async def models(self, request: HttpRequest) -> Response:
        return _Json({"object": "list", "data": [self._card()]})

    async def model(self, request: HttpRequest) -> Response:
        if request.path_params["name"] != self._serving.name:
            raise BadRequest(f"the model {request.path_params['name']!r} does not exist; this server has {self._serving.name!r}", "model", 404,
                             "model_not_found")
        return _Json(self._card())

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answer(request, "completions")

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answer(request, "chat")

    async def _answer(self, request: HttpRequest, kind: str) -> Response:
        asked = read_request(await _body(request), kind, self._serving)
        ids = self._worker.ids(len(asked.prompts))
        answer = Answer(asked, self._serving, lambda: self._worker.engine.version, ids.start)
        events = _Events(self._worker, asked, ids)
        try:
            await events.submitted()
            if asked.stream:
                return _Stream(answer, events)
            await _unless_gone(request, _collect(answer, events))
        except UserError as error:  # the engine cannot take it: too long, ids outside the vocabulary
            raise BadRequest(str(error)) from None
        except Gone:
            return Response(status_code=499)  # nobody reads it
        finally:
            if not asked.stream or not events.accepted:
                events.close()
        return _Json(answer.whole())


class _Events:
    """What the engine gives for one request, on the event loop; `close` ends what is unfinished."""

    def __init__(self, worker: EngineWorker, asked: Asked, ids: range) -> None:
        self._worker, self._requests, self._queue = worker, asked.requests(ids), asyncio.Queue[Event]()
        self._left = {r.request_id: r.samples for r in self._requests}
        self._loop = asyncio.get_running_loop()
        self.accepted = False

    def _deliver(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def submitted(self) -> None:
        """Once the engine has taken the requests. Raises what it refuses them with."""
        await asyncio.wrap_future(self._worker.submit(self._requests, self._deliver))
        self.accepted = True

    async def next(self) -> Completion | Progress:
        event = await self._queue.get()
        if isinstance(event, Exception):
            self._left.clear()
            raise event
        if isinstance(event, Completion):
            self._left[event.request_id] -= 1
        return event

    def close(self) -> None:
        self._worker.abort([i for i, left in self._left.items() if left])


async def _collect(answer: Answer, events: _Events) -> None:
    while not answer.complete:
        answer.add(await events.next())


class _Stream(StreamingResponse):
    """Server-sent events. Where the client goes away starlette cancels this, and the engine's work ends."""

    def __init__(self, answer: Answer, events: _Events) -> None:
        super().__init__(_chunks(answer, events), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._events.close()


async def _chunks(answer: Answer, events: _Events) -> AsyncIterator[bytes]:
    try:
        while not answer.complete:
            for chunk in answer.add(await events.next()):
                yield server_sent(chunk)
        if answer.asked.include_usage:
            yield server_sent(answer.last_chunk())
        yield server_sent(None)
    except (EngineRefuses, Stopped) as error:  # too late for a status
        yield server_sent(error_object(str(error), "service_unavailable"))


async def _unless_gone(request: HttpRequest, work: Any) -> None:
    """Run `work` to its end. Raises Gone, and ends it, where the client closes the connection before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise Gone
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _body(request: HttpRequest) -> Any:
    """The JSON of a request. Its content type must say so: pages of other sites cannot send that without being asked first."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise BadRequest("the request must have Content-Type: application/json", status=415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise BadRequest(f"the request is larger than {LARGEST_BODY} bytes", status=413)
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not JSON: {error}") from None
