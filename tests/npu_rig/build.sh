#!/usr/bin/env bash
# build.sh OUT PYTHON: the simulated CANN for the torch_npu of that Python, in two versions:
#   OUT/now  all that is simulated
#   OUT/old  without the calls that older releases of CANN lack; looking them up fails there as it does on such a host
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1 python=$2
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
later='aclrtMemcpyBatch;aclrtMemcpyBatchAsync;aclrtHostRegisterV2;aclrtPointerGetAttributes;aclmdlRICaptureThreadExchangeMode;'

mkdir -p "$out/now" "$out/old"
objects=()
for source in "$here"/cann/*.cpp; do
  object=$out/$(basename "$source" .cpp).o
  g++ -std=c++17 -O1 -g -fPIC -Wall -Werror=missing-declarations -Wno-deprecated-declarations \
    -I"$packages/torch_npu/include" -c "$source" -o "$object" &
  objects+=("$object")
done
for job in $(jobs -p); do wait "$job"; done
echo "{ local: $later };" > "$out/old.map"
link() { g++ -shared "${objects[@]}" -Wl,-soname,libascendcl.so -lpthread "$@"; }
link -o "$out/now/libascendcl.so"
link -Wl,--version-script="$out/old.map" -o "$out/old/libascendcl.so"
for version in now old; do "$python" "$here/stubs.py" "$out/$version" "$packages"; done
