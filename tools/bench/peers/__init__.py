"""TransformerEngine and torchao beside this project's layers; ``tools/bench/README.md`` says how to install them."""
