"""A vLLM server as people have it: a command, ``docker run``, a compose file, a systemd unit, a Kubernetes container.

``read`` takes the model and the flags out of any of them. Nothing of it is ever run: words are split as a shell would
split them, and no variable or command in them is expanded. ``safe`` tells which flags may be started from a panel.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from memlab import flags
from memlab.errors import FlagError
from memlab.flags import ServeFlags

MAX_CHARACTERS = 64 * 1024
_VARIABLE = re.compile(r"\$[A-Za-z_({]|`")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MODULE = re.compile(r"vllm\.entrypoints\.(openai\.)?api_server|.*/api_server\.py")
_COMMANDS = ("vllm", "vllm.entrypoints.cli.main", "memlab.vllm_main")
# A line that goes on: in a shell, in PowerShell and in cmd; or the next one begins with an option, as no command does.
_GOES_ON = re.compile(r"[\\`^][ \t]*(?:\r?\n|$)|\r?\n(?=\s*[-–—])")
# What word processors, chats and web pages make of a command's characters.
_TYPESET = {**dict.fromkeys("\u00a0\u2007\u202f", " "), **dict.fromkeys("“”„", '"'), **dict.fromkeys("‘’‚", "'")}
_IMAGE = re.compile(r"vllm", re.IGNORECASE)
# `docker run` options that take no value (docs.docker.com/reference/cli/docker/container/run); all others take one.
_DOCKER_SWITCHES = {
    "--detach", "--init", "--interactive", "--no-healthcheck", "--oom-kill-disable", "--privileged", "--publish-all",
    "--quiet", "--read-only", "--rm", "--sig-proxy", "--tty", "--replace",
}  # fmt: skip
_DOCKER_LETTERS = set("ditPq")
_ENGINES = ("docker", "podman", "nerdctl")


@dataclass(frozen=True)
class Launch:
    """``notes`` say what was read over, such as variables of the environment."""

    model: str
    flags: ServeFlags
    notes: tuple[str, ...] = ()


def read(text: str) -> Launch:
    """Model and flags from a launch of vLLM in any of the forms above.

    Raises:
        FlagError: where there is no vLLM in it, a value is one that vLLM refuses, or a variable would decide.
    """
    if len(text) > MAX_CHARACTERS:
        raise FlagError(f"{len(text)} characters are too many for one server: paste its command or its file alone")
    if not text.strip():
        raise FlagError("nothing was pasted: give a 'vllm serve MODEL ...' line, or a file that starts vLLM")
    if re.fullmatch(r"\s*`[^`]+`\s*", text):
        text = text.strip().strip("`")
    if re.search(r"^\s*ExecStart\s*=", text, re.MULTILINE):
        return _from_unit(text)
    if text.lstrip().startswith("{") or re.search(
        r"^\s*-?\s*[\"']?(services|containers|command|args|entrypoint|image|apiVersion)[\"']?\s*:", text, re.M
    ):
        return _from_yaml(text)
    return _from_words(*_split(text))


def _split(text: str) -> tuple[list[str], list[str]]:
    """The words of the command that starts vLLM, and notes on what stood around it."""
    commands = []
    for piece in _commands(text):
        try:
            words = shlex.split(piece)
        except ValueError as error:
            raise FlagError(f"the quotes do not match ({error}): check them") from error
        while words and words[0] in ("$", "#", "sudo", "nohup", "exec", "env", "export"):
            words.pop(0)
        variables = []
        while words and _ASSIGNMENT.match(words[0]):
            variables.append(words.pop(0).split("=")[0])
        if _mentions_vllm(words):
            commands.append((words, [_left_out(variables)] if variables else []))
    if not commands:
        raise FlagError(
            "no vLLM is started here: paste a whole 'vllm serve MODEL ...' line, a 'docker run' of its image, or the "
            "compose file, unit or container that starts it"
        )
    return next((command for command in commands if _may_serve(command[0])), commands[0])


def _plain(text: str) -> str:
    """Quotes, spaces and dashes as they were typed, where a program has set them; what stands in quotes stays."""
    found, quote = [], ""
    for number, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "–—" and (number == 0 or found[-1].isspace()):
            character = "--"
        else:
            character = _TYPESET.get(character, character)
        found.append(character)
    return "".join(found)


def _commands(text: str) -> list[str]:
    """``text`` cut at what ends a command or redirects it, outside quotes; without comments and continuations."""
    found, quote, position = [""], "", 0
    text = _plain(text.strip())
    while position < len(text):
        character = text[position]
        continued = _GOES_ON.match(text, position) if quote != "'" else None
        if continued and (not quote or character == "\\"):
            found[-1] += " "
            position = continued.end()
            continue
        if character == "\\" and quote != "'":
            found[-1] += text[position : position + 2]
            position += 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in ";|&\n<>":
            if character in "<>":
                found[-1] = re.sub(r"\s[0-2]$", "", found[-1])  # the number of a redirected stream
            found.append("")
            position += 1
            continue
        elif character == "#" and found[-1].strip() and found[-1][-1].isspace():
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        found[-1] += character
        position += 1
    return found


def _may_serve(words: list[str]) -> bool:
    head = words[0].rpartition("/")[2]
    return head in _ENGINES or head.endswith("sh") or any(word == "serve" or _MODULE.fullmatch(word) for word in words)


def _left_out(variables: list[str]) -> str:
    return f"Variables of the environment were left out: {', '.join(variables)}"


def _mentions_vllm(words: list[str]) -> bool:
    return any(_IMAGE.search(word) for word in words)


def _from_words(words: list[str], notes: list[str] = (), in_image: bool = False) -> Launch:
    """From a command's words: what stands in front of vLLM is read over. ``in_image``: words for a vLLM image."""
    notes = list(notes)
    for number, word in enumerate(words):
        if word == "-c" and number + 1 < len(words) and words[number - 1].rpartition("/")[2].endswith("sh"):
            inner, more = _split(words[number + 1])
            return _from_words(inner, notes + more)
        if word == "-lc" and number + 1 < len(words):
            inner, more = _split(words[number + 1])
            return _from_words(inner, notes + more)
    if words and words[0].rpartition("/")[2] in _ENGINES:
        return _from_docker(words, notes)
    for number, word in enumerate(words):
        before = words[number - 1].rpartition("/")[2] if number else ""
        if word == "serve" and (before in _COMMANDS or _MODULE.fullmatch(before) or (in_image and number == 0)):
            return _arguments(words[number + 1 :], notes)
        if before == "vllm" and number == 1 and not word.startswith("-"):
            raise FlagError(f"'vllm {word}' starts no server: paste the 'vllm serve' line")
        if _MODULE.fullmatch(word):
            return _arguments(words[number + 1 :], notes)
    if in_image:
        return _arguments(words, notes)
    raise FlagError("this is no 'vllm serve MODEL ...' line: paste it whole, the model right behind 'serve'")


