#!/usr/bin/env bash
# The same run with rollouts 0, 1 and 4 steps ahead, on the tiny model: bash tests/benches/staleness.sh FOLDER
# Real parts on a CPU, some ten minutes. Prints pass@1 at each evaluation, and the seconds of a step.
set -euo pipefail
cd "$(dirname "$0")/../.."
FOLDER=$(realpath -m "$1")
PORT=${RATCHET_TEST_FIRST_PORT:-45800}
MODELS=${RATCHET_WORKSPACE:-.ratchet}/models
export RATCHET_ENGINE_PORT=$((PORT + 10)) RATCHET_PREFECT_PORT=$((PORT + 20)) RATCHET_MLFLOW_PORT=$((PORT + 21))
mkdir -p "$FOLDER"
cp -a "$MODELS" "$FOLDER/models"
export RATCHET_WORKSPACE=$FOLDER
for n in 0 1 4; do
  .venv/bin/ratchet run --preset arithmetic --name "ahead-$n" --num_steps 16 --data.num_prompts 16 --evaluation.every 4 \
    --trainer.loss.correction.mode decoupled --trainer.loss.correction.kind tis --trainer.loss.correction.max_staleness "$n"
done
.venv/bin/ratchet down
.venv/bin/python tests/benches/staleness_table.py "$FOLDER"/runs/ahead-{0,1,4}
