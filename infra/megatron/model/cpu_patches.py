"""Patches for parts of megatron-core that assume CUDA, for a rank on a CPU. They do not change any number.

megatron-core uses `torch.cuda.current_device()` for "this rank's device". Each patch was needed with 0.16.1.
"""

import contextlib
from collections.abc import Iterator

import torch


def install() -> None:
    """Install the patches. Call once, before the model is built, in a process on a CPU; never in one that uses CUDA."""
    cpu = torch.device("cpu")
    # rotary embeddings, collectives under sequence parallelism: torch takes a device where they expect an index.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]  # the point of this module
    torch.cuda.synchronize = lambda device=None: None  # nothing to wait for
    _replace_random_states()


def _replace_random_states() -> None:
    """Dropout is off in this trainer, so the trackers of device random states have nothing to track."""
    from megatron.core.tensor_parallel import random

    class NoRandomStates(random.CudaRNGStatesTracker):  # type: ignore[misc]  # megatron-core has no types
        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            yield

    random._CUDA_RNG_STATE_TRACKER = NoRandomStates()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Recomputation saves and restores them.
    random._get_cuda_rng_state = lambda *args, **kwargs: None
    random._set_cuda_rng_state = lambda *args, **kwargs: None
