# Two commands do all set-up:  make demo   and   make test
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

export PIP_DISABLE_PIP_VERSION_CHECK = 1
PIP := $(BIN)/pip install -qq -c constraints.txt

.PHONY: demo demo-flower test test-slow check bench reproduce docs clean

demo: .venv/demo
	$(BIN)/python examples/quickstart.py

demo-flower: .venv/dev
	$(BIN)/python examples/flower/demo.py

# The checks and the site are built at the same time, once both are installed. Files stay together on a worker, which
# shares their fixtures, and an idle worker takes tests from the other.
test: .venv/dev .venv/docs
	$(MAKE) --no-print-directory -j2 -Otarget check docs
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: .venv/dev
	$(BIN)/pytest -m slow

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Fails on a broken link or a public name without description (not with --quiet, which hides warnings from --strict).
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore $(BIN)/mkdocs build --strict

bench: .venv/dev
	$(BIN)/python benchmarks/bench.py

reproduce: .venv/demo
	$(BIN)/fedspan reproduce toy --seeds 3 --jobs 2 --out out/toy

# What the demo needs. torch comes first and alone: with its pinned CPU build in place nothing asks for another one.
.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e '.[plot,vision]'
	touch $@

# What the checks need as well.
.venv/dev: .venv/demo
	$(PIP) -e '.[dev]'
	touch $@

# What the documentation site needs.
.venv/docs: .venv/demo
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
