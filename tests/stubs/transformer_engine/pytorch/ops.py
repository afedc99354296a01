"""Only ever named by Megatron-core, in the annotations of a class that is not used here."""

from typing import Any

Sequential = FusibleOperation = Any
