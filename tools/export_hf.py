"""`megatron-lowprec export` by its former path."""

from megatron_lowprec.commands.export_hf import main
from megatron_lowprec.training.distributed import startup

if __name__ == "__main__":
    startup.leave(main())
