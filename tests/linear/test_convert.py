"""Conversion of plain PyTorch models: which layers follow the recipe, and that nothing else of the model changes."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import megatron_lowprec
from megatron_lowprec import KeepBf16, LowPrecLinear, UserError, convert, get_recipe, recipes
from megatron_lowprec.linear import convert as conversion
from megatron_lowprec.linear.compiled import REASON
from megatron_lowprec.linear.convert import Conversion, plain_state_dict, plan
from megatron_lowprec.linear.lowprec_linear import LowPrecConv1D, LowPrecLayer, end_step
from megatron_lowprec.recipe.native_support import slower_than_bf16
from tests.environment import ROOT, python_path
from tests.linear.tiny_models import HIDDEN, Conv1D, Gpt2Block, LlamaBlock, TinyModel, build, tokens_of, train
from tests.waiting import PATIENCE

PER_BLOCK = {LlamaBlock: 7, Gpt2Block: 4}
forms = pytest.mark.parametrize("block", [LlamaBlock, Gpt2Block])
CONVERTIBLE = [name for name in recipes() if not get_recipe(name).changes_training]
PURE = [name for name in CONVERTIBLE if not get_recipe(name).random and not get_recipe(name).delayed_operands()]


def converted(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, LowPrecLayer)]


def quantized(model: nn.Module) -> list[str]:
    """Paths of the layers whose GEMMs a recipe quantizes."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, LowPrecLayer) and module.linear_gemms.recipe.quantized
    ]


def gradients(model: nn.Module, draws: int = 2) -> list[torch.Tensor]:
    """Of one batch, with the generator at ``draws``."""
    model.zero_grad()
    torch.manual_seed(draws)
    model(tokens_of(3)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


# ---- what stays of the model
@forms
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_a_model_trains_under_every_recipe(name: str, block: type[nn.Module]) -> None:
    model = build(block, blocks=3)
    assert convert(model, name) is model
    assert len(converted(model)) == 3 * PER_BLOCK[block] - (2 * PER_BLOCK[block] if "bf16_ends" in name else 0)
    losses = train(model, 4)
    assert losses[-1] < losses[0]


def test_the_bf16_recipe_changes_no_bit() -> None:
    for block in (LlamaBlock, Gpt2Block):
        assert train(convert(build(block), "bf16"), 3) == pytest.approx(train(build(block), 3), rel=1e-6)
    assert train(convert(build(), "bf16"), 3) == train(build(), 3)


@forms
@pytest.mark.parametrize("name", ["fp8_current", "mxfp4_rht_sr"])
@pytest.mark.slow
def test_fifty_steps(name: str, block: type[nn.Module]) -> None:
    """The loss falls by as much as in bf16, to within a tenth of the fall."""
    start, *_, want = train(build(block), 50)
    *_, got = train(convert(build(block), name), 50)
    assert want < start / 2
    assert abs(got - want) < 0.1 * (start - want)


def test_parameters_hooks_and_modules_are_the_same_objects() -> None:
    model = build()
    calls: list[str] = []
    layer = model.layers[0].q_proj
    handle = layer.register_forward_hook(lambda *_: calls.append("forward"))
    model.layers[1].o_proj.weight.requires_grad_(False)
    model.layers[1].k_proj.weight = model.layers[1].v_proj.weight  # tied
    parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    modules = [id(module) for module in model.modules()]
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    convert(model, "mxfp4_rht_sr")
    assert {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)} == parameters
    assert [id(module) for module in model.modules()] == modules
    assert type(layer) is LowPrecLinear
    before = layer.weight.detach().clone()
    model(tokens_of(1)).backward()
    optimizer.step()
    assert calls == ["forward"]
    assert not torch.equal(layer.weight, before)
    assert model.layers[1].o_proj.weight.grad is None
    handle.remove()
    model(tokens_of(1))
    assert calls == ["forward"]
    assert "recipe=mxfp4_rht_sr" in repr(layer)


