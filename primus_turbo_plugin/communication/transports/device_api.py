"""Calls of the CUDA driver and the HIP runtime that torch does not wrap: peer memory, copies, words that streams wait for.

Both are used through ctypes, on raw addresses and raw streams, in the context torch has made current on the calling thread.
Constants are those of cuda.h and hip_runtime_api.h; each call's result is checked and named in the error.
"""

from __future__ import annotations

import abc
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from primus_turbo_plugin.errors import UnsupportedError

_HANDLE_BYTES = 64  # CUipcMemHandle and hipIpcMemHandle_t
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


class DeviceApi(abc.ABC):
    """What `sdma` needs. Addresses and streams are integers."""

    name: str
    copy_detail: str
    signal_by: Literal["copy", "write"]
    """The quicker way to raise a peer's flag that takes no compute unit."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Device memory that can be shared with other processes."""

    @abc.abstractmethod
    def free(self, address: int) -> None: ...

    @abc.abstractmethod
    def share(self, address: int) -> bytes:
        """A handle by which another process opens this memory."""

    @abc.abstractmethod
    def open_shared(self, handle: bytes) -> int: ...

    @abc.abstractmethod
    def close_shared(self, address: int) -> None: ...

    @abc.abstractmethod
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Device to device, also across devices, by a copy engine if that is possible."""

    @abc.abstractmethod
    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """The stream waits for a 32-bit word; takes no compute unit."""

    @abc.abstractmethod
    def write(self, stream: int, address: int, value: int) -> None:
        """Writes a 32-bit word in stream order, after what the stream did before is visible."""

    @abc.abstractmethod
    def poke(self, target: int, source: int, stream: int) -> None:
        """Copies a 32-bit word, which holds 1, within the device and without compute units, in stream order."""

    @abc.abstractmethod
    def can_wait(self, device: int) -> bool:
        """Whether streams can wait for words here."""

    @abc.abstractmethod
    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Device to pinned host memory, in stream order."""

    @abc.abstractmethod
    def capture_id(self, stream: int) -> int:
        """A number of the graph that is being captured on the stream."""

    @abc.abstractmethod
    def leave_captures_alone(self) -> None:
        """From now on this thread's calls do not spoil a graph that another thread is capturing."""


class _Library:
    """Functions of a C library, found once; each result is checked.

    Args:
        name: Of the file.
        signatures: Function -> types of its arguments.
        error_text: Gives the words for a code.
    """

    def __init__(
        self, name: str, signatures: Mapping[str, Sequence[Any]], error_text: Callable[[Any, int], str]
    ) -> None:
        self._library, self._error_text = ctypes.CDLL(name), error_text
        self._functions: dict[str, Any] = {}
        for function, types in signatures.items():
            found = getattr(self._library, function)
            found.argtypes, found.restype = types, ctypes.c_int
            self._functions[function] = found

    def function(self, name: str) -> Callable[..., None]:
        """Calls it, and raises where it fails."""
        call = self._functions[name]

        def checked(*arguments: Any) -> None:
            if code := call(*arguments):
                raise UnsupportedError(
                    f"transport sdma: {name} failed: {self._error_text(self._library, code)} (error {code}). "
                    "Set 'transport: process_group'."
                )

        return checked


class _Cuda(DeviceApi):
    name = "CUDA driver"
    copy_detail = "cuMemcpyDtoDAsync"
    signal_by = (
        "write"  # 3 us of the host where a copy takes 7 (H200 host); fenced system-wide, says the driver's manual
    )
    _CAN_USE_STREAM_MEM_OPS = 92  # CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1; from CUDA 12 on everywhere

    def __init__(self) -> None:
        u64, u32, size, void = ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
        self._handle = _handle_type()
        p = ctypes.POINTER
        signatures: dict[str, list[Any]] = {
            "cuMemAlloc_v2": [p(u64), size],
            "cuMemFree_v2": [u64],
            "cuMemsetD8_v2": [u64, ctypes.c_ubyte, size],
            "cuIpcGetMemHandle": [p(self._handle), u64],
            "cuIpcOpenMemHandle_v2": [p(u64), self._handle, u32],
            "cuIpcCloseMemHandle": [u64],
            "cuMemcpyDtoDAsync_v2": [u64, u64, size, void],
            "cuMemcpyDtoHAsync_v2": [void, u64, size, void],
            "cuStreamWaitValue32_v2": [void, u64, ctypes.c_uint32, u32],
            "cuStreamWriteValue32_v2": [void, u64, ctypes.c_uint32, u32],
            "cuDeviceGetAttribute": [p(ctypes.c_int), ctypes.c_int, ctypes.c_int],
            "cuStreamGetCaptureInfo_v2": [void, p(ctypes.c_int), p(u64), void, void, void],
            "cuThreadExchangeStreamCaptureMode": [p(ctypes.c_int)],
        }
        library = _Library("libcuda.so.1", signatures, _cuda_error)
        self._call = lambda function, *arguments: library.function(function)(*arguments)
        self._copy = library.function("cuMemcpyDtoDAsync_v2")
        self._wait = library.function("cuStreamWaitValue32_v2")
        self._write = library.function("cuStreamWriteValue32_v2")

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        self._call("cuMemsetD8_v2", address.value, 0, nbytes)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def share(self, address: int) -> bytes:
        handle = self._handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_shared(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), self._handle.from_buffer_copy(handle), 1)
        return address.value

    def close_shared(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(target, source, nbytes, stream)

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        self._wait(stream, address, value, 0)  # CU_STREAM_WAIT_VALUE_GEQ

    def write(self, stream: int, address: int, value: int) -> None:
        self._write(stream, address, value, 0)

    def poke(self, target: int, source: int, stream: int) -> None:
        self.write(stream, target, 1)  # a copy within the device would be a kernel

    def can_wait(self, device: int) -> bool:
        if int((torch.version.cuda or "0").split(".")[0]) >= 12:
            return True
        answer = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(answer), self._CAN_USE_STREAM_MEM_OPS, device)
        return bool(answer.value)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target, source, nbytes, stream)

    def capture_id(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._call("cuStreamGetCaptureInfo_v2", stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
        return number.value if status.value else 0

    def leave_captures_alone(self) -> None:
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))


