#!/usr/bin/env bash
# The same run with one, two and three replicas, and with two of which one is killed twice: bash tests/benches/replicas.sh FOLDER
# Real parts on a CPU, about ten minutes. Prints the digests of each run's adapters; they must be equal.
source "$(dirname "$0")/in_folder.sh"

kill_replica_in() { # STEP: kill -9 the second replica as soon as the step's rollout has answers
  until [ "$(wc -l 2> /dev/null < "$RATCHET_WORKSPACE/runs/far/steps/00000$1/samples.journal" || echo 0)" -gt 1 ]; do sleep 0.02; done
  kill -9 "$(.venv/bin/python -c "import json; print(json.load(open('$RATCHET_WORKSPACE/engine-1.json'))['process']['pid'])")"
}

for case in 1 2 3 killed; do
  export RATCHET_WORKSPACE=$FOLDER/$case
  replicas=${case/killed/2}
  mkdir -p "$RATCHET_WORKSPACE"
  cp -a "$MODELS" "$RATCHET_WORKSPACE/models"
  $RATCHET run --preset smoke --name far --num_steps 4 --evaluation.every 0 --engine.replicas "$replicas" &
  FLOW=$!
  if [ "$case" = killed ]; then
    kill_replica_in 1
    kill_replica_in 3
  fi
  wait $FLOW
  $RATCHET down
done
for case in 1 2 3 killed; do
  sha256sum "$FOLDER/$case"/runs/far/adapters/*/adapter_model.safetensors | cut -c1-8 | tr '\n' ' '
  echo "$case, lost and moved:" "$(cat "$FOLDER/$case"/runs/far/steps/*/measures/roll_out.json | grep -o '"num_\(lost\|moved\)[a-z_]*": [0-9]*' | cut -d' ' -f2 | tr '\n' ' ')"
done
