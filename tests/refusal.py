"""Errors that users read."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_lowprec.errors import UserError


@contextmanager
def refused(*words: str, match: str | None = None) -> Iterator[None]:
    """The body raises a ``UserError`` of one line that has all words, and matches the pattern."""
    with pytest.raises(UserError, match=match) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []
