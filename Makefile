# Each target makes .venv on first use; a second run installs nothing.
PYTHON ?= python3
BIN = .venv/bin
INSTALLED = .venv/.installed

.PHONY: quickstart test test-slow benchmark clean

quickstart: $(INSTALLED)
	$(BIN)/python quickstart.py

test: $(INSTALLED)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/python -m pytest -q -m "not slow"

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -m slow

# Half an hour; on a machine with nothing else to do.
benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/attention.py

$(INSTALLED): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed; set PYTHON=' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv runs
