"""Execute a lab from top to bottom with no front end, and notice the failures that a front end would hide."""

import contextlib
import logging
import math
import os
import re
import sys
import time
from pathlib import Path
from queue import Empty

import nbformat
import papermill
from jupyter_client import AsyncKernelClient, AsyncKernelManager
from jupyter_client.channels import AsyncZMQSocketChannel
from traitlets import Type

from memlab.errors import NotebookError

LABS = Path(__file__).resolve().parent.parent
TIMEOUT_S = 3600
LOOK_AGAIN_S = 5
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")


def find(lab: str, folder: Path = LABS) -> Path:
    """The notebook of a lab by its number (``01``) or name (``01-ledger``).

    Raises:
        NotebookError: naming the labs that there are.
    """
    notebooks = sorted(folder.glob("[0-9][0-9]-*.ipynb"))
    for notebook in notebooks:
        if lab in (notebook.stem, notebook.stem.split("-")[0], notebook.name):
            return notebook
    raise NotebookError(f"no lab {lab!r}: there are {', '.join(notebook.stem for notebook in notebooks)}")


def execute(notebook: Path, output: Path, parameters: dict | None = None, environment: dict | None = None) -> float:
    """Run a lab through papermill; its cells' output appears as it comes. Returns the seconds it took.

    Args:
        notebook: the lab.
        output: where the executed notebook goes; on failure it is there too, up to the failing cell.
        parameters: for its ``parameters`` cell.
        environment: variables for its kernel.

    Raises:
        NotebookError: where a cell, a widget's callback or an Output widget raised.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    before = {name: os.environ.get(name) for name in environment or {}}
    os.environ.update(environment or {})
    try:
        with _CellOutputOnTheTerminal():
            papermill.execute_notebook(
                str(notebook),
                str(output),
                parameters=parameters or {},
                kernel_name="python3",
                cwd=str(notebook.parent),
                log_output=True,
                progress_bar=False,
                execution_timeout=TIMEOUT_S,
                kernel_manager_class=KernelManager,
            )
    except papermill.PapermillExecutionError as error:
        raise NotebookError(
            f"{notebook.stem}, cell {error.exec_count}: {error.ename}: {error.evalue}. Up to there: {output}"
        ) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    executed = nbformat.read(output, as_version=4)
    hidden = swallowed_errors(executed)
    if hidden:
        raise NotebookError(f"{notebook.stem}: an error that the front end hides: {hidden[0]}. The notebook: {output}")
    sign(executed)
    return time.perf_counter() - start


class _ShellChannel(AsyncZMQSocketChannel):
    """A channel that looks again every few seconds for a message that it was not told of.

    nbclient answers an Output widget through a second view of this socket (jupyter_client/session.py, ``send``). Where
    a reply comes at that moment, the send takes the wake-up, and who waits for the reply waits for ever.
    """

    async def get_msg(self, timeout: float | None = None) -> dict:
        left_s = math.inf if timeout is None else timeout
        while left_s > LOOK_AGAIN_S:
            with contextlib.suppress(Empty):
                return await super().get_msg(LOOK_AGAIN_S)
            left_s -= LOOK_AGAIN_S
        return await super().get_msg(left_s)


class _KernelClient(AsyncKernelClient):
    shell_channel_class = Type(_ShellChannel)


class KernelManager(AsyncKernelManager):
    """The kernels of labs, see ``_ShellChannel``."""

    client_factory = Type(_KernelClient)


class _CellOutputOnTheTerminal:
    """papermill logs the cells' output; show it plainly on stdout."""

    def __enter__(self):
        self.logger = logging.getLogger("papermill")
        self.handler = logging.StreamHandler(sys.stdout)
        self.handler.setFormatter(logging.Formatter("%(message)s"))
        self.handler.addFilter(self._is_output)
        self.before = self.logger.level, self.logger.propagate
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        self.logger.addHandler(self.handler)

    @staticmethod
    def _is_output(entry: logging.LogRecord) -> bool:
        about_papermill = ("Input Notebook", "Output Notebook", "Executing", "Ending Cell")
        text = entry.getMessage().rstrip()
        entry.msg, entry.args = text, ()
        return bool(text) and not text.startswith(about_papermill)

    def __exit__(self, *exception):
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.before[0])
        self.logger.propagate = self.before[1]


def swallowed_errors(executed) -> list[str]:
    """Errors in an executed notebook that made no cell fail: in the state of Output widgets, and tracebacks on stderr.

    ``with Output():`` and ``interact`` catch a callback's exception and keep it in the widget's state.
    """
    found = []
    states = executed.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    outputs = [output for state in states.values() for output in state.get("state", {}).get("outputs", ())]
    outputs += [output for cell in executed.cells for output in cell.get("outputs", ())]
    for output in outputs:
        if output.get("output_type") == "error":
            found.append(f"{output.get('ename')}: {output.get('evalue')}")
        elif output.get("output_type") == "stream" and output.get("name") == "stderr":
            text = "".join(output.get("text", ""))
            if _TRACEBACK.search(text):
                found.append(text.strip().splitlines()[-1])
    return found


def sign(executed) -> None:
    """Trust a notebook that was executed here, so that JupyterLab shows its figures."""
    try:
        from nbformat.sign import NotebookNotary

        NotebookNotary().sign(executed)
    except Exception as error:  # a read-only home, say: the notebook is still good
        print(f"note: the executed notebook could not be signed ({error}); trust it in JupyterLab to see its figures")
