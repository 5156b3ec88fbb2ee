"""Run a web application: bind, serve until SIGTERM or Ctrl-C, and stop within a short time."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from stickymoe.errors import ConfigError, StickyError, require
from stickymoe.reading import reason

Callback = Callable[[], None]
LOOPBACK = ("127.0.0.1", "::1", "localhost")
STOP_S = 1.0  # answers that run may end within so many seconds


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 chooses a free one. Refused in one line."""
    require(0 <= port < 65536, "port", port, "a number from 0 to 65535")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"host: got {host!r}, which is not an address of this machine ({reason(e)}).") from e
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise StickyError(f"port {port} is in use: stop what listens there, or choose another --port.") from e
        raise ConfigError(f"{host} port {port} cannot be served ({reason(e)}).") from e
    return listener


def known_hosts(host: str) -> tuple[str, ...] | None:
    """Names under which a server may be reached: only those of this machine if it is bound to it, otherwise any."""
    return LOOPBACK if host in LOOPBACK or host.startswith("127.") else None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _Server(uvicorn.Server):
    """Calls `on_ready` when it answers, and `on_stop` as soon as it is told to stop, while answers still run."""

    def __init__(self, config: uvicorn.Config, on_ready: Callback | None, on_stop: Callback | None) -> None:
        super().__init__(config)
        self._on_ready, self._on_stop = on_ready, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        first = not self.should_exit
        super().handle_exit(sig, frame)
        if first and self._on_stop is not None:
            self._on_stop()


def serve(
    app: Any, listener: socket.socket, *, on_ready: Callback | None = None, on_stop: Callback | None = None
) -> None:
    """Serve until SIGTERM or Ctrl-C. `on_stop` is called at once then, and must return at once."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=5,
    )
    server = _Server(config, on_ready, on_stop)
    # Until uvicorn takes the signals itself; when it has ended, it raises them again, which must not end the program.
    before = {sig: signal.signal(sig, server.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)
