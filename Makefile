# Each target makes .venv on first use; a second run installs nothing.
PYTHON ?= python3
BIN = .venv/bin
# Processes that share the tests of `make test`, with one thread each.
WORKERS ?= 2
INSTALLED = .venv/.installed

.PHONY: quickstart operators test test-slow test-lowest types reliability benchmark clean

quickstart: operators
	$(BIN)/python quickstart.py

# The C++ operators of the attention core, where a C++ compiler is found; nothing needs them.
operators: $(INSTALLED)
	@$(BIN)/python -m moh_vision.attention.kernels || echo "going on without the C++ operators, in plain PyTorch"

test: operators
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not reliability" --timeout 300

# One room's part: make test-slow ROOM=attention
test-slow: types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m slow --timeout 3600 tests/$(ROOM)

# mypy reads a file that uses the public names.
types: $(INSTALLED)
	$(BIN)/mypy

# The fast tests with the lowest versions that pyproject.toml allows, in .venv-lowest (about 8 GB).
test-lowest: .venv-lowest/.installed
	@.venv-lowest/bin/python -m moh_vision.attention.kernels || echo "going on without the C++ operators, in plain PyTorch"
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow and not reliability" --timeout 600

.venv-lowest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct --editable ".[dev]"
	touch $@

# Faults and hostile files; MOH_VISION_SEED=N repeats a random test.
reliability: $(INSTALLED)
	$(BIN)/python -m pytest -q -m reliability --timeout 1800

# About 40 minutes; on a machine with nothing else to do.
benchmark: operators
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/models.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed; set PYTHON=' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@# timm's own tests of its models, which tests/models/test_timm_contract.py runs on ours, are in its source distribution.
	$(BIN)/python -m pip download --quiet --no-deps --no-binary timm --dest .venv/timm-sdist \
		"timm==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("timm"))')" \
		|| echo "timm's source distribution could not be fetched: tests/models/test_timm_contract.py will be skipped"
	touch $@

clean:
	rm -rf .venv .venv-lowest .mypy_cache runs
