#!/usr/bin/env bash
# A corpus prepared by many processes, each with its share of the Hub's files; again for those that did not finish:
#   sbatch --array=0-63 recipes/launch/prepare.sh recipe=dense-1.7b-28l
# Without SLURM: SLURM_ARRAY_TASK_COUNT=8 SLURM_ARRAY_TASK_ID=0 recipes/launch/prepare.sh recipe=..., and so on up to 7.
#SBATCH --job-name=gatedlm-prepare
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A-%a.log
set -euo pipefail

exec python -m gatedlm.prepare "${@:?words of gatedlm.prepare, such as recipe=dense-1.7b-28l}" \
  shards="${SLURM_ARRAY_TASK_COUNT:?give sbatch --array=0-63}" shard="$SLURM_ARRAY_TASK_ID"
