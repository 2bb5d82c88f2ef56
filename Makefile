# Everything from a bare checkout: each target sets up its own .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MUTANTS = $(addprefix --mutants ,$(wildcard runs/proof/mutants.json))

.PHONY: demo test check verify mutate render setup clean
.DEFAULT_GOAL := help

help:            ## list the targets
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/: .*##/\t/'

setup: $(STAMP)  ## create .venv with everything installed

# The torch build is chosen first: a plain requirement would pull a CUDA build of several GB.
$(STAMP): pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
	@touch $@

demo: $(STAMP)   ## check and prove the spec, answer prompts over 1P+1D, replay the trace
	$(BIN)/rlt-spec check
	$(BIN)/rlt-verify run --scope quick
	$(BIN)/rlt-engine demo --trace runs/demo
	$(BIN)/rlt-spec replay runs/demo/*.jsonl

test: $(STAMP)   ## run every test
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, types, and that documents and diagrams are up to date
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/rlt-spec check
	$(BIN)/rlt-spec render --check
	$(BIN)/python -m verification.report.document --check

verify: $(STAMP) ## prove the shipped spec: every scope, every method (needs spin and gcc); a page in runs/proof
	@mkdir -p runs/proof
	$(BIN)/rlt-verify run --scope full --backend all --report runs/proof/proof.html $(MUTANTS)

mutate: $(STAMP) ## break the spec in every small way: each break shows, or is known to mean nothing
	@mkdir -p runs/proof
	$(BIN)/rlt-verify mutate --json runs/proof/mutants.json

render: $(STAMP) ## regenerate docs/machines and the tables of docs/proof.md from spec/
	$(BIN)/rlt-spec render
	$(BIN)/python -m verification.report.document

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
