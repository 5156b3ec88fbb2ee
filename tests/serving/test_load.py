"""Many clients at once: no answer is lost, none is another's, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import json
import random

import httpx
import psutil

REQUESTS, AT_ONCE = 200, 16
PROMPTS = [f"{word} {n}" for n in range(5) for word in ("area", "The river", "people of", "x")]
MODELS = ("vanilla", "sticky", "mixtral")


async def ask(http, kind, body):
    """One client; what came of it."""
    if kind == "malformed":
        answer = await http.post("/v1/completions", content=b'{"model": ', headers={"Content-Type": "application/json"})
        return answer.status_code
    if kind == "too long":
        answer = await http.post("/v1/completions", json=body | {"prompt": "a" * 500})
        return answer.status_code
    if kind == "whole":
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if kind == "cancelled":
                    return text
    return text


async def load(url, jobs):
    limits = httpx.Limits(max_connections=AT_ONCE)
    turns = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:

        async def one(job):
            async with turns:
                return await ask(http, *job)

        return await asyncio.gather(*(one(job) for job in jobs))


def jobs_of(seed):
    order = random.Random(seed)
    kinds = ["cancelled"] * (REQUESTS // 3) + ["malformed"] * 10 + ["too long"] * 10
    kinds += [order.choice(["whole", "streamed"]) for _ in range(REQUESTS - len(kinds))]
    order.shuffle(kinds)
    return [
        (
            kind,
            {
                "model": order.choice(MODELS),
                "prompt": order.choice(PROMPTS),
                "max_tokens": order.randint(4, 24),
                "temperature": 0,
            },
        )
        for kind in kinds
    ]


def test_every_answer_is_the_one_it_gets_alone(server):
    alone = {(m, p): server.text(p, m, max_tokens=24) for m in MODELS for p in PROMPTS}
    asyncio.run(load(server.url, jobs_of(0)))  # what is allocated once
    gc.collect()
    before = psutil.Process().memory_info().rss
    jobs = jobs_of(1)
    for (kind, body), found in zip(jobs, asyncio.run(load(server.url, jobs)), strict=True):
        expected = alone[body["model"], body["prompt"]]
        if kind in ("malformed", "too long"):
            assert found == 400
        elif kind == "cancelled":
            assert expected.startswith(found)
        else:
            # The text of fewer tokens: a prefix, except where the last token is a part of a character.
            assert expected.startswith(found.rstrip("\N{REPLACEMENT CHARACTER}")), (kind, body)
            assert found == server.text(body["prompt"], body["model"], max_tokens=body["max_tokens"])
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert grown < 0.05 * before
    for worker in server.workers.values():
        assert worker.running == worker.waiting == 0
        assert not worker.engine.texts
