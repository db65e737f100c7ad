#!/usr/bin/env bash
# Test and measure on a GPU in some 12 minutes. The most valuable part is first, and each part has a time limit: layers of real
# size against transformers', attention's speed on rows seen and not seen, the engines against the oracle, whole runs (killed and
# resumed, memory against the plan), FlexAttention, which compiles for every shape, and layers with a state. A part that is cut
# off keeps its results. Parts that need no package but torch and transformers: layers, attention.
#     benchmarks/gpu.sh [FOLDER [PART...]]
# FOLDER gets the results (default: benchmarks/results/gpu); begin with summary.md. PARTs: tf32 layers attention whole engines runs
# flex hybrids (default: all).
# PYTHON chooses the interpreter; the packages of the extras torch, jax and dev must be importable from it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
parts=${*:2}
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
# NAME SECONDS: what `benchmarks.speed` measures; it writes its results after every case.
measure() {
    local name=$1 seconds=$2
    wanted "$name" || return 0
    rm -f "$out/$name".*
    echo "==> measuring: $name"
    PYTORCH_ALLOC_CONF=expandable_segments:True timeout -s INT -k 10 "$((seconds + 60))" \
        "$python" -m benchmarks.speed "$name" --seconds "$seconds" --out "$out" 2>&1 | tee "$out/$name.txt" || status=$?
}
# A whole run of SmolLM2 under the anchor and one under full attention; their timing.jsonl stays.
whole() {
    wanted whole || return 0
    for variant in anchor full; do
        rm -rf "$out/run-$variant"
        echo "==> a whole run: $variant"
        timeout -s INT -k 10 60 "$python" -m torchtrain train configs/demo.yaml "run.folder=$out/run-$variant" "pack.variant=$variant" \
            pack.sequence_length=16384 train.steps=8 save.every=0 model.activation_checkpointing=auto 2>&1 | tee "$out/run-$variant.log" || status=$?
        rm -rf "$out/run-$variant/model"
    done
}
engines="parity_tests/tests/test_engines_against_oracle.py torchtrain/tests/test_hf.py"
if wanted tf32; then "$python" benchmarks/tf32_angles.py 2>&1 | tee "$out/tf32.txt" || status=$?; fi
measure layers 150
measure attention 75
whole
run engines 100 $engines -m gpu -k "not flex"
run runs 200 parity_tests/tests/test_gpu_runs.py -m gpu
run flex 90 $engines -m gpu -k flex
run hybrids 60 parity_tests/tests/test_hybrids.py -m gpu

"$python" benchmarks/gpu_summary.py "$out" | tee "$out/summary.md"
echo "==> results in $out"
exit $status
