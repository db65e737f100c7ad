#!/usr/bin/env bash
# Kills and stops tiny runs as they begin a counted system call (by strace), again and again, resumes each, and compares what it leaves
# with a run that was left alone.
#     benchmarks/soak.sh [KILLS] [SEED] [FOLDER] [MORE...]   default: 1000 kills, seed 0; FOLDER takes soak.json (default:
#                                                            benchmarks/results), and a later call goes on from the one that is there
# MORE: --seconds N ends after that time, to be gone on with; --anew forgets what was done; --saves kills instead at
# every system call of the threads that write checkpoints beside the steps, once each.
# Exit code 0: every run ended bit for bit like the one that was not killed.
# PYTHON chooses the interpreter; the packages of the extras torch and dev must be importable from it, and strace installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
exec "$python" benchmarks/soak.py --kills "${1:-1000}" --seed "${2:-0}" --out "${3:-benchmarks/results}" "${@:4}"
