"""An agent as people write them: OpenAI's package and a loop. It knows nothing of Ratchet, and runs in a Python of its own.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... python openai_agent.py < task.json

The calculator checks the model's working, as in calculator.py. The last line of the output is the reward.
"""

import json
import os
import re
import sys

from openai import BadRequestError, OpenAI  # type: ignore[import-not-found]  # of the environment that runs it

CALCULATION = re.compile(r"(\d{1,6}) ([-+*]) (\d{1,6}) = (-?\d{1,9})")
MAX_TURNS = 4


def mistake_in(said: str) -> str:
    """The first wrong calculation, corrected; empty if all are right."""
    for a, sign, b, result in CALCULATION.findall(said):
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        if int(result) != right:
            return f"{a} {sign} {b} = {right}"
    return "" if CALCULATION.search(said) else "Write a calculation."


def main() -> None:
    task, client, reward = json.load(sys.stdin), OpenAI(), 0.0
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(MAX_TURNS):
        try:
            answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        except BadRequestError:  # the context is full
            break
        said = answer.choices[0].message.content or ""
        if not (advice := mistake_in(said)):
            reward = float(said.rpartition("#### ")[2].strip() == task["answer"].rpartition("#### ")[2])
            break
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{advice}\n{task['question']}"}]
    print(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
