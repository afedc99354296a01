"""A GPTModel from ``layer_spec`` in a loop without calls trains as one with ``bind_recipe`` and all of its calls."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_lowprec import UserError, get_recipe, load_recipe, specs
from megatron_lowprec.recipe.recipe import Phase

pytestmark = pytest.mark.usefixtures("world", "bounded")

LAYERS, VOCABULARY, SEQUENCE = 2, 128, 32
STEPS, MICROBATCHES = 3, 2
# no recipe state, amax histories, random draws
RECIPES = ("mxfp8", "fp8_delayed", "mxfp4_rht_sr")
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEED = 7


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    shared = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
    return TransformerConfig(**{**shared, **options})


def gpt(spec: Any, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5)
    return GPTModel(config_of(**options), spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)


def test_a_flag_behind_the_recipe_s_name() -> None:
    """--moe-fp8-dispatch reaches the layers, where it is refused: one rank has nothing to send."""
    experts = {"num_moe_experts": 4, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    with pytest.raises(UserError, match="--moe-fp8-dispatch sends tokens to experts, and this model has none"):
        gpt(getattr(specs, "mxfp8 --moe-fp8-dispatch keep_bf16.last_layers=1"))
    with pytest.raises(UserError, match="--moe-fp8-dispatch does nothing at --expert-model-parallel-size 1"):
        gpt(getattr(specs, "mxfp8 --moe-fp8-dispatch"), **experts)


def tracked(recipe: str, *overrides: str, **options: Any) -> Any:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    return gpt(layer_spec(load_recipe(recipe, overrides), seed=SEED), **options)


class Loop:
    """A training loop; with ``calls`` it reports steps and microbatches to a runtime."""

    def __init__(self, model: Any, calls: Any = None) -> None:
        self.model, self.calls, self.step = model, calls, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def run(self, *, update: bool = True, indexed: bool = True, evaluate: bool = False) -> None:
        """One step; ``indexed`` as in Megatron-core's schedules, which set a microbatch's index."""
        from megatron.core.pipeline_parallel.schedules import set_current_microbatch

        self.optimizer.zero_grad()
        if self.calls is not None:
            self.calls.begin_step(self.step)
        for index in range(MICROBATCHES):
            if self.calls is not None:
                self.calls.begin_microbatch(index)
            elif indexed:
                set_current_microbatch(self.model, index)
            self.losses.append(float(self.backward(index)))
            if evaluate and self.calls is None:  # in the middle of a step, which begin_microbatch cannot have
                self.evaluate()
        if update:
            self.optimizer.step()
        if self.calls is not None:
            self.calls.end_step(updated=update)
        self.step += 1

    def backward(self, index: int) -> torch.Tensor:
        loss = self.loss(index)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def loss(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)
        positions = torch.arange(SEQUENCE).expand_as(tokens)
        loss: torch.Tensor = self.model(tokens, positions, None, labels=tokens.roll(-1, dims=1)).mean()
        return loss

    def evaluate(self) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = float(self.loss(MICROBATCHES))
        self.model.train()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """Weights, gradients and amax histories."""
        found = {name: weight.detach() for name, weight in self.model.named_parameters()}
        found |= {f"{name}.grad": weight.grad for name, weight in self.model.named_parameters()}
        for name, layer in self.model.named_modules():
            counts, histories = ("steps", "microbatches"), layer.get_extra_state() if "linear" in name else None
            found |= {f"{name}.{key}": value for key, value in (histories or {}).items() if key not in counts}
        return {name: tensor.clone() for name, tensor in found.items()}


def test_a_gradient_to_differentiate_is_refused() -> None:
    loop = Loop(tracked("mxfp8"))
    weight = loop.model.decoder.layers[-1].mlp.linear_fc2.weight
    with pytest.raises(UserError, match=r"create_graph=True reached layers\.2\.mlp\.linear_fc2 under recipe mxfp8"):
        torch.autograd.grad(loop.loss(0), weight, create_graph=True)


def explicit(recipe: str, *overrides: str, **options: Any) -> Loop:
    from megatron_lowprec.mcore.layers.gpt_spec import gpt_block_spec
    from megatron_lowprec.mcore.runtime import bind_recipe

    model = gpt(gpt_block_spec(config_of(**options)), **options)
    chosen = load_recipe(recipe, overrides)
    calls = bind_recipe([model], chosen, num_layers=LAYERS, seed=SEED, accumulate_wgrad=False)
    return Loop(model, calls)


@cache
def expected(recipe: str, skipped: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of the loop with all calls; ``skipped`` is a step without an update."""
    loop = explicit(recipe)
    for step in range(STEPS):
        loop.run(update=step != skipped)
    return loop.losses, loop.state()


