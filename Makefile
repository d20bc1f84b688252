# The two commands of the README are `make demo` and `make test`; both set up all they need.
PYTHON ?= python3
VENV ?= .venv
# A range, so that a build of torch already at hand (CPU or CUDA) is taken; the package itself needs only torch >= 2.10.
TORCH ?= torch>=2.10,<2.14
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench docs clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.activation_memory

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
