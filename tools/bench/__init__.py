"""Speed, measured: ``python -m tools.bench quantize|linear|step|overhead``. Every ratio is taken within one run."""