def _from_docker(words: list[str], notes: list[str]) -> Launch:
    if "run" not in words[:3] and "create" not in words[:3]:
        raise FlagError("of docker's commands only 'docker run' starts a server: paste that line")
    number = next(n for n, word in enumerate(words) if word in ("run", "create")) + 1
    entrypoint, variables = [], []
    while number < len(words) and words[number].startswith("-"):
        option, equals, value = words[number].partition("=")
        switch = option in _DOCKER_SWITCHES or (not option.startswith("--") and set(option[1:]) <= _DOCKER_LETTERS)
        if not switch and not equals:
            number += 1
            value = words[number] if number < len(words) else ""
        if option in ("-e", "--env"):
            variables.append(value.split("=")[0])
        if option == "--entrypoint":
            entrypoint = [value]
        number += 1
    if number >= len(words):
        raise FlagError("this 'docker run' names no image: paste it whole, with what follows the image")
    if variables:
        notes.append(_left_out(variables))
    return _in_image(words[number], entrypoint + words[number + 1 :], notes)


def _in_image(image: str, words: list[str], notes: list[str]) -> Launch:
    known = bool(_IMAGE.search(image)) or not image  # a command alone, cut out of its file
    if not known and not _mentions_vllm(words):
        raise FlagError(f"the image {image!r} is not known to start vLLM: paste the 'vllm serve' line that it runs")
    return _from_words(words, notes, in_image=known)


