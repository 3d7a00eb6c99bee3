"""The experts of a mixture whose trainer computes with the engine's copy: with trainer.share_experts nothing of them moves between the two.

job with shared_experts:    the engine's memory is mapped, and once compared with the model's files, value by value
job without (engine ended): the program reads a copy of its own from the files

What a job computes is the same, to the bit. It never computes with memory of an engine that has ended, or with values that changed: sums of all
experts are taken when they were compared, and must be the same before each job and after its last backward pass.

Between two jobs nothing is mapped: memory that another program maps may stay taken after its engine has ended, and then the next engine finds no
room. On a GPU the mapping is CUDA's inter-process memory (cuIpcOpenMemHandle of the driver's API).
"""

import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from infra.megatron.model import base_weights
from infra.megatron.model.parallel import ParallelContext
from infra.megatron.protocol import shared_experts
from infra.megatron.protocol.shared_experts import SharedExperts, Stack
from infra.models.architecture import Architecture

log = logging.getLogger(__name__)

ENGINE_NAMES = {"gate_up": "w13_weight", "down": "w2_weight"}
HANDLE_BYTES = 64
ADVICE = "Set trainer.share_experts to false"


class UnusableExperts(ValueError):
    """The engine's experts cannot be mapped here."""


class ExpertsChanged(UnusableExperts):
    """The engine's experts are not those of the model's files."""


class EngineEnded(RuntimeError):
    """The engine ended while its experts were in use."""


class ExpertWeights:
    """Memory of the experts of a model that was built without it."""

    def __init__(self, net: nn.Module, folder: Path, a: Architecture, layout: ParallelContext) -> None:
        """net: The model; its experts have no elements yet. folder: The base model's."""
        assert a.experts
        self.folder, self.a, self.layout = folder, a, layout
        self.parameters = {name: parameter for name, parameter in net.named_parameters() if ".experts." in name}
        count, hidden, ffn = a.experts.count, a.hidden_size, a.experts.ffn_size
        self.shapes = {"gate_up": (count, 2 * ffn, hidden), "down": (count, hidden, ffn)}
        self.lender: SharedExperts | None = None
        """Whose memory is mapped."""
        self.compared: SharedExperts | None = None
        """Whose memory was compared with the files."""
        self.sums: dict[str, Tensor] = {}
        """Of what was compared."""
        self.opened: list[int] = []

    @torch.no_grad()
    def attach(self, path: Path | None) -> None:
        """Give the experts their memory, for one job.

        path: The engine's file; None: memory of their own.

        Raises:
            UnusableExperts: if they cannot be mapped here.
            ExpertsChanged: if the engine has other values than the files.
            EngineEnded: if it ends meanwhile.
        """
        lender = shared_experts.of_living_engine(path) if path else None
        if path and lender is None:
            raise EngineEnded(f"the engine whose experts {path} names has ended")
        self.release()
        if lender is None or path is None:
            self._read()
            return
        self.map(lender, path.parent)
        if lender == self.compared:
            self.check()
        else:
            self._compare(lender)

    def check(self) -> None:
        """Check that the mapped memory is the engine's, and holds what was compared. Nothing for a copy of our own.

        Raises:
            ExpertsChanged, EngineEnded
        """
        if self.lender is None:
            return
        changed = [name for name, parameter in self.parameters.items() if not torch.equal(sums_of(parameter), self.sums[name])]
        if not self.lender.is_held():  # then the sums say nothing
            raise EngineEnded(f"the engine's process {self.lender.process.pid} ended while its experts were in use")
        if changed:
            raise ExpertsChanged(
                f"{changed[0]} changed in the engine's memory since it was compared with {self.folder}: nothing was made of this step. "
                "End the engine with `ratchet down`, and run again"
            )

    def release(self) -> None:
        """Leave the engine's memory, or free our own copy."""
        if self.opened:
            torch.cuda.synchronize()  # no kernel may still read what is closed
        for parameter in self.parameters.values():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.lender = None
        for address in self.opened:
            try:
                _driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            except UnusableExperts as error:  # its engine may have ended; the step that was made is whole
                log.warning("%s", error)
        self.opened = []

    def _read(self) -> None:
        log.info("experts: read from %s", self.folder)
        for name, parameter in self.parameters.items():
            parameter.data = torch.empty(self._shape(name), dtype=parameter.dtype, device=parameter.device)
        base_weights.load(self.parameters, self.folder, self.a, self.layout)

    def map(self, lender: SharedExperts, folder: Path) -> None:
        """Map the memory of a living engine. Its values are not looked at.

        folder: Of the engine's file.

        Raises:
            UnusableExperts, ExpertsChanged, EngineEnded
        """
        bases: dict[str, int] = {}
        for name, parameter in self.parameters.items():
            stack = lender.stacks.get(engine_name(name))
            asked = (self._shape(name), str(parameter.dtype).removeprefix("torch."))
            if stack is None or (stack.shape, stack.dtype) != asked:
                found = f"{stack.dtype} {list(stack.shape)}" if stack else "none"
                raise ExpertsChanged(
                    f"{engine_name(name)} of the engine is {found}, the trainer needs {asked[1]} {list(asked[0])}"
                )
            try:
                parameter.data = self._mapped(stack, folder, parameter, bases)
            except UnusableExperts:
                if lender.is_held():
                    raise
                raise EngineEnded(f"the engine's process {lender.process.pid} ended before its experts were mapped") from None
        self.lender = lender

    def _compare(self, lender: SharedExperts) -> None:
        if other := base_weights.differing(self.parameters, self.folder, self.a, self.layout):
            self.release()
            raise ExpertsChanged(
                f"{other} of the engine's memory differs from {self.folder}: the engine serves other weights. End it with `ratchet down`"
            )
        self.sums = {name: sums_of(parameter) for name, parameter in self.parameters.items()}
        self.compared = lender
        log.info("experts: those of the engine's process %d, equal to the files in %s", lender.process.pid, self.folder)

    def _mapped(self, stack: Stack, folder: Path, parameter: Tensor, bases: dict[str, int]) -> Tensor:
        if stack.file:
            size = stack.shape[0] * stack.shape[1] * stack.shape[2]
            return torch.from_file(str(folder / stack.file), shared=True, size=size, dtype=parameter.dtype).view(stack.shape)
        if stack.handle not in bases:
            bases[stack.handle] = _opened(bytes.fromhex(stack.handle))
            self.opened.append(bases[stack.handle])
        return _at(bases[stack.handle] + stack.offset, stack.shape, parameter)

    def _shape(self, name: str) -> tuple[int, int, int]:
        return self.shapes[name.rsplit(".", 1)[1]]