def test_a_shared_module_is_converted_once() -> None:
    shared = nn.Linear(64, 64)
    model = convert(nn.Sequential(shared, nn.ReLU(), shared), "mxfp8")
    assert converted(model) == ["0"]
    model(torch.randn(32, 64)).sum().backward()


def test_a_linear_layer_alone() -> None:
    layer = nn.Linear(64, 64)
    assert convert(layer, "mxfp8") is layer
    assert isinstance(layer, LowPrecLinear)


def test_conv1d_is_the_linear_layer_of_the_transposed_weight(generator: torch.Generator) -> None:
    """Operands are equal; the order of fp32 sums may follow the memory layout."""
    for name in ("fp8_current", "mxfp8", "mxfp4_rht_sr"):
        model = nn.Sequential(Conv1D(128, 64))
        linear = nn.Sequential(nn.Linear(64, 128))
        with torch.no_grad():
            linear[0].weight.copy_(model[0].weight.t())
            linear[0].bias.copy_(model[0].bias)
        found = []
        x, dy = torch.randn(2, 32, 64, generator=generator), torch.randn(2, 32, 128, generator=generator)
        for each in (convert(model, name), convert(linear, name)):
            torch.manual_seed(0)
            given = x.clone().requires_grad_()
            y = each(given)
            y.backward(dy)
            weight = each[0].weight.grad
            found.append((y, given.grad, weight if weight.shape == (128, 64) else weight.t(), each[0].bias.grad))
        assert isinstance(model[0], LowPrecConv1D)
        assert "nf=128, nx=64, recipe=" in repr(model)
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- which layers
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
        "convert to mxfp8: not converted, dgrad has weight block 1x32, but 80 output features are no multiple of "
        "32: layers.*.up (2)",
        "convert to mxfp8: not converted, its class torch.nn.modules.linear.NonDynamicallyQuantizableLinear is not "
        "torch.nn.Linear itself: attention.out_proj, encoder.self_attn.out_proj",
        "convert to mxfp8: not converted, nn.TransformerEncoderLayer evaluates without its layers' forward: "
        "encoder.linear1, encoder.linear2",
        "convert to mxfp8: not converted, its forward is replaced on the module: patched",
    ]


