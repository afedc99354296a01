#!/bin/bash
# Runs the measurements of docs/results on the GPUs of this machine, one after the other, or groups of them side by side,
# each on a GPU of its own with the files in OUT/GPU:
#
#   scripts/measure.sh [--dry-run] OUT PART...
#   scripts/measure.sh [--dry-run] OUT PART... -- PART... -- PART...
#
#   tests      the tests that need a GPU: kernels against their reference, the memory plan, TransformerEngine
#   step       a step of 1.3B and 345M under the FP8 and MX recipes, and with TransformerEngine if it is installed
#   graphs     a step with and without CUDA graphs: 1.3B under FP8-LM, 345M at batch 2
#   muon       a step of 345M under Muon and AdamW
#   options    a step of 1.3B with and without --fp8-accumulate-wgrad, and one of latent attention
#   linear     linear layers under the FP8 recipes and with TransformerEngine and torchao, and SwiGLU in casts
#   fourbit    steps, linear layers and quantizers of NVFP4, its rivals and MXFP4
#   rehearsal  the sources of Blackwell's products on this GPU: kernels, and the layers of 345M and 1.3B, with a table
#   experts    the experts of a 16B layer, grouped and one after the other, with torch and TransformerEngine
#   convert    a step of Hugging Face models under convert, with torchao, of experts, and over frozen weights
#   memory     peak memory with and without --recompute-gelu and --fp8-param-gather
#   peaks      peak memory and steps of 1.3B, and of 6.7B on two GPUs, at 16 and 1 microbatches, without savings, and
#              without cached weights
#   activations  peak memory of a 1.3B dense model and a 2B mixture of experts, each saving of deepseek_v3 on and off
#   configs    100 steps of the configs gpt_345m and gpt_1.3b, at a small batch
#   large      10 steps of gpt_6.7b, tensor-parallel on all GPUs
#   scaling    weak scaling from one GPU to two, four and all, of 8B from two to four
#   llama      8B without tensor parallelism on all GPUs, 16 and 1 accumulations: steps and peaks in this driver, where the
#              milliseconds of a step go, and steps in CLIENT with TransformerEngine
#   gathers    a step with and without FP8 gathers and FP8 dispatch, over all GPUs
#   snapshot   a step with a snapshot of quantization errors
#   layouts    every recipe on every parallel layout that fits the GPUs, against one process
#   schedule   which schedule of gpt_25m has the least spread over seeds
#   recipes    every recipe at 25M, and eight recipes with eight seeds
#   ladder     gaps at 3M, 8M and 25M over one and four epochs
#   rates      learning rates times recipes at 8M
#   variants   Hadamard blocks, MXFP8's rounding and the FP8 forward pass at 8M
#   operands   MXFP8 in one pass, or in one operand of the forward pass, at 3M over four epochs
#   medium     five recipes at 125M
#   lm         FP8-LM's gradients beside fp32's: a step of 1.3B and 345M on all GPUs, and the exchange by itself
#   clients    five steps of 345M in Megatron-LM with TransformerEngine, by quantizer factories and by its own flags
#   megatron   a step of 345M and 1.3B in Megatron-LM, stock, under --spec and with TransformerEngine, and in this driver
#   interrupt  a run on two GPUs, stopped by SIGTERM and resumed, against an undisturbed one
#
# Environment: DATA is the corpus of configs, large and of the studies from schedule to medium; GPUS is the number of GPUs
# (default: all), JOBS the jobs of a study that share one (default: 3), SWEEP further flags of scripts/sweep.py in a study,
# such as "--seeds 1238-1241 --only *mxfp8*" to leave out what has run; WORKERS those of tests (default: one a core), TESTS
# their files and folders, each choice with an OUT of its own (default: all); CLIENT a checkout of Megatron-LM core_v0.16.1 for clients (default: Megatron-LM)
# and llama; of megatron, CLIENTS its folders or tarballs (default: CLIENT), CORES folders with megatron-core for those of
# another release than the installed one, TE a folder with TransformerEngine, of llama too.
# Each part writes OUT/PART.log and its JSON, and OUT/PART.done after success. A part with that file is not repeated,
# nor is a step of it: the same call continues one that was stopped.
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

# once NAME COMMAND...: unless it has succeeded before.
once() {
    local mark=$out/$1.done
    shift
    [ -e "$mark" ] && return
    run "$@" && { [ -n "$dry" ] || { mkdir -p "$(dirname "$mark")" && touch "$mark"; }; }
}

# bench NAME ARGUMENTS...: a measurement of tools.bench.
bench() { once "$1" python -m tools.bench "${@:2}" --out "$out/$1.json"; }

