"""Inputs that schemathesis makes from the server's own description: none may end in an error of the server."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

PATHS = (
    "GET /health",
    "GET /metrics",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /v1/traces/{id}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
)
# A path without a body has no invalid input.
CASES = [(path, mode) for path in PATHS for mode in GenerationMode if path.startswith("POST") or mode.is_positive]
EXAMPLES = 200


@pytest.fixture(scope="module")
def operations(server):
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def test_every_path_is_described(operations):
    assert tuple(sorted(operations)) == PATHS


@pytest.mark.parametrize(("path", "mode"), CASES, ids=lambda part: getattr(part, "value", part))
def test_no_input_is_an_error_of_the_server(path, mode, operations, server):
    refused = []

    @given(case=operations[path].as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def attempt(case):
        if isinstance(case.body, dict) and mode.is_positive:
            case.body["model"] = "mixtral"  # so that the other fields are read
        answer = case.call(timeout=60)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            refused.append(answer.status_code)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]

    attempt()
    if not mode.is_positive:
        assert refused
    assert server.text(max_tokens=2)
