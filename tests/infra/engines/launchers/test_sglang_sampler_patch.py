"""SGLang's sampler and the patched one, in SGLang's environment: the same tokens and log-probabilities, bit for bit."""

from shared import in_sglang

from infra.settings import CHECKOUT

PROGRAM = """
import runpy, sys, torch
from types import SimpleNamespace as Some
sys.argv = [sys.argv[1], "--device", "cpu"]
runpy.run_path(sys.argv[0], run_name="__mp_main__")
from sglang.srt.layers import sampler as module
patched = module.Sampler.forward
single = patched.__closure__[0].cell_contents
assert single.__code__.co_filename == module.__file__, "the launcher has not patched it"
calls = []
multinomial = torch.multinomial
torch.multinomial = lambda *args, **named: (calls.append(1), multinomial(*args, **named))[1]

def sampler():
    made = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target, made.enable_deterministic, made.use_log_softmax_logprob, made.use_ascend_backend = None, False, False, False
    made.output_logprob_processor = module.OutputLogprobProcessor()
    return made

def info(rows, temperature=1.0, **other):
    plain = {name: False for name in ("is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")}
    plain |= {"sampling_seed": None, "return_sampling_masks": None, "has_custom_logit_processor": False, "grammars": None}
    limits = {"top_ks": torch.full((rows,), 3), "top_ps": torch.full((rows,), 0.8), "min_ps": torch.zeros(rows)}
    return Some(temperatures=torch.full((rows, 1), temperature), **plain | limits | other)

def both(logits, given, **other):
    found = []
    for forward in (single, patched):
        calls.clear()
        output = Some(next_token_logits=logits.clone() if logits.is_contiguous() else torch.cat([logits, logits], 1)[:, : logits.shape[1]])
        asked = dict(return_logprob=True, top_logprobs_nums=[0] * len(logits), token_ids_logprobs=[None] * len(logits)) | other
        torch.manual_seed(7)
        tokens = forward(sampler(), output, given, positions=None, **asked)
        found.append((tokens, getattr(output, "next_token_logprobs", None), torch.rand(1), len(calls)))
    theirs, ours = found
    assert torch.equal(theirs[0], ours[0]) and theirs[0].dtype == ours[0].dtype
    assert theirs[1] is ours[1] is None or torch.equal(theirs[1], ours[1])
    assert torch.equal(theirs[2], ours[2]), "the random stream stands elsewhere"
    return theirs[3], ours[3]

module.get_exec = lambda: Some(kernel=Some(sampling_backend="pytorch"))
torch.manual_seed(1)
logits = torch.randn(40, 700) * 4
logits[3, 5] = 300.0  # the others' probabilities are 0
for temperature in (1.0, 0.3, 2.0):
    assert both(logits, info(40, temperature)) == (1, 0)
assert both(torch.randn(30, 1400)[:, :700], info(30)) == (1, 0), "rows that lie apart"
nothing = dict(return_logprob=False, top_logprobs_nums=None, token_ids_logprobs=None)
assert both(logits, info(40), **nothing) == (1, 1), "without log-probabilities NaN would not show"
for other in ({"need_top_k_sampling": True}, {"need_top_p_sampling": True}):
    assert both(logits, info(40, **other)) == (1, 1), other
assert both(logits, info(40), top_logprobs_nums=[2] * 40) == (1, 1)
assert both(logits, info(40), token_ids_logprobs=[[1, 2]] * 40) == (1, 1)
assert both(logits, info(40, is_all_greedy=True)) == (0, 0)
given = info(40)
assert module.Sampler.forward is patched
for name, value in (("enable_deterministic", True), ("rl_on_policy_target", "fsdp"), ("use_ascend_backend", True)):
    made = sampler()
    setattr(made, name, value)
    assert not sys.modules["sglang_sampler_patch"].is_plain(made, given), name
assert not sys.modules["sglang_sampler_patch"].is_plain(sampler(), info(40, sampling_seed=torch.arange(40)))
assert not sys.modules["sglang_sampler_patch"].is_plain(sampler(), info(40, return_sampling_masks=[False, True]))
logits[2, 1] = float("nan")
output = Some(next_token_logits=logits)
module.sanitize_nan_logits = lambda *args: None
patched(sampler(), output, info(40), True, [0] * 40, [None] * 40, None)
assert output.next_token_logprobs.isnan().tolist() == [i == 2 for i in range(40)], "a wrong number must show"
print("the same")
"""


def test_plain_sampling_gives_the_same_bits_in_fewer_passes() -> None:
    assert in_sglang(PROGRAM, CHECKOUT / "infra/engines/launchers/sglang_server.py").endswith("the same\n")
