from typing import Any


def replace_raw_data(*_: Any) -> None:
    raise NotImplementedError


def cast_master_weights_to_fp8(*_: Any, **__: Any) -> None:
    raise NotImplementedError
