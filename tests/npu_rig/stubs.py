"""Stubs for every symbol of CANN that torch_npu's libraries need and the rig does not define.

python stubs.py FOLDER SITE_PACKAGES

FOLDER holds the rig's libascendcl.so. Each library that torch_npu needs and that is neither torch's nor the system's
becomes a small one of that name; all missing symbols go to the first of them. A stub says its name once and returns
500000 (ACL_ERROR_INTERNAL_ERROR): what is not simulated fails loudly, and never looks as if it had worked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CANN = re.compile(r"acl|rt[A-Z]|Msprof|Hccl|Hcom|hccl|ge[A-Z]|_ZNK?2ge|_ZNK?4hccl|_ZNK?3ge")
SYSTEM = re.compile(r"ld-linux|lib(c|m|stdc\+\+|gcc_s|pthread|dl|rt)\.so")
STUB = """int {name}(void){label}; int {name}(void) {{
  static int said;
  if (!said++) fprintf(stderr, "[fake_acl] not simulated: {symbol}\\n");
  if (getenv("FAKE_ACL_ABORT_ON_STUB")) abort();
  return 500000;
}}
"""


def symbols(which: str, library: Path) -> set[str]:
    lines = subprocess.run(["nm", "-D", which, library], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()[-2] in "TUVWBDRi"}


def needed(library: Path) -> list[str]:
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", text)


def stub(symbol: str) -> str:
    plain = not symbol.startswith("_Z")
    name, label = (symbol, "") if plain else (re.sub(r"\W", "_", f"stub_{symbol}"), f' __asm__("{symbol}")')
    return STUB.format(name=name, label=label, symbol=symbol)


def main(folder: Path, packages: Path) -> None:
    rig = folder / "libascendcl.so"
    theirs = [packages / "torch", packages / "torch_npu"]
    patterns = ("lib/libtorch_npu.so", "_C*.so", "lib/libnpu_profiler.so")
    users = [library for pattern in patterns for library in theirs[1].glob(pattern)]
    libraries = [rig, *(library for root in theirs for library in root.glob("lib/*.so*"))]
    there = {name for library in libraries for name in symbols("--defined-only", library)}
    missing = {name for user in users for name in symbols("--undefined-only", user)} - there
    missing = {name for name in missing if CANN.match(name)}
    absent = [
        name
        for name in dict.fromkeys(name for user in users for name in needed(user))
        if name != rig.name and not SYSTEM.match(name) and not any((root / "lib" / name).exists() for root in theirs)
    ]
    absent.append("libacl_tdt_channel.so")  # opened by name, and import fails without it
    source = "#include <stdio.h>\n#include <stdlib.h>\n" + "".join(map(stub, sorted(missing)))
    for number, name in enumerate(absent):
        text = source if number == 0 else "int fake_cann_stub;\n"
        # Linked to the rig, so that a look-up in any of CANN's libraries finds what is simulated.
        command = ["gcc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / name, f"-Wl,-soname,{name}"]
        command += ["-x", "none", "-Wl,--no-as-needed", rig, "-Wl,-rpath,$ORIGIN"]
        subprocess.run(command, input=text, text=True, check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
