# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
SGLANG_VENV := .venv-sglang
VLLM_VENV := .venv-vllm
EXAMPLES := redis s3
# Hundreds of processes import the same modules, and an image may forbid Python to keep what it has compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo push test test-merge merge long package-long lint types unit gpu conformance examples $(EXAMPLES:%=judge-%) audit alerts dist docs interop interop-vllm test-long matrix judged benchmark quickstarts fuzz races servers hostile clean

demo: $(VENV)/.demo
	$(VENV)/bin/hicache demo

# Three tiers. `make push` is for every commit, `make merge` what `.ci/run` asks before anything
# lands, `make long` what takes hours or a machine of its own.
push: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs 2 --output-sync lint conformance types
	$(PYTEST_UNIT) -m "$(UNIT) and not slow and not long"

# All at once: tests and a conformance run wait for half of their time.
test: $(VENV)/.installed
	$(MAKE) --no-print-directory --jobs 4 unit conformance types lint

merge:
	.ci/run

# Whoever changes a package runs its long tests: `make long PACKAGE=metadata_server`, with a folder of tests/.
PACKAGE :=
long: $(if $(PACKAGE),package-long,races servers quickstarts fuzz hostile test-long)

package-long: $(VENV)/.installed
	$(PYTEST_UNIT) -m "$(PLAIN) and long" tests/$(PACKAGE)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --config importlinter.toml

types: $(VENV)/.installed
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

# Six at a time on two cores, because they spend half of it waiting; files marked `slow` first.
PLAIN := not gpu and not interop and not vllm and not fuzz and not docs and not hostile
UNIT := $(PLAIN) and not merge
# What CI has no time for; `make test-long` runs that alone.
LONG := not long
SLOWEST := --durations 20
PYTEST_UNIT := $(PYTHON) -m pytest -n 6 --dist loadfile --no-loadscope-reorder $(SLOWEST)
unit: $(VENV)/.installed
	$(PYTEST_UNIT) -m "$(UNIT) and $(LONG)"

# The suite on every driver with a planted fault and on a new package in an environment of its own, the programs of examples/, the
# status page in a browser: `.ci/run` has the time, `make test` has not.
test-merge: $(VENV)/.installed
	$(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST) -m "merge and not gpu and $(LONG)" tests/conformance tests/examples tests/cli tests/metadata_server tests/transfer

# On a machine with a CUDA device; `scripts/gpu_tests.sh PYTHON` does the same in a Python that has torch and pytest and little else.
gpu: $(VENV)/.installed
	scripts/gpu_tests.sh $(PYTHON)

# The short profile; `make matrix` has the file driver's run of the whole suite.
PROFILE := smoke
conformance: $(VENV)/.installed
	$(VENV)/bin/hicache conformance run file --profile $(PROFILE) --report out/conformance

# What `hicache new` makes of networked stores, installed as users do, and judged on servers of their protocols; all levels.
examples: $(VENV)/.installed
	rm -rf out/examples
	mkdir -p out/examples
	for store in $(EXAMPLES); do $(VENV)/bin/hicache new $$store --store $$store --directory out/examples/$$store-driver || exit; done
	$(PYTHON) -m pip install -q --no-deps --no-build-isolation --target out/examples/site $(EXAMPLES:%=out/examples/%-driver)
	$(MAKE) --no-print-directory --jobs 2 --output-sync $(EXAMPLES:%=judge-%)

$(EXAMPLES:%=judge-%): judge-%:
	PYTHONPATH=out/examples/site $(VENV)/bin/hicache conformance run $* --profile smoke --report out/examples/$*

# The site, in out/site: built, which checks its links, and every code block of README and docs/ run. tests/docs says where a
# table of options is behind its model.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict
	$(PYTHON) -m pytest -m "docs and $(LONG)" -n 2 --dist load $(SLOWEST) tests/docs

# The quick start of each path, in a virtual environment that has nothing but torch, from this checkout's wheel and pip's index.
# Twelve minutes were measured on two busy cores, most of it pip; each environment has a torch of its own.
quickstarts: $(VENV)/.installed
	rm -rf out/quickstarts
	$(PYTHON) -m pip wheel -q --no-deps -w out/quickstarts .
	HICACHE_DOCS_WHEELS=$(CURDIR)/out/quickstarts $(PYTHON) -m pytest -m docs -k every_block -o timeout=3600 tests/docs/test_pages.py

# Needs a real SGLang: 2.5 GB, built once into $(SGLANG_VENV).
interop:
	scripts/make_sglang_env.sh $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pytest -m "interop and $(LONG)" -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST) tests/interop

