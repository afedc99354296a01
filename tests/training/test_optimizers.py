"""``--optimizer muon`` and ``sgd`` in whole runs: recipes, resuming, layouts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lowprec.errors import UserError
from megatron_lowprec.mcore.optim.recipe_optimizer import torch_optimizers
from megatron_lowprec.recipe.parsing import load_recipe
from megatron_lowprec.training.checkpoint.optimizer_state import prime
from megatron_lowprec.training.config.arguments import parse
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import resolve_model, resolve_run
from megatron_lowprec.training.memory.plan import plan
from tests.mcore.built_trainers import Build, build
from tests.once import once
from tests.training.conftest import Drive
from tests.training.helpers import argv, losses, many_runs
from tests.weekly import also_weekly

_ = build  # a fixture

MUON: dict[str, Any] = {"optimizer": "muon", "lr_decay_iters": 10}
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "lr_decay_iters": 10}
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "use_cpu_initialization": True}
# a gate that is split beside its projection, and query groups with keys and values of their own
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "disable_bias_linear": True,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
}

RESUMED: dict[str, dict[str, Any]] = {
    "muon": MUON | {"bf16": True},
    "muon, distributed": MUON | DISTRIBUTED,
    "muon, FP8 weights": MUON | DISTRIBUTED | {"bf16": True, "fp8_param_gather": True},
    "sgd": SGD,
    "sgd, distributed": SGD | DISTRIBUTED | {"bf16": True},
}


@pytest.mark.parametrize("name", also_weekly(RESUMED, ("muon", "muon, distributed", "sgd, distributed")))
def test_a_run_resumes_bit_for_bit(drive: Drive, name: str) -> None:
    options = RESUMED[name] | {"recipe": "fp8_current", "train_iters": 4}
    drive(argv(**options, save="whole", save_interval=2))
    drive(argv(**options, load="whole", ckpt_step=2, save="rest", no_save=True))
    assert losses(Path("rest")) == losses(Path("whole"))[2:]


# Name -> options on two processes; the weights are drawn alike on all layouts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, distributed": DISTRIBUTED,
    "tensor": {"tensor_model_parallel_size": 2},
    "tensor, sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
MODELS = {"gpt": {}, "llama": LLAMA}


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six iterations of Muon of each model and layout on two processes, in one launch."""
    common = MUON | {"train_iters": 6, "lr": 3e-3, "use_cpu_initialization": True, "no_save": True}
    common |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    def run(folder: Path) -> None:
        cases = [
            argv(**common | model | layout, save=f"{name} {layout_name}")
            for name, model in MODELS.items()
            for layout_name, layout in LAYOUTS.items()
        ]
        many_runs(2, cases, folder)

    return once(tmp_path_factory, "muon_layouts", run)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_layout_orthogonalizes_whole_matrices(launch: Path, model: str) -> None:
    """Losses within 1e-5 of data parallelism's: sums in bf16 and of gradients have another order. With matrices of each
    tensor-parallel rank apart they are 1.4e-4 apart.
    """
    wanted = [float.fromhex(loss) for loss in losses(launch / f"{model} data")]
    for layout in LAYOUTS:
        found = [float.fromhex(loss) for loss in losses(launch / f"{model} {layout}")]
        assert len(found) == 6
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_rht_sr", "fp8_lm_o1"])  # fp8_current: above
@pytest.mark.parametrize("options", [MUON, SGD], ids=["muon", "sgd"])
def test_recipes_train(drive: Drive, recipe: str, options: dict[str, Any]) -> None:
    rate = {"lr": 3e-3 if options is MUON else 0.3}
    drive(argv(**options | rate, bf16=True, recipe=recipe, train_iters=4, save="out", no_save=True))
    found = [float.fromhex(loss) for loss in losses(Path("out"))]
    assert found[-1] < found[0]


@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_the_state_is_what_the_memory_plan_counts(build: Build, optimizer: str) -> None:
    trainer = build(optimizer=optimizer)
    prime(trainer)
    (inner,) = torch_optimizers(trainer.optimizer)
    held = sum(tensor.numel() for state in inner.state.values() for name, tensor in state.items() if name != "step")
    config = resolve_run(resolve_model(parse(argv(optimizer=optimizer))[0]), 1, gpus=False)
    assert plan(config, load_recipe("bf16"), 256, 1).resident["moments"] == 4 * held


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (MUON | {"recipe": "fp8_lm", "bf16": True}, "fp8_lm stores AdamW's moments in e4m3, fp16, fp16, .* is muon"),
        (SGD | {"recipe": "fp8_lm_o2", "bf16": True}, "or a recipe without optimizer state such as fp8_lm_o1"),
        ({"muon_momentum": 0.9}, "--muon-momentum 0.9 is for --optimizer muon, and this run has --optimizer adam"),
        (MUON | {"muon_lr": 0.01, "lr": 0.0}, "--muon-lr 0.01 does nothing without --lr above 0;"),
        ({"no_muon_nesterov": True}, "--no-muon-nesterov is for --optimizer muon"),
        (MUON | {"sgd_momentum": 0.5}, "--sgd-momentum 0.5 is for --optimizer sgd"),
        (MUON | {"muon_num_ns_steps": 100}, "--muon-num-ns-steps 100: wants at least 1 and at most 99"),
    ],
)
def test_what_an_optimizer_does_not_read_is_refused(drive: Drive, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        drive(argv(**options, no_save=True))


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_shipped_configs_take_each_optimizer(optimizer: str) -> None:
    """They name AdamW's options, which SGD does not read."""
    config, *_ = parse(["--config", "gpt_tiny", "--optimizer", optimizer])
    assert config.adam_beta1 != Config().adam_beta1
    assert resolve_run(resolve_model(config), 1, gpus=False).optimizer == optimizer
