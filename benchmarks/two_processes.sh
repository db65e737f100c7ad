#!/bin/bash
# How much faster two processes evaluate than one, and whether they answer alike. Some minutes on an idle machine.
set -e
place=$(mktemp -d)
mkdir -p cache/models "$place/cache"
ln -s "$PWD/cache/models" "$place/cache/models"
evaluate() {
    rm -rf "$place/cache/answers"
    ${3:-} torchtrain evaluate smollm2 --suite configs/eval/needles.yaml --lengths 1024 --samples "${SAMPLES:-8}" \
        --tasks niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2,niah_multivalue,niah_multiquery \
        "cache=$place/cache" --processes "$1" --out "$place/$2" >"$place/$2.log" 2>&1
}
evaluate 1 first # makes the samples
timed() {
    begin=$(date +%s%N)
    evaluate "$@"
    seconds[$2]=$((($(date +%s%N) - begin) / 1000000))
}
timed 1 1
timed 2 2
timed 1 3 "taskset --cpu-list 0"
echo "one process: ${seconds[1]} ms, on one core: ${seconds[3]} ms; two processes: ${seconds[2]} ms"
python - "$place" <<'P'
import sys
from pathlib import Path
from torchtrain.evaluation.results import read_results
one, two = ([(r.task, r.samples, r.answers) for r in read_results(Path(sys.argv[1]) / n)] for n in "12")
print("the same answers" if one == two else "other answers")
for n in "123":
    print(n, "processes' jobs:", round(sum(r.seconds for r in read_results(Path(sys.argv[1]) / n)), 1), "s")
P
