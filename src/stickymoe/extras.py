"""Packages that an extra installs, and the error where one of them is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stickymoe.errors import MissingExtraError

# Package → the extra of pyproject.toml that installs it. Training and reports both need `tokenizers`; a report asks for
# a package of its own first, and so does the code for transformers.
EXTRAS = {
    "torch": "train",
    "accelerate": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "xxhash": "train",
    "altair": "report",
    "vl_convert": "report",
    "jinja2": "report",
    "markupsafe": "report",
    "datasets": "hub",
    "transformers": "hf",
    "peft": "hf",
    "trl": "hf",
    "fastapi": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "ray": "ray",
}


@contextmanager
def extras_for(name: str) -> Iterator[None]:
    """Report a missing package of an extra as something that `name`, a command or function, needs."""
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name not in EXTRAS:
            raise
        raise MissingExtraError(name, package=e.name, extra=EXTRAS[e.name]) from e
