"""`megatron-lowprec import-megatron` by its former path."""

from megatron_lowprec.commands.import_megatron import main
from megatron_lowprec.training.distributed import startup

if __name__ == "__main__":
    startup.leave(main())
