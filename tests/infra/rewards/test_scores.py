import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from infra.config import DataConfig
from infra.data import prompts
from infra.data.prompts import Prompt
from infra.rewards.scores import fields_of
from infra.store.samples import Sample

SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
SOLUTION, BEGUN = {"role": "assistant", "content": "It is 4."}, {"role": "assistant", "content": "It "}


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"question": "2 + 2?"}, {}, [ASKED, answered("is 5.")]),
        ({"messages": [SYSTEM, ASKED, SOLUTION]}, {"assistant_turn": "answer"}, [SYSTEM, ASKED, answered("is 5.")]),
        ({"prompt": [SYSTEM, ASKED, SOLUTION]}, {"assistant_turn": "answer"}, [SYSTEM, ASKED, answered("is 5.")]),
        ({"conversations": [SYSTEM, ASKED]}, {}, [SYSTEM, ASKED, answered("is 5.")]),
        ({"talk": [SYSTEM, ASKED]}, {"messages_column": "talk"}, [SYSTEM, ASKED, answered("is 5.")]),
        ({"messages": [SYSTEM, ASKED, BEGUN]}, {"assistant_turn": "prefix"}, [SYSTEM, ASKED, answered("It is 5.")]),
        ({"question": "2 + 2?", "messages": [ASKED, SOLUTION]}, {}, [ASKED, answered("is 5.")]),
        ({"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]}, {}, [SYSTEM, ASKED, answered("is 5.")]),
    ],
)  # fmt: skip
def test_a_judge_reads_what_the_model_was_asked_and_its_answer_and_no_solution(
    row: dict[str, Any], fields: dict[str, Any], expected: list[Any], tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    (drawn,) = prompts.draw(
        DataConfig(source=str(tmp_path / "data.jsonl"), num_prompts=1, **fields), model_folder, step=0, seed=0
    )
    prompt = Prompt(**json.loads(json.dumps(drawn.to_json())))
    sample = Sample(0, 0, [1], [2], [-0.1], "stop", 0, "", "is 5.")
    assert orjson.loads(fields_of(sample, prompt, ["messages"], []))["messages"] == expected
