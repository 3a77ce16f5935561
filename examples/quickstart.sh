#!/usr/bin/env bash
# Trains a small GPT in BF16 and MXFP4 on this machine's CPU: makes a virtual environment once, installs, runs.
#   bash examples/quickstart.sh             about four minutes on two cores, after installation
#   bash examples/quickstart.sh --help      every size can be set
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/venv.sh"
turbo_venv training
exec "$PYTHON" "$TURBO_ROOT/examples/quickstart.py" "$@"
