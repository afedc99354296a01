"""Tokenizes conversations in Tulu V2's JSON-lines format; only answers carry loss. No megatron.

One object per line, ``{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}``,
formatted by the template of the Tulu models (arXiv 2311.10702, appendix; open-instruct), up to space around contents::

    <|user|>
    …
    <|assistant|>
    …<eos>

Every tokenizer here treats marks and contents as ordinary text; ``<eos>`` is the tokenizer's end-of-document id. A turn
is split between prompt and answer as at inference: the prompt's ids are the same as without an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_lowprec.errors import UserError, type_of
from megatron_lowprec.training.data import jsonl
from megatron_lowprec.training.data.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class EncodedChats:
    """Token ids of one :class:`jsonl.Batch`: all conversations concatenated.

    ``parts[c]`` are the lengths of a conversation's parts, which alternate between no loss and loss.
    """

    ids: npt.NDArray[np.number]
    parts: tuple[tuple[int, ...], ...]
    bytes_read: int


@dataclass(frozen=True)
class ChatEncoder:
    """Tokenizes a batch of lines to ids of ``dtype``."""

    tokenizer: Tokenizer
    dtype: type[np.number]

    def __call__(self, batch: jsonl.Batch) -> EncodedChats:
        """Raises UserError as :func:`turns`, with file and line."""
        found = []
        for number, line in enumerate(batch.lines, batch.first_line):
            where = f"{batch.path}, line {number}"
            found.append(encode(turns(jsonl.parse(line, where), where), self.tokenizer))
        ids = [part for conversation in found for part in conversation]
        lengths = tuple(tuple(map(len, conversation)) for conversation in found)
        return EncodedChats(
            np.fromiter((i for part in ids for i in part), self.dtype, count=sum(map(len, ids))),
            lengths,
            batch.bytes_read,
        )


def turns(document: dict[str, object], where: str) -> list[tuple[str, str]]:
    """(prompt text, answer) pairs of a conversation; messages after the last answer are dropped.

    Raises:
        UserError: anything but messages of the three roles with text, a system message that is not the first, or a
            conversation without an answer. ``where`` is the prefix of the message.
    """
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        kind = "none" if "messages" not in document else "an empty list" if messages == [] else type(messages).__name__
        raise UserError(f"{where}: wants a list under 'messages', found {kind}; one conversation is one line")
    found, before = list[tuple[str, str]](), ""
    for place, message in enumerate(messages, 1):
        role, content = _message(message, f"{where}, message {place}")
        if role == "system" and place > 1:
            raise UserError(
                f"{where}, message {place}: a system message that is not the first; give another conversation a line "
                "of its own"
            )
        if role == "assistant":
            found.append((f"{before}<|assistant|>\n", content))
            before = "\n"
        else:
            before += f"<|{role}|>\n{content}\n"
    if not found:
        raise UserError(f"{where}: no message of the assistant, so nothing to learn; remove the line")
    return found


def _message(message: object, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: not an object with 'role' and 'content' but {type_of(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}; remove the line or rename the role")
    content = jsonl.checked_text(message.get("content"), f"{where}: 'content'").strip()
    if not content:
        raise UserError(f"{where}: the {role}'s content is empty; remove the message or the line")
    return role, content


def encode(conversation: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of a conversation's parts: prompt, answer with its end, prompt, answer, …"""
    parts = []
    for prompt, answer in conversation:
        leading, whole = tokenizer.tokenize(prompt), tokenizer.tokenize(prompt + answer)
        # This equals the answer's own ids, except for tokenizers that prepend a space to every text.
        follows = whole[: len(leading)] == leading
        parts += [leading, [*(whole[len(leading) :] if follows else tokenizer.tokenize(answer)), tokenizer.eod]]
    return parts
