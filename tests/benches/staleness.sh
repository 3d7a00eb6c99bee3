#!/usr/bin/env bash
# The same run with rollouts 0, 1 and 4 steps ahead, on the tiny model: bash tests/benches/staleness.sh FOLDER [OPTIONS of ratchet run]
# Real parts on a CPU, a quarter of an hour. Prints pass@1 at each evaluation, and the seconds of a step.
# Then up to eight steps of the last one again, killed twice while rollouts wait: prints the digests of both runs' adapters, which must be equal.
# RATCHET_TEST_STEPS=4 shortens the runs from 16 steps, and options such as --evaluation.num_prompts 4 their parts, to see that the script works;
# the second kill is left out then.
source "$(dirname "$0")/in_folder.sh"
STEPS=${RATCHET_TEST_STEPS:-16} OPTIONS=("${@:2}")
mkdir -p "$FOLDER"
cp -a "$MODELS" "$FOLDER/models"
export RATCHET_WORKSPACE=$FOLDER
run() {
  .venv/bin/ratchet run --preset arithmetic --data.num_prompts 16 --trainer.loss.correction.mode decoupled --trainer.loss.correction.kind tis "$@"
}
export -f run
for n in 0 1 4; do
  run --name "ahead-$n" --num_steps "$STEPS" --evaluation.every $(((STEPS + 3) / 4)) --trainer.loss.correction.max_staleness "$n" "${OPTIONS[@]}"
done
NUM_KILLED=$((STEPS < 8 ? STEPS : 8))
KILLED=(--name killed-4 --num_steps $NUM_KILLED --evaluation.every 0 --trainer.loss.correction.max_staleness 4 "${OPTIONS[@]}")
for step in 3 6; do
  [ $step -lt $NUM_KILLED ] || continue
  setsid bash -c 'run "$@"' run "${KILLED[@]}" &
  FLOW=$!
  until [ "$(cat "$FOLDER/runs/killed-4/steps/00000$step/samples.journal" 2> /dev/null | wc -l)" -gt 40 ]; do
    kill -0 $FLOW  # it ends the script if the run has ended
    sleep 0.05
  done
  kill -9 -- -$FLOW
  wait $FLOW || echo "killed in the rollout of step $step: $(ls "$FOLDER"/runs/killed-4/steps/*/samples.inputs_key.json | wc -l) rollouts were whole, $(ls "$FOLDER"/runs/killed-4/steps/*/manifest.json 2> /dev/null | wc -l) steps committed"
done
run "${KILLED[@]}"
$RATCHET down
digests() {
  sha256sum "$FOLDER/runs/$1"/adapters/00000[1-$NUM_KILLED]/adapter_model.safetensors | cut -c1-8 | tr '\n' ' '
}
echo "$(digests ahead-4)undisturbed"
echo "$(digests killed-4)killed"
.venv/bin/python tests/benches/staleness_table.py "$FOLDER"/runs/ahead-{0,1,4}
[ "$(digests ahead-4)" = "$(digests killed-4)" ] || { echo "the adapters differ"; exit 1; }
