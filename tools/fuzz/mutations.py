"""Damaged and hostile copies of a file's content, each determined by its random generator."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

# What has ended some program: bytes that are no text, escape sequences, numbers beyond any type, code, bombs.
WORDS = (
    *(b"\x00", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[2J\x1b]0;x\x07", b"\xc2\x9b31m", b"\r", b"\n", b"\\ud800"),
    *(b"\\u001b[2J", b'"\\e[31m"', b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"-0.0", b"9" * 20, b"9" * 5000),
    *(b"0x" + b"f" * 5000, b"1" + b":59" * 3000, b"null", b"true", b'""', b"{}", b"[]", b"[" * 20_000, b"{" * 5000),
    *(b"2024-13-45", b"!!set {a}", b"!!binary x", b"&a [*a]", b"<<: *a", b"!!python/object/apply:os.mkdir [it_ran]"),
    *(
        b"../../../../etc/passwd",
        b"/dev/zero",
        b"x" * 70_000,
        b"$x$",
        b"'\"`$(touch it_ran)",
        b"<script>",
        b"%s%n",
        b"|",
    ),
)
PICKLE = b"cposix\nmkdir\n(Vit_ran\ntR."
"""A pickle that makes a folder when it is loaded without restrictions."""
BOMB = b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1) if n else b"x"] * 9)) for n in range(10))
"""YAML of a thousand bytes that stands for 9^10 values."""
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_NUMBERS = (b"-1", b"0", b"1", b"2147483648", b"-9223372036854775809", b"1e999", b"NaN", b"0.5", b'"x"', b"null", b"[]")
_INTEGERS = (-1, 0, 1, 2**15, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))


def _flip(content: bytearray, random: Random) -> None:
    """One to eight bits."""
    for _ in range(random.randint(1, 8)):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _word(content: bytearray, random: Random) -> None:
    """A word inserted, or in the place of as many bytes or of a few."""
    at, word = random.randrange(len(content) + 1), random.choice(WORDS)
    content[at : at + random.choice((0, len(word), random.randint(1, 8)))] = word


def _number(content: bytearray, random: Random) -> None:
    """A number of a text in the place of one of its numbers."""
    found = list(_NUMBER.finditer(content[: 2**16]))
    if not found:
        return _integer(content, random)
    one = random.choice(found)
    content[one.start() : one.end()] = random.choice(_NUMBERS)
    return None


def _integer(content: bytearray, random: Random) -> None:
    """A binary integer in the place of one at an offset that is a multiple of its size, from the beginning or any."""
    size = random.choice((1, 2, 4, 8))
    value = random.choice(_INTEGERS) & ((1 << 8 * size) - 1)
    at = random.randrange(max(1, len(content) - size + 1))
    at = at - at % size if random.random() < 0.5 else at
    content[at : at + size] = value.to_bytes(size, random.choice(("little", "big")))


def _cut(content: bytearray, random: Random) -> None:
    """The end, the beginning, or a part in between removed."""
    a, b = sorted(random.randrange(len(content) + 1) for _ in range(2))
    del content[random.choice((slice(a, None), slice(0, a), slice(a, b)))]


def _repeat(content: bytearray, random: Random) -> None:
    """A part twice, or moved."""
    a, b = sorted(random.randrange(len(content) + 1) for _ in range(2))
    part = content[a : min(b, a + 4096)]
    if random.random() < 0.5:
        del content[a : a + len(part)]
    at = random.randrange(len(content) + 1)
    content[at:at] = part


def _lines(content: bytearray, random: Random) -> None:
    """Lines in another order, one left out, or one twice."""
    lines = bytes(content).splitlines(keepends=True)
    at = random.randrange(len(lines))
    how = random.randrange(3)
    if how == 0:
        random.shuffle(lines)
    elif how == 1:
        del lines[at]
    else:
        lines.insert(random.randrange(len(lines) + 1), lines[at])
    content[:] = b"".join(lines)


def _fill(content: bytearray, random: Random) -> None:
    """Zeros, as after a power cut, or random bytes, from somewhere on."""
    at = random.randrange(len(content))
    content[at:] = bytes(len(content) - at) if random.random() < 0.7 else random.randbytes(len(content) - at)


def _other(content: bytearray, random: Random) -> None:
    """Another file altogether."""
    content[:] = random.choice((b"", PICKLE, BOMB, *WORDS, random.randbytes(random.randint(1, 2000))))


_WAYS: tuple[tuple[Callable[[bytearray, Random], None], int], ...] = (
    *((way, 3) for way in (_flip, _word, _number, _integer)),
    *((way, 2) for way in (_cut, _lines)),
    *((way, 1) for way in (_repeat, _fill, _other)),
)


def mutated(content: bytes, random: Random) -> bytes:
    """The content after one to three mutations; never the content as it was."""
    ways, weights = zip(*_WAYS, strict=True)
    while True:
        changed = bytearray(content)
        for way in random.choices(ways, weights, k=random.choice((1, 1, 1, 2, 3))):
            (way if changed else _other)(changed, random)
        if changed != content:
            return bytes(changed)
