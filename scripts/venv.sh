# Sourced by examples/quickstart.sh and tests/run.sh. Provides
#   turbo_venv EXTRAS   makes (once) the virtual environment with this package and its EXTRAS, and sets PYTHON to its interpreter.
# PRIMUS_TURBO_VENV names the environment's folder (default: .venv in the checkout); PRIMUS_TURBO_PYTHON the interpreter it is made from.
# Sizes and versions: Megatron's training package is in the megatron-core wheels for Python >= 3.12 only.

TURBO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_turbo_python_works() { # PYTHON: at least 3.12, with venv and headers enough for pip
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not ((3, 12) <= sys.version_info[:2] <= (3, 13)))' >/dev/null 2>&1
}

turbo_find_python() {
    local candidate
    for candidate in "${PRIMUS_TURBO_PYTHON:-}" python3.12 python3.13 python3 \
        "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.pyenv/versions/3.13*/bin/python \
        /usr/local/bin/python3.1[23] /opt/*/bin/python3.1[23]; do
        if [ -n "$candidate" ] && _turbo_python_works "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    echo "error: no Python 3.12 or 3.13 with venv found (megatron-core's training package needs one)." >&2
    echo "  Install one (for instance: apt install python3.12-venv, or pyenv install 3.12), or name it: PRIMUS_TURBO_PYTHON=/path/to/python3.12" >&2
    return 1
}

# turbo_make_venv BASE DIR: a virtual environment in DIR, whole or not at all (an interrupted one is made again).
turbo_make_venv() {
    local base="$1" dir="$2"
    if [ -e "$dir/.turbo-made" ]; then
        return 0
    fi
    if [ -e "$dir" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1; then
        return 0 # made by hand
    fi
    echo "making a virtual environment in ${dir#"$PWD"/} with $("$base" --version)"
    "$base" -m venv --clear "$dir" && touch "$dir/.turbo-made"
}

turbo_venv() {
    local extras="$1" dir="${PRIMUS_TURBO_VENV:-$TURBO_ROOT/.venv}" base stamp
    PYTHON="$dir/bin/python"
    if [ ! -e "$dir/.turbo-made" ] && ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        base="$(turbo_find_python)" || return 1
        turbo_make_venv "$base" "$dir" || return 1
    fi
    if ! _turbo_python_works "$PYTHON"; then
        echo "error: $dir holds $("$PYTHON" --version 2>&1), and Python 3.12 or 3.13 is needed. Remove the folder, or name another: PRIMUS_TURBO_VENV=..." >&2
        return 1
    fi
    stamp="$dir/.turbo-$(echo "$extras" | tr ',' '-')-$(cksum <"$TURBO_ROOT/pyproject.toml" | tr ' ' '-')"
    if [ ! -e "$stamp" ]; then
        echo "installing primus-turbo-plugin[$extras] (torch and megatron-core come from the package index; minutes the first time)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$TURBO_ROOT[$extras]" || return 1
        touch "$stamp"
    fi
}
