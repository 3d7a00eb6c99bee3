"""Make a tiny model: `python -m infra.tiny_model OUT_DIR [--kind tiny|tiny-moe|small] [--seed 0] [--threads 2] [--device cpu]`.

`small` is for a GPU (`--device cuda`): on a CPU it would take hours. The same seed and number of threads give the same weights on the same machine.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import get_args

import torch
from transformers.utils import logging as transformers_log

from infra.tiny_model.architecture import Kind
from infra.tiny_model.making import WarmStartFailed, make_model


def main() -> int:
    arguments = _parse()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("infra").setLevel(logging.INFO)
    transformers_log.disable_progress_bar()  # each of its states would be a line in the log of who makes the model
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True, warn_only=arguments.device != "cpu")
    try:
        make_model(arguments.folder, arguments.kind, seed=arguments.seed, device=arguments.device)
    except (ValueError, WarmStartFailed) as error:
        print(f"tiny_model: {error}", file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m infra.tiny_model", description="Make a tiny model in Hugging Face layout.")
    parser.add_argument("folder", metavar="OUT_DIR", type=Path)
    parser.add_argument("--kind", choices=get_args(Kind), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
