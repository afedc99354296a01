#!/bin/bash
# Tokenizes the corpus of the studies with GPT-2's vocabulary and compares all bytes with the published sha256:
#
#   scripts/prepare_corpus.sh CORPUS OUT [WORKERS]
#
# CORPUS has enwiki-*.jsonl.xz and docs-*.jsonl.xz. OUT gets wikipedia_text_document, 72.9M tokens, and
# both_text_document, 174.3M tokens of Wikipedia and documentation, each for --train-data-path. Their documents are those
# of the train files in the order of names; Megatron-core shuffles them by the seed. What is there already is only checked.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 2 ] || { sed -n 's/^#   //p' "${BASH_SOURCE[0]}" >&2 && exit 2; }
mkdir -p "$2"
corpus=$(cd "$1" && pwd) out=$(cd "$2" && pwd) workers=${3:-$(nproc)}
sums=("$here/megatron_lowprec/data/corpus.sha256" "$here/scripts/tokens.sha256")
[ -z "${SUMS:-}" ] || sums=("$SUMS")
cd "$here"

check() { # FOLDER PATTERN
    (cd "$1" && grep -hE "$2" "${sums[@]}" | sha256sum --check --quiet -)
}

check "$corpus" '\.xz$'
for name in wikipedia both; do
    inputs=("$corpus"/enwiki-train-*.jsonl.xz)
    [ "$name" = wikipedia ] || inputs+=("$corpus"/docs-train-*.jsonl.xz)
    [ -e "$out/${name}_text_document.json" ] || python -m megatron_lowprec preprocess --input "${inputs[@]}" \
        --output-prefix "$out/$name" --append-eod --workers "$workers" --log-interval 20000 \
        --tokenizer-type GPT2BPETokenizer --vocab-file data/gpt2/vocab.json --merge-file data/gpt2/merges.txt
done
check "$out" '\.(bin|idx)$'
echo "all bytes as published; DATA=$out/both_text_document WIKIPEDIA=$out/wikipedia_text_document CORPUS=$corpus"
