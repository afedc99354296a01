class QuantizedTensor:
    """No tensor here is one."""
