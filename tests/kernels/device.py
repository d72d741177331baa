"""A GPU through the driver's own interface: modules from machine code, memory, launches, times. No torch."""

import ctypes
import ctypes.util
import functools
import statistics
from collections.abc import Callable, Sequence

from tests.kernels.driver_structs import MAX_DYNAMIC_SHARED, PROGRAMMATIC, LaunchAttribute, LaunchConfig

_SM_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_ATTRIBUTE_CLUSTER, _ATTRIBUTE_COOPERATIVE = 4, 2
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DeviceError(Exception):
    """A call of the driver failed."""


class Device:
    """The first GPU, in its primary context. One for the process: `device()`."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._handle), 0)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle)
        self._stream = ctypes.c_void_p()  # the default one
        self._modules: dict[bytes, ctypes.c_void_p] = {}
        self._functions: dict[tuple[bytes, str], ctypes.c_void_p] = {}
        self._use()

    @property
    def sm_count(self) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _SM_COUNT, self._handle)
        return count.value

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, len(text), self._handle)
        return text.value.decode()

    def function(self, cubin: bytes, symbol: str) -> ctypes.c_void_p:
        """The kernel `symbol` of an image, which is loaded once."""
        self._use()
        key = cubin, symbol
        if key not in self._functions:
            if cubin not in self._modules:
                module = ctypes.c_void_p()
                self._call("cuModuleLoadData", ctypes.byref(module), cubin)
                self._modules[cubin] = module
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._modules[cubin], symbol.encode())
            self._functions[key] = function
        return self._functions[key]

    def allocate(self, size_bytes: int) -> int:
        self._use()
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size_bytes)))
        return address.value

    def free(self, address: int) -> None:
        self._use()
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, host: int, size_bytes: int) -> None:
        """From the host's memory at `host`."""
        self._use()
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(size_bytes))

    def download(self, host: int, address: int, size_bytes: int) -> None:
        self._use()
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        self._use()
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes))

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        block: int,
        pointers: Sequence[int],
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> None:
        """Starts a grid whose parameters are pointers."""
        self._use()
        if shared_bytes > 48 << 10:
            self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes))
        values = (ctypes.c_uint64 * len(pointers))(*pointers)
        parameters = (ctypes.c_void_p * len(pointers))(
            *(ctypes.addressof(values) + 8 * index for index in range(len(pointers)))
        )
        attributes = []
        if cluster > 1:
            attributes.append(LaunchAttribute(_ATTRIBUTE_CLUSTER, 0, (ctypes.c_uint32 * 16)(cluster, 1, 1)))
        if cooperative:
            attributes.append(LaunchAttribute(_ATTRIBUTE_COOPERATIVE, 0, (ctypes.c_uint32 * 16)(1)))
        if programmatic:
            attributes.append(LaunchAttribute(PROGRAMMATIC, 0, (ctypes.c_uint32 * 16)(1)))
        config = LaunchConfig(
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(block, 1, 1),
            shared_bytes=shared_bytes,
            stream=self._stream.value,
            attributes=(LaunchAttribute * max(1, len(attributes)))(*attributes),
            attribute_count=len(attributes),
        )
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)

    def synchronize(self) -> None:
        """Waits; an error of a kernel comes up here. The context is of no use after an illegal address."""
        self._use()
        self._call("cuCtxSynchronize")

    def median_us(self, work: Callable[[], None], repeats: int = 20, samples: int = 15) -> float:
        """Median time of `work`, which starts launches, in microseconds.

        `repeats` of it run as one graph, so that the time to start a launch from Python does not count.
        """
        stream, graph, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        work()
        self.synchronize()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        self._call("cuStreamBeginCapture_v2", stream, _CAPTURE_RELAXED)
        self._stream = stream
        try:
            for _ in range(repeats):
                work()
        finally:
            self._stream = ctypes.c_void_p()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        start, end = self._event(), self._event()
        times = []
        for _ in range(samples + 3):
            self._call("cuEventRecord", start, stream)
            self._call("cuGraphLaunch", executable, stream)
            self._call("cuEventRecord", end, stream)
            self.synchronize()
            milliseconds = ctypes.c_float()
            self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
            times.append(milliseconds.value * 1000 / repeats)
        for event in (start, end):
            self._call("cuEventDestroy_v2", event)
        self._call("cuGraphExecDestroy", executable)
        self._call("cuGraphDestroy", graph)
        self._call("cuStreamDestroy_v2", stream)
        return statistics.median(times[3:])  # the first ones warm up

    def _event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def _use(self) -> None:
        # A context belongs to a thread, and torch may have made another one current.
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._driver, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            raise DeviceError(f"{name}: {text.value.decode() if text.value else status}")


@functools.cache
def device() -> Device:
    return Device()
