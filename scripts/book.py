"""Building the book with an environment's jupyter-book."""

from __future__ import annotations

import subprocess
from pathlib import Path

from environment import ROOT, Environment


def build(environment: Environment, out: Path = ROOT, output=None) -> Path | None:
    """Builds into OUT/_build/html and returns that folder; None where a warning or an error stopped it.

    Its output goes to the terminal, or to the open file ``output``.
    """
    complete = out / "_build" / "complete"
    if complete.exists():
        complete.unlink()
    command = [str(environment.executable("jupyter-book")), "build", str(ROOT), "--path-output", str(out)]
    command += ["--all", "-n", "-W", "--keep-going"]
    # Building starts no server, also where vLLM and GPUs are at hand.
    variables = environment.variables(MEMLAB_MODE="replay")
    merged = None if output is None else subprocess.STDOUT
    if subprocess.call(command, cwd=str(ROOT), env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=merged):
        return None
    complete.touch()
    return out / "_build" / "html"


def is_current(root: Path = ROOT) -> bool:
    """Built after its sources last changed. Notebooks are left out: a reader saves them while working."""
    complete = root / "_build" / "complete"
    if not complete.exists():
        return False
    sources = [root / "_config.yml", root / "_toc.yml"]
    for folder in ("book", "labs", "assets"):
        sources += [file for file in (root / folder).rglob("*") if file.is_file() and is_source(file)]
    return all(file.stat().st_mtime <= complete.stat().st_mtime for file in sources if file.exists())


def is_source(file: Path) -> bool:
    generated = {"__pycache__", ".ipynb_checkpoints"}
    in_egg_info = any(part.endswith(".egg-info") for part in file.parts)
    return file.suffix != ".ipynb" and not generated.intersection(file.parts) and not in_egg_info
