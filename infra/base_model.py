"""The frozen base model: where it lies, what its digest is, whether we can train and serve it, its tokenizer."""

import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from infra import devices, processes, program_environment, progress
from infra.digests import sha256_of
from infra.files import read_json, write_json
from infra.progress import Work
from infra.records import BaseModelRef
from infra.samples import Tokens
from infra.settings import settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

OURS = ("tiny", "tiny-moe", "small")
SUPPORTED = {
    "LlamaForCausalLM": "Llama 3, 3.1",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
}
DIGESTED = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*", "*.jinja", "vocab.json", "merges.txt")
MAKE_TINY_TIMEOUT_S = 1800


def locate(model: str) -> Path:
    """The Hugging Face folder of a model; one of ours is made and a hub model is downloaded where it is missing.

    Raises:
        ValueError: if it is neither a folder, nor one of ours, nor to be had from the hub.
    """
    if model in OURS:
        return _ours(model)
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser().absolute()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model {model!r} is no folder; give a Hugging Face folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or {OURS}"
        )
    return _from_hub(model)


def _ours(kind: str) -> Path:
    folder = settings().workspace / "models" / kind
    if not (folder / "config.json").exists():
        if kind == "small" and not devices.num_gpus():
            raise ValueError("model 'small' has 83 million parameters and is made on a GPU; there is none here: take 'tiny'")
        log.info("making the model %s in %s (once, a minute or two)", kind, folder)
        device = "cuda" if kind == "small" else "cpu"
        with progress.work(f"making the model {kind}") as work:
            processes.run(
                [sys.executable, "-m", "infra.tiny_model", str(folder), "--kind", kind, "--device", device],
                settings().workspace / "logs" / f"make-{kind}.log",
                timeout_s=MAKE_TINY_TIMEOUT_S,
                env={"OMP_WAIT_POLICY": "PASSIVE"},  # threads that spin on shared cores cost more than they gain
                on_line=lambda line: _note(work, line),
                inherits=program_environment.passed_on(),
            )
    return folder


def _note(work: Work, line: str) -> None:
    work.note = line
    log.info("%s: %s", work.what, line)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        with progress.work(f"fetching the model {model}", has_bar=True):
            return Path(snapshot_download(model, allow_patterns=list(DIGESTED)))
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {model!r} is neither a folder here nor to be had from the hub: {str(error).splitlines()[0]}"
        ) from error


def check_supported(folder: Path) -> None:
    """Raises ValueError for a folder that holds no causal language model that we can train; lists those that we can."""
    known = ", ".join(f"{architecture} ({name})" for architecture, name in SUPPORTED.items())
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json; supported are {known}")
    found = read_json(folder / "config.json").get("architectures") or []
    if not set(found) & set(SUPPORTED):
        raise ValueError(f"model folder {folder} holds {', '.join(found) or 'no architecture'}; supported are {known}")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"model folder {folder} has no *.safetensors")


def num_positions(folder: Path) -> int:
    """The longest context that the model was made for, in tokens."""
    return int(read_json(folder / "config.json")["max_position_embeddings"])


def reference(model: str) -> BaseModelRef:
    return BaseModelRef(id=model, sha256=digest(locate(model)))


def digest(folder: Path) -> str:
    """SHA-256 over names and digests of the model's files. Digests of unchanged files are remembered by size and time."""
    memory = settings().workspace / "models" / "digests.json"
    known: dict[str, str] = read_json(memory) if memory.exists() else {}
    files = sorted({path for pattern in DIGESTED for path in folder.glob(pattern)})
    remembered = {_identity(path): path for path in files}
    fresh = {identity: known.get(identity) or sha256_of(path) for identity, path in remembered.items()}
    if not fresh.keys() <= known.keys():
        write_json(memory, known | fresh)
    lines = (f"{path.name} {fresh[identity]}\n" for identity, path in remembered.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _identity(path: Path) -> str:
    status = os.stat(path)
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


@cache
def tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder))
    return loaded


def texts_of(folder: Path, outputs: Sequence[Tokens]) -> list[str]:
    """Token ids as text, without special tokens.

    The tokenizer's own `batch_decode` goes through them one after the other and copies them first; below it is a library that takes a
    thread for each core. Tokenizers that tidy up what it gives, or are not made of it, are asked themselves.
    """
    asked = tokenizer(folder)
    if not asked.is_fast or asked.clean_up_tokenization_spaces:
        return list(asked.batch_decode(outputs, skip_special_tokens=True))
    texts: list[str] = asked.backend_tokenizer.decode_batch(outputs, skip_special_tokens=True)
    return texts


def stop_token_ids(folder: Path) -> list[int]:
    """Ids that end a completion: of the tokenizer and of generation_config.json."""
    ids = {tokenizer(folder).eos_token_id}
    if (folder / "generation_config.json").exists():
        found = read_json(folder / "generation_config.json").get("eos_token_id")
        ids.update(found if isinstance(found, list) else [found])
    return sorted(int(token) for token in ids if token is not None)
