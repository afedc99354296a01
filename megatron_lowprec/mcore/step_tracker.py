"""Tracks steps and microbatches from what any training loop does, and binds layers to a recipe one by one."""

import atexit
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_lowprec.comm.gradients import GradientFactor, rounded_sum_warnings
from megatron_lowprec.errors import UserError
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.graphs.graph_support import asks_for_graphs, check_graphs
from megatron_lowprec.mcore.graphs.layer_graphs import LayerGraphs
from megatron_lowprec.mcore.layers.gpt_model import fuse_loss
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.mcore.megatron_lm_checks import check_arguments
from megatron_lowprec.mcore.optim.fp8_param_gather import use_primary_weights
from megatron_lowprec.mcore.placement import device_of_models
from megatron_lowprec.mcore.runtime import RecipeRuntime, bind_layer
from megatron_lowprec.quantization.random_stream import in_backward_pass
from megatron_lowprec.recipe.coverage import check_primary_weights
from megatron_lowprec.recipe.explain import describe_training_state
from megatron_lowprec.recipe.recipe import Recipe

DEFAULT_SEED = 1234
"""Megatron-LM's default."""


class StepTracker:
    """Calls a ``RecipeRuntime``'s hooks for a training loop that does not know of it.

    A step begins with the first forward pass in training after the last one ended; its number is Megatron-LM's
    ``args.curr_iteration``, elsewhere the number of steps ended before. It ends with the step of an optimizer that
    ``may_update`` the model's weights, or, where the update was skipped, with the next step. A microbatch is a layer's
    forward pass in training: its index is the one that Megatron-core's schedules set, elsewhere the number of the
    layer's passes in this step. A pass in evaluation mode (``model.eval()``) is none.

    Args:
        recipe: the recipe to run.
        seed: the run's seed; None for Megatron-LM's ``args.seed``, elsewhere ``DEFAULT_SEED``.
        total_steps: steps of the whole run; None for Megatron-LM's ``args.train_iters``.
        options: keyword arguments of ``RecipeRuntime``.

    Attributes:
        recipe: the argument.
        steps: steps begun so far, which ``load_state_dict`` continues if the recipe draws or has phases.

    Raises:
        UserError: outside of Megatron-LM the recipe changes the optimizer or the exchange of gradients; its weights
            cannot be FP8; or a phase begins at a fraction of an unknown number of steps, or two at one step.
    """

    def __init__(
        self, recipe: Recipe, seed: int | None = None, *, total_steps: int | None = None, **options: Any
    ) -> None:
        if recipe.changes_training and megatron_lm_args() is None:
            raise UserError(
                f"recipe {recipe.name} also quantizes optimizer state, gradients or weights, which belong to the "
                "training loop; use this project's pretrain_gpt.py, Megatron-LM's, or a recipe of only GEMMs such as "
                "fp8_delayed"
            )
        if recipe.fp8_weights:
            check_primary_weights(recipe)
        if total_steps is None:
            total_steps = getattr(megatron_lm_args(), "train_iters", None)
        total_steps = recipe.start(total_steps).total
        self.recipe, self._seed, self._options = recipe, seed, {**options, "total_steps": total_steps}
        self._runtime: RecipeRuntime | None = None
        self._models: WeakSet[nn.Module] = WeakSet()
        self._passes: dict[TransformerLayer, int] = {}  # passes in training of each layer in the step in progress
        self._step: int | None = None  # the step in progress
        self._microbatch = -1
        self._introduced = self._captures = False
        self._graphs: LayerGraphs | None = None
        self._microbatches = 0  # of the last step, in Megatron-LM
        self._factor: GradientFactor | None = None
        self._finalize: Callable[[], None] | None = None
        self.steps = 0
        register_optimizer_step_post_hook(self._updated)

    @property
    def seed(self) -> int:
        """The run's seed."""
        args = megatron_lm_args()
        if self._seed is None and args is not None:
            return int(args.seed)
        return DEFAULT_SEED if self._seed is None else self._seed

    def lead_by_optimizer(self, factor: GradientFactor | None, finalize: Callable[[], None]) -> None:
        """Let ``end_step`` end the steps in place of torch's hook, for an optimizer that has more to do behind it.

        Args:
            factor: of gradients in FP8, None without.
            finalize: called as the first step begins.
        """
        self._factor, self._finalize = factor, finalize

    def end_step(self, updated: bool) -> None:
        """End the step in progress."""
        self._end(updated)
        if updated and self._factor is not None:
            self._factor.end_step()

    def counts(self, linear_gemms: LinearGemms) -> dict[str, torch.Tensor]:
        """As ``StepCounter``."""
        steps = {"steps": torch.tensor(self.steps)} if self.recipe.random or self.recipe.phases else {}
        if not self._microbatches or "grad_output" not in linear_gemms.histories:
            return steps
        return {**steps, "microbatches": torch.tensor(self._microbatches)}

    def resume(self, state: dict[str, torch.Tensor]) -> None:
        """As ``StepCounter``."""
        self._end(updated=False)
        self.steps = int(state.get("steps", self.steps))
        self._microbatches = int(state.get("microbatches", self._microbatches))
        if self.recipe.phases:
            self._enter_phase(max(self.steps - 1, 0))  # an evaluation may follow

    def check(self, config: TransformerConfig) -> None:
        """Check that the layers can be built and their passes followed.

        Raises:
            UserError: the layers need apex, and it is missing; CUDA graphs that cannot hold the layers; as
                ``check_arguments``.
        """
        self._captures = asks_for_graphs(config)
        if self._captures:
            check_graphs(config, self.recipe, megatron_lm_args())
        check_arguments(self.recipe, megatron_lm_args())
        if config.gradient_accumulation_fusion and not _has_apex():
            raise UserError(
                "gradient_accumulation_fusion needs apex, which is not installed; pass "
                "--no-gradient-accumulation-fusion to Megatron-LM, as its own layers need it then"
            )

    def bind(self, layer: TransformerLayer, model: nn.Module) -> None:
        """Bind the linears of a layer of a model to the recipe.

        Raises:
            RuntimeError: a linear of the layer is Megatron-core's own.
            UserError: the recipe's blocks do not divide its sizes.
        """
        foreign = [
            name
            for name, module in layer.named_modules()
            if name.rpartition(".")[2].startswith("linear_") and not isinstance(module, LowPrecLinearMixin)
        ]
        if foreign and self.recipe.quantized:
            raise RuntimeError(
                f"no recipe reaches {', '.join(foreign)} of layer {layer.layer_number}, which are not this project's "
                "linears: build the layer's spec by low_precision from one of Megatron-core's local specs"
            )
        if self._runtime is None:
            self._runtime = _runtime(self.recipe, layer.config, self.seed, self._options)
            self._runtime.notes += describe_training_state(self.recipe)
            self._runtime.notes += rounded_sum_warnings(
                self.recipe.gradients, parallel_state.get_data_parallel_world_size()
            )
        bind_layer(self._runtime, layer)
        for module in layer.modules():
            if isinstance(module, LowPrecLinearMixin):
                module.step_counter = self
        if self.recipe.fp8_weights:
            use_primary_weights([layer])
        if model not in self._models:
            fuse_loss(model)
        self._models.add(model)

    def check_rules(self) -> None:
        """Reject globs of rules that match no layer of any pipeline stage; all ranks of a pipeline call it at once.

        Raises:
            UserError: with the nearest path.
        """
        assert self._runtime is not None
        self._runtime.check_rules(on_all_stages=True)

    def enter(self, layer: TransformerLayer) -> None:
        """Begin the microbatch, and the step, of the layer's forward pass that follows."""
        if self._runtime is None or not layer.training or in_backward_pass():
            return
        # set only by Megatron-LM's train()
        iteration = getattr(megatron_lm_args(), "curr_iteration", None)
        index = getattr(layer, "current_microbatch", -1)
        passes = self._passes.get(layer, 0)
        if self._step is not None and ((index == 0 and passes) or (iteration is not None and iteration != self._step)):
            self._end(updated=False)
            passes = 0
        if self._step is None:
            self._begin(self.steps if iteration is None else iteration)
        self._passes[layer] = passes + 1
        microbatch = index if index >= 0 else passes
        if microbatch != self._microbatch:
            self._microbatch = microbatch
            self._runtime.begin_microbatch(microbatch)

    def _begin(self, step: int) -> None:
        assert self._runtime is not None
        self._enter_phase(step)
        if self._captures:
            self._begin_graphs()
        if not self._introduced and _is_first_rank():
            print(*self._runtime.header(), sep="\n", flush=True)
        if not self._introduced and self._finalize is not None:
            self._finalize()
        self._introduced = True
        if self._factor is not None:
            self._factor.forget()
        self._rescale_gradients()
        self._step, self._microbatch, self.steps = step, 0, step + 1
        self._runtime.begin_step(step)

    def _enter_phase(self, step: int) -> None:
        assert self._runtime is not None
        changed = self._runtime.enter_phase(step)
        if not changed:
            return
        if self._graphs is not None:
            self._graphs.recapture()
        if step > 0 and self._runtime.fit_histories():
            changed.append("delayed scaling begins in this phase: the first step has scale 1 where a history is empty")
        if self._introduced and _is_first_rank():
            print(*changed, sep="\n", flush=True)

    def _begin_graphs(self) -> None:
        """Capture what ran in the step before: in the first layer's call, where Megatron-core's contexts are open."""
        assert self._runtime is not None
        if self._graphs is None:
            self._graphs = LayerGraphs(_trained_model(self._models))
            self._graphs.say = _say
            # graphs may hold collectives of NCCL, which must outlive them
            atexit.register(self._graphs.drop)
            self._runtime.notes.append(
                "--cuda-graph-impl local: behind the first step layers are captured in CUDA graphs"
            )
        self._graphs.begin_step()

    def _rescale_gradients(self) -> None:
        """Megatron-LM divides the loss by the number of microbatches, which a batch ramp changes."""
        args = megatron_lm_args()
        if not hasattr(args, "curr_iteration") or getattr(args, "calculate_per_token_loss", False):
            return
        assert self._runtime is not None
        count = get_num_microbatches()
        if self._microbatches:
            self._runtime.rescale_gradients(self._microbatches / count)
        self._microbatches = count

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer has stepped: of the model's, such as one more for experts, the first ends the step."""
        if self._step is None or self._finalize is not None or not may_update(optimizer, self._models):
            return
        if in_backward_pass():  # as soon as its weight's gradient exists, when others do not
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, updated=True))
        else:
            self._end(updated=True)

    def _end(self, updated: bool) -> None:
        if self._step is None:
            return
        assert self._runtime is not None
        self._step = None
        if self._graphs is not None:
            self._graphs.end_step()
        self._passes.clear()
        self._runtime.end_step(updated)


