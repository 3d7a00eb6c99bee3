"""What megatron-core takes for granted of CUDA, answered for a rank that works on the CPU. Changes no number.

megatron-core writes `torch.cuda.current_device()` where it means "this rank's device". Each entry was met in 0.16.1.
"""

import contextlib
from collections.abc import Iterator

import torch


def install() -> None:
    """Call once, before the model is built, in a process that computes on the CPU; never in one that uses CUDA."""
    cpu = torch.device("cpu")
    # rotary embeddings, collectives under sequence parallelism, router: torch takes a device where they expect an index.
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment, return-value]  # the point of this module
    torch.cuda.synchronize = lambda device=None: None  # nothing to wait for
    _replace_random_states()
    _replace_dispatcher()


def repair_mixture_of_experts() -> None:
    """megatron-core 0.16.1 without Transformer Engine dies on a missing name in the router, on any device."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


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


def _replace_dispatcher() -> None:
    """The all-to-all of experts copies its split sizes on a side stream; here they only have to leave their tensors."""
    from megatron.core.transformer.moe import moe_layer, token_dispatcher

    class CpuAllToAll(token_dispatcher.MoEAlltoAllTokenDispatcher):  # type: ignore[misc]  # megatron-core has no types
        def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
            if point == self.cuda_dtoh_point:
                for name in ("input_splits", "output_splits", "output_splits_tp"):
                    if torch.is_tensor(splits := getattr(self, name)):
                        setattr(self, name, splits.numpy())
            return tokens_per_expert

    # Not None, or the constructor makes a CUDA stream. It asks the parent class.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
    moe_layer.MoEAlltoAllTokenDispatcher = CpuAllToAll
