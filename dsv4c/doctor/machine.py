"""The machine under `dsv4c doctor`: its processor, memory and folders."""

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4c.doctor.report import Check, State, size_text

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

_LOW_DISK_BYTES = 1 << 30
_MODEL_SIZED = "an engine is about as large as its checkpoint"
# The variants of runtime/src/cpu/simd, best first, by the flags in /proc/cpuinfo.
_SIMD = {
    "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma"},
    "AVX2": {"avx2", "fma"},
    "NEON": {"asimd"},
}


def check_processor() -> Check:
    facts = _processor_facts()
    found = f"{facts['model']}, {facts['machine']}, {facts['processors']} available"
    if facts["simd"] is None:
        found += "; none of AVX2, AVX-512 and NEON: kernels are slow"
        return Check("processor", State.WARNING, found, None, frozenset(), facts)
    return Check("processor", State.OK, f"{found}, {facts['simd']}", None, frozenset(), facts)


def _processor_facts() -> dict[str, Any]:
    text = read_text(PROC / "cpuinfo")
    # Of the first processor: "key : value" lines up to an empty one; what ARM says of the whole machine comes last.
    values = dict(re.findall(r"^(.+?)[ \t]*:[ \t]*(.*)$", text.split("\n\n")[0], re.MULTILINE))
    flags = set((values.get("flags") or values.get("Features") or "").split())
    board = read_text(PROC / "device-tree" / "model").strip("\0\n ")
    return {
        "model": values.get("model name") or board or platform.processor() or "unknown",
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "simd": next((name for name, needed in _SIMD.items() if needed <= flags), None),
    }


def check_memory() -> Check:
    total, available = _meminfo().get("MemTotal"), available_bytes()
    if total is None or available is None:
        return Check("memory", State.WARNING, f"cannot read {PROC / 'meminfo'}")
    facts = {"total_bytes": total, "available_bytes": available, "limit_bytes": None}
    found = f"{size_text(total)}, {size_text(available)} available"
    limits = [limit for limit, _ in _memory_limits() if limit < total]
    if limits:
        facts["limit_bytes"] = min(limits)
        found += f"; this container or service is limited to {size_text(min(limits))}"
    return Check("memory", State.OK, found, None, frozenset(), facts)


def _meminfo() -> dict[str, int]:
    """Bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read_text(PROC / "meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def available_bytes() -> int | None:
    """Of the machine, or less where the control group of this process has a limit."""
    available = _meminfo().get("MemAvailable")
    if available is None:
        return None
    return min([available, *(max(0, limit - used) for limit, used in _memory_limits())])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of the control groups around this process, version 1 or 2."""
    for line in read_text(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUP, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host: the folders that are there count.
        own = root / path.strip("/")
        for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(root))):
            limit, used = read_text(folder / names[0]).strip(), read_text(folder / names[1]).strip()
            if limit.isdecimal() and used.isdecimal():
                # File pages that nobody uses are given back when memory is short.
                cached = re.search(rf"^{names[2]} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
                yield int(limit), max(0, int(used) - (int(cached[1]) if cached else 0))


def check_work_folder(building: bool) -> Check:
    """Where `dsv4c build` writes unless told otherwise."""
    try:
        folder = Path.cwd()
    except OSError as error:
        return Check("folder", State.WARNING, f"the current folder is gone: {error.strerror}", "cd to another one")
    return _disk("folder", folder, f"dsv4c build -o FOLDER/model.dsv4c; {_MODEL_SIZED}", building)


def check_temporary_folder(building: bool) -> Check:
    chosen = os.environ.get("TMPDIR")
    try:
        folder = Path(tempfile.gettempdir())
    except OSError:
        return Check("tmpdir", State.WARNING, "no temporary folder can be written", "export TMPDIR=FOLDER")
    if chosen and not os.access(chosen, os.W_OK):
        found = f"$TMPDIR is {chosen}, which cannot be written; {folder} is used"
        return Check("tmpdir", State.WARNING, found, "export TMPDIR=FOLDER")
    return _disk("tmpdir", folder, "export TMPDIR=FOLDER", building)


def _disk(name: str, folder: Path, mend: str, building: bool) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check(name, State.WARNING, f"{folder}: {error.strerror}", mend)
    facts = {"path": str(folder), "free_bytes": free, "writable": os.access(folder, os.W_OK)}
    found = f"{folder}, {size_text(free)} free"
    if not facts["writable"]:
        found += ", cannot be written"
    bad = not facts["writable"] or free < _LOW_DISK_BYTES
    state = State.WARNING if bad and building else State.OK
    return Check(name, state, found, mend if state is State.WARNING else None, frozenset(), facts)


def check_home(kernel_tools: bool) -> Check:
    """dsv4c writes nothing there; the kernel tools keep caches."""
    home = Path(os.path.expanduser("~"))
    facts = {"path": str(home), "writable": os.access(home, os.W_OK)}
    if facts["writable"]:
        return Check("home", State.OK, str(home), None, frozenset(), facts)
    found = f"{home} cannot be written"
    if kernel_tools:
        return Check("home", State.WARNING, f"{found}: kernel tools cache there", "export HOME=FOLDER")
    return Check("home", State.NOT_NEEDED, f"{found}; dsv4c writes nothing there", None, frozenset(), facts)


def read_text(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
