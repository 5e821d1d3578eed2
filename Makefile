# Everything a person or CI calls. Needs only python3 (3.10 to 3.13) and make.
# Variables: PYTHON (interpreter), VENV (where to install), TORCH (pip requirement),
#            JOBS (test processes), DATA (text for the quickstart), MEGATRON (a checkout of
#            Megatron-LM), ARGS (extra arguments for the command that runs).
PYTHON ?= python3
VENV   ?= .venv
PY      = $(VENV)/bin/python
MINOR   = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null)
JOBS   ?= 2
# Python compiles the modules that it imports, which are few of those installed. Without a cache of
# them every process would compile them again.
PIP     = pip install --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# torch 2.13.0 is the version tested on Python 3.11; other Pythons take the newest that fits.
TORCH  ?= $(if $(filter 3.11,$(MINOR)),torch==2.13.0,torch)

.DEFAULT_GOAL := help
.PHONY: help install quickstart grpo million docs test test-slow test-docs test-recipes test-verl test-te test-megatron-lm parity lint format csrc csrc-cuda fuzz gallery mutants compatibility bench-accuracy bench-advise bench-csrc bench-host bench-linear bench-lm-head bench-memory bench-offload bench-packed bench-packed-published bench-prepare bench-sparse bench-trees bench-video bench-gpu bench-cluster gain clean
.DELETE_ON_ERROR:

help: ## this list
	@echo "megatron_burst: BurstAttention context parallelism for Megatron-Core"; echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo; echo "  Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=<pip requirement> JOBS=$(JOBS) DATA=<text> MEGATRON=<checkout> ARGS=<more arguments>"

install: $(VENV)/.ready-test ## create VENV and install the package with all that its tests need

quickstart: $(VENV)/.ready-examples ## train a small GPT on 4 ranks, compare with 1 rank; DATA=folder, file or .bin/.idx prefix
	@$(PY) examples/quickstart.py $(if $(DATA),--data "$(DATA)") $(ARGS)

grpo: $(VENV)/.ready-examples ## GRPO on branching samples: a tiny GPT learns to sort digits on 4 CPU ranks (3 minutes)
	@$(PY) examples/grpo.py $(ARGS)

million: $(VENV)/.ready-examples ## train one step on 1,000,000 tokens on 4 CPU ranks; ARGS="--tokens 256K" is shorter
	@$(PY) examples/million.py $(if $(DATA),--data "$(DATA)") $(ARGS)

# One file in one process. Short tests run in the order that tests/conftest.py gives their files, so
# that no long one is left for the end. Of the long tail the files with most tests come first.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile

test: $(VENV)/.ready-test ## run the tests, files side by side in JOBS processes
	@$(PYTEST) --no-loadscope-reorder -m "not slow" $(ARGS) < /dev/null

test-slow: $(VENV)/.ready-test ## run the long tail, which `make test` leaves out
	@$(PYTEST) -m slow $(ARGS) < /dev/null

test-docs: ## the commands of docs/quickstart.md in a new environment, on a checkout: MEGATRON=path
	@$(PYTHON) tests/docs_commands.py --megatron "$(MEGATRON)" $(ARGS)

test-recipes: ## the tests with Megatron-Bridge, in an environment of their own, VENV-recipes (2 GB)
	@if $(MAKE) --no-print-directory $(VENV)-recipes/.ready; then \
	  $(VENV)-recipes/bin/python -m pytest tests/recipes $(ARGS) < /dev/null; \
	else echo "test-recipes: SKIPPED: Megatron-Bridge or what it needs cannot be installed here (see above)"; fi

# Python 3.12, which both verl 0.9.1 and the Megatron-Bridge that it works with support.
test-verl: ## the tests with verl and Bridge's diffusion models, in VENV-verl (6 GB); PYTHON=python3.12
	@if [ "$(MINOR)" != 3.12 ]; then echo "test-verl: SKIPPED: needs Python 3.12, $(PYTHON) is $(MINOR)"; \
	elif $(MAKE) --no-print-directory $(VENV)-verl/.ready; then \
	  $(VENV)-verl/bin/python -m pytest tests/plugins/rl/verl tests/plugins/diffusion $(ARGS) < /dev/null; \
	else echo "test-verl: SKIPPED: verl or what it needs cannot be installed here (see above)"; fi

# Exit status 77: something that the build needs is missing, and it has said what.
test-te: ## the tests on Transformer Engine's layers, built into VENV-te (7 GB, once); MEGATRON=path BRIDGE=path
	@$(PYTHON) tests/te/build.py $(VENV)-te --torch "$(TORCH)"; case $$? in \
	  0) rm -f $(VENV)-te/found.xml; \
	     OMP_NUM_THREADS=1 $(VENV)-te/bin/python -m pytest tests/te -rs --megatron "$(MEGATRON)" \
	       --bridge "$(BRIDGE)" \
	       --junitxml=$(VENV)-te/found.xml $(ARGS) < /dev/null; code=$$?; \
	     $(VENV)-te/bin/python tests/compatibility.py --te $(VENV)-te/found.xml; exit $$code;; \
	  77) ;; \
	  *) exit 1;; esac

