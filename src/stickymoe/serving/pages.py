"""Static pages, and the files that they load."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import FileResponse

STATIC = Path(__file__).parent / "static"


def add_pages(app: FastAPI, pages: dict[str, str]) -> None:
    """Static pages at their paths, and the files that they load."""

    def page(path: str, name: str) -> None:
        @app.get(f"/{path}", include_in_schema=False)
        async def show() -> Response:
            return FileResponse(STATIC / name)

    for path, name in pages.items():
        page(path, name)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in {file.name for file in STATIC.iterdir()}:
            raise HTTPException(404)
        return FileResponse(STATIC / name)