def test_the_log_has_the_summary(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_lowprec"):
        convert(build(Gpt2Block), "fp8_current")
    assert caplog.messages == [
        "recipe fp8_current: 8 linear layers: layers.*.c_attn (2), layers.*.c_proj (2), layers.*.mlp.* (4)\n"
        "fprop, dgrad, wgrad emulated on cpu (no FP8 GEMM of granularity tensor on cpu): the format's numerics, "
        "not its speed\n"
        "not converted, output head: lm_head"
    ]


def test_a_plan_changes_nothing() -> None:
    model = build()
    found = plan(model, "mxfp8")
    assert isinstance(found, Conversion)
    assert len(found.converted) == 14
    assert converted(model) == []
    assert set(found.converted) == set(converted(convert(model, "mxfp8")))


# ---- errors
def test_models_that_cannot_be_converted() -> None:
    model = convert(build(), "mxfp8")
    with pytest.raises(UserError, match=r"layers\.0\.q_proj is a LowPrecLinear already: convert a model once"):
        convert(model, "mxfp8")
    with pytest.raises(UserError, match=r"recipe mxfp8 converts no layer: the model has no nn\.Linear"):
        convert(nn.Conv2d(3, 3, 3), "mxfp8")
    with pytest.raises(UserError, match="converts no layer: not converted, by filter: layers"):
        convert(build(), "mxfp8", filter=lambda *_: False)
    with pytest.raises(UserError, match="80 input features are no multiple of 32: the model"):
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
    assert printed.endswith("are no multiple of 32: 2")


def test_a_failed_conversion_changes_nothing() -> None:
    model = build()
    with pytest.raises(UserError):
        convert(model, "mxfp8", keep_bf16=["nothing"])
    assert converted(model) == []


def test_recipes_beyond_linear_layers_are_refused() -> None:
    with pytest.raises(UserError, match="recipe fp8_lm also sets optimizer and gradients, but convert changes linear"):
        convert(build(), "fp8_lm")


def test_globs_without_a_match_are_refused() -> None:
    with pytest.raises(UserError, match=r"keep_bf16 has 'layer\.0\.q_proj', .* named like layers\.0\.q_proj"):
        convert(build(), "mxfp8", keep_bf16=["layer.0.q_proj"])
    with pytest.raises(UserError, match=r"keep_bf16 takes a list of globs, got the string 'lm_head'"):
        convert(build(), "mxfp8", keep_bf16="lm_head")
    recipe = replace(get_recipe("mxfp8"), keep_bf16=KeepBf16(names=("*.linear_proj",)))
    with pytest.raises(UserError, match=r"keep_bf16\.names of recipe mxfp8 has '\*\.linear_proj', .* like layers\.1\."):
        convert(build(), recipe)


def test_counted_layers_need_one_list_of_blocks() -> None:
    ends = get_recipe("fp8_current_bf16_ends")
    with pytest.raises(UserError, match="but the model has no list of blocks"):
        convert(nn.Linear(64, 64), ends)
    pair = nn.ModuleDict({"encoder": build(), "decoder": build()})
    with pytest.raises(UserError, match=r"lists of blocks encoder\.layers, decoder\.layers: set both to 0"):
        convert(pair, ends)
    with pytest.raises(UserError, match=r"keep_bf16\.first_layers is 3, but the model has 2 layers"):
        convert(build(), replace(ends, keep_bf16=KeepBf16(first_layers=3)))


def test_dtypes_must_agree() -> None:
    layer = convert(nn.Linear(64, 64, dtype=torch.bfloat16), "mxfp8")
    with pytest.raises(UserError, match=r"a weight of torch\.bfloat16 got an input of torch\.float32: convert one"):
        layer(torch.randn(2, 64))


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
        assert slower_than_bf16(get_recipe(name), "sm90", inputs, outputs) == (over_bf16 > 1)


def test_the_threshold_is_for_native_gemms_of_measured_devices() -> None:
    current = get_recipe("fp8_current")
    assert [slower_than_bf16(current, arch, 1024, 1024) for arch in ("sm90", "sm89", "sm100", "cpu")] == [
        True,
        False,
        False,
        False,
    ]
    for name in ("mxfp8", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr", "bf16"):
        assert not slower_than_bf16(get_recipe(name), "sm90", 1024, 1024)


def test_slower_layers_stay_where_gemms_are_native(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(2048, 6144)).to(torch.bfloat16)
    assert plan(model, "fp8_current").converted == ("0", "1")
    monkeypatch.setattr(conversion, "arch_of", lambda device: "sm90" if device.type == "cuda" else device.type)
    found = plan(model, "fp8_current", device="cuda")
    assert found.converted == ("1",)
    assert found.excluded["0"] == ("slower in FP8 than in bf16 on sm90 with weights of its size", False)
    assert found.execution == ("fprop, dgrad, wgrad native on sm90",)
    assert plan(model, "fp8_current", device="cuda", skip_slower=False).converted == ("0", "1")
    # fp32 GEMMs are emulated
    found = plan(model, "fp8_current", device="cuda", dtype=torch.float32)
    assert found.converted == ("0", "1")
    assert "emulated on sm90 (FP8 GEMMs are for bf16 models, this one is float32)" in found.execution[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_current", "fp8_rowwise", "fp8_blockwise", "mxfp8"])
def test_compiled_layers_on_a_gpu(name: str) -> None:
    """Native where the device has the GEMM; the compiled operator quantizes x again for wgrad, with the same bits."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), Conv1D(128, 128))
        convert(model.to("cuda", torch.bfloat16), name, skip_slower=False)
        if compiles:
            model.compile(fullgraph=True)
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
        y = model(x.requires_grad_())
        y.backward(y.detach())
        found.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


# ---- draws, scales, state
def test_each_layer_has_its_own_draws() -> None:
    model = nn.ModuleDict({name: nn.ModuleList(nn.Linear(64, 64) for _ in "ab") for name in ("encoder", "decoder")})
    layers = [layer for name in model for layer in model[name]]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    convert(model, "mxfp4_rht_sr")
    x, found = torch.randn(32, 64), []
    for layer in layers:
        torch.manual_seed(0)
        layer(x).square().sum().backward()
        found.append(layer.weight.grad)
    assert not any(torch.equal(a, b) for n, a in enumerate(found) for b in found[:n])


def test_seed_and_generator_decide_the_draws() -> None:
    def of(draws: int, **options: Any) -> list[torch.Tensor]:
        return gradients(convert(build(), "mxfp4_rht_sr", **options), draws)

    first = of(1)
    assert all(map(torch.equal, first, of(1)))
    for other in (of(2), of(1, seed=1), of(1, data_parallel_rank=1)):
        assert not all(map(torch.equal, first, other))


def test_scales_follow_the_optimizer() -> None:
    model = convert(build(), "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert float(model.layers[0].q_proj.state_dict()["amax.input"][0]) == 0.0
    model(tokens_of(1)).backward()
    optimizer.step()
    in_effect = {key: float(value[0]) for key, value in model.state_dict().items() if ".amax." in key}
    assert len(in_effect) == 14 * 3
    assert min(in_effect.values()) > 0
    model(tokens_of(1)).backward()  # the same batch
    end_step(model)  # without an optimizer
    assert {key: float(value[0]) for key, value in model.state_dict().items() if ".amax." in key}.keys() == (
        in_effect.keys()
    )


@forms
@pytest.mark.parametrize("name", ["fp8_current", "fp8_delayed", "mxfp4_rht_sr"])
def test_state_dicts_go_both_ways(name: str, block: type[nn.Module]) -> None:
    plain = build(block)
    torch.manual_seed(9)
    model = convert(TinyModel(block), name)
    model.load_state_dict(plain.state_dict(), strict=True)
    train(model, 2)
    amaxes = {key for key in model.state_dict() if ".amax." in key}
    assert set(model.state_dict()) - amaxes == set(plain.state_dict())
    assert bool(amaxes) == (name == "fp8_delayed")
    plain.load_state_dict(plain_state_dict(model), strict=True)
    assert all(torch.equal(plain.state_dict()[key], model.state_dict()[key]) for key in plain.state_dict())
    again = convert(TinyModel(block), name)
    again.load_state_dict(model.state_dict(), strict=True)
    assert train(again, 2) == train(model, 2)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed", "mxfp4_rht_sr"])
def test_copies_are_independent(name: str) -> None:
    model = convert(build(), name)
    train(model, 2)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = {key: value.clone() for key, value in model.state_dict().items()}
        assert train(copied, 2) != []
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.slow
def test_histories_advance_in_the_process_that_loads_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(convert(build(), "fp8_delayed")))
    code = (
        "import pickle, sys; from tests.linear.tiny_models import train; "
        "model = pickle.load(open(sys.argv[1], 'rb')); train(model, 2); "
        "print(min(float(state[0]) for name, state in model.state_dict().items() if '.amax.' in name))"
    )
    command, environment = [sys.executable, "-c", code, str(file)], {**os.environ, **python_path()}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


def test_an_amax_that_is_not_finite_is_left_out() -> None:
    """The loop skips the update; an Inf would pin the scale for a whole window."""
    model = convert(build(), "fp8_delayed")
    train(model, 1)
    (model(tokens_of(0)) * torch.inf).backward()  # and no update
    train(model, 1)
    histories = [state for name, state in model.state_dict().items() if ".amax." in name]
    assert histories
    assert all(state.isfinite().all() for state in histories)


def test_a_model_may_be_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = TinyModel()
    convert(model, "fp8_delayed").to_empty(device="cpu")
    model.load_state_dict(build().state_dict())
    assert train(model, 2) == train(convert(build(), "fp8_delayed"), 2)


# ---- recomputation, autocast, compilation
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_recomputation_changes_no_bit(name: str, how: str) -> None:
    found = []
    for each in ("", how):
        model = convert(build(recompute=each), name)
        found.append((train(model, 3), gradients(model)))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_autocast_is_the_layer_in_bf16(name: str, generator: torch.Generator) -> None:
    """The GEMMs themselves are outside autocast, also in a backward pass within it."""
    narrow, wide = (nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)) for _ in range(2))
    wide.load_state_dict(narrow.state_dict())
    recipe = replace(get_recipe(name), keep_bf16=KeepBf16())
    convert(narrow.bfloat16(), recipe)
    convert(wide, recipe)
    x, dy = torch.randn(64, 128, generator=generator), torch.randn(64, 128, generator=generator).bfloat16()
    torch.manual_seed(0)
    y = narrow(x.bfloat16())
    y.backward(dy)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        got = wide(x)
        got.backward(dy)
    assert torch.equal(got, y)
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.float())


def of_layers(name: str, generator: torch.Generator, **options: Any) -> list[torch.Tensor]:
    """Output and gradients of two steps of layers with nothing between that a compiler could round otherwise."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False)), name)
    if options:
        model.compile(**options)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.randn(64, 128, generator=generator, requires_grad=True)
        y = model(x)
        y.backward(y.detach())
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PURE if not get_recipe(name).keep_bf16.first_layers])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_a_graph_break(name: str, backend: str) -> None:
    """The same bits, and one graph."""
    want = of_layers(name, torch.Generator().manual_seed(1))
    got = of_layers(name, torch.Generator().manual_seed(1), backend=backend, fullgraph=True)
    assert all(map(torch.equal, got, want))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp4_rht_sr", "fp8_mxfp4_rht_sr"])
def test_compiled_with_a_break_at_layers_with_state(name: str) -> None:
    """The same bits; each layer is called between two graphs."""
    want = of_layers(name, torch.Generator().manual_seed(1))
    for backend in ("aot_eager", "inductor"):
        assert all(map(torch.equal, of_layers(name, torch.Generator().manual_seed(1), backend=backend), want))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=REASON):
        of_layers(name, torch.Generator(), backend="aot_eager", fullgraph=True)


