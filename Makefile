# Two commands: `make demo` and `make test`. Each sets up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check setup clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/stickymoe demo

test: setup
	$(BIN)/python -m pytest -n 2 -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo build *.egg-info src/*.egg-info
