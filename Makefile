# Two commands: `make train` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
# Python compiles what is imported, when it is; pip would compile everything (--no-compile), for most of a minute.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip
# uv, where it is installed.
INSTALL := $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(PIP) install --no-compile)
# What pip says is shown where it fails.
LOG := .venv/install.log
QUIET = >>$(LOG) 2>&1 || { tail -n 30 $(LOG); echo "==> that failed; all of it is in $(LOG)"; exit 1; }
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# Containers tend to set it, and every process would compile all that it imports: 5 of its first 8 seconds, measured.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train longer test test-all gate readers families docs check format lock clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

train: setup  ## extend SmolLM2-135M on real documents with AnchorAttention (configs/demo.yaml)
	@echo "==> training configs/demo.yaml: it needs 6 GiB of memory, and on two cores 3 to 10 minutes"
	@rm -rf runs/demo.replaced-*
	@$(BIN)/torchtrain train configs/demo.yaml --replace
	@echo "==> next, with documents of your own (a folder, or a .jsonl file):"
	@echo "    . .venv/bin/activate; torchtrain init DOCUMENTS smollm2 --length 1024 --out mine.yaml; torchtrain train mine.yaml train.steps=4"

longer: setup  ## about two hours: train configs/longer.yaml, and compare RULER's needle tasks at 2K and 4K before and after
	@$(BIN)/torchtrain evaluate smollm2 --suite configs/eval/needles.yaml --lengths 2048,4096 --processes 2 --out runs/before
	@if test -d runs/longer; then $(BIN)/torchtrain resume runs/longer; else $(BIN)/torchtrain train configs/longer.yaml; fi
	@$(BIN)/torchtrain evaluate runs/longer --suite configs/eval/needles.yaml --lengths 2048,4096 --processes 2
	@$(BIN)/torchtrain compare runs/before runs/longer --out runs/longer-tables

test: setup  ## run the tests but for long sweeps (those marked gpu are skipped, and say so, where there is no CUDA device)
	@echo "==> running the tests (make test-all adds more cases of the same)"
	@$(BIN)/python -m pytest -n 2 -m "not sweep"

test-all: setup  ## run every test, the sweeps too
	@echo "==> running every test"
	@$(BIN)/python -m pytest -n 2

gate: setup  ## judge the trainer against the oracle, then let the gate catch every known bug (configs/parity/ci.yaml)
	@echo "==> running the gate against the zoo"
	@$(BIN)/parity zoo configs/parity/ci.yaml

# transformers 4 with its own tokenizers and huggingface_hub; torch is shared by the .pth, never installed.
readers: setup  ## put older transformers into .venv-readers: the tests then read exports with them, too
	@for version in 4.57.3 4.51.3; do \
		env=.venv-readers/transformers-$$version; test -f $$env/.installed && continue; \
		echo "==> creating $$env"; rm -rf $$env; $(BIN)/python -m venv $$env \
		&& $$env/bin/python -m pip install --quiet --no-compile --disable-pip-version-check transformers==$$version sentencepiece protobuf \
		&& $(BIN)/python -c 'import sys, sysconfig; from pathlib import Path; Path(sys.argv[1], "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")' \
			"$$($$env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		&& touch $$env/.installed || exit 1; \
	done

families: setup  ## judge the plug-in on every causal family of transformers and write docs/families.md
	@echo "==> every causal family under anchor, some minutes"
	@$(BIN)/python -m parity_tests.families --out docs/families.md

docs: setup  ## build the pages of docs/ as a site, into site/
	@test -x .venv-docs/bin/mkdocs || { $(PYTHON) -m venv .venv-docs && PIP_CONSTRAINT=constraints.txt .venv-docs/bin/python -m pip install --quiet \
		--disable-pip-version-check mkdocs==1.6.1; }
	@.venv-docs/bin/mkdocs build --quiet && echo "==> site/index.html"

check: setup  ## size, ruff (format and lint), import-linter (who imports whom), pyright on the public surface
	@echo "==> size"
	@$(BIN)/python .ci/size.py
	@echo "==> ruff"
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@echo "==> import-linter"
	@$(BIN)/lint-imports --no-logo
	@echo "==> pyright"
	@$(BIN)/pyright

format: setup  ## let ruff rewrite what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock:  ## write requirements.txt, the hashes of what constraints.txt names (PyTorch's differ by where its builds come from)
	@sed -e '/^# Not installed/,$$d' -e '/^torch==/d' constraints.txt | uv pip compile - --no-deps --generate-hashes --universal \
		--python-version 3.11 --no-annotate --custom-compile-command 'make lock' --quiet --output-file requirements.txt

clean:  ## remove what tools cache; runs, models and .venv stay
	rm -rf .pytest_cache .ruff_cache .hypothesis

distclean: clean  ## remove runs and cache, too: trained models, checkpoints and converted weights
	rm -rf runs cache

setup: .venv/.installed  ## create .venv and install everything into it

.venv/.installed: pyproject.toml constraints.txt requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python {sys.version.split()[0]} is too old: Anchorline needs 3.11 or newer; try make PYTHON=python3.11")'
	@echo "==> creating .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@rm -f $(LOG)
	@echo "==> installing the packages of requirements.txt, each checked against its hash"
	@$(INSTALL) --no-deps --require-hashes --requirement requirements.txt $(QUIET)
	@echo "==> installing PyTorch"
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		$(PIP) install --no-compile torch==$(TORCH)+cpu >>$(LOG) 2>&1 \
		|| echo "==> pip is set up with no index that has PyTorch's CPU build: the CUDA build and its libraries are 2.6 GB to download"; \
	fi
	@$(PIP) install --no-compile torch==$(TORCH) $(QUIET)
	@echo "==> installing Anchorline"
	@$(PIP) install --no-deps --no-build-isolation --editable . $(QUIET)
	@touch $@
	@echo "==> set up: torchtrain, jaxref and parity are in $(BIN)"
