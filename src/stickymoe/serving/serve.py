"""`stickymoe serve`: open models, and serve them until the end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stickymoe.errors import ConfigError
from stickymoe.runtime.engine import offload
from stickymoe.serving.app import Service, make_app
from stickymoe.serving.server import STOP_S, bind, known_hosts, serve, url_of
from stickymoe.serving.worker import Limits, Worker


def named(models: list[str]) -> dict[str, Path]:
    """Models by name: NAME=FOLDER, or a folder that gives its name."""
    found: dict[str, Path] = {}
    for model in models:
        name, given, folder = model.partition("=")
        if not given or Path(model).exists():
            name, folder = Path(model).resolve().name, model
        if not name or not folder:
            raise ConfigError(f"MODEL: got {model!r}, expected a folder or NAME=FOLDER.")
        if name in found:
            raise ConfigError(f"Two models have the name {name!r}: {found[name]} and {folder}. Pass NAME=FOLDER.")
        found[name] = Path(folder)
    return found


def open_workers(models: Mapping[str, Path], limits: Limits, settings: Mapping[str, Any]) -> dict[str, Worker]:
    """A worker for each model; `settings` are those of `offload`."""

    def opener(path: Path) -> Callable[[], Any]:
        return lambda: offload(path, **settings)

    workers: dict[str, Worker] = {}
    try:
        for name, path in models.items():
            workers[name] = Worker(name, opener(path), limits)
    except BaseException:
        for worker in workers.values():
            worker.engine.close()
        raise
    return workers


def serve_models(
    models: Mapping[str, Path],
    *,
    host: str,
    port: int,
    key: str | None,
    limits: Limits,
    settings: Mapping[str, Any],
    on_ready: Callable[[str, Mapping[str, Worker]], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C. `on_ready` is called with the address and the workers before the first request."""
    listener = bind(host, port)
    try:
        workers = open_workers(models, limits, settings)
        app = make_app(Service(workers, limits, key, known_hosts(host)))
        for worker in workers.values():
            worker.start()
        # What is loaded stays until the end: without it, collecting garbage delays no answer, and the end takes
        # a tenth of the time.
        gc.freeze()
        stopping: list[threading.Thread] = []

        def stop() -> None:
            for worker in workers.values():
                thread = threading.Thread(target=worker.stop, kwargs={"grace_s": STOP_S}, daemon=True)
                thread.start()
                stopping.append(thread)

        serve(app, listener, on_ready=lambda: on_ready(url_of(listener), workers), on_stop=stop)
        for thread in stopping:
            thread.join(STOP_S)
    finally:
        listener.close()
