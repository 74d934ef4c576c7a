# Two commands need nothing but Python 3.11 and a C compiler:
#   make demo    a real training run on 4 ranks
#   make test    all tests, on MPICH and on Open MPI
# Each MPI has a virtual environment of its own, since their wheels overwrite each other's files.
.SECONDARY:

PYTHON ?= python3
VENV := .venv
PIP := -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml setup.py mpiquant/_kernels.pyx $(wildcard csrc/*)
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1

.PHONY: demo test test-unit test-mpich test-openmpi test-torch fuzz lint docs claims-main claims-runtime \
  claims-lab claims-aqat claims-cerar claims-sparse claims-sim peers study compare clean

demo: $(VENV)/mpich.demo
	timeout 240 $(VENV)/mpich/bin/mpiexec -n 4 $(VENV)/mpich/bin/python -m mpi4py \
	  docs/examples/train_mnist.py --plot train_mnist.png

test: test-unit test-mpich test-openmpi

test-unit: $(VENV)/mpich.test
	$(VENV)/mpich/bin/python -m pytest -q -n auto tests/unit docs/examples

test-mpich test-openmpi: test-%: $(VENV)/%.test
	$(VENV)/$*/bin/python tests/run_mpi.py
	$(VENV)/$*/bin/python -m pytest -q --timeout=60 tests/jobs

# Broken bytes for everything that decodes bytes of other ranks, under gcc's sanitizers.  The flags
# behind -fPIC are those of setup.py; -g1 and checks by calls are there to compile in half the time.
FUZZ := build/fuzz
SANITIZED := gcc -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -O1 \
  -g1 -fno-omit-frame-pointer --param asan-instrumentation-with-call-threshold=0 -fPIC -std=c11 \
  -ffp-contract=off -Wno-psabi -DPy_LIMITED_API=0x030B0000

fuzz: $(VENV)/mpich.test
	$(MAKE) --no-print-directory --jobs 2 $(FUZZ)/_kernels.abi3.so
	timeout 600 env PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
	  $(VENV)/mpich/bin/python tests/fuzz/fuzz_wire.py --kernels $(FUZZ)/_kernels.abi3.so

$(FUZZ)/_kernels.abi3.so: $(patsubst csrc/%.c,$(FUZZ)/%.o,$(wildcard csrc/*.c)) $(FUZZ)/_kernels.o
	$(SANITIZED) -shared $^ -o $@

$(FUZZ)/%.o: csrc/%.c $(SOURCES)
	mkdir -p $(FUZZ)
	$(SANITIZED) -c $< -o $@

# The C text that Cython wrote while the environment was built.
$(FUZZ)/_kernels.o: $(VENV)/mpich.built
	mkdir -p $(FUZZ)
	$(SANITIZED) -Icsrc -c mpiquant/_kernels.c -o $@ \
	  -I"$$($(VENV)/mpich/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')"

lint: $(VENV)/mpich.lint
	$(VENV)/mpich/bin/ruff check .
	$(VENV)/mpich/bin/ruff format --check .
	PATH="$(VENV)/mpich/bin:$$PATH" $(VENV)/mpich/bin/cython-lint mpiquant/_kernels.pyx
	$(VENV)/mpich/bin/mypy

docs: $(VENV)/mpich.docs
	$(VENV)/mpich/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The PyTorch face; not a part of `make test`, for the size of PyTorch.
test-torch: $(VENV)/torch.test
	$(VENV)/torch/bin/python tests/run_mpi.py --tests torch --sizes 1,2,4

# Every claim of the README, measured on this machine; nothing else should run meanwhile.
claims-main: $(VENV)/mpich.demo $(VENV)/mpich.test $(VENV)/openmpi.test
	$(VENV)/mpich/bin/python bench/claims/main.py

claims-runtime: $(VENV)/mpich.test $(VENV)/openmpi.test
	$(VENV)/mpich/bin/python bench/claims/runtime.py

claims-lab: $(VENV)/mpich.test $(VENV)/openmpi.test $(VENV)/intel.built
	$(VENV)/mpich/bin/python bench/claims/lab.py

# Bits that follow the clock, on emulated links that change.
claims-aqat: $(VENV)/mpich.test $(VENV)/openmpi.test
	$(VENV)/mpich/bin/python bench/claims/aqat.py

# The coded ring, against its formulas, the ring and MPI's own allreduce.
claims-cerar: $(VENV)/mpich.demo $(VENV)/mpich.test
	$(VENV)/mpich/bin/python bench/claims/cerar.py

# Sparse sums, their costs, and training with them.
claims-sparse: $(VENV)/mpich.demo $(VENV)/mpich.test $(VENV)/torch.test
	$(VENV)/mpich/bin/python bench/claims/sparse.py

# Simulations, predictions and `auto`, against real runs.
claims-sim: $(VENV)/mpich.test $(VENV)/openmpi.test
	$(VENV)/mpich/bin/python bench/claims/sim.py

# Other allreduces, and our own at many sizes, rates and numbers of ranks, on emulated clusters;
# the results go to bench/results.
peers: $(VENV)/mpich.test $(VENV)/openmpi.built $(VENV)/intel.built $(VENV)/torch.made
	$(VENV)/mpich/bin/python bench/peers

study: $(VENV)/mpich.test $(VENV)/openmpi.built
	$(VENV)/mpich/bin/python bench/study.py

# All ways to exchange gradients in real training; needs about an hour.
compare: $(VENV)/mpich.demo $(VENV)/torch.test
	$(VENV)/mpich/bin/python bench/compare.py
	$(VENV)/mpich/bin/python docs/examples/compare_report.py bench/results/compare.json docs/images

clean:
	rm -rf $(VENV) build *.egg-info mpiquant/_kernels.c mpiquant/*.so docs/_build

# Environments.  An extra's packages are added without building the package again.
extra = $(shell $(PYTHON) -c "import tomllib; \
  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])")

$(VENV)/%.built: $(SOURCES)
	test -x $(VENV)/$*/bin/python || $(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/python $(PIP) --editable '.[$*]'
	touch $@

EXTRAS := demo test lint docs

$(EXTRAS:%=$(VENV)/mpich.%): $(VENV)/mpich.%: $(VENV)/mpich.built pyproject.toml
	$(VENV)/mpich/bin/python $(PIP) $(call extra,$*)
	touch $@

$(VENV)/openmpi.test: $(VENV)/openmpi.built pyproject.toml
	$(VENV)/openmpi/bin/python $(PIP) $(call extra,test)
	touch $@

# These versions of PyTorch are for the CPU here, and run on it elsewhere.
$(VENV)/torch.made:
	$(PYTHON) -m venv $(VENV)/torch
	$(VENV)/torch/bin/python $(PIP) torch==2.13.0 numpy
	touch $@

$(VENV)/torch.test: $(VENV)/torch.made $(SOURCES)
	$(VENV)/torch/bin/python $(PIP) --editable '.[mpich,torch,test]'
	touch $@
