# make demo and make test need Python 3.11 to 3.14 and nothing else: they make .venv when it is not there.
# PYTHON=…       the interpreter to make .venv with
# TORCH_INDEX=…  a further package index, e.g. https://download.pytorch.org/whl/cpu
export PYTHON TORCH_INDEX

BIN := .venv/bin
# Tests start hundreds of Python processes: without bytecode each of them compiles the project anew.
WITH_BYTECODE := env -u PYTHONDONTWRITEBYTECODE
PYTEST := $(WITH_BYTECODE) $(BIN)/python -m pytest

.PHONY: help setup demo demo-lmcache swap-demo test test-deep test-lmcache explore soak check build docs clean

help:
	@echo 'make demo    cold against reload on a real vLLM, right and with a fault'
	@echo 'make demo-lmcache   two releases of LMCache, and the older one repaired'
	@echo 'make swap-demo   a traced build swapped in behind HAProxy, and the incumbent back'
	@echo 'make test    all tests but the next ones: real engines included'
	@echo 'make test-deep   whole catalogues of faults and rarer paths, most on real engines'
	@echo 'make test-lmcache   the tests on releases of LMCache, which pip fetches'
	@echo 'make explore  the tests without an engine again, on cases not seen before'
	@echo 'make soak    long runs on real engines: kills, the cache under damage'
	@echo 'make check   format, lint, types, import contract'
	@echo 'make build   wheel and sdist in dist/'
	@echo 'make docs    the site, in build/site/'
	@echo 'make clean   remove what was made, .venv excepted'

setup:
	@scripts/bootstrap

demo: setup
	@$(BIN)/python scripts/demo.py

demo-lmcache: setup
	@$(BIN)/python scripts/demo_lmcache.py

swap-demo: setup
	@$(BIN)/python scripts/swap_demo.py

test: setup
	@$(WITH_BYTECODE) $(BIN)/python scripts/run_tests.py

test-deep: setup
	$(PYTEST) -n auto --maxprocesses 4 --dist load -m 'deep and not vllm and not lmcache and not soak'
	$(PYTEST) -m 'deep and vllm and not lmcache and not soak'

test-lmcache: setup
	$(PYTEST) -m lmcache

explore: setup
	$(PYTEST) -n auto --maxprocesses 4 --dist loadfile -m 'not vllm and not lmcache and not soak and not deep' --hypothesis-profile explore

soak: setup
	$(PYTEST) -m soak

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

build: setup
	$(BIN)/python -m build --outdir dist

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

clean:
	rm -rf build dist demo-runs .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
