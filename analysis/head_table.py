"""A record as a table: one row per head, one column per measure."""

from __future__ import annotations

from typing import NamedTuple

from analysis.head_files import HeadRecord

PLACE = ("step", "layer", "head", "kv_head")  # the first columns: where a row comes from

Cell = float | int | None


class HeadTable(NamedTuple):
    """Rows of equal length, in the order of layers and heads; their columns by name."""

    columns: list[str]
    rows: list[list[Cell]]

    def column(self, name: str) -> list[Cell]:
        """The column called `name`, top down."""
        place = self.columns.index(name)
        return [row[place] for row in self.rows]


def head_table(record: HeadRecord) -> HeadTable:
    """Every measure of heads that the record has; a key/value head stands in each row it serves.

    kv_head is None when the record has no measure of key/value heads, which says how many there
    are. A record without a measure of heads has no rows.
    """
    by_head = {name: m.values for name, m in record.measures.items() if m.axis == "head"}
    by_kv_head = {name: m.values for name, m in record.measures.items() if m.axis == "kv_head"}
    heads = next((values.shape[1] for values in by_head.values()), 0)
    kv_heads = next((values.shape[1] for values in by_kv_head.values()), 0)
    rows: list[list[Cell]] = []
    for i, layer in enumerate(record.layers):
        for head in range(heads):
            kv_head = head * kv_heads // heads if kv_heads else None
            row: list[Cell] = [record.step, layer, head, kv_head]
            row += [float(values[i, head]) for values in by_head.values()]
            row += [float(values[i, kv_head]) for values in by_kv_head.values()]
            rows.append(row)
    return HeadTable([*PLACE, *by_head, *by_kv_head], rows)