@forms
@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_a_compiled_model(name: str, block: type[nn.Module]) -> None:
    """One graph; the compiler rounds norms and activations otherwise, in the last bits of fp32."""
    torch._dynamo.reset()
    model = convert(build(block), name)
    model.compile(backend="aot_eager", fullgraph=True)
    assert train(model, 3) == pytest.approx(train(convert(build(block), name), 3), rel=1e-4)


@pytest.mark.slow
def test_blocks_compiled_one_by_one_share_their_graph() -> None:
    """Equal layers of one recipe have one key: no recompilation for each block."""
    torch._dynamo.reset()
    model = convert(build(blocks=4), "fp8_current")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        train(model, 2)


def test_frozen_layers_in_the_compiled_operator(generator: torch.Generator) -> None:
    """Gradients only of what needs one; none in evaluation."""
    from megatron_lowprec.linear.compiled import opaque_linear, operator_key

    key, w = operator_key(get_recipe("mxfp8")), torch.randn(64, 32, generator=generator)
    for need in range(8):
        x = torch.randn(32, 32, generator=generator).requires_grad_(bool(need & 1))
        weight, bias = w.clone().requires_grad_(bool(need & 2)), torch.zeros(64).requires_grad_(bool(need & 4))
        layer = LowPrecLinear(32, 64, recipe="mxfp8")
        layer.weight, layer.bias = (nn.Parameter(t.detach(), t.requires_grad) for t in (weight, bias))
        other = x.detach().clone().requires_grad_(x.requires_grad)
        y, want = opaque_linear(x, weight, bias, key), layer(other)
        assert torch.equal(y, want)
        if need:
            y.sum().backward()
            want.sum().backward()
        for got, grad in ((x, other.grad), (weight, layer.weight.grad), (bias, layer.bias.grad)):
            assert (got.grad is None) == (grad is None)
            assert grad is None or torch.equal(got.grad, grad)


def test_the_public_name() -> None:
    assert megatron_lowprec.convert is convert
    assert F.linear is torch.nn.functional.linear  # nothing is patched
