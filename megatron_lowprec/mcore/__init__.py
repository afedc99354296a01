"""Megatron-core integration. Importing it filters Megatron-core's warnings about TransformerEngine and apex.

Megatron-core gives them at import, up to six times. They do not apply: these layers replace what falls back.
"""

import warnings

# The beginnings of the messages, nothing wider.
for _message in (
    r"Transformer Engine and Apex are not installed",
    r"transformer_engine is not installed",
    r"apex is not installed",
    r"Apex is not installed",
):
    warnings.filterwarnings("ignore", message=_message)
