"""Shapes of the benchmarked models and of their linear layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lowprec.errors import UserError


@dataclass(frozen=True)
class LinearShape:
    """One linear layer; the weight is [out_features, in_features]."""

    model: str
    name: str
    in_features: int
    out_features: int

    def flops(self, tokens: int) -> float:
        """Floating-point operations of one of the three GEMMs."""
        return 2.0 * tokens * self.in_features * self.out_features


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder layer. ``gated``: fc1 holds gate and up projection (SwiGLU), so its output is twice ffn."""

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    gated: bool
    # for a training step: the driver's config, and the micro-batch size
    config: str | None = None
    micro_batch: int | None = None

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """qkv, proj, fc1, fc2."""
        kv = self.hidden // self.heads * self.kv_heads
        return (
            LinearShape(self.name, "qkv", self.hidden, self.hidden + 2 * kv),
            LinearShape(self.name, "proj", self.hidden, self.hidden),
            LinearShape(self.name, "fc1", self.hidden, self.ffn * (2 if self.gated else 1)),
            LinearShape(self.name, "fc2", self.ffn, self.hidden),
        )


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("345m", 1024, 4096, 16, 16, False, "configs/models/gpt_345m.yaml", 16),
        ModelShape("1.3b", 2048, 8192, 32, 32, False, "configs/models/gpt_1.3b.yaml", 8),
        ModelShape("6.7b", 4096, 16384, 32, 32, False, "configs/models/gpt_6.7b.yaml", 1),
        ModelShape("7b", 4096, 11008, 32, 32, True),
        ModelShape("8b", 4096, 14336, 32, 8, True, "configs/models/llama3_8b.yaml", 1),
        ModelShape("70b", 8192, 28672, 64, 8, True),
        # small enough for --device cpu
        ModelShape("smoke", 128, 256, 4, 2, True, "configs/models/gpt_tiny.yaml", 2),
    )
}


@dataclass(frozen=True)
class ExpertShape:
    """Gated experts of a layer, of which each token goes to ``topk``."""

    name: str
    experts: int
    topk: int
    hidden: int
    ffn: int

    def flops(self, tokens: int) -> float:
        """Floating-point operations of both layers' three GEMMs, of this many tokens before routing."""
        return 3 * 2.0 * tokens * self.topk * 3 * self.hidden * self.ffn


EXPERTS: dict[str, ExpertShape] = {
    shape.name: shape
    for shape in (ExpertShape("deepseek_16b", 64, 6, 2048, 1408), ExpertShape("smoke", 4, 2, 128, 128))
}


def models(names: Sequence[str]) -> list[ModelShape]:
    """The models of these names.

    Raises:
        UserError: a name that is not in the table.
    """
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UserError(f"--shapes {','.join(unknown)}: not in the table, which has {', '.join(MODELS)}")
    return [MODELS[name] for name in names]


def linears(names: Sequence[str], layers: Sequence[str]) -> list[LinearShape]:
    """The chosen linear layers of the chosen models.

    Raises:
        UserError: a name that is not in the table.
    """
    known = [linear.name for linear in MODELS["345m"].linears]
    unknown = [name for name in layers if name not in known]
    if unknown:
        raise UserError(f"--linears {','.join(unknown)}: a decoder layer has {', '.join(known)}")
    return [linear for model in models(names) for linear in model.linears if linear.name in layers]
