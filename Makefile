# `make demo` and `make test` make what they need: a virtual environment, .venv, with torch for this
# machine. PYTHON=/path/to/python makes it with another Python than python3;
# PYTHON_ENV=/path/to/python uses an environment that is there already, and installs nothing.

PYTHON ?= python3
PYTHON_ENV ?=
ARGS ?=

ifeq ($(PYTHON_ENV),)
  PY := .venv/bin/python
  READY := .venv/ready
else
  PY := $(PYTHON_ENV)
  READY := check-environment
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

export PYTHON PYTHON_ENV

# Python keeps the bytecode of what it imports, whatever the environment says: uv installs none, and each
# worker and each process of a test would compile torch, transformers and the tests anew.
export PYTHONDONTWRITEBYTECODE :=

PYTESTS := -m pytest -n auto --maxprocesses 8 --dist worksteal

.PHONY: help demo test test-changed test-newest test-oldest test-versions test-npu plan-npu bound-npu repeat-npu check-npu docs publish-docs lint format clean check-environment

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { if (length($$1) > w) w = length($$1); n[NR] = $$1; t[NR] = $$2 } \
		END { for (i = 1; i <= NR; i++) if (i in n) printf "make %-" w "s  %s\n", n[i], t[i] }' Makefile

demo: $(READY) ## train a small Llama untouched and fused, and compare; ARGS="--device cpu --steps 50"
	$(PY) examples/train_llama.py $(ARGS)

# One thread a process: PyTorch's own threads would compete with the other workers for the same cores.
test: $(READY) ## every test; ARGS="-m quick" for a few minutes of them, ARGS="tests/ops/norms/test_rms_norm.py" for a file
	OMP_NUM_THREADS=1 $(PY) $(PYTESTS) $(ARGS)

test-changed: $(READY) ## the quick tests, and those that your changes since main concern; BASE=commit
	OMP_NUM_THREADS=1 $(PY) $(PYTESTS) --changed $(or $(BASE),main) $(ARGS)

test-newest: .venv-newest/ready ## the quick tests with the newest torch, triton, transformers, trl and peft
test-oldest: .venv-oldest/ready ## the same with the oldest versions that pyproject.toml accepts
test-newest test-oldest: test-%:
	OMP_NUM_THREADS=1 .venv-$*/bin/python $(PYTESTS) -m quick $(ARGS)

test-versions: ## the quick tests with every torch that is supported, for an hour; writes docs/reports/versions.md
	$(or $(PYTHON_ENV),$(PYTHON)) tests/support/versions_report.py $(ARGS)

test-npu: $(READY) ## the Ascend kernels lowered, planned and run without a device; writes docs/reports/npu.md; OPS=rms_norm,rope
	PYTHON_ENV=$(PY) LIGER_OPS_NPU_OPS=$(OPS) tests/npu/run $(ARGS)

plan-npu: $(READY) ## the Ascend kernels planned for other chips; writes docs/reports/npu_chips.md; CHIPS=Ascend950PR_9579 prints one
	PYTHON_ENV=$(PY) tests/npu/run chips.py $(CHIPS)

bound-npu: $(READY) ## bounds of the Ascend kernels' time by the bytes that they move; writes docs/reports/npu_bounds.md
	PYTHON_ENV=$(PY) tests/npu/run bounds.py

repeat-npu: $(READY) ## the Ascend kernels compiled three times, and compared; writes docs/reports/npu_repeats.md
	PYTHON_ENV=$(PY) tests/npu/run repeats.py

check-npu: $(READY) ## test-npu; its document must say the same of these kernels as the one that is there
	recorded=$$(mktemp) && cp docs/reports/npu.md $$recorded && $(MAKE) test-npu && \
		$(PY) tests/npu/documents/compare.py $$recorded docs/reports/npu.md

# The theme warns of the next major version of mkdocs, which pyproject.toml does not take.
docs: $(READY) ## the documentation's site, in site/; a warning or a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(PY) -m mkdocs build --strict $(ARGS)

# mike runs the mkdocs that it finds on the path.
MIKE := NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) PATH=$(abspath $(dir $(PY))):$(PATH) mike

publish-docs: $(READY) ## a version of the site on the branch gh-pages: VERSION=0.2.0 ALIAS=latest PUSH=--push
	$(MIKE) deploy $(PUSH) --update-aliases $(VERSION) $(ALIAS)
	$(if $(ALIAS),$(MIKE) set-default $(PUSH) $(ALIAS))

lint: $(READY) ## format, lint and types, checked
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) tests/support/project/check_types.py

format: $(READY) ## rewrite the sources as `make lint` wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv, caches and build output
	rm -rf .venv .venv-* build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready: pyproject.toml .ci/setup
	@.ci/setup

.venv-newest/ready: pyproject.toml .ci/setup
	@.ci/setup .venv-newest

.venv-oldest/ready: pyproject.toml .ci/setup
	@.ci/setup .venv-oldest --resolution lowest-direct

check-environment:
	@.ci/setup
