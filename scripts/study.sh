#!/bin/bash
# Runs sweeps side by side on the GPUs of a machine that is held for a limited time:
#
#   scripts/study.sh start OUT SECONDS LANE...   starts the lanes in the background, under CUDA MPS; returns at once
#   scripts/study.sh wait OUT [SECONDS [FILE]]   waits for their end, 590 seconds at most by default, and says how they
#                                                stand; packs to FILE each minute, so that a call that is cut has them
#   scripts/study.sh pack OUT FILE.tar.xz        writes all files of the runs but checkpoints, caches and TensorBoard's;
#                                                above 15 MiB as FILE.tar.xz.00, .01 and so on, which cat joins
#
# A LANE is a file. Each line of it is a folder below OUT and arguments of scripts/sweep.py: the lane runs these sweeps
# one after the other. Lanes share the GPUs, so their --jobs-per-gpu add up. A sweep with an evaluate entry scores each
# job as it ends. scripts/studies has lanes of the open studies: DATA and WIKIPEDIA are the corpora of
# scripts/prepare_corpus.sh, CORPUS its folder of texts, JOBS the jobs that share a GPU, SWEEP further flags of
# scripts/sweep.py for all sweeps of a lane.
#
# After SECONDS less those of scoring (SCORING, 90 by default) all runs are told to save and stop, and the rest is for
# scores that ended runs lack. The same start continues from the checkpoints and repeats nothing that is done; on another
# machine it needs them, so give --start-within what a run leaves of a session.
# `tools/report.py OUT/FOLDER... --archive FILE.safetensors.xz` makes an archive for docs/results.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=$here/scripts/study.sh
limit=${LIMIT:-15M} # of a packed file
every=${EVERY:-60}  # seconds between packs while it waits
export SWEEP=${SWEEP:-}
export SCORES="--recipe checkpoint bf16 --wikitext --micro-batch-size 16 --data-path data/enwiki-test.jsonl.xz${CORPUS:+ $CORPUS/docs-test.jsonl.xz}"

alive() { kill -0 "$(cat "$1" 2>/dev/null)" 2>/dev/null; }

start() {
    local end=$(($(date +%s) + $1)) lane pid
    shift
    if command -v nvidia-cuda-mps-control >/dev/null; then
        export CUDA_MPS_PIPE_DIRECTORY=${TMPDIR:-/tmp}/mps-$UID CUDA_MPS_LOG_DIRECTORY=$out/mps
        mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
        # a server of some GPUs numbers them anew for its clients, which have CUDA_VISIBLE_DEVICES already
        echo get_server_list | nvidia-cuda-mps-control >/dev/null 2>&1 ||
            env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d
    fi
    for lane in "$@"; do
        pid=$out/$(basename "$lane").pid
        if alive "$pid"; then
            echo "$lane runs already"
            continue
        fi
        setsid bash "$script" lane "$out" "$end" "$lane" >>"${pid%.pid}.log" 2>&1 </dev/null &
        echo $! >"$pid"
    done
}

# sweeps END FILE FLAGS...: the sweeps of a lane until END.
sweeps() {
    local end=$1 file=$2 words line left
    shift 2
    while IFS= read -r line <&3; do
        [[ -z $line || $line == \#* ]] && continue
        eval "words=($line)"
        left=$((end - $(date +%s)))
        ((left > 0)) || return 75
        echo "+ scripts/sweep.py ${words[*]:1}${*:+ $*}, $left s left"
        timeout --signal TERM "$left" python "$here/scripts/sweep.py" "${words[@]:1}" --out "$out/${words[0]}" "$@"
    done 3<"$file"
}

lane() {
    sweeps $(($1 - ${SCORING:-90})) "$2"
    sweeps "$1" "$2" --start-within 0 # scores what has ended, starts nothing
}

wait_for() {
    local start end file=${2:-} running pid run
    start=$(date +%s) end=$((start + ${1:-590}))
    while :; do
        running=0
        for pid in "$out"/*.pid; do alive "$pid" && running=$((running + 1)); done
        ((running == 0 || $(date +%s) >= end)) && break
        if [ -n "$file" ] && (($(date +%s) >= start + every)); then
            pack "$file" >/dev/null
            start=$(date +%s)
        fi
        sleep 1
    done
    for run in "$out"/*/*/metrics.jsonl; do
        [ -e "$run" ] || continue
        printf '%s %s' "$(basename "$(dirname "$run")")" "$(tail -n 1 "$run" | grep -o '"iteration": [0-9]*')"
        [ -e "${run%/*}/evaluation.json" ] && printf ', scored'
        echo
    done
    grep -hE 'failed|stopped by|^ {4}' "$out"/*.log
    echo "$running lanes run"
    [ -z "$file" ] || pack "$file"
}

pack() {
    mkdir -p "$(dirname "$1")"
    XZ_OPT='-3 -T0' tar cJf "$1.unfinished" -C "$out" --exclude='iter_*' --exclude=tensorboard --exclude=cache \
        --exclude=mps --exclude=locks --exclude='*.pid' . || (($? == 1)) || return # 1: a file grew meanwhile
    rm -f "$1".[0-9][0-9] # cat would join parts of an earlier call
    mv "$1.unfinished" "$1"
    if [ -n "$(find "$1" -size +"$limit")" ]; then
        split --bytes="$limit" --numeric-suffixes "$1" "$1." && rm "$1"
    fi
    ls -l "$1"*
}

action=${1:-}
[[ $action =~ ^(start|lane|wait|pack)$ && $# -ge 2 ]] || { sed -n 's/^#   //p' "$script" >&2 && exit 2; }
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
case $action in
wait) wait_for "$@" ;;
*) "$action" "$@" ;;
esac
