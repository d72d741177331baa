"""The rows of the CSV, and how a worker process hands them over."""

import csv
import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

COLUMNS = (
    *("kind", "variant", "tokens", "case", "us_all", "us_experts", "spread", "experts_hit", "megabytes"),
    *(
        "read_share_all",
        "read_share_experts",
        "tflop_per_s",
        "sm_mhz",
        "relative_error",
        "row_error",
        "max_error",
        "note",
    ),
)
Row = dict[str, Any]


class Reporter:
    """In a worker: a line of JSON a row."""

    def __init__(self, to: TextIO) -> None:
        self._to = to

    def row(self, kind: str, **values: Any) -> None:
        unknown = values.keys() - set(COLUMNS)
        assert not unknown, unknown
        self.message(kind=kind, **values)

    def alive(self) -> None:
        """Something was done: the worker is not blocked."""
        self.message()

    def message(self, **values: Any) -> None:
        print(json.dumps(values), file=self._to, flush=True)


class Output:
    """In the parent: CSV on stdout, and the rows for the tables at the end."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._csv = csv.writer(sys.stdout)
        self._csv.writerow(COLUMNS)

    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        self._csv.writerow([_text(row.get(column, "")) for column in COLUMNS])
        sys.stdout.flush()


def _text(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value
