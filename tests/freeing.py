"""Frees models and process groups that a test leaves behind."""

import gc


def free_models() -> None:
    """Collect garbage, models with experts included.

    Megatron-core's token dispatcher keeps the last probabilities, and with them the graph of autograd, which holds
    layers: a cycle through C++, which Python's collector does not see. Models hold process groups, with their threads.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    for each in gc.get_objects():
        if issubclass(type(each), MoETokenDispatcher):
            each.__dict__.pop("probs", None)
    gc.collect()
