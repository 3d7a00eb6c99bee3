"""Record when the samples of a run's first rollout are complete:

    ratchet run --preset arithmetic --name arrivals --num_steps 1 --data.num_prompts 64 --sampling.group_size 8 --evaluation.every 0 &
    python tests/benches/record_arrivals.py arrivals > tests/benches/arrivals.json

It reads the journal of the rollout as it grows, every 2 ms, until NUM_SAMPLES are there. Each entry is [seconds after the journal was made,
as the rollout begins, prompt id, index of the sample, output tokens].
"""

import json
import sys
import time

from infra.store.layout import StepFolder

NUM_SAMPLES = 512
EVERY_S = 0.002


def main() -> None:
    path = StepFolder.at(sys.argv[1], 0).journal
    while not path.exists():
        time.sleep(EVERY_S)
    found: list[list[float]] = []
    with path.open("rb") as file:
        began, rest = time.perf_counter(), b""
        while len(found) < NUM_SAMPLES:
            rest += file.read()
            now = time.perf_counter()
            *lines, rest = rest.split(b"\n")
            samples = [json.loads(line[line.index(b"{") :]) for line in lines]
            for sample in (each for each in samples if "sample_index" in each):
                found.append([round(now - began, 4), sample["prompt_id"], sample["sample_index"], len(sample["output_tokens"])])
            time.sleep(EVERY_S)
    print("[\n" + ",\n".join(map(json.dumps, found)) + "\n]")


if __name__ == "__main__":
    main()
