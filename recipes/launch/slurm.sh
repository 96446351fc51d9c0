#!/usr/bin/env bash
# Under SLURM; what the cluster wants besides goes before the script, the words are those of gatedlm.fit:
#   sbatch --partition=gpu --nodes=8 recipes/launch/slurm.sh recipe=moe-15a2b gate=sdpa-elementwise
# Three minutes before the time is up the run saves itself and the job goes back into the queue, as SLURM itself puts it
# when it is preempted: either way it goes on from its newest checkpoint.
#SBATCH --job-name=gatedlm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

words=("${@:?words of gatedlm.fit, such as recipe=moe-15a2b}")
case $1 in -h | --help) sed -n '2,5s/^# //p' "$0" && exit ;; esac
words+=(trainer.devices="${SLURM_NTASKS_PER_NODE:?give sbatch --ntasks-per-node}")
words+=(trainer.nodes="${SLURM_JOB_NUM_NODES:?start it by sbatch}")
python -m gatedlm.plan "${words[@]}" >/dev/null || exit # one line for wrong words, of which each rank would make a page

# The first rank says by its status that it was stopped, which is no reason to kill the others; lost ones end in time.
srun --kill-on-bad-exit=0 --wait=120 python -m gatedlm.fit "${words[@]}"
status=$?

if [ "$status" -eq 138 ]; then # 128 + SIGUSR1: all is saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
