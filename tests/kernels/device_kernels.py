"""Machine code for tests on a GPU, by way of the cubin cache.

The machine with the GPU need not have the kernel compilers: `pytest tests/kernels --compile-kernels` on another one
compiles what the tests need into the cache (DSV4C_CACHE_DIR), which is then carried there.
"""

import enum
from collections.abc import Sequence

from dsv4c.cubin_cache import default_cache
from dsv4c.kernels.compile import compile_kernels
from dsv4c.kernels.compile_request import CompiledKernel
from dsv4c.plan.execution_plan import KernelVariant


class Mode(enum.Enum):
    RUN = "run"
    COMPILE = "compile"  # and give the reference's results, for tests that go on to another launch
    COMPILE_AND_STOP = "compile and stop"  # since the reference would take long


_settings = {"mode": Mode.RUN}


def set_mode(mode: Mode) -> None:
    """What tests on a GPU do."""
    _settings["mode"] = mode


def mode() -> Mode:
    return _settings["mode"]


def images(variants: Sequence[KernelVariant]) -> dict[KernelVariant, CompiledKernel]:
    return compile_kernels(variants, "sm_90a", default_cache())
