#!/usr/bin/env bash
# The oldest supported Megatron release (0.16.1, the last one for Python 3.11): specs, modules and the distributed smoke tests.
#   bash tests/run_mcore016.sh [PYTHON3.11] [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
base="${1:-python3.11}"
shift || true
dir="${PRIMUS_TURBO_VENV_MCORE016:-.venv-mcore016}"
stamp="$dir/.turbo-$(cat pyproject.toml tests/constraints-mcore016.txt | cksum | tr ' ' '-')"
turbo_make_venv "$base" "$dir"
if [ ! -e "$stamp" ]; then
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check -c tests/constraints-mcore016.txt torch
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check -c tests/constraints-mcore016.txt -e ".[training,test]"
    touch "$stamp"
fi
exec "$dir/bin/python" -m pytest -n "${TURBO_TEST_WORKERS:-2}" -m "megatron or not slow" \
    tests/specs tests/modules tests/megatron tests/distributed "$@"
