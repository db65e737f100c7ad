#!/usr/bin/env bash
# Kills a run at random moments, again and again, resumes it each time, and compares what it leaves with a run that was left alone.
#     benchmarks/soak.sh [KILLS] [SEED] [FOLDER]      default: 60 kills, seed 0; FOLDER takes soak.json (default: benchmarks/results)
# Exit code 0: every run ended bit for bit like the one that was not killed.
# PYTHON chooses the interpreter; the packages of the extras torch and dev must be importable from it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
exec "$python" benchmarks/soak.py --kills "${1:-60}" --seed "${2:-0}" --out "${3:-benchmarks/results}"
