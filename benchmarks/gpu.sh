#!/usr/bin/env bash
# All that needs a GPU, in under 8 minutes: tests, the paper's layers, gates, probes, a run of 150 M parameters.
#
#     benchmarks/gpu.sh
#
# Downloads nothing; needs torch from 2.11 on, pytest, rich and lightning. The run and the plan's estimates need omegaconf,
# datasets and tokenizers too: wheels of what is missing may lie in benchmarks/wheels (pip download -d benchmarks/wheels).
# Results go to benchmarks/results/gpu-*.json. Without a GPU the same steps run at toy sizes and leave nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} GATEDLM_CACHE=${GATEDLM_CACHE:-$scratch/cache} KINETO_LOG_LEVEL=6

if compgen -G 'benchmarks/wheels/*.whl' >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --target "$scratch/site" benchmarks/wheels/*.whl
    export PYTHONPATH=$PYTHONPATH:$scratch/site
fi

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    rounds=7
    words=(trainer.accelerator=gpu trainer.precision=auto trainer.compile=true trainer.steps=300 trainer.threads=0
        model.layers=12 model.width=1024 model.heads=16 model.kv_heads=8 model.head_dim=64 model.ffn=2816
        data.vocab=4096 data.context=1024 data.batch=16 optim.lr=1e-3)
else
    rounds=2
    words=(scale=nano trainer.accelerator=cpu)
fi

"$python" -m pytest --noconftest -q -o addopts= -p no:cacheprovider tests/test_fast.py
"$python" -m benchmarks.gpu "$rounds"
if "$python" -c 'import omegaconf, datasets, tokenizers' 2>/dev/null; then
    "$python" -m gatedlm.fit recipe=quickstart name=gpu-run "out=$scratch" "${words[@]}"
    [ "$rounds" = 2 ] || cp "$scratch/gpu-run/ledger.json" benchmarks/results/gpu-run.json
else
    echo "the run is left out: omegaconf, datasets or tokenizers are not installed" >&2
fi
