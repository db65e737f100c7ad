#!/bin/bash
# Two nodes of eight GPUs, one run. Submit it again with the same line after anything: --resume begins or goes on.
#   sbatch examples/slurm.sh configs/paper/llama2-7b-64k-anchor.yaml runs/llama2-7b-64k-anchor
#SBATCH --job-name=anchorline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=$1 folder=$2
# The folder must be on storage that all nodes see; the first node is where the others meet.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Seconds torchrun leaves its processes between SIGTERM and SIGKILL: a step and a save must fit (30 by default; torch 2.13 knows it).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280
exec srun --cpus-per-task "${SLURM_CPUS_ON_NODE%%[!0-9]*}" torchrun \
  --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
  --rdzv_backend c10d --rdzv_endpoint "$head:29500" --rdzv_id "$SLURM_JOB_ID" \
  -m torchtrain train "$config" --resume "run.folder=$folder"
