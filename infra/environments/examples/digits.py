"""A game of three turns, each with a reward of its own: write the digit that was asked for, and little else.

user       Write 4.
assistant  44 = 4         the share of what was asked for is the turn's reward, here 3 of 4 characters
user       Write 7.       and so on
"""

import hashlib
from collections.abc import Mapping

NUM_TURNS = 3


class Digits:
    restore = "replay"

    def reset(self, task: Mapping[str, str]) -> str:
        self.wanted = str(int(hashlib.sha256(task["question"].encode()).hexdigest(), 16) % 10**NUM_TURNS).zfill(NUM_TURNS)
        self.turn = 0
        return f"Write {self.wanted[0]}."

    def step(self, action: str) -> tuple[str, float, bool]:
        said = action.replace(" ", "")
        reward = said.count(self.wanted[self.turn]) / max(len(said), 1)
        self.turn += 1
        if self.turn == NUM_TURNS:
            return "", reward, True
        return f"Write {self.wanted[self.turn]}.", reward, False
