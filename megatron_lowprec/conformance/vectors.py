"""Vectors: cases of inputs, what a quantizer is handed, and results; in memory and as folders of safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_lowprec.errors import UserError
from megatron_lowprec.files import whole_folder

Tensors = dict[str, torch.Tensor]
INPUTS = "inputs"
"""File of the named inputs of all cases."""
AXIS = "@axis0"
"""Behind an input's name: blocks run along its first axis, and a quantizer gets its transpose."""
_GIVEN = re.compile(r"(noise|sign)\d*|x|w|dy|grad_output|amax|old_scale|sizes|in\..*")
_MARKS = ("quirk_elements", "quirk_blocks")


@dataclass(frozen=True)
class Group:
    """One call of a quantizer.

    Attributes:
        name: of the input, with ``AXIS`` where it is transposed; "" or another name in cases that bring their inputs.
        x: the input, of the case's own if it brings one, or None.
        given: draws, sign vectors, amaxes and operands, by the name behind the group's.
        results: what is compared, likewise.
        marks: quirk_elements and quirk_blocks: entries that are not compared, of results with the same prefix.
    """

    name: str
    x: torch.Tensor | None
    given: Tensors = field(default_factory=dict)
    results: Tensors = field(default_factory=dict)
    marks: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A quantizer's groups, and the metadata of its file."""

    name: str
    meta: dict[str, str]
    groups: tuple[Group, ...]


def read_cases(folder: Path, only: str = "") -> Iterator[Case]:
    """The cases of a folder whose names match the regular expression ``only`` somewhere, by name.

    Raises:
        UserError: there is no such folder, no case in it, or a file that is not safetensors; safetensors is missing.
    """
    names = sorted(path.stem for path in folder.glob("*.safetensors") if path.stem != INPUTS)
    if not names:
        raise UserError(f"--vectors {folder} holds no *.safetensors besides {INPUTS}; --export FOLDER writes vectors")
    inputs = _read(folder / f"{INPUTS}.safetensors")[0] if (folder / f"{INPUTS}.safetensors").exists() else {}
    for name in names:
        if re.search(only, name):
            arrays, meta = _read(folder / f"{name}.safetensors")
            yield Case(name, meta, _groups(arrays, inputs))


def write_cases(folder: Path, inputs: Tensors, cases: Iterable[Case]) -> int:
    """Write ``inputs`` and cases, all or none, into a folder, which is created; returns the number of cases.

    Raises:
        UserError: the folder has vectors, or cannot be created; safetensors is missing.
    """
    if any(folder.glob("*.safetensors")):
        raise UserError(f"--export {folder} has *.safetensors; name a new folder")
    save_file = _safetensors().torch.save_file
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--export {folder} cannot be created: {error}") from None
    count = 0
    with whole_folder(folder) as partial:
        save_file(_stored(inputs), str(partial / f"{INPUTS}.safetensors"))
        for case in cases:
            count += 1
            arrays = {
                f"{group.name}.{key}" if group.name else key: value
                for group in case.groups
                for key, value in (group.given | group.results | group.marks).items()
            }
            save_file(_stored(arrays), str(partial / f"{case.name}.safetensors"), case.meta)
    return count


def _stored(arrays: Mapping[str, torch.Tensor]) -> Tensors:
    """Copies that share no memory, which safetensors refuses."""
    return {key: value.detach().cpu().clone().contiguous() for key, value in arrays.items()}


def _safetensors() -> Any:
    """The library, of which vectors in memory have no need."""
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise UserError("files of vectors need safetensors, which is not installed: pip install safetensors") from None
    return safetensors


def _read(path: Path) -> tuple[Tensors, dict[str, str]]:
    library = _safetensors()
    try:
        with library.safe_open(str(path), "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except library.SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None


def _groups(arrays: Tensors, inputs: Tensors) -> tuple[Group, ...]:
    """Arrays by group: of the longest name of an input that fits, else of what precedes the first dot."""
    known = [name + axis for name in inputs for axis in ("", AXIS)]
    groups: dict[str, Group] = {}
    for key, value in arrays.items():
        name = max((name for name in known if key.startswith(f"{name}.")), key=len, default=None)
        if name is None:
            head = key.split(".")[0]  # results of an array that has no group are in none either
            name = "" if head in arrays or head == "in" else head
        what = key[len(name) + 1 :] if name else key
        if name not in groups:
            x = inputs.get(name.removesuffix(AXIS))
            groups[name] = Group(name, x if x is None or not name.endswith(AXIS) else x.t())
        group = groups[name]
        kind = (
            group.marks
            if what.rpartition(".")[2] in _MARKS
            else group.given
            if _GIVEN.fullmatch(what)
            else group.results
        )
        kind[what] = value
    return tuple(
        replace(group, x=group.given.get("x")) if group.x is None else group
        for group in groups.values()
        if group.results
    )
