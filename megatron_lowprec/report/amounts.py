"""Number formatting."""

import math
from decimal import Decimal

MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"


def amount(value: float | None) -> str:
    """A count with three significant digits and K, M, B or T."""
    if value is None:
        return "an unstated number of"
    if math.isnan(value):
        return "unknown"
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.0f}"


def share(ratio: float) -> str:
    """A ratio as text: "1/458", "0.73 of it", "2.5 times"; rounded down to less than a half."""
    if 0.4 <= ratio < 0.5:
        return f"{math.floor(100 * ratio) / 100:g} of it"
    if ratio < 0.4:
        return f"1/{1 / ratio:,.0f}" if ratio > 0 else "none"
    return f"{ratio:.2g} times" if ratio >= 1.05 else f"{ratio:.2g} of it"


def percent(loss: float) -> float:
    """Perplexity gap in percent for a difference of losses in nats."""
    return 100 * math.expm1(min(loss, 700.0))


def signed(value: float, decimals: int) -> str:
    """A number with its sign (a typographic minus); no sign if it rounds to zero."""
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "without bound" if value > 0 else "without lower bound"
    text = f"{abs(value):.{decimals}f}"
    if not float(text):
        return text
    return ("+" if value > 0 else MINUS) + text


def decimals(least: int, *values: float) -> int:
    """Decimals that show all of these values as they were written, at least so many."""
    return max(least, *(-int(Decimal(str(value)).as_tuple().exponent) for value in values))


def number(value: float, decimals: int) -> str:
    """A number with thousands separators; a dash for NaN."""
    return DASH if math.isnan(value) else f"{value:,.{decimals}f}"
