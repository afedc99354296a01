#!/bin/bash
# Runs the measurements of docs/results on the GPUs of this machine, one after the other:
#
#   scripts/measure.sh [--dry-run] OUT PART...
#
#   tests      the tests that need a GPU: kernels against their reference, the memory plan, TransformerEngine
#   step       a step of 345M and 1.3B under the FP8 recipes, and with TransformerEngine if it is installed
#   graphs     a step of 345M with and without CUDA graphs, at batch 16 and 2
#   linear     a linear layer under each recipe and with TransformerEngine and torchao, and the quantizers
#   fourbit    steps, linear layers and quantizers of NVFP4, its rivals and MXFP4
#   rehearsal  the sources of Blackwell's products on this GPU: kernels, and the layers of 345M and 1.3B, with a table
#   experts    the experts of a 16B layer, grouped and one after the other, with torch and TransformerEngine
#   convert    a step of Hugging Face models under convert, with torchao
#   memory     peak memory with and without --recompute-gelu and --fp8-param-gather
#   peaks      peak memory and steps of 1.3B, 6.7B and 8B by default, at 1 and 16 microbatches, and without its savings
#   activations  peak memory of a 1.3B dense model and a 2B mixture of experts, each saving of deepseek_v3 on and off
#   configs    100 steps of the configs gpt_345m and gpt_1.3b, at a small batch
#   large      10 steps of gpt_6.7b, tensor-parallel on all GPUs
#   scaling    weak scaling from one GPU to all
#   llama      8B without tensor parallelism on all GPUs, 16 accumulations, in this driver and in stock Megatron-LM with
#              TransformerEngine, and where the milliseconds of a step go
#   weak       weak scaling of 1.3B and 8B, without tensor parallelism
#   snapshot   a step with a snapshot of quantization errors
#   layouts    every recipe on every parallel layout that fits the GPUs, against one process
#   schedule   which schedule of gpt_25m has the least spread over seeds
#   recipes    every recipe at 25M, and eight recipes with eight seeds
#   ladder     gaps at 3M, 8M and 25M over one and four epochs
#   rates      learning rates times recipes at 8M
#   variants   Hadamard blocks, MXFP8's rounding and the FP8 forward pass at 8M
#   operands   MXFP8 in one pass, or in one operand of the forward pass, at 3M over four epochs
#   medium     five recipes at 125M
#   lm         fp8_lm and fp8_delayed: step, update and memory, 345M on one GPU and on all, and a short run
#   clients    five steps of 345M in Megatron-LM with TransformerEngine, by quantizer factories and by its own flags
#   megatron   a step of 345M and 1.3B in Megatron-LM, stock, under --spec and with TransformerEngine, and in this driver
#   interrupt  a run on two GPUs, stopped by SIGTERM and resumed, against an undisturbed one
#
# Environment: DATA is the corpus of configs, large and of the studies from schedule to medium; GPUS is the number of GPUs
# (default: all), JOBS the jobs of a study that share one (default: 3), SWEEP further flags of scripts/sweep.py in a study,
# such as "--seeds 1238-1241 --only *mxfp8*" to leave out what has run; CLIENT a checkout of Megatron-LM core_v0.16.1 for
# clients (default: Megatron-LM); of megatron, CLIENTS its folders or tarballs (default: CLIENT), CORES folders with
# megatron-core for those of another release than the installed one, TE a folder with TransformerEngine.
# Each part writes OUT/PART.log and its JSON, and OUT/PART.done after success. A part with that file is not repeated.
# --dry-run only prints the commands.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

dry=""
if [ "${1:-}" = --dry-run ]; then dry=yes && shift; fi
parts=$(sed -n 's/^#   \([a-z]\+\)  .*/\1/p' scripts/measure.sh | paste -sd ' ') # those of the comment above
out=${1:?OUT folder, then some of: $parts}
shift
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count())')}
data=${DATA:-data/enwiki-valid.jsonl.xz}
jobs=${JOBS:-3}
read -ra sweep <<<"${SWEEP:-}"

