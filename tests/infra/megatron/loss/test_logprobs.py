"""Log-probabilities and entropies against plain autograd."""

import pytest
import torch
from torch import Tensor

from infra.megatron.loss import logprobs as loss
from infra.megatron.loss.logprobs import token_logprobs


def random_logits() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (3 * torch.randn(17, 50)).requires_grad_(), torch.randint(0, 50, (17,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropies_and_gradients_are_those_of_plain_autograd(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "TOKENS_PER_CHUNK", 5)
    logits, targets = random_logits()
    upstream = torch.randn(2, 17)
    reference = (logits / temperature).log_softmax(-1)
    expected = (reference.gather(1, targets[:, None])[:, 0], torch.distributions.Categorical(logits=reference).entropy())
    found = token_logprobs(logits, targets, temperature=temperature, group=None)
    torch.testing.assert_close(found, expected)
    for chosen in ([0], [1], [0, 1]):
        gradients = [
            torch.autograd.grad([of[i] for i in chosen], logits, [upstream[i] for i in chosen], retain_graph=True)[0]
            for of in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_logits_of_any_size_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([1]), temperature=1.0, group=None)
    assert logprobs.tolist() == [-1e4]
    assert entropies.tolist() == [0.0]


def test_bfloat16_logits_are_worked_on_in_float32() -> None:
    logits, targets = random_logits()
    rounded = logits.detach().bfloat16()
    found, _ = token_logprobs(rounded, targets, temperature=1.0, group=None)
    expected, _ = token_logprobs(rounded.float(), targets, temperature=1.0, group=None)
    assert torch.equal(found, expected)
