"""Binds a recipe to a model's linear layers and tracks steps and microbatches."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack
from weakref import WeakKeyDictionary, WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_lowprec.comm.maximum import maximum_over
from megatron_lowprec.errors import UserError
from megatron_lowprec.kernels.dispatch import arch_of, has_mx_kernel, have_triton
from megatron_lowprec.linear.backends.emulated.why_not import check_accumulator, fast_gemms
from megatron_lowprec.linear.backends.table import Choice, Emulate, choose
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.linear_gemms import LinearGemms
from megatron_lowprec.mcore.activation_cache import bind_activations
from megatron_lowprec.mcore.collectives import reduce_over_holders
from megatron_lowprec.mcore.layers.grouped_mlp import LowPrecGroupedMLP, grouped_launches
from megatron_lowprec.mcore.layers.mlp import LowPrecMLP
from megatron_lowprec.mcore.layers.norm import link_norms
from megatron_lowprec.mcore.layers.parallel_linear import LowPrecLinearMixin
from megatron_lowprec.mcore.placement import (
    BoundLinear,
    device_of_models,
    gathered_tensor,
    layers_of_model,
    linear_id_of,
    linears,
    site_of,
)
from megatron_lowprec.mcore.rng_step import current_rng_step, set_rng_step
from megatron_lowprec.mcore.token_dispatch import Fp8Dispatch
from megatron_lowprec.quantization.amax_history import AmaxHistory, add_tensors, empty_histories
from megatron_lowprec.quantization.device_rng_step import enter_rng_step
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.quantization.random_stream import RngStep, in_backward_pass
from megatron_lowprec.recipe.coverage import check_activations, check_fp8_gather, check_rules, check_site
from megatron_lowprec.recipe.explain import describe_phases
from megatron_lowprec.recipe.layer_match import Layer, numbering_notes
from megatron_lowprec.recipe.parsing import RecipeLike, as_recipe
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.runtime_options import RuntimeOptions
from megatron_lowprec.recipe.schema import HistorySpec, HistoryUpdate

_checks: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()  # model chunk -> its forward pre-hook


class RecipeRuntime:
    """State that a model's linear layers share under one recipe, with the hooks that a training loop calls.

    ``bind_linear`` binds one layer, before its first forward pass. ``bind_recipe`` binds a whole model.

    Args:
        recipe: the recipe to run.
        device: the model's device.
        options: ``RuntimeOptions`` describes them; the defaults are below.

    Raises:
        UserError: ``fp8_gather`` or ``fp8_dispatch`` under a recipe whose codes cannot be sent; ``emulate_accumulator``
            under a recipe or on a device that has no GEMM for it; a phase at a fraction of the run without
            ``total_steps``, or two at one step.

    Attributes:
        layers: GEMMs of the layers bound so far.
        transformer_layers: those that ``bind_layer`` bound.
        grouped: experts of the layers bound so far that run together.
        kept: paths of layers that the recipe leaves in the compute dtype.
        backends: choice of a backend -> the quantized GEMMs of all layers, or of single layers, that it runs.
    """

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        *,
        num_layers: int,
        seed: int,
        accumulate_wgrad: bool = True,
        share_rng_across_dp: bool = False,
        reduce_amax: bool = True,
        cache_weights: bool = False,
        save_memory: bool = False,
        emulate: Emulate = False,
        emulate_accumulator: bool = False,
        rerun_in_bf16: Sequence[str] = (),
        fp8_gather: bool = False,
        fp8_dispatch: bool = False,
        total_steps: int | None = None,
    ) -> None:
        self.recipe, self.device, self._progress = recipe, device, recipe.start(total_steps)
        self._used, self._bf16_globs = recipe.in_bf16(rerun_in_bf16), rerun_in_bf16
        self._num_layers, self._seed, self._cache_weights = num_layers, seed, cache_weights
        self._emulate, self._emulate_accumulator, self._fp8_gather = emulate, emulate_accumulator, fp8_gather
        self._accumulate_wgrad, self._reduce_amax = accumulate_wgrad, reduce_amax
        self._share_rng_across_dp, self.save_memory = share_rng_across_dp, save_memory
        if emulate_accumulator:
            check_accumulator(recipe, "cpu" if emulate is True else arch_of(device))
        if fp8_gather:
            check_fp8_gather(recipe, parallel_state.get_pipeline_model_parallel_world_size())
        self.dispatch = Fp8Dispatch(recipe) if fp8_dispatch else None
        self.kept, self.rerun_in_bf16, self.notes = list[str](), list[str](), list[str]()
        self.backends: dict[Choice, list[str]] = {}
        self.recomputes_gelu: bool | None = None
        self.layers, self.grouped = list[LinearGemms](), list[LowPrecGroupedMLP]()
        self.transformer_layers: WeakSet[TransformerLayer] = WeakSet()
        self._bound: WeakKeyDictionary[LowPrecLinearMixin, BoundLinear] = WeakKeyDictionary()
        self._histories: dict[tuple[HistorySpec, bool], AmaxHistory] = {}
        self._unfinished: int | None = None  # the step in progress
        self._ran: set[tuple[nn.Module, RngStep]] = set()  # training forward passes of that step
        if not reduce_amax:
            self.notes.append("--no-amax-reduce: a current scale is of each tensor-parallel rank's own part")
        if emulate_accumulator:
            self.notes.append(f"--emulate-accumulator: {', '.join(fast_gemms(recipe))} summed as on Hopper's FP8 units")
        if share_rng_across_dp:
            self.notes.append("--share-rng-across-dp: rounding noise does not average out over these ranks")

    def bind_linear(self, module: LowPrecLinearMixin, layer_number: int, name: str, expert: int = -1) -> None:
        """Bind a linear layer's GEMMs.

        Args:
            layer_number: global number of its transformer layer, from 1.
            name: within the transformer layer, such as ``mlp.linear_fc1``.
            expert: global number of its expert, -1 outside of experts.

        Raises:
            UserError: blocks of the recipe do not divide the layer's sizes, or scales updated each microbatch meet a
                pipeline with activation recomputation.
        """
        recipe, config = self.recipe, module.config
        if recipe.moves_within_steps and config.recompute_granularity and config.pipeline_model_parallel_size > 1:
            raise UserError(
                f"recipe {recipe.name} has history_update microbatch: in a pipeline a recomputed forward pass would be "
                "rounded by a later scale than its first one; set history_update=step, or leave recomputation out"
            )
        if (bound := self._bound.get(module)) is None:
            # a checkpoint stacks the layers of a model, so all store the same tensors
            histories = add_tensors(recipe.delayed_operands(), partial(self.history, expert=expert >= 0))
            bound = self._bound[module] = BoundLinear(layer_number, name, expert, histories)
        place, now = Layer(layer_number, name, self._num_layers), self._progress
        own, linear = recipe.at(place, now), self._used.at(place, now)
        if recipe.quantized and not own.quantized:
            self.kept.append(place.path)
        rerun = [gemm for gemm in own.gemms if own.gemms[gemm].quantized and not linear.gemms[gemm].quantized]
        self.rerun_in_bf16 += [f"{place.path}.{gemm}" for gemm in sorted(rerun)]
        tp_group = module.tp_group
        module.linear_gemms = LinearGemms(
            linear,
            linear_id_of(module, layer_number, name, expert, self._share_rng_across_dp),
            self._seed,
            self.history,
            maximum_over(tp_group) if tp_group.size() > 1 and self._reduce_amax else None,
            cache_weights=self._cache_weights,
            save_memory=self.save_memory,
            histories=bound.histories,
            emulate=self._emulate,
            emulate_accumulator=self._emulate_accumulator,
            gathers=gathered_tensor(module, linear) if self._fp8_gather and expert < 0 else None,
        )
        site = site_of(module, layer_number, name)
        check_activations(recipe, [site], tp_group.size())
        check_site(linear, site, tp_group.size())
        self._note_backends(module, name, layer_number)
        self.layers.append(module.linear_gemms)
        module.accumulates_in_fp32 = self._accumulate_wgrad

    def _note_backends(self, module: LowPrecLinearMixin, name: str, layer_number: int) -> None:
        """Record which backends run a layer's GEMMs, and why: one header line for each choice."""
        out_features, in_features = module.weight.shape
        target = Target(arch_of(self.device), dtype=str(module.weight.dtype).removeprefix("torch."))
        sized = target._replace(in_features=in_features, out_features=out_features)
        for gemm, spec in module.bound_gemms.recipe.gemms.items():
            if spec.quantized:
                here = choose(gemm, spec, sized, self._emulate)
                usual = here == choose(gemm, spec, target, self._emulate)
                names = self.backends.setdefault(here, [])
                names += {gemm if usual else f"layers.{layer_number}.{name}.{gemm}"}.difference(names)

    def check_rules(self, on_all_stages: bool = False) -> None:
        """Reject rules about more layers than there are, and globs that match no layer of ``layers_of_model``."""
        layers = [Layer(bound.layer_number, bound.name, self._num_layers) for bound in self._bound.values()]
        check_rules(self.recipe, layers_of_model(layers, on_all_stages), self._num_layers)

    def enter_phase(self, step: int) -> list[str]:
        """Enter the recipe's phase of a step, before the step begins; returns the header lines that it changes.

        The layers are bound anew as if a checkpoint continued under another recipe: amax histories that a layer does
        not use in the phase are dropped, all other state stays. Without a change of phase nothing happens.
        """
        progress = self._progress._replace(step=step)
        if self._used.during(progress) is self._used.during(self._progress):
            return []
        lines, self._progress = self.header(), progress
        for collected in (self.layers, self.kept, self.rerun_in_bf16, self.backends):
            collected.clear()
        for module, bound in self._bound.items():
            self.bind_linear(module, bound.layer_number, bound.name, bound.expert)
        for layer in self.transformer_layers:
            link_norms(layer, self.save_memory)
        self.fit_histories()
        return [line for line in self.header() if line not in lines]

    def fit_histories(self) -> bool:
        """Drop amax histories that layers do not use now; returns whether any that one uses is empty."""
        for module, bound in self._bound.items():
            for tensor in bound.histories.keys() - module.bound_gemms.recipe.delayed_operands():
                history, slot = bound.histories[tensor]
                history.load_state(slot, None)
        return any(empty_histories(layer.recipe, layer.histories, gradients=True) for layer in self.layers)

    def begin_step(self, step: int) -> None:
        """Begin the step behind ``step`` iterations, and its phase, before its first forward, with zero gradients.

        Raises:
            RuntimeError: the previous step has not ended.
        """
        if self._unfinished is not None:
            raise RuntimeError(
                f"begin_step({step}) was called before step {self._unfinished} ended: call end_step() after each "
                f"optimizer step, end_step(updated=False) where there was none"
            )
        self.enter_phase(step)
        self._unfinished = step
        self._ran.clear()
        self._enter(RngStep(step, 0))
        for linear_gemms in self.layers:
            linear_gemms.main_grad_is_zero = True

    def begin_microbatch(self, index: int) -> None:
        """Begin a microbatch, before its forward; ``index`` counts from 0 within the step, for each model chunk."""
        if index > 0:
            self._update_histories("microbatch")
        # another model may have entered a step of its own since
        step = current_rng_step().step if self._unfinished is None else self._unfinished
        self._enter(RngStep(step, index))

    def _enter(self, rng_step: RngStep) -> None:
        set_rng_step(rng_step)
        if self.device.type == "cuda":
            enter_rng_step(rng_step, self.device)

    def end_step(self, updated: bool = True) -> None:
        """End a training step, after the optimizer's: update amax histories, reduced over the tensors' ranks.

        A skipped step is not recorded: an Inf would pin scales for a whole window. (Of histories updated each
        microbatch, only the last microbatch is dropped.)
        """
        self._unfinished = None
        if updated:
            self._update_histories("step", "microbatch")
        else:
            for history in self._histories.values():
                history.newest.zero_()
        for linear_gemms in self.layers:
            linear_gemms.weight_cache.clear()

    def _update_histories(self, *kinds: HistoryUpdate) -> None:
        for (remembered, expert), history in self._histories.items():
            if remembered.update in kinds:
                if remembered.update == "microbatch":  # the step may be skipped for an Inf in it
                    history.drop_not_finite()
                history.update(partial(reduce_over_holders, expert=expert))

    def check_forward(self, chunk: nn.Module, *_: Any) -> None:
        """Check a chunk's forward pass: a training step or microbatch that was not begun would repeat random draws.

        Raises:
            RuntimeError: the chunk already ran in training since the last ``begin_microbatch`` or ``begin_step``.
        """
        if not chunk.training or not torch.is_grad_enabled() or in_backward_pass():
            return
        ran = chunk, current_rng_step()
        if ran in self._ran:
            raise RuntimeError(
                f"a second forward pass in training at step {ran[1].step}, microbatch {ran[1].microbatch}: call "
                f"begin_step(step) before each step, begin_microbatch(index) before each microbatch's forward pass and "
                f"end_step() after each optimizer step; an evaluation runs under torch.no_grad()"
            )
        self._ran.add(ran)

    def rescale_gradients(self, factor: float) -> bool:
        """Multiply amax histories of gradients, which are larger by ``factor`` from the next step on.

        A backward pass computes gradients of the mean over an iteration's microbatches. Call it between two steps that
        differ in their number of microbatches. Returns whether any history was rescaled.
        """
        delayed = [layer.histories["grad_output"] for layer in self.layers if "grad_output" in layer.histories]
        if factor == 1 or not delayed:
            return False
        for history, slot in delayed:
            history.rescale(slot, factor)
        return True

    def history(self, remembered: HistorySpec, expert: bool = False) -> AmaxHistory:
        """The history that all tensors of a kind share."""
        return self._histories.setdefault((remembered, expert), AmaxHistory(remembered, self.device))

    def gemms(self) -> dict[str, str]:
        """GEMM -> its backend on this stage and why, or "not quantized"; ignores exceptions of single layers."""
        found = dict.fromkeys(self.recipe.gemms, "not quantized")
        for backend, names in self.backends.items():
            for name in names:
                gemm = name.split(".")[-1]
                if gemm == name or found[gemm] == "not quantized":
                    found[gemm] = backend.describe(arch_of(self.device))
        return found

    def header(self) -> list[str]:
        """Header lines that describe how the recipe runs."""
        lines = [f"recipe {self.recipe.name}: {self.recipe.summary}"]
        lines += describe_phases(self.recipe, self._progress)
        lines += [backend.header(names, arch_of(self.device)) for backend, names in self.backends.items()]
        specs = [spec for _, spec in self.recipe.specs()]
        operands = [quant for gemm in specs for quant in (gemm.input, gemm.weight, gemm.grad_output) if quant]
        if any(has_mx_kernel(self.device.type, mx_rule(quant)) for quant in operands):
            lines.append("operands in blocks by fused kernels: the first step compiles and tunes them, once a machine")
        elif any(backend.multiplies_codes for backend in self.backends):
            lines.append("FP8 operands by fused casts: the first step compiles and tunes them, once a machine")
        by = "fused kernels" if self.device.type == "cuda" and have_triton() else "torch and Megatron-core"
        lines.append(f"norms, activations, dropout, biases and loss by {by}")
        if self.kept:
            lines.append(f"kept in the compute dtype by the recipe on this stage: {', '.join(self.kept)}")
        lines += numbering_notes(self.recipe.globs, self.kept)
        if self.recomputes_gelu is not None:
            where = "of every dense MLP" if self.recomputes_gelu else "of no layer here: no kernel computes it"
            lines.append(f"--recompute-gelu: activation computed again in the backward pass {where}")
        if self._fp8_gather:
            count = sum(layer.gathers is not None for layer in self.layers)
            lines.append(
                f"--fp8-sequence-parallel-gather: codes in {count} of {len(self.layers)} linear layers on this stage"
            )
        if self.rerun_in_bf16:
            lines.append(f"--rerun-in-bf16, on this stage: {', '.join(self.rerun_in_bf16)}")
        lines += numbering_notes(self._bf16_globs, self.rerun_in_bf16)
        if self.grouped:
            lines.append(f"--moe-grouped-gemm: {grouped_launches(self.grouped, self.recipe.gemms)}")
        if self.dispatch is not None:
            lines.append(self.dispatch.header())
        return lines + self.notes


