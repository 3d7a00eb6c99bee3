"""Make a model of random weights with Qwen3's chat template: `python tests/benches/qwen3_tiny.py FOLDER`.

Its runs show that turns of this family are exact to the token; it knows nothing, and does not reason.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

from conversations import TAGS, TEMPLATES  # noqa: E402  # from the checkout

from infra.tiny_model.architecture import random_model  # noqa: E402
from infra.tiny_model.tokenizer import train_tokenizer  # noqa: E402


def main(folder: Path) -> None:
    tokenizer = train_tokenizer()
    tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = TEMPLATES["Qwen3"]
    tokenizer.save_pretrained(folder)
    random_model("tiny", tokenizer, seed=0).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
