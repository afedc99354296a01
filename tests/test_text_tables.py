"""Tables as lines of text."""

from megatron_lowprec.text_tables import markdown_table, plain_table

COLUMNS, ROWS = ("name", "loss\nnats"), [("bf16", "3.7"), ("mxfp4_sr", "12.25")]


def test_plain_tables_align_words_left_and_numbers_right() -> None:
    assert plain_table(COLUMNS, ROWS, left=["name"]) == [
        "name       loss",
        "           nats",
        "--------  -----",
        "bf16        3.7",
        "mxfp4_sr  12.25",
    ]
    assert plain_table(["a", "b"], [["1", "22"]], rule=False) == ["a  b", "1  22"]


def test_markdown_tables_say_how_columns_align() -> None:
    assert markdown_table(["a", "b"], [["x", "1"]], left=["a"]) == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
    assert markdown_table(["a", "b"], [])[1] == "| --- | --- |"
