"""The server as programs meet it: OpenAI's client, curl, and inputs that cannot be answered."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stickymoe.locality.formats import open_trace
from stickymoe.locality.replay import simulate
from stickymoe.locality.streams import Access
from stickymoe.runtime.engine import offload
from stickymoe.serving.worker import Limits

PROMPT = "The area of"


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def alone(models):
    """The greedy text of a model, as `offload` generates it."""

    def text(name, prompt=PROMPT, n=12):
        with offload(models[name]) as engine:
            out = engine.generate(engine.host.encode(prompt, chat=False), max_new_tokens=n)
            return engine.host.decode(out.tokens)

    return text


# OpenAI's client


@pytest.mark.parametrize("name", ["vanilla", "sticky", "dense", "mixtral"])
def test_completions_are_the_text_of_the_model(name, client, alone):
    expected = alone(name)
    whole = client.completions.create(model=name, prompt=PROMPT, max_tokens=12, temperature=0)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 12)
    chunks = list(
        client.completions.create(
            model=name,
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len(PROMPT) + 12
    assert len({c.id for c in chunks}) == 1


def test_chat_uses_the_template_of_the_model(client, alone):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = alone("mixtral", "<system>Be brief.<user>Hi<assistant>", 8)
    whole = client.chat.completions.create(model="mixtral", messages=messages, max_tokens=8, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected
    stream = client.chat.completions.create(
        model="mixtral", messages=messages, max_completion_tokens=8, temperature=0, stream=True
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    same = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    again = client.chat.completions.create(model="mixtral", messages=same, max_tokens=8, temperature=0)
    assert again.choices[0].message.content == expected


def test_log_probabilities_are_those_of_the_model(client, models):
    with offload(models["vanilla"]) as engine:
        ids = engine.host.encode(PROMPT, chat=False)
        tokens = engine.generate(ids, max_new_tokens=4).tokens
        rows = engine.host.logits(ids + tokens)[len(ids) - 1 : -1].log_softmax(-1)
    found = client.completions.create(model="vanilla", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=3)
    logprobs = found.choices[0].logprobs
    expected = [rows[i, t].item() for i, t in enumerate(tokens)]
    assert logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    assert [max(top.values()) for top in logprobs.top_logprobs] == pytest.approx(expected, abs=1e-4)
    assert logprobs.text_offset[0] == 0
    chat = client.chat.completions.create(
        model="mixtral",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    assert all(len(c.top_logprobs) == 2 and c.logprob == c.top_logprobs[0].logprob for c in content)


def test_a_seed_gives_the_same_text(client):
    def text(seed):
        out = client.completions.create(model="vanilla", prompt=PROMPT, max_tokens=12, temperature=1, seed=seed)
        return out.choices[0].text

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1
    assert text(-1) == text(-1)


def test_stop_strings_end_a_text(client, alone):
    text = alone("vanilla")
    stop = text[4:6]
    found = client.completions.create(model="vanilla", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop, "☃"])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model="vanilla", prompt=PROMPT, max_tokens=12, temperature=0, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == text[: text.index(stop)]


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == ["vanilla", "sticky", "dense", "mixtral"]
    assert client.models.retrieve("sticky").id == "sticky"


def test_a_name_may_have_a_slash(serve, models):
    with serve({"org/model": models["vanilla"]}) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert client.models.retrieve("org/model").id == "org/model"
        assert server.text(model="org/model", max_tokens=2)


def test_errors_are_those_of_the_client(server, client):
    with pytest.raises(openai.NotFoundError, match="Did you mean 'vanilla'"):
        client.completions.create(model="vanila", prompt="a")
    with pytest.raises(openai.BadRequestError, match="reads at most 64"):
        client.completions.create(model="vanilla", prompt="a" * 70)
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="vanilla", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="the first message must be of the user"):
        client.chat.completions.create(model="mixtral", messages=[{"role": "assistant", "content": "Hi"}])


def test_curl_works(server, alone):
    curl = shutil.which("curl")
    assert curl is not None
    body = {"model": "vanilla", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}

    def run(**more):
        command = [curl, "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
        return subprocess.run([*command, "-d", json.dumps(body | more)], capture_output=True, check=True).stdout

    assert json.loads(run())["choices"][0]["text"] == alone("vanilla")
    events = [line.removeprefix(b"data: ") for line in run(stream=True).split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == alone("vanilla")


# What the page reads


def test_events_show_experts_and_loads(server):
    options = {"routes": True, "cold": True, "slots": 2}
    body = {"model": "vanilla", "prompt": PROMPT, "max_tokens": 9, "temperature": 0, "stream": True}
    with server.http.stream("POST", "/v1/completions", json={**body, "stickymoe": options}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    events = [c["stickymoe"] for c in chunks]
    passes, last = events[:-1], events[-1]
    assert len(passes) == last["stats"]["tokens"] == 9
    assert passes[0]["prompt"]
    slots = [[None] * 2 for _ in range(4)]
    for event in passes:
        for layer, slot, expert, evicted, kind in event["loads"]:
            assert kind == "demand"
            assert slots[layer][slot] == evicted
            slots[layer][slot] = expert
        if "slots" in event:  # of the prompt, whose experts may not fit all together
            assert slots == event["slots"]
            continue
        assert all(expert in held for experts, held in zip(event["experts"], slots, strict=True) for expert in experts)
    for name in ("hits", "misses", "bytes_read"):
        assert sum(e[name] for e in passes) == last["stats"][name]


def test_events_of_a_model_without_experts_show_its_time(server):
    body = {"model": "dense", "prompt": PROMPT, "max_tokens": 5, "stream": True, "stickymoe": {"routes": True}}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: "))["stickymoe"] for line in lines[:5]]
    assert events[0]["slots"] == []
    assert events[0]["resident_bytes"] == server.workers["dense"].engine.resident_bytes
    assert all(e["seconds"] > 0 and e["experts"] == e["loads"] == [] and e["misses"] == 0 for e in events)


def test_a_saved_trace_simulates_to_the_counts(server, tmp_path):
    options = {"routes": True, "cold": True, "slots": 2, "policy": "lru"}
    answer = server.complete(PROMPT, max_tokens=20, stickymoe=options).json()
    trace, stats = answer["stickymoe"]["trace"], answer["stickymoe"]["stats"]
    file = tmp_path / "answer.zip"
    file.write_bytes(server.http.get(trace).content)
    table = open_trace(file)
    found = simulate(table, capacity=2, policy="lru", access=Access(order="decode"))
    assert (found.hits, found.misses) == (stats["hits"], stats["misses"])
    assert server.http.get("/v1/traces/cmpl-unknown").status_code == 404


def test_settings_apply_to_one_answer(server, alone):
    for options in (
        {"slots": 1},
        {"policy": "fifo"},
        {"prefetch": "next_layer"},
        {"throttle": "1GB"},
        {"throttle": None},
    ):
        assert server.text(PROMPT, max_tokens=12, stickymoe=options) == alone("vanilla")
    server.text(PROMPT, max_tokens=2)
    assert server.workers["vanilla"].engine.settings == server.workers["vanilla"].defaults


def test_metrics_are_counted(server):
    def read():
        families = text_string_to_metric_families(server.http.get("/metrics").text)
        return {
            (s.name, s.labels.get("end")): s.value
            for f in families
            for s in f.samples
            if s.labels["model"] == "vanilla"
        }

    before = read()
    answer = server.complete(PROMPT, max_tokens=7, stickymoe={"routes": True}).json()["stickymoe"]["stats"]
    after = read()
    grown = {key: after[key] - before[key] for key in after}
    assert grown["stickymoe_tokens_total", None] == 7
    assert grown["stickymoe_prompt_tokens_total", None] == len(PROMPT)
    assert grown["stickymoe_requests_total", "length"] == 1
    assert grown["stickymoe_expert_hits_total", None] == answer["hits"]
    assert grown["stickymoe_expert_misses_total", None] == answer["misses"]
    assert grown["stickymoe_bytes_read_total", None] == answer["bytes_read"]
    assert after["stickymoe_resident_bytes", None] == answer["resident_bytes"]
    assert after["stickymoe_running", None] == after["stickymoe_waiting", None] == 0


# Bad input

BAD = {
    "no prompt": ({"prompt": None}, 400, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, "empty"),
    "two prompts": ({"prompt": ["a", "b"]}, 400, "expected one per request"),
    "unknown token": ({"prompt": [1, 256]}, 400, "0 … 255"),
    "negative token": ({"prompt": [-1]}, 400, "0 … 255"),
    "long prompt": ({"prompt": "a" * 65}, 400, "reads at most 64"),
    "no room for a token": ({"prompt": "a" * 65, "max_tokens": 1}, 400, "reads at most 64: shorten the prompt."),
    "no room": ({"max_tokens": 64, "prompt": "ab"}, 400, "at most 63"),
    "many tokens": ({"max_tokens": 65}, 400, "writes at most 64"),
    "no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "huge number": ({"max_tokens": 10**30}, 400, "max_tokens"),
    "number of many digits": ({"max_tokens": 10**4000}, 400, "max_tokens: got 1000"),
    "text for a number": ({"temperature": "hot"}, 400, "temperature: got 'hot'"),
    "negative temperature": ({"temperature": -1}, 400, "temperature"),
    "top_p": ({"top_p": 0}, 400, "top_p"),
    "two answers": ({"n": 2}, 400, "n: got 2"),
    "penalty": ({"presence_penalty": 1}, 400, "presence_penalty"),
    "echo": ({"echo": True}, 400, "echo"),
    "unknown field": ({"tempreature": 1}, 400, "tempreature: this field is not supported"),
    "many stops": ({"stop": ["a"] * 5}, 400, "it should have at most 4 items"),
    "empty stop": ({"stop": ""}, 400, "stop: got ''; it should have at least 1 character; or"),
    "long stop": ({"stop": ["a" * 257]}, 400, "it should have at most 256 characters"),
    "long name": ({"model": "a" * 513}, 400, "it should have at most 512 characters"),
    "name in two lines": ({"model": "vanill\na"}, 404, r"Unknown model 'vanill\na'"),
    "text for settings": ({"stickymoe": "fast"}, 400, "stickymoe: got 'fast'; it should be an object"),
    "surrogate": ({"prompt": "\ud800"}, 400, "prompt: got '\\ud800'; it should be text in Unicode"),
    "number for a prompt": ({"prompt": 5}, 400, "prompt: got 5; it should be a valid string; or it should be a valid"),
    "fraction of a token": ({"prompt": [1.5]}, 400, "prompt.0: got 1.5; it should be a valid"),
    "unknown model": ({"model": "gpt-4"}, 404, "Unknown model 'gpt-4'. Known: "),
    "slots": ({"stickymoe": {"slots": 3}}, 400, "at most 2, which the server was started with"),
    "no slots": ({"stickymoe": {"slots": 0}}, 400, "slots"),
    "policy": ({"stickymoe": {"policy": "belady"}}, 400, "policy: got 'belady'"),
    "unknown policy": ({"stickymoe": {"policy": "lruu"}}, 400, "Did you mean"),
    "throttle": ({"stickymoe": {"throttle": "1"}}, 400, "one expert per second"),
    "throttle text": ({"stickymoe": {"throttle": "fast"}}, 400, "throttle"),
    "settings of a dense model": ({"model": "dense", "stickymoe": {"slots": 1}}, 400, "has no experts"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_answered_is_one_clear_message(case, server):
    body, status, match = BAD[case]
    request = {"model": "vanilla", "prompt": "ab", **body}
    answer = server.http.post(
        "/v1/completions", content=json.dumps(request), headers={"Content-Type": "application/json"}
    )
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert match in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 300
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert server.text(max_tokens=2)


@pytest.mark.parametrize(
    ("content", "headers", "status", "match"),
    [
        (b"{", {"Content-Type": "application/json"}, 400, "not valid JSON"),
        (b"[" * 100_000, {"Content-Type": "application/json"}, 400, "JSON"),
        (b"\xff\xfe", {"Content-Type": "application/json"}, 400, "JSON"),
        (
            b'{"model":"vanilla","prompt":"a","temperature":NaN}',
            {"Content-Type": "application/json"},
            400,
            "temperature",
        ),
        (b'{"model":"vanilla","prompt":"a"}', {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        (b"x" * 1_000_001, {"Content-Type": "application/json"}, 413, "larger than 1000000 bytes"),
        (b"", {"Content-Type": "application/json"}, 400, "missing"),
        (b"[]", {"Content-Type": "application/json"}, 400, "The body: got []; it should be an object."),
        (b"null", {"Content-Type": "application/json"}, 400, "The body: got None; it should be an object."),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(content, headers, status, match, server):
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    assert (answer.status_code, match in answer.json()["error"]["message"]) == (status, True), answer.text


def test_a_body_of_unknown_length_is_limited(server):
    parts = (b"x" * 100_000 for _ in range(20))
    answer = server.http.post("/v1/completions", content=parts, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "larger than" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "wizard", "content": "Hi"},
        {"role": "user"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
)
def test_messages_that_cannot_be_read_are_refused(message, server):
    answer = server.post("/v1/chat/completions", model="mixtral", messages=[message])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages.0")


def test_unknown_paths_and_methods_have_the_same_shape(server):
    for method, path, status in (("GET", "/v2", 404), ("DELETE", "/v1/models", 405), ("GET", "/static/../app.py", 404)):
        answer = server.http.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (answer.headers.get("Allow") == "GET") == (status == 405)


# Who may ask


def test_a_key_is_required_where_it_is_set(serve, models):
    with serve({"vanilla": models["vanilla"]}, key="secret") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Basic secret"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/traces/x"):
                answer = server.http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.http.get("/health").json() == {"status": "ok"}
        assert server.http.get("/").status_code == 200
        with client_of(server, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, "secret") as client:
            assert client.completions.create(model="vanilla", prompt="a", max_tokens=2).usage.completion_tokens == 2


def test_pages_of_other_hosts_cannot_reach_the_server(server):
    answer = server.http.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 400
    assert "is not served" in answer.json()["error"]["message"]
    answer = server.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "default-src 'self'" in server.http.get("/").headers["content-security-policy"]


# Clients that go away, and limits


def wait_for(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def post_of(body):
    """A request as its bytes, for a client that goes away."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_whose_client_goes_away_ends(stream, serve, models):
    with serve({"vanilla": models["vanilla"]}, slots=1, throttle=200_000) as server:
        worker = server.workers["vanilla"]
        body = {"model": "vanilla", "prompt": "a", "max_tokens": 60, "temperature": 0, "stream": stream}
        host, port = server.url.removeprefix("http://").split(":")
        for path_to_end in ("running", "waiting"):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(post_of(body))
                wait_for(lambda: worker.running or worker.waiting)
                if path_to_end == "running":
                    wait_for(lambda: worker.running and worker._running[0].text.tokens)
            wait_for(lambda: not worker.running and not worker.waiting)
        wait_for(lambda: worker.totals.ended["cancelled"] == 2)
        assert worker.totals.tokens < 60
        assert not worker.engine.texts


