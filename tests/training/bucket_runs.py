"""``torchrun bucket_runs.py CASES.json`` is ``many_runs.py`` for data parallelism: a small model has several buckets.

Megatron-core's smallest bucket holds 40 million entries. Here collectives of some run under the layers of others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.training.distributed import startup
from tests.training import many_runs

_ENTRIES = 20_000


def main(cases: Path) -> None:
    startup.prepare_environment()  # before the import
    from megatron_lowprec.training import model

    of_any_size = model.DistributedDataParallelConfig

    def small(**options: Any) -> Any:
        return of_any_size(**options | ({"bucket_size": _ENTRIES} if options["bucket_size"] else {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "DistributedDataParallelConfig", small)
        many_runs.main(cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
