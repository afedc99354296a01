"""Which layers of a model convert takes, and which stay."""

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megatron_lowprec import KeepBf16, UserError, convert, get_recipe, recipes
from megatron_lowprec.linear import convert as conversion
from megatron_lowprec.linear.backends.hopper_fp8.why_not import slower_than_bf16
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.convert import Conversion, plan
from tests.environment import ROOT
from tests.linear.conversions import PER_BLOCK, converted
from tests.linear.tiny_models import HIDDEN, Gpt2Block, LlamaBlock, build


def test_the_output_head_and_routers_stay_by_default() -> None:
    model = build()
    model.layers[0].gate = nn.Linear(HIDDEN, 32)
    assert "lm_head" not in converted(convert(copy.deepcopy(model), "mxfp8"))
    assert plan(model, "mxfp8").excluded == {
        "layers.0.gate": ("router", True),
        "lm_head": ("output head", True),
    }
    assert {"lm_head", "layers.0.gate"} <= set(converted(convert(model, "mxfp8", filter=lambda path, _: True)))


def test_heads_of_other_names_are_found_by_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.up, self.out = nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
            self.out.weight = self.words.weight

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    class Headless(Told):
        def get_output_embeddings(self) -> nn.Module:
            raise AttributeError("no head")

    for model in (Tied(), Told(), nn.Sequential(Told())):
        assert [path.split(".")[-1] for path in converted(convert(model, "mxfp8"))] == ["up"]
    assert converted(convert(Headless(), "mxfp8")) == ["up", "out"]


def test_filter_and_keep_bf16() -> None:
    found = converted(convert(build(), "mxfp8", filter=lambda path, module: "mlp" in path))
    assert found == [f"layers.{n}.mlp.{name}_proj" for n in (0, 1) for name in ("gate", "up", "down")]
    found = converted(convert(build(), "mxfp8", keep_bf16=["layers.0.*", "*.mlp.*"]))
    assert found == [f"layers.1.{name}_proj" for name in "qkvo"]


@pytest.mark.parametrize(
    ("keep", "blocks"),
    [
        (KeepBf16(first_layers=1), [2, 3, 4]),
        (KeepBf16(last_layers=2), [1, 2]),
        (KeepBf16(first_layers=1, last_layers=1, names=("layers.2.*",)), [3]),
        (KeepBf16(names=("decoder.layers.1.*",)), [1, 3, 4]),  # Megatron's module names count from 0
    ],
)
def test_layers_that_a_recipe_keeps(keep: KeepBf16, blocks: list[int]) -> None:
    """Numbers count from 1, as in the recipe."""
    recipe = replace(get_recipe("mxfp8"), keep_bf16=keep)
    for block in (LlamaBlock, Gpt2Block):
        model = convert(build(block, blocks=4), recipe)
        assert len(converted(model)) == PER_BLOCK[block] * len(blocks)
        assert {int(path.split(".")[1]) + 1 for path in converted(model)} == set(blocks)


def test_names_of_a_recipe_match_paths_within_the_block() -> None:
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=("layers.*.mlp.down_proj",)))
    assert not any("down_proj" in path for path in converted(convert(build(), recipe)))


def test_blocks_need_not_be_in_a_module_list() -> None:
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(last_layers=1))
    sequential = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    assert converted(convert(sequential, recipe)) == ["0"]
    stage = nn.ModuleDict({str(n): nn.ModuleDict({"up": nn.Linear(64, 64)}) for n in (4, 5)})  # of a pipeline
    assert converted(convert(nn.ModuleDict({"layers": stage}), recipe)) == ["layers.4.up"]


class BaseTuner(nn.ModuleDict):
    """Stand-in for peft's class of that name, which wraps a model; a ``PeftModel`` of prompt learning has the model."""