# train NAME PROCESSES FLAGS...: a run that writes metrics and memory use, but no checkpoint.
train() {
    once "$1" torchrun --standalone --nproc-per-node "$2" pretrain_gpt.py --no-save --save "$out/$1" \
        --data-path "$data" --split 98,1,1 --eval-iters 0 --log-interval 1 "${@:3}"
}

# mock NAME PROCESSES FLAGS...: a run on mock data that writes metrics and memory use, but no checkpoint.
mock() {
    once "$1" torchrun --standalone --nproc-per-node "$2" pretrain_gpt.py --no-save --save "$out/$1" \
        --mock-data --eval-iters 0 --log-interval 1 "${@:3}"
}

tests() {
    # shellcheck disable=SC2086 # several words
    run python -m pytest -m gpu -n "${WORKERS:-$(nproc)}" -v -rs ${TESTS:-tests}
}

step() {
    local model failed=0
    for model in 1.3b 345m; do
        bench step-$model step --shapes $model --peers te \
            --recipes fp8_delayed,fp8_current,fp8_blockwise,mxfp8,mxfp4_rht_sr,fp8_lm_o2 || failed=1
    done
    return $failed
}

graphs() {
    local failed=0
    bench graphs-lm step --shapes 1.3b --recipes fp8_lm_o2,fp8_lm_o3 --cuda-graphs || failed=1
    bench graphs-2 step --shapes 345m --recipes fp8_delayed,fp8_current,fp8_blockwise,mxfp4_rht_sr \
        --micro-batch 2 --cuda-graphs || failed=1
    return $failed
}

muon() { bench muon step --shapes 345m --recipes fp8_current,mxfp4_rht_sr --optimizers muon; }

options() {
    local recipe failed=0
    for recipe in fp8_delayed "fp8_delayed --no-fp8-accumulate-wgrad" \
        fp8_current "fp8_current --no-fp8-accumulate-wgrad"; do
        # shellcheck disable=SC2086 # a recipe, and flags after it
        mock "options/${recipe// --/-}" 1 --config configs/models/gpt_1.3b.yaml --micro-batch-size 8 \
            --global-batch-size 32 --train-iters 12 --recipe $recipe || failed=1
    done
    mock options/latent 1 --config configs/models/deepseek_tiny.yaml --recipe fp8_current --train-iters 12 || failed=1
    return $failed
}

linear() {
    local failed=0
    bench linear linear --shapes 345m,1.3b,6.7b --linears fc1,proj --peers te,torchao --rounds 2 \
        --recipes fp8_delayed,fp8_current,fp8_rowwise,fp8_blockwise || failed=1
    bench ops ops --shapes 8b --ops swiglu,cast || failed=1
    return $failed
}

fourbit() {
    local model recipes=nvfp4,nvfp4_all,quartet2,mxfp4_rht_sr failed=0
    for model in 1.3b 345m; do
        bench fourbit-$model step --shapes $model --recipes $recipes || failed=1
    done
    bench fourbit-linear linear --shapes 345m,1.3b,6.7b --linears proj,fc1 --recipes $recipes || failed=1
    bench fourbit-quantize quantize --shapes 1.3b --formats e2m1,nvfp4 || failed=1
    return $failed
}

rehearsal() { run python -m tools.check_native --rehearse --no-steps --out "$out/rehearsal"; }

experts() {
    local tokens failed=0
    for tokens in 8192 32768; do
        bench "experts-$tokens" experts --tokens "$tokens" --peers te || failed=1
    done
    return $failed
}

