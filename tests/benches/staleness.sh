#!/usr/bin/env bash
# The same run with rollouts 0, 1 and 4 steps ahead, on the tiny model: bash tests/benches/staleness.sh FOLDER
# Real parts on a CPU, a quarter of an hour. Prints pass@1 at each evaluation, and the seconds of a step.
# Then eight steps of the last one again, killed twice while rollouts wait: prints the digests of both runs' adapters, which must be equal.
source "$(dirname "$0")/in_folder.sh"
mkdir -p "$FOLDER"
cp -a "$MODELS" "$FOLDER/models"
export RATCHET_WORKSPACE=$FOLDER
run() {
  .venv/bin/ratchet run --preset arithmetic --data.num_prompts 16 --trainer.loss.correction.mode decoupled --trainer.loss.correction.kind tis "$@"
}
export -f run
for n in 0 1 4; do
  run --name "ahead-$n" --num_steps 16 --evaluation.every 4 --trainer.loss.correction.max_staleness "$n"
done
KILLED=(--name killed-4 --num_steps 8 --evaluation.every 0 --trainer.loss.correction.max_staleness 4)
for step in 000003 000006; do
  setsid bash -c 'run "$@"' run "${KILLED[@]}" &
  FLOW=$!
  until [ "$(cat "$FOLDER/runs/killed-4/steps/$step/samples.journal" 2> /dev/null | wc -l)" -gt 40 ]; do sleep 0.05; done
  kill -9 -- -$FLOW
  wait $FLOW || echo "killed in the rollout of step $step: $(ls "$FOLDER"/runs/killed-4/steps/*/samples.inputs_key.json | wc -l) rollouts were whole"
done
run "${KILLED[@]}"
$RATCHET down
for name in ahead-4 killed-4; do
  sha256sum "$FOLDER"/runs/$name/adapters/00000[1-8]/adapter_model.safetensors | cut -c1-8 | tr '\n' ' '
  echo "$name"
done
.venv/bin/python tests/benches/staleness_table.py "$FOLDER"/runs/ahead-{0,1,4}
