#!/usr/bin/env bash
# One machine, a process for each of its GPUs; the words are those of gatedlm.fit:
#   recipes/launch/node.sh recipe=dense-500m gate=sdpa-elementwise
# GPUS=4 takes fewer. Ctrl-C and SIGTERM save, the same line goes on.
set -euo pipefail

gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
words=("${@:?words of gatedlm.fit, such as recipe=dense-500m}" trainer.devices="$gpus" trainer.nodes=1)
python -m gatedlm.plan "${words[@]}" >/dev/null # one line for wrong words, of which each rank would make a page
exec torchrun --standalone --nproc-per-node "$gpus" -m gatedlm.fit "${words[@]}"
