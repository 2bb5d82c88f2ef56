#!/usr/bin/env bash
# Create $VENV and install the project into it, choosing the torch build first.
set -euo pipefail
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
TORCH_CPU="torch==2.13.0"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup: $PYTHON is older than Python 3.11; run 'make PYTHON=python3.11 ...' with a newer one" >&2
  exit 2
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    echo "setup: a CUDA device is present: installing torch's CUDA build"
    pip "torch>=2.13.0"
  else
    echo "setup: installing the CPU build of torch"
    # PyPI carries CUDA builds for Linux; the CPU build comes from a local file where there is one,
    # otherwise from PyTorch's own CPU index.
    pip "$TORCH_CPU+cpu" 2>/dev/null \
      || pip --index-url https://download.pytorch.org/whl/cpu "$TORCH_CPU" 2>/dev/null \
      || pip "$TORCH_CPU"
  fi
fi
echo "setup: installing the project with its test tools"
pip --editable '.[dev]'
