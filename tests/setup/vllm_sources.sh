#!/bin/sh
# vllm_sources.sh VENV VERSION: fetch the Python sources of a version of vLLM into VENV/vllm-VERSION.
#
# pip does not hand over a source distribution without asking it for its metadata. For the target "empty", vLLM's set-up
# needs the tools in VENV/vllm-tools, but compiles nothing. The version then says that it is the CPU's, as that of a CPU
# build does.
set -e
to=$1/vllm-$2
echo "fetching the sources of vLLM $2 (about 40 MB, only once)"
rm -rf "$to"
mkdir "$to"
VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$2 PYTHONPATH=$PWD/$1/vllm-tools \
    "$1/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary vllm --no-build-isolation \
    --dest "$to" "vllm==$2"
tar -xzf "$to/vllm-$2.tar.gz" -C "$to" --strip-components=1 "vllm-$2/vllm"
rm "$to/vllm-$2.tar.gz"
mkdir "$to/vllm-$2.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" >"$to/vllm-$2.dist-info/METADATA"
test "$2" != 0.23.0 || "$1/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$to" gguf
