"""Command lines of Megatron-LM: every flag has one answer, and one message has all reasons against a command line."""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml

from megatron_lowprec import UserError, get_recipe
from megatron_lowprec.training.config import megatron_flags as flags
from megatron_lowprec.training.config.arguments import build_parser, choices_of_flags, parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_recipe
from megatron_lowprec.training.memory.report import planned

OURS = choices_of_flags(build_parser())
TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --global-batch-size 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 255
""")

# The launch scripts of Megatron-LM's examples, with tiny sizes and mock data, behind TINY.
GPT3 = """
    --attention-backend auto --train-iters 20 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --lr-warmup-fraction .001 --lr-decay-iters 20 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save out --load out --eval-iters 10
    --tensorboard-dir board
"""
LLAMA3 = """
    --use-mcore-models --ffn-hidden-size 128 --group-query-attention --num-query-groups 2 --kv-channels 16
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
    --untie-embeddings-and-output-weights --disable-bias-linear --train-samples 800 --lr-decay-samples 800
    --lr-warmup-samples 8 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
    --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather --data-cache-path cache --tiktoken-pattern v2 --split 99,1,0
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
    --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6
    --ckpt-format torch_dist --distributed-timeout-minutes 60 --save out --load out --tensorboard-dir board
"""
MIXTRAL = """
    --use-mcore-models --disable-bias-linear --ffn-hidden-size 128 --init-method-std 0.01 --attention-dropout 0.0
    --hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
    --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce --split 99990,8,2 --lr 1e-4
    --train-iters 20 --lr-decay-iters 20 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1
    --lr-warmup-iters 5 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --expert-model-parallel-size 4 --use-distributed-optimizer --sequence-parallel --log-interval 1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save out --load out --tensorboard-dir board
    --no-load-optim --no-load-rng --wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""
SCRIPTS = {"gpt3": GPT3, "llama3": LLAMA3, "mixtral": MIXTRAL}
# Flags of those scripts that are refused here.
REFUSED = {
    "gpt3": ["--fp16"],
    "llama3": [
        *("--apply-layernorm-1p", "--decoupled-lr 5.0e-4", "--decoupled-min-lr 4.5e-5", "--fp8-format hybrid"),
        *("--fp8-amax-history-len 1024", "--fp8-amax-compute-algo max"),
    ],
    "mixtral": ["--tokenizer-type Llama2Tokenizer"],
}
# The flags besides sizes that public launch scripts have most often, with a value as they give it.
FREQUENT = """
    --use-mcore-models; --use-flash-attn; --bf16; --no-masked-softmax-fusion; --attention-softmax-in-fp32; --swiglu;
    --use-rotary-position-embeddings; --disable-bias-linear; --normalization RMSNorm; --position-embedding-type rope;
    --untie-embeddings-and-output-weights; --no-position-embedding; --group-query-attention; --attention-dropout 0;
    --hidden-dropout 0; --use-distributed-optimizer; --overlap-grad-reduce; --overlap-param-gather;
    --sequence-parallel; --recompute-activations; --log-timers-to-tensorboard; --log-validation-ppl-to-tensorboard;
    --log-memory-to-tensorboard; --log-batch-size-to-tensorboard; --log-learning-rate-to-tensorboard;
    --log-params-norm; --log-num-zeros-in-grad; --log-throughput; --log-progress; --log-interval 10;
    --tensorboard-queue-size 5; --timing-log-level 2; --timing-log-option minmax; --ckpt-format torch_dist;
    --dist-ckpt-strictness log_all; --use-dist-ckpt; --auto-detect-ckpt-format; --ckpt-fully-parallel-load;
    --ckpt-fully-parallel-save; --use-persistent-ckpt-worker; --async-save; --no-load-optim; --no-load-rng;
    --no-save-optim; --no-save-rng; --finetune; --exit-interval 7; --dataloader-type single; --num-workers 2;
    --distributed-backend gloo; --distributed-timeout-minutes 60; --no-gradient-accumulation-fusion;
    --accumulate-allreduce-grads-in-fp32; --no-bias-gelu-fusion; --no-bias-swiglu-fusion; --no-rope-fusion;
    --cross-entropy-loss-fusion; --manual-gc; --manual-gc-interval 10; --eod-mask-loss; --reset-position-ids;
    --reset-attention-mask; --override-opt_param-scheduler; --use-checkpoint-opt_param-scheduler;
    --initial-loss-scale 65536; --empty-unused-memory-level 1; --moe-permute-fusion; --moe-router-dtype fp32;
    --no-check-for-nan-in-loss-and-grad; --rerun-mode disabled; --transformer-impl transformer_engine
"""


def parsed(words: str) -> tuple[Config, list[str]]:
    config, _, notes = parse([*TINY, *shlex.split(words)])
    return config, notes


def refusal(words: str) -> str:
    with pytest.raises(UserError) as error:
        parsed(words)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- the table
def test_every_flag_of_megatron_lm_has_an_answer() -> None:
    answered = [name for name in flags.megatron_flags() if name in OURS or flags.answer(name) is not None]
    assert answered == [*flags.megatron_flags()]


