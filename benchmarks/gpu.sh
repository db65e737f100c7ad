#!/usr/bin/env bash
# What a GPU should show, in under 9 minutes: the tests marked gpu, then anchor against full attention per engine.
#     benchmarks/gpu.sh [FOLDER]      results land in FOLDER (default: benchmarks/results)
# PYTHON chooses the interpreter; the packages of the extras torch, jax and dev must be importable from it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
mkdir -p "$out"

# JAX takes three quarters of the GPU at start unless told not to; torch needs its share.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}

"$python" -c 'import torch, sys; sys.exit(None if torch.cuda.is_available() else "gpu.sh: torch sees no CUDA device")'

echo "==> tests marked gpu"
status=0
# Only the files that have such tests: the others may import packages that a GPU machine lacks.
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.gpu' jaxref torchtrain parity_tests)
timeout 360 "$python" -m pytest "${files[@]}" -m gpu -q --durations=10 --junitxml "$out/gpu-tests.xml" 2>&1 | tee "$out/gpu-tests.txt" || status=$?

echo "==> anchor against full attention"
timeout 150 "$python" benchmarks/attention.py --out "$out/attention.json" 2>&1 | tee "$out/attention.txt" || status=$?

echo "==> results in $out"
exit $status
