"""A vLLM server of somebody else, read from outside: its pages, its process, its log. Nothing here changes anything.

What the server, its log and its command line say is untrusted: it is bounded in size, and cleaned before it reaches a
terminal.
"""

import codecs
import contextlib
import http.client
import ipaddress
import json
import os
import re
import socket
import stat
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from memlab import flags, metrics, shapes, vllm_log
from memlab.errors import FlagError, MemlabError, ServerError, ShapeError
from memlab.metrics import Metrics
from memlab.record import Phase
from memlab.vllm_log import clean

TIMEOUT_S = 5.0
MAX_PAGE = 8 << 20  # a page of metrics takes some hundred KiB
PERIOD_S = 1.0
ROWS = 300  # kept of a series


# ---- the server's pages ----


class Unreachable(ServerError):
    """A page that was not had. ``refused``: nobody listens; ``status``: what HTTP said instead."""

    def __init__(self, message: str, refused: bool = False, status: int | None = None):
        super().__init__(message)
        self.refused, self.status = refused, status


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: the key goes to the address that was named and to no other."""

    def redirect_request(self, *_):
        return None


def base_url(url: str) -> str:
    """The address of a server without a page behind it.

    Raises:
        MemlabError: for what is no http(s) address.
    """
    given = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise MemlabError(f"--url {clean(url)} is no address ({error}): write http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise MemlabError(f"--url {clean(url)} is no address of a server: write http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise MemlabError("--url holds a name or a password: leave it out, and set VLLM_API_KEY where a key is needed")
    path = re.sub(r"/(v1(/models)?|metrics|health|version)?/*$", "", parts.path)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{name}{f':{port}' if port else ''}{path}"


def _addresses(url: str) -> set[str]:
    """The IP addresses of a server's host; empty where its name is not known."""
    parts = urlsplit(url)
    try:
        return {info[4][0] for info in socket.getaddrinfo(parts.hostname, None)}
    except OSError:
        return set()


def _is_loopback(url: str) -> bool:
    host_name = urlsplit(url).hostname
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host_name).is_loopback
    return host_name == "localhost"


class Client:
    """Gets pages of one server: no proxy for loopback, no redirect, a bound on time and size."""

    def __init__(self, url: str):
        self.url = base_url(url)
        direct = [urllib.request.ProxyHandler({})] if _is_loopback(self.url) else []
        self._opener = urllib.request.build_opener(*direct, _NoRedirect)
        key = os.environ.get("VLLM_API_KEY", "")
        if not (key.isascii() and key.isprintable()):
            raise MemlabError("VLLM_API_KEY holds characters that no header takes: set it again")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> str:
        """The text of a page.

        Raises:
            Unreachable: where it does not answer with that page in time and size.
        """
        request = urllib.request.Request(self.url + path, headers=self._headers)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                found = bytearray()
                while part := answer.read1(1 << 16):
                    found += part
                    if len(found) > MAX_PAGE:
                        raise Unreachable(f"{path} is larger than {MAX_PAGE >> 20} MiB: this is no page of vLLM")
                    if time.monotonic() > deadline:
                        raise Unreachable(f"{path} took longer than {TIMEOUT_S:.0f} s")
                return found.decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            error.close()
            raise Unreachable(f"{path} answers with HTTP {error.code}", status=error.code) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            refused = isinstance(cause, ConnectionRefusedError)
            raise Unreachable(f"{path}: {clean(cause)}", refused) from error


def version_text(text: object) -> str | None:
    return text if isinstance(text, str) and re.fullmatch(r"\d[\w.+-]{0,39}", text) else None