def _from_unit(text: str) -> Launch:
    lines = re.sub(r"\\[ \t]*\r?\n(?:[ \t]*[#;].*\r?\n)*", " ", text).splitlines()
    starts = [line.split("=", 1)[1].strip() for line in lines if re.match(r"\s*ExecStart\s*=\s*\S", line)]
    if not starts:
        raise FlagError("the unit's ExecStart= is empty: paste the unit whole")
    quoted = [line.split("=", 1)[1] for line in lines if re.match(r"\s*Environment\s*=", line)]
    try:
        variables = [word.split("=")[0] for line in quoted for word in shlex.split(line)]
        words = shlex.split(_plain(re.sub(r"^[@\-:+!|]+", "", starts[-1])))
    except ValueError as error:
        raise FlagError(f"the quotes of the unit do not match ({error}): check them") from error
    notes = [_left_out(variables)] if variables else []
    if not _mentions_vllm(words):
        raise FlagError("this unit's ExecStart= starts no vLLM: paste the unit of the vLLM server")
    return _from_words(words, notes)


def _from_yaml(text: str) -> Launch:
    try:
        import yaml
    except ImportError as error:
        raise FlagError(
            "PyYAML is not installed, so no YAML can be read: paste the 'vllm serve' line itself"
        ) from error
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" in line {where.line + 1}" if where else ""
        raise FlagError(
            f"this is no YAML that can be read{line}: paste the file whole, with its indentation"
        ) from error
    except RecursionError as error:
        raise FlagError("this YAML is nested too deep: paste the service or container alone") from error
    found = [each for document in documents for each in _containers(document, "", set())]
    found = [(name, each) for name, each in found if _starts_vllm(each)]
    if not found:
        raise FlagError("no service or container in this file starts vLLM: paste the one that does")
    found = [(name, each) for name, each in found if _names_model(each)] or found  # not a template that others merge
    name, container = found[0]
    notes = []
    if len(found) > 1:
        others = ", ".join(other or "without a name" for other, _ in found[1:])
        notes.append(f"Read {name or 'the first'}; the file also starts vLLM in: {others}")
    variables = _variables(container.get("environment") or container.get("env"))
    if variables:
        notes.append(_left_out(variables))
    command, arguments, entrypoint = (_words(container.get(key)) for key in ("command", "args", "entrypoint"))
    words = entrypoint + command + arguments
    return _in_image(str(container.get("image") or ""), words, notes)


def _containers(node, name: str, seen: set[int]) -> Iterator[tuple[str, dict]]:
    """Every mapping that may be a service or a container, with its name. An alias is followed once."""
    if id(node) in seen:
        return
    if isinstance(node, dict):
        seen.add(id(node))
        if any(isinstance(node.get(key), str | list) for key in ("image", "command", "args", "entrypoint")):
            yield str(node.get("name") or name), node
        for key, value in node.items():
            yield from _containers(value, str(key), seen)
    elif isinstance(node, list):
        seen.add(id(node))
        for value in node:
            yield from _containers(value, name, seen)


def _starts_vllm(container: dict) -> bool:
    keys = ("image", "command", "args", "entrypoint")
    return any(_mentions_vllm(_words(container.get(key))) for key in keys) or (
        "image" not in container and _names_model(container)
    )


def _names_model(container: dict) -> bool:
    words = [word for key in ("entrypoint", "command", "args") for word in _words(container.get(key))]
    return any(word == "serve" or "vllm serve " in word or word.partition("=")[0] == "--model" for word in words)


def _words(value) -> list[str]:
    """A command in YAML, as a string or a list."""
    if value is None:
        return []
    if isinstance(value, list):
        return [str(word).lower() if isinstance(word, bool) else str(word) for word in value]
    try:
        return shlex.split(_plain(_GOES_ON.sub(" ", str(value))))
    except ValueError as error:
        raise FlagError(f"the quotes of the command do not match ({error}): check them") from error


def _variables(environment) -> list[str]:
    if isinstance(environment, dict):
        return [str(name) for name in environment]
    items = environment if isinstance(environment, list) else []
    return [str(item.get("name")) if isinstance(item, dict) else str(item).split("=")[0] for item in items]


def _arguments(words: list[str], notes: list[str]) -> Launch:
    """Model and flags from the words behind ``vllm serve``."""
    model, rest = flags.take_model(words)
    if not model or model.startswith("-"):
        raise FlagError("no model is named: give it right behind 'serve', or as --model NAME")
    _refuse_variables(["--model", model])
    _refuse_variables(rest)
    return Launch(model, flags.from_args(rest), tuple(notes))


