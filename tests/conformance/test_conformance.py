"""The conformance kit: our quantizers pass it, wrong ones fail by name, and its files hold what their page says."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_lowprec.conformance import own_adapter
from megatron_lowprec.conformance.check import check, load_adapter, main
from megatron_lowprec.conformance.reference_vectors import recipe_operands, reference_cases, reference_inputs
from megatron_lowprec.conformance.vectors import Case, Group, Tensors, read_cases
from megatron_lowprec.errors import UserError
from megatron_lowprec.recipe.registry import get_recipe, recipes
from tests.docs.markdown import ROOT, fences
from tests.training.helpers import largest_file

OWN = "megatron_lowprec.conformance.own_adapter:adapt"
GOLDEN = Path(__file__).parents[1] / "golden"
# of integer arithmetic: another digest would change the vectors of everybody
DIGEST = "0c9784b0c92783d4"
RESULTS = {
    "fp8_blockwise.fprop.weight": "3bb0a8f89b329f0b",
    "mxfp8.fprop.input": "6a3fa22978d9e3aa",
    "mxfp4_rht_sr.dgrad.grad_output": "d031151469ae141b",
    "nvfp4.wgrad.grad_output": "6bb6319a595438bf",
    "quartet2.dgrad.grad_output": "5225cb6e237bd571",
}


def wrong(case: str, group: str, x: torch.Tensor | None, given: Tensors, meta: dict[str, str]) -> Tensors | None:
    """Ties away from zero, where the recipe rounds them to even."""
    spec = json.loads(meta["spec"]) | {"rounding": "half_away"}
    return own_adapter.adapt(case, group, x, given, meta | {"spec": json.dumps(spec)})


def test_our_quantizers_have_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--adapter", OWN, "--require", "."]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(" 0 differ, 0 results left out")
    assert not last.startswith("0 cases")


def test_a_wrong_quantizer_is_named_with_case_entry_and_both_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--adapter", f"{__name__}:wrong", "--only", "^mxfp8.fprop.input$"]) == 1
    printed = capsys.readouterr().out
    assert "mxfp8.fprop.input: 31680 entries, differs\n" in printed
    (line,) = [line for line in printed.splitlines() if " ties_e4m3.codes: " in line]
    assert line.startswith("  mxfp8.fprop.input ties_e4m3.codes: ")
    # a midpoint above the value of an even code
    assert " of 2048 differ; at [0, " in line
    codes = [int(code, 16) for code in re.findall(r"0x\w\w", line)]
    assert codes[0] % 2 == 0
    assert codes[1] == codes[0] + 1
    assert " 0 differ" not in printed.splitlines()[-1]


def test_every_operand_of_every_recipe_has_a_case() -> None:
    named = {user for users in recipe_operands().values() for user in users}
    for name in recipes():
        for gemm, spec in get_recipe(name).gemms.items():
            for operand in ("input", "weight", "grad_output"):
                assert (f"{name}.{gemm}.{operand}" in named) == (getattr(spec, operand) is not None)


def test_inputs_are_the_same_on_every_machine() -> None:
    digest = hashlib.sha256()
    for name, value in reference_inputs().items():
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == DIGEST


def test_exported_vectors_are_the_ones_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    assert main(["--export", str(folder), "--only", "mxfp4|format_e2m1"]) == 0
    written = list(read_cases(folder))
    in_memory = sorted(reference_cases("mxfp4|format_e2m1"), key=lambda case: case.name)
    assert [case.name for case in written] == [case.name for case in in_memory]
    for case, same in zip(written, in_memory, strict=True):
        assert case.meta == same.meta
        groups, others = ({group.name: group for group in each.groups} for each in (case, same))
        assert groups.keys() == others.keys()
        for name, group in groups.items():
            for field in ("given", "results"):
                mine, theirs = getattr(group, field), getattr(others[name], field)
                assert mine.keys() == theirs.keys()
                assert all(torch.equal(mine[key].nan_to_num(7.0), theirs[key].nan_to_num(7.0)) for key in mine)
    assert main(["--vectors", str(folder), "--adapter", OWN, "--require", "."]) == 0
    with pytest.raises(UserError, match=r"has \*\.safetensors; name a new folder"):
        main(["--export", str(folder)])


def test_an_export_that_fails_leaves_no_vectors(tmp_path: Path) -> None:
    """Fewer files would be taken for all, and stand in the way of the next attempt."""
    folder, export = tmp_path / "vectors", ["--only", "mxfp4", "--export", str(tmp_path / "vectors")]
    assert main(export) == 0
    size = max(path.stat().st_size for path in folder.iterdir())
    written = {path.name for path in folder.iterdir()}
    shutil.rmtree(folder)
    with largest_file(size - 1), pytest.raises(Exception, match="File too large"):
        main(export)
    assert list(folder.iterdir()) == []
    assert main(export) == 0
    assert {path.name for path in folder.iterdir()} == written


def test_a_result_that_is_left_out_fails_only_where_it_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    def part(*arguments: object) -> Tensors | None:
        return {"codes": own_adapter.adapt(*arguments)["codes"]} if arguments[1] == "normal" else None  # type: ignore

    name = "mxfp8.fprop.input"
    assert check(reference_cases(f"^{name}$"), part) == 0
    assert "mxfp8.fprop.input: 8192 entries, equal, 11 results left out" in capsys.readouterr().out
    assert check(reference_cases(f"^{name}$"), part, require="mxfp8") == 1
    assert "  mxfp8.fprop.input normal.scale_e8m0: required, but left out\n" in capsys.readouterr().out


def one(results: Tensors, marks: Tensors | None = None, given: Tensors | None = None, **meta: str) -> Case:
    return Case("one", meta, (Group("x", torch.zeros(2, 32), given or {}, results, marks or {}),))


@pytest.mark.parametrize(
    ("case", "got", "code"),
    [
        # NaN is NaN; a zero has a sign
        (one({"values": torch.tensor([torch.nan])}), {"values": -torch.tensor([torch.nan])}, 0),
        (one({"values": torch.tensor([0.0])}), {"values": torch.tensor([-0.0])}, 1),
        (one({"values": torch.tensor([0.0])}, zero_sign="ignored"), {"values": torch.tensor([-0.0])}, 0),
        (one({"codes": torch.tensor([[0x7F]])}, format="e4m3"), {"codes": torch.tensor([[0xFF]])}, 0),
        (one({"codes": torch.tensor([[0x7F]])}, format="e5m2"), {"codes": torch.tensor([[0xFF]])}, 0),
        (one({"codes": torch.tensor([[0x7C]])}, format="e5m2"), {"codes": torch.tensor([[0xFC]])}, 1),
        # two codes a byte: the second one differs by the sign of its zero
        (one({"codes": torch.zeros(2, 16)}), {"codes": torch.full((2, 16), 0x80)}, 1),
        (one({"codes": torch.zeros(2, 16)}, zero_sign="ignored"), {"codes": torch.full((2, 16), 0x80)}, 0),
        (one({"dequant": torch.ones(1)}, tolerance='{"dequant": 1e-6}'), {"dequant": torch.ones(1) + 2.0**-21}, 0),
        (one({"dequant": torch.ones(1)}, tolerance='{"dequant": 1e-7}'), {"dequant": torch.ones(1) + 2.0**-21}, 1),
        (one({"scale_inv": torch.ones(2, 1)}), {"scale_inv": torch.ones(2)}, 1),
    ],
)
def test_exit_codes_of_comparisons(case: Case, got: Tensors, code: int) -> None:
    for group in case.groups:
        for tensors in (group.results, got):
            tensors |= {key: value.to(torch.uint8) for key, value in tensors.items() if key == "codes"}
    assert check([case], lambda *_: got) == code


@pytest.mark.parametrize(("at", "code"), [((0, 3), 0), ((0, 7), 0), ((0, 8), 1), ((1, 17), 0), ((1, 15), 1)])
def test_marked_entries_and_blocks_are_not_compared(at: tuple[int, int], code: int) -> None:
    """One entry of 4 bits is marked, and by a NaN scale a block of 16; marks of blocks are those of packed codes."""
    marks = {"quirk_elements": torch.zeros(2, 32, dtype=torch.uint8), "quirk_blocks": torch.zeros(2, 4)}
    marks["quirk_elements"][0, 7], marks["quirk_blocks"][0, 0] = 1, 1
    scale = torch.tensor([[1, 1], [1, 255]], dtype=torch.uint8)
    case = one({"codes": torch.zeros(2, 16, dtype=torch.uint8), "scale_e8m0": scale}, marks)
    got = torch.zeros(2, 16, dtype=torch.uint8)
    got[at[0], at[1] // 2] = 1 << 4 * (at[1] % 2)
    assert check([case], lambda *_: {"codes": got, "scale_e8m0": scale}) == code


def test_peers_folders_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Groups whose names hold dots, given draws and signs, quirks of entries and of blocks."""
    only = "mx_(torchao|microxcaling)|nvfp4_te_1x16$|mxfp4_alg2|^fp8_torchao|optim_fp8_coat"
    arguments = ["--vectors", str(GOLDEN), "--adapter", "tests.golden_adapter:adapt", "--ignore-zero-signs"]
    main([*arguments, "--only", only])
    printed = capsys.readouterr().out
    lines = [line.split(":")[0] for line in printed.splitlines() if line.startswith("  ")]
    # scales and weights of updates are in a tolerance, which a peer's file does not state
    assert [line for line in lines if not ("optim" in line and line.endswith((".p", " p", ".scale")))] == [], printed
    assert "optim_fp8_coat_plain: " in printed
    assert "mx_torchao_even_fp4_e2m1: " in printed