run() {
    if [ -n "$dry" ]; then
        printf '%s\n' "${*@Q}"
        return
    fi
    echo "+ $*"
    "$@"
}

# train NAME PROCESSES FLAGS...: a run that writes metrics and memory use, but no checkpoint.
train() {
    local name=$1 processes=$2
    shift 2
    run torchrun --standalone --nproc-per-node "$processes" pretrain_gpt.py --no-save --save "$out/$name" \
        --data-path "$data" --split 98,1,1 --eval-iters 0 --log-interval 10 "$@"
}

# mock NAME PROCESSES FLAGS...: a run on mock data that writes metrics and memory use, but no checkpoint.
mock() {
    local name=$1 processes=$2
    shift 2
    run torchrun --standalone --nproc-per-node "$processes" pretrain_gpt.py --no-save --save "$out/$name" \
        --mock-data --eval-iters 0 --log-interval 1 "$@"
}

tests() { run python -m pytest -q -m gpu -rs tests; }

step() {
    run python -m tools.bench step --shapes 345m,1.3b --recipes fp8_delayed,fp8_current,fp8_blockwise --peers te \
        --rounds 2 --out "$out/step.json"
}

graphs() {
    local batch failed=0
    for batch in 16 2; do
        run python -m tools.bench step --shapes 345m --recipes fp8_delayed,fp8_current,fp8_blockwise,mxfp4_rht_sr \
            --micro-batch "$batch" --cuda-graphs --rounds 2 --out "$out/graphs-$batch.json" || failed=1
    done
    return $failed
}

linear() {
    run python -m tools.bench linear --recipes fp8_delayed,fp8_current,fp8_rowwise,fp8_blockwise,mxfp4_rht_sr \
        --peers te,torchao --out "$out/linear.json" &&
        run python -m tools.bench quantize --out "$out/quantize.json"
}

fourbit() {
    local recipes=nvfp4,nvfp4_all,quartet2,mxfp4_rht_sr failed=0
    run python -m tools.bench linear --shapes 345m,1.3b --recipes $recipes --out "$out/fourbit-linear.json" || failed=1
    run python -m tools.bench quantize --shapes 1.3b --formats e2m1,nvfp4 --out "$out/fourbit-quantize.json" || failed=1
    run python -m tools.bench step --shapes 345m,1.3b --recipes $recipes --rounds 2 --out "$out/fourbit-step.json" ||
        failed=1
    return $failed
}

rehearsal() {
    run python -m tools.check_native --rehearse --no-steps --out "$out/rehearsal" &&
        run python -m pytest -q -m gpu tests/kernels/test_mx_gemm.py tests/linear/test_blackwell_mx.py
}

experts() {
    local tokens
    for tokens in 8192 32768; do
        run python -m tools.bench experts --tokens "$tokens" --peers te --out "$out/experts-$tokens.json" || return
    done
}

convert() {
    run python -m tools.bench hugging_face --peers torchao --out "$out/convert.json"
}