class Poller(threading.Thread):
    """Reads ``/health`` and ``/metrics`` once a second; ``rows`` has what was seen, on the watch's clock."""

    def __init__(self, client: Client, origin: float):
        super().__init__(name="metrics poller", daemon=True)
        self.client, self.origin = client, origin
        self.rows: list[tuple[float, Metrics]] = []
        self.recent: deque[tuple[float, Metrics]] = deque(maxlen=70)
        self.refused = 0
        self.dead = False
        self._stop_asked = threading.Event()
        self._every = self._since = 1

    def run(self) -> None:
        while not self._stop_asked.is_set():
            began = time.perf_counter()
            self.poll()
            self._stop_asked.wait(max(0.05, PERIOD_S - (time.perf_counter() - began)))

    def stop(self) -> None:
        self._stop_asked.set()

    def poll(self) -> None:
        try:
            self.client.get("/health")
            self.dead = False
        except Unreachable as error:
            if error.refused:
                self.refused += 1
                return
            if error.status is not None:
                self.dead = error.status == 503  # vLLM's answer once its engine is dead
        try:
            found = metrics.read(self.client.get("/metrics"))
        except Unreachable:
            return
        self.refused = 0
        if found is not None:
            self.keep(time.perf_counter() - self.origin, found)

    def keep(self, at: float, found: Metrics) -> None:
        """One row more. Where there are too many, the fuller of two neighbours stays, so that the peaks do."""
        self.recent.append((at, found))
        if self._since < self._every:
            self._since += 1
            if self.rows and (found.kv_cache_usage or 0) > (self.rows[-1][1].kv_cache_usage or 0):
                self.rows[-1] = (at, found)
            return
        self.rows.append((at, found))
        self._since = 1
        if len(self.rows) >= 2 * ROWS:
            pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [max(pair, key=lambda row: row[1].kv_cache_usage or 0) for pair in pairs]
            self._every *= 2

    def change(self, name: str, seconds: float) -> tuple[float, float] | None:
        """How much a counter rose in the last ``seconds``, and in how many; None where it was not seen twice."""
        rows = list(self.recent)
        if not rows:
            return None
        last_at = rows[-1][0]
        known = [(at, getattr(row, name)) for at, row in rows if at >= last_at - seconds]
        known = [(at, value) for at, value in known if value is not None]
        if len(known) < 2 or known[-1][1] < known[0][1]:
            return None
        return known[-1][1] - known[0][1], known[-1][0] - known[0][0]


# ---- the server's process ----

_ENVIRONMENT = re.compile(r"VLLM_|NCCL_|PYTORCH_|CUDA_MODULE|CUDA_DEVICE_ORDER|OMP_")
_PRIVATE_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|HOST|URL|URI|ADDR|ENDPOINT|PATH|ROOT|DIR|FILE|CACHE|_IP\b|SSL"
)
_PRIVATE_OPTION = re.compile(
    r"key|token(?!s)|secret|pass|credential|ssl|host|url|addr|endpoint|path|root|dir|file|header|name|origin|port|plugin|cert"
)


