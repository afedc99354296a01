"""Work and memory of frozen layers: bytes of each recipe, as the guide has them, and casts that are not made."""

import re
from collections import Counter
from typing import Any

import pytest

from megatron_lowprec import UserError
from megatron_lowprec.linear.backends.protocol import GemmBackend
from tests.environment import ROOT
from tests.finetuning.frozen_layers import IN, OUT, STORED, each_recipe, held, passes
from tests.linear.conversions import CONVERTIBLE

# kept in bf16 here, or with a reason in the table of the guide
_NOT_HELD = {"bf16": "fprop", "fp8_mxfp4_rht_sr": "dgrad"} | dict.fromkeys(
    ("mxfp4", "mxfp4_rht", "mxfp4_sr", "mxfp4_rht_sr"), "fprop"
)


def stored_bytes(name: str, out_features: int, in_features: int) -> int:
    codes, scales = STORED[name]
    return int(codes * out_features * in_features) + scales(out_features, in_features)


def test_every_recipe_is_held_or_refused() -> None:
    ends = {"fp8_current_bf16_ends"}  # the GEMMs of fp8_current
    assert set(STORED) | set(_NOT_HELD) | ends == set(CONVERTIBLE)
    for name, gemm in _NOT_HELD.items():
        why = f"cannot hold its frozen weight as codes: {gemm} takes the weight"
        if name == "bf16":
            why = r"recipe bf16 quantizes no weight: pass storage=QuantSpec\("
        with pytest.raises(UserError, match=why):
            held(name)


@each_recipe
def test_bytes_are_those_of_codes_and_scales(name: str) -> None:
    layer = held(name)
    found = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    assert found == stored_bytes(name, OUT, IN) + layer.bias.nbytes


def test_a_frozen_layer_quantizes_nothing_for_wgrad_and_no_weight() -> None:
    """One cast of x by rows, one of dy by rows: neither direction of wgrad, and the codes are read."""

    class Counted(GemmBackend):
        def __init__(self, backend: GemmBackend) -> None:
            self.backend, self.name = backend, backend.name

        def __getattribute__(self, name: str) -> Any:
            own = ("backend", "quantize", "name", "__class__")
            return object.__getattribute__(self, name) if name in own else getattr(self.backend, name)

        def quantize(self, tensor: str, *args: Any, **options: Any) -> Any:
            casts.update([(tensor, *args[2][:2])])
            return self.backend.quantize(tensor, *args, **options)

    Counted.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    casts: Counter[Any] = Counter()
    layer = held("mxfp8")
    passes(layer, 1)
    with layer.linear_gemms.backends.wrapped(Counted):
        passes(layer, 1)
    assert casts == {("input", True, False): 1, ("grad_output", True, False): 1}


def test_the_guide_has_the_bytes_of_every_recipe() -> None:
    """An entry of a weight 4096 x 4096, to three places."""
    page = (ROOT / "docs/guide/lora.md").read_text(encoding="utf-8").split("## Bytes\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    found = {name: row[3].strip() for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert found == {name: f"{stored_bytes(name, 4096, 4096) / 4096**2:.3f}" for name in STORED}
    refused = page.split("**Refused:**")[1].splitlines()[0]
    assert set(re.findall(r"`(\w+)`", refused)) - {"storage"} == set(_NOT_HELD)