# Exit status 1 without Python 3.12, which Megatron-LM's tests need.
test-megatron-lm: ## Megatron-LM's own unit tests, stock and with BurstAttention; MEGATRON=path (Python 3.12, hours); ARGS="test_rope -k cpu"
	@if [ "$(MINOR)" != 3.12 ]; then \
	  echo "test-megatron-lm: Megatron-LM's tests need Python 3.12, $(PYTHON) is $(MINOR); make test-megatron-lm PYTHON=python3.12"; exit 1; fi
	@$(MAKE) --no-print-directory $(VENV)-foreign/.ready
	@$(VENV)-foreign/bin/python tests/foreign/run.py --megatron "$(MEGATRON)" $(ARGS) < /dev/null

parity: $(VENV)/.ready-test ## 77 flag combinations of Megatron-LM beside stock, by its event files (Python 3.12, minutes)
	@OMP_NUM_THREADS=1 $(PY) tests/parity/parity.py $(ARGS) < /dev/null

lint: $(VENV)/.ready-test ## ruff (rules and format) and pyright
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright --pythonpath $(PY)

format: $(VENV)/.ready-test ## let ruff rewrite what it can
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

csrc: $(VENV)/.ready-test ## compile the operators of csrc/ into the package; it works without
	@$(PY) csrc/build.py $(ARGS)

csrc-cuda: $(VENV)/.ready-test ## compile the CUDA code of csrc/ for sm_80, sm_90a, sm_100: registers, spills
	@$(PY) csrc/check_cuda.py $(ARGS)

docs: $(VENV)/.ready-docs ## the documentation site into docs/_build/html; a warning is an error
	@$(PY) -m sphinx -E -q -W --keep-going -n -b html docs docs/_build/html $(ARGS) < /dev/null
	@echo "wrote docs/_build/html/index.html"

gallery: $(VENV)/.ready-test ## draw docs/gallery.md, its pictures and those of docs/concepts again
	@$(PY) docs/make_gallery.py $(ARGS)
	@$(PY) docs/make_concepts.py

fuzz: $(VENV)/.ready-test ## random calls, faults and misuses by seed; ARGS='attention --seed 1 --seconds 600'
	@OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(ARGS) < /dev/null

mutants: $(VENV)/.ready-test ## plant faults in the core and see that the tests catch each
	@$(PY) tests/mutants.py $(ARGS) < /dev/null

compatibility: $(VENV)/.ready-test ## which features work with which Megatron, into docs/compatibility.md (Python 3.12, half an hour)
	@$(PY) tests/compatibility.py $(ARGS) < /dev/null

bench-accuracy: $(VENV)/.ready-test ## error of 16-bit rings against float64
	@$(PY) benchmarks/accuracy.py $(ARGS)

bench-advise: $(VENV)/.ready-test ## published and measured tables beside what advise predicts, into docs/advise-accuracy.md; ARGS=--fit fits anew
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.advise $(ARGS)

bench-csrc: csrc ## the compiled operators beside torch's, time on the CPU
	@$(PY) benchmarks/csrc.py $(ARGS)

bench-linear: $(VENV)/.ready-test ## states of linear attention on the emulated cluster, beside all-to-all and gathers, into runs/linear; ARGS=--quick
	@$(PY) -m benchmarks.linear $(ARGS)

bench-lm-head: $(VENV)/.ready-examples ## the fused LM head beside others, time and memory
	@OMP_NUM_THREADS=1 $(PY) benchmarks/lm_head.py $(ARGS)

bench-offload: $(VENV)/.ready-test ## what moving to host memory costs a step: overlap, the fraction of `auto`, bytes
	@$(PY) benchmarks/offload.py $(ARGS)

bench-memory: $(VENV)/.ready-test ## the longest sequences by the memory account; ARGS=--measure: beside live tensors on 4 CPU ranks
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.memory $(ARGS)

bench-packed: $(VENV)/.ready-test ## forecast of packed documents on 64 to 1,024 ranks, simulated, into runs/packed
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.packed $(ARGS)

bench-packed-published: $(VENV)/.ready-test ## packed documents beside published charts, simulated, into docs/packed-published.md (minutes); ARGS="--parts fit"
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.packed.charts $(ARGS)

bench-trees: $(VENV)/.ready-test ## prefix trees beside separate trajectories: tokens and pairs, 64 GPUs simulated; ARGS="--parts counts"
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.trees $(ARGS)

bench-sparse: $(VENV)/.ready-test ## sparse attention: bytes held, the emulated cluster beside gathers, 512 GPUs simulated; ARGS="--parts held"
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.sparse $(ARGS)

gain: $(VENV)/.ready-test ## what is gained over Megatron's own context parallelism, simulated, into docs/gain.md (a minute)
	@OMP_NUM_THREADS=1 $(PY) -m benchmarks.gain $(ARGS)