class _Hip(DeviceApi):
    name = "HIP runtime"
    copy_detail = "hipMemcpyAsync(hipMemcpyDeviceToDeviceNoCU)"
    signal_by = "copy"  # a write-value operation is a kernel
    _CAN_WAIT = 10013  # hipDeviceAttributeCanUseStreamWaitValue
    _DEVICE_TO_DEVICE_NO_CU = 1024
    _DEVICE_TO_HOST = 2

    def __init__(self) -> None:
        void, u32, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
        self._handle = _handle_type()
        p = ctypes.POINTER
        signatures: dict[str, list[Any]] = {
            "hipExtMallocWithFlags": [p(void), size, u32],
            "hipFree": [void],
            "hipMemset": [void, ctypes.c_int, size],
            "hipIpcGetMemHandle": [p(self._handle), void],
            "hipIpcOpenMemHandle": [p(void), self._handle, u32],
            "hipIpcCloseMemHandle": [void],
            "hipMemcpyAsync": [void, void, size, ctypes.c_int, void],
            "hipStreamWaitValue32": [void, void, ctypes.c_uint32, u32, ctypes.c_uint32],
            "hipStreamWriteValue32": [void, void, ctypes.c_uint32, u32],
            "hipDeviceGetAttribute": [p(ctypes.c_int), ctypes.c_int, ctypes.c_int],
            "hipStreamGetCaptureInfo": [void, p(ctypes.c_int), p(ctypes.c_uint64)],
            "hipThreadExchangeStreamCaptureMode": [p(ctypes.c_int)],
        }
        library = _Library("libamdhip64.so", signatures, _hip_error)
        self._call = lambda function, *arguments: library.function(function)(*arguments)
        self._copy = library.function("hipMemcpyAsync")
        self._wait = library.function("hipStreamWaitValue32")
        self._write = library.function("hipStreamWriteValue32")

    def allocate(self, nbytes: int) -> int:
        """Fine-grained (hipDeviceMallocFinegrained), so that what a peer's engine writes is seen whatever a cache holds.

        TODO(#5): GEMMs read operands from here. Measure on an AMD GPU whether coarse-grained slots are faster and still coherent
        at kernel boundaries; flags must stay fine-grained.
        """
        address = ctypes.c_void_p()
        self._call("hipExtMallocWithFlags", ctypes.byref(address), nbytes, 1)
        self._call("hipMemset", address, 0, nbytes)
        return address.value or 0

    def free(self, address: int) -> None:
        self._call("hipFree", address)

    def share(self, address: int) -> bytes:
        handle = self._handle()
        self._call("hipIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open_shared(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        self._call("hipIpcOpenMemHandle", ctypes.byref(address), self._handle.from_buffer_copy(handle), 1)
        return address.value or 0

    def close_shared(self, address: int) -> None:
        self._call("hipIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(target, source, nbytes, self._DEVICE_TO_DEVICE_NO_CU, stream)

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        self._wait(stream, address, value, 0, 0xFFFFFFFF)  # hipStreamWaitValueGte

    def write(self, stream: int, address: int, value: int) -> None:
        self._write(stream, address, value, 0)

    def poke(self, target: int, source: int, stream: int) -> None:
        self.copy(target, source, 4, stream)  # where write-value operations are kernels

    def can_wait(self, device: int) -> bool:
        answer = ctypes.c_int()
        self._call("hipDeviceGetAttribute", ctypes.byref(answer), self._CAN_WAIT, device)
        return bool(answer.value)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(target, source, nbytes, self._DEVICE_TO_HOST, stream)

    def capture_id(self, stream: int) -> int:
        status, number = ctypes.c_int(), ctypes.c_uint64()
        self._call("hipStreamGetCaptureInfo", stream, ctypes.byref(status), ctypes.byref(number))
        return number.value if status.value else 0

    def leave_captures_alone(self) -> None:
        self._call("hipThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))


def _handle_type() -> Any:
    return type("IpcHandle", (ctypes.Structure,), {"_fields_": [("reserved", ctypes.c_char * _HANDLE_BYTES)]})


def _cuda_error(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown").decode()


def _hip_error(library: Any, code: int) -> str:
    library.hipGetErrorString.restype = ctypes.c_char_p
    return (library.hipGetErrorString(code) or b"unknown").decode()


@functools.cache
def device_api() -> DeviceApi:
    """That of the torch build at hand.

    Raises:
        UnsupportedError: The driver's library cannot be loaded, or lacks a function.
    """
    kind = _Hip if torch.version.hip else _Cuda
    try:
        return kind()
    except (OSError, AttributeError) as error:
        raise UnsupportedError(
            f"transport sdma: the {kind.name} cannot be used here ({error}). Install the GPU's driver, or set "
            "'transport: process_group'."
        ) from error


class _Raw:
    """Device memory as torch imports it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def current_stream_handle(device: torch.device) -> int:
    """That of the device's current stream; some twenty times quicker than asking for the stream itself."""
    return int(torch._C._cuda_getCurrentRawStream(device.index or 0))


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] over memory that torch does not own."""
    return torch.as_tensor(_Raw(address, nbytes), device=device)
