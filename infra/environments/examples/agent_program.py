"""An agent as a program: it knows nothing but OpenAI's protocol and the standard library. The calculator checks its working, as in calculator.py.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python agent_program.py < task.json

The task has `question` and `answer`. The last line of the output is the reward.
"""

import json
import os
import re
import sys
import urllib.request
from typing import Any

Message = dict[str, Any]
MAX_TURNS = 4


def answer_of(messages: list[Message]) -> Message:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        message: Message = json.load(response)["choices"][0]["message"]
    return message


def main() -> None:
    task = json.load(sys.stdin)
    right = task["answer"].rpartition("#### ")[2]
    messages, reward = [{"role": "user", "content": task["question"]}], 0.0
    for _ in range(MAX_TURNS):
        messages.append(answer_of(messages))
        said = messages[-1]["content"] or ""
        found = re.findall(r"(\d{1,6}) ([-+*]) (\d{1,6}) = (-?\d{1,9})", said)
        results = [
            int(a) + int(b) if sign == "+" else int(a) - int(b) if sign == "-" else int(a) * int(b) for a, sign, b, _ in found
        ]
        wrong = [(a, sign, b, n) for (a, sign, b, got), n in zip(found, results, strict=True) if int(got) != n]
        if found and not wrong:
            reward = float(said.rpartition("#### ")[2].strip() == right)
            break
        advice = "{} {} {} = {}".format(*wrong[0]) if wrong else "Write a calculation."
        messages.append({"role": "user", "content": f"{advice}\n{task['question']}"})
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
