"""YAML that people write: what is no mistake is read as YAML says, what is one is said with its place."""

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.yaml_text import read_yaml_text


def test_what_is_right_is_read_as_ever() -> None:
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
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4: could not determine a constructor"),
        ("a: *nothing\n", "line 1, column 4: found undefined alias 'nothing'"),
        ("a: \x07\n", "special characters are not allowed"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_yaml_text(text, "f.yaml")
    assert str(error.value).startswith("f.yaml is no valid YAML: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
