"""The frozen base model: where it lies, what its digest is, whether we can train and serve it, its tokenizer."""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.machine import devices
from infra.models import fast_tokenizer, hub
from infra.processes import child_environment, children
from infra.progress import work as progress
from infra.progress.brief import brief
from infra.progress.work import Work
from infra.records import BaseModelRef, Record
from infra.store.digests import LARGE_BYTES, Stamp, sha256_in, sha256_of, stamp_of
from infra.store.files import only_maker, read_json, read_note, write_note
from infra.store.layout import Workspace
from infra.store.samples import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from infra.models.fast_tokenizer import FastTokenizer

log = logging.getLogger(__name__)

OURS = ("tiny", "tiny-moe", "small")
SUPPORTED = {
    "LlamaForCausalLM": "Llama 3, 3.1",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
}
NOT_DIGESTED = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "README*", ".*", "original/*", "onnx/*")
"""Names of files that nothing here loads: other formats of the weights, and what people read. All other files of a model are digested."""
OBJECTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
"""Files besides config.json that must hold a JSON object where they are there."""
READ_AGAIN_S = 24 * 3600.0
"""A digest that is remembered from an earlier process counts for so long; after that the file is read again."""
MAKE_TINY_TIMEOUT_S = 1800


def locate(model: str, revision: str | None = None) -> Path:
    """The Hugging Face folder of a model; one of ours is made and a hub model is downloaded where it is missing.

    revision: Commit, branch or tag of a hub model. None: its main branch.

    Raises:
        ValueError: if it is neither a folder, nor one of ours, nor to be had from the hub.
    """
    if model in OURS:
        return _ours(model)
    if model and os.path.isdir(path := os.path.expanduser(model)):
        return Path(path).absolute()
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ValueError(
            f"model {model!r} is no folder; give a Hugging Face folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or one of {', '.join(OURS)}"
        )
    return _from_hub(model, revision)


def must_be_made(model: str) -> bool:
    """Whether `locate` would make this model of ours first, which takes minutes."""
    return model in OURS and not (Workspace.here().models / model / "config.json").exists()


def public_name(model: str) -> str:
    """Return what other libraries, such as PEFT, load a model by: its hub id, or its folder on this machine."""
    return model if _is_hub_id(model) else str(locate(model))


def lasting_name(base: BaseModelRef) -> str:
    """Return a name that is the same on every machine: the hub id, or the digest of what was given as a folder."""
    return base.id if _is_hub_id(base.id) else f"sha256:{base.sha256}"


def _is_hub_id(model: str) -> bool:
    return model not in OURS and not os.path.isdir(os.path.expanduser(model)) and model.count("/") == 1


def _ours(kind: str) -> Path:
    folder = Workspace.here().models / kind
    if not must_be_made(kind):
        return folder
    if kind == "small" and not devices.num_gpus():
        raise ValueError("model 'small' has 83 million parameters and is made on a GPU; there is none here: take 'tiny'")
    with only_maker(folder):
        if must_be_made(kind):
            _make(kind, folder)
    return folder


def _make(kind: str, folder: Path) -> None:
    device = "cuda" if kind == "small" else "cpu"
    brief.info("making the model %s in %s (once, a minute or two)", kind, folder)
    with progress.work(f"making the model {kind}") as work:
        children.run(
            [sys.executable, "-m", "infra.tiny_model", str(folder), "--kind", kind, "--device", device],
            Workspace.here().logs / f"make-{kind}.log",
            timeout_s=MAKE_TINY_TIMEOUT_S,
            env={"OMP_WAIT_POLICY": "PASSIVE"},  # threads that spin on shared cores cost more than they gain
            on_line=lambda line: _note(work, line),
            inherits=child_environment.passed_on(),
        )


def _note(work: Work, line: str) -> None:
    work.note = line
    log.info("%s: %s", work.what, line)


def _from_hub(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if trouble := hub.trouble():
        try:
            return Path(snapshot_download(model, revision=revision, ignore_patterns=list(NOT_DIGESTED), local_files_only=True))
        except LocalEntryNotFoundError as error:
            raise ValueError(
                f"model {model!r} is no folder here, no earlier download of it is here, and {trouble}: give a folder, or try again with a network"
            ) from error
    try:
        with progress.work(f"fetching the model {model}", has_bar=True):
            return Path(snapshot_download(model, revision=revision, ignore_patterns=list(NOT_DIGESTED)))
    except (RepositoryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"model {model!r} is neither a folder here nor to be had from the hub: {str(error).splitlines()[0]}"
        ) from error


def check_supported(folder: Path) -> None:
    """Raises ValueError for a folder that holds no causal language model that we can train; lists those that we can."""
    known = ", ".join(f"{architecture} ({name})" for architecture, name in SUPPORTED.items())
    if not (folder / "config.json").is_file():
        raise ValueError(f"model folder {folder} has no config.json; supported are {known}")
    found = _object_in(folder / "config.json").get("architectures") or []
    if not isinstance(found, list) or not set(map(str, found)) & set(SUPPORTED):
        named = ", ".join(map(str, found)) if isinstance(found, list) else repr(found)
        raise ValueError(f"model folder {folder} holds {named or 'no architecture'}; supported are {known}")
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"model folder {folder} has no *.safetensors")
    for name in OBJECTS:
        if (folder / name).exists():
            _object_in(folder / name)


