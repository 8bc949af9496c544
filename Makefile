# Two commands do all set-up:  make demo   and   make test
PYTHON ?= python3.11
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo demo-flower test test-slow check bench reproduce clean

demo: .venv/ready
	$(BIN)/fedspan reproduce toy --scale smoke --jobs 2 --out out/demo --again

demo-flower: .venv/ready
	$(BIN)/python examples/flower/demo.py

test: check
	$(BIN)/pytest -n 2

test-slow: .venv/ready
	$(BIN)/pytest -m slow

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/python benchmarks/toy.py

reproduce: .venv/ready
	$(BIN)/fedspan reproduce toy --seeds 3 --jobs 2 --out out/toy

# torch goes first and alone: with its pinned CPU build in place nothing else asks for another one.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