memory() {
    local model batch recipe failed=0
    for model in 345m:16 1.3b:8; do
        batch=${model#*:}
        for recipe in bf16 fp8_delayed "fp8_delayed --recompute-gelu" "fp8_delayed --fp8-param-gather --recompute-gelu"; do
            # shellcheck disable=SC2086 # a recipe, and flags after it
            train "memory/${model%:*}-${recipe// --/-}" 1 --config "configs/models/gpt_${model%:*}.yaml" --train-iters 8 \
                --micro-batch-size "$batch" --global-batch-size "$batch" --use-distributed-optimizer --recipe $recipe ||
                failed=1
        done
    done
    return $failed
}

peaks() {
    local model count recipe flags batch failed=0
    local -A models=(
        [1.3b]="1 --config configs/models/gpt_1.3b.yaml --micro-batch-size 8"
        [6.7b]="2 --config configs/models/gpt_6.7b.yaml --micro-batch-size 1 --tensor-model-parallel-size 2"
        [8b]="$gpus --config configs/models/llama3_8b.yaml --micro-batch-size 1 --tensor-model-parallel-size 1"
    )
    local -A samples=([1.3b]=8 [6.7b]=1 [8b]=$gpus) # of a microbatch on all ranks
    for model in 1.3b 6.7b 8b; do
        for count in 1 16; do
            batch=$((samples[$model] * count))
            for recipe in bf16 fp8_delayed fp8_current fp8_blockwise fp8_rowwise mxfp8 mxfp4_rht_sr; do
                for flags in "" "--no-fp8-param-gather --no-save-memory"; do
                    if [ -n "$flags" ] && [[ ! $recipe =~ ^(fp8_current|mxfp8)$ ]]; then continue; fi
                    # shellcheck disable=SC2086 # several words each
                    mock "peaks/$model-$count-$recipe${flags:+-plain}" ${models[$model]} --recipe "$recipe" $flags \
                        --global-batch-size "$batch" --train-iters 5 || failed=1
                done
            done
        done
    done
    return $failed
}

activations() {
    local model recipe failed=0 saved="--recipe-override activations"
    local common="--config configs/models/gpt_1.3b.yaml --swiglu --disable-bias-linear --normalization RMSNorm
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 4 --train-iters 5
        --cuda-graph-impl none" # CUDA graphs hold memory, and not every variant can be captured
    local -A models=(
        [dense]="--ffn-hidden-size 5504"
        [experts]="--num-layers 12 --num-attention-heads 16 --num-experts 16 --moe-router-topk 2
            --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    )
    for model in dense experts; do
        for recipe in bf16 fp8_blockwise "fp8_blockwise $saved.attention_output=e5m6" \
            "fp8_blockwise $saved.swiglu_input=e4m3" "fp8_blockwise --fp8-param-gather" deepseek_v3; do
            # shellcheck disable=SC2086 # several words each
            train "activations/$model-$(tr -cs 'a-z0-9\n' - <<<"$recipe")" 1 $common ${models[$model]} \
                --recipe $recipe || failed=1
        done
    done
    return $failed
}

configs() {
    local model recipe failed=0
    for model in 345m:16 1.3b:8; do
        for recipe in bf16 fp8_delayed mxfp4_rht_sr; do
            train "configs/${model%:*}-$recipe" 1 --config "configs/models/gpt_${model%:*}.yaml" --recipe "$recipe" \
                --train-iters 100 --micro-batch-size "${model#*:}" --global-batch-size "${model#*:}" || failed=1
        done
    done
    return $failed
}

large() {
    local recipe failed=0
    for recipe in bf16 fp8_delayed mxfp4_rht_sr; do
        train "large/6.7b-$recipe" "$gpus" --config configs/models/gpt_6.7b.yaml --recipe "$recipe" \
            --tensor-model-parallel-size "$gpus" --train-iters 10 --global-batch-size 16 --log-interval 1 || failed=1
    done
    return $failed
}

scaling() {
    run python -m tools.bench scaling --gpus "1,$gpus" --shapes 345m,1.3b --recipes bf16,fp8_delayed --out "$out/scaling.json"
}

llama() {
    local recipe flags failed=0
    for recipe in bf16 fp8_current fp8_delayed "fp8_current --fp8-accumulate-wgrad" "fp8_delayed --fp8-accumulate-wgrad"; do
        # shellcheck disable=SC2086 # a recipe, and flags after it
        mock "llama/${recipe// --/-}" "$gpus" --config configs/models/llama3_8b.yaml --tensor-model-parallel-size 1 \
            --global-batch-size $((16 * gpus)) --train-iters 8 --recipe $recipe || failed=1
    done
    for flags in "" "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather" \
        "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"; do
        # shellcheck disable=SC2086
        stock_llama $flags || failed=1
    done
    run python -m tools.bench profile --shapes 8b --recipes bf16,fp8_current,fp8_delayed --gpus "$gpus" \
        --microbatches 4 --out "$out/profile.json" || failed=1
    return $failed
}

# stock_llama FLAGS...: eight steps of the same model in the checkout CLIENT; TE is a folder with TransformerEngine.
stock_llama() {
    local PYTHONPATH=${TE:+$TE:}${PYTHONPATH:-} CUDA_DEVICE_MAX_CONNECTIONS=1
    export PYTHONPATH CUDA_DEVICE_MAX_CONNECTIONS
    run torchrun --standalone --nproc-per-node "$gpus" "${CLIENT:-Megatron-LM}/pretrain_gpt.py" --num-layers 32 \
        --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \
        --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \
        --rotary-base 500000 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights \
        --disable-bias-linear --hidden-dropout 0.0 --attention-dropout 0.0 --micro-batch-size 1 \
        --global-batch-size $((16 * gpus)) --train-iters 8 --lr 3e-4 --bf16 --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 128255 --transformer-impl transformer_engine \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion \
        --no-check-for-nan-in-loss-and-grad --no-gradient-accumulation-fusion --eval-iters 1 \
        --eval-interval 1000 --log-interval 1 --log-throughput "$@"
}

weak() {
    run python -m tools.bench scaling --gpus 1,2,4 --shapes 1.3b --recipes bf16,fp8_delayed --out "$out/weak-1.3b.json" &&
        run python -m tools.bench scaling --gpus 2,4 --shapes 8b --recipes bf16,fp8_delayed --out "$out/weak-8b.json"
}

snapshot() {
    run python -m tools.bench step --shapes 345m --recipes fp8_delayed,mxfp4_rht_sr --snapshots --out "$out/snapshot.json"
}

layouts() {
    run python -m tools.layout_parity --gpus "$gpus" --launches-at-once $((3 * gpus)) --folder "$out/layouts" \
        --out "$out/layout-parity-gpu-$gpus.md"
}

# study NAME SIZE...: a sweep at these sizes, several jobs a GPU, and one report of them with its archive of runs.
study() {
    local name=$1 size code=0 folders=()
    shift
    for size in "$@"; do
        folders+=("$out/$name${size:+-$size}")
        run python scripts/sweep.py "configs/sweeps/$name.yaml" ${size:+--size "$size"} --set train-data-path="$data" \
            --set no-save=true --jobs-per-gpu "$jobs" --out "${folders[-1]}" "${sweep[@]}" || code=1
    done
    run python tools/report.py "${folders[@]}" --out "${folders[0]}-report" --archive "${folders[0]}.safetensors.xz" &&
        return $code
}

schedule() { study gpt_25m_schedule one_change several_changes; }

recipes() { study all_recipes small core; }

ladder() { study token_ladder small 25m; }

rates() { study learning_rate ""; }

variants() {
    local name failed=0
    for name in rht_block_size mxfp8_rounding fp8_forward; do study "$name" 8m || failed=1; done
    return $failed
}

operands() { study mxfp8_operands small; }

medium() { study all_recipes medium; }

lm() {
    run python -m tools.bench step --shapes 345m,1.3b --recipes fp8_delayed,fp8_lm --rounds 2 --out "$out/lm.json" &&
        run python -m tools.bench exchange --gpus "$gpus" --shapes 345m,1.3b --out "$out/exchange.json" &&
        run python -m tools.bench scaling --gpus "1,$gpus" --shapes 345m,1.3b \
            --recipes bf16,fp8_delayed,fp8_lm,fp8_lm_o2 --out "$out/lm-scaling.json" &&
        train lm/345m "$gpus" --config configs/models/gpt_345m.yaml --recipe fp8_lm --train-iters 100 \
            --micro-batch-size 16 --global-batch-size $((16 * gpus))
}

# megatron_lm FLAGS...: five steps in the checkout CLIENT.
megatron_lm() {
    run torchrun --standalone --nproc-per-node "$gpus" "${CLIENT:-Megatron-LM}/pretrain_gpt.py" --num-layers 24 \
        --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
        --micro-batch-size 8 --train-iters 5 --lr 3e-4 --bf16 --mock-data --tokenizer-type NullTokenizer \
        --vocab-size 50256 --transformer-impl transformer_engine --no-gradient-accumulation-fusion --eval-iters 1 \
        --eval-interval 1000 --log-interval 1 "$@"
}

# A factory's losses belong beside those of the flags below it, which select the same numerics.
clients() {
    local failed=0 custom="--fp8-format hybrid --fp8-recipe custom --fp8-quantizer-factory megatron_lowprec.te"
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    megatron_lm || failed=1
    # shellcheck disable=SC2086 # several words
    megatron_lm $custom.fp8_current || failed=1
    megatron_lm --fp8-format hybrid --fp8-recipe tensorwise || failed=1
    # shellcheck disable=SC2086
    megatron_lm $custom.fp8_blockwise || failed=1
    (export NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 && megatron_lm --fp8-format e4m3 --fp8-recipe blockwise) || failed=1
    megatron_lm --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max ||
        failed=1
    return $failed
}

megatron() {
    run python -m tools.bench megatron_lm --clients "${CLIENTS:-${CLIENT:-Megatron-LM}}" --rounds 2 \
        ${CORES:+--megatron-core "$CORES"} ${TE:+--te "$TE"} --out "$out/megatron.json"
}

interrupt() {
    local flags="--config configs/models/gpt_125m.yaml --recipe fp8_mxfp4_rht_sr --train-iters 60 --save-interval 1000
        --micro-batch-size 8 --global-batch-size 16 --hidden-dropout 0.1 --eval-iters 0 --log-interval 1
        --use-distributed-optimizer --deterministic-mode --mock-data"
    local start="torchrun --standalone --nproc-per-node 2 --signals-to-handle SIGTERM pretrain_gpt.py"
    # shellcheck disable=SC2086 # several words each
    run $start --save "$out/whole" $flags || return 1
    if [ -n "$dry" ]; then
        # shellcheck disable=SC2086
        run $start --save "$out/stopped" $flags
        return
    fi
    # shellcheck disable=SC2086
    $start --save "$out/stopped" $flags &
    local torchrun=$!
    until grep -qs '"iteration": 20,' "$out/stopped/metrics.jsonl"; do
        kill -0 "$torchrun" 2>/dev/null || return 1 # it has failed
        sleep 0.2
    done
    kill -TERM "$torchrun"
    wait "$torchrun"
    cat "$out/stopped/requeue" || return 1
    # shellcheck disable=SC2086
    run $start --save "$out/stopped" $flags || return 1
    diff <(grep -o '"lm loss hex": "[^"]*"' "$out/whole/metrics.jsonl") \
        <(grep -o '"lm loss hex": "[^"]*"' "$out/stopped/metrics.jsonl") && echo "the same losses, bit for bit"
}

mkdir -p "$out"
failed=0
for part in "$@"; do
    if [ "$part" = matrix ]; then
        echo "scripts/measure.sh: warning: matrix is now layouts; the next release drops the old name" >&2
        part=layouts
    fi
    if [[ " $parts " != *" $part "* ]]; then
        echo "scripts/measure.sh: $part is none of: $parts" >&2
        exit 2
    fi
    if [ -n "$dry" ]; then
        "$part"
    elif [ ! -e "$out/$part.done" ]; then
        echo "$part: started $(date +%T)"
        if "$part" >"$out/$part.log" 2>&1; then touch "$out/$part.done"; else failed=1; fi
        echo "$part: $([ -e "$out/$part.done" ] && echo done || echo FAILED) $(date +%T), $out/$part.log"
    fi
done
exit $failed
