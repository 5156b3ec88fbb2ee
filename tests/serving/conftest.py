"""Servers on loopback that the tests share, with small models."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from checkpoints import write_checkpoint
from stickymoe.serving.app import Service, make_app
from stickymoe.serving.serve import open_workers
from stickymoe.serving.server import LOOPBACK
from stickymoe.serving.worker import Limits, Worker
from tests.runtime.offloading import write_run

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('the first message must be of the user') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by name: two runs, the dense control, and a Mixtral with a chat template."""
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "vanilla", "vanilla", "--model.seq_len", "64")
    write_run(folder / "sticky", "siblings", "--model.seq_len", "64")
    write_run(folder / "dense", "dense")
    write_checkpoint(folder / "mixtral")
    (folder / "mixtral" / "chat_template.jinja").write_text(TEMPLATE)
    return {name: folder / name for name in ("vanilla", "sticky", "dense", "mixtral")}


class Served:
    """A server in a thread of this process."""

    def __init__(self, url: str, workers: dict[str, Worker]) -> None:
        self.url, self.workers = url, workers
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "The area", model: str = "vanilla", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"model": model, "prompt": prompt, "temperature": 0, **body})

    def text(self, *args: Any, **body: Any) -> str:
        """The text of an answer."""
        answer = self.complete(*args, **body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text


@contextmanager
def running(
    models: dict[str, Path], limits: Limits | None = None, *, key: str | None = None, **settings: Any
) -> Iterator[Served]:
    """Serve models on a free port."""
    limits = limits or Limits(max_tokens=64)
    workers = open_workers(models, limits, settings)
    app = make_app(Service(workers, limits, key, LOOPBACK))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", workers)
        try:
            for worker in workers.values():
                worker.start()
            while not server.started:
                time.sleep(0.01)
            yield served
        finally:
            served.http.close()
            for worker in workers.values():
                worker.stop()
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    return running


@pytest.fixture(scope="session")
def server(models: dict[str, Path]) -> Iterator[Served]:
    """All models, with two slots per layer."""
    with running(models, slots=2) as served:
        yield served
