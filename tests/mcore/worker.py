"""Checks of the Megatron-core layers on two processes; ``test_layers_distributed.py`` starts it once."""

import torch
import torch.distributed as dist

from tests.checks import run_checks
from tests.mcore import microbatch_checks, shard_checks, state_checks, stock_checks
from tests.mcore.parallel_layers import CHECKS

_ = stock_checks, shard_checks, microbatch_checks, state_checks  # which enter their checks


def main() -> None:
    from megatron_lowprec.mcore.cpu_compat import install

    install()
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    run_checks(CHECKS)


if __name__ == "__main__":
    main()
