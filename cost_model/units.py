"""Bytes as people read them."""


def format_bytes(nbytes: int) -> str:
    """1536 -> "1.54KB": decimal units, as `memory_limit` reads them."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.4g}{unit}"


def enough_bytes(nbytes: int) -> str:
    """As `format_bytes`, rounded up: a `memory_limit` as it is written here is no less than `nbytes`."""
    last = _last_digit(nbytes)
    return format_bytes(-(-nbytes // last) * last)


def floor_bytes(nbytes: int) -> str:
    """As `format_bytes`, rounded down: what is written here is no more than `nbytes`."""
    last = _last_digit(nbytes)
    return format_bytes(nbytes // last * last)


def _last_digit(nbytes: int) -> int:
    """Bytes of the last of the four digits that are written."""
    scale = 1
    while nbytes >= 1000 * scale and scale < 1000**4:
        scale *= 1000
    return max(1, scale // 10 ** (4 - len(str(nbytes // scale))))


def format_seconds(seconds: float) -> str:
    """Three digits in a readable unit: "12.4 us"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
