#!/bin/sh
# venv.sh FOLDER PYTHON TORCH INDEX: make a virtual environment with torch. INDEX has the CPU build, which is used unless
# the pip of this machine finds that elsewhere: the one on PyPI brings gigabytes of CUDA libraries.
set -e
test -n "$2" || { echo "python3.11 not found; use make PYTHON=/path/to/python"; exit 1; }
echo "creating $1 with $("$2" --version)"
"$2" -m venv "$1"
echo "installing $3 (about 200 MB)"
pip="$1/bin/pip install --quiet --disable-pip-version-check"
index="--extra-index-url $4"
$pip --dry-run --no-deps "$3" >/dev/null 2>&1 && index=
$pip $index "$3"
