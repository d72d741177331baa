"""`dsv4c doctor`: can this machine build, can it run (this engine), and what mends what is missing.

Standard library only, so that it works where nothing else is installed: `python -m dsv4c.doctor [ENGINE]`. What may be
broken (a package, the runtime library, the driver) is tried in a child process: whether it raises, crashes, ends the
process or hangs, it becomes a line of the report.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (from a source tree; pip would refuse)
    # Here, because the modules below do not load in an older one.
    sys.exit("error: dsv4c needs Python 3.11 or newer, this is " + sys.version.split()[0])

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dsv4c.doctor.engine import check_driver, check_engine
from dsv4c.doctor.machine import (
    check_home,
    check_memory,
    check_processor,
    check_temporary_folder,
    check_work_folder,
)
from dsv4c.doctor.probes import installed_version, probe
from dsv4c.doctor.report import DEFAULT_TARGET, Check, Need, Report, State, Verdict, failed_check
from dsv4c.engine.reader import EngineReader, read_engine
from dsv4c.errors import Dsv4cError, EngineFormatError, InputError
from dsv4c.target import COMING_TARGETS, TARGETS, find_target
from dsv4c.version import VERSION


@dataclass(frozen=True)
class Package:
    """A Python package: `minimum` as pyproject.toml has it, and who imports it."""

    name: str
    minimum: str
    needs: frozenset[Need]


_PACKAGES = (
    Package("numpy", "1.26", frozenset({Need.BUILD, Need.RUN})),
    Package("torch", "2.8", frozenset({Need.BUILD})),
    Package("tokenizers", "0.20", frozenset({Need.BUILD, Need.COMMAND})),
    Package("click", "8.2", frozenset({Need.BUILD, Need.COMMAND})),
    Package("rich", "13", frozenset({Need.BUILD})),
)


@dataclass(frozen=True)
class KernelTool:
    """A compiler of GPU kernels, by the package that has it. `version` is the pinned one, or how it begins."""

    name: str
    package: str
    version: str
    targets: tuple[str, ...]


# As in pyproject.toml; a test compares.
_KERNEL_TOOLS = (
    KernelTool("triton", "triton", "3.9.0", ("h100",)),
    KernelTool("nvrtc", "nvidia-cuda-nvrtc-cu12", "12.6.85", ("h100", "orin")),
    KernelTool("ptxas", "nvidia-cuda-nvcc-cu12", "12.6.85", ("orin",)),
)
# For building the runtime from source, and programs in C and C++.
_BUILD_TOOLS = {
    "c++": (("c++", "g++", "clang++"), "sudo apt-get install g++"),
    "cmake": (("cmake",), "sudo apt-get install cmake"),
    "ninja": (("ninja",), "sudo apt-get install ninja-build"),
}


def examine(engine: Path | None = None, target: str | None = None) -> Report:
    """Looks at this machine. ENGINE asks to run it, TARGET to build for it; neither asks for both, on the cpu.

    Raises InputError or RecipeError where there is no such engine file or target.
    """
    if engine is not None:
        _require_file(engine)
    if target is not None and target not in COMING_TARGETS:
        find_target(target)
    asked = set()
    if target is not None or engine is None:
        asked.add(Need.BUILD)
    if engine is not None or target is None:
        asked |= {Need.RUN, Need.COMMAND}
    return _Examination(engine, target or DEFAULT_TARGET, frozenset(asked)).report()


def _require_file(engine: Path) -> None:
    if engine.is_dir():
        raise InputError(f"{engine} is a folder, not an engine file", hint="name the file that `dsv4c build` made")
    if not engine.exists():
        raise InputError(f"there is no {engine}", hint="name the file that `dsv4c build` made")


class _Examination:
    """One run: starts every probe that is needed at once, then makes the checks in the order of the report."""

    def __init__(self, engine: Path | None, target: str, asked: frozenset[Need]) -> None:
        self.engine = engine
        self.target = target
        self.asked = asked
        self.reader: EngineReader | None = None
        self.engine_error: EngineFormatError | None = None
        if engine is not None:
            try:
                self.reader = read_engine(engine)
            except EngineFormatError as error:
                self.engine_error = error
        wanted: list[tuple[str, ...]] = [("library",), ("driver",)]
        wanted += [("package", package.name) for package in _PACKAGES if package.needs & asked]
        if self.reader is not None:
            wanted.append(("engine", str(engine)))
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            self.answers = dict(zip(wanted, pool.map(lambda arguments: probe(*arguments), wanted), strict=True))

    def report(self) -> Report:
        checks = list(self._checks())
        verdicts = []
        if Need.BUILD in self.asked:
            verdicts.append(Verdict(Need.BUILD, self.target, _blockers(checks, Need.BUILD)))
        if Need.RUN in self.asked:
            subject = None if self.engine is None else str(self.engine)
            command = tuple(
                check.name
                for check in checks
                if Need.COMMAND in check.needs and check.state in (State.MISSING, State.WARNING)
            )
            verdicts.append(Verdict(Need.RUN, subject, _blockers(checks, Need.RUN), command))
        return Report(checks, verdicts)

    def _checks(self) -> Iterator[Check]:
        yield Check("dsv4c", State.OK, f"{VERSION} in {Path(__file__).parents[1]}")
        yield Check("python", State.OK, f"{platform.python_version()}, {sys.executable}")
        yield self._library()
        yield from map(self._package, _PACKAGES)
        yield self._jinja2()
        if Need.BUILD in self.asked:
            yield self._target()
        yield from map(self._kernel_tool, _KERNEL_TOOLS)
        yield from (self._build_tool(name) for name in _BUILD_TOOLS)
        building = Need.BUILD in self.asked
        yield check_processor()
        yield check_memory()
        yield check_work_folder(building)
        yield check_temporary_folder(building)
        yield check_home(building and any(self.target in tool.targets for tool in _KERNEL_TOOLS))
        yield check_driver(self.answers["driver",], None if self.reader is None else self.reader.arch)
        if self.engine_error is not None:
            error = self.engine_error
            yield Check("engine", State.MISSING, error.message, error.hint, frozenset({Need.RUN}))
        if self.reader is not None:
            opened = self.answers["engine", str(self.engine)]
            yield from check_engine(self.reader, self.answers["library",], opened, self.answers["driver",])

    def _library(self) -> Check:
        needs = frozenset({Need.RUN})
        answer = self.answers["library",]
        if "error" not in answer:
            state = State.OK if needs & self.asked else State.NOT_NEEDED
            return Check("library", state, f"{answer['path']}, ABI {answer['abi_version']}", None, needs, answer)
        source = Path(__file__).parents[2]
        mend: str | None
        if os.environ.get("DSV4C_LIBRARY"):
            mend = "unset DSV4C_LIBRARY"
        elif (source / "pyproject.toml").is_file():
            mend = _pip_install(str(source))
        else:
            mend = answer.get("hint")
        return failed_check("library", self.asked, needs, answer["error"], mend)

    def _package(self, package: Package) -> Check:
        name, needs = package.name, package.needs
        if not needs & self.asked:
            return Check(name, State.NOT_NEEDED, installed_version(name) or "not installed", None, needs)
        answer = self.answers["package", name]
        install = _pip_install(f"{name}>={package.minimum}")
        if answer.get("absent"):
            return failed_check(name, self.asked, needs, f"not installed, needs {package.minimum}", install)
        if "error" in answer:
            found = f"{installed_version(name) or 'no version'}, does not import: {answer['error']}"
            mend = _pip_install("--force-reinstall", f"{name}>={package.minimum}")
            return failed_check(name, self.asked, needs, found, mend)
        version = str(answer["version"] or "unknown version")
        if name == "torch":
            version += f", CUDA {answer['cuda']} build" if answer["cuda"] else ", CPU build"
        if _numbers(version) < _numbers(package.minimum):
            return failed_check(name, self.asked, needs, f"{version}, needs {package.minimum}", install, answer)
        return Check(name, State.OK, version, None, needs, answer)

    def _jinja2(self) -> Check:
        """Optional: only a chat template takes it."""
        version = installed_version("jinja2")
        needs = frozenset({Need.COMMAND}) if self._has_chat_template() else frozenset()
        if version is not None:
            return Check("jinja2", State.OK if needs else State.NOT_NEEDED, version, None, needs)
        if needs:
            found = "not installed: `dsv4c run --chat` needs it for the chat template of this engine"
            return Check("jinja2", State.WARNING, found, _pip_install("jinja2"))
        return Check("jinja2", State.NOT_NEEDED, "not installed: only for engines with a chat template")

    def _has_chat_template(self) -> bool:
        if self.reader is None:
            return False
        # A damaged section has a line of its own.
        with contextlib.suppress(EngineFormatError):
            files = self.reader.tokenizer_files
            return "chat_template.jinja" in files or '"chat_template"' in files.get("tokenizer_config.json", "")
        return False

    def _target(self) -> Check:
        needs = frozenset({Need.BUILD})
        if self.target in TARGETS:
            return Check("target", State.OK, f"{self.target} ({TARGETS[self.target].arch})", None, needs)
        return failed_check(
            "target",
            self.asked,
            needs,
            f"{self.target} cannot be built yet; this version builds for {', '.join(TARGETS)}",
            f"dsv4c build CHECKPOINT --target {DEFAULT_TARGET}",
        )

    def _kernel_tool(self, tool: KernelTool) -> Check:
        version = installed_version(tool.package)
        found = f"{tool.package} {version or 'is not installed'}"
        if Need.BUILD not in self.asked or self.target not in tool.targets:
            return Check(tool.name, State.NOT_NEEDED, f"{found}; for {' and '.join(tool.targets)}")
        needs = frozenset({Need.BUILD})
        if version != tool.version:
            install = _pip_install(f"{tool.package}=={tool.version}")
            return failed_check(tool.name, self.asked, needs, f"{found}, needs {tool.version}", install)
        return Check(tool.name, State.OK, found, None, needs)

    def _build_tool(self, name: str) -> Check:
        """Needed only to make the runtime library, and for programs in C and C++."""
        commands, mend = _BUILD_TOOLS[name]
        chosen = os.environ.get("CXX") if name == "c++" else None
        path = next(filter(None, map(shutil.which, (*([chosen] if chosen else []), *commands))), None)
        if "error" not in self.answers["library",]:
            found = path or "not found"
            return Check(name, State.NOT_NEEDED, f"{found}; for the C++ example and builds of the library")
        if path is None:
            return Check(name, State.WARNING, "not found: needed to build the library", mend)
        return Check(name, State.OK, path)


def _blockers(checks: Sequence[Check], need: Need) -> tuple[str, ...]:
    return tuple(check.name for check in checks if check.state is State.MISSING and need in check.needs)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def _pip_install(*arguments: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *arguments])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without the packages of the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m dsv4c.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("engine", nargs="?", type=Path, metavar="ENGINE", help="can this engine run here?")
    parser.add_argument("--target", metavar="NAME", help="can engines for NAME be built here?")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    options = parser.parse_args(arguments)
    try:
        report = examine(options.engine, options.target)
        text = json.dumps(report.to_dict(), indent=2) if options.json else report.to_text()
        sys.stdout.buffer.write(f"{text}\n".encode())
        sys.stdout.buffer.flush()
        report.require_possible()
    except BrokenPipeError:
        # Python writes what is left at exit, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Dsv4cError as error:
        print(error.to_text(), file=sys.stderr)
        return error.exit_code
    return 0
