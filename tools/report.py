"""`megatron-lowprec report` by its former path."""

from megatron_lowprec.commands.report_page import main
from megatron_lowprec.training.distributed import startup

if __name__ == "__main__":
    startup.leave(main())
