"""Pretrain a GPT under a low-precision recipe; `megatron-lowprec train` starts the same.

torchrun --nproc-per-node 2 pretrain_gpt.py --recipe mxfp4_rht_sr
python pretrain_gpt.py --list-recipes
"""

import sys

from megatron_lowprec.training.distributed import startup
from megatron_lowprec.training.driver import main

if __name__ == "__main__":
    startup.leave(main(sys.argv[1:]))
