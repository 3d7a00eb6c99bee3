"""A reward for models with random weights: it teaches nothing, but differs from sample to sample, so that gradients are not zero."""


def reward(*, question: str, completion: str, answer: str) -> float:
    return (sum(completion.encode()) % 11) / 10
