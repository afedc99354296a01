"""Execution of a plan's layers, and one GPU's share of them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lowprec.formats import FORMATS
from megatron_lowprec.linear.backends.blackwell_mx.why_not import has_block_scales
from megatron_lowprec.linear.backends.emulated.codes_beside import codes_for_wgrad
from megatron_lowprec.linear.backends.table import emulated_rows, native_gemms
from megatron_lowprec.linear.backends.target import Target
from megatron_lowprec.linear.linear_id import SIDES
from megatron_lowprec.quantization.quantizer import mx_rule
from megatron_lowprec.recipe.coverage import LinearSite, primary_weight_spec, why_not_gathered
from megatron_lowprec.recipe.layer_match import Layer
from megatron_lowprec.recipe.recipe import Recipe
from megatron_lowprec.recipe.schema import LinearRecipe, QuantSpec
from megatron_lowprec.training.config.options import Config
from megatron_lowprec.training.config.resolve import microbatches_of, virtual_stages
from megatron_lowprec.training.models.architectures import architecture_of
from megatron_lowprec.training.models.common.rank_sizes import width_of
from megatron_lowprec.training.models.sizes import linear_sites, sharding
from megatron_lowprec.training.options.training_options import TrainingOptions


@dataclass(frozen=True)
class Execution:
    """How layers are executed: recipe of one phase and architecture ("cpu", "sm90", ...)."""

    recipe: Recipe
    arch: str = "sm90"

    @property
    def fused(self) -> bool:
        """Whether dropout and cross entropy are the fused kernels, which save no mask and no softmax."""
        return self.arch.startswith("sm")

    def linear(self, config: Config, layer: int, name: str) -> LinearRecipe:
        """What a linear layer runs."""
        return self.recipe.at(Layer(layer, name, config.shape.num_layers))

    def saved_codes(self, config: Config, layer: int, name: str) -> float:
        """Bytes an entry of the codes that a linear layer saves of its input for wgrad; 0 if it saves the input."""
        if not architecture_of(config).plans_fp8_inputs:
            return 0.0
        site = next(site for site in linear_sites(config, range(layer, layer + 1)) if site.name == name)
        linear = self.linear(config, layer, name)
        if config.sequence_parallel and site.split == "column":  # gathered again in the backward pass
            return float(config.fp8_sequence_parallel_gather and why_not_gathered(linear, "input") is None)
        native = self.native_gemms(config, site)
        if self.fused and codes_for_wgrad(linear) and native.isdisjoint({"fprop", "wgrad"}):
            in_features, _ = site.sizes_on_rank(sharding(config, site).tensor_ranks)
            return 0.0 if in_features % 16 else 4 / 8 + 1 / 16  # a code, its part of a block's scale
        if has_block_scales(linear.wgrad):  # the block-scaled units' operand of wgrad is cast in the backward pass
            return 0.0
        return float({"fprop", "wgrad"} <= native and linear.fprop.input == linear.wgrad.input)

    def computes_again(self, config: Config, layer: int, name: str) -> bool:
        """Whether --save-memory lets a quantized layer compute the norm's output in front of it again."""
        # of other architectures the plan does not tell which inputs are codes
        if not (config.save_memory and self.fused and architecture_of(config).plans_fp8_inputs):
            return False
        return self.linear(config, layer, name).quantized and not self.saved_codes(config, layer, name)

    def casts_again(self, config: TrainingOptions) -> bool:
        """Whether --save-memory lets linear_proj save no codes beside attention's output."""
        saved = config.attention_backend != "local" and config.recompute_granularity != "selective"
        return bool(config.save_memory) and saved and not self.recipe.moves_within_steps

    def recomputes_gelu(self, config: Config) -> bool:
        """Whether --recompute-gelu recomputes the input of linear_fc2 in the backward pass."""
        return config.recompute_gelu and self.fused and architecture_of(config).mlp.fuses_activation(config)

    def primary_weight(self, config: Config, site: LinearSite) -> QuantSpec | None:
        """Spec of a linear layer's weight that is stored as FP8 codes only; None for one in the compute dtype."""
        asked = bool(config.fp8_param_gather) and config.transformer_impl == "local"
        return primary_weight_spec(self.linear(config, site.layer_number, site.name)) if asked else None

    def native_gemms(self, config: Config, site: LinearSite) -> frozenset[str]:
        """The GEMMs of a linear layer that run on a native backend, whose operands are codes."""
        if not config.bf16 or config.emulate:
            return frozenset()
        ranks = sharding(config, site).tensor_ranks
        linear = self.linear(config, site.layer_number, site.name)
        emulate = emulated_rows(config.emulate, config.native)
        return native_gemms(linear, Target(self.arch, *site.sizes_on_rank(ranks)), emulate)

    def grad_output_width(self, config: Config) -> int:
        """Bytes of a value of dy as operand: of codes if all layers with quantized gradients multiply these."""
        for site in linear_sites(config):
            linear = self.linear(config, site.layer_number, site.name)
            quantized = {name for name in SIDES["grad_output"] if linear.gemms[name].quantized}
            if not quantized <= self.native_gemms(config, site):
                return width_of(config)
        return 1

    def cached_weight_bytes(self, config: Config, site: LinearSite, gemm: str) -> float:
        """Bytes an entry of a weight cached for a GEMM: its codes and scales if native, else the dtype's."""
        linear = self.linear(config, site.layer_number, site.name)
        spec = linear.gemms[gemm].weight
        if spec is None or gemm not in self.native_gemms(config, site):
            return width_of(config)
        scales = 0.0 if spec.block is None or spec.scale_format == "fp32" else 1.0 / spec.block[1]
        return FORMATS[spec.format].bits / 8.0 + scales

    def shares_weight(self, config: Config, site: LinearSite) -> bool:
        """Whether one cast on a GPU gives emulated fprop and dgrad one copy of the weight: of square blocks.

        A group of experts has a copy for each GEMM.
        """
        shards, linear = sharding(config, site), self.linear(config, site.layer_number, site.name)
        spec, transformed = linear.fprop.weight, linear.fprop.hadamard or linear.dgrad.hadamard
        if not self.fused or shards.experts or spec is None or spec != linear.dgrad.weight or transformed:
            return False
        if not self.native_gemms(config, site).isdisjoint(SIDES["weight"]):
            return False
        rule, (in_features, _) = mx_rule(spec), site.sizes_on_rank(shards.tensor_ranks)
        return rule is not None and rule.shares_directions and in_features % rule.block == 0


def stage_layers(config: Config, stage: int) -> list[int]:
    """Numbers of a pipeline stage's layers, from 1, one chunk of an interleaved stage after the other."""
    stages, chunks = config.pipeline_model_parallel_size, virtual_stages(config) or 1
    here = config.shape.num_layers // (stages * chunks)
    return [(chunk * stages + stage) * here + at for chunk in range(chunks) for at in range(1, here + 1)]


def microbatches_in_flight(config: Config, gpus: int, stage: int) -> float:
    """Microbatches whose activations a stage holds at once, in units of all of its layers.

    1F1B: as many as there are stages from this one on, itself included. Interleaved, Megatron-core warms up
    ``2 (stages - stage - 1) + (chunks - 1) stages`` chunks first.
    """
    stages, microbatches = config.pipeline_model_parallel_size, microbatches_of(config, gpus)
    chunks = virtual_stages(config)
    if chunks is None:
        return min(stages - stage, microbatches)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(warm_up + 1, chunks * microbatches) / chunks
