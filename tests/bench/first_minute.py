"""What an engine meets in its first minute beside a region that it has yet to page-lock, on a GPU host.

    python tests/bench/first_minute.py [--cases none,ours] [--turns 2] [--gib 32] [--pages small,huge] [--tp 1]

An eager engine (each kernel is launched by itself: what holds the driver shows) with a Llama of 8 billion random
weights, started anew for each case and turn, the cases by turns in one run. From its first request on: a decode of 32,
eight new prompts of 8,192 tokens at once, new prompts in a row, and the same from the device; every other turn in
another order. `ours` is measured with small and with huge pages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_cases import CASES, start_engine
from engines import ENVIRONMENT, LLAMA, Figures, Sizes, ms, prompts, table

from kvcache_server.demo import Failed


def decode(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    rows = call("run", requests=prompts(f"decoder {turn}", 32, 512, 200))["requests"]
    gaps = [gap * 1e3 for gap in rows[0]["gaps"]]
    found.setdefault("decode of 32, step, ms", []).append(statistics.median(gaps))
    found.setdefault("decode of 32, TPOT, ms", []).append(statistics.median(ms({"requests": rows}, "tpot")))


def eight(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    seconds = call("run", requests=prompts(f"eight {turn}", 8, sizes.prompt))["seconds"]
    found.setdefault("eight new at once, ms", []).append(seconds * 1e3)


def cold(call: Any, sizes: Sizes, turn: int, found: Figures) -> None:
    asked = prompts(f"cold {turn}", 4, sizes.prompt)
    found.setdefault("new prompts in a row, ms", []).extend(ms(call("run", requests=asked, at_once=1)))
    for row in asked:
        found.setdefault("from the device, ms", []).extend(ms(call("run", requests=[row])))


def measure(case: str, pages: str, options: argparse.Namespace, folder: Path, turn: int) -> Figures:
    sizes, found = Sizes(options.toy), {}
    os.environ["KVCACHE_HUGE_PAGES"] = "always" if pages == "huge" else "never"
    with CASES[case].serve(folder, options.gib, options.extra) as more:
        engine = start_engine(f"{case}-{pages}-{turn}", folder, ENVIRONMENT | CASES[case].environment)
        try:
            cache = {"kv_cache_memory_bytes": 1 << 25} if options.toy else {"gpu_memory_utilization": 0.85}
            started = engine.call(
                "start",
                model=str(folder / "model"),
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=sizes.max_len,
                enable_prefix_caching=True,
                seed=0,
                enforce_eager=True,
                tensor_parallel_size=options.tp,
                **cache,
                **more,
            )
            found["engine start, s"] = [started["seconds"]]
            call = engine.call
            call("run", requests=prompts("kernels", 1, 64, 4))  # its kernels are loaded when they are first used
            for test in (decode, eight, cold) if turn % 2 else (eight, cold, decode):
                test(call, sizes, turn, found)
        finally:
            engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["none", "ours"])
    parser.add_argument("--pages", type=lambda text: text.split(","), default=["small", "huge"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--gib", type=int, default=32, help="of the region")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON: settings of our connector")
    parser.add_argument("--toy", action="store_true", help="a toy model, on CPU: whether this script works")
    parser.add_argument("--logs", type=Path, help="folder that logs are kept in")
    options = parser.parse_args()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        from engines import TOY

        (folder / "model" / "config.json").write_text(json.dumps(TOY if options.toy else LLAMA))
        for turn in range(options.turns):
            for case in options.cases:
                for pages in options.pages if case == "ours" else ["small"]:
                    begin, title = time.monotonic(), f"{case}, {pages}" if case == "ours" else case
                    try:
                        for metric, values in measure(case, pages, options, folder, turn).items():
                            found.setdefault(title, {}).setdefault(metric, []).extend(values)
                        print(f"[{time.monotonic() - begin:.0f} s] {title}, turn {turn}", flush=True)
                    except Failed as error:
                        print(f"{title}, turn {turn}: {error}", flush=True)
                    if options.logs:
                        options.logs.mkdir(parents=True, exist_ok=True)
                        for log in folder.glob("*.log"):
                            shutil.copy(log, options.logs)
    print(table(f"{options.gib} GiB", found))


if __name__ == "__main__":
    main()
