"""Every golden case (outputs of other projects' code) through the package's own functions: tests/golden/README.md."""

from functools import cache
from pathlib import Path

import pytest

from tests.golden import check_golden
from tests.golden_adapter import adapt

FOLDER = Path(__file__).parent / "golden"


@cache
def inputs() -> check_golden.Tensors:
    return check_golden.load(FOLDER, "inputs")[0]


@pytest.mark.parametrize("case", check_golden.cases(FOLDER))
def test_all_results_of_the_peer_are_met(case: str) -> None:
    arrays, meta = check_golden.load(FOLDER, case)
    groups = check_golden.groups(case, arrays, inputs())
    found = {name: check_golden.compare_group(case, name, group, meta, adapt) for name, group in groups.items()}
    assert [name for name, result in found.items() if result.declined] == []
    assert [left_out for result in found.values() for left_out in result.left_out] == []
    assert [difference for result in found.values() for difference in result.differences] == []
    assert sum(result.entries for result in found.values()) > 0


def test_the_folder_holds_all_the_cases() -> None:
    # files as listed in golden/README.md: a case lost from the folder would otherwise go unnoticed
    assert len(check_golden.cases(FOLDER)) == len(list(FOLDER.glob("*.safetensors"))) - 1
    kinds = {
        "element_formats": 1,
        "mx_torchao_floor": 5,
        "mx_torchao_rceil": 5,
        "mx_torchao_even": 5,
        "mx_microxcaling_even": 5,
        "mx_microxcaling_nearest": 2,
        "mxfp4_alg2_amazon_fp32": 1,
        "rht_amazon": 1,
        "linear_backward_amazon_mode": 2,
        "fp8block_te_": 8,
        "fp8block_deepgemm_": 2,
        "fp8_te_current_": 2,
        "fp8_te_delayed": 1,
        "fp8_torchao_": 2,
        "mxfp8_te_2d": 1,
        "nvfp4_te_": 3,
        "nvfp4_linear_te": 1,
        "nvfp4_4over6_te_": 5,
        "nvfp4_4over6_mit_": 5,
        "nvfp4_sr_mit_": 2,
        "nvfp4_sr_quartet2": 1,
        "nvfp4_rtn_quartet2": 1,
        "nvfp4_eden_quartet2": 1,
        "nvfp4_mseden_quartet2": 1,
        "fp4_ue5m3_graphcore_": 3,
        "mxfp4_tetrajet_": 3,
        "nvfp4_ragged_te_": 1,
        "nvfp4_torchao": 1,
        "nvfp4_train_torchao_": 1,
        "scale_msamp": 1,
        "optim_fp8_": 2,
        "greedy_partition_msamp": 1,
        "wgmma_mmasim": 1,
    }
    found = {kind: sum(case.startswith(kind) for case in check_golden.cases(FOLDER)) for kind in kinds}
    assert found == kinds
    assert sum(kinds.values()) == len(check_golden.cases(FOLDER))


def test_the_comparison_notices_one_wrong_entry() -> None:
    case, name = "mx_torchao_floor_fp4_e2m1", "normal_f32"
    arrays, meta = check_golden.load(FOLDER, case)
    group = check_golden.groups(case, arrays, inputs())[name]

    def off_by_one_code(*args: object) -> dict:
        right = dict(adapt(*args))  # type: ignore[arg-type]
        right["codes"] = right["codes"].clone()
        right["codes"][0, 0] ^= 1
        return right

    assert check_golden.compare_group(case, name, group, meta, off_by_one_code).differences != []
