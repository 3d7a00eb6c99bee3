# Sourced by scripts that make runs with real parts in a FOLDER, their first argument: models and ports of their own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
FOLDER=$(realpath -m "$1")
PORT=${RATCHET_TEST_FIRST_PORT:-45800}
MODELS=${RATCHET_WORKSPACE:-.ratchet}/models
export RATCHET_ENGINE_PORT=$((PORT + 10)) RATCHET_PREFECT_PORT=$((PORT + 20)) RATCHET_MLFLOW_PORT=$((PORT + 21))
RATCHET=${RATCHET_TEST_COMMAND:-.venv/bin/ratchet} # words