def find_pid(url: str) -> tuple[int | None, str]:
    """The vLLM process of this machine that listens at ``url``; or None and what to do about it."""
    here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    addresses = _addresses(url)
    if not addresses or not all(address in here or ipaddress.ip_address(address).is_loopback for address in addresses):
        return None, "The server is on another machine: memory and flags are not seen. Run memlab watch there."
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    advice = "Memory and flags are not seen: pass --pid, the process of vllm serve"
    try:
        listening = [
            c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
    except psutil.Error:
        return None, f"{advice}."
    pids = {c.pid for c in listening if c.pid and c.laddr.ip in {*addresses, "0.0.0.0", "::"}}
    servers = [pid for pid in pids if _is_vllm(pid)]
    if servers:
        return min((_above(pid) for pid in servers), key=lambda pid: psutil.Process(pid).create_time()), ""
    if pids:
        with contextlib.suppress(psutil.Error):
            name = clean(psutil.Process(min(pids)).name(), 40)
            return None, f"{advice}. The port belongs to {name}, which is no vLLM (a tunnel, a container's proxy?)."
    return None, f"{advice} (and run memlab as its user)."


def _is_vllm(pid: int) -> bool:
    """Whether a process is vLLM's by its command, or has a child that vLLM named."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline()[:4]
        if any(re.search(r"(?:^|/)vllm$|^vllm\.|^VLLM::|\bvllm_main$", word) for word in words):
            return True
        return any("".join(child.cmdline()[:1]).startswith("VLLM::") for child in process.children())
    except psutil.Error:
        return False


def _above(pid: int) -> int:
    """The server of one of its own processes, which vLLM names ``VLLM::...``."""
    process = psutil.Process(pid)
    with contextlib.suppress(psutil.Error):
        while "".join(process.cmdline()[:1]).startswith("VLLM::") and process.parent() is not None:
            process = process.parent()
    return process.pid


def read_command(words: list[str]) -> tuple[str | None, flags.ServeFlags] | None:
    """Model and flags of a server's command line; None where it is no ``vllm serve``.

    Raises:
        FlagError: for flags that memlab does not understand.
    """
    starts = [
        n for n, word in enumerate(words) if word == "serve" or word.endswith(("openai.api_server", "api_server.py"))
    ]
    if not starts:
        return None
    arguments = words[starts[0] + 1 :]
    model, _ = flags.take_model(arguments)
    first = arguments and not arguments[0].startswith("-")
    # A record keeps what was typed: --model stays among the arguments.
    return model, flags.from_args(arguments[1:] if first else arguments)


def public_extra(extra: tuple[str, ...]) -> list[str]:
    """Arguments for a record: the options, and of their values those that can name nobody."""
    kept, option = [], ""
    for word in extra[:60]:
        if word.startswith("-"):
            option, equals, value = word.partition("=")
            kept.append(option[:80] + (f"={_public(option, value)}" if equals else ""))
        else:
            kept.append(_public(option, word))
    return kept


def _public(option: str, value: str) -> str:
    harmless = re.fullmatch(r"[\w.,+-]{1,40}", value) or option in ("--compilation-config", "-cc")
    return value[:200] if option and harmless and not _PRIVATE_OPTION.search(option) else "<private>"


class Process:
    """A server's process and those below it: command line, variables, log, versions. It is only read.

    Raises:
        MemlabError: where there is no such process, or it may not be seen at all.
    """

    def __init__(self, pid: int):
        self.notes: list[str] = []
        try:
            self._process = psutil.Process(_above(pid))
            self.pid = self._process.pid
            self.created = self._process.create_time()
            words = self._process.cmdline()
        except (psutil.NoSuchProcess, ValueError, OverflowError) as error:
            raise MemlabError(f"there is no process {pid} here: `pgrep -af 'vllm serve'` finds it") from error
        except psutil.AccessDenied as error:
            raise MemlabError(
                f"process {pid} belongs to another user: run memlab as that user, or leave --pid out"
            ) from error
        self.model, self.given = None, None
        try:
            command = read_command(words)
            if command:
                self.model, self.given = command
                if any(word.split("=")[0] == "--config" for word in self.given.extra):
                    self.notes.append("Flags in the file of --config are not read.")
        except FlagError as error:
            self.notes.append(f"The flags are not seen: {clean(error)}.")
        try:
            self.variables = self._process.environ()
        except (psutil.Error, OSError):
            self.variables = {}
            self.notes.append(f"Process {self.pid} belongs to another user: its variables are not seen.")
        self._pids: tuple[float, list[int]] = (0.0, [])

    @property
    def alive(self) -> bool:
        try:
            return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def pids(self) -> list[int]:
        """It and every process below it; looked up at most once a second, as it takes all of ``/proc``."""
        at, known = self._pids
        if time.monotonic() - at < 1 and known:
            return known
        try:
            known = [self.pid, *(child.pid for child in self._process.children(recursive=True))] if self.alive else []
        except psutil.Error:
            known = []
        self._pids = (time.monotonic(), known)
        return known

    def environment(self) -> dict[str, str]:
        """The variables that move memory, without those that may name or unlock anything."""
        return {
            name: value[:200]
            for name, value in sorted(self.variables.items())
            if _ENVIRONMENT.match(name) and not _PRIVATE_NAME.search(name)
        }

    def log(self) -> Path | None:
        """Where its output goes, if that is a file that may be read."""
        for number in (1, 2):
            path = Path(f"/proc/{self.pid}/fd/{number}")
            if _is_file(path):
                return path
        return None

    def maps(self) -> str:
        """The libraries that its processes have loaded, by path."""
        found = set()
        for pid in self.pids():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as rows:
                found |= {row.split(maxsplit=5)[5].strip() for row in rows if ".so" in row}
        return "\n".join(sorted(found))

    def folder(self, name: str) -> Path | None:
        """A local folder of a model, seen from where the server runs."""
        path = Path(name).expanduser()
        if not path.is_absolute():
            try:
                path = Path(self._process.cwd()) / path
            except (psutil.Error, OSError):
                return None
        there = Path(f"/proc/{self.pid}/root{path}")  # a container has its own files
        return next((folder for folder in (there, path) if _is_file(folder / "config.json")), None)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode) and os.access(path, os.R_OK)
    except (OSError, ValueError):
        return False


def torch_version(maps: str) -> str | None:
    """From the folder that stands beside the library that is loaded."""
    match = re.search(r"^(.*)/torch/lib/libtorch", maps, re.MULTILINE)
    if not match:
        return None
    names = [path.name for path in Path(match.group(1)).glob("torch-*.dist-info")]
    return version_text(names[0].removeprefix("torch-").removesuffix(".dist-info")) if names else None


def read_shape(folder: Path) -> shapes.ModelShape | None:
    """The shape in a model's folder; None where it is not counted or not to be read."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > 1 << 20:
            return None
        found = shapes.from_config(json.loads(path.read_text(encoding="utf-8")))
        return found if found.parameters() > 0 else None
    except (OSError, ValueError, TypeError, AttributeError, ShapeError, ZeroDivisionError, RecursionError):
        return None


class LogReader(threading.Thread):
    """Reads a log from its start and follows it, also where it is cut or replaced. Events of the last start are kept.

    Raises:
        MemlabError: where it is no file that may be read.
    """

    PART = 1 << 20
    LINE = 32 * 1024

    def __init__(self, path: Path, now):
        super().__init__(name="log reader", daemon=True)
        if not _is_file(path):
            raise MemlabError(f"--log {path} is no file that can be read: name the file that the server writes to")
        self.path, self.now = path, now
        self.events: list[vllm_log.Event] = []
        self.phase: str | None = None
        self.phases: list[Phase] = []
        self.caught_up = False
        self._lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._file = None

    def run(self) -> None:
        while not self._stop_asked.is_set():
            with contextlib.suppress(OSError):
                self.read()
            self._stop_asked.wait(0.5)

    def stop(self) -> None:
        self._stop_asked.set()

    def read(self) -> None:
        """Read what is new."""
        with self._lock:
            if self._file is None or self._was_replaced():
                self._open()
            while (part := self._file.read(self.PART)) and not self._stop_asked.is_set():
                self._feed(self._decoder.decode(part))
            self.caught_up = not part

    def finish(self) -> None:
        """Read to the end, after the server's."""
        self.stop()
        if self.is_alive():
            self.join(5)
        self._stop_asked.clear()
        with contextlib.suppress(OSError):
            self.read()
        with self._lock:
            if self._file is not None:
                self._feed("\n")
                self._take(self._parser.close())
                self._file.close()
                self._file = None

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self._inode = os.fstat(self._file.fileno()).st_ino
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parser, self._rest = vllm_log.LogParser(), ""

    def _was_replaced(self) -> bool:
        try:
            now = self.path.stat()
        except OSError:
            return False
        return now.st_ino != self._inode or now.st_size < self._file.tell()

    def _feed(self, text: str) -> None:
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[: self.LINE]
        for one in lines:
            self._take(self._parser.feed(one))

    def _take(self, events: list[vllm_log.Event]) -> None:
        for event in events:
            ended = self.phase in ("ready", "stopping") or any(map(vllm_log.is_error, self.events))
            if event.kind == "version" and ended:  # the same file holds an earlier start
                self.events, self.phase = [], None
            if event.kind not in ("stats", "iteration", "preempted"):
                self.events.append(event)
            phase = vllm_log.phase_of(event)
            if phase == "serving":
                phase = "ready"
            after = self.phase == "ready" and phase != "stopping"  # engines may compile on while they serve
            if phase and phase != self.phase and not after:
                self.phase = phase
                if self.caught_up:
                    self.phases.append(Phase(phase, round(self.now(), 3)))
