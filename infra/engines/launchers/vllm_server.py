"""Launch vLLM with its API key from a file: `RATCHET_API_KEY_FILE=... python vllm_server.py serve <flags of vllm serve>`.

Runs in vLLM's own environment and imports nothing of ours. According to the source of 0.26.0 (vllm/entrypoints), `--api-key` is logged
with the other arguments (serve/utils/api_utils.py), and VLLM_API_KEY is inherited by every process. The key guards only /v1 and /inference
(GUARDED_PREFIX in serve/utils/server_utils.py). Sleep, wake_up, the metrics and collective_rpc, which runs any method of the workers,
would be open to everyone who can reach the port.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
EVERYTHING = ("/",)


def load(name: str) -> Any:
    """Load a file of this folder by path, because the folder must not be on the import path."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_key(validate: Callable[[Any], None], key: str) -> Callable[[Any], None]:
    """Wrap vLLM's check of its arguments so that it adds the key to them."""

    def validated(args: Any) -> None:
        validate(args)
        args.api_key = [key]

    return validated


# A script's own folder comes first in sys.path: `import megatron` in vLLM's environment would find ours.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != HERE]

if __name__ == "__main__":
    from vllm.entrypoints.cli import main as cli
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.serve.utils import server_utils

    assert server_utils.GUARDED_PREFIX, "this vLLM guards its paths in another way"
    server_utils.GUARDED_PREFIX = EVERYTHING
    serve.validate_parsed_serve_args = with_key(serve.validate_parsed_serve_args, load("api_key").key())
    cli.main()
