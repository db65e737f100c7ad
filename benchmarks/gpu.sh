#!/usr/bin/env bash
# What a GPU should show, in under 9 minutes: the tests marked gpu (every engine and its backward pass to 128K against the
# oracle, whole runs: killed and resumed, spread over all GPUs, memory against the plan), then `torchtrain bench`: attention
# and whole steps beside what people would use instead.
#     benchmarks/gpu.sh [FOLDER]      results land in FOLDER (default: benchmarks/results/gpu); begin with summary.md
# PYTHON chooses the interpreter; the packages of the extras torch, jax and dev must be importable from it. `datasets` and
# a network are not needed beyond that.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
rm -f "$out"/{engines,runs}.{xml,txt} "$out"/{attention,step}.{jsonl,json,md,svg,txt} "$out/summary.md"  # of an earlier time

# JAX takes three quarters of the GPU at start unless told not to; torch needs its share.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

"$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "gpu.sh: torch sees no CUDA device")'

status=0
# NAME SECONDS FILES...: the tests marked gpu of some files, for so long at most. Cut off by Ctrl-C, pytest still writes
# down what it has; by SIGTERM it would leave nothing.
run() {
    local name=$1 seconds=$2
    shift 2
    echo "==> tests marked gpu: $name"
    timeout -s INT -k 10 "$seconds" "$python" -m pytest "$@" -m gpu -q --durations=10 --junitxml "$out/$name.xml" 2>&1 | tee "$out/$name.txt" || status=$?
}
run engines 150 parity_tests/tests/test_engines_against_oracle.py torchtrain/tests/test_hf.py
run runs 240 parity_tests/tests/test_gpu_runs.py

bench() {
    echo "==> torchtrain bench $1"
    timeout -s INT -k 10 "$2" "$python" -m torchtrain bench "$1" configs/bench/gpu.yaml --out "$out" 2>&1 | tee "$out/$1.txt" || status=$?
}
bench attention 90
bench step 50

"$python" benchmarks/gpu_summary.py "$out" | tee "$out/summary.md"
echo "==> results in $out"
exit $status
