"""`dsv4c doctor`: every state of every check, through packages, libraries and machines made up for the test."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsv4c.doctor import engine as doctor_engine
from dsv4c.doctor import examination as doctor
from dsv4c.doctor import machine as doctor_machine
from dsv4c.doctor import probes as doctor_probes
from dsv4c.doctor.engine import engine_memory
from dsv4c.doctor.examination import examine
from dsv4c.doctor.probes import probe
from dsv4c.doctor.report import Check, Need, Report, State
from dsv4c.engine.reader import read_engine
from dsv4c.errors import DoctorError, InputError, RecipeError
from dsv4c.runtime.library import ABI_VERSION
from dsv4c.version import VERSION
from tests.runtime.hand_engine import CONTEXT, hand_parts, seal

ROOT = Path(__file__).parents[1]
GIB = 1 << 30

H200 = {"name": "NVIDIA H200", "compute_capability": "9.0", "sm_count": 132, "memory_bytes": 139 * GIB}
WHOLE: dict[tuple[str, ...], dict[str, Any]] = {
    ("library",): {"path": "/lib/libdsv4c.so", "abi_version": 1},
    ("driver",): {"absent": True},
    ("package", "numpy"): {"version": "2.4.6"},
    ("package", "torch"): {"version": "2.13.0+cpu", "cuda": None},
    ("package", "tokenizers"): {"version": "0.23.3"},
    ("package", "click"): {"version": "8.5.1"},
    ("package", "rich"): {"version": "15.0.0"},
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`machine(torch={...})`: probes answer as on a whole machine but for what is given."""

    def install(**changes: Mapping[str, Any]) -> None:
        answers = dict(WHOLE)
        for name, answer in changes.items():
            answers[(name,) if name in ("library", "driver", "engine") else ("package", name)] = dict(answer)

        def answer_of(*arguments: str) -> dict[str, Any]:
            return answers.get(arguments[:1] if arguments[0] == "engine" else arguments, {})

        monkeypatch.setattr(doctor, "probe", answer_of)

    monkeypatch.delenv("DSV4C_LIBRARY", raising=False)
    install()
    return install


@pytest.fixture
def engine_file(tmp_path: Path) -> Path:
    path = tmp_path / "hand.dsv4c"
    path.write_bytes(seal(hand_parts()))
    return path


