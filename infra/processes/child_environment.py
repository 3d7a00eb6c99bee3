"""The environment variables passed to programs that load models or run on GPUs (engine, trainer, merge, model maker), and to rewards.

An allow-list: a secret that is not in our lists (AWS_SECRET_ACCESS_KEY, OPENAI_API_KEY) does not reach them.
"""

import os
import re
from collections.abc import Sequence

from infra.settings import SECRETS, settings

NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TMP", "TEMP"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "CUDAHOSTCXX", "CONDA_PREFIX", "VIRTUAL_ENV"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE", "PYTHONWARNINGS"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"),
    )
)
PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "NVSHMEM_", "NCCL_", "GLOO_", "UCX_", "FI_", "GPU_", "NV_"),
    *("TORCH", "PYTORCH_", "TRITON_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "FLASHINFER_", "TVM_"),
    *("SGLANG_", "SGL_", "VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "RATCHET_"),
)
SECRET_WORDS = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|AUTH|CREDENTIALS?)(_|$)")
"""A name with such a word is left out even if its prefix is allowed, such as HF_TOKEN."""

SWITCHES = {"sglang": ("SGLANG_", "SGL_", "FLASHINFER_"), "vllm": ("VLLM_", "FLASHINFER_"), "trainer": ("NVTE_",)}
SWITCHES_OF_ALL = ("TORCH", "PYTORCH_", "TRITON_", "CUBLAS_", "CUDNN_", "MKL_", "NVIDIA_TF32_OVERRIDE")
NO_SWITCH = re.compile(
    r"(^|_)(CACHE|DIR|PATH|HOME|ROOT|BASE|LOGS?|LOGGING|LEVEL|DEBUG|VERBOSE|HOST|PORT|ADDR|IFNAME|TIMEOUT|THREADS|ALLOC|NCCL|STATS)(_|$)"
    r"|^TORCHELASTIC_"
)
"""A name with such a word says where files lie, what is logged, how programs meet or how much memory is taken: nothing that decides a number."""

OF_REWARDS = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH"),
        *("CONDA_PREFIX", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE"),
        *("XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES"),
    )
)
"""What a user's reward gets without being named. CUDA_VISIBLE_DEVICES takes GPUs away, it gives none."""


def of_rewards(names: Sequence[str]) -> dict[str, str]:
    """Return the environment of reward workers: names are those of reward.environment.

    Raises:
        ValueError: for a variable that is not set.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise ValueError(
            f"reward.environment names {missing[0]!r}, which is not set where the flow runs: set it there, or leave it out of the list"
        )
    return {name: value for name, value in os.environ.items() if name in OF_REWARDS or name.startswith("LC_") or name in names}


def passed_on() -> dict[str, str]:
    """Return the variables that such a program gets. RATCHET_PASS_ENVIRONMENT names further ones."""
    named = frozenset(settings().pass_environment)
    return {name: value for name, value in os.environ.items() if name in named or _is_allowed(name)}


def switches(*programs: str) -> dict[str, str]:
    """Return those of the variables passed on by which a library of the programs may compute something else, such as SGLANG_... or
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. They count as versions.

    programs: Keys of SWITCHES; none: all of them.
    """
    prefixes = (*SWITCHES_OF_ALL, *(prefix for program in programs or SWITCHES for prefix in SWITCHES[program]))
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes) and not NO_SWITCH.search(name)}
    return {name: value for name, value in found.items() if _is_allowed(name)}


def _is_allowed(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and name not in SECRETS and not SECRET_WORDS.search(name)
