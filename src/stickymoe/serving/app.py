"""The web application: OpenAI's endpoints, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException

from stickymoe import __version__
from stickymoe.errors import StickyError, shown, unknown
from stickymoe.locality.devices import parse_bytes
from stickymoe.locality.formats import zipped
from stickymoe.locality.policies import policy_names
from stickymoe.runtime.engine import PREFETCHES, Stats
from stickymoe.serving import worker as w
from stickymoe.serving.metrics import WorkerCollector
from stickymoe.serving.middleware import BodyLimit, KnownHosts, LoggedErrors, RequireKey, SecurityHeaders
from stickymoe.serving.pages import add_pages
from stickymoe.serving.schema import ChatBody, CompletionBody, ErrorBody, StickyOptions

KEPT_TRACES = 32
_PAGES = {"": "index.html"}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "the request cannot be answered"},
    401: {"model": ErrorBody, "description": "the key is missing or wrong"},
    404: {"model": ErrorBody, "description": "no such model, trace or path"},
    405: {"model": ErrorBody, "description": "no such method of this path"},
    413: {"model": ErrorBody, "description": "the request is too large"},
    415: {"model": ErrorBody, "description": "the body is not JSON"},
    429: {"model": ErrorBody, "description": "too many requests wait"},
    500: {"model": ErrorBody, "description": "an error of the server"},
    503: {"model": ErrorBody, "description": "the server is shutting down, or the model cannot be read"},
}


class ApiError(Exception):
    """An error in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        if retry_s is not None:
            self.headers["Retry-After"] = str(retry_s)
        kind = {429: "rate_limit_error", 503: "server_error"}
        self.body = {
            "error": {
                "message": message,
                "type": kind.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }

    @classmethod
    def of(cls, error: StickyError) -> ApiError:
        if isinstance(error, w.BusyError):
            return cls(429, str(error), code="queue_full", retry_s=error.seconds)
        if isinstance(error, w.UnavailableError):
            return cls(503, str(error), code="unavailable")
        return cls(400, str(error))

    def response(self) -> Response:
        # In ASCII: a message may quote a text that is not valid Unicode.
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


@dataclass(frozen=True)
class Service:
    """The models of a server, by name, and its limits. `key`: what clients must send; None: nothing."""

    workers: dict[str, w.Worker]
    limits: w.Limits
    key: str | None = None
    hosts: Sequence[str] | None = None  # names under which clients may reach it; None: any


class Answer:
    """The events of one answer, in the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[w.Event] = asyncio.Queue()

    def emit(self, event: w.Event) -> None:
        """Called by the thread of the model."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self, request: Request, asked: w.Request) -> AsyncIterator[w.Event]:
        """Events until the answer ends. If the client goes away, the answer is cancelled."""
        gone = asyncio.ensure_future(_disconnected(request))
        waiting: asyncio.Future[w.Event] | None = None
        try:
            while True:
                waiting = asyncio.ensure_future(self._events.get())
                await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    return
                event = waiting.result()
                yield event
                if isinstance(event, w.Finish | w.Failure):
                    return
        finally:
            asked.cancel()
            gone.cancel()
            if waiting is not None:
                waiting.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True)