def test_requests_over_the_queue_are_refused_with_a_time(serve, models):
    limits = Limits(max_tokens=60, running=1, waiting=1)
    with serve({"vanilla": models["vanilla"]}, limits, slots=1, throttle=100_000) as server:
        worker = server.workers["vanilla"]
        body = {"model": "vanilla", "prompt": "a", "max_tokens": 60, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=60) as other,
            other.stream("POST", "/v1/completions", json=body) as running,
        ):
            assert running.status_code == 200
            second = socket.create_connection(server.url.removeprefix("http://").split(":"))
            second.sendall(post_of(body))
            wait_for(lambda: worker.waiting == 1)
            refused = server.complete(max_tokens=2)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert "wait already" in refused.json()["error"]["message"]
            second.close()  # a client that went away takes no place in the queue
            wait_for(lambda: worker.waiting == 0)
            third = socket.create_connection(server.url.removeprefix("http://").split(":"))
            third.sendall(post_of(body))
            wait_for(lambda: worker.waiting == 1)
            wait_for(lambda: len(worker._waiting) == 1)
            third.close()


def test_a_time_limit_cuts_an_answer_and_says_so(serve, models):
    limits = Limits(max_tokens=60, seconds=0.3)
    with serve({"vanilla": models["vanilla"]}, limits, slots=1, throttle=100_000) as server:
        answer = server.complete("a", max_tokens=60).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["stickymoe"]["cut"] == "time limit of 0.3 s"
        assert 0 < answer["usage"]["completion_tokens"] < 60


