"""What `ptxas -v` says of a kernel: registers, shared memory, stack and spills."""

import re
from dataclasses import dataclass

from dsv4c.errors import KernelError

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")


@dataclass(frozen=True)
class Resources:
    registers: int
    shared_bytes: int
    spill_bytes: int
    local_bytes: int


def read_resources(log: str, entry: str) -> Resources:
    """Of one entry of an image; functions that were not inlined into it count with it."""
    parts = _ENTRY.split(log)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if entry not in sections:
        raise KernelError(f"the compiled image has no kernel {entry}, only {', '.join(sorted(sections)) or 'none'}")
    text = sections[entry]
    frames = [tuple(map(int, frame)) for frame in _SPILLS.findall(text)]
    stack = [int(found) for found in _STACK.findall(text)] + [frame for frame, _, _ in frames]
    return Resources(
        registers=max(map(int, _REGISTERS.findall(text))),
        shared_bytes=sum(map(int, _SHARED.findall(text))),
        spill_bytes=sum(stores + loads for _, stores, loads in frames),
        local_bytes=max(stack, default=0),
    )