@pytest.mark.parametrize("tunes", [True, False])
def test_peft_s_prefix_is_no_part_of_a_name_outside_of_blocks(tunes: bool) -> None:
    """A rule for a layer's name matches with and without peft; a stand-in for ``PeftModel``."""
    model = nn.ModuleDict({"model": nn.ModuleDict({"up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})})
    wrapped: nn.Module = nn.ModuleDict({"base_model": BaseTuner({"model": model}) if tunes else model})
    wrapped.peft_config = {}  # type: ignore[assignment]
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=("model.up",)))
    found, want = plan(wrapped, recipe), plan(model, recipe)
    assert list(want.converted) == ["model.down"]
    added = "base_model.model." if tunes else "base_model."
    assert found.converted == {f"{added}{path}": place for path, place in want.converted.items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match=f"its GEMMs are in {str(dtype)[6:]}, and recipes are for bfloat16 and float32"):
        convert(nn.Linear(64, 64, dtype=dtype), "mxfp8")
    assert converted(convert(nn.Sequential(nn.Linear(64, 64, dtype=dtype)), "mxfp8", dtype=torch.bfloat16)) == ["0"]


def test_layers_that_cannot_follow_the_recipe_are_named_once() -> None:
    model = nn.ModuleDict(
        {
            "layers": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 80), "down": nn.Linear(64, 64)}) for _ in "ab"),
            "attention": nn.MultiheadAttention(64, 2),
            "encoder": nn.TransformerEncoderLayer(64, 2, 64),
            "patched": nn.Linear(64, 64),
        }
    )
    model["patched"].forward = lambda x: x  # as accelerate's hooks do
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert(model, "mxfp8")
    assert converted(model) == ["layers.0.down", "layers.1.down"]
    messages = [str(warning.message) for warning in caught]
    assert messages == [
        "convert to mxfp8: not converted: layers.*.up (2) (dgrad has weight block 1x32, but 80 output features are no "
        "multiple of 32)",
        "convert to mxfp8: not converted: attention.out_proj, encoder.self_attn.out_proj (its class "
        "torch.nn.modules.linear.NonDynamicallyQuantizableLinear is not torch.nn.Linear itself)",
        "convert to mxfp8: not converted: encoder.linear1, encoder.linear2 (nn.TransformerEncoderLayer evaluates "
        "without its layers' forward)",
        "convert to mxfp8: not converted: patched (its forward is replaced on the module)",
    ]


def test_the_log_has_the_summary(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_lowprec"):
        convert(build(Gpt2Block), "fp8_current")
    assert caplog.messages == [
        "recipe fp8_current: 8 linear layers: layers.*.c_attn (2), layers.*.c_proj (2), layers.*.mlp.* (4)\n"
        "fprop, dgrad, wgrad: emulated on cpu (hopper_fp8: no FP8 GEMM of granularity tensor on cpu), the format's "
        "numerics and not its speed\n"
        "not converted: lm_head (output head)"
    ]


def test_a_plan_changes_nothing() -> None:
    model = build()
    found = plan(model, "mxfp8")
    assert isinstance(found, Conversion)
    assert len(found.converted) == 14
    assert converted(model) == []
    assert set(found.converted) == set(converted(convert(model, "mxfp8")))


# ---- the threshold
def measured() -> Iterator[tuple[str, int, int, float]]:
    """Recipe, sizes and time over bf16's of the layers on the results page, called from Python."""
    tables = json.loads((ROOT / "docs/results/native-fp8-linear.json").read_text(encoding="utf-8"))["tables"]
    for row in tables[0]["rows"]:
        if row["recipe"] in recipes() and row["recipe"] != "bf16":
            _, inputs, outputs = map(int, row["size"].split("x"))
            yield row["recipe"], inputs, outputs, row["over_bf16"]


def test_the_threshold_separates_the_measured_layers() -> None:
    rows = list(measured())
    assert len(rows) == 4 * 12
    for name, inputs, outputs, over_bf16 in rows:
        assert slower_than_bf16(get_recipe(name), Target("sm90", inputs, outputs)) == (over_bf16 > 1)


def test_the_threshold_is_for_native_gemms_of_measured_devices() -> None:
    current = get_recipe("fp8_current")
    assert [slower_than_bf16(current, Target(arch, 1024, 1024)) for arch in ("sm90", "sm89", "sm100", "cpu")] == [
        True,
        False,
        False,
        False,
    ]
    for name in ("mxfp8", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr", "bf16"):
        assert not slower_than_bf16(get_recipe(name), Target("sm90", 1024, 1024))


def test_slower_layers_stay_where_gemms_are_native(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(2048, 6144)).to(torch.bfloat16)
    assert list(plan(model, "fp8_current").converted) == ["0", "1"]
    monkeypatch.setattr(conversion, "arch_of", lambda device: "sm90" if device.type == "cuda" else device.type)
    found = plan(model, "fp8_current", device="cuda")
    assert list(found.converted) == ["1"]
    assert found.excluded["0"] == ("slower in FP8 than in bf16 on sm90 with weights of its size", False)
    assert found.execution == ("fprop, dgrad, wgrad: hopper_fp8 on sm90",)
    assert list(plan(model, "fp8_current", device="cuda", skip_slower=False).converted) == ["0", "1"]
    # fp32 GEMMs are emulated
    found = plan(model, "fp8_current", device="cuda", dtype=torch.float32)
    assert list(found.converted) == ["0", "1"]
    assert "emulated on sm90 (hopper_fp8: FP8 GEMMs are for bf16 models, this one is float32)" in found.execution[0]


def test_a_parametrized_weight_is_computed_once() -> None:
    class Counted(nn.Module):
        passes = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return weight * 2

    layer, counted = nn.Linear(64, 64), Counted()
    model = convert(nn.Sequential(layer), "mxfp8")
    parametrize.register_parametrization(model[0], "weight", counted)
    before = counted.passes
    model(torch.randn(4, 64))
    assert counted.passes - before == 1
