#!/usr/bin/env bash
# The AMD kernels under Triton 3.9: compiled, emulated, held to their gates. Triton 3.9 goes into a directory of its own.
#   bash tests/run_triton39.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
turbo_venv training,test
dir="${PRIMUS_TURBO_TRITON39:-.venv-triton39}"
if [ ! -d "$dir/triton" ] && ! "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir" triton==3.9.0
then
    echo "Triton 3.9.0 cannot be installed here: the leg with it was not run"
    exit 0
fi
export PYTHONPATH="$dir${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$PWD/.pytest_cache/triton39"
exec "$PYTHON" -m pytest -n "${TURBO_TEST_WORKERS:-2}" tests/amdgcn tests/kernels/gluon tests/kernels/triton/*emulated*.py "$@"
