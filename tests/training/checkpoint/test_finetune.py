"""Fine-tuning on conversations: loss and gradient by plain torch, no trace of masked positions, learning, resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import ByteLevelBPETokenizer

from megatron_lowprec.commands import export_hf
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data.chat_dataset import ChatSamples
from tests.training.conftest import Drive
from tests.training.convert.reference import gpt2
from tests.training.helpers import argv, losses, rows
from tests.weekly import also_weekly

BPE = SHIPPED / "data/tiny_bpe"
SAMPLE = SHIPPED / "data/chat-sample.jsonl"
TEXT: dict[str, Any] = {
    "tokenizer_type": "GPT2BPETokenizer",
    "vocab_file": BPE / "vocab.json",
    "merge_file": BPE / "merges.txt",
    "vocab_size": None,
    "seq_length": 64,
    "hidden_dropout": 0,
    "attention_dropout": 0,
}
CHAT: dict[str, Any] = {
    **TEXT,
    "mock_data": None,
    "sft": True,
    "data_cache_path": "cache",
    "split": "1",
    "no_save": True,
}
# Answers of different lengths; the second conversation has two of them.
CONVERSATIONS = [
    [("Two and two?", "Four.")],
    [("The capital of France?", "Paris."), ("And of Italy?", "Rome.")],
    [("How many legs has a spider?", "Eight, for it is an arachnid and not an insect, which has six.")],
]


@pytest.fixture
def chat() -> str:
    """The conversations' file, in the current folder."""
    lines = []
    for conversation in CONVERSATIONS:
        messages = [
            {"role": role, "content": text}
            for turn in conversation
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        lines.append(json.dumps({"messages": messages}))
    Path("chat.jsonl").write_text("\n".join(lines) + "\n")
    return "chat.jsonl"


def plain_torch(folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of each conversation's answer tokens, and the weights that they can be differentiated by."""
    tokenizer = ByteLevelBPETokenizer(str(BPE / "vocab.json"), str(BPE / "merges.txt"))
    eos = json.loads((BPE / "vocab.json").read_text())["<|endoftext|>"]
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.requires_grad_() for name, tensor in load_file(folder / "model.safetensors").items()}
    found = []
    for conversation in CONVERSATIONS:
        ids, answers = list[int](), list[int]()
        for number, (question, answer) in enumerate(conversation):
            prompt = ("\n" if number else "") + f"<|user|>\n{question}\n<|assistant|>\n"
            ids += tokenizer.encode(prompt).ids
            said = [*tokenizer.encode(answer).ids, eos]
            answers += range(len(ids), len(ids) + len(said))
            ids += said
        log = gpt2(config, weights, torch.tensor(ids[:-1])[None])[0].log_softmax(-1)
        found.append(torch.stack([-log[place - 1, ids[place]] for place in answers]))
    return found, weights


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_loss_and_gradient_are_plain_torch_s(drive: Drive, chat: str, micro_batch_size: int) -> None:
    drive(argv(**TEXT, save="base", train_iters=4, lr=0.02, lr_decay_style="constant", log_interval=1))
    options = {**CHAT, "data_path": [chat], "load": "base", "finetune": True, "micro_batch_size": micro_batch_size}
    drive(argv(**options, save="tuned", global_batch_size=3, train_iters=1))
    (row,) = rows(Path("tuned"))
    assert export_hf.main(["--load", "base", "--out", "hf"]) == 0
    each, weights = plain_torch(Path("hf"))
    expected = torch.cat(each).mean()
    expected.backward()
    norm = torch.stack([weight.grad.norm() for weight in weights.values() if weight.grad is not None]).norm()
    assert row["lm loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert row["grad-norm"] == pytest.approx(norm.item(), rel=1e-4)
    # Conversations weighed alike would be another loss.
    assert torch.stack([losses.mean() for losses in each]).mean().item() != pytest.approx(expected.item(), rel=1e-3)


def test_validation_weighs_tokens_alike(drive: Drive, chat: str) -> None:
    drive(argv(**TEXT, save="base", train_iters=4, lr=0.02, lr_decay_style="constant"))
    data = {**CHAT, "train_data_path": [chat], "valid_data_path": [chat], "load": "base", "finetune": True}
    one = {"micro_batch_size": 1, "global_batch_size": 1, "eval_iters": 3, "train_iters": 1}
    drive(argv(**data, **one, save="tuned", lr=0, weight_decay=0))
    (found,) = (row["lm loss validation"] for row in rows(Path("tuned")) if "lm loss validation" in row)
    assert export_hf.main(["--load", "base", "--out", "hf"]) == 0
    assert found == pytest.approx(torch.cat(plain_torch(Path("hf"))[0]).mean().item(), rel=1e-5)


def test_masked_positions_leave_no_trace(drive: Drive, chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ChatSamples.__getitem__
    options = {**CHAT, "data_path": [chat], "global_batch_size": 3, "micro_batch_size": 3, "train_iters": 3}

    def scrambled(masked: bool) -> Any:
        def getitem(self: ChatSamples, index: int) -> dict[str, torch.Tensor]:
            sample = original(self, index)
            changed = sample["loss_mask"] == (0 if masked else 1)
            noise = torch.randint(0, 512, changed.shape, generator=torch.Generator().manual_seed(index))
            sample["labels"] = torch.where(changed, noise, sample["labels"])
            if masked:
                behind = torch.arange(len(changed)) > sample["loss_mask"].nonzero().max()
                sample["tokens"] = torch.where(behind, noise, sample["tokens"])
            return sample

        return getitem

    drive(argv(**options, save="plain"))
    monkeypatch.setattr(ChatSamples, "__getitem__", scrambled(masked=True))
    drive(argv(**options, save="masked"))
    monkeypatch.setattr(ChatSamples, "__getitem__", scrambled(masked=False))
    drive(argv(**options, save="answers"))
    assert losses(Path("masked")) == losses(Path("plain"))
    norms = [[row["grad-norm"] for row in rows(Path(name))] for name in ("plain", "masked", "answers")]
    assert norms[0] == norms[1]
    assert norms[0] != norms[2]


def test_the_loss_of_answers_falls(drive: Drive, chat: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"train_data_path": [chat], "valid_data_path": [str(SAMPLE)]}
    options = {**CHAT, **data, "global_batch_size": 3, "micro_batch_size": 3, "eval_iters": 1, "eval_interval": 100}
    drive(argv(**options, save="out", train_iters=60, lr=1e-2))
    row = rows(Path("out"))
    train = [r["lm loss"] for r in row if "lm loss" in r]
    assert train[0] > 6.0  # of 512 ids: ln 512 = 6.2
    # Far below what a model that ignores the question could reach.
    assert train[-1] < 0.5
    assert len([r for r in row if "lm loss validation" in r]) == 1
    printed = capsys.readouterr().out
    assert printed.count("chat, train: ") == printed.count("chat, valid: ") == 1


@pytest.mark.parametrize("recipe", also_weekly(["fp8_delayed", "fp8_blockwise", "mxfp4_rht_sr"], ["fp8_delayed"]))
def test_it_resumes_bit_for_bit(drive: Drive, recipe: str) -> None:
    # Two epochs, each in an order of its own, and dropout.
    other = shutil.copy(SAMPLE, "other.jsonl")
    options = {**CHAT, "data_path": ["0.7", str(SAMPLE), "0.3", other], "split": "100,0,0", "recipe": recipe}
    options |= {"hidden_size": 128, "bf16": True, "hidden_dropout": 0.1, "no_save": None, "save_interval": 2}
    options |= {"global_batch_size": 24, "micro_batch_size": 12, "train_iters": 4}
    drive(argv(**options, save="whole"))
    shutil.copytree("whole/iter_0000002", "half/iter_0000002")
    Path("half/latest_checkpointed_iteration.txt").write_text("2\n")
    drive(argv(**options, save="rest", load="half"))
    assert losses(Path("rest")) == losses(Path("whole"))[2:]
    assert len(losses(Path("whole"))) == 4


def test_histories_of_gradients_begin_anew_at_their_new_scale(
    drive: Drive, chat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"recipe": "fp8_delayed", "hidden_size": 128}
    drive(argv(**TEXT, **common, save="base", train_iters=3))
    options = {**CHAT, **common, "data_path": [chat], "global_batch_size": 3, "micro_batch_size": 3, "no_save": None}
    capsys.readouterr()
    drive(argv(**options, save="tuned", pretrained_checkpoint="base", train_iters=2))
    printed = capsys.readouterr().out
    # Two layers of four linears, one history each for both products of their gradient.
    assert "8 amax histories of gradients begin anew, for --calculate-per-token-loss differs" in printed
    assert "histories filled by 3 passes" in printed
    # Going on it is the same scale.
    drive(argv(**options, save="tuned", train_iters=3))
    printed = capsys.readouterr().out
    assert "continuing from it" in printed
    assert "begin anew" not in printed
    assert len(losses(Path("tuned"))) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mock_data": True}, "--mock-data are none"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 100}, "NullTokenizer cannot read"),
        ({"data_path": ["corpus_text_document"]}, "corpus_text_document: --sft reads conversations as JSON lines"),
        ({"data_path": ["nowhere.jsonl"]}, "nowhere.jsonl: no such file"),
        ({"seq_length": 8, "max_position_embeddings": 64}, "none with an answer in its first 8 tokens"),
    ],
)
def test_data_without_conversations_is_refused(drive: Drive, chat: str, changes: dict[str, Any], words: str) -> None:
    options = {**CHAT, "data_path": [chat], **changes}
    if changes.get("mock_data"):
        del options["data_path"]
    with pytest.raises(UserError, match=words):
        drive(argv(**options, save="out"))