def assert_same(loop: Loop, want: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, state = want
    assert loop.losses == losses
    found = loop.state()
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []


@pytest.mark.parametrize("indexed", [True, False], ids=["schedule's index", "counted"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_and_steps_are_followed_without_calls(recipe: str, indexed: bool) -> None:
    loop = Loop(tracked(recipe))
    for _ in range(STEPS):
        loop.run(indexed=indexed)
    assert_same(loop, expected(recipe))


def test_phases_are_followed_without_calls(capsys: pytest.CaptureFixture[str]) -> None:
    rules = "rules: [{first: 1, gemms: mxfp8}, {layers: [layers.2.mlp.linear_fc2], gemms: bf16}]"
    given = "fp8_delayed", f"phases=[{{from_step: 1, dgrad: fp8_current, {rules}}}]"
    loop, by_calls = Loop(tracked(*given)), explicit(*given)
    for _ in range(2):
        loop.run()
        by_calls.run()
    assert_same(loop, (by_calls.losses, by_calls.state()))
    first, last = (layer.mlp.linear_fc1.bound_gemms.recipe.gemms for layer in loop.model.decoder.layers)
    delayed, current = get_recipe("fp8_delayed").gemms, get_recipe("fp8_current").gemms
    assert (first, last) == (get_recipe("mxfp8").gemms, delayed | {"dgrad": current["dgrad"]})
    printed = capsys.readouterr().out
    assert printed.count("phases of the recipe: 1 from iteration 2; in force: ") == 2


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{layers: [layers.2.mlp.linear_fc3]", "'layers.2.mlp.linear_fc3', which matches no linear layer; layers are "),
        ("{first: 9", "first is 9, but the model has 2 layers; lower it"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused_as_the_model_is_built(rule: str, message: str) -> None:
    for change in (f"rules=[{rule}, gemms: bf16}}]", f"phases=[{{from_step: 1, rules: [{rule}, gemms: bf16}}]}}]"):
        with pytest.raises(UserError, match=message):
            tracked("mxfp8", change)


def test_rules_are_checked_against_the_layers_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first of two stages: a rule for the second passes, one for no stage is named with the nearest path."""
    from megatron_lowprec.mcore import placement
    from megatron_lowprec.mcore.runtime import bind_recipe
    from megatron_lowprec.recipe.layer_match import Layer

    def gather(found: list[Any], mine: list[Layer], group: Any) -> None:
        found[:] = mine, [layer._replace(number=layer.number + LAYERS) for layer in mine]

    two = {"get_pipeline_model_parallel_world_size": lambda: 2, "get_pipeline_model_parallel_group": MagicMock()}
    two["get_pipeline_model_parallel_group"].return_value.size.return_value = 2  # type: ignore[attr-defined]
    monkeypatch.setattr(placement, "parallel_state", MagicMock(wraps=placement.parallel_state, **two))
    monkeypatch.setattr(placement.dist, "all_gather_object", gather)
    # where Megatron-LM builds its optimizers
    builders = dict.fromkeys(("get_megatron_optimizer", "get_megatron_muon_optimizer"), lambda *_: SimpleNamespace())
    training = SimpleNamespace(**builders)
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    stage = {"num_layers": 2 * LAYERS, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    for linear, message in (("linear_fc1", None), ("linear_fc3", "layers are named like layers.4.mlp.linear_fc[12]")):
        change = f"rules=[{{layers: [layers.4.mlp.{linear}], gemms: bf16}}]"
        model = tracked("mxfp8", change, **stage)
        for build in (training.get_megatron_optimizer, training.get_megatron_muon_optimizer):
            with nullcontext() if message is None else pytest.raises(UserError, match=message):
                build(None, [model])
        with nullcontext() if message is None else pytest.raises(UserError, match=message):
            bind_recipe([model], load_recipe("mxfp8", [change]), num_layers=2 * LAYERS, seed=SEED)
    training.get_megatron_optimizer(None, [])  # a stage without layers


def test_a_loaded_model_is_evaluated_in_its_phase() -> None:
    given = "mxfp8", "phases=[{from_step: 1, gemms: fp8_current}]"  # which draws nothing
    whole, loaded = Loop(tracked(*given)), Loop(tracked(*given))
    for _ in range(2):
        whole.run()
    loaded.model.load_state_dict(whole.model.state_dict())
    assert loaded.model.decoder.layers[0].tracker.steps == 2
    assert loaded.evaluate() == whole.evaluate()


def test_a_fraction_of_a_run_needs_its_length() -> None:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    halved = load_recipe("mxfp8", ["phases=[{from_fraction: 0.5, fprop: bf16}]"])
    with pytest.raises(UserError, match=r"from_fraction 0\.5 of a run whose number of steps is unknown: .*total_steps"):
        layer_spec(halved)
    tracker = layer_spec(halved, total_steps=100).module.tracker
    assert tracker.recipe.phases[0].begins(tracker._options["total_steps"]) == 50
    with pytest.raises(
        UserError, match=r"phases 1 and 2 of recipe .* both begin at iteration 51 of 100, so phase 1 wo"
    ):
        layer_spec(replace(halved, phases=(*halved.phases, Phase(from_step=50))), total_steps=100)


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluations_in_between_change_nothing(recipe: str) -> None:
    loop = Loop(tracked(recipe))
    loop.evaluate()
    for _ in range(STEPS):
        loop.run(evaluate=True)
        assert loop.evaluate() == loop.evaluate()
    assert_same(loop, expected(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_repeats_the_draws(recipe: str) -> None:
    loop = Loop(tracked(recipe, **RECOMPUTE))
    for _ in range(STEPS):
        loop.run()
    assert_same(loop, expected(recipe))


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_skipped_update_ends_its_step_and_leaves_no_history(recipe: str, skipped: int) -> None:
    loop = Loop(tracked(recipe))
    for step in range(STEPS):
        loop.run(update=step != skipped)
    assert_same(loop, expected(recipe, skipped))


@pytest.mark.parametrize(("recipe", "draws"), [("mxfp8", False), ("mxfp4_rht_sr", True)])
def test_the_step_after_a_skipped_update_has_draws_of_its_own(recipe: str, draws: bool) -> None:
    """On the same weights and tokens only draws can differ."""
    loop = Loop(tracked(recipe))
    loop.run(update=False)
    first = loop.state()
    loop.run(update=False)
    second = loop.state()
    assert loop.losses[MICROBATCHES:] == loop.losses[:MICROBATCHES]
    assert any(not torch.equal(second[name], first[name]) for name in first) == draws


@pytest.mark.parametrize("tells", [False, True])
def test_steps_continue_at_the_loaded_checkpoint(tells: bool) -> None:
    """Behind a skipped update, in a process that has gone on; of earlier checkpoints, without steps, the loop tells."""
    whole, resumed = Loop(tracked("mxfp4_rht_sr")), Loop(tracked("mxfp4_rht_sr"))
    whole.run()
    whole.run(update=False)
    saved, sharded = copy.deepcopy(whole.model.state_dict()), whole.model.sharded_state_dict()
    linears = [key for key in saved if key.endswith("_extra_state") and ".linear_" in key]
    assert [int(saved[key]["steps"]) for key in linears] == [2] * 4 * LAYERS
    assert all(sharded[key].data["steps"] == 2 for key in linears)
    tracker = resumed.model.decoder.layers[0].tracker
    tracker.steps = 9
    resumed.backward(0)
    if tells:
        saved |= dict.fromkeys(linears)
        resumed.optimizer.step()  # which ends the step
        tracker.steps = 2
    resumed.model.load_state_dict(saved)
    for loop in (whole, resumed):
        loop.run()
    assert_same(resumed, (whole.losses[2 * MICROBATCHES :], whole.state()))


def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    loops = {recipe: Loop(tracked(recipe)) for recipe in RECIPES}
    for _ in range(STEPS):
        for loop in loops.values():
            loop.run()
    for recipe, loop in loops.items():
        assert_same(loop, expected(recipe))


def test_two_models_may_accumulate_gradients_in_turn() -> None:
    """Each at a step of its own: a microbatch of one does not take the other's step for its draws."""
    found = []
    for other in (None, Loop(tracked("mxfp8"))):
        loop = Loop(tracked("mxfp4_rht_sr"))
        loop.model.decoder.layers[0].tracker.steps = 5
        for index in range(MICROBATCHES):
            loop.backward(index)
            if other is not None:
                other.backward(index)
        found.append(loop.state())
    assert [name for name in found[0] if not torch.equal(found[1][name], found[0][name])] == []


def test_a_spec_of_one_s_own_by_low_precision() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lowprec.mcore.layer_spec import layer_spec
    from megatron_lowprec.mcore.layers.gpt_spec import low_precision

    stock = get_gpt_layer_local_spec()
    layer = layer_spec(get_recipe("fp8_delayed"), seed=SEED).module
    loop = Loop(gpt(ModuleSpec(module=layer, submodules=low_precision(stock).submodules)))
    for _ in range(STEPS):
        loop.run()
    assert_same(loop, expected("fp8_delayed"))
    unchanged = gpt(ModuleSpec(module=layer_spec(get_recipe("bf16")).module, submodules=stock.submodules))
    assert not any("LowPrec" in type(linear).__name__ for linear in unchanged.decoder.layers[0].mlp.children())


@pytest.mark.parametrize("subclass", [False, True])
def test_a_linear_of_another_s_is_named(subclass: bool) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_lowprec.mcore.layer_spec import layer_spec
    from megatron_lowprec.mcore.layers.gpt_spec import low_precision

    submodules = low_precision(get_gpt_layer_local_spec()).submodules
    foreign = type("Foreign", (RowParallelLinear,), {}) if subclass else RowParallelLinear
    submodules.self_attention.submodules.linear_proj = foreign
    layer = layer_spec(get_recipe("mxfp8")).module
    with pytest.raises(
        RuntimeError, match=r"no recipe reaches self_attention\.linear_proj of layer 1, .*low_precision"
    ):
        gpt(ModuleSpec(module=layer, submodules=submodules))


def test_recipes_and_configs_that_the_layers_cannot_run_are_refused() -> None:
    from megatron_lowprec.mcore.layer_spec import layer_spec

    with pytest.raises(UserError, match="fp8_lm also quantizes optimizer state, gradients or weights"):
        layer_spec(get_recipe("fp8_lm"))
    with pytest.raises(UserError, match=r"TransformerConfig\.mtp_num_layers is 1"):
        tracked("mxfp8", mtp_num_layers=1)
    with pytest.raises(UserError, match="gradient_accumulation_fusion needs apex"):
        tracked("mxfp8", gradient_accumulation_fusion=True)


# ---- in Megatron-LM, which these arguments stand for
def as_in_megatron_lm(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> SimpleNamespace:
    from megatron_lowprec.mcore import step_tracker
    from megatron_lowprec.mcore.layers import transformer_layer

    batch = {"rampup_batch_size": None, "global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 1}
    args = SimpleNamespace(**{"seed": SEED, "calculate_per_token_loss": False, **batch, **arguments})
    for module in (step_tracker, transformer_layer):
        monkeypatch.setattr(module, "megatron_lm_args", lambda: args)
    return args


def test_gradients_histories_follow_the_number_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM divides the loss by it, so half as many make the gradients twice as large. Also behind a resume."""
    from megatron_lowprec.mcore import step_tracker

    args = as_in_megatron_lm(monkeypatch, curr_iteration=0)
    found = []
    for later, resumes in ((MICROBATCHES, False), (MICROBATCHES / 2, False), (MICROBATCHES / 2, True)):
        count = [MICROBATCHES, later]
        monkeypatch.setattr(step_tracker, "get_num_microbatches", lambda count=count: count[args.curr_iteration])
        loop = Loop(tracked("fp8_delayed"))
        for args.curr_iteration in range(2):
            if args.curr_iteration and resumes:
                saved, loop = loop.model.state_dict(), Loop(tracked("fp8_delayed"))
                loop.model.load_state_dict(saved)
            loop.run()
        fc1 = loop.model.decoder.layers[0].mlp.linear_fc1.get_extra_state()
        found.append({name: fc1[name] for name in ("input", "grad_output")})
        args.curr_iteration = 0
    same, *others = found
    for halved in others:
        assert torch.equal(same["input"], halved["input"])
        # the first step's entry; the second step's has its own gradients
        assert halved["grad_output"][2] == 2 * same["grad_output"][2] > 0


def test_an_own_loop_with_megatron_lm_s_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Megatron-LM's own loop sets the iteration."""
    as_in_megatron_lm(monkeypatch)
    loop = Loop(tracked("mxfp4_rht_sr"))
    loop.run()
    assert loop.losses == expected("mxfp4_rht_sr")[0][:MICROBATCHES]


def test_an_update_as_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_megatron_lm(monkeypatch, optimizer_cuda_graph=True)
    with pytest.raises(UserError, match="--optimizer-cuda-graph cannot hold the update under a recipe"):
        tracked("mxfp8")


def test_attention_masks_that_would_not_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnBackend

    as_in_megatron_lm(monkeypatch, reset_attention_mask=True)
    with pytest.raises(UserError, match="--reset-attention-mask needs --attention-backend unfused"):
        tracked("mxfp8")
    for name in ("FLASH", "FUSED", "UNFUSED"):  # Megatron-core refuses another choice in one process
        monkeypatch.delenv(f"NVTE_{name}_ATTN", raising=False)
    tracked("mxfp8", attention_backend=AttnBackend.unfused)


# ---- megatron_lowprec.specs
def recipes_of_layers(name: str) -> list[str]:
    """The recipe that each layer's linears run."""
    model = gpt(getattr(specs, name))
    return [layer.mlp.linear_fc1.bound_gemms.recipe.name for layer in model.decoder.layers]


def test_a_layer_spec_takes_the_name_of_a_recipe() -> None:
    from megatron_lowprec import layer_spec

    layers = gpt(layer_spec("mxfp8", seed=SEED)).decoder.layers
    gemms = get_recipe("mxfp8").gemms
    assert [layer.mlp.linear_fc1.bound_gemms.recipe.gemms for layer in layers] == [gemms] * LAYERS
    for other in (None, 7, get_recipe("mxfp8").fprop):
        with pytest.raises(UserError, match="as recipe: give a Recipe, the name of one, or a YAML file"):
            layer_spec(other)  # type: ignore[arg-type]


def test_a_spec_by_the_name_of_a_recipe() -> None:
    assert recipes_of_layers("mxfp8") == ["mxfp8"] * LAYERS
    assert vars(specs)["mxfp8"] is specs.mxfp8, "Megatron-LM reads the module's dictionary"


def test_a_spec_by_a_recipe_with_overrides() -> None:
    assert recipes_of_layers("mxfp8 keep_bf16.last_layers=1") == ["mxfp8+keep_bf16.last_layers=1", "bf16"]
    assert recipes_of_layers('mxfp8 keep_bf16.names=["decoder.layers.1.*"]')[1] == "bf16"


def test_a_spec_by_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nbase: mxfp8\nsummary: MXFP8 of mine\nkeep_bf16: {first_layers: 1}\n")
    assert recipes_of_layers(str(file)) == ["bf16", "mine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mxfp4_rht_s", "there is no recipe 'mxfp4_rht_s': did you mean mxfp4_rht_sr"),
        ("mxfp8 keep_bf16.last_layer=1", "last_layer"),
        ("nowhere/mine.yaml", "nowhere/mine.yaml"),
    ],
)
def test_an_unknown_name_lists_what_was_found(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        getattr(specs, name)


def test_python_s_own_names_are_no_recipes() -> None:
    assert not hasattr(specs, "__wrapped__")
    assert not hasattr(specs, "_a_probe_of_a_shell")
