#!/bin/bash
#SBATCH --job-name=maxtext-moe-te
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# A MaxText run under Slurm with pyxis and enroot: one launcher on each node, which checks it and starts one process per GPU.
#
#   IMAGE=… OUTPUT=/shared/runs sbatch --nodes=16 slurm.sh model_name=deepseek3-671b overlay=deepseek3-671b-te-gb300 …
#
# What follows the script's name goes to MaxText; a YAML of yours comes first. RUN_NAME names the run; without it the job's name does. Five minutes before the time limit the run saves a
# checkpoint, and the job is queued again and goes on from there.
: "${IMAGE:?the image as enroot names it, registry#name:tag or a .sqsh file}"
: "${OUTPUT:?a folder that all nodes share, for checkpoints and logs}"
RUN_NAME=${RUN_NAME:-$SLURM_JOB_NAME}
GPUS=${SLURM_GPUS_ON_NODE:-8}
for word in "$@"; do
  case $word in
    run_name=* | base_output_directory=* | enable_autocheckpoint=*)
      echo "$word: this script sets it, from RUN_NAME and OUTPUT" >&2
      exit 2
      ;;
  esac
done

logs=$OUTPUT/$RUN_NAME/logs/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
mkdir -p "$logs" || exit 2
host0=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
: "${host0:?scontrol names no host}"
port=$((20000 + SLURM_JOB_ID % 10000))

# --kill-on-bad-exit: when a rank of one node has failed, those of the others wait for it. $SLURM_NODEID is each node's own.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --mpi=none --cpu-bind=none --output="$logs/node-%t.out" \
  --container-image="$IMAGE" --container-mounts="$OUTPUT:$OUTPUT" --no-container-mount-home \
  bash -c 'exec maxtext-moe-te launch --node-rank "$SLURM_NODEID" "$@"' node \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc "$GPUS" --coordinator "$host0:$port" --logs "$logs" --grace 240 \
  train "$@" run_name="$RUN_NAME" base_output_directory="$OUTPUT" enable_autocheckpoint=true
status=$?

if [ "$status" -ne 0 ]; then
  echo "the run ended with status $status; logs: $logs"
  # Every node names its first rank to fail, with the time: the earliest is the cause, the others followed.
  grep -h 'the first to fail was' "$logs"/node-*.out | sort | head -n 1
fi
if [ "$status" -eq 143 ]; then # 128 + SIGTERM: the time limit is near, and a checkpoint was saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
