"""Speed benchmarks: ``python -m tools.bench quantize|linear|experts|step|scaling|ops|overhead``.

README.md describes them.
"""
