"""The fused MX kernel gives the reference's bits: interpreted here, compiled where there is a GPU."""

from itertools import product
from unittest.mock import patch

import pytest
import torch

from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.registry import get_recipe
from megatron_lowprec.recipe.schema import HADAMARD_BLOCKS
from tests.kernels.interpreted import assert_no_differences
from tests.kernels.mx_cases import gpu_cases, small_cases
from tests.kernels.mx_launch import Case, differences
from tests.kernels.mx_layers import coded_differences
from tests.kernels.mx_recipes import nvfp4_recipe

gpu_recipes = pytest.mark.parametrize(
    "recipe", [get_recipe("mxfp4_rht_sr"), nvfp4_recipe(), get_recipe("quartet2")], ids=lambda one: one.name
)


@pytest.mark.slow
def test_interpreted_kernel_equals_the_reference() -> None:
    assert f"{len(small_cases())} cases compared" in assert_no_differences("tests.kernels.mx_cases")


def test_a_kernel_compiled_for_one_pitch_of_codes_does_not_serve_another() -> None:
    """Triton takes a pitch that is a multiple of 16 for one: rows of 32 codes of 4 bits are, rows of 48 are not."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.launch import Specialized
    from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    rule, rng_step = MxRule(FORMATS["e2m1"], "floor", block=16), torch.zeros(2, dtype=torch.int32)
    with patch.object(Specialized, "launch") as launch:
        for columns in (32, 48):
            quantize_mx(torch.zeros(16, columns).bfloat16(), rule, rows=Direction(), rng_step=rng_step, codes=True)
    keys = [call.args[3] for call in launch.call_args_list]
    assert keys[0] != keys[1]


def test_rows_of_a_part_of_a_group_are_refused() -> None:
    """Behind a transform of 128, whose last group would end in the next row; no case for a GPU has such rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    rule, rows = MxRule(FORMATS["e2m1"], "floor", block=16), Direction(signs=torch.ones(128))
    with pytest.raises(AssertionError, match="rows of 1056 entries are no whole groups of 128"):
        quantize_mx(torch.zeros(16, 1056).bfloat16(), rule, rows=rows, rng_step=torch.zeros(2), codes=True)
    partial = [str(case) for case in gpu_cases() if "r" in case.ways and case.columns % max(case.block, case.mx)]
    assert not partial


@pytest.mark.parametrize("block", HADAMARD_BLOCKS)
def test_a_thread_holds_one_long_group(block: int) -> None:
    """Several, or a part, may take minutes to compile at a transform of 256. Of all tilings of a tuning."""
    pytest.importorskip("triton", reason="triton is not installed")
    from megatron_lowprec.formats import FORMATS
    from megatron_lowprec.kernels.launch import Specialized
    from megatron_lowprec.kernels.quantize.rule import Direction, MxRule
    from megatron_lowprec.kernels.quantize.triton import quantize_mx

    rng_step = torch.zeros(2, dtype=torch.int32)
    transformed, plain = Direction(signs=torch.ones(block)), Direction()
    pairs = ((transformed, transformed), (plain, transformed), (transformed, plain))
    for rounding, codes, (rows, columns) in product(("nearest_even", "stochastic"), (False, True), pairs):
        rule = MxRule(FORMATS["e2m1"], "floor", rounding, block=16)
        with patch.object(Specialized, "launch"):
            cast = quantize_mx(
                torch.zeros(block, block), rule, rows=rows, columns=columns, rng_step=rng_step, codes=codes
            )
        assert [out is None for out in cast] == [False, not codes, False, not codes, True, True, True]
        for kernel in rule.kernels.values():
            for tiling in kernel.specialized:
                entries, threads = tiling.rows * tiling.columns, 32 * tiling.warps
                assert entries <= max(128, block) * threads, (rounding, codes, tiling)
                if kernel._group > 64:
                    assert entries == block * threads, (rounding, codes, tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_compiled_kernel_equals_the_reference(case: Case) -> None:
    assert differences(case, "cuda") == []


@pytest.mark.gpu
def test_codes_beside_an_operand_are_its_values() -> None:
    assert coded_differences("cuda") == []


@pytest.mark.gpu
def test_sums_of_square_blocks_have_the_order_of_the_reference() -> None:
    from tests.kernels import block_sum_kernel

    assert block_sum_kernel.differences("cuda") == []


@pytest.mark.gpu
@gpu_recipes
def test_linear_on_a_gpu_takes_the_fused_path_and_gives_the_cpu_operands(recipe: Recipe) -> None:
    """The dispatch itself: operands made on a GPU, by kernels, equal those made on a CPU, by the reference."""
    from megatron_lowprec.linear.backends.protocol import CastRequest
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.linear.linear_id import LinearId
    from megatron_lowprec.quantization.amax_history import AmaxHistory
    from megatron_lowprec.quantization.random_stream import RngStep

    backend = LinearGemms(recipe, LinearId(1, "linear"), 0, AmaxHistory).backends.built("emulated")
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def quantized(device: str, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        return backend.quantize("grad_output", x.to(device), RngStep(3, 1), CastRequest(rowwise, columnwise))[0]

    both = quantized("cuda", rowwise=True, columnwise=True)
    assert torch.equal(quantized("cpu", True, False).rowwise()[0], both.rowwise()[0].cpu())
    for gpu in (both, quantized("cuda", False, True)):
        assert torch.equal(quantized("cpu", False, True).columnwise()[0], gpu.columnwise()[0].cpu())
    assert torch.equal(quantized("cuda", True, False).rowwise()[0], both.rowwise()[0])
    x = x.t().contiguous().t()  # column-major, as the kernel takes it in one direction
    assert torch.equal(quantized("cuda", True, False).rowwise()[0], both.rowwise()[0])
    assert torch.equal(quantized("cuda", False, True).columnwise()[0], both.columnwise()[0])


@pytest.mark.gpu
@gpu_recipes
def test_a_captured_graph_draws_anew_in_each_replay(recipe: Recipe) -> None:
    """Signs and draws of a replay are those of the moment entered before it, bit for bit."""
    from megatron_lowprec.linear.linear_gemms import LinearGemms
    from megatron_lowprec.linear.linear_id import LinearId
    from megatron_lowprec.quantization.amax_history import AmaxHistory
    from megatron_lowprec.quantization.device_rng_step import enter_rng_step
    from megatron_lowprec.quantization.random_stream import RngStep

    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(0)
    dy, x, w = (torch.randn(s, device=device, generator=generator).bfloat16() for s in ((96, 128), (96, 64), (128, 64)))
    linear_gemms = LinearGemms(recipe, LinearId(1, "linear"), 0, AmaxHistory)

    def backward(rng_step: RngStep) -> tuple[torch.Tensor, torch.Tensor]:
        both = linear_gemms.grad_output(dy, rng_step)
        return linear_gemms.dgrad(both, w, rng_step), linear_gemms.wgrad(both, x, rng_step)

    rng_steps = [RngStep(5, 0), RngStep(5, 1), RngStep(6, 0)]
    eager = [backward(rng_step) for rng_step in rng_steps]
    enter_rng_step(rng_steps[0], device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backward(rng_steps[0])
    for rng_step, want in zip(rng_steps, eager, strict=True):
        enter_rng_step(rng_step, device)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(captured, want, strict=True))
    assert not torch.equal(eager[0][0], eager[1][0])
    # what a replay drew last must not leak into an eager call at another moment
    assert all(torch.equal(*pair) for pair in zip(backward(rng_steps[0]), eager[0], strict=True))
