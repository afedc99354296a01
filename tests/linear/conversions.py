"""What tests of convert share: recipes, forms of blocks, and a model's converted layers and gradients."""

import pytest
import torch
from torch import nn

from megatron_lowprec import get_recipe, recipes
from megatron_lowprec.linear.lowprec_linear import LowPrecLayer
from tests.linear.tiny_models import Gpt2Block, LlamaBlock, tokens_of

PER_BLOCK = {LlamaBlock: 7, Gpt2Block: 4}
forms = pytest.mark.parametrize("block", [LlamaBlock, Gpt2Block])
CONVERTIBLE = [n for n in recipes() if not (get_recipe(n).changes_training or get_recipe(n).phases)]
EACH_TIME = [name for name in CONVERTIBLE if name not in ("mxfp8_2d", "nvfp4_all", "nvfp4_four_over_six")]


def converted(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, LowPrecLayer)]


def gradients(model: nn.Module, draws: int = 2) -> list[torch.Tensor]:
    """Of one batch, with the generator at ``draws``."""
    model.zero_grad()
    torch.manual_seed(draws)
    model(tokens_of(3)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
