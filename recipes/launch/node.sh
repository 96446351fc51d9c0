#!/usr/bin/env bash
# One machine, a process for each of its GPUs; the words are those of gatedlm.fit:
#   recipes/launch/node.sh recipe=dense-500m gate=sdpa-elementwise
# GPUS=4 takes fewer. Ctrl-C and SIGTERM save, the same line goes on.
set -euo pipefail

words=("${@:?words of gatedlm.fit, such as recipe=dense-500m}")
case $1 in -h | --help) sed -n '2,4s/^# //p' "$0" && exit ;; esac
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)} || {
  echo "nvidia-smi finds no GPU here: say how many by GPUS=N" >&2
  exit 2
}
words+=(trainer.devices="$gpus" trainer.nodes=1)
python -m gatedlm.plan "${words[@]}" >/dev/null # one line for wrong words, of which each rank would make a page
exec torchrun --standalone --nproc-per-node "$gpus" -m gatedlm.fit "${words[@]}"
