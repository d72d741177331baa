"""artifacts/README.md against the code: every record's offsets and types, every number of an enum."""

import enum
import re
import struct
from dataclasses import fields
from pathlib import Path

import pytest

from dsv4c import step_abi
from dsv4c.engine import format as engine_format
from dsv4c.engine.format import FORMAT_VERSION, Record

PAGE = (Path(__file__).parents[2] / "artifacts" / "README.md").read_text(encoding="utf-8")
TYPE_NAMES = {"I": "u32", "Q": "u64", "q": "i64", "B": "u8"}
RECORDS = {cls.__name__: cls for cls in Record.__subclasses__()}
ENUMS: dict[str, type[enum.IntEnum]] = {
    name: cls
    for module in (engine_format, step_abi)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, enum.IntEnum) and cls.__module__ == module.__name__
}


def section(heading: str) -> str:
    """What the page says under `### heading`."""
    match = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match, f"artifacts/README.md has no heading `### {heading}`"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the table's body."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def layout(record: type[Record]) -> list[tuple[str, str, str]]:
    """(offset, type, field) of a record, from its struct format."""
    names = iter(field.name for field in fields(record))
    found, offset = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", record.LAYOUT.format):
        if code == "s":
            found.append((str(offset), f"u8[{count}]", next(names)))
            offset += int(count)
            continue
        for _ in range(int(count or 1)):
            if code != "x":
                found.append((str(offset), TYPE_NAMES[code], next(names)))
            offset += struct.calcsize(f"<{code}")
    assert offset == record.LAYOUT.size
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_record_table_is_the_code(name: str) -> None:
    record = RECORDS[name]
    table = rows(section(f"{name}: {record.LAYOUT.size} bytes"))
    assert [tuple(row[:3]) for row in table] == layout(record)


@pytest.mark.parametrize("name", ENUMS)
def test_number_table_is_the_code(name: str) -> None:
    table = rows(section(name))
    assert [(row[0], row[1]) for row in table] == [(str(member.value), member.name) for member in ENUMS[name]]


def test_page_names_the_version() -> None:
    assert PAGE.startswith(f"# The engine file, format version {FORMAT_VERSION}\n")
