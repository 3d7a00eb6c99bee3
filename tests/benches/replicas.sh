#!/usr/bin/env bash
# The same run with one, two and three replicas, and with two of which the second is killed or stopped in two of the rollouts:
#   bash tests/benches/replicas.sh FOLDER [CASE ...]      cases: 1 2 3 killed stopped (default: all)
# Real parts on a CPU, about a quarter of an hour. Prints the digests of each run's adapters; they must be equal.
source "$(dirname "$0")/in_folder.sh"
CASES=${*:2}
CASES=${CASES:-1 2 3 killed stopped}

strike_replica_in() { # STEP SIGNAL: to the second replica's process tree, as soon as the step's rollout has answers
  until [ "$(wc -l 2> /dev/null < "$RATCHET_WORKSPACE/runs/far/steps/00000$1/samples.journal" || echo 0)" -gt 1 ]; do sleep 0.02; done
  .venv/bin/python -c "
import json, psutil, signal
server = psutil.Process(json.load(open('$RATCHET_WORKSPACE/engine-1.json'))['process']['pid'])
for process in [server, *server.children(recursive=True)]:
    process.send_signal(signal.$2)"
}

for case in $CASES; do
  export RATCHET_WORKSPACE=$FOLDER/$case
  replicas=${case//[a-z]*/2}
  mkdir -p "$RATCHET_WORKSPACE"
  cp -a "$MODELS" "$RATCHET_WORKSPACE/models"
  $RATCHET run --preset smoke --name far --num_steps 4 --evaluation.every 0 --engine.replicas "$replicas" &
  FLOW=$!
  if [ "$case" = killed ]; then
    strike_replica_in 1 SIGKILL
    strike_replica_in 3 SIGKILL
  elif [ "$case" = stopped ]; then
    strike_replica_in 1 SIGSTOP
    strike_replica_in 3 SIGSTOP
  fi
  wait $FLOW
  $RATCHET down
done
for case in $CASES; do
  sha256sum "$FOLDER/$case"/runs/far/adapters/*/adapter_model.safetensors | cut -c1-8 | tr '\n' ' '
  echo "$case, lost, moved and reissued:" "$(cat "$FOLDER/$case"/runs/far/steps/*/measures/roll_out.json | grep -o '"num_\(lost\|moved\|reissued\)[a-z_]*": [0-9]*' | cut -d' ' -f2 | tr '\n' ' ')"
done
