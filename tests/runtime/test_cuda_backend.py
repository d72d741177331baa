"""The CUDA backend on a fake driver (fake_cuda), each case in a process of its own; and without any driver."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4c.errors import EngineFormatError
from dsv4c.runtime import library as lib
from dsv4c.runtime.engine import Engine
from tests.runtime.cuda_cases import CASES
from tests.runtime.hand_cuda_engine import cuda_parts
from tests.runtime.hand_engine import write_engine

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "dsv4c" / "runtime"
KERNELS = ROOT / "dsv4c" / "kernels" / "cuda"


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("fake_cuda")
    source = Path(__file__).parent / "fake_cuda" / "fake_cuda.cc"
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
    includes = ["-I", RUNTIME / "src", "-I", RUNTIME / "include"]
    output = ["-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1", "-ldl"]
    subprocess.run([compiler, *flags, *includes, source, *output], check=True)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_on_a_fake_driver(tmp_path: Path, fake_driver: Path, name: str) -> None:
    environment = {
        **os.environ,
        **CASES[name][1],
        "LD_LIBRARY_PATH": str(fake_driver),
        "PYTHONPATH": str(ROOT),
        lib.LIBRARY_VARIABLE: str(lib.library_path()),
    }
    command = [sys.executable, "-m", "tests.runtime.cuda_cases", name, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, f"{result.returncode}\n{result.stdout}{result.stderr}"


def has_driver() -> bool:
    return (
        subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_without_a_driver(tmp_path: Path) -> None:
    if has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    message = r"engine for sm_90a needs an NVIDIA driver: libcuda\.so\.1 cannot be loaded \(libcuda\.so\.1: cannot open"
    with pytest.raises(EngineFormatError, match=message) as caught:
        Engine.open(write_engine(tmp_path / "gpu.dsv4c", cuda_parts()))
    assert caught.value.hint == "`dsv4c doctor ENGINE` says what this machine lacks to run it"
    Engine.open(write_engine(tmp_path / "cpu.dsv4c")).close()


def struct_fields(text: str) -> list[tuple[str, int]]:
    """(name, count) of the fields of StepHeader."""
    body = re.search(r"struct StepHeader {\n(.*?)\n};", text, re.DOTALL)
    assert body
    found = re.findall(r"^ +(?:const )?\w+\*? (\w+)(?:\[(\d+)\])?;", body[1], re.MULTILINE)
    return [(name, int(count or 1)) for name, count in found]


def test_the_step_header_is_that_of_the_kernels() -> None:
    kernels = struct_fields((KERNELS / "step.cuh").read_text())
    assert len(kernels) == 12 and kernels == struct_fields((RUNTIME / "src" / "cuda" / "step_block.h").read_text())
