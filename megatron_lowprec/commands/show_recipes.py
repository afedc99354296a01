"""List the recipes, or explain one: what each GEMM multiplies, and what of it runs natively here.

    megatron-lowprec recipes
    megatron-lowprec recipes mxfp8 --config gpt_345m

The other flags are those of pretrain_gpt.py: --config names the model whose layers are explained.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_lowprec.errors import Parser, run_tool
from megatron_lowprec.recipe.registry import list_table


def main(arguments: Sequence[str] | None = None, program: str = "megatron-lowprec recipes") -> int:
    """Exit code: 0, or 2 for a UserError."""
    parser = Parser(prog=program, description=__doc__)
    parser.add_argument("recipe", nargs="?", help="a name, or a YAML file; without it, all recipes are listed")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="such as --config gpt_345m, behind the recipe")
    args = parser.parse_args(arguments)
    if args.recipe is None:
        return run_tool(program, lambda: print(list_table()))

    def explain() -> None:
        from megatron_lowprec.training.distributed.startup import Ranks
        from megatron_lowprec.training.run import run

        run(["--recipe", args.recipe, *args.flags, "--explain-recipe"], Ranks(0, 1, 0, 1))

    return run_tool(program, explain)
