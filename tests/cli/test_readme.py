"""The README's examples run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv4c.errors import SessionError
from dsv4c.runtime.engine import Engine
from dsv4c.runtime.library import cmake_dir

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def example(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert isinstance(text, str)
    return text


def test_python_example(tiny_engine: Path) -> None:
    names: dict[str, object] = {}
    exec(example("python").replace("model.cpu.dsv4c", str(tiny_engine)), names)
    assert isinstance(names["state"], bytes)


def test_cpp_example(tiny_engine: Path, tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    try:
        package = cmake_dir()
    except SessionError as error:
        pytest.skip(f"needs the installed CMake package: {error.message}")
    (tmp_path / "CMakeLists.txt").write_text(example("cmake"), encoding="utf-8")
    (tmp_path / "app.cc").write_text(example("cpp"), encoding="utf-8")
    (tmp_path / "model.cpu.dsv4c").symlink_to(tiny_engine)
    build = tmp_path / "build"
    subprocess.run([cmake, "-S", tmp_path, "-B", build, f"-Ddsv4c_DIR={package}"], check=True, capture_output=True)
    subprocess.run([cmake, "--build", build], check=True, capture_output=True)
    printed = subprocess.run([build / "app"], check=True, capture_output=True, cwd=tmp_path).stdout
    with Engine.open(tiny_engine) as engine:
        assert [int(printed)] == list(engine.generate([0, 35, 79], 1))
