# Two commands do all set-up:  make demo   and   make test
# Other interpreters and builds:  make demo PYTHON=python3.12 TORCH='torch==2.9.1 --index-url https://…'
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
TORCH_VERSION := 2.13.0
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

# Modules are compiled when they are first imported: most never are, and nobody waits for them.
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_COMPILE = 1
PIP := $(BIN)/pip install -c constraints.txt
SYNC := $(if $(filter output-sync,$(.FEATURES)),-Otarget)

.PHONY: demo demo-flower test test-slow test-matrix test-fresh check bench evidence reproduce docs dist clean

demo: .venv/demo
	$(BIN)/python examples/quickstart.py

demo-flower: .venv/dev
	$(BIN)/python examples/flower/demo.py

# The checks and the site are built at the same time. Files stay together on a worker, which shares their fixtures, and
# an idle worker takes tests from the other.
test: .venv/dev
	+$(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j2) $(SYNC) check docs
	$(BIN)/pytest -n 2 --dist worksteal

test-slow: .venv/dev
	$(BIN)/pytest -m slow

# A short suite on other versions of Python, torch and NumPy, each in an environment of its own under out/matrix.
test-matrix:
	.ci/matrix $(MATRIX)

# Everything that README and docs promise, in a fresh clone with an empty home directory; FRESH=--quick for a part.
test-fresh:
	tests/fresh.sh $(FRESH)

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Fails on a broken link or a public name without description (not with --quiet, which hides warnings from --strict).
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore $(BIN)/mkdocs build --strict

bench: .venv/dev
	$(BIN)/python benchmarks/bench.py

# A slice of every committed table, run again; tables whose data are not here are named.
evidence: .venv/demo
	$(BIN)/python benchmarks/evidence.py

reproduce: .venv/demo
	$(BIN)/fedspan reproduce toy --seeds 3 --jobs 2 --out out/toy

# The files of a release.
dist: .venv/dev
	rm -rf dist
	$(BIN)/pip install build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# What the demo needs. torch comes first and alone: what is in place is not replaced by a larger build.
.venv/demo: pyproject.toml constraints.txt .ci/install-torch
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedspan needs Python 3.11 or newer, and this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	.ci/install-torch $(BIN)/pip $(TORCH_VERSION)
	@echo "Installing fedspan and what the demo needs …"
	$(PIP) -e '.[plot,vision]'
	touch $@

# What the checks and the documentation site need as well. A demo of the same call of make comes before: nothing is
# installed while it runs.
.venv/dev: .venv/demo | $(filter demo reproduce,$(MAKECMDGOALS))
	@echo "Installing what the checks need …"
	$(PIP) -e '.[dev,docs]'
	touch $@

clean:
	rm -rf .venv out dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
