"""An environment for models with random weights: four turns, each followed by a text of a hundred tokens or so. Its reward teaches nothing, but
differs from answer to answer, so that gradients are not zero."""

NUM_TURNS = 4
GOES_ON = "Are you sure? Count the pens again, one after the other. "


class FourTurns:
    def reset(self, task: dict[str, str]) -> str:
        self.turn = 0
        return task["question"]

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turn += 1
        return f"{self.turn}: {GOES_ON * 3}", (sum(action.encode()) % 11) / 44, self.turn == NUM_TURNS
