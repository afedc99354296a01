"""No file runs code: every flag that names a checkpoint under every kind of pickle, and every reader of files."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import lzma
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save

from megatron_lowprec.commands import evaluate, export_hf, import_hf, import_megatron, inspect_checkpoint
from megatron_lowprec.errors import UserError
from megatron_lowprec.shipped import SHIPPED
from megatron_lowprec.training.checkpoint import safe_load
from megatron_lowprec.training.config.arguments import KINDS, flag
from megatron_lowprec.training.config.options import OPTIONS
from tests.tools.test_fuzz import MODULES
from tests.training.checkpoint.foreign import CRAFTS, MARKER, Foreign, change, common, common_object, objects, saved
from tests.training.checkpoint.forms import common_as_file, common_as_object
from tests.training.conftest import Drive, checkpoints  # noqa: F401 - a fixture
from tests.training.helpers import REPOSITORY, argv
from tools import weight_norms
from tools.fuzz.run import FuzzedReader

LATEST, OLDER = "iter_0000004", "iter_0000002"


# ---- who reads it


class Refused(Exception):  # noqa: N818 - what a program says, whether by exit code or by exception
    pass


def tool(main: Callable[[list[str]], int], *arguments: str) -> Callable[[Drive, pytest.CaptureFixture[str]], None]:
    def read(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
        if main(list(arguments)):
            captured = capsys.readouterr()
            raise Refused(captured.err + captured.out)

    return read


def driver(**changes: Any) -> Callable[[Drive, pytest.CaptureFixture[str]], None]:
    def read(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
        try:
            drive(argv(**{"train_iters": 5, "recipe": "fp8_delayed", "lr_decay_iters": 10, **changes}))
        except UserError as error:
            raise Refused(str(error)) from None

    return read


DATA = ("--data-path", "text.jsonl", "--data-cache-path", "cache")
TOKENS = ("--vocab-size", "255")
# (file, flag) -> the checkpoint that is meant, how it is read, whether that reads stored objects.
READERS: dict[tuple[str, str], list[tuple[str, Callable[..., None], bool]]] = {
    ("pretrain_gpt.py", "--load"): [
        (LATEST, driver(load="out", save="new"), True),
        (LATEST, driver(load="out", save="new", finetune=True), True),
    ],
    ("pretrain_gpt.py", "--save"): [(LATEST, driver(save="out"), True)],
    ("pretrain_gpt.py", "--pretrained-checkpoint"): [(LATEST, driver(save="new", pretrained_checkpoint="out"), True)],
    ("commands/evaluate.py", "--load"): [
        (LATEST, tool(evaluate.main, "--load", "out", *DATA), True),
        (LATEST, tool(evaluate.main, "--load", f"out/{LATEST}", *DATA), True),
    ],
    ("commands/evaluate.py", "--iteration"): [
        (OLDER, tool(evaluate.main, "--load", "out", "--iteration", "2", *DATA), True)
    ],
    ("commands/export_hf.py", "--load"): [
        (LATEST, tool(export_hf.main, "--load", "out", "--out", "hf"), False),
        (LATEST, tool(export_hf.main, "--load", f"out/{LATEST}", "--out", "hf"), False),
    ],
    ("commands/export_hf.py", "--iteration"): [
        (OLDER, tool(export_hf.main, "--load", "out", "--iteration", "2", "--out", "hf"), False)
    ],
    ("commands/import_megatron.py", "--load"): [
        (LATEST, tool(import_megatron.main, "--load", "out", "--save", "new", *TOKENS), False),
        (LATEST, tool(import_megatron.main, "--load", f"out/{LATEST}", "--save", "new", *TOKENS), False),
    ],
    ("commands/inspect_checkpoint.py", "folder"): [
        (LATEST, tool(inspect_checkpoint.main, "out"), False),
        (LATEST, tool(inspect_checkpoint.main, f"out/{LATEST}"), False),
    ],
    ("commands/inspect_checkpoint.py", "--iteration"): [
        (OLDER, tool(inspect_checkpoint.main, "out", "--iteration", "2"), False)
    ],
    ("tools/weight_norms.py", "--load"): [
        (LATEST, tool(weight_norms.main, "--load", "out", "--out", "norms.json"), False)
    ],
}
# Of another format, and tested below.
OTHERS = {("commands/import_hf.py", "--load")}
CASES = [
    pytest.param(way, id=f"{Path(file).stem} {name} {number}")
    for (file, name), ways in READERS.items()
    for number, way in enumerate(ways)
]


@pytest.fixture
def out(checkpoints: Path, drive: Drive) -> Path:  # noqa: F811
    """A copy of a run with checkpoints of iterations 2 and 4, with args as Megatron-LM writes them."""
    folder = Path(shutil.copytree(checkpoints, "out"))
    Path("text.jsonl").write_text(json.dumps({"text": " ".join(map(str, range(100)))}) + "\n")
    for one in (LATEST, OLDER):
        options = yaml.safe_load((folder / one / "config.yaml").read_text())["options"]
        content = torch.load(common_as_file(folder / one), weights_only=True)
        args = Namespace(**options, add_bias_linear=True, bias_gelu_fusion=True)
        change(folder / one, "common.pt", saved({**content, "args": args}))
    return folder


@pytest.mark.parametrize("way", CASES)
@pytest.mark.parametrize("craft", CRAFTS, ids=lambda craft: craft.__name__)
def test_a_pickle_is_refused_by_name_and_not_run(
    drive: Drive,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    craft: Callable[[Path], None],
    way: tuple[str, Callable[..., None], bool],
) -> None:
    meant, read, reads_objects = way
    craft(out / meant)
    if craft is objects and not reads_objects:
        read(drive, capsys)
    else:
        with pytest.raises(Refused, match=r"asks for posix\.mkdir when it is unpickled"):
            read(drive, capsys)
    assert not MARKER.exists()


@pytest.mark.parametrize("way", CASES)
def test_the_same_command_reads_what_nothing_was_done_to(
    drive: Drive, out: Path, capsys: pytest.CaptureFixture[str], way: tuple[str, Callable[..., None], bool]
) -> None:
    way[1](drive, capsys)


@pytest.mark.parametrize("craft", CRAFTS, ids=lambda craft: craft.__name__)
def test_the_pickles_would_run_code(out: Path, craft: Callable[[Path], None]) -> None:
    """The danger is real: an unrestricted unpickler runs each of them."""
    craft(out / LATEST)
    name = {common: "common.pt", objects: "__9_0.distcp"}.get(craft, ".metadata")
    content = (out / LATEST / name).read_bytes()
    if name == ".metadata":
        pickle.loads(content)
    else:
        torch.load(io.BytesIO(content), weights_only=False)
    assert MARKER.exists()


# ---- formats of others


def legacy(content: Any) -> None:
    """Megatron-LM's older format, one file a rank."""
    folder = Path("legacy/iter_0000007/mp_rank_00")
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(saved(content))
    Path("legacy/latest_checkpointed_iteration.txt").write_text("7")


