"""Statistics of operands from what a backend has quantized."""

import pytest
import torch

from megatron_lowprec.linear.backends.protocol import COLUMNWISE, ROWWISE
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.mcore.debug.operand_probe import _OperandStats
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.recipe.registry import get_recipe

STEP = RngStep(3, 0)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_rht_sr", "nvfp4_all"])
def test_operands_in_tiles_have_the_statistics_of_emulated_ones(name: str) -> None:
    """Packed codes and scales in tiles are not read as plain ones."""

    def of(backend: str) -> dict[object, torch.Tensor]:
        gemms = LinearGemms(get_recipe(name), LinearId(1, "fc1"), 0, AmaxHistory)
        gemms.backends.resolve(torch.zeros(256, 128).bfloat16())
        stats = _OperandStats(gemms, [], torch.device("cpu"))
        dy = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        for request in (ROWWISE[0], COLUMNWISE[0]):
            made, _ = gemms.backends.built(backend).quantize("grad_output", dy, STEP, request)
            stats.inspect("grad_output", dy, STEP, made)
        return {operand: found for operand, found in stats.stats.items() if bool(found.any())}

    want, got = of("emulated"), of("blackwell_mx")
    assert len(want) == 2
    assert got.keys() == want.keys()
    assert all(torch.equal(got[operand], found) for operand, found in want.items())