# All variants of a call are in memory at once: 7 GB each of llama_8b and qwen3_moe, 4 of the others.
convert() {
    local failed=0 beside="--peers torchao --no-eager"
    # shellcheck disable=SC2086 # several words
    bench convert-gpt2 hugging_face --shapes gpt2 $beside --recipes fp8_current,fp8_rowwise,mxfp4_rht_sr || failed=1
    # shellcheck disable=SC2086
    bench convert-llama hugging_face --shapes llama $beside --recipes fp8_current,fp8_rowwise,fp8_delayed \
        --cuda-graphs || failed=1
    # shellcheck disable=SC2086
    bench convert-8b hugging_face --shapes llama_8b $beside \
        --recipes fp8_current,fp8_delayed,fp8_rowwise,fp8_blockwise,mxfp4_rht_sr || failed=1
    bench convert-experts hugging_face --shapes qwen3_moe --recipes fp8_current,mxfp8,mxfp4_rht_sr || failed=1
    bench frozen frozen || failed=1
    return $failed
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

plain="--no-fp8-param-gather --no-save-memory" # without the savings that are on by default

peaks() {
    local model count recipe batch name failed=0
    local -A models=(
        [1.3b]="1 --config configs/models/gpt_1.3b.yaml --micro-batch-size 8"
        [6.7b]="2 --config configs/models/gpt_6.7b.yaml --micro-batch-size 1 --tensor-model-parallel-size 2"
    )
    local -A samples=([1.3b]=8 [6.7b]=1) sequence=([1.3b]=2048 [6.7b]=4096) # samples of a microbatch, tokens of one
    for recipe in bf16 fp8_delayed "fp8_delayed --no-cache-weights" fp8_current mxfp8 fp8_blockwise fp8_rowwise \
        mxfp4_rht_sr "fp8_current $plain" "mxfp8 $plain"; do
        for model in 6.7b 1.3b; do
            ((${models[$model]%% *} <= gpus)) || continue
            for count in 16 1; do
                [[ $recipe == *--no-cache-weights && $count = 1 ]] && continue # which caches nothing
                name=${recipe/ $plain/-plain} batch=$((samples[$model] * count))
                name=peaks/$model-$count/${name/ --no-cache-weights/-uncached}
                # shellcheck disable=SC2086 # several words each
                logged "$out/$name.log" mock "$name" ${models[$model]} --recipe $recipe --global-batch-size "$batch" \
                    --train-iters 5 || failed=1
            done
        done
    done
    for model in 6.7b 1.3b; do
        ((${models[$model]%% *} <= gpus)) || continue
        for count in 16 1; do
            name=peaks/$model-$count
            run python tools/run_logs.py "$out/$name" --sequence "${sequence[$model]}" --gpus "${models[$model]%% *}" \
                --baseline bf16 --out "$out/${name/\//-}.json" || failed=1
        done
    done
    return $failed
}

gated="--config configs/models/gpt_1.3b.yaml --swiglu --disable-bias-linear --normalization RMSNorm --hidden-dropout 0
    --attention-dropout 0"
declare -A models_of_savings=(
    [dense]="--ffn-hidden-size 5504"
    [experts]="--num-layers 12 --num-attention-heads 16 --num-experts 16 --moe-router-topk 2
        --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)

activations() {
    local model recipe failed=0 saved="--recipe-override activations"
    # CUDA graphs hold memory, and not every variant can be captured
    local common="$gated --micro-batch-size 4 --global-batch-size 4 --train-iters 12 --cuda-graph-impl none"
    for model in dense experts; do
        for recipe in bf16 fp8_blockwise "fp8_blockwise $saved.attention_output=e5m6" \
            "fp8_blockwise $saved.swiglu_input=e4m3" "fp8_blockwise --fp8-param-gather" deepseek_v3; do
            # shellcheck disable=SC2086 # several words each
            train "activations/$model-$(tr -cs 'a-z0-9\n' - <<<"$recipe")" 1 $common ${models_of_savings[$model]} \
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
            --tensor-model-parallel-size "$gpus" --train-iters 10 --global-batch-size 16 || failed=1
    done
    return $failed
}

scaling() {
    local count counts=1 failed=0
    for count in 2 4 8; do ((count > gpus)) || counts+=,$count; done
    bench scaling scaling --gpus "$counts" --shapes 345m,1.3b --recipes bf16,fp8_delayed || failed=1
    ((gpus < 4)) || bench scaling-8b scaling --gpus 2,4 --shapes 8b --recipes bf16,fp8_delayed || failed=1
    return $failed
}

# logged LOG COMMAND...: what a command prints, in a file too.
logged() {
    local log=$1
    shift
    if [ -n "$dry" ]; then
        "$@"
        return
    fi
    mkdir -p "$(dirname "$log")"
    [ -e "${log%.log}.done" ] || : >"$log" # of an attempt that was cut
    "$@" 2>&1 | tee -a "$log"
}

# eight MICROBATCHES RECIPE FLAGS...: five steps of 8B without tensor parallelism.
eight() {
    local name="llama/$1/${*:2}"
    logged "$out/$name.log" mock "$name" "$gpus" --config configs/models/llama3_8b.yaml --tensor-model-parallel-size 1 \
        --global-batch-size $(($1 * gpus)) --train-iters 5 --recipe "${@:2}"
}

declare -A of_stock=(
    [bf16]=""
    [tensorwise]="--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"
    [delayed]="--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
)

llama() {
    local recipe flags failed=0
    for flags in "16 fp8_current" "stock tensorwise" "16 fp8_current --flash-attention-version 4" "16 bf16" "stock bf16" \
        "16 fp8_delayed" "stock delayed" "1 bf16" "1 fp8_current" "1 mxfp8" "1 fp8_lm_o2" "16 mxfp8" \
        "16 bf16 --flash-attention-version 4" "16 fp8_current --no-fp8-accumulate-wgrad" \
        "16 fp8_current --output-layer-chunk-size 1024" "16 fp8_current $plain"; do
        if [ "${flags% *}" = stock ]; then
            [ -z "${CLIENT:-}" ] || stock_llama "${flags#* }" || failed=1
        else
            # shellcheck disable=SC2086 # microbatches, a recipe, and flags after it
            eight $flags || failed=1
        fi
    done
    for flags in 16 1; do
        run python tools/run_logs.py "$out/llama/$flags" --sequence 8192 --gpus "$gpus" --baseline bf16 \
            --out "$out/llama-$flags.json" || failed=1
    done
    for recipe in fp8_current bf16 fp8_delayed; do
        bench "profile-$recipe" profile --shapes 8b --recipes "$recipe" --gpus "$gpus" --microbatches 4 || failed=1
    done
    return $failed
}

# stock_llama NAME: five steps of the same model in the checkout CLIENT; TE is a folder with TransformerEngine.
stock_llama() {
    local name="llama/16/TransformerEngine $1" CUDA_DEVICE_MAX_CONNECTIONS=1
    local PYTHONPATH=${TE:+$TE:}$PWD/tools/bench/apex:${PYTHONPATH:-}
    export PYTHONPATH CUDA_DEVICE_MAX_CONNECTIONS
    # shellcheck disable=SC2086 # several words
    logged "$out/$name.log" once "$name" torchrun --standalone --nproc-per-node "$gpus" "$CLIENT/pretrain_gpt.py" \
        ${of_stock[$1]} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope \
        --rotary-base 500000 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights \
        --disable-bias-linear --hidden-dropout 0.0 --attention-dropout 0.0 --micro-batch-size 1 \
        --global-batch-size $((16 * gpus)) --train-iters 5 --lr 3e-4 --bf16 --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 128255 --transformer-impl transformer_engine \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --cross-entropy-loss-fusion \
        --cross-entropy-fusion-impl te --manual-gc --manual-gc-interval 100 --no-check-for-nan-in-loss-and-grad \
        --eval-iters 1 --eval-interval 1000 --log-interval 1 --log-throughput
}

gathers() {
    local recipe failed=0
    for recipe in fp8_delayed "fp8_delayed --fp8-sequence-parallel-gather"; do
        # shellcheck disable=SC2086 # a recipe, and flags after it
        mock "gathers/${recipe// --/-}" "$gpus" --config configs/models/gpt_1.3b.yaml --micro-batch-size 8 \
            --tensor-model-parallel-size "$gpus" --sequence-parallel --global-batch-size 8 --train-iters 12 \
            --recipe $recipe || failed=1
    done
    for recipe in bf16 fp8_blockwise "fp8_blockwise --moe-fp8-dispatch"; do
        # shellcheck disable=SC2086
        mock "gathers/experts-${recipe// --/-}" "$gpus" $gated ${models_of_savings[experts]} --micro-batch-size 4 \
            --global-batch-size $((4 * gpus)) --expert-model-parallel-size "$gpus" --train-iters 12 \
            --recipe $recipe || failed=1
    done
    return $failed
}

snapshot() { bench snapshot step --shapes 345m --recipes fp8_delayed,mxfp4_rht_sr --snapshots --iterations 8; }

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
    local failed=0
    bench lm-scaling scaling --gpus "$gpus" --shapes 1.3b,345m --recipes bf16,fp8_delayed,fp8_lm,fp8_lm_o2 || failed=1
    bench exchange exchange --gpus "$gpus" --shapes 1.3b,345m || failed=1
    return $failed
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
    # shellcheck disable=SC2086
    megatron_lm ${of_stock[delayed]} || failed=1
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
if [[ " $* " == *" -- "* ]]; then
    gpu=0 group=() pids=()
    for word in "$@" --; do
        [ "$word" = -- ] || { group+=("$word") && continue; }
        CUDA_VISIBLE_DEVICES=$gpu GPUS=1 scripts/measure.sh ${dry:+--dry-run} "$out/$gpu" "${group[@]}" &
        pids+=($!) group=() gpu=$((gpu + 1))
    done
    for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
    exit $failed
fi
for part in "$@"; do
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