class Reply:
    """How the events of an answer are written: as chunks, or as one object."""

    id: str
    model: str
    chat: bool
    decode: Callable[[list[int]], str]
    logprobs: bool
    include_usage: bool

    def head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def chunk(self, text: str, reason: str | None, logprob: w.TokenLogprob | None, offset: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice["logprobs"] = None if logprob is None else self.logprobs_of([logprob], [offset])
        if self.chat:
            choice["delta"] = {"content": text} if text or reason is None else {}
        else:
            choice["text"] = text
        return {**self.head(chunk=True), "choices": [choice]}

    def whole(self, text: str, reason: str, logprobs: list[w.TokenLogprob], offsets: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice["logprobs"] = self.logprobs_of(logprobs, offsets) if self.logprobs else None
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self.head(chunk=False), "choices": [choice]}

    def usage(self, stats: Stats) -> dict[str, int]:
        return {
            "prompt_tokens": stats.prompt_tokens,
            "completion_tokens": stats.tokens,
            "total_tokens": stats.prompt_tokens + stats.tokens,
        }

    def logprobs_of(self, found: list[w.TokenLogprob], offsets: list[int]) -> dict[str, Any]:
        if self.chat:
            content = []
            for one in found:
                top = [self._entry(t, p) for t, p in one.top]
                content.append({**self._entry(one.token, one.logprob), "top_logprobs": top})
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._name(one.token) for one in found],
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{self._name(t): p for t, p in one.top} for one in found],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """The text of a token; its number if it is a part of a character, since several such tokens read alike."""
        text = self.decode([token])
        return f"token_id:{token}" if "\N{REPLACEMENT CHARACTER}" in text else text

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._name(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def make_app(service: Service, *, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """The application of a service."""
    app = FastAPI(
        title="StickyMoE",
        version=__version__,
        docs_url=None,  # these pages load scripts from another host
        redoc_url=None,
        lifespan=lifespan,
        responses=_ERRORS,
    )
    app.add_middleware(LoggedErrors)
    app.add_middleware(
        BodyLimit,
        most=service.limits.body_bytes,
        stopping=lambda: any(worker.stopping for worker in service.workers.values()),
    )
    if service.key is not None:
        app.add_middleware(RequireKey, key=service.key)
    if service.hosts is not None:
        app.add_middleware(KnownHosts, hosts=service.hosts)
    app.add_middleware(SecurityHeaders)
    traces: OrderedDict[str, bytes] = OrderedDict()
    registry = CollectorRegistry()
    registry.register(WorkerCollector(service.workers))
    _add_error_handlers(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_described(worker) for worker in service.workers.values()]}

    @app.get("/v1/models/{name:path}")  # a name may be ORGANISATION/MODEL
    async def model(name: str) -> dict[str, Any]:
        return _described(_find(service, name))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        worker = _find(service, body.model)
        ids = await asyncio.to_thread(_prompt_ids, worker, body.prompt)  # a long text takes a while
        return await _answer(traces, worker, ids, body, request, most=body.max_tokens or 16)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        worker = _find(service, body.model)
        roles = {"developer": "system"}
        messages = [{"role": roles.get(m.role, m.role), "content": m.text} for m in body.messages]
        ids = await asyncio.to_thread(worker.engine.host.encode_chat, messages)
        most = body.max_completion_tokens or body.max_tokens
        return await _answer(traces, worker, ids, body, request, most=most)

    @app.get("/v1/traces/{id}", response_class=Response)
    async def trace(id: str) -> Response:
        if id not in traces:
            message = (
                f"There is no trace {shown(id)}: the server keeps those of the last {KEPT_TRACES} answers with routes."
            )
            raise ApiError(404, message, code="trace_not_found")
        headers = {"Content-Disposition": f'attachment; filename="{id}.zip"'}
        return Response(traces[id], media_type="application/zip", headers=headers)

    add_pages(app, _PAGES)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(StickyError)
    async def sticky_error(request: Request, error: StickyError) -> Response:
        return ApiError.of(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(request, error).response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> Response:
        path = shown(request.url.path)
        messages = {
            404: f"There is no {path}: see /v1/models, /v1/completions and /v1/chat/completions.",
            405: f"{path} does not take {request.method}.",
            400: "The body cannot be read: expected JSON.",
        }
        message = messages.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()


def _invalid(request: Request, error: RequestValidationError) -> ApiError:
    """The first mistake of a body, in one line."""
    if "json" not in request.headers.get("content-type", "").lower():
        return ApiError(415, "The body is not JSON: send the header 'Content-Type: application/json'.")
    # A field that takes several types has an error for each of them; the deepest is about the type that was meant.
    errors = [e for e in error.errors() if e["loc"][:2] == error.errors()[0]["loc"][:2]]
    first = max(errors, key=lambda e: _field(e["loc"]).count("."))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON ({first.get('ctx', {}).get('error', first['msg'])}).")
    where = _field(first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"{where or 'The body'} is missing.", param=where or None)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{where}: this field is not supported; omit it.", param=where)
    expected = "; or it ".join(dict.fromkeys(_expected(e) for e in errors if _field(e["loc"]) == where))
    message = f"{where or 'The body'}: got {shown(first.get('input'))}; it {expected}."
    return ApiError(400, message, param=where or None)


def _expected(error: Any) -> str:
    """What pydantic expected of a value, as the rest of a sentence about it."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return "should be an object"
    for limit, name in (("min_length", "at least"), ("max_length", "at most")):
        if limit in context:
            unit = "character" if kind.startswith("string") or isinstance(error["input"], str) else "item"
            n = context[limit]
            return f"should have {name} {n} {unit}{'' if n == 1 else 's'}"
    message: str = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def _field(location: Sequence[str | int]) -> str:
    """The path of a field in a body, without the types that pydantic tried."""
    types = ("str", "int", "float", "bool")
    parts = [part for part in location[1:] if isinstance(part, int) or (part.isidentifier() and part not in types)]
    return ".".join(str(part) for part in parts)[:200]


def _find(service: Service, name: str) -> w.Worker:
    if name not in service.workers:
        raise ApiError(404, unknown("model", name, service.workers), code="model_not_found", param="model")
    return service.workers[name]


def _described(worker: w.Worker) -> dict[str, Any]:
    """A model in OpenAI's shape, and what the page needs to know of it."""
    engine, settings = worker.engine, worker.defaults
    about: dict[str, Any] = {
        "layers": 0,
        "experts": 0,
        "top_k": 0,
        "expert_bytes": engine.expert_bytes,
        "context": engine.host.context,
        "chat": engine.host.has_chat,
        "max_tokens": worker.limits.max_tokens,
        "resident_bytes": engine.resident_bytes,
    }
    if engine.layers is not None and settings is not None:
        contents = engine.layers.contents
        about |= {
            "layers": contents.n_layers,
            "pools": contents.n_pools,
            "experts": contents.n_experts,
            "top_k": contents.top_k,
            "slots": settings.slots,
            "max_slots": settings.slots,
            "policy": settings.policy,
            "policies": policy_names(online=True, routed=engine.host.keeps_residents),
            "prefetch": settings.prefetch,
            "prefetches": list(PREFETCHES),
            "throttle": settings.throttle,
        }
    return {"id": worker.name, "object": "model", "created": 0, "owned_by": "stickymoe", "stickymoe": about}


def _prompt_ids(worker: w.Worker, prompt: str | list[Any]) -> list[int]:
    """Token ids of a prompt: a text, a list of ids, or a list with one of these."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) != 1:
            raise ApiError(400, f"prompt: got {len(prompt)} prompts, expected one per request.", param="prompt")
        prompt = prompt[0]
    ids = worker.engine.host.encode(prompt, chat=False) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ApiError(400, "prompt: got an empty one, expected at least one token.", param="prompt")
    last = worker.engine.host.vocab_size - 1
    if min(ids) < 0 or max(ids) > last:
        raise ApiError(400, f"prompt: got a token that is not in 0 … {last}.", param="prompt")
    return ids


def _settings(options: StickyOptions) -> dict[str, Any]:
    """The settings that a request changes."""
    given: dict[str, Any] = {name: getattr(options, name) for name in ("slots", "policy", "prefetch")}
    given = {name: value for name, value in given.items() if value is not None}
    if "throttle" in options.model_fields_set:
        value = options.throttle
        given["throttle"] = parse_bytes(value, "throttle") if isinstance(value, str) else value
    return given


async def _answer(
    traces: OrderedDict[str, bytes],
    worker: w.Worker,
    ids: list[int],
    body: CompletionBody | ChatBody,
    request: Request,
    *,
    most: int | None,
) -> Response:
    options = body.stickymoe or StickyOptions()
    max_tokens = _max_tokens(worker, len(ids), most)
    temperature = 1.0 if body.temperature is None else body.temperature
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        seed = secrets.randbits(62) if body.seed is None else body.seed % 2**63
        sampling |= {"temperature": temperature, "top_p": body.top_p or 1.0, "top_k": body.top_k or 0, "seed": seed}
    answer = Answer()
    asked = w.Request(
        ids,
        answer.emit,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=body.stops,
        settings=worker.checked(_settings(options)),
        cold=options.cold,
        watch=options.routes,
        logprobs=_logprobs(body),
    )
    chat = isinstance(body, ChatBody)
    reply = Reply(
        id=("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
        model=worker.name,
        chat=chat,
        decode=worker.engine.host.decode,
        logprobs=asked.logprobs is not None,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    worker.submit(asked)
    events = answer.events(request, asked)
    if not body.stream:
        return await _whole(reply, events, traces)
    # The first event decides the status: a request that cannot be answered has no stream.
    first = await anext(events, None)
    if isinstance(first, w.Failure):
        raise first.error
    return StreamingResponse(
        _stream(reply, first, events, traces), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _max_tokens(worker: w.Worker, prompt_tokens: int, asked: int | None) -> int:
    """Tokens to generate at most; refused if the context has no room for them."""
    most = worker.limits.max_tokens
    context = worker.engine.host.context
    room = context - prompt_tokens + 1 if context else most
    if asked is not None and asked > most:
        message = f"max_tokens: got {shown(asked)}, but this server writes at most {most}."
        raise ApiError(400, message, param="max_tokens")
    wanted = min(most, max(room, 1)) if asked is None else asked
    if wanted > room:
        what_to_do = "shorten the prompt" + (f", or set max_tokens to at most {room}" if room >= 1 else "")
        message = (
            f"The prompt has {prompt_tokens} tokens and {wanted} are to be generated, but the model reads at most "
            f"{context}: {what_to_do}."
        )
        raise ApiError(400, message, code="context_length_exceeded", param="prompt" if room < 1 else "max_tokens")
    return wanted


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs is not None:
            raise ApiError(400, "top_logprobs: expected together with logprobs: true.", param="top_logprobs")
        return None
    return body.top_logprobs or 0


async def _whole(reply: Reply, events: AsyncIterator[w.Event], traces: OrderedDict[str, bytes]) -> Response:
    text, logprobs, offsets = "", [], []
    async for event in events:
        if isinstance(event, w.Failure):
            raise event.error
        if isinstance(event, w.Piece):
            if event.logprob is not None:
                logprobs.append(event.logprob)
                offsets.append(len(text))
            text += event.text
        else:
            out = reply.whole(text + event.text, event.reason, logprobs, offsets)
            out["usage"] = reply.usage(event.stats)
            extra = await _finish_fields(reply, event, traces)
            return JSONResponse(out | ({"stickymoe": extra} if extra else {}))
    return Response(status_code=499)  # the client went away; nobody reads this


async def _stream(
    reply: Reply, first: w.Event | None, events: AsyncIterator[w.Event], traces: OrderedDict[str, bytes]
) -> AsyncIterator[bytes]:
    if first is None:  # the client went away
        return
    offset = 0
    if reply.chat:
        start = reply.chunk("", None, None, 0)
        start["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        yield _sse(start)
    async for event in _chained(first, events):
        if isinstance(event, w.Failure):
            yield _sse(ApiError.of(event.error).body)
            return
        if isinstance(event, w.Piece):
            if event.text or event.passed is not None or event.logprob is not None:
                chunk = reply.chunk(event.text, None, event.logprob, offset)
                offset += len(event.text)
                if event.passed is not None:
                    chunk["stickymoe"] = _pass_fields(event)
                yield _sse(chunk)
            continue
        last = reply.chunk(event.text, event.reason, None, offset)
        extra = await _finish_fields(reply, event, traces)
        yield _sse(last | ({"stickymoe": extra} if extra else {}))
        if reply.include_usage:
            yield _sse({**reply.head(chunk=True), "choices": [], "usage": reply.usage(event.stats)})
        yield b"data: [DONE]\n\n"


async def _chained(first: w.Event, events: AsyncIterator[w.Event]) -> AsyncIterator[w.Event]:
    yield first
    async for event in events:
        yield event


def _sse(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def _pass_fields(piece: w.Piece) -> dict[str, Any]:
    """What the page shows of a token."""
    assert piece.passed is not None
    passed = piece.passed
    per_pool = len(passed.S) // max(len(passed.changes), 1)
    loads = [
        [pool * per_pool, c.slot, c.expert, c.evicted, "prefetch" if c.prefetch else "demand"]
        for pool, changes in enumerate(passed.changes)
        for c in changes
    ]
    fields: dict[str, Any] = {
        "token": piece.token,
        "text": piece.token_text,
        "experts": passed.S,
        "weights": [[round(x, 4) for x in row] for row in passed.w],
        "loads": loads,
        "hits": passed.hits,
        "misses": passed.misses,
        "bytes_read": passed.bytes_read,
        "stall_s": passed.stall_s,
        "seconds": passed.seconds,
    }
    if piece.slots is not None:
        fields |= {"prompt": True, "slots": piece.slots, "resident_bytes": passed.resident_bytes}
    return fields


async def _finish_fields(reply: Reply, event: w.Finish, traces: OrderedDict[str, bytes]) -> dict[str, Any]:
    """Where the trace of an answer is, what it cost, and which limit ended it, if any."""
    fields: dict[str, Any] = {} if event.cut is None else {"cut": event.cut}
    if event.table is None:
        return fields
    traces[reply.id] = await asyncio.to_thread(zipped, event.table, reply.id)
    while len(traces) > KEPT_TRACES:
        traces.popitem(last=False)
    s = event.stats
    stats = {name: getattr(s, name) for name in ("tokens", "hits", "misses", "bytes_read", "resident_bytes")}
    stats |= {
        "tokens_per_s": None if math.isnan(s.tokens_per_s) else s.tokens_per_s,
        "stall_s": s.stall_s + s.late_s,
        "seconds": s.prompt_s + s.decode_s,
    }
    return fields | {"trace": f"/v1/traces/{reply.id}", "stats": stats}
