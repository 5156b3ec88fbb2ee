# Two commands: `make demo` and `make test`. Each sets up .venv first; neither needs root.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check setup browser results docs release-check clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	touch $@

# Debian's Chromium, in which a test opens the report. Needs root or sudo.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends chromium chromium-driver; }

demo: setup
	$(BIN)/stickymoe demo

test: setup
	$(BIN)/python -m pytest -n 2 -q

# The published results, from the committed records.
results: setup
	$(BIN)/stickymoe report results/paper -o docs/results.html --paper
	$(BIN)/python results/frontier_page.py
	$(BIN)/python results/traces.py

# The documentation site. Warnings fail the build, and it needs no network.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "Open site/index.html in a browser."

# Builds the package, installs every extra in an empty environment, and uses it there.
release-check: setup
	$(BIN)/python tools/release_check.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo site build *.egg-info src/*.egg-info