def test_a_file_of_a_rank_is_refused_by_name(drive: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    legacy({"args": Namespace(hidden_size=64), "model": {"embedding.word_embeddings.weight": Foreign()}})
    assert import_megatron.main(["--load", "legacy", "--save", "new", *TOKENS]) == 2
    said = capsys.readouterr().err
    assert "model_optim_rng.pt asks for posix.mkdir when it is unpickled, which can run code" in said
    assert "add --trust if you know the folder's origin" in said
    assert not MARKER.exists()


def test_args_are_read_from_a_checkpoint_of_a_later_release(drive: Drive, out: Path) -> None:
    common_as_object(out / LATEST)
    assert import_megatron.main(["--load", "out", "--save", "new", *TOKENS]) == 0


def test_args_among_the_tensors_are_refused_by_name(
    drive: Drive, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common_object(out / LATEST)
    assert import_megatron.main(["--load", "out", "--save", "new", *TOKENS]) == 2
    assert "asks for posix.mkdir when it is unpickled" in capsys.readouterr().err
    assert not MARKER.exists()


def test_trust_reads_what_no_restricted_unpickler_does(
    drive: Drive, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Harmless, but of a class that Megatron-core does not declare safe: in args, and in .metadata."""
    content = torch.load(out / LATEST / "common.pt", weights_only=False)
    content["args"].of_a_fork = Fraction(1, 3)
    change(out / LATEST, "common.pt", saved(content))
    command = ["--load", "out", "--save", "new", *TOKENS]
    assert import_megatron.main(command) == 2
    assert "common.pt asks for fractions.Fraction when it is unpickled" in capsys.readouterr().err
    found = safe_load.read_metadata(out / LATEST)
    found.planner_data = Fraction(1, 3)
    change(out / LATEST, ".metadata", pickle.dumps(found))
    assert import_megatron.main([*command, "--trust"]) == 0


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_hugging_face_folder_is_not_unpickled(
    drive: Drive, out: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert export_hf.main(["--load", "out", "--out", "hf"]) == 0
    Path("hf/model.safetensors").unlink()
    Path("hf", name).write_bytes(saved({"wte.weight": Foreign()}))
    assert import_hf.main(["--load", "hf", "--save", "new"]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert not MARKER.exists()


# ---- files of every kind


def npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full((20, 2), Foreign(), dtype=object), allow_pickle=True)
    return stream.getvalue()


def archive() -> bytes:
    """A folder outside of the archive."""
    header = json.dumps({"folders": [f"../{MARKER}"], "texts": {}, "tables": []})
    return lzma.compress(save({"header": np.frombuffer(header.encode(), np.uint8)}))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "pickle": lambda: pickle.dumps(Foreign()),
    "torch": lambda: saved({"args": Namespace(), "model": {"x": Foreign()}}),
    "npy": npy,
    "yaml": lambda: f"!!python/object/apply:os.mkdir [{MARKER}]\n".encode(),
    "yaml in a key": lambda: f"options: {{a: !!python/object/new:os.mkdir [{MARKER}]}}\n".encode(),
    "shell": lambda: f'slurm: {{comment: "a\\nmkdir {MARKER} #"}}\nsizes: {{"$(mkdir {MARKER})": {{}}}}\n'.encode(),
    "archive": archive,
}


@pytest.mark.parametrize("name", MODULES)
def test_no_reader_runs_code_of_a_file(known: dict[str, FuzzedReader], tmp_path: Path, name: str) -> None:
    """Each reader of the repository, Megatron-core's and torch's behind them included, on code of every kind."""
    reader = known[name]

    def read(content: Callable[[], bytes], path: str) -> None:
        whole = Path(path).read_bytes()
        Path(path).write_bytes(content())
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reader.read()
        except (UserError, safe_load.Damaged):
            pass
        finally:
            Path(path).write_bytes(whole)

    with contextlib.chdir(tmp_path):
        reader.make()
        for kind, content in HOSTILE.items():
            for path in reader.files:
                read(content, path)
                assert not MARKER.exists(), f"{path} as {kind}"


@pytest.mark.parametrize("kind", ["pickle", "torch", "npy", "yaml"])
def test_the_files_would_run_code(tmp_path: Path, kind: str) -> None:
    """The danger is real: readers without restrictions run each of them."""
    unrestricted: dict[str, Callable[[io.BytesIO], Any]] = {
        "pickle": pickle.load,
        "torch": lambda stream: torch.load(stream, weights_only=False),
        "npy": lambda stream: np.load(stream, allow_pickle=True),
        "yaml": lambda stream: yaml.load(stream, yaml.UnsafeLoader),
    }
    with contextlib.chdir(tmp_path):
        unrestricted[kind](io.BytesIO(HOSTILE[kind]()))
        assert MARKER.exists()


# ---- that none is missing


def flags(file: Path) -> Iterator[str]:
    """Flags and arguments of a tool that name a checkpoint, by their names or by what their help says."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            texts = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            names = re.search(r"load\b|checkpoint|resume|pretrained|iteration$", texts[0])
            if names or any("iter_" in text for text in texts):
                yield texts[0]


def tools() -> dict[str, Path]:
    """Programs, by their paths in the repository or, of commands, in the package."""
    commands = {f"commands/{path.name}": path for path in (SHIPPED / "commands").glob("*.py")}
    return commands | {str(path.relative_to(REPOSITORY)): path for path in (REPOSITORY / "tools").rglob("*.py")}


def test_every_flag_that_names_a_checkpoint_is_walked() -> None:
    found = {(program, name) for program, path in tools().items() for name in flags(path)}
    for name, option in OPTIONS.items():
        of_folders = KINDS[name].element is str and "folder" in option.help
        if of_folders and re.search("checkpoint|load", name + option.help):
            found.add(("pretrain_gpt.py", flag(name)))
    assert found == set(READERS) | OTHERS


READING = {f"checkpoint.{name}" for name in ("checkpoint", "loader", "resume", "safe_load")} | {
    "convert.stock",
    "convert.store",
}


def test_every_tool_that_imports_a_reader_is_walked() -> None:
    found = set()
    for program, path in tools().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_lowprec.training"):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                if names & {f"megatron_lowprec.training.{name}" for name in READING}:
                    found.add(program)
    # tools/layout_parity reads its own checkpoints by the driver's functions; tools/fuzz calls these as programs do.
    found = {file for file in found if not file.startswith("tools/fuzz/")}
    assert found == {file for file, _ in {*READERS, *OTHERS}} - {"pretrain_gpt.py"} | {"tools/layout_parity/setup.py"}


RUNNING = ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "shell")
LOADS_YAML = ("megatron_lowprec/recipe/yaml_text.py", "yaml.load")


def test_no_text_is_run() -> None:
    """No eval, no shell, and one module that loads YAML, whose tags can name code."""
    found = set()
    for path in [REPOSITORY / "pretrain_gpt.py", *tools().values(), *(REPOSITORY / "megatron_lowprec").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            names += [node.arg] if isinstance(node, ast.keyword) and node.arg is not None else []
            found |= {(str(path.relative_to(REPOSITORY)), name) for name in names if name in RUNNING}
    assert found - {LOADS_YAML} == set()


UNPICKLING = ("torch.load", "pickle.load", "pickle.loads", "dist_checkpointing.load", "np.load", "joblib.load")
ALLOWED = {
    # Megatron-core's reader, of files that safe_load.py has checked.
    ("megatron_lowprec/training/checkpoint/checkpoint.py", "dist_checkpointing.load"),
    # Memory without a name, which only this process and its forks can write.
    ("megatron_lowprec/training/checkpoint/write_results.py", "pickle.loads"),
}


def test_one_module_unpickles_files() -> None:
    found = set()
    for path in [REPOSITORY / "pretrain_gpt.py", *tools().values(), *(REPOSITORY / "megatron_lowprec").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
            if name in UNPICKLING or name.endswith(("FileSystemReader", "Unpickler")):
                found.add((str(path.relative_to(REPOSITORY)), name))
    assert {one for one in found if one[0] != "megatron_lowprec/training/checkpoint/safe_load.py"} == ALLOWED
