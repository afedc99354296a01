"""Absolute paths of a machine become placeholders, and nothing else does."""

import pytest

from megatron_lowprec.report.archives.redaction import Redaction


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("save: /home/ann/repo/runs/sweep/job", "save: RUNS/sweep/job"),
        ("[/home/ann/repo/data/wiki, /home/ann/wiki]", "[REPOSITORY/data/wiki, HOME/wiki]"),
        ('"/home/ann"', '"HOME"'),
        ("--data=/mnt/big/corpora/wiki_text", "--data=FOLDER1/wiki_text"),
        ("/mnt/a/x /mnt/b/x /mnt/a/y", "FOLDER1/x FOLDER2/x FOLDER1/y"),
        ('File "/usr/lib/python3.11/os.py", line 3', 'File "FOLDER1/os.py", line 3'),
        ("PATH=/usr/local/bin:/opt/x/bin", "PATH=FOLDER1/bin:FOLDER2/bin"),
        ("file:///home/ann/wiki", "file://HOME/wiki"),
        ("/home/ann-2/wiki", "FOLDER1/wiki"),  # another home
        # not a machine's
        ("configs/models/gpt.yaml", "configs/models/gpt.yaml"),
        ("runs/home/ann/x", "runs/home/ann/x"),
        ("64.2 TFLOP/s/GPU, 10/ 1100", "64.2 TFLOP/s/GPU, 10/ 1100"),
        ("https://arxiv.org/abs/2502.20586", "https://arxiv.org/abs/2502.20586"),
    ],
)
def test_paths(text: str, replaced: str) -> None:
    known = {"/home/ann": "HOME", "/home/ann/repo": "REPOSITORY", "/home/ann/repo/runs/sweep": "RUNS/sweep"}
    assert Redaction(known)(text) == replaced


def test_equal_folders_are_equal_in_all_texts() -> None:
    redact = Redaction({"/home/ann": "HOME"})
    assert [redact(text) for text in ("/a/b/x", "/c/d/x", "/a/b/z")] == ["FOLDER1/x", "FOLDER2/x", "FOLDER1/z"]
