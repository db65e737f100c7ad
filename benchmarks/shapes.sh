#!/bin/sh
# Every config of the paper at full size on a device of shapes, without a GPU: memory of one of eight ranks against `torchtrain plan`,
# what is held when most is, every wait of the host for the device by its line, and what is copied to it.
#     benchmarks/shapes.sh [FOLDER]      default: benchmarks/results; one NAME.shapes.txt each
# DeepSpeed's offloaded optimizer would lie in the memory of this machine, so two depths stand for all layers: they are alike.
cd "$(dirname "$0")/.." || exit 2
out=${1:-benchmarks/results}
mkdir -p "$out"
for config in configs/paper/*-*.yaml; do
    name=$(basename "$config" .yaml)
    OMP_NUM_THREADS=1 PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 "${PYTHON:-.venv/bin/python}" -W ignore -m torchtrain.tests.shapes_only \
        "$config" -n 8 --extrapolate train.sequences_per_step=1 >"$out/$name.shapes.txt" || exit 1
    echo "$name: $(sed -n 's/^all layers *//p' "$out/$name.shapes.txt")"
done
