"""What convert refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_lowprec import KeepBf16, LowPrecLinear, UserError, convert, get_recipe
from megatron_lowprec.linear.convert import plan
from tests.linear.conversions import converted
from tests.linear.tiny_models import build


def test_models_that_cannot_be_converted() -> None:
    model = convert(build(), "mxfp8")
    with pytest.raises(UserError, match=r"layers\.0\.q_proj is a LowPrecLinear already: convert a model once"):
        convert(model, "mxfp8")
    with pytest.raises(UserError, match=r"recipe mxfp8 converts no layer: the model has no nn\.Linear"):
        convert(nn.Conv2d(3, 3, 3), "mxfp8")
    with pytest.raises(UserError, match=r"converts no layer: not converted: layers.* .*by filter"):
        convert(build(), "mxfp8", filter=lambda *_: False)
    with pytest.raises(UserError, match=r"the model .*80 input features are no multiple of 32"):
        convert(nn.Linear(80, 64), "mxfp8")
    with pytest.raises(UserError, match=r"wrapped: convert first, then call torch\.compile\(model\)"):
        convert(torch.compile(build()), "mxfp8")
    with pytest.raises(UserError, match="there is no recipe 'mxpf8'"):
        convert(build(), "mxpf8")


def test_arguments_of_other_types() -> None:
    for arguments in (("mxfp8", build()), (build(), None), (None, "mxfp8")):
        for function in (convert, plan):
            with pytest.raises(
                UserError, match=r"give a torch\.nn\.Module first, then a Recipe, its name or a YAML file"
            ):
                function(*arguments)  # type: ignore[type-var]


def test_dtypes_and_devices_that_torch_does_not_know() -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(UserError, match=r"was given a str as dtype: give a torch\.dtype such as torch\.bfloat16"):
        plan(model, "mxfp8", dtype="bf16")  # type: ignore[arg-type]
    for device in ("sm100", ["cpu"]):
        with pytest.raises(UserError, match=r"convert found no device .*: give one of torch's, such as 'cpu'"):
            plan(model, "mxfp8", device=device)  # type: ignore[arg-type]


def test_a_recipe_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: mxfp8\nwgrad: null\n")
    for given in (path, str(path)):
        assert plan(build(), given).recipe.name == "mine"
    assert len(converted(convert(build(), path))) == 14


def test_layers_of_a_sequential_are_named_by_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 80), nn.Linear(64, 96))
    printed = str(plan(model, "mxfp8"))
    assert "2 linear layers: 0, 3\n" in printed
    assert "not converted: 2 (" in printed
    assert printed.endswith("are no multiple of 32)")


def test_a_failed_conversion_changes_nothing() -> None:
    model = build()
    with pytest.raises(UserError):
        convert(model, "mxfp8", keep_bf16=["nothing"])
    assert converted(model) == []


def test_recipes_beyond_linear_layers_are_refused() -> None:
    with pytest.raises(
        UserError, match="recipe fp8_lm also sets optimizer and gradients, but convert changes only linear"
    ):
        convert(build(), "fp8_lm")


def test_globs_without_a_match_are_refused() -> None:
    with pytest.raises(UserError, match=r"keep_bf16 has 'layer\.0\.q_proj', .* named like layers\.0\.q_proj"):
        convert(build(), "mxfp8", keep_bf16=["layer.0.q_proj"])
    with pytest.raises(UserError, match=r"keep_bf16 takes a list of globs, got the string 'lm_head'"):
        convert(build(), "mxfp8", keep_bf16="lm_head")
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=("*.linear_proj",)))
    with pytest.raises(UserError, match=r"a rule of recipe mxfp8 has '\*\.linear_proj', .* like layers\.1\."):
        convert(build(), recipe)


def test_counted_layers_need_one_list_of_blocks() -> None:
    ends = get_recipe("fp8_current_bf16_ends")
    with pytest.raises(UserError, match="but the model has no list of blocks"):
        convert(nn.Linear(64, 64), ends)
    pair = nn.ModuleDict({"encoder": build(), "decoder": build()})
    with pytest.raises(UserError, match=r"lists of blocks encoder\.layers, decoder\.layers: leave it out"):
        convert(pair, ends)
    with pytest.raises(UserError, match=r"keep_bf16\.first_layers is 3, but the model has 2 layers"):
        convert(build(), replace(ends, keep_bf16=KeepBf16(first_layers=3)))


@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])
def test_layers_in_fp16_are_refused(name: str) -> None:
    """By their own dtype, afterwards, or by autocast; the scales of fp16 gradients would be Inf."""
    x = torch.ones(2, 64, dtype=torch.float16)
    message = (
        "has a weight of torch.float16, by its own dtype or by autocast, but recipes compute in bfloat16 or float32"
    )
    for layer in (LowPrecLinear(64, 64, recipe=name, dtype=torch.float16), convert(nn.Linear(64, 64), name).half()):
        with pytest.raises(UserError, match=message):
            layer(x)
    layer = convert(nn.Linear(64, 64), name)
    with torch.autocast("cpu", torch.float16), pytest.raises(UserError, match=message):
        layer(torch.ones(2, 64))
    LowPrecLinear(64, 64, recipe="bf16", dtype=torch.float16)(x)  # does not quantize


def test_dtypes_must_agree() -> None:
    layer = convert(nn.Linear(64, 64, dtype=torch.bfloat16), "mxfp8")
    with pytest.raises(UserError, match=r"a weight of torch\.bfloat16 got an input of torch\.float32: convert one"):
        layer(torch.randn(2, 64))
