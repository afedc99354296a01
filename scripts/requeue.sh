# shellcheck shell=bash
# Sourced by batch scripts; the package has it, since sweeps under Slurm source it as well.
source "$(dirname "${BASH_SOURCE[0]}")/../megatron_lowprec/sweep/requeue.sh"