def engine_name(name: str) -> str:
    """`decoder.layers.N.mlp.experts.gate_up` -> SGLang's name of the same parameter."""
    _, _, layer, _, _, stack = name.split(".")
    return f"model.layers.{layer}.mlp.experts.{ENGINE_NAMES[stack]}"


# Perf: 57 GB are read once, in tens of ms on a GPU; a cryptographic digest of them takes half a minute.
def sums_of(stack: Tensor) -> Tensor:
    """[E, ...] -> [E] int64: of each expert the sum of its bytes as 64-bit integers, modulo 2^64. One changed value changes its expert's sum."""
    return stack.detach().view(torch.int64).flatten(1).sum(1)


def _opened(handle: bytes) -> int:
    """Map an allocation of another process. Returns its address here."""
    address = ctypes.c_uint64()
    torch.cuda.synchronize()  # makes torch's context the current one
    at_first_use = 1
    _driver("cuIpcOpenMemHandle_v2", ctypes.byref(address), (_Handle).from_buffer_copy(handle), ctypes.c_uint(at_first_use))
    return address.value


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Memory:
    """Memory of a GPU by its address, as torch.as_tensor takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: Mapping[str, object] = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _at(address: int, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    num_bytes = shape[0] * shape[1] * shape[2] * like.element_size()
    mapped = torch.as_tensor(_Memory(address, num_bytes), device=like.device)
    if mapped.data_ptr() != address:  # torch copies what lies on another GPU
        raise UnusableExperts(f"the engine's experts lie on another GPU than the trainer's, {like.device}. {ADVICE}")
    return mapped.view(like.dtype).view(shape)


def _driver(function: str, *arguments: object) -> None:
    if code := getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments):
        raise UnusableExperts(
            f"the engine's experts cannot be shared on this GPU: {function} gives CUDA's error {code}. {ADVICE}"
        )
