# The two commands of the README are `make demo` and `make test`; both set up all they need.
PYTHON ?= python3
VENV ?= .venv
# A range, so that a build of torch already at hand (CPU or CUDA) is taken; the package itself needs only torch >= 2.10.
TORCH ?= torch>=2.10,<2.14
BIN := $(VENV)/bin
# Installing builds the kernels, so their sources are what an installation depends on.
KERNELS := $(shell find csrc -type f ! -name '*.pyc')
export OMP_NUM_THREADS ?= 1
# Of pytest. Many tests wait for processes that they have started, so one more than two processors can run keeps both busy.
WORKERS ?= 3

.PHONY: demo test lint bench bench-attention bench-calibration bench-overhead bench-pipeline models fault-drill behaviours sanitize docs clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.activation_memory

bench-attention: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.attention

bench-pipeline: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.pipeline

bench-logits: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.sliced_logits

bench-overhead: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.overhead

bench-calibration: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.calibration

models: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m support.model_table

behaviours: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m support.behaviours

fault-drill: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m support.fault_drill

sanitize:
	.ci/sanitize

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml setup.py $(KERNELS) | $(VENV)/bin/python
	$(BIN)/python -m pip install -q '$(TORCH)'
	$(BIN)/python -m pip install -q -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info lightning_seq1f1b/_native*
