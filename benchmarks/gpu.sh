#!/usr/bin/env bash
# Test and measure on a GPU in under 10 minutes. The most valuable part is first, and each part has a time limit: whole steps
# against transformers', the engines against the oracle, attention's speed, whole runs (killed and resumed, memory against the
# plan), FlexAttention, which compiles for every shape, and layers with a state. A part that is cut off keeps its results.
#     benchmarks/gpu.sh [FOLDER [CONFIG [PART...]]]
# FOLDER gets the results (default: benchmarks/results/gpu); begin with summary.md. CONFIG names what `torchtrain bench` measures
# (default: configs/bench/gpu.yaml). PARTs: tf32 step engines attention runs flex hybrids (default: all).
# PYTHON chooses the interpreter; the packages of the extras torch, jax and dev must be importable from it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
config=${2:-configs/bench/gpu.yaml}
parts=${*:3}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"
wanted() { [[ -z $parts || " $parts " == *" $1 "* ]]; }

# JAX takes three quarters of the GPU at start unless it is switched off; torch needs its share.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

"$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "gpu.sh: torch sees no CUDA device")'

status=0
# NAME SECONDS ARGUMENTS...: the tests marked gpu, for so long at most. After Ctrl-C pytest still writes down what it has; after
# SIGTERM it would leave nothing.
run() {
    local name=$1 seconds=$2
    shift 2
    wanted "$name" || return 0
    rm -f "$out/$name".*  # of an earlier time
    echo "==> tests marked gpu: $name"
    # Other versions warn of other things: a warning is no failure here. A process that aborts shows why (--capture=sys).
    timeout -s INT -k 10 "$seconds" "$python" -m pytest "$@" -q -W default --capture=sys --durations=10 --junitxml "$out/$name.xml" 2>&1 | tee "$out/$name.txt" || status=$?
}
# NAME SECONDS OVERRIDES...: `torchtrain bench` writes its result after every row.
bench() {
    local name=$1 seconds=$2
    shift 2
    wanted "$name" || return 0
    rm -f "$out/$name".*
    echo "==> torchtrain bench $name"
    timeout -s INT -k 10 "$seconds" "$python" -m torchtrain bench "$name" "$config" --out "$out" "$@" 2>&1 | tee "$out/$name.txt" || status=$?
}
engines="parity_tests/tests/test_engines_against_oracle.py torchtrain/tests/test_hf.py"
if wanted tf32; then "$python" benchmarks/tf32_angles.py 2>&1 | tee "$out/tf32.txt" || status=$?; fi
bench step 60
run engines 100 $engines -m gpu -k "not flex"
bench attention 70 "attention.engines=[flash,flash3,flash4,sdpa]" "attention.rivals=[BOS per document]"
run runs 200 parity_tests/tests/test_gpu_runs.py -m gpu
run flex 90 $engines -m gpu -k flex
run hybrids 60 parity_tests/tests/test_hybrids.py -m gpu

"$python" benchmarks/gpu_summary.py "$out" | tee "$out/summary.md"
echo "==> results in $out"
exit $status
