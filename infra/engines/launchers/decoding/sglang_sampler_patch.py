"""A patch of SGLang 0.5.17 (GPU) and 0.5.18 (CPU), loaded by `sglang_server.py`: plain sampling reads the logits fewer times.

For 512 requests of a vocabulary of 152,064 the logits are 311 MB, and SGLang's sampler goes over them 13 times: it copies the probabilities, checks
them three times (`torch.multinomial`), and takes the logarithm of all of them for that of the sampled token. Here tokens, log-probabilities and the
random numbers are the same, bit for bit, where log-probabilities and neither top-k, top-p nor min-p are asked. NaN among the logits, which SGLang's
check would find, shows as a log-probability that is no number, and that ends the step.

Runs in SGLang's own environment and imports nothing of ours.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

KNOWN = ("self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions")
"""The arguments of SGLang's function; another version may have others."""


# Perf: 1.54 -> 0.82 ms for 512 rows (H200, docs/results/speed.md).
def quick(forward: Callable[..., torch.Tensor], keeps_original: bool) -> Callable[..., torch.Tensor]:
    """Wrap `Sampler.forward`. keeps_original: SGLang is to return log-probabilities before the temperature."""

    def sampled(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        asks_one = return_logprob and not any(top_logprobs_nums) and all(each is None for each in token_ids_logprobs)
        if not asks_one or keeps_original or not is_plain(self, sampling_info):
            return forward(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        probs = torch.softmax(logits.div_(sampling_info.temperatures), dim=-1)
        # torch.multinomial for one sample of each row (ATen/native/Distributions.cpp), in the memory of the logits.
        race = torch.div(probs, logits.exponential_(), out=logits)
        tokens = race.argmax(dim=-1, keepdim=True)
        found = probs.gather(1, tokens).view(-1).log_()
        logits_output.next_token_logprobs = found.clamp_(min=torch.finfo(found.dtype).min)
        ids = tokens.view(-1).to(torch.int32)
        self._sync_token_ids_across_tp(ids, sampling_info)
        return ids

    return sampled


def is_plain(sampler: Any, info: Any) -> bool:
    """Whether each request samples from its whole distribution, from the common random stream."""
    is_filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    is_seeded = info.sampling_seed is not None or sampler.enable_deterministic or sampler.rl_on_policy_target is not None
    return not (
        info.is_all_greedy or is_filtered or is_seeded or sampler.use_ascend_backend or any(info.return_sampling_masks or [])
    )


def mend(module: ModuleType) -> None:
    """module: sglang.srt.layers.sampler."""
    forward = module.Sampler.forward
    if tuple(inspect.signature(forward).parameters) == KNOWN:
        module.Sampler.forward = quick(forward, module.SGLANG_RETURN_ORIGINAL_LOGPROB)
