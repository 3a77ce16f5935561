#!/usr/bin/env bash
# The test command: makes its own virtual environment once, then lint, types, layering and the test suite.
#   bash tests/run.sh               everything
#   bash tests/run.sh -m 'not slow' any pytest arguments
#   bash tests/run.sh --only-tests  skip lint, types and layering
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
turbo_venv training,test

checks=1
if [ "${1:-}" = "--only-tests" ]; then
    checks=0
    shift
fi
if [ "$checks" = 1 ]; then
    "$PYTHON" -m ruff check .
    "$PYTHON" -m ruff format --check .
    "$PYTHON" -m mypy
    "$(dirname "$PYTHON")/lint-imports"
fi
exec "$PYTHON" -m pytest -n "${TURBO_TEST_WORKERS:-2}" "$@"
