#!/usr/bin/env bash
# Several machines without a scheduler: the same line on each, HEAD naming the one where they meet:
#   HEAD=node0 NODES=2 recipes/launch/nodes.sh recipe=dense-1.7b-28l gate=sdpa-elementwise
# The folder of the run and the prepared corpus lie on storage that all of them see.
set -euo pipefail

gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
exec torchrun --nnodes "${NODES:?how many machines}" --nproc-per-node "$gpus" --max-restarts 0 \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:?the machine where they meet}:${PORT:-29400}" --rdzv-id gatedlm \
  -m gatedlm.fit "$@" trainer.devices="$gpus" trainer.nodes="$NODES"
