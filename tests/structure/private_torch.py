"""Finds uses of private torch APIs in a source text, however they are imported or reached."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["private_torch_uses"]

# Op namespaces may start with an underscore, and torch's pytree is public in all but name.
ALLOWED = ("torch.ops", "torch.utils._pytree")


def private_torch_uses(source: str) -> list[tuple[int, str]]:
    """(line, dotted name) of each name under torch that has a private part: torch.x._y."""
    tree = ast.parse(source)
    aliases = dict(_torch_aliases(tree))
    found = {
        (line, name)
        for line, name in _torch_names(tree, aliases)
        if _is_private(name) and not _is_allowed(name)
    }
    return sorted(found)


def _torch_aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> the dotted torch name it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name):
                    yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _torch_names(tree: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Every torch name imported, or spelled as an attribute chain that starts at a torch alias."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _is_torch(alias.name))
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module or ""):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            chain = _dotted(node)
            if chain and chain[0] in aliases:
                yield node.lineno, ".".join([aliases[chain[0]], *chain[1:]])


def _dotted(node: ast.expr) -> list[str]:
    """["torch", "fx", "Node"] of the expression torch.fx.Node; [] of any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        front = _dotted(node.value)
        return [*front, node.attr] if front else []
    return []


def _is_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    # Dunders (torch.__version__) are public, and so are in-place method names ending in "_".
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _is_allowed(name: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in ALLOWED)
