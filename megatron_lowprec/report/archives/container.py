"""The file of an archive: an xz-compressed safetensors file, with all texts as JSON in the array ``header``.

Arrays of the table with the number N in the header's list are called ``N/KEY``; ``columns`` has their form. No file
that is read here can run code, decompress to more than ``LARGEST`` bytes, or name a place outside of the archive.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import check_text, parse_json
from megatron_lowprec.report.archives.columns import RowTable

ARCHIVE = ".safetensors.xz"
LARGEST, MOST_MEMBERS = 2**29, 10**5
"""Bytes of an archive's content, and its files and folders: a few kilobytes can hold more than any disk."""

_HEADER = "header"
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 0, "pb": 0}]


@dataclass
class Content:
    """An archive's folders, its texts by their paths, and its tables."""

    folders: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)
    tables: list[RowTable] = field(default_factory=list)


def write(path: Path, content: Content) -> None:
    """Write an archive; equal content gives equal bytes with the same version of liblzma.

    Raises:
        OSError: as ``write_bytes``.
    """
    tables = [{"file": table.file, "columns": table.columns, "rows": table.rows} for table in content.tables]
    header = {"folders": sorted(content.folders), "texts": dict(sorted(content.texts.items())), "tables": tables}
    arrays = {f"{at}/{key}": array for at, table in enumerate(content.tables) for key, array in table.arrays.items()}
    arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(save(arrays), filters=_XZ))


def read(path: Path) -> Content:
    """The content of an archive.

    Raises:
        UserError: a damaged archive, one that is too large, or a name outside of it.
    """
    try:
        with lzma.open(path) as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UserError(f"{path}: holds more than {LARGEST:,} bytes; name the folders of its runs instead")
        arrays = load(data)
        header = parse_json(arrays.pop(_HEADER).tobytes().decode("utf-8"))
        tables = [_table(at, found, arrays) for at, found in enumerate(header["tables"])]
        content = Content(set(header["folders"]), dict(header["texts"]), tables)
        names = [*content.folders, *content.texts, *(f"{each}/{table.file}" for table in tables for each in table.rows)]
        if len(names) > MOST_MEMBERS:
            raise UserError(f"{path}: holds more than {MOST_MEMBERS:,} files and folders; name the folders of its runs")
        for name in names:
            _check_name(name)
        if not all(isinstance(text, str) for text in content.texts.values()):
            raise ValueError("a text is none")
    except UserError:
        raise
    except (lzma.LZMAError, SafetensorError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        why = _in_a_line(error)
        raise UserError(f"{path}: damaged, or no archive of this version ({why}); copy it again") from None
    return content


def _table(at: int, found: Any, arrays: dict[str, Any]) -> RowTable:
    columns = dict(found["columns"])
    check_text(columns)
    own = {key: arrays[f"{at}/{key}"] for key, kind in columns.items() if kind != "null"}
    return RowTable(found["file"], columns, dict(found["rows"]), own)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is no name")
    check_text(name)
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
        raise ValueError(f"{name} is unsafe, as it is no plain path below a folder")


def _in_a_line(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split()) or type(error).__name__
