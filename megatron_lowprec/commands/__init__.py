"""What `megatron-lowprec` runs, one module for each subcommand."""
