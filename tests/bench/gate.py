"""Compare hits of an engine whose gate is on with one whose gate is off, and with an engine without a connector.

    python tests/bench/gate.py [--rounds 30] [--throttle 3]

Each variant is a real vLLM engine on CPU in a process of its own. They answer the same prompts by turns, and the time
to the first token is measured. Before each prompt, the engine's own prefix cache is emptied, so that all of it is
computed, or loaded from the daemon. `new` prompts were never seen: nothing is found, and all is saved. With a
throttle, each load takes so many times as long as computing its prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

from engine_pipes import TOY, Engines
from rig import one_daemon

LARGE = TOY | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
WARM = 16  # requests of each kind before any is counted: so long the gate learns


def measure(config: dict[str, Any], tokens: int, rounds: int, times: float) -> dict[str, Any]:
    """Return medians in seconds of the first token, by variant and kind of prompt, and ratios of them."""
    from kvcache_tools.demo_engine import make_model

    draw = random.Random(tokens)
    new = lambda count=tokens: [draw.randrange(config["vocab_size"]) for _ in range(count)]  # noqa: E731
    with one_daemon(size="1GiB") as daemon:
        folder, endpoint = daemon.folder, daemon.endpoint
        make_model(f"{folder}/model", config)
        common = {"endpoint": endpoint, "canary_every": 0, "deadline_ms": 5000}
        engines = Engines(
            f"{folder}/model", {"none": None, "off": {**common, "gate": "off"}, "auto": {**common, "gate": "auto"}}
        )
        try:
            # What is found: each prompt is saved by the engine whose gate is off.
            known = [new() for _ in range(8)]
            computes = [engines.ask("off", prompt, reset=True)["seconds"] for prompt in known]
            daemon.wait_status(lambda s: not s["pool"]["blocks_writing"], "the saves")
            throttle = times * statistics.median(computes[2:])
            for turn in range(WARM):  # parts of prompts, too: engines see prompts of many lengths
                for name in engines.names:
                    engines.ask(name, known[turn % 8], reset=True, throttle=throttle)
                    engines.ask(name, new(draw.randrange(tokens // 4, tokens)), reset=True)
            spent: dict[str, dict[str, list[float]]] = {name: {"new": [], "hit": []} for name in engines.names}
            counts, before = {}, engines.ask("auto", new(), reset=True)["counts"]
            for turn in range(rounds):
                names = engines.names
                for name in names if turn % 2 else names[::-1]:
                    engines.ask(name, new(32))  # so that no engine is measured as it wakes up
                    kinds = {"hit": (known[turn % 8], throttle), "new": (new(), 0.0)}
                    for kind in sorted(kinds, reverse=turn % 4 > 1):
                        prompt, delay = kinds[kind]
                        answer = engines.ask(name, prompt, reset=True, throttle=delay)
                        spent[name][kind].append(answer["seconds"])
                        if name == "auto":
                            counts = {key: count - before.get(key, 0) for key, count in answer["counts"].items()}
        finally:
            engines.close()
    medians = {name: {kind: statistics.median(found) for kind, found in kinds.items()} for name, kinds in spent.items()}

    def ratio(one: str, kind: str, other: str, other_kind: str) -> float:
        pairs = zip(spent[one][kind], spent[other][other_kind], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return {
        "seconds": medians,
        "auto_hit_of_none": ratio("auto", "hit", "none", "hit"),
        "auto_hit_of_off_hit": ratio("auto", "hit", "off", "hit"),
        "auto_hit_of_auto_new": ratio("auto", "hit", "auto", "new"),
        "off_hit_of_off_new": ratio("off", "hit", "off", "new"),
        "declined": counts.get("lookups_declined_slow", 0),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--throttle", type=float, default=3.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    cases = {
        "toy model, 320 tokens": (TOY, 320, 0.0),
        "large model, 1,000 tokens": (LARGE, 1000, 0.0),
        "large model, 1,000 tokens, throttled": (LARGE, 1000, options.throttle),
    }
    for name, (config, tokens, times) in cases.items():
        if options.only not in name:
            continue
        row = measure(config, tokens, options.rounds, times)
        print(name)
        for variant, kinds in row["seconds"].items():
            print(f"  {variant:<5} new {kinds['new'] * 1e3:8.2f} ms   hit {kinds['hit'] * 1e3:8.2f} ms")
        for key in row:
            if key != "seconds":
                print(f"  {key:<22} {row[key]:.3f}" if isinstance(row[key], float) else f"  {key:<22} {row[key]}")


if __name__ == "__main__":
    main()