bench-video: $(VENV)/.ready-test ## attention of a video model on H100, simulated, beside Ulysses, an all-gather and TE's ring
	@$(PY) -m benchmarks.video $(ARGS)

bench-host: $(VENV)/.ready-test ## what attention costs the host, beside a plain ring loop; ARGS=--only dense
	@OMP_NUM_THREADS=1 $(PY) benchmarks/host.py $(ARGS)

bench-prepare: $(VENV)/.ready-test ## what a plan costs
	@$(PY) benchmarks/prepare.py $(ARGS)

bench-gpu: $(VENV)/.ready-test ## tests and speed on one GPU, into runs/gpu (says so where there is none)
	@PYTHON=$(PY) bash benchmarks/gpu.sh $(ARGS)

bench-cluster: $(VENV)/.ready-test ## measure on an emulated cluster of shaped links, into runs/cluster; ARGS=--help, ARGS=--full; SUITES=all or "documents tiles": rivals side by side
	@$(PY) -m benchmarks.cluster $(if $(SUITES),compare $(SUITES),bench) $(ARGS)

# Megatron-Bridge names packages that need a GPU to install; without them, what its recipes import.
BARE = megatron-core==0.16.1 megatron-bridge==0.3.1 nvidia-resiliency-ext triton
NEED = 'transformers<5' 'huggingface-hub<1' 'datasets<5' 'megatron-energon<7' nvidia-modelopt \
       'hydra-core>1.3,<=1.3.2' omegaconf tensorboard pillow six regex defusedxml
$(VENV)-recipes/.ready: pyproject.toml
	@echo "== installing Megatron-Bridge into $(VENV)-recipes (minutes the first time)"
	@$(PYTHON) -m venv --clear $(VENV)-recipes
	@$(VENV)-recipes/bin/python -m $(PIP) -q "$(TORCH)"
	@$(VENV)-recipes/bin/python -m $(PIP) -q --no-deps $(BARE) -e .
	@$(VENV)-recipes/bin/python -m $(PIP) -q $(NEED) \
	  numpy packaging einops psutil pyyaml rich matplotlib pytest hypothesis
	@touch $@

# Of verl and Megatron-Bridge what their engine imports, again without what needs a GPU.
VERL = verl==0.9.1 megatron-bridge==0.6.2 megatron-core==0.19.2 accelerate peft diffusers
VERL_NEED = 'tensordict>=0.8,<=0.10,!=0.9.0' 'transformers>=5.8,<5.11' ray hydra-core omegaconf \
            codetiming pandas 'pyarrow>=19' datasets torchdata dill megatron-energon regex six \
            requests pillow importlib_metadata tensorboard
$(VENV)-verl/.ready: pyproject.toml
	@echo "== installing verl into $(VENV)-verl (minutes the first time)"
	@$(PYTHON) -m venv --clear $(VENV)-verl
	@$(VENV)-verl/bin/python -m $(PIP) -q "$(TORCH)"
	@$(VENV)-verl/bin/python -m $(PIP) -q --no-deps $(VERL) -e .
	@$(VENV)-verl/bin/python -m $(PIP) -q $(VERL_NEED) \
	  numpy packaging einops psutil pyyaml rich pytest hypothesis
	@touch $@

# What Megatron-LM's unit tests import; Megatron-Core itself comes from the checkout.
FOREIGN_NEED = einops psutil pyyaml pybind11 packaging pytest pytest-mock mock pydantic tensorboard \
               transformers requests tiktoken sentencepiece wandb openai aiohttp httpx-aiohttp \
               fastapi uvicorn
$(VENV)-foreign/.ready: pyproject.toml
	@echo "== installing what Megatron-LM's unit tests import into $(VENV)-foreign (minutes the first time)"
	@$(PYTHON) -m venv --clear $(VENV)-foreign
	@$(VENV)-foreign/bin/python -m $(PIP) -q "$(TORCH)"
	@$(VENV)-foreign/bin/python -m $(PIP) -q -e . $(FOREIGN_NEED)
	@touch $@

clean: ## remove virtual environments, caches and build output (runs/ stays)
	rm -rf megatron_burst/kernels/libcsrc.so .venv* build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of extras: a second call does nothing, a new pyproject.toml installs again.
$(VENV)/.ready-%: pyproject.toml setup.py
	@command -v $(PYTHON) > /dev/null || { \
	  echo "make: there is no $(PYTHON) here; name an interpreter: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	  "make: $(PYTHON) is Python %d.%d; megatron_burst needs 3.10 to 3.13: make PYTHON=python3.12" % v)'
	@$(PY) -m pip --version > /dev/null 2>&1 || { echo "== creating $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "make: $(PYTHON) cannot create a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }; }
	@echo "== installing $(TORCH) and megatron_burst[$*] into $(VENV) (minutes the first time: torch is large)"
	@$(PY) -m $(PIP) "$(TORCH)"
	@$(PY) -m $(PIP) -e ".[$*]"
	@touch $@ $(if $(filter test,$*),$(VENV)/.ready-examples)