def check_of(report: Report, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


def verdicts(report: Report) -> list[str]:
    return [str(verdict) for verdict in report.verdicts]


def fake_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


# What the child process finds


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "class version: cuda = '12.8'\n__version__ = '2.9.1'\nprint('hello')",
            {"version": "2.9.1", "cuda": "12.8"},
        ),
        ("raise ImportError('libcudnn.so.9: cannot open\\nmore')", "ImportError: libcudnn.so.9: cannot open"),
        ("import absent_dependency", "ModuleNotFoundError: No module named 'absent_dependency'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os; os._exit(5)", "ends the process with exit code 5"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashes with SIGSEGV"),
        ("1 +", "SyntaxError: invalid syntax (torch.py, line 1)"),
    ],
    ids=["whole", "raises", "dependency", "exits", "ends", "crashes", "syntax"],
)
def test_torch_of_any_kind(
    text: str, answer: str | dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_module(tmp_path, "torch", text)
    monkeypatch.syspath_prepend(tmp_path)
    assert probe("package", "torch") == ({"error": answer} if isinstance(answer, str) else answer)


def test_torch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_module(tmp_path, "torch", "import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor_probes, "PROBE_TIMEOUT_S", 0.5)
    assert probe("package", "torch") == {"error": "no answer within 0.5 seconds"}


def test_package_that_is_not_installed() -> None:
    assert probe("package", "not_a_package_of_anyone") == {"absent": True}


def compiled(folder: Path, name: str, source: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = folder / name
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", path, "-"], input=source, text=True, check=True)
    return path


def garbage(folder: Path) -> Path:
    path = folder / "garbage.so"
    path.write_text("garbage")
    return path


def test_library_is_loaded() -> None:
    answer = probe("library")
    if "is not installed" in answer.get("error", ""):
        pytest.skip("needs the runtime library")
    assert answer["abi_version"] == ABI_VERSION and Path(answer["path"]).is_file()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent.so", "is not a file"),
        (lambda folder: folder, "is not a file"),
        (garbage, "file too short"),
        (lambda folder: compiled(folder, "a.so", "int dsv4c_abi_version(void) { return 77; }"), "has ABI version 77"),
        (lambda folder: compiled(folder, "b.so", "int other;"), "undefined symbol: dsv4c_abi_version"),
        (
            lambda folder: compiled(folder, "c.so", f"int dsv4c_abi_version(void) {{ return {ABI_VERSION}; }}"),
            "undefined symbol: dsv4c_last_error",
        ),
        (
            lambda folder: compiled(folder, "d.so", "void __attribute__((constructor)) f() { *(int *)8 = 1; }"),
            "SIGSEGV",
        ),
    ],
    ids=["absent", "folder", "garbage", "other-abi", "other-library", "functions-missing", "crashes"],
)
def test_library_of_any_kind(
    make: Callable[[Path], Path], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSV4C_LIBRARY", str(make(tmp_path)))
    assert message in probe("library")["error"]


FAKE_DRIVER = """
#include <string.h>
#include <stddef.h>
int cuDriverGetVersion(int *v) { *v = 12060; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 7; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, device == 7 ? "First" : "Second"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *v, int a, int device) { *v = a == 75 ? 8 : a == 76 ? 7 : 16; return 0; }
"""


def test_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(tmp_path, "libcuda.so.1", FAKE_DRIVER.replace("INIT", "0"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    facts = probe("driver")
    assert facts["cuda_version"] == "12.6" and "error" not in facts
    shared = {"compute_capability": "8.7", "sm_count": 16}
    assert facts["devices"] == [
        {"name": "First", **shared, "memory_bytes": 7 * GIB},
        {"name": "Second", **shared, "memory_bytes": 8 * GIB},
    ]


def test_driver_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(tmp_path, "libcuda.so.1", FAKE_DRIVER.replace("INIT", "100"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    facts = probe("driver")
    assert facts["error"] == "cuInit: no CUDA-capable device is detected (100)"
    assert facts["cuda_version"] == "12.6" and facts["devices"] == []


def test_driver_that_is_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("garbage")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "file too short" in probe("driver")["error"]


# What follows from it


def test_whole_machine(machine: Callable[..., None]) -> None:
    report = examine()
    assert report.possible and verdicts(report) == ["build for cpu: yes", "run engines: yes"]
    report.require_possible()
    assert check_of(report, "torch") == Check(
        "torch",
        State.OK,
        "2.13.0+cpu, CPU build",
        None,
        frozenset({Need.BUILD}),
        {"version": "2.13.0+cpu", "cuda": None},
    )
    not_needed = {"triton", "nvrtc", "ptxas", "driver", "c++", "cmake", "ninja", "jinja2"}
    assert {check.name for check in report.checks if check.state is State.NOT_NEEDED} >= not_needed
    assert not any(check.mend for check in report.checks if check.state in (State.OK, State.NOT_NEEDED))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"absent": True}, "not installed, needs 2.8"),
        ({"error": "crashes with SIGSEGV"}, "does not import: crashes with SIGSEGV"),
        ({"version": "2.7.1", "cuda": "12.6"}, "2.7.1, CUDA 12.6 build, needs 2.8"),
    ],
    ids=["absent", "broken", "old"],
)
def test_without_a_good_torch(
    answer: dict[str, Any], found: str, machine: Callable[..., None], engine_file: Path
) -> None:
    machine(torch=answer)
    report = examine()
    check = check_of(report, "torch")
    assert check.state is State.MISSING and found in check.found
    assert check.mend is not None and check.mend.startswith(f"{sys.executable} -m pip install ")
    assert verdicts(report) == ["build for cpu: no (torch)", "run engines: yes"]
    with pytest.raises(DoctorError, match=r"build for cpu: no \(torch\)") as raised:
        report.require_possible()
    assert raised.value.exit_code == 13
    # A machine that only runs engines has none.
    report = examine(engine_file)
    assert report.possible and check_of(report, "torch").state is State.NOT_NEEDED


def test_machine_that_only_serves(machine: Callable[..., None], engine_file: Path) -> None:
    absent = {"absent": True}
    machine(torch=absent, click=absent, tokenizers=absent, rich=absent)
    report = examine(engine_file)
    assert report.possible
    assert verdicts(report) == [
        f"run {engine_file}: yes, from Python, C and C++; the `dsv4c run` command needs tokenizers, click"
    ]
    assert check_of(report, "click").state is State.WARNING and check_of(report, "rich").state is State.NOT_NEEDED


def test_without_numpy(machine: Callable[..., None]) -> None:
    machine(numpy={"absent": True})
    assert verdicts(examine()) == ["build for cpu: no (numpy)", "run engines: no (numpy)"]
    assert verdicts(examine(target="cpu")) == ["build for cpu: no (numpy)"]


def test_without_the_library(
    machine: Callable[..., None], engine_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(library={"error": "the runtime library libdsv4c.so is not installed"})
    report = examine(engine_file)
    assert check_of(report, "library").mend == f"{sys.executable} -m pip install {ROOT}"
    assert check_of(report, "opens").state is State.MISSING
    assert verdicts(report) == [f"run {engine_file}: no (library, opens)"]
    # Its build needs a compiler.
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_of(examine(), "c++").state is State.WARNING
    monkeypatch.setenv("DSV4C_LIBRARY", "/garbage")
    assert check_of(examine(), "library").mend == "unset DSV4C_LIBRARY"
    assert examine(target="cpu").possible


def test_target_to_come(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {"triton": "3.9.0"}.get)
    report = examine(target="orin")
    assert verdicts(report) == ["build for orin: no (target, nvrtc, ptxas)"]
    assert check_of(report, "triton").state is State.NOT_NEEDED
    assert check_of(report, "nvrtc").mend == f"{sys.executable} -m pip install nvidia-cuda-nvrtc-cu12==12.6.85"


def test_kernel_compilers_of_a_target(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.8.0", "nvidia-cuda-nvrtc-cu12": "12.6.85"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    report = examine(target="h100")
    assert verdicts(report) == ["build for h100: no (triton)"]
    assert check_of(report, "triton").found == "triton 3.8.0, needs 3.9.0"
    versions["triton"] = "3.9.0"
    assert verdicts(examine(target="h100")) == ["build for h100: yes"]
    assert check_of(examine(target="cpu"), "triton").state is State.NOT_NEEDED


def test_unknown_target() -> None:
    with pytest.raises(RecipeError, match="unknown target 'gpu'"):
        examine(target="gpu")


# An engine


def test_engine(machine: Callable[..., None], engine_file: Path) -> None:
    report = examine(engine_file)
    assert verdicts(report) == [f"run {engine_file}: yes"]
    states = {name: check_of(report, name).state for name in ("engine", "arch", "weights", "needs", "opens")}
    assert set(states.values()) == {State.OK}
    need = check_of(report, "needs").facts
    parts = hand_parts()
    assert need["weight_bytes"] == len(parts.weights) and need["context"] == CONTEXT
    assert need["arena_bytes"] == max(bucket.arena_bytes for bucket in parts.buckets)


def test_engine_opens_in_the_runtime(engine_file: Path) -> None:
    if "error" in probe("library"):
        pytest.skip("needs the runtime library")
    assert probe("engine", str(engine_file)) == {}
    data = bytearray(engine_file.read_bytes())
    data[4096 + 3] ^= 1
    engine_file.write_bytes(data)
    assert "does not match its digest" in probe("engine", str(engine_file))["error"]


def test_engine_that_is_damaged(machine: Callable[..., None], engine_file: Path) -> None:
    engine_file.write_bytes(engine_file.read_bytes()[:-1])
    report = examine(engine_file)
    assert check_of(report, "engine").state is State.MISSING and "its header says" in check_of(report, "engine").found
    assert verdicts(report) == [f"run {engine_file}: no (engine)"]


def test_engine_that_the_runtime_refuses(machine: Callable[..., None], engine_file: Path) -> None:
    machine(engine={"error": "plan has version 9", "hint": "build it again"})
    check = check_of(examine(engine_file), "opens")
    assert (check.state, check.found, check.mend) == (State.MISSING, "plan has version 9", "build it again")


def test_engine_for_a_gpu(machine: Callable[..., None], engine_file: Path) -> None:
    parts = hand_parts()
    parts.header["arch"] = b"sm_90a"
    engine_file.write_bytes(seal(parts))
    report = examine(engine_file)
    assert verdicts(report) == [f"run {engine_file}: no (driver)"]
    assert check_of(report, "driver").mend == "install the NVIDIA driver"
    machine(driver={"driver_version": "580.95.05", "cuda_version": "13.0", "devices": [H200]})
    driver = check_of(examine(engine_file), "driver")
    assert driver.state is State.OK
    assert driver.found == (
        "NVIDIA driver 580.95.05 for CUDA 13.0; NVIDIA H200 (compute capability 9.0, 132 SMs, 139.0 GiB)"
    )
    # Its memory is the card's, not the machine's.
    assert check_of(examine(engine_file), "needs").facts["available_bytes"] == H200["memory_bytes"]
    machine(driver={"cuda_version": "13.0", "devices": [H200 | {"memory_bytes": 1 << 10}]})
    assert check_of(examine(engine_file), "needs").state is State.MISSING
    other = H200 | {"compute_capability": "8.7"}
    machine(driver={"cuda_version": "12.6", "devices": [other]})
    assert check_of(examine(engine_file), "driver").state is State.MISSING


def test_engine_of_several_ranks(machine: Callable[..., None], engine_file: Path) -> None:
    parts = hand_parts()
    parts.header |= {"world_size": 2, "rank": 1}
    engine_file.write_bytes(seal(parts))
    assert check_of(examine(engine_file), "ranks").found == "rank 1 of 2; this version runs engines of one rank"


def test_engine_with_weights_beside_it(machine: Callable[..., None], engine_file: Path) -> None:
    parts = hand_parts()
    parts.external_name = "hand.weights"
    engine_file.write_bytes(seal(parts))
    missing = check_of(examine(engine_file), "weights")
    assert missing.state is State.MISSING and missing.mend == "copy hand.weights to the folder of the engine"
    weights = engine_file.parent / "hand.weights"
    weights.write_bytes(parts.weights[:-1])
    assert check_of(examine(engine_file), "weights").mend == "copy hand.weights again"
    weights.write_bytes(parts.weights)
    assert check_of(examine(engine_file), "weights").state is State.OK


def test_engine_and_memory(machine: Callable[..., None], engine_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = engine_memory(read_engine(engine_file))
    for available, state, mend in (
        (need.total_bytes(need.blocks), State.OK, None),
        (need.total_bytes(5), State.WARNING, f"dsv4c run --context {5 * need.block_tokens} fits"),
        (need.total_bytes(1) - 10, State.MISSING, "free 10 bytes"),
    ):
        monkeypatch.setattr(doctor_engine, "available_bytes", lambda available=available: available)
        check = check_of(examine(engine_file), "needs")
        assert (check.state, check.mend) == (state, mend)


def test_engine_whose_plan_is_wrong(machine: Callable[..., None], engine_file: Path) -> None:
    parts = hand_parts()
    parts.plan_header["buckets"] = 1 << 40
    engine_file.write_bytes(seal(parts))
    assert check_of(examine(engine_file), "plan").found.endswith("records lie outside section PLAN")


def test_chat_template(machine: Callable[..., None], engine_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", {}.get)
    assert check_of(examine(engine_file), "jinja2").state is State.NOT_NEEDED
    monkeypatch.setattr(doctor._Examination, "_has_chat_template", lambda _: True)
    report = examine(engine_file)
    assert check_of(report, "jinja2").state is State.WARNING and report.possible


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no"):
        examine(tmp_path / "absent.dsv4c")
    with pytest.raises(InputError, match="is a folder"):
        examine(tmp_path)


# The machine


@pytest.mark.parametrize(
    ("cpuinfo", "simd"),
    [
        ("flags\t\t: fpu avx2 fma avx512f avx512bw avx512vl avx512dq", "AVX-512"),
        ("flags\t\t: fpu avx2 fma avx512f", "AVX2"),
        ("flags\t\t: fpu sse2", None),
        ("Features\t: fp asimd", "NEON"),
        ("", None),
    ],
)
def test_processor(
    cpuinfo: str, simd: str | None, machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: Chip 9000\n{cpuinfo}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(doctor_machine, "PROC", tmp_path)
    check = check_of(examine(), "processor")
    assert check.state is (State.OK if simd else State.WARNING)
    assert check.facts["simd"] == simd and check.found.startswith(f"Chip 9000, {platform.machine()}, ")


@pytest.mark.parametrize(
    ("cgroup", "files", "available"),
    [
        ("0::/", {}, 6),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, 6),
        (
            "0::/a/b",
            {
                "a/memory.max": str(4 * GIB),
                "a/memory.current": str(3 * GIB),
                "a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            2,
        ),
        (
            "3:cpu:/x\n4:memory:/host/path",
            {"memory/memory.limit_in_bytes": str(2 * GIB), "memory/memory.usage_in_bytes": str(GIB)},
            1,
        ),
    ],
    ids=["none", "unlimited", "version-2", "version-1"],
)
def test_memory(
    cgroup: str,
    files: dict[str, str],
    available: int,
    machine: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {
        "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable:  {6 * GIB // 1024} kB\n",
        "proc/self/cgroup": f"{cgroup}\n",
        **{f"cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor_machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(doctor_machine, "CGROUP", tmp_path / "cgroup")
    check = check_of(examine(), "memory")
    assert check.facts["available_bytes"] == available * GIB
    assert ("is limited to" in check.found) == (available < 6)


def test_memory_that_cannot_be_read(
    machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "PROC", tmp_path)
    assert check_of(examine(), "memory").state is State.WARNING


def test_folders_that_cannot_be_written(
    machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_file: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "absent"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    report = examine()
    assert {check_of(report, name).state for name in ("folder", "tmpdir")} == {State.WARNING}
    assert check_of(report, "home").state is State.NOT_NEEDED and report.possible
    assert check_of(examine(target="h100"), "home").state is State.WARNING
    # Running writes nothing.
    assert check_of(examine(engine_file), "folder").state is State.OK


def test_current_folder_that_is_gone(
    machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert check_of(examine(), "folder").state is State.WARNING


# The report


def test_text_is_aligned_and_printable(machine: Callable[..., None]) -> None:
    machine(torch={"error": "\x1b[31mred"}, rich={"absent": True})
    text = examine().to_text()
    assert "\x1b" not in text and "?[31mred" in text
    lines = text.split("\n")
    column = lines[0].index(VERSION)
    body = lines[: lines.index("")]
    assert all(line[column - 1] == " " and line[column] != " " for line in body)
    assert f"{'':<{column}}-> {sys.executable} -m pip install 'rich>=13'" in body
    assert lines[-2:] == ["build for cpu: no (torch, rich)", "run engines: yes"]


def test_keys(machine: Callable[..., None], engine_file: Path) -> None:
    report = json.loads(json.dumps(examine(engine_file, "cpu").to_dict()))
    assert list(report) == ["dsv4c_version", "possible", "verdicts", "checks"]
    verdict_keys = ["name", "subject", "possible", "blocked_by", "command_blocked_by"]
    assert [list(verdict) for verdict in report["verdicts"]] == [verdict_keys] * 2
    assert [(v["name"], v["subject"]) for v in report["verdicts"]] == [("build", "cpu"), ("run", str(engine_file))]
    check_keys = ["name", "state", "found", "mend", "needed_for", "facts"]
    assert all(list(check) == check_keys for check in report["checks"])
    assert [check["name"] for check in report["checks"]] == [
        *("dsv4c", "python", "library", "numpy", "torch", "tokenizers", "click", "rich", "jinja2"),
        *("target", "triton", "nvrtc", "ptxas", "c++", "cmake", "ninja", "processor", "memory", "folder", "tmpdir"),
        *("home", "driver", "engine", "arch", "weights", "needs", "opens"),
    ]


def test_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(f"{p.name}>={p.minimum}" for p in doctor._PACKAGES) == project["dependencies"]
    for target in ("h100", "orin"):
        tools = sorted(f"{tool.package}=={tool.version}" for tool in doctor._KERNEL_TOOLS if target in tool.targets)
        assert tools == project["optional-dependencies"][target]


def test_with_nothing_installed(tmp_path: Path) -> None:
    """Without site-packages: the standard library and dsv4c's own files."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-S", "-m", "dsv4c.doctor"]
    result = subprocess.run(
        [*command, "--json"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 13 and "Traceback" not in result.stderr
    report = json.loads(result.stdout)
    build, run = report["verdicts"]
    assert build["blocked_by"] == ["numpy", "torch", "tokenizers", "click", "rich"]
    assert "numpy" in run["blocked_by"]
    assert result.stderr.startswith("error: build for cpu: no (")
    absent = subprocess.run([*command, "absent"], env=environment, capture_output=True, text=True, check=False)
    assert (absent.returncode, absent.stdout) == (12, "")
    assert absent.stderr.startswith("error: there is no absent\n\nhint: ")
