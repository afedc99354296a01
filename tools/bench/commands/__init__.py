"""A measurement a module, with ``run``, and the processes that some of them start."""
