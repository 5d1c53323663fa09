#!/usr/bin/env bash
# Makes the virtual environment ./.venv with everything that development, the tests and the demo need.
#
#   tools/setup.sh [EXTRA...]    with extras that are not among those
#
# Run by `make` when pyproject.toml has changed. It only needs CPython 3.11 or newer and access to a package index: if
# the distribution has split ensurepip off (Debian's python3-venv), the system's pip bootstraps the environment.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=.venv
extras=server,gateway,console,cli,e2b,smolagents,mcp,otel,data
for extra in "$@"; do extras+=,$extra; done
install=(-e ".[$extras]" --group dev --group mcp-tools)

say() { printf '%s\n' "setup: $*"; }

# The newest interpreter that runs: a name on the PATH may be a version manager's shim for one that is not selected.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if "$candidate" -c 'import ssl, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    say "no usable Python 3.11 or newer${PYTHON:+ at $PYTHON}; install one, or name it with PYTHON=" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    say "making $venv with $("$python" -V)"
    rm -rf "$venv"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip
    else
        "$python" -m venv "$venv"
    fi
}

# uv resolves and installs several times as fast as pip; a pip that knows dependency groups does the same work. Unlike
# pip, uv writes no bytecode by default; a sandbox, which sees the environment read-only, would compile pandas at each
# import.
install_packages() {
    local python=$venv/bin/python
    if "$python" -m pip install --quiet --disable-pip-version-check uv &&
        UV_SYSTEM_CERTS=1 "$python" -m uv pip install --quiet --compile-bytecode --python "$python" "${install[@]}"; then
        return
    fi
    say "uv can't do it here; using pip"
    "$python" -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
    "$python" -m pip install --quiet --disable-pip-version-check "${install[@]}"
}

# An environment that was moved, or whose interpreter is missing, is made again.
"$venv/bin/python" -c 'import pip' 2>/dev/null || make_venv
install_packages
say "ready: $("$venv/bin/python" -V), $venv"
