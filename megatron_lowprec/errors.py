"""The one exception for what a person asked and cannot have."""


class UserError(ValueError):
    """Something a user can cause and mend; the message is one line: what was asked, what was found, what to do.

    The driver prints the message alone, on one rank, and exits with code 2; libraries may catch it as ``ValueError``.
    """