def test_every_answer_is_about_a_flag_without_another_one() -> None:
    content = yaml.safe_load(flags._ANSWERS.read_text(encoding="utf-8"))
    older = {name for group in content["no effect"] if group.get("older") for name in group["flags"].split()}
    unused = []
    for key in flags.answers():
        matching = {name for name in flags.megatron_flags() if fnmatchcase(name, key.partition("=")[0])}
        assert "=" in key or not matching & OURS.keys(), f"{key} is an option here"
        unused += [] if matching else [key]
    assert set(unused) == older


def test_what_flags_are_read_as_exists() -> None:
    words = [words for answer in flags.answers().values() if answer.kind == "read as" for words in answer.text.split()]
    assert {word for word in words if word.startswith("--")} <= OURS.keys()


# ---- command lines
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_of_megatron_lm_is_planned(name: str) -> None:
    config, notes = parsed(SCRIPTS[name])
    config, _ = resolve_recipe(resolve_model(config), get_recipe("bf16"), frozenset())
    lines = planned(config, get_recipe("bf16"), 8, None)
    assert any(line.startswith("memory plan of one of 8 GPUs") for line in lines)
    assert len([note for note in notes if "without effect" in note]) <= 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_an_example_has_beyond_is_refused_at_once(name: str) -> None:
    message = refusal(f"{SCRIPTS[name]} {' '.join(REFUSED[name])}")
    assert [flag for flag in REFUSED[name] if flag not in message] == []


@pytest.mark.parametrize("words", [words.strip() for words in FREQUENT.split(";")])
def test_a_frequent_flag_is_taken(words: str) -> None:
    needs = {"--no-position-embedding": "--position-embedding-type rope", "--manual-gc-interval 10": "--manual-gc"}
    needs |= {"--moe-router-dtype fp32": "--num-experts 2", "--finetune": "--load out"}
    config, _ = parsed(f"{words} {needs.get(words, '')} --lr 1e-3")
    resolve_model(config)


def test_all_reasons_are_in_one_message() -> None:
    message = refusal(
        "--fp16 --window-size 12,0 --mtp-num-layers 1 --apply-layernorm-1p --no-such-flag 3 --num-layer 2 --lr x "
        "--optimizer lion --fp8-recipe blockwise --dataloader-type cyclic --normalization BatchNorm stray"
    )
    for words in (
        *("12 reasons", "--fp16: ", "--bf16", "--window-size 12,0: ", "--mtp-num-layers 1: ", "--apply-layernorm-1p: "),
        *("unknown flag --no-such-flag", "--num-layers", "--lr: 'x' is not a number", "--optimizer lion: "),
        *(
            "--fp8-recipe blockwise: use --recipe fp8_blockwise",
            "--dataloader-type cyclic: ",
            "'BatchNorm' is not one of",
        ),
    ):
        assert words in message


@pytest.mark.parametrize(
    ("flag", "hint", "misleading"),
    [
        ("--fp16", "give --bf16", "nearest"),
        ("--ckpt-format torch", "megatron-lowprec import-megatron", "--fp8-format"),
        ("--save-retain-interval 5", "--keep-last N", "--save-interval"),
        ("--use-checkpoint-args", "--config FILE.yaml", "scheduler"),
        ("--batch-size 4", "--micro-batch-size", "--rampup"),
    ],
)
def test_a_flag_has_its_own_hint(flag: str, hint: str, misleading: str) -> None:
    message = refusal(flag)
    assert hint in message
    assert misleading not in message


def test_flags_that_are_read_as_others_and_without_effect_are_two_notes() -> None:
    config, notes = parsed(
        "--use-rotary-position-embeddings --no-position-embedding --persistent-save-interval 7 "
        "--attention-backend=flash --use-flash-attn --timing-log-level 2 --ckpt-format=torch_dist"
    )
    assert (config.position_embedding_type, config.save_interval, config.attention_backend) == ("rope", 7, "auto")
    assert len(notes) == 2
    assert "--persistent-save-interval 7 -> --save-interval 7" in notes[0]
    assert notes[1].endswith("--no-position-embedding, --use-flash-attn, --timing-log-level, --ckpt-format")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--no-position-embedding", "--position-embedding-type learned_absolute"),
        ("--accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", "--grad-reduce-in-bf16 True"),
        ("--use-flash-attn stray", "'stray' is no flag"),
        ("--timing-log-level 2 stray", "'stray' is no flag"),
    ],
)
def test_a_flag_without_effect_is_refused_where_it_has_one(flag: str, words: str) -> None:
    assert words in refusal(flag)


@pytest.mark.parametrize("value", ["0", "0.0"])
def test_a_refused_flag_may_have_megatron_lm_s_default(value: str) -> None:
    assert "--glu-linear-offset" in parsed(f"--glu-linear-offset {value}")[1][-1]
    assert "--glu-linear-offset 1" in refusal("--glu-linear-offset 1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"fp16": True, "window-size": 3, "num-layer": 2},
            ["'fp16': this driver trains", "'window-size'", "num-layers"],
        ),
        ({"use_flash_attn": True}, ["leave it out"]),
        ({"use-rotary-position-embeddings": True}, ["use --position-embedding-type rope"]),
    ],
)
def test_keys_of_a_file_have_the_same_hints(tmp_path: Any, content: dict[str, Any], words: list[str]) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(content))
    message = refusal(f"--config {file}")
    assert [word for word in words if word not in message] == []
