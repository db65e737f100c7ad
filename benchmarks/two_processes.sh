#!/bin/bash
# How much faster two processes evaluate than one, and whether they answer alike. Some minutes on an idle machine.
set -e
place=$(mktemp -d)
mkdir -p cache/models "$place/cache"
ln -s "$PWD/cache/models" "$place/cache/models"
evaluate() {
    rm -rf "$place/cache/answers"
    torchtrain evaluate smollm2 --suite configs/eval/needles.yaml --lengths 1024 --samples "${SAMPLES:-8}" \
        "cache=$place/cache" --processes "$1" --out "$place/$2" >"$place/$2.log" 2>&1
}
evaluate 1 first # makes the samples
for n in 1 2; do
    begin=$(date +%s%N)
    evaluate $n $n
    seconds[n]=$((($(date +%s%N) - begin) / 1000000))
    echo "$n process(es): ${seconds[n]} ms"
done
echo "ratio: $(awk "BEGIN { print ${seconds[1]} / ${seconds[2]} }")"
python - "$place" <<'P'
import sys
from pathlib import Path
from torchtrain.evaluation.results import read_results
one, two = ([(r.task, r.samples, r.answers) for r in read_results(Path(sys.argv[1]) / n)] for n in "12")
print("the same answers" if one == two else "other answers")
P
