"""YAML that people write: what is no mistake is read as YAML says, what is one is said with its place."""

from pathlib import Path

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe import yaml_text
from megatron_lowprec.recipe.yaml_text import read_yaml_file, read_yaml_text
from megatron_lowprec.shipped import SHIPPED

BOMB = "\n".join(["a:", "- &a0 [x, x]", *(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))])


def test_a_date_is_text() -> None:
    """No option is a date; PyYAML would make datetimes, and end in a traceback for one that no calendar has."""
    assert read_yaml_text("a: 2024-01-01\nb: 2024-13-45\n", "f.yaml") == {"a": "2024-01-01", "b": "2024-13-45"}


def test_valid_yaml_is_read_unchanged() -> None:
    text = "base: &b {lr: 1.0, a: [1, {x: 2}]}\nother: {<<: *b, lr: 2.0}\nempty:\n"
    assert read_yaml_text(text, "f.yaml") == {
        "base": {"lr": 1.0, "a": [1, {"x": 2}]},
        "other": {"lr": 2.0, "a": [1, {"x": 2}]},
        "empty": None,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\n", "line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        ("lr: 1\nlr: 2\n", "line 2, column 1: 'lr' is there twice"),
        ("a:\n  b: {c: 1, d: 2, c: 3}\n", "line 2, column 19: 'c' is there twice"),
        (
            "a: !!python/object/apply:os.getcwd []\n",
            "line 1, column 4: a sequence of type python/object/apply:os.getcwd",
        ),
        ("a: !!timestamp 2024-13-45\n", "line 1, column 4: a scalar of type timestamp is not read"),
        ("a: !!set {b, c}\n", "line 1, column 4: a mapping of type set is not read"),
        ("a: !!map [b]\n", "line 1, column 4: a sequence of type map is not read"),
        ("a: !!int abc\n", "line 1, column 4: 'abc' is no int"),
        ("a: !!bool ''\n", "line 1, column 4: '' is no bool"),
        ("a: 0b_\n", "line 1, column 4: '0b_' is no int"),
        (f"a: {'1' * 5000}\n", "line 1, column 4: a number of 5,000 characters"),
        (f"a: 1{':1' * 50_000}\n", "line 1, column 4: a number of 100,001 characters"),
        (f"a: 0x{'1' * 5000}\n", "line 1, column 4: a number of 5,002 characters"),
        ("a: &b [*b]\n", "line 1, column 4: more than 100,000 values with all aliases resolved"),
        (BOMB, "more than 100,000 values with all aliases resolved"),
        ("[" * 200_000, "nested too deeply"),
        ("- " * 200_000, "nested too deeply"),
        ('a: "\\e[31m"\n', r"a control character or half a character in '\x1b[31m'"),
        ('"\\ud800": 1\n', r"a control character or half a character in '\ud800'"),
        ("a: *nothing\n", "line 1, column 4: found undefined alias 'nothing'"),
        ("a: \x07\n", "special characters are not allowed"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_yaml_text(text, "f.yaml")
    assert str(error.value).startswith("f.yaml is no valid YAML: ")
    assert message in str(error.value)
    assert str(error.value).isprintable()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"a: \xff\n", "can't decode byte 0xff"), (b"# " + b"x" * 2**24, "more than 16,777,216 bytes")],
    ids=["encoding", "size"],
)
def test_a_file_that_is_no_text_is_one_line(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"f.yaml: cannot be read: .*{why}"):
        read_yaml_file(path, str(path), "")


@pytest.mark.parametrize("path", sorted((SHIPPED / "configs").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_both_readers_find_the_same(path: Path) -> None:
    """libyaml reads first; where it finds a mistake, PyYAML's own reader says which."""
    text = path.read_text()
    assert yaml_text._content(yaml_text._Loader(text)) == yaml_text._content(yaml_text._Explaining(text))
