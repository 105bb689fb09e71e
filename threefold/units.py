"""Units: base units inside (bytes, seconds, FLOP/s), readable ones only when printing."""

from math import ceil, floor, isfinite, log10

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
GB, TB = 10**9, 10**12
TFLOPS = 1e12


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.50 KiB'. Binary units, because allocators count in them."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_count(count: float) -> str:
    """671_026_419_200 -> '671.0B', the way model sizes are quoted."""
    for bound, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= bound:
            return f"{count / bound:.1f}{unit}"
    return f"{count:.0f}"


def format_tokens(count: int) -> str:
    """131072 -> '128K' where it is a whole number of binary thousands."""
    if count >= 1024 and count % 1024 == 0:
        return f"{count // 1024}K"
    return str(count)


def format_number(value: float) -> str:
    """45380.2 -> '45,380', 3.14159 -> '3.142': four digits at least, and no exponent for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_rounded(value: float, error: float) -> str:
    """(1_249_081, 0.5) -> '1,200,000', (17.67, 0.08) -> '17.7': the digits that a relative error leaves."""
    if not value or not isfinite(value):
        return format_number(value)
    digits = min(4, 1 + max(1, ceil(-log10(error)))) if error > 0 else 4
    places = digits - 1 - floor(log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def format_range(value: float, low: float, high: float, unit: str = "") -> str:
    """(190, 130, 290, ' days') -> 'about 190 days, 130 to 290'."""
    error = max(high / value - 1, 1 - low / value) if value else 0.0
    middle, *ends = (format_rounded(each, error) for each in (value, low, high))
    return f"about {middle}{unit}, {ends[0]} to {ends[1]}"


def format_many(count: int, noun: str) -> str:
    """(1, 'rank') -> '1 rank', (4096, 'rank') -> '4096 ranks', (2, 'fix') -> '2 fixes'."""
    plural = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {noun}" + ("" if count == 1 else plural)


def format_seconds(seconds: float) -> str:
    """0.25 -> '0.25 s', 600 -> '10 min', 11_124 -> '3.1 h', 2e6 -> '23 days'."""
    for bound, size, unit in ((60, 1.0, "s"), (3600, 60.0, "min"), (172_800, 3600.0, "h")):
        if abs(seconds) < bound:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds / 86_400:,.0f} days"
