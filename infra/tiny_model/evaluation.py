"""How many problems a model solves, one answer for each."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from infra.tiny_model.tokenizer import encode_prompt

# The longest worked solution has 29 tokens.
MAX_OUTPUT_TOKENS = 48


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], *, temperature: float, seed: int
) -> float:
    """Share of rows solved; temperature 0 takes the likeliest token and needs no seed."""
    answers = generate(model, tokenizer, [row["question"] for row in rows], temperature=temperature, seed=seed)
    return sum(is_right(answer, row["answer"]) for answer, row in zip(answers, rows, strict=True)) / len(rows)


def is_right(answer: str, solution: str) -> bool:
    """Whether the answer has a `####` and the same text behind its last one as the solution."""
    _, mark, number = answer.rpartition("####")
    return bool(mark) and number.strip() == solution.rpartition("####")[2].strip()


def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], *, temperature: float, seed: int
) -> list[str]:
    """One answer for each question, sampled from the whole distribution: no top-k, no top-p."""
    model.eval()
    padded = _pad_left([encode_prompt(tokenizer, question) for question in questions])
    tokens, mask = (each.to(model.device) for each in padded)
    # top_k 0 is off; transformers would take 50.
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        output = model.generate(tokens, attention_mask=mask, max_new_tokens=MAX_OUTPUT_TOKENS, **sampling)
    answers: list[str] = tokenizer.batch_decode(output[:, tokens.shape[1] :], skip_special_tokens=True)
    return answers


def _pad_left(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and a mask that is 0 on the padding."""
    width = max(map(len, sequences))
    tokens = torch.tensor([[0] * (width - len(sequence)) + sequence for sequence in sequences])
    mask = torch.tensor([[0] * (width - len(sequence)) + [1] * len(sequence) for sequence in sequences])
    return tokens, mask
