"""Bytes as people read them."""

__all__ = ["format_bytes"]


def format_bytes(nbytes: int) -> str:
    """1536 -> "1.54KB": decimal units, as `memory_limit` reads them."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.4g}{unit}"
