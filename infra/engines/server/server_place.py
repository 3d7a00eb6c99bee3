"""Where an engine's server runs: its machine, which may be a node of a cluster, with its address, port and GPUs there."""

import logging
from contextlib import AbstractContextManager, nullcontext

from infra.cluster import connection
from infra.cluster.nodes import Node, Slot
from infra.colocation import confirm_memory
from infra.config import EngineConfig
from infra.machine import devices, nvml, ports
from infra.settings import Settings

log = logging.getLogger(__name__)

PORTS_OF_A_SERVER = 10
"""Distance between the first choices of a cluster's servers, which may be launched at the same time; nodes may share an address."""


class ServerPlace:
    def __init__(self, config: EngineConfig, machine: Settings, replica: int) -> None:
        self.config, self.machine, self.replica = config, machine, replica

    @property
    def slot(self) -> Slot:
        """Where it runs, or will run. Raises NoNodeForEngine if no node has room for it."""
        return connection.place(self.replica, self.config.tensor_parallel)

    @property
    def gpus(self) -> list[int]:
        """NVML's numbers of its GPUs on its machine, of the first of its nodes if it is spread; empty on a CPU."""
        return self.gpus_of(0)

    def gpus_of(self, rank: int) -> list[int]:
        """NVML's numbers of its GPUs on the node of this rank."""
        parts = self.slot.parts
        node, number, _ = parts[rank]
        return node.call(devices.engine_gpus, self.config.tensor_parallel // len(parts), number)

    @property
    def address_of_all(self) -> tuple[str, ...]:
        """Flags with the address on which the servers of all replicas listen; none on a cluster, where it differs by node."""
        return () if connection.is_set() else ("--host", self.machine.host)

    @property
    def address(self) -> tuple[str, ...]:
        """Flags with the address on which this server alone listens: on a cluster that of its node."""
        return ("--host", self.slot.node.address) if connection.is_set() else ()

    def reserved_port(self) -> AbstractContextManager[int]:
        node = self.slot.node
        if not node.key:
            return ports.reserved(self.machine.engine_port + max(self.replica, 0), self.machine.host)
        return nullcontext(
            node.call(ports.free_port, self.machine.engine_port + PORTS_OF_A_SERVER * max(self.replica, 0), node.address)
        )

    def visible_gpus(self, rank: int = 0) -> dict[str, str]:
        """Return the variables that show the server its GPUs on the node of this rank: all of the engine's if it has no other replica."""
        is_one_of_several = connection.is_set() or devices.num_replicas(self.config) > 1
        gpus = self.gpus_of(rank) if is_one_of_several else self.machine.engine_gpus
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}

    def check_room(self) -> None:
        """Check before a launch that the trainer is off the GPUs of each node, and that their free memory is equal, as reported by NVML."""
        for rank, part in enumerate(self.slot.parts):
            self._check_room(part.node, self.gpus_of(rank))

    def _check_room(self, node: Node, gpus: list[int]) -> None:
        total = {gpu.number: gpu.total_bytes for gpu in node.call(nvml.read).gpus if gpu.number in gpus}
        needed = {index: int(self.config.memory_fraction * size) for index, size in total.items()}
        node.call(confirm_memory.wait_for_room, needed, what="the engine's launch", timeout_s=confirm_memory.ROOM_DEADLINE_S)
        if unequal := confirm_memory.check_equal_memory(node.call(nvml.read), gpus, is_allowed=self.config.allow_unequal_memory):
            log.warning("%s; allowed by engine.allow_unequal_memory", unequal)
