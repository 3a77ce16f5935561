#!/usr/bin/env bash
# Pretrains a model of examples/models on the GPUs of this node, or of many.
#   bash examples/pretrain.sh llama3_8b                                     this node, made-up data
#   bash examples/pretrain.sh llama3_8b --turbo-config examples/recipes/mxfp4.yaml --train-iters 200000
#   srun --ntasks-per-node 1 bash examples/pretrain.sh llama3_70b ...       many nodes; or set NNODES, NODE_RANK, MASTER_ADDR
#   bash examples/pretrain.sh llama3_8b --print                             the command, and nothing else
# All else on the command line goes to Megatron and wins over the model's file: --tensor-model-parallel-size 2, --num-layers 4 ...
#
#   DATA_PATH        prefix of a dataset that Megatron's preprocess_data.py wrote, or several with weights; unset: made-up tokens
#   TOKENIZER_MODEL  a folder or name for HuggingFaceTokenizer; needed with DATA_PATH
#   CHECKPOINT_PATH  save there, and go on from there
#   GPUS_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   default: all GPUs here, or what Slurm says
#   PYTHON           the interpreter (default: python3)
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"

fail() {
    echo "error: $1" >&2
    exit 1
}

models() {
    (cd "$here/models" && printf '%s ' *.args | sed 's/\.args//g')
}

model="${1:-}"
file="$here/models/$model.args"
if [ -z "$model" ] || [ "${model#-}" != "$model" ]; then
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    echo "Models: $(models)"
    case "$model" in -h | --help) exit 0 ;; esac
    fail "the first argument is the model"
fi
[ -f "$file" ] || fail "no model '$model'. Known: $(models)"
shift

arguments=()
while read -r flag value; do
    case "$flag" in '' | '#'*) continue ;; esac
    arguments+=("$flag" ${value:+"$value"})
done <"$file"

# Where the ranks meet.
NNODES="${NNODES:-${SLURM_NNODES:-1}}"
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"
if [ -z "${MASTER_ADDR:-}" ] && [ "$NNODES" -gt 1 ]; then
    [ -n "${SLURM_JOB_NODELIST:-}" ] || fail "NNODES=$NNODES: set MASTER_ADDR to the first node's address, and NODE_RANK"
    MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
count_gpus() {
    "$python" -c 'import torch; print(torch.cuda.device_count())' || fail "PYTHON=$python cannot import torch"
}
GPUS_PER_NODE="${GPUS_PER_NODE:-$(count_gpus)}"
[ "$GPUS_PER_NODE" -gt 0 ] || fail "torch sees no GPU here. Set GPUS_PER_NODE to see the command with --print; examples/pretrain_gpt.py --device cpu trains without one"

# Data, tokenizer, checkpoints.
if [ -n "${DATA_PATH:-}" ]; then
    [ -n "${TOKENIZER_MODEL:-}" ] || fail "DATA_PATH is set and TOKENIZER_MODEL is not: the tokens need their vocabulary"
    read -r -a data <<<"$DATA_PATH"
    arguments+=(--data-path "${data[@]}" --split 99,1,0)
else
    arguments+=(--mock-data --split 99,1,0)
fi
if [ -n "${TOKENIZER_MODEL:-}" ]; then
    arguments+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
else
    arguments+=(--tokenizer-type NullTokenizer)
fi
if [ -n "${CHECKPOINT_PATH:-}" ]; then
    arguments+=(--save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --save-interval 1000 --ckpt-format torch_dist)
fi

# What every model here is trained with.
arguments+=(
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --cross-entropy-loss-fusion --cross-entropy-fusion-impl native
    --train-iters 100 --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --distributed-timeout-minutes 60
)

launcher=("$python" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS_PER_NODE")
if [ "$NNODES" -gt 1 ]; then
    launcher+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    launcher+=(--standalone)
fi

rest=()
print=
for argument in "$@"; do
    case "$argument" in
        --print) print=1 ;;
        --data-path | --data-path=*) fail "--data-path: name the data by DATA_PATH, and its vocabulary by TOKENIZER_MODEL, in front of the command" ;;
        *) rest+=("$argument") ;;
    esac
done
command=("${launcher[@]}" "$here/pretrain_gpt.py" "${arguments[@]}" "${rest[@]}")
if [ -n "$print" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
exec "${command[@]}"