def test_a_model_folder_that_disappears_does_not_end_the_server(serve, models, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "moving"
    shutil.copytree(models["vanilla"], folder)
    with serve({"moving": folder, "sticky": models["sticky"]}, slots=2) as server:
        expected = server.text(model="moving", max_tokens=4)
        shutil.rmtree(folder)
        assert server.text(model="moving", max_tokens=4) == expected  # its files are still open
        server.workers["moving"].engine.close()  # as after a failed read
        answer = server.complete(model="moving", max_tokens=4)
        assert answer.status_code == 503
        assert "does not exist" in answer.json()["error"]["message"]
        assert server.text(model="sticky", max_tokens=4)


def test_a_failed_read_ends_the_answers_and_the_model_is_opened_again(serve, models, monkeypatch):
    from stickymoe.errors import StoreError
    from stickymoe.runtime.readers import ExpertTicket

    with serve({"vanilla": models["vanilla"]}, slots=2) as server:
        expected = server.text(max_tokens=6)

        def fail(self, readers):
            raise StoreError("expert 3 of layer 1 is damaged")

        with monkeypatch.context() as patch:
            patch.setattr(ExpertTicket, "read", fail)
            answer = server.complete("other text", max_tokens=6)
        assert answer.status_code == 503
        assert "expert 3 of layer 1 is damaged" in answer.json()["error"]["message"]
        assert server.text(max_tokens=6) == expected


def test_an_unexpected_error_of_a_request_has_the_shape_of_all_errors(serve, models, monkeypatch):
    with serve({"vanilla": models["vanilla"]}, slots=2) as server:
        host = type(server.workers["vanilla"].engine.host)

        def fail(*args, **settings):
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(host, "encode", fail)
            answer = server.complete(max_tokens=6)
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "MemoryError in the server; its log has more."
        assert answer.json()["error"]["type"] == "server_error"
        assert server.text(max_tokens=6)


def test_an_unexpected_error_ends_an_answer_and_not_the_model(serve, models, monkeypatch):
    from stickymoe.runtime.engine import Engine

    with serve({"vanilla": models["vanilla"]}, slots=2) as server:
        expected = server.text(max_tokens=6)
        host = type(server.workers["vanilla"].engine.host)
        for owner, name in ((Engine, "begin"), (host, "forward"), (host, "decode")):

            def fail(*args, **settings):
                raise MemoryError("no room")

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                answer = server.complete(max_tokens=6)
            assert answer.status_code == 503
            assert "MemoryError" in answer.json()["error"]["message"]
            assert server.text(max_tokens=6) == expected
