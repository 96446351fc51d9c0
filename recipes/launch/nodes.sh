#!/usr/bin/env bash
# Several machines without a scheduler: the same line on each, HEAD naming the one where they meet:
#   HEAD=node0 NODES=2 recipes/launch/nodes.sh recipe=dense-1.7b-28l gate=sdpa-elementwise
# The folder of the run and the prepared corpus lie on storage that all of them see.
set -euo pipefail

meet=${HEAD:?the machine where they meet}:${PORT:-29400}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
words=("${@:?words of gatedlm.fit, such as recipe=dense-500m}")
words+=(trainer.devices="$gpus" trainer.nodes="${NODES:?how many machines}")
python -m gatedlm.plan "${words[@]}" >/dev/null # one line for wrong words, of which each rank would make a page
exec torchrun --nnodes "$NODES" --nproc-per-node "$gpus" --max-restarts 0 \
  --rdzv-backend c10d --rdzv-endpoint "$meet" --rdzv-id gatedlm -m gatedlm.fit "${words[@]}"