def _object_in(path: Path) -> dict[str, Any]:  # Any: what json gives
    """Raises ValueError for a file of a model that holds no JSON object; names it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} cannot be read: it holds a {type(found).__name__}, not an object of names and values")
    return found


def num_positions(folder: Path) -> int:
    """Return the longest context that the model was made for, in tokens. Raises ValueError if config.json does not say it."""
    found = _object_in(folder / "config.json").get("max_position_embeddings")
    if type(found) is not int or found < 1:
        raise ValueError(
            f"{folder / 'config.json'}: max_position_embeddings {found!r} must be a whole number of 1 or more, the model's longest context"
        )
    return found


def reference(model: str) -> BaseModelRef:
    """Return the record of a base model, downloaded if need be. model: name on the hub, or folder."""
    return BaseModelRef(id=model, sha256=digest(locate(model)))


def digest(folder: Path) -> str:
    """Return the SHA-256 over names and digests of all files of a model that anything could load.

    Digests of unchanged files are remembered from process to process, for a day at most: by device, inode, size and the times of the last
    change, of which the kernel sets one itself.
    """
    found = (path for pattern in ("*", "additional_chat_templates/*") for path in folder.glob(pattern))
    files = sorted(path for path in found if path.is_file() and not any(fnmatch(path.name, each) for each in NOT_DIGESTED))
    with ThreadPoolExecutor() as readers:  # large ones are read concurrently
        lines = readers.map(lambda path: f"{path.relative_to(folder).as_posix()} {_remembered(path)}\n", files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class Remembered(Record):
    """The digest of a large file of a model."""

    path: str
    stamp: Stamp
    sha256: str
    read_at: float
    """Seconds since the epoch."""


def _remembered(path: Path) -> str:
    """A file's digest; each large file has a note of its own in the workspace, by the digest of its path."""
    stamp = stamp_of(path).model_dump()
    if stamp["num_bytes"] < LARGE_BYTES:
        return sha256_of(path)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    memory = Workspace.here().models / "digests" / f"{place}.json"
    noted = read_note(memory, Remembered)
    if noted and noted.stamp.model_dump() == stamp and 0 <= time.time() - noted.read_at < READ_AGAIN_S:
        return noted.sha256
    read_at, sha256 = time.time(), sha256_in(path.open("rb"))
    if stamp_of(path).model_dump() == stamp:
        write_note(memory, {"path": str(path), "stamp": stamp, "sha256": sha256, "read_at": read_at})
    return sha256


# Perf: 0.02 s of CPU time where transformers is not needed, else 7.3 in each process (2 CPU cores, docs/history/decisions.md).
@cache
def tokenizer(folder: Path) -> "FastTokenizer | PreTrainedTokenizerBase":
    """The tokenizer of a model's folder.

    Raises:
        ValueError: if it cannot be loaded.
    """
    if fast := fast_tokenizer.load(folder):
        return fast
    from transformers import AutoTokenizer

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:120]
        raise ValueError(
            f"the tokenizer in {folder} cannot be loaded ({type(error).__name__}: {why}): put the model's files tokenizer*.json there"
        ) from error
    return loaded


def texts_of(folder: Path, outputs: Sequence[Tokens]) -> list[str]:
    """Token ids as text, without special tokens.

    The tokenizer's own `batch_decode` goes through them one after the other and copies them first; below it is a library that takes a
    thread for each core. Tokenizers that tidy up what it gives, or are not made of it, are asked themselves.
    """
    asked = tokenizer(folder)
    if not asked.is_fast or asked.clean_up_tokenization_spaces:
        return [str(asked.decode([int(token) for token in tokens], skip_special_tokens=True)) for tokens in outputs]
    texts: list[str] = asked.backend_tokenizer.decode_batch(outputs, skip_special_tokens=True)
    return texts


def stop_token_ids(folder: Path) -> list[int]:
    """Ids that end a completion: of the tokenizer and of generation_config.json. Raises ValueError for one that is no number of a token."""
    ids = {tokenizer(folder).eos_token_id}
    if (path := folder / "generation_config.json").exists():
        found = _object_in(path).get("eos_token_id")
        named = found if isinstance(found, list) else [found]
        if any(token is not None and (type(token) is not int or token < 0) for token in named):
            raise ValueError(f"{path}: eos_token_id {found!r} must be the number of a token, or a list of them")
        ids.update(named)
    return sorted(int(token) for token in ids if token is not None)


def check_vocabulary(folder: Path, vocab_size: int, *, ends: bool) -> None:
    """Raises ValueError where the tokenizer has tokens that the model has not, or no token of the model ends an answer.

    vocab_size: Of config.json.
    ends: Whether answers end by a token at all.
    """
    asked, said = tokenizer(folder), f"config.json of model folder {folder} has vocab_size {vocab_size}"
    if asked.is_fast and (num := asked.backend_tokenizer.get_vocab_size(with_added_tokens=False)) > vocab_size:
        raise ValueError(f"{said}, its tokenizer makes {num} tokens: put the tokenizer of this model there")
    ids = stop_token_ids(folder)
    if ends and not any(token < vocab_size for token in ids):
        raise ValueError(
            f"{said}, the tokens that end an answer are {ids or 'none'}: set eos_token in tokenizer_config.json, or eos_token_id in "
            "generation_config.json, or no answer ends before sampling.max_output_tokens"
        )
