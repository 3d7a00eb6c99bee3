"""Map memory of another process's GPU program and read it: `python map_probe.py DEVICE HANDLE OFFSET`, with sglang_shared_experts.py as the other.

Writes the first eight bytes there as a number, or ends with one line that says which call of CUDA's driver failed. It takes a context of its
own (some 0.5 GB of the GPU) for a moment. Standard library only: importing torch would take seconds of an engine's start.
"""

import ctypes
import sys

HANDLE_BYTES = 64
AT_FIRST_USE = 1


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def call(function: str, *arguments: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        sys.exit(f"{function} gives CUDA's error {code}")


def main(number: int, handle: bytes, offset: int) -> None:
    device, context, address, value = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), number)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(handle), ctypes.c_uint(AT_FIRST_USE))
    call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(address.value + offset), ctypes.c_size_t(8))
    print(value.value)


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
