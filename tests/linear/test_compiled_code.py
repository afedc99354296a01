"""The code that is generated for compiled layers: casts, products, and sizes that the compiler is told."""

import re
from typing import Any

import pytest
import torch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.utils import run_and_get_code

from megatron_lowprec import get_recipe
from megatron_lowprec.linear.backends import traced
from megatron_lowprec.linear.backends.protocol import CastRequest
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.linear.linear_id import LinearId
from megatron_lowprec.quantization.amax_history import AmaxHistory
from megatron_lowprec.quantization.random_stream import RngStep
from megatron_lowprec.quantization.tensor import QuantizedTensor
from megatron_lowprec.recipe.layer_match import Layer
from tests.linear.compiled_layers import OURS, One, converted, equal, on_hopper, steps_of
from tests.linear.layers import NAMES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "native", "casts", "others"),
    [
        ("fp8_current", True, 4, set()),
        ("mxfp8", False, 6, {"product", "sum_tokens"}),
        ("mxfp4_rht_sr", False, 4, {"begin_pass", "product", "sum_tokens"}),
    ],
)
def test_generated_code(name: str, native: bool, casts: int, others: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's code has the casts and the products, and no operator that hides a layer."""
    if native:
        on_hopper(monkeypatch)
    dtype = torch.bfloat16 if native else torch.float32
    want = steps_of(converted(name, One, dtype), 2)
    model = converted(name, One, dtype)
    model.compile(fullgraph=True)
    found, codes = run_and_get_code(steps_of, model, 2)
    ours = OURS.findall("\n".join(codes))
    assert sum("cast" in each for each in ours) == casts
    assert {each for each in ours if "cast" not in each} == others
    if native:  # whose products a CPU sums in another order
        assert len(re.findall(r"\._scaled_mm(\.default)?\(", "\n".join(codes))) == 3
    else:
        assert equal(found, want)
        assert ours.count("product") == 3


def layout(tensors: QuantizedTensor) -> dict[str, Any]:
    found = {name: getattr(tensors, name) for name in tensors.__slots__}
    return {
        name: (each.shape, each.dtype, each.stride()) if isinstance(each, torch.Tensor) else each
        for name, each in found.items()
    }


@pytest.mark.parametrize("launches", [True, False])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise"])
def test_inductor_launches_casts(name: str, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fixed number of tokens and of any number; not where that is turned off."""
    on_hopper(monkeypatch)
    monkeypatch.setattr(traced, "INDUCTOR_LAUNCHES", launches)
    found: list[set[str]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def recorded(graph: Any, inputs: Any) -> Any:
            targets = (str(each.target).split(".") for each in graph.graph.nodes)
            found.append({names[1] for names in targets if names[0] == "megatron_lowprec"})
            return graph

        return aot_module_simplified(graph, inputs, fw_compiler=recorded)

    model = converted(name, One, torch.bfloat16)
    model.compile(backend=backend, fullgraph=True)
    steps_of(model, 2, (64, 96))
    assert [each for each in found if each] == [{"planned_cast" if launches else "cast"}] * len(found)
    assert len(found) >= 2


@pytest.mark.parametrize("native", [False, True])
def test_sizes_are_those_of_the_cast(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is told shape, dtype and strides of what a cast returns."""
    if native:
        on_hopper(monkeypatch)
    for name in ("fp8_current", "fp8_rowwise", "fp8_blockwise") if native else NAMES:
        recipe = get_recipe(name).at(Layer(4, "up", 8))
        backend = LinearGemms(recipe, LinearId(1, "x"), 0, AmaxHistory).backends.built(
            "hopper_fp8" if native else "emulated"
        )
        for tensor, shape in (("input", (200, 256)), ("weight", (384, 256)), ("grad_output", (200, 384))):
            for rowwise in (True, False):
                request = CastRequest(rowwise, not rowwise, update_amax=False)
                matrix = torch.randn(shape).bfloat16()
                made = backend.empty(tensor, matrix, request)
                if made is not None:
                    cast = backend.quantize(tensor, matrix, RngStep(0, 0), request)[0]
                    assert layout(made) == layout(cast), (name, tensor, rowwise)
