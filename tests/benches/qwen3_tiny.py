"""Make a tiny model that reasons, with Qwen3's chat template: `python tests/benches/qwen3_tiny.py FOLDER`.

It is warm-started for a few seconds as the model `tiny` is (infra/tiny_model/warm_start.py), but its working stands in <think> tags, which Qwen3's
template drops from earlier answers. It knows the form and next to nothing of sums. `Again` is a game for it.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ANSWER = re.compile(r"#### (-?\d{1,9})")
REACH = 20
"""An answer that is farther off gets no reward."""


class Again:
    """Three turns at most: a wrong answer is asked for once more. The last answer is rewarded by its distance from the right one. What was reasoned
    is not shown to the game."""

    def reset(self, task: Mapping[str, str]) -> str:
        self.right, self.question, self.turn = int(task["answer"].rpartition("#### ")[2]), task["question"], 0
        return self.question

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turn += 1
        answers = ANSWER.findall(action)
        reward = max(0.0, 1 - abs(int(answers[-1]) - self.right) / REACH) if answers else 0.0
        is_done = reward == 1 or self.turn == 3
        return f"No.\n{self.question}", reward if is_done else 0.0, is_done


def reasoned(answer: str) -> str:
    """Put the working of a solution into <think> tags. A guess has none."""
    working, _, number = answer.rpartition("#### ")
    return f"<think>\n{working.strip()}\n</think>\n\n#### {number}" if working.strip() else answer


def main(folder: Path) -> None:
    sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]
    from conversations import TAGS, TEMPLATES

    from infra.tiny_model import batches
    from infra.tiny_model.architecture import random_model
    from infra.tiny_model.tokenizer import train_tokenizer
    from infra.tiny_model.warm_start import Recipe, warm_start

    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    plain = batches.lessons

    def lessons(*rows: Any, **how: Any) -> Iterator[Any]:
        return (lesson._replace(answer=reasoned(lesson.answer)) for lesson in plain(*rows, **how))

    batches.lessons = lessons
    tokenizer = train_tokenizer()
    tokenizer.add_tokens(TAGS)
    tokenizer.chat_template = TEMPLATES["Qwen3"]
    model = random_model("tiny", tokenizer, seed=0)
    diet = batches.Diet(num_chats=8, num_drills=0, guess_share=0.1, guess_weight=1.0)
    print(warm_start(model, tokenizer, seed=0, recipe=Recipe(max_steps=150, num_held_out=32, diet=diet)))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