def test_the_page_s_adapter_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [f.body for f in fences(ROOT / "docs/guide/conformance.md") if f.language == "python"]
    scope: dict[str, object] = {}
    exec(example, scope)
    # torch.log2 errs next to powers of two, which only the ties meet
    assert check(reference_cases("^mxfp8.fprop.input$"), scope["adapt"]) in (0, 1)  # type: ignore[arg-type]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert not any(" normal." in line or " wide." in line for line in lines), lines


def test_only_files_need_safetensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--adapter", OWN, "--only", "^mxfp8.fprop.input$"]) == 0
    with pytest.raises(UserError, match="need safetensors, which is not installed: pip install safetensors"):
        main(["--export", str(tmp_path / "vectors")])


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--adapter nowhere:adapt: No module named 'nowhere'; give MODULE:FUNCTION"):
        load_adapter("nowhere:adapt")
    with pytest.raises(UserError, match=r"holds no \*\.safetensors besides inputs"):
        main(["--vectors", str(tmp_path)])
    with pytest.raises(UserError, match="no case has such a name"):
        main(["--adapter", OWN, "--only", "mxfp7"])
    (tmp_path / "case.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"case\.safetensors is not a safetensors file"):
        main(["--vectors", str(tmp_path), "--adapter", OWN])
    save_file({"x": torch.zeros(1), "codes": torch.zeros(1)}, str(tmp_path / "case.safetensors"))
    with pytest.raises(UserError, match="the adapter returned no dict of tensors for case"):
        check(read_cases(tmp_path), lambda *_: {"codes": 1})  # type: ignore[dict-item,return-value]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--adapter", OWN, "--only", "^mxfp8.fprop.input$", "--require", "mxfp88"], "'mxfp88': the name of no case"),
        (["--only", "("], "'(' is no regular expression"),
        (["--only", "nothing", "--list"], "'nothing': no case has such a name"),
        (["--only", "nothing", "--export", "vectors"], "'nothing': no case has such a name"),
    ],
)
def test_a_selection_of_nothing_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(words)):
        main(arguments)
    assert not any(tmp_path.iterdir())


