#!/bin/bash
# One run on two machines of a SLURM cluster: a process for each GPU.
#
#   sbatch tutorials/manifests/distributed/slurm.sh mine.yaml runs/mine
#
# mine.yaml says training.device: cuda. Only the machine of the first process writes to runs/mine, but the manifest, the
# model and the rows are read on every machine.
#SBATCH --job-name=agilerl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one torchrun a machine; it starts a process for each GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300          # five minutes before the time is over: save, and leave
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

manifest=${1:?usage: sbatch slurm.sh MANIFEST RUN}
run=${2:?usage: sbatch slurm.sh MANIFEST RUN}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A number of the job's own, so that two jobs on one machine do not meet.
port=$((20000 + SLURM_JOB_ID % 20000))

export OMP_NUM_THREADS=1

# A process that dies takes the others along, and torchrun starts all of them again: --resume auto resumes from the last
# checkpoint. --shutdown-timeout gives them the time that an iteration and a checkpoint take.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:$port" --shutdown-timeout 240 \
  -m agilerl train "$manifest" --out "$run" --resume auto &
launcher=$!

# The signal above reaches this script only: srun passes it on to torchrun, and the job asks to be started again.
stopped=
trap 'stopped=1; kill -TERM "$launcher"' TERM
code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do  # a signal has ended the waiting, not the launcher
  code=0
  wait "$launcher" || code=$?
done
if [ -n "$stopped" ] && [ ! -e "$run/summary.json" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
