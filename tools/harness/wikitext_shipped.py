"""WikiText for EleutherAI's lm-evaluation-harness, without a network: what `tools/evaluate.py --wikitext` scores.

    pip install 'megatron-lowprec[lm-eval]'
    megatron-lowprec export --load runs/my_run --out my_model --dtype float32
    lm_eval --model hf --model_args pretrained=my_model,dtype=float32 --include_path tools/harness \
        --tasks wikitext_shipped

The harness's own task `wikitext` is the same on articles that it downloads. docs/guide/checkpoints.md says how its
figures and those of evaluate come to agree. Another file in WikiText's format, plain or .xz: ``--metadata '{"file":
"wiki.raw"}'``.
The harness imports this module by its path, and needs the package installed or in PYTHONPATH.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_lowprec.shipped import find
from megatron_lowprec.training.data.wikitext import SHIPPED, read

if TYPE_CHECKING:
    from datasets import Dataset


def load(file: str = SHIPPED, **_others: Any) -> dict[str, Dataset]:
    """The only split, one row a page: ``text`` as a model reads it, ``words`` and ``size`` of the text as it came.

    ``_others`` is what else the harness knows of a task, such as its version and the model's arguments.
    """
    from datasets import Dataset  # comes with the harness

    return {"test": Dataset.from_list([asdict(page) for page in read(str(find(file)))])}


def measure(page: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """Log likelihood of a page, and what the harness divides the sum over all pages by."""
    (nats,) = results
    by_word, by_byte = (nats, page["words"]), (nats, page["size"])
    return {"word_perplexity": by_word, "byte_perplexity": by_byte, "bits_per_byte": by_byte}
