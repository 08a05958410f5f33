"""The flags of a server that stand in other text: a command, the arguments of a container, a call of ``LLM``.

People paste them above or below a log, cut off, indented, with variables in them. What cannot be read is left out and
nothing is refused; one whole launch is read by ``launch``.
"""

import re
from functools import lru_cache

from memlab import flags
from memlab.errors import FlagError

_SHELL = re.compile(
    r"\bvllm serve\s+[^\s\[]|\bvllm\.entrypoints\.\w|\bapi_server(?:\.py)?\s+--|\b(?:docker|podman|nerdctl) run\s"
)
_CONTAINER = re.compile(r"\s*(?:- )?[\"']?(?:args|command|entrypoint)[\"']?\s?:(?:\s|$)")
_CALL = re.compile(r"\b(?:LLM|EngineArgs|AsyncEngineArgs)\(")
_LINES, _CHARS = 100, 16_000

_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"']+")
_VALUE = re.compile(r"\b([a-z_]{2,60})\s?=\s?(\"[^\"]*\"|'[^']*'|-?[\w.]{1,40})")
_FIELDS = {field.name: field for field in flags.MODELLED}
_SWITCHES = {name for name, field in _FIELDS.items() if field.metadata["parse"] is bool}


class Launch:
    """The lines of one launch within a text, taken one by one."""

    def __init__(self, kind: str, line: str):
        self._kind = kind
        self._lines: list[str] = []
        self._chars = 0
        self._indent = _indent(line)
        self._add(line)

    def takes(self, line: str) -> bool:
        """Take the next line, if it goes on with the launch."""
        if len(self._lines) >= _LINES or self._chars + len(line) > _CHARS or not self._goes_on(line):
            return False
        self._add(line)
        return True

    def flags(self) -> dict[str, object]:
        """What was given, by vLLM's names; empty where nothing of it is known."""
        return dict(_flags("\n".join(self._lines), self._kind))

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._chars += len(line)

    def _goes_on(self, line: str) -> bool:
        if self._kind == "call":
            text = "\n".join(self._lines)
            return text.count("(") > text.count(")")
        if self._kind == "shell":
            return self._lines[-1].rstrip().endswith("\\") or line.lstrip().startswith("--")
        text = "\n".join(self._lines)
        if text.count("[") > text.count("]"):
            return True
        listed = line.lstrip().startswith("- ") and _indent(line) >= self._indent
        return bool(line.strip()) and (listed or _indent(line) > self._indent)


def begun(line: str) -> Launch | None:
    """The launch that begins in a line."""
    if len(line) > _CHARS:
        return None
    served = "vllm serve" in line or "vllm.entry" in line or "api_server" in line or " run " in line
    if served and _SHELL.search(line):
        return Launch("shell", line)
    if ("LLM(" in line or "Args(" in line) and _CALL.search(line):
        return Launch("call", line)
    listed = "args" in line or "command" in line or "entrypoint" in line
    return Launch("container", line) if listed and _CONTAINER.match(line) else None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


@lru_cache(maxsize=64)  # a script that echoes its commands prints the same at each start
def _flags(text: str, kind: str) -> dict[str, object]:
    if kind == "call":
        pairs = [(name, value.strip("'\"")) for name, value in _VALUE.findall(text)]
        found = {name: _read(name, value) for name, value in pairs if name in _FIELDS}
        return {name: value for name, value in found.items() if value is not None}
    if kind == "container":
        text = re.sub(r"^\s*- ", " ", text, flags=re.MULTILINE)
        text = re.sub(r"[\[\],]+(?=\s|[\"']|$)|(?<=\s)[\[\],]+", " ", text)
    words = [word for word in _words(text) if word != "\\"]
    found = {}
    for number, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not equals and number + 1 < len(words) and not words[number + 1].startswith("--"):
            value = words[number + 1]
        if option.startswith("-"):
            name = flags.name_of(option)
            off = name.removeprefix("no_")
            if name in _SWITCHES or (name.startswith("no_") and off in _SWITCHES):
                found[off] = name in _SWITCHES
            elif name in _FIELDS and (read := _read(name, value)) is not None:
                found[name] = read
    return found


def _words(text: str) -> list[str]:
    """As a shell would split them, and what stands in quotes once more where it holds flags itself."""
    words = []
    for word in _WORD.findall(text):
        bare = word.strip("'\"")
        words += _WORD.findall(bare) if re.search(r"\s--\w", bare) else [bare]
    return [word.strip("'\"") for word in words]


def _read(name: str, value: str) -> object:
    if name in _SWITCHES:
        return {"True": True, "False": False}.get(value)
    try:
        return getattr(flags.from_args([f"--{name.replace('_', '-')}={value}"]), name) if value else None
    except FlagError:
        return None
