"""Which GEMMs the backend of Blackwell's block-scaled units takes, and the reasons against the others."""

from __future__ import annotations

import pytest

from megatron_lowprec.linear.backends.blackwell_mx.why_not import product_of, why_not
from megatron_lowprec.linear.backends.table import choose, choose_without_gpu, emulated_rows
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.recipe.registry import get_recipe, recipes
from megatron_lowprec.recipe.schema import GEMM_OPERANDS
from tests.linear.blackwell_cases import ALL, IN, OUT, load


def test_the_backend_takes_all_gemms_of_mx_or_nvfp4_operands() -> None:
    """Of every registered recipe; shipped files also have formats and scales without such units."""
    reasons: dict[str, set[str]] = {}
    for name in ALL:
        for gemm, spec in load(name).gemms.items():
            operands = [getattr(spec, tensor) for tensor in GEMM_OPERANDS[gemm]]
            if any(each is not None and each.scale_format != "fp32" for each in operands):
                reason = why_not(gemm, spec, Target("sm100", IN, OUT))
                if reason is not None:
                    reasons.setdefault(reason, set()).add(name)
    assert not set.union(*reasons.values()) & set(recipes())
    assert sorted(reasons) == [
        "an operand stays in the compute dtype",
        "no product of E2M1 with UE5M3 scales of 16 entries",
        "one scale above the blocks' is that of the tensor, not of outer blocks",
    ]


def test_reasons_against_a_gemm_are_named() -> None:
    wide = Target("sm100", IN, OUT)
    nvfp4, blocks = get_recipe("nvfp4_all").fprop, get_recipe("fp8_blockwise").fprop
    assert why_not("fprop", nvfp4, wide) is None
    assert why_not("fprop", nvfp4, wide._replace(arch="sm90")) == "no NVFP4 GEMM on sm90"
    assert why_not("fprop", nvfp4, wide._replace(out_features=8)) == "out_features 8 is no multiple of 16"
    assert why_not("fprop", nvfp4, wide._replace(dtype="float32")) == (
        "block-scaled GEMMs are for bf16 models, this one is float32"
    )
    assert "not fp32 scales" in str(why_not("fprop", blocks, wide))
    found = choose("fprop", blocks, wide)
    assert found.describe() == "emulated (hopper_fp8: no FP8 GEMM of granularity 128x128 and 1x128 on sm100)"
    ue5m3 = load("configs/recipes/ue5m3.yaml").fprop
    assert "no product of E2M1 with UE5M3 scales" in str(why_not("fprop", ue5m3, wide))
    choice = choose_without_gpu("fprop", nvfp4, wide)
    assert choice.why == "no GPU here; blackwell_mx on sm100, sm103, sm120, unverified"


def test_native_off_leaves_the_backend_out() -> None:
    """Verified backends stay; the header says which products were never run here."""
    mxfp8, fp8 = get_recipe("mxfp8").fprop, get_recipe("fp8_current").fprop
    wide, off = Target("sm100", IN, OUT), emulated_rows(False, "off")
    assert choose("fprop", mxfp8, wide, off).describe() == ("emulated (blackwell_mx: --native off)")
    assert choose("fprop", fp8, wide, off).backend == "hopper_fp8"
    assert choose("fprop", mxfp8, wide, emulated_rows(True, "auto")).why == "asked"
    assert choose("fprop", mxfp8, wide, emulated_rows(False, "require")).header(["fprop"], "sm100") == (
        "fprop: blackwell_mx on sm100, unverified hardware, checked at start"
    )


@pytest.mark.parametrize(
    ("name", "gemm", "on_10", "on_12"),
    [
        ("mxfp8", "fprop", "scaled_mm", "dot_scaled"),
        ("mxfp8_e5m2_grad", "dgrad", "dot_scaled", "dot_scaled"),
        ("mxfp4_sr", "wgrad", "dot_scaled", "dot_scaled"),
        ("nvfp4_all", "wgrad", "scaled_mm", "dot_scaled"),
    ],
)
def test_products_by_device(name: str, gemm: str, on_10: str, on_12: str) -> None:
    """torch's scaled product where it has one: E4M3 without headroom, and NVFP4, on compute capability 10."""
    spec = get_recipe(name).gemms[gemm]
    assert [product_of(gemm, spec, arch) for arch in ("sm100", "sm103", "sm120")] == [on_10, on_10, on_12]
