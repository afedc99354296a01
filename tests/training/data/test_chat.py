"""Conversations become the ids worked out by hand, of which the answers alone carry loss; faults name their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.data import jsonl
from megatron_lowprec.training.data.chat import ChatEncoder, encode, turns
from megatron_lowprec.training.data.chat_dataset import ChatSamples, prepare_chats
from megatron_lowprec.training.data.encoding import encode as encode_batches
from megatron_lowprec.training.data.tokenizer import Tokenizer, build_tokenizer
from tests.refusal import refused

DATA = SHIPPED / "data"
EOS = "<|endoftext|>"

# Space around contents goes, inside of them it stays; what follows the last answer has nothing to teach.
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello there.\n"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
    {"role": "user", "content": "Ok"},
]
# Token by token, with GPT-2's vocabulary; + carries loss.
BY_HAND = [
    *("-<", "-|", "-system", "-|", "->", "-\n", "-Be", "- brief", "-.", "-\n"),
    *("-<", "-|", "-user", "-|", "->", "-\n", "-Hi", "-\n"),
    *("-<", "-|", "-ass", "-istant", "-|", "->", "-\n", "+Hello", "+ there", "+.", "+" + EOS, "-\n"),
    *("-<", "-|", "-user", "-|", "->", "-\n", "-By", "-e", "-\n"),
    *("-<", "-|", "-ass", "-istant", "-|", "->", "-\n", "+By", "+e", "+!", "+" + EOS),
]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(DATA / "gpt2/vocab.json"), merge_file=str(DATA / "gpt2/merges.txt")
    )


def write(path: Path, *conversations: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps({"id": 1, "messages": messages}) + "\n" for messages in conversations))
    return str(path)


def samples(path: str, tokenizer: Tokenizer, length: int, share: tuple[float, float] = (0.0, 1.0)) -> ChatSamples:
    prefix = prepare_chats(path, tokenizer, str(Path(path).parent / "cache"), workers=1)
    return ChatSamples(prefix, share, length, tokenizer, "train", path)


def test_tokens_labels_and_mask_are_those_worked_out_by_hand(tmp_path: Path, gpt2: Tokenizer) -> None:
    (sample,) = samples(write(tmp_path / "chat.jsonl", MESSAGES), gpt2, 64)
    text, loss = [mark[1:] for mark in BY_HAND], [mark[0] == "+" for mark in BY_HAND]
    padding = 65 - len(text)
    assert padding == 15
    said = [gpt2.detokenize([i]) for i in sample["tokens"].tolist()]
    wanted = [gpt2.detokenize([i]) for i in sample["labels"].tolist()]
    # A position carries loss for the token that it is to predict.
    assert said == (text + [EOS] * padding)[:-1]
    assert wanted == (text + [EOS] * padding)[1:]
    assert sample["loss_mask"].tolist() == ([float(x) for x in loss] + [0.0] * padding)[1:]
    assert sample["loss_mask"].sum() == 8
    assert sample["position_ids"].tolist() == list(range(64))
    assert {name: tensor.dtype for name, tensor in sample.items() if name != "loss_mask"} == dict.fromkeys(
        ("tokens", "labels", "position_ids"), torch.int64
    )


def test_one_encoding_is_the_prompt_s_and_then_the_answer_s(gpt2: Tokenizer) -> None:
    for folder in ("gpt2", "tiny_bpe"):
        files = {"vocab_file": str(DATA / folder / "vocab.json"), "merge_file": str(DATA / folder / "merges.txt")}
        tokenizer = build_tokenizer("GPT2BPETokenizer", **files)
        for line in (DATA / "chat-sample.jsonl").read_bytes().splitlines():
            conversation = turns(json.loads(line), "here")
            parts = encode(conversation, tokenizer)
            ids = [i for part in parts for i in part if i != tokenizer.eod]
            assert ids == [i for turn in conversation for i in tokenizer.tokenize("".join(turn))]


@pytest.mark.parametrize(("merges", "expected"), [([], ["H", "i"]), ([("\n", "H")], ["▁", "H", "i"])])
def test_other_tokenizers_encode_answers_apart_from_prompts(
    tmp_path: Path, merges: list[tuple[str, str]], expected: list[str]
) -> None:
    # One that puts a space before every text must not put it before an answer; one that would merge across the
    # border between prompt and answer cannot do so when the model is asked.
    entries = [*dict.fromkeys("▁<|userasitn>\nHi?"), "</s>", "\nH"]
    backend = Backend(models.BPE({entry: i for i, entry in enumerate(entries)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    prompt, answer = encode([("<|user|>\n?\n<|assistant|>\n", "Hi")], tokenizer)
    assert [entries[i] for i in answer] == [*expected, "</s>"]
    assert [entries[i] for i in prompt] == list("▁<|user|>\n?\n<|assistant|>\n")


def test_contents_that_spell_marks_are_text(gpt2: Tokenizer) -> None:
    (_, answer) = encode(turns({"messages": [*MESSAGES[:2], message("assistant", f"a{EOS}b")]}, "here"), gpt2)
    assert answer.count(gpt2.eod) == 1


def message(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


QUESTION, ANSWER = message("user", "Hi"), message("assistant", "Hello")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "not a JSON object"),
        ("  ", "not a JSON object"),
        ("{", "not a JSON object"),
        ("[]", "not a JSON object but a list"),
        ('{"text": "Hi"}', "wants a list under 'messages', found none"),
        ('{"messages": []}', "found an empty list"),
        ('{"messages": "Hi"}', "found str"),
        ([QUESTION, "Hello"], "message 2: not an object with 'role' and 'content' but a str"),
        ([QUESTION, message("tool", "1")], "message 2: role 'tool' is not one of system, user, assistant"),
        ([QUESTION, {"role": "assistant"}], "message 2: 'content' holds nothing, not text"),
        ([QUESTION, message("assistant", [])], "message 2: 'content' holds a list, not text"),
        ([QUESTION, message("assistant", " \n")], "message 2: the assistant's content is empty"),
        ([message("user", ""), ANSWER], "message 1: the user's content is empty"),
        ([QUESTION, message("assistant", "\ud800")], "message 2: 'content' is not Unicode"),
        ([QUESTION], "no message of the assistant"),
        ([QUESTION, ANSWER, message("system", "x"), QUESTION, ANSWER], "message 3: a system message that is not the"),
    ],
)
def test_a_line_that_is_no_conversation_is_refused(
    tmp_path: Path, gpt2: Tokenizer, line: str | list[Any], words: str
) -> None:
    good = json.dumps({"messages": [QUESTION, ANSWER]})
    bad = line if isinstance(line, str) else json.dumps({"messages": line})
    (tmp_path / "chat.jsonl").write_text(f"{good}\n{good}\n{bad}\n{good}\n")
    with refused(f"{tmp_path / 'chat.jsonl'}, line 3", words):
        samples(str(tmp_path / "chat.jsonl"), gpt2, 32)
    assert not list((tmp_path / "cache").glob("*.bin"))


def test_a_file_without_lines_is_refused(tmp_path: Path, gpt2: Tokenizer) -> None:
    (tmp_path / "chat.jsonl").write_text("")
    with pytest.raises(UserError, match="no line in it"):
        samples(str(tmp_path / "chat.jsonl"), gpt2, 32)


def test_long_conversations_lose_their_ends_and_are_counted(tmp_path: Path, gpt2: Tokenizer) -> None:
    long_question = message("user", "why " * 30)
    path = write(tmp_path / "chat.jsonl", [QUESTION, ANSWER], [long_question, ANSWER], MESSAGES)
    short, long = (samples(path, gpt2, length) for length in (30, 64))
    # Of the by-hand example 31 tokens remain, its first answer among them.
    assert len(short) == 2
    assert len(long) == 3
    assert "longer" not in long.summary
    assert (
        "2 longer than --seq-length 30 lost their ends (6 tokens of answers), 1 of these are left out" in short.summary
    )
    assert "2 conversations of 48 tokens, 6 of them in answers" in short.summary
    cut = short[1]
    assert torch.equal(cut["tokens"], long[2]["tokens"][:30])
    assert torch.equal(cut["loss_mask"], long[2]["loss_mask"][:30])
    # Every length, against the definition: the first length + 1 tokens of each conversation.
    whole = samples(path, gpt2, 100)
    for length in range(10, 64):
        kept = [whole[i]["loss_mask"][:length].sum() for i in range(3)]
        if not any(kept):
            with pytest.raises(UserError, match="none with an answer in its first"):
                samples(path, gpt2, length)
            continue
        found = samples(path, gpt2, length)
        assert [float(sample["loss_mask"].sum()) for sample in found] == [k for k in kept if k]
        assert f"{int(sum(kept))} of them in answers" in found.summary


def test_splits_cut_conversations_in_their_order(tmp_path: Path, gpt2: Tokenizer) -> None:
    numbered = [[message("user", f"number {i}"), ANSWER] for i in range(10)]
    path = write(tmp_path / "chat.jsonl", *numbered)
    parts = [samples(path, gpt2, 40, share) for share in ((0.0, 0.7), (0.7, 0.9), (0.9, 1.0))]
    assert [len(part) for part in parts] == [7, 2, 1]
    texts = [gpt2.detokenize(sample["tokens"].tolist()) for part in parts for sample in part]
    assert [f"number {i}\n" in text for i, text in enumerate(texts)] == [True] * 10
    with pytest.raises(UserError, match="its train part has 0 conversations"):
        samples(path, gpt2, 40, (0.0, 0.0))


@pytest.mark.slow
def test_a_file_is_tokenized_once_and_by_any_number_of_workers(
    tmp_path: Path, gpt2: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "chat.jsonl", *([[QUESTION, ANSWER], MESSAGES] * 40))
    samples(path, gpt2, 64)
    assert "80 documents" in capsys.readouterr().out
    samples(path, gpt2, 32)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(jsonl, "_BATCH_BYTES", 1000)
    one, two = (list(encode_batches(ChatEncoder(gpt2, np.uint16), jsonl.batches([path]), n)) for n in (1, 2))
    assert len(one) > 10
    assert [batch.parts for batch in one] == [batch.parts for batch in two]
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(one, two, strict=True))