def _refuse_variables(words: list[str]) -> None:
    """A flag that decides memory must be readable: nothing is expanded here."""
    modelled = {"--model", *("--" + f.name.replace("_", "-") for f in flags.MODELLED)}
    option = ""
    for word in words:
        name, _, value = word.partition("=")
        if word.startswith("--"):
            option = name.replace("_", "-")
        if option in modelled and _VARIABLE.search(value if word.startswith("--") else word):
            raise FlagError(f"{option} is {word!r}: variables are not expanded here, so write the value itself")


# ---- what a panel may start ----

# Arguments outside ``ServeFlags`` that neither load code, nor open a file or a connection of their own.
SAFE = {
    "--async-scheduling", "--attention-backend", "--cudagraph-capture-sizes", "--decode-context-parallel-size",
    "--disable-cascade-attn", "--disable-hybrid-kv-cache-manager", "--disable-log-requests", "--disable-log-stats",
    "--disable-sliding-window", "--enable-auto-tool-choice", "--enable-expert-parallel", "--enable-log-requests",
    "--enable-prompt-tokens-details", "--enable-sleep-mode", "--kv-cache-metrics", "--cudagraph-metrics",
    "--kv-offloading-size", "--limit-mm-per-prompt", "--mamba-cache-mode", "--max-logprobs",
    "--max-num-scheduled-tokens", "--max-num-queued-reqs", "--max-num-queued-tokens", "--performance-mode",
    "--reasoning-parser", "--scheduler-reserve-full-isl", "--scheduling-policy", "--served-model-name",
    "--skip-mm-profiling", "--stream-interval", "--swap-space", "--tool-call-parser", "--uvicorn-log-level",
    "--watermark",
}  # fmt: skip
# Others fetch weights over the network, or come with a plugin.
SAFE_LOAD_FORMATS = {None, "auto", "dummy", "safetensors", "bitsandbytes", "gguf", "mistral", "sharded_state"}

_NETWORK = "the lab's server listens on this machine's loopback interface alone"
_CODE = "it loads code"
_WHY = {
    "--host": _NETWORK, "--port": _NETWORK, "--uds": _NETWORK,
    "--api-key": "the lab talks to its own server, without a key",
    "--trust-remote-code": "it runs code that comes with the model", "--tool-parser-plugin": _CODE,
    "--reasoning-parser-plugin": _CODE, "--middleware": _CODE, "--worker-cls": _CODE, "--worker-extension-cls": _CODE,
    "--scheduler-cls": _CODE, "--logits-processors": _CODE, "--io-processor-plugin": _CODE,
    "--distributed-executor-backend": "it may load code, or open connections to other machines",
    "--kv-transfer-config": "it may load code, and opens connections", "--kv-events-config": "it opens connections",
    "--hf-overrides": _CODE, "--config": "it reads more arguments from a file", "--log-config-file": _CODE,
    "--compilation-config": "it may load code", "--additional-config": "it may load code",
    "--speculative-config": "it may load code, and another model", "--otlp-traces-endpoint": "it opens connections",
    "--ssl-keyfile": _NETWORK, "--ssl-certfile": _NETWORK, "--root-path": _NETWORK, "--allowed-origins": _NETWORK,
    "--download-dir": "it writes elsewhere on this machine", "--hf-token": "a token has no place in a record",
}  # fmt: skip
_UNKNOWN = "it is not among the arguments that a panel starts"


def options(extra: tuple[str, ...]) -> list[tuple[str, ...]]:
    """``extra`` cut into options, each with its values."""
    found: list[list[str]] = []
    for word in extra:
        if not found or (word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)):
            found.append([])
        found[-1].append(word)
    return [tuple(words) for words in found]


def safe(asked: ServeFlags) -> tuple[ServeFlags, list[str]]:
    """``asked`` without the arguments that a panel does not start, and a sentence for each of those.

    What is not known to be harmless is left out: vLLM has hundreds of arguments, and takes them abbreviated too.
    """
    kept, dropped = [], []
    for words in options(asked.extra):
        name = words[0].partition("=")[0].replace("_", "-")
        if name.replace("--no-", "--", 1) in SAFE:
            kept += words
        else:
            dropped.append(f"{name} is left out of the start: {_WHY.get(name, _UNKNOWN)}")
    return asked.with_(extra=tuple(kept)), dropped
