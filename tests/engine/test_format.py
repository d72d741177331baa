"""The C++ mirrors of the engine's records have the fields, types and codes of format.py and step_abi.py."""

import enum
import re
from dataclasses import fields
from pathlib import Path

import pytest

from dsv4c import step_abi
from dsv4c.engine import format as engine_format
from dsv4c.engine.format import Record

SOURCES = Path(__file__).parents[2] / "dsv4c" / "runtime" / "src"
HEADER = (SOURCES / "engine_format.h").read_text()
KERNEL_HEADERS = (SOURCES / "kernel.h").read_text() + (SOURCES / "dtype.h").read_text()
STRUCT_CODES = {"uint8_t": "B", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q"}


def cpp_fields(name: str) -> tuple[str, list[str]]:
    """The struct format and the field names of a C++ record."""
    match = re.search(rf"struct {name} {{\n(.*?)\n}};\nstatic_assert\(sizeof\({name}\) == (\d+)\);", HEADER, re.DOTALL)
    assert match, f"no struct {name} with a static_assert on its size"
    layout, names = "", []
    for line in match[1].splitlines():
        declared = re.fullmatch(r"  (\w+) (\w+)(?:\[(\d+)\])?;", line)
        assert declared, line
        kind, field, count = declared[1], declared[2], declared[3]
        if field == "padding":
            layout += f"{count}x"
        elif kind == "char" or (field in ("sha256", "table_digest", "reserved") and count):
            layout += f"{count}s"
            names.append(field)
        elif count:
            layout += STRUCT_CODES[kind] * int(count)
            names += [f"{field}_{i}" for i in range(int(count))]
        else:
            layout += STRUCT_CODES[kind]
            names.append(field)
    assert engine_format.struct.calcsize(f"<{layout}") == int(match[2])
    return layout, names


def expanded(layout: str) -> str:
    """A struct format without spaces and repeats: "3I" -> "III"."""
    parts = re.findall(r"(\d*)([a-zA-Z])", layout)
    return "".join(f"{n}{code}" if code in "sx" else code * int(n or 1) for n, code in parts)


@pytest.mark.parametrize("record", Record.__subclasses__(), ids=lambda record: record.__name__)
def test_records(record: type[Record]) -> None:
    layout, names = cpp_fields(record.__name__)
    assert names == [field.name for field in fields(record)]
    assert layout == expanded(record.LAYOUT.format)


def cpp_codes(text: str, name: str) -> dict[str, int]:
    match = re.search(rf"enum class {name} : \w+ {{(.*?)}};", text, re.DOTALL)
    assert match, name
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", match[1])}


@pytest.mark.parametrize(
    ("codes", "text"),
    [
        (step_abi.Space, HEADER),
        (step_abi.Dim, HEADER),
        (step_abi.Input, HEADER),
        (step_abi.Output, HEADER),
        (step_abi.BucketKind, HEADER),
        (step_abi.StateKind, HEADER),
        (step_abi.DType, KERNEL_HEADERS),
        (step_abi.ArgKind, KERNEL_HEADERS),
    ],
)
def test_codes(codes: type[enum.IntEnum], text: str) -> None:
    assert cpp_codes(text, codes.__name__) == {code.name: code.value for code in codes}


def cpp_constants(enum_name: str) -> dict[str, int]:
    match = re.search(rf"enum {enum_name} : uint32_t {{(.*?)}};", HEADER, re.DOTALL)
    assert match, enum_name
    return {key.upper(): int(value) for key, value in re.findall(r"k(\w+) = (\d+)", match[1])}


def test_flags_and_constants() -> None:
    sections = cpp_constants("SectionType")
    assert sections.pop("SECTIONTYPEEND") == max(engine_format.SectionType) + 1
    assert sections == {kind.name: kind.value for kind in engine_format.SectionType}
    assert cpp_constants("SectionFlag") == {flag.name: flag.value for flag in engine_format.SectionFlag}
    assert cpp_constants("LaunchFlag") == {flag.name: flag.value for flag in step_abi.LaunchFlag}
    magic = ", ".join(f"'{character}'" for character in engine_format.MAGIC.decode())
    versions = ", ".join(map(str, engine_format.READABLE_VERSIONS))
    for line in (
        f"constexpr char kMagic[8] = {{{magic}}};",
        f"constexpr uint32_t kReadableVersions[] = {{{versions}}};",
        f"constexpr uint64_t kSectionAlign = {engine_format.SECTION_ALIGN};",
        f"constexpr uint32_t kNoIndex = 0x{engine_format.NO_INDEX:X};",
    ):
        assert line in HEADER
