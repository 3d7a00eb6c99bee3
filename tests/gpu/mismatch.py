"""Where the log-probabilities of engine and trainer part: by precision, by kernel, beside the weights and merged.

    python tests/gpu/mismatch.py OUT.json [--model FOLDER] [--cases NAME ...] [--colocation PLAN] [--set FIELD=VALUE ...]

Each case is two steps with a trained model (`tiny` is one; a random model's flat distributions exaggerate): mean absolute difference in
nats of the sampled tokens, adapter on in the second; and within the engine alone, decoding against computing the same tokens at once.
With the plan `restart`, which fits every precision, a case starts the engine three times; with `keep_weights` once.

The two cases of mixtures of experts show what trainer.routing_replay changes, and what it costs:

    python tests/gpu/mismatch.py OUT.json --model MIXTURE --cases "mixture, own routes" "mixture, replayed routes"
"""

from typing import Any

from bench import Bench, continued, parser, whole_step

from infra.engines import open_engine
from infra.engines.health_checks import mean_abs_difference
from infra.engines.server import server_process
from infra.records import AdapterVersion
from infra.store.layout import StepFolder
from infra.trainers import resident

TRITON = {"extra_flags": ("--attention-backend", "triton")}
"""FlashAttention 3, the default on Hopper, knows no float32."""
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "float32 both": {"engine": {"dtype": "float32"} | TRITON, "trainer": {"dtype": "float32"}},
    "bfloat16 both": {"engine": {"dtype": "bfloat16"}, "trainer": {"dtype": "bfloat16"}},
    "engine bfloat16, trainer float32": {"engine": {"dtype": "bfloat16"}, "trainer": {"dtype": "float32"}},
    "engine float32, trainer bfloat16": {"engine": {"dtype": "float32"} | TRITON, "trainer": {"dtype": "bfloat16"}},
    "bfloat16 both, merged": {"engine": {"dtype": "bfloat16", "lora_mode": "merged"}, "trainer": {"dtype": "bfloat16"}},
    "float32 both, merged": {"engine": {"dtype": "float32", "lora_mode": "merged"} | TRITON, "trainer": {"dtype": "float32"}},
    "bfloat16 both, triton attention": {
        "engine": {"dtype": "bfloat16"} | TRITON,
        "trainer": {"dtype": "bfloat16"},
    },
    "fp8 engine, bfloat16 trainer": {"engine": {"dtype": "bfloat16", "quantization": "fp8"}, "trainer": {"dtype": "bfloat16"}},
    "fp8 KV cache": {"engine": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "trainer": {"dtype": "bfloat16"}},
    "fp8 engine and KV cache": {
        "engine": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"},
        "trainer": {"dtype": "bfloat16"},
    },
    "bfloat16 both, batch-invariant kernels": {
        "engine": {"dtype": "bfloat16", "deterministic": True},
        "trainer": {"dtype": "bfloat16"},
    },
}
OF_MIXTURES: dict[str, dict[str, dict[str, Any]]] = {
    f"mixture, {name} routes": {
        "engine": {"colocation": "keep_weights", "dtype": "bfloat16"},
        "trainer": {"dtype": "bfloat16", "routing_replay": replays},
    }
    for name, replays in (("own", False), ("replayed", True))
}
FIGURES = (
    "base",
    "adapter",
    "base_k3",
    "adapter_k3",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "samples_bytes",
    "batch_bytes",
)
"""Of a case, in the order of the table at the end; the last four are of the second step."""
SMALL = ("float32 both", "bfloat16 both, merged")


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--cases", nargs="+", choices=[*CASES, *OF_MIXTURES], default=[])
    p.add_argument("--colocation", default="restart", help="of the engine, where a case names none (default: %(default)s)")
    options = p.parse_args()
    bench, found = Bench(options, "mismatch"), {}
    failed = []
    for number, name in enumerate(options.cases or (SMALL if options.small else CASES)):
        if not bench.has_time_for(100):
            failed.append(f"no time for {name}")
            break
        try:
            found[name] = one_case(bench, number, **(CASES | OF_MIXTURES)[name])
        except (RuntimeError, ValueError) as error:  # a kernel that is not there is a result too
            found[name] = {"failed": f"{type(error).__name__}: {error}"[-600:]}
            failed.append(name)
        finally:
            server_process.stop_recorded()
            resident.stop_recorded()
        bench.say(cases=found)
    for name, figures in found.items():
        shown = (f"{figures.get(figure, float('nan')):.2e}" for figure in FIGURES)
        print(f"| {name} | {' | '.join(shown)} |")
    print("done" if not failed else f"FAILED: {', '.join(failed)}")


def one_case(bench: Bench, number: int, *, engine: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    kernels = () if bench.options.small else engine.get("extra_flags", ())  # a CPU has but one kind
    flags = (*bench.config.engine.extra_flags, *kernels)  # of two, the last one counts
    config = bench.config.but(
        name=f"mismatch-{number}",
        engine=bench.config.engine.but(**{"colocation": bench.options.colocation} | engine | {"extra_flags": flags}),
        trainer=bench.config.trainer.but(learning_rate=1e-3, **trainer),
    )
    adapter, figures = whole_step(config, config.engine, 0, bench.base().model_copy(update={"run": config.name}))
    inside = within_the_engine(config.engine, adapter)
    _, second = whole_step(config, config.engine, 1, adapter)
    both = (("base", figures), ("adapter", second))
    k3 = {f"{name}_k3": step["mismatch_k3"] for name, step in both}
    files = StepFolder.at(config.name, 1)
    costs = {
        "rollout_tokens_per_s": second["rollout_tokens_per_s"],
        "train_tokens_per_s": second["train_tokens_per_s"],
        "samples_bytes": files.samples.stat().st_size,
        "batch_bytes": files.batch.stat().st_size,
    }
    return {name: step["mismatch"] for name, step in both} | k3 | costs | {"within_engine": inside, "steps": [figures, second]}


def within_the_engine(config: Any, adapter: AdapterVersion) -> float:
    """Tokens that were decoded one after the other, and the same computed all at once, by the same weights."""
    program = open_engine(config, adapter).program  # type: ignore[attr-defined]  # the raw verbs
    text = program.golden_tokens[0]
    name = None if config.lora_mode == "merged" else adapter.served_name  # merged weights go by no name
    tokens, decoded = continued(text, name)
    return mean_abs_difference(decoded, program.logprobs([*text, *tokens], adapter.served_name)[len(text) - 1 :])


if __name__ == "__main__":
    main()
