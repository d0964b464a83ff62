"""Stands in for systemctl where there is no systemd: prints as that of systemd 252 does, and notes each call.

Beside it lie `units.json`, {name: {property: value}}, and `calls.jsonl`, its arguments call by call.
"""

import fnmatch
import json
import sys
from pathlib import Path

here = Path(sys.argv[0]).parent
units = json.loads((here / "units.json").read_text())
arguments = sys.argv[1:]
with (here / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(arguments) + "\n")
flags = [each for each in arguments if each.startswith("-")]
verb, *names = [each for each in arguments if not each.startswith("-")]


def properties(name):
    shape = {"Id": name, "Description": "", "LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead"}
    shape |= {"Result": "success", "NRestarts": "0", "MainPID": "0", "MemoryCurrent": "[not set]"}
    shape |= {"ActiveEnterTimestampMonotonic": "0", "InactiveEnterTimestampMonotonic": "0", "EnvironmentFiles": ""}
    return shape | units.get(name, {})


if verb == "list-units":
    for name in sorted(units):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in names) and not units[name].get("asleep"):
            shown = properties(name)
            print(name, shown["LoadState"], shown["ActiveState"], shown["SubState"], shown["Description"])
elif verb == "show":
    wanted = next(each for each in flags if each.startswith("--property=")).partition("=")[2].split(",")
    blocks = [properties(name) for name in names]
    print("\n\n".join("\n".join(f"{key}={each[key]}" for key in wanted) for each in blocks))
elif verb in ("start", "stop", "restart"):
    for name in names:
        if units.get(name, {}).get("refused"):
            print(f"Failed to {verb} {name}: Access denied", file=sys.stderr)
            sys.exit(4)
        active = verb != "stop"
        state = {"ActiveState": "active", "SubState": "running", "MainPID": "4711"}
        units.setdefault(name, {}).update(
            state if active else {"ActiveState": "inactive", "SubState": "dead", "MainPID": "0"}
        )
    (here / "units.json").write_text(json.dumps(units))
else:
    sys.exit(f"Unknown command verb {verb}.")
