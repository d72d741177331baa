"""Machine code on torch's stream: modules, launches and what the driver says of them. ctypes and torch alone."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from tests.kernels.driver_structs import MAX_DYNAMIC_SHARED, PROGRAMMATIC, LaunchAttribute, LaunchConfig


class DriverError(Exception):
    """A call of the driver failed."""


@cache
def _driver() -> ctypes.CDLL:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: object) -> None:
    driver = _driver()
    status = getattr(driver, name)(*args)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {text.value.decode() if text.value else status}")


@cache
def load_function(cubin: bytes, symbol: str, shared_bytes: int) -> ctypes.c_void_p:
    """The kernel of an image, allowed as much dynamic shared memory. Not while a graph is captured."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), cubin)
    _call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
    _call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes))
    return function


class Launcher:
    """One launch with its pointers, to be started on torch's current stream, or captured there."""

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        block: int,
        shared_bytes: int,
        pointers: Sequence[int],
        programmatic: bool = False,
    ) -> None:
        self._function = function
        self._values = (ctypes.c_uint64 * len(pointers))(*pointers)
        start = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * len(pointers))(*(start + 8 * index for index in range(len(pointers))))
        self._attributes = (LaunchAttribute * 1)(LaunchAttribute(PROGRAMMATIC, 0, (ctypes.c_uint32 * 16)(1)))
        self._config = LaunchConfig(
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(block, 1, 1),
            shared_bytes=shared_bytes,
            attributes=self._attributes,
            attribute_count=int(programmatic),
        )

    def __call__(self) -> None:
        self._config.stream = torch.cuda.current_stream().cuda_stream
        _call("cuLaunchKernelEx", ctypes.byref(self._config), self._function, self._parameters, None)
