"""A vLLM process that has imported everything and waits for its command: a start without the wait for the imports.

Importing vLLM takes longer than anything that a lab measures. A warm process does it while something else runs. It has
touched no GPU, so no memory of a GPU is taken before its command comes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from memlab.process import Child


class Warm:
    """One process in wait, for one command of vLLM. ``env`` are variables that vLLM reads while it is imported."""

    def __init__(self, env: dict[str, str] | None = None):
        self.env = dict(env or {})
        self._folder = tempfile.TemporaryDirectory(prefix="memlab-warm-")
        self._order = Path(self._folder.name) / "order.json"
        command = [sys.executable, "-m", "memlab.vllm_main", "--wait", str(self._order)]
        self.child = Child(command, Path(self._folder.name) / "output.log", self.env)

    @property
    def waiting(self) -> bool:
        """Whether it can still be given its command."""
        return self.child.poll() is None and not self._order.exists()

    def go(self, arguments: list[str], env: dict[str, str], log: Path, on_line) -> Child:
        """Run ``vllm`` with these arguments in the process that waits; its output goes to ``log`` from now on."""
        self.child.redirect(log, on_line)
        draft = self._order.with_suffix(".draft")
        draft.write_text(json.dumps({"arguments": arguments, "env": env}), encoding="utf-8")
        os.replace(draft, self._order)
        return self.child

    def stop(self) -> None:
        """End it, whether it got its command or not."""
        self.child.stop()
        self._folder.cleanup()


def start_vllm(arguments: list[str], env: dict[str, str], log: Path, on_line, warm: Warm | None = None) -> Child:
    """``vllm`` with these arguments, in the warm process where one waits, else in a new one."""
    if warm is not None and warm.waiting and warm.env.items() <= env.items():
        return warm.go(arguments, env, log, on_line)
    return Child([sys.executable, "-m", "memlab.vllm_main", *arguments], log, env, on_line)
