"""Make a model of random weights with Llama 3.1's chat template and special tokens: `python tests/benches/llama_tiny.py FOLDER`.

Its runs show that turns of this family are exact to the token; it knows nothing.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from conversations import HEADERS, TEMPLATES  # noqa: E402  # from the checkout

from infra.tiny_model.architecture import random_model  # noqa: E402
from infra.tiny_model.tokenizer import train_tokenizer  # noqa: E402


def main(folder: Path) -> None:
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens({"bos_token": HEADERS[0], "eos_token": HEADERS[3], "additional_special_tokens": HEADERS})
    tokenizer.chat_template = TEMPLATES["Llama 3.1"]
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, seed=0).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