# Needs a real vLLM and a real LMCache: 4 GB, built once into $(VLLM_VENV).
interop-vllm:
	scripts/make_vllm_env.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pytest -m "vllm and $(LONG)" -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST) tests/interop_vllm

# What CI has no time for: more planted faults and documents, every driver and other kinds of KV with real engines, three engines on one store.
test-long:
	$(MAKE) --no-print-directory unit LONG=long
	$(MAKE) --no-print-directory test-merge LONG=long
	$(MAKE) --no-print-directory docs LONG=long
	$(MAKE) --no-print-directory interop LONG=long
	HICACHE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(MAKE) --no-print-directory interop-vllm LONG=long

# Our drivers, those of SGLang, vLLM and LMCache, and one of others, each judged for real; writes docs/matrix.md. Some six minutes, and nothing of it is in `make test`.
matrix:
	scripts/make_sglang_env.sh $(SGLANG_VENV)
	scripts/make_vllm_env.sh $(VLLM_VENV)
	scripts/make_matrix.sh $(SGLANG_VENV) $(VLLM_VENV) out/matrix docs/matrix.md

# What CI has the time for: our own drivers with a server, and one bridge; `make test` judges the file driver.
judged:
	scripts/make_sglang_env.sh $(SGLANG_VENV)
	scripts/make_vllm_env.sh $(VLLM_VENV)
	scripts/make_matrix.sh $(SGLANG_VENV) $(VLLM_VENV) out/matrix out/matrix.md hf3fs mooncake sglang-bridge

# 20,000 malformed and random requests to the metadata server; long random programs of the hybrid cache.
fuzz: $(VENV)/.installed
	$(PYTHON) -m pytest -m fuzz tests/metadata_server
	HICACHE_PROGRAMS=50 $(PYTHON) -m pytest -o faulthandler_timeout=0 -n 2 --dist load tests/hybrid/radix/test_programs.py

# The 3FS driver's races, ten seconds each, and Mooncake's outages; calls end within a second of their deadline.
# The file driver killed and interrupted at each step of a change.
races: $(VENV)/.installed
	HICACHE_RACE_SECONDS=10 $(PYTHON) -m pytest tests/backends/hf3fs/test_races.py \
		tests/backends/mooncake/test_outages.py tests/backends/file/test_killed_removals.py tests/backends/file/test_interrupts.py

# Stalled disks, full and read-only ones. Prints each figure.
hostile: $(VENV)/.installed
	$(PYTHON) -m pytest -m hostile -s --durations 0 tests/hostile

# Known weaknesses of the packages in this environment; red for any. One that we live with for a time is ignored here, by
# `--ignore-vuln=ID`, with the reason and until when. It says which packages the index has no advisories for.
audit: $(VENV)/.installed
	$(PYTHON) -m pip_audit --local --skip-editable --progress-spinner off

# A metadata server on SQLite, two on one Redis, and on a cluster of three, killed under the load of eight engines for a minute each.
servers: $(VENV)/.installed
	HICACHE_SERVERS_SECONDS=60 $(PYTHON) -m pytest -s tests/backends/hf3fs/test_several_servers.py

# What each alert fires on, and what not; a part of `make test`.
alerts: $(VENV)/.installed
	$(PYTHON) -m pytest tests/observability/test_rules.py

# Everything that keeps pages in files, beside the system calls alone; what keeps them in Mooncake, beside the library alone; the
# metadata server. docs/benchmarks.md has the tables.
benchmark: $(VENV)/.installed
	scripts/make_sglang_env.sh $(SGLANG_VENV)
	scripts/make_vllm_env.sh $(VLLM_VENV)
	$(PYTHON) benchmarks/field.py --direct
	$(SGLANG_VENV)/bin/python benchmarks/mooncake_vs_raw.py --sglang --clusters 10 --rounds 3
	$(PYTHON) benchmarks/metadata.py --sglang-python $(SGLANG_VENV)/bin/python

$(VENV)/.installed: pyproject.toml constraints.txt scripts/setup.sh
	scripts/setup.sh $(VENV)
	touch $@

# A fifth of the packages, and none of Debian's; what the tests need has them, too.
$(VENV)/.demo: pyproject.toml constraints.txt scripts/setup.sh
	[[ -e $(VENV)/.installed ]] || scripts/setup.sh $(VENV) cli
	touch $@

# sdist, wheel, smoke test of the wheel in a clean environment, bill of materials.
dist: $(VENV)/.installed
	scripts/make_dist.sh $(VENV) out/dist

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
