"""Two small language models in plain PyTorch: of Llama's form, and of GPT-2's with the layer that transformers has."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, HIDDEN, HEADS = 64, 128, 2


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers: a weight [I, O]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # found by its name


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, over [batch, tokens, HIDDEN]."""
    heads = (part.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.input_norm, self.norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, 2 * hidden, bias=False),
                "up_proj": nn.Linear(hidden, 2 * hidden, bias=False),
                "down_proj": nn.Linear(2 * hidden, hidden, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.input_norm(x)
        x = x + self.o_proj(attention(self.q_proj(y), self.k_proj(y), self.v_proj(y)))
        y = self.norm(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Gpt2Block(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = Conv1D(3 * hidden, hidden), Conv1D(hidden, hidden)
        self.mlp = nn.Sequential(Conv1D(2 * hidden, hidden), nn.GELU(), Conv1D(hidden, 2 * hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.c_proj(attention(*self.c_attn(self.ln_1(x)).chunk(3, dim=-1)))
        return x + self.mlp(self.ln_2(x))


class TinyModel(nn.Module):
    """Loss of next-token prediction; ``recompute`` is "", "reentrant" or "not reentrant"."""

    def __init__(self, block: Callable[[], nn.Module] = LlamaBlock, blocks: int = 2, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") if self.recompute else layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(block: Callable[[], nn.Module] = LlamaBlock, **options: object) -> TinyModel:
    """A model with weights from seed 0."""
    torch.manual_seed(0)
    return TinyModel(block, **options)  # type: ignore[arg-type]


def tokens_of(seed: int, sequences: int = 2, length: int = 32) -> torch.Tensor:
    """int64 [sequences, length]."""
    return torch.randint(VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int, lr: float = 3e-3) -> list[float]:
    """Losses of steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(tokens_of(5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