def torch_codes(case: str, group: str, x: torch.Tensor | None, given: Tensors, meta: dict[str, str]) -> Tensors | None:
    """E4M3 codes in torch's dtype."""
    found = own_adapter.adapt(case, group, x, given, meta)
    return found and found | {key: value.view(torch.float8_e4m3fn) for key, value in found.items() if key == "codes"}


def test_codes_may_have_a_dtype_of_torch() -> None:
    assert main(["--adapter", f"{__name__}:torch_codes", "--only", "^mxfp8.fprop.input$", "--require", "."]) == 0


def test_arrays_without_a_group_keep_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    vectors = ["--vectors", str(GOLDEN), "--adapter", "tests.golden_adapter:adapt"]
    assert main([*vectors, "--only", "^mxfp8_te_2d$", "--require", "."]) == 0
    assert " 0 results left out" in capsys.readouterr().out


def test_the_vectors_are_those_of_the_last_release() -> None:
    """A change of a reference's bits changes a digest; it belongs into the changelog."""
    digests = {}
    for case in reference_cases(
        "^(fp8_blockwise.fprop.weight|mxfp8.fprop.input|mxfp4_rht_sr.dgrad.grad_output|nvfp4.wgrad.grad_output|quartet2.dgrad.grad_output)$"
    ):
        digest = hashlib.sha256()
        for group in case.groups:
            for key, value in sorted(group.results.items()):
                digest.update(f"{group.name}.{key}".encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
        digests[case.name] = digest.hexdigest()[:16]
    assert digests == RESULTS


def test_an_adapter_that_answers_under_other_names_is_refused() -> None:
    with pytest.raises(UserError, match="no entry was compared"):
        check(reference_cases("^mxfp8.fprop.input$"), lambda *_: {"code": torch.zeros(1)})
