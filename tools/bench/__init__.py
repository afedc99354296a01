"""Speed benchmarks: ``python -m tools.bench quantize|linear|step|scaling|ops|overhead``. README.md describes them."""