def may_update(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> bool:
    """Whether an optimizer may update weights of these models, or stand for one that does.

    It holds a weight; or, as Megatron-core's do, a flat part of one or an fp32 copy that the weight knows as
    ``main_param``. So may a rank's optimizer that holds nothing, the parts being elsewhere, one with copies that no
    weight knows, as other libraries make, and any optimizer where all weights of the models are frozen.
    """
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    held = [tensor if tensor._base is None else tensor._base for tensor in tensors]
    weights = [weight for model in models for weight in model.parameters()]
    copies = [copy for weight in weights if (copy := getattr(weight, "main_param", None)) is not None]
    ours = {id(tensor) for tensor in (*weights, *copies)}
    if any(id(tensor) in ours for tensor in held):
        return True
    unknown = not copies and not all(isinstance(tensor, nn.Parameter) for tensor in held)
    return not held or unknown or not any(weight.requires_grad for weight in weights)


def _runtime(recipe: Recipe, config: TransformerConfig, seed: int, options: dict[str, Any]) -> RecipeRuntime:
    args = megatron_lm_args()
    several = args is not None and (
        getattr(args, "step_batch_size_schedule", None) is not None  # from 0.18 on
        or args.rampup_batch_size is not None
        or args.global_batch_size > args.micro_batch_size * args.data_parallel_size
    )
    return RecipeRuntime(
        recipe,
        device_of_models(),
        num_layers=config.num_layers,
        seed=seed,
        # as with Megatron-core's own linears: rounded to the weight's dtype without the fusion
        accumulate_wgrad=config.gradient_accumulation_fusion,
        cache_weights=several,
        **options,
    )


def _trained_model(models: Iterable[nn.Module]) -> nn.Module:
    """The only model, whose weights have their ``main_grad``.

    Raises:
        UserError: there are several, or its weights have none.
    """
    found = list(models)
    if len(found) != 1:
        raise UserError(
            f"CUDA graphs hold the layers of one model, and this process has {len(found)}; use --cuda-graph-impl none"
        )
    if not all(hasattr(weight, "main_grad") for weight in found[0].parameters() if weight.requires_grad):
        raise UserError(
            "CUDA graphs write gradients into the main_grad of weights, which Megatron-core's DistributedDataParallel "
            "gives them; wrap the model in it, or use cuda_graph_impl none"
        )
    return found[0]


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _say(line: str) -> None:
    """Print what became of the graphs: once, but on each rank that goes without."""
    if _is_first_rank() or "CUDA graphs: off" in line:
        print(line, flush=True)


def _has_apex() -> bool:
    from megatron.core.tensor_parallel import layers

    return bool(layers._grad_accum_fusion_available)


def megatron_lm_args() -> Any:
    """Megatron-LM's arguments, None outside of Megatron-LM."""
    module = sys.modules.get("megatron.training.global_vars")
    return None if module is None else module._GLOBAL_ARGS
