#!/bin/sh
# Damaged inputs for every command: a user's file or option gives one line, never a traceback, never a hang.
#
#     benchmarks/fuzz.sh                        # 3,000 inputs from seed 0
#     benchmarks/fuzz.sh --seed 7 --first 1200  # go on where another run stopped
#     benchmarks/fuzz.sh --seed 7 --only 1234   # one input again, its folder kept
cd "$(dirname "$0")/.." || exit 2
exec env OMP_NUM_THREADS=1 PYTHONPATH="$PWD" "${PYTHON:-.venv/bin/python}" -m benchmarks.fuzz "$@"
