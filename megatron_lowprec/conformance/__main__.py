"""``python -m megatron_lowprec.conformance``."""

import sys

from megatron_lowprec.conformance.check import main
from megatron_lowprec.errors import run_tool

sys.exit(run_tool("conformance", lambda: main(sys.argv[1:])))
