"""``python -m megatron_lowprec`` is ``megatron-lowprec``; torchrun starts it by ``-m`` as well."""

from megatron_lowprec.commands.main import main

if __name__ == "__main__":
    main()