def bind_recipe(
    model_chunks: Sequence[nn.Module],
    recipe: RecipeLike,
    *,
    recompute_gelu: bool = False,
    **options: Unpack[RuntimeOptions],
) -> RecipeRuntime:
    """Bind every low-precision linear layer of a model to a recipe, by global layer number.

    Call it once on each rank, after ``parallel_state`` is initialized and the model is built.

    Args:
        model_chunks: this rank's model chunks.
        recipe: a Recipe, the name of one, or a YAML file.
        recompute_gelu: recompute linear_fc2's input in the backward pass where GELU or SwiGLU is fused; the header
            reports where.
        options: ``RuntimeOptions``: ``num_layers`` and ``seed`` at least.

    Raises:
        UserError: as ``RecipeRuntime``, and as ``bind_layer``.
    """
    recipe = as_recipe(recipe)
    runtime = RecipeRuntime(recipe, device_of_models(), **options)
    for chunk in model_chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                bind_layer(runtime, layer)
        if chunk in _checks:  # bound before
            _checks.pop(chunk).remove()
        if recipe.quantized:
            _checks[chunk] = chunk.register_forward_pre_hook(runtime.check_forward)
    runtime.check_rules(on_all_stages=True)
    if recompute_gelu:
        mlps = [module for chunk in model_chunks for module in chunk.modules() if isinstance(module, LowPrecMLP)]
        for mlp in mlps:
            mlp.recompute_gelu = True
        runtime.recomputes_gelu = runtime.device.type == "cuda" and any(mlp.fused_activation() for mlp in mlps)
    return runtime


def bind_layer(runtime: RecipeRuntime, layer: TransformerLayer) -> None:
    """Bind a layer's linears and saved activations, and link its norms.

    Raises:
        UserError: as ``RecipeRuntime.bind_linear`` and ``RecipeRuntime.check_rules``.
    """
    runtime.transformer_layers.add(layer)
    for name, expert, module in linears(layer):
        runtime.bind_linear(module, layer.layer_number, name, expert)
    runtime.grouped += [module for module in layer.modules() if isinstance(module, LowPrecGroupedMLP)]
    bind_activations(runtime.recipe, layer, runtime.save_memory)
    if runtime.dispatch is not None:
        runtime.dispatch.bind(layer)
    link_norms(layer, runtime.save_memory)
    runtime.check_rules()
