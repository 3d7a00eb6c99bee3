"""Supervised training on worked solutions, up to where reinforcement learning has something to climb.

A model that solves nothing never gets a reward and one that solves everything has nothing to learn, so training stops as soon
as a quarter or so of the held-out problems is solved at temperature 1, which is how rollouts are sampled.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from infra.arithmetic import problems
from infra.tiny_model.evaluation import accuracy
from infra.tiny_model.tokenizer import encode_answer, encode_prompt

log = logging.getLogger(__name__)

NOT_LEARNT = -100
"""Label of a position whose next token is given, not the assistant's to say."""


class Recipe(NamedTuple):
    """The defaults reach the target in the least CPU time of what was tried: 90 seconds of one core."""

    max_steps: int = 480
    """The learning rate falls up to here. A plan for more steps learns more slowly: only the fall makes sums come right."""
    batch_size: int = 32
    """Small: many steps teach more here than large batches of the same cost."""
    learning_rate: float = 3e-3
    num_warmup_steps: int = 40
    max_grad_norm: float = 1.0
    first_evaluation: int = 340
    """No seed was near the target before, and an evaluation costs as much as eight steps."""
    evaluation_interval: int = 20
    num_held_out: int = 256
    target: float = 0.27
    """Share of held-out problems solved at temperature 1: there most groups of eight are mixed, with room above."""


class WarmStart(NamedTuple):
    """What was done and how good it is; `warm_start.json` in the model's folder."""

    seed: int
    num_steps: int
    num_train_tokens: int
    greedy_accuracy: float
    sampled_accuracy: float
    """At temperature 1, one sample for each held-out problem."""
    num_parameters: int
    seconds: float


class Batch(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor
    num_tokens: int
    """Without padding."""


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, seed: int, recipe: Recipe) -> WarmStart:
    """Train the model in place until it reaches the recipe's target, or for max_steps."""
    start = time.monotonic()
    held_out = problems("test", recipe.num_held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor(recipe))
    step, num_tokens, sampled = 0, 0, 0.0
    for step, batch in enumerate(_batches(tokenizer, seed, recipe), start=1):
        loss = _train_step(model, optimizer, batch, recipe.max_grad_norm)
        schedule.step()
        num_tokens += batch.num_tokens
        if _is_evaluated(step, recipe):
            sampled = accuracy(model, tokenizer, held_out, temperature=1.0, seed=seed)
            log.info("step %d: loss %.3f, solves %.1f%%, %.0f s", step, loss, 100 * sampled, time.monotonic() - start)
            if sampled >= recipe.target:
                break
    greedy = accuracy(model, tokenizer, held_out, temperature=0.0, seed=seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return WarmStart(seed, step, num_tokens, greedy, sampled, num_parameters, round(time.monotonic() - start, 1))


def _learning_rate_factor(recipe: Recipe) -> Callable[[int], float]:
    """Linear up during warm-up, linear down to a tenth."""
    return lambda step: min(1.0, (step + 1) / recipe.num_warmup_steps) * (1 - 0.9 * step / recipe.max_steps)


def _is_evaluated(step: int, recipe: Recipe) -> bool:
    past_first = step - recipe.first_evaluation
    return step == recipe.max_steps or (past_first >= 0 and past_first % recipe.evaluation_interval == 0)


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int, recipe: Recipe) -> Iterator[Batch]:
    """Fresh problems in every batch. Their seed is not 0, so they are other problems than those of a run's default data set."""
    rows = problems("train", recipe.max_steps * recipe.batch_size, seed=seed + 1)
    for first in range(0, len(rows), recipe.batch_size):
        yield make_batch(tokenizer, rows[first : first + recipe.batch_size])


def make_batch(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> Batch:
    """Chats padded on the right. Attention is causal, so no mask is needed: padding comes after all that counts."""
    pairs = [(encode_prompt(tokenizer, row["question"]), encode_answer(tokenizer, row["answer"])) for row in rows]
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    tokens = torch.full((len(rows), max(lengths)), tokenizer.convert_tokens_to_ids(str(tokenizer.pad_token)))
    labels = torch.full_like(tokens, NOT_LEARNT)
    for row, (prompt, answer) in enumerate(pairs):
        tokens[row, : lengths[row]] = torch.tensor(prompt + answer)
        # The label of a position is the token after it.
        labels[row, len(prompt) - 1 : lengths[row] - 1] = torch.tensor(answer)
    return Batch(tokens, labels, sum(lengths))


def _train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, max_grad_norm: float) -> float:
    model.train()
    hidden = model.base_model(input_ids=batch.tokens).last_hidden_state
    is_learnt = batch.labels != NOT_LEARNT
    # Logits only where there is a label: two thirds of the positions are the prompt's.
    loss = cross_entropy(model.get_output_embeddings()(hidden[is_learnt]), batch.labels[is_learnt])
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
