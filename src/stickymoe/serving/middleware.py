"""What every request passes: a limit on its size, the names of the server, and headers for pages."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLL_S = 0.2  # how often an incomplete request asks whether the server stops

log = logging.getLogger(__name__)

# The page loads nothing from other hosts, and no other page may show it in a frame.
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


class SecurityHeaders:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class KnownHosts:
    """Refuses requests for other names, by which a page of another host could reach a server on this machine."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = Headers(scope=scope).get("host", "").lower()
            name = given.rpartition(":")[0] if not given.endswith("]") and ":" in given else given
            if name.strip("[]") not in self._hosts:
                message = f"The host {given[:80]!r} is not served: use one of {', '.join(sorted(self._hosts))}."
                await _refuse(send, 400, message)
                return
        await self._app(scope, receive, send)


class RequireKey:
    """Asks for `Authorization: Bearer KEY`, except for the page and its files, and for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path.startswith("/v1") or path in ("/metrics", "/openapi.json")):
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time, so that the time of an answer does not tell how much of a guess is right.
            same = hmac.compare_digest(given.strip().encode(), self._key)
            if scheme.lower() != "bearer" or not same:
                message = "The key is missing or wrong: send the header 'Authorization: Bearer KEY'."
                await _refuse(send, 401, message, code="invalid_api_key")
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are too large, and those that are not complete when the server stops."""

    def __init__(self, app: ASGIApp, most: int, stopping: Callable[[], bool]) -> None:
        self._app = app
        self._most = most
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        message = f"The request is larger than {self._most} bytes: send a shorter one."
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced[:18]) > self._most:
            await _refuse(send, 413, message)
            return
        received, complete = 0, False

        async def counted() -> Message:
            nonlocal received, complete
            part = await (receive() if complete else self._part(receive))
            received += len(part.get("body", b""))
            complete = not part.get("more_body", False)
            if received > self._most:
                raise HTTPException(413, message)
            return part

        await self._app(scope, counted, send)

    async def _part(self, receive: Receive) -> Message:
        """The next part of a body. A client that sends none must not delay the end of the server."""
        waiting = asyncio.ensure_future(receive())
        try:
            while not (await asyncio.wait({waiting}, timeout=_POLL_S))[0]:
                if self._stopping():
                    raise HTTPException(503, "The server is shutting down.")
            return waiting.result()
        finally:
            waiting.cancel()


class LoggedErrors:
    """Answers a request that fails unexpectedly in the shape of all errors. The connection can be used again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def noted(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as e:
            if began or scope["type"] != "http":
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=e)
            await _refuse(send, 500, f"{type(e).__name__} in the server; its log has more.")


async def _refuse(send: Send, status: int, message: str, code: str | None = None) -> None:
    kinds = {401: "authentication_error", 500: "server_error"}
    error = {"message": message, "type": kinds.get(status, "invalid_request_error"), "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
