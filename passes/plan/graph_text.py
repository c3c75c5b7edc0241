"""The text form of a planned graph: one line a node, collectives as lines of their own.

mesh (dp=2, tp=4)
graph joint {
  %x: f32[8@dp, 16] = input x
  %up: f32[16, 64@tp] = param up.weight
  %h: f32[8@dp, 64@tp] = contract(%x, %up)          // 12.4 us
  %y: f32[8@dp, 16]+tp:sum = contract(%h, %down)
  %y.1: f32[8@dp, 16] = all_reduce[tp](%y)
  // backward
}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_model.mesh import MeshSpec
from passes.layout.joined_axes import JoinedAxes, joined_text
from passes.plan.records import NodeRecord, OperandRecord, ResultRecord


def format_seconds(seconds: float) -> str:
    """Three digits in a readable unit: "12.4 us"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def format_graph(
    records: Sequence[NodeRecord],
    mesh: MeshSpec,
    *,
    seconds: bool = True,
    joined: JoinedAxes = (),
    raced: int = 0,
) -> str:
    """The planned graph, forward then backward. With `seconds=False` no prices (golden files).

    `use` nodes are not printed: what they redistribute appears as collectives on the value. raced: of how many
    plans that ran it is the fastest.
    """
    writer = _Writer(records, seconds)
    body = "\n".join(f"  {line}" for line in writer.lines())
    together = f"  // axes searched together: {joined_text(joined)}" if joined else ""
    return f"{mesh}{together}{raced_mark(raced if seconds else 0)}\ngraph joint {{\n{body}\n}}\n"


def raced_mark(count: int) -> str:
    """Behind the mesh, of a plan that is the fastest of so many that ran; 0: none did."""
    return f"  // raced: the fastest of {count} by the clock" if count else ""


class _Writer:
    def __init__(self, records: Sequence[NodeRecord], seconds: bool) -> None:
        self._records = records
        self._seconds = seconds
        self._by_name = {record.name: record for record in records}
        self._shown: dict[tuple[str, int], str] = {}  # value -> the name it is printed by
        self._copies: dict[str, int] = {}

    def lines(self) -> Iterator[str]:
        backward = False
        for record in self._records:
            if record.phase == "backward" and record.operands and not backward:
                backward = True
                yield "// backward"
            yield from self._node(record)

    def _node(self, record: NodeRecord) -> Iterator[str]:
        names: list[str] = []
        for operand in record.operands:
            lines, name = self._operand(operand)
            yield from lines
            names.append(name)
        if record.op == "use":
            self._shown[record.name, 0] = names[0]
            return
        if record.op == "output":
            yield f"return ({', '.join(names)})"
            return
        yield self._line(record, names)

    def _operand(self, operand: OperandRecord) -> tuple[list[str], str]:
        name = self._value(operand.source, operand.result)
        shape = self._by_name[operand.source].results[operand.result]
        lines: list[str] = []
        for transfer in operand.transfers:
            copy = self._copy(name)
            value = ResultRecord(shape.shape, shape.dtype, transfer.after)
            lines.append(self._priced(f"{copy}: {value} = {transfer.step.text(name)}", transfer.seconds))
            name = copy
        return lines, name

    def _line(self, record: NodeRecord, names: Sequence[str]) -> str:
        kinds = ", ".join(str(result) for result in record.results)
        value = kinds if len(record.results) == 1 else f"({kinds})"
        return self._priced(f"%{record.name}: {value} = {record.text.format(*names)}", record.seconds)

    def _priced(self, line: str, seconds: float) -> str:
        return f"{line}  // {format_seconds(seconds)}" if self._seconds and seconds > 0 else line

    def _value(self, source: str, result: int) -> str:
        if (source, result) in self._shown:
            return self._shown[source, result]
        many = len(self._by_name[source].results) > 1
        return f"%{source}[{result}]" if many else f"%{source}"

    def _copy(self, name: str) -> str:
        base = name.split(".")[0]
        self._copies[base] = self._copies.get(base, 0) + 1
        return f"{base}.{self._copies[base]}"
