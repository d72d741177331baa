"""The kernel compilers: pinned, because the machine code that an engine holds depends on them.

pyproject.toml and constraints.txt name the same versions.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from dsv4c.errors import KernelError

NVRTC_PACKAGE, NVRTC_VERSION = "nvidia-cuda-nvrtc-cu12", "12.6.85"
TRITON_PACKAGE, TRITON_VERSION = "triton", "3.9.0"
# Inside Triton's package: the older of its two assemblers, whose images load on drivers of CUDA 12 too.
TRITON_PTXAS_VERSION = "12.9.86"

NVRTC_TOOL = f"nvrtc {NVRTC_VERSION}"
TRITON_TOOL = f"triton {TRITON_VERSION}, ptxas {TRITON_PTXAS_VERSION}"

_HINT = "pip install 'dsv4c[h100]'"


def package_file(package: str, version: str, path: str) -> Path:
    """A file of an installed package, which must be of the pinned version."""
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise KernelError(
            f"target h100 needs the package {package} {version} to compile kernels; it is not installed", hint=_HINT
        ) from None
    if found.version != version:
        raise KernelError(
            f"target h100 needs {package} {version} to compile kernels; {found.version} is installed", hint=_HINT
        )
    file = Path(str(found.locate_file(path)))
    if not file.is_file():
        raise KernelError(
            f"package {package} {version} has no {file}", hint=f"pip install --force-reinstall {package}=={version}"
        )
    return file
