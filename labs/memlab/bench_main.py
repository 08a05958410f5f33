"""``python -m memlab.bench_main FOLDER``: vLLM's load generator, imported once, in a process of its own for each load.

An order is a file ``1.json``, ``2.json``, ... in the folder: ``arguments`` of ``vllm``, the whole ``environment``, and
the working ``folder`` of that load. The line ``memlab load ended: CODE`` follows the load's last line of output.
"""

import gc
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from memlab import vllm_main

ENDED = "memlab load ended: "


def serve_orders(folder: Path) -> None:
    """Take one order after the other, each in a fork; returns in the forks alone, as the process that is to send."""
    for number in itertools.count(1):
        path = folder / f"{number}.json"
        while not path.exists():
            time.sleep(0.05)
        fork = os.fork()
        if fork == 0:
            take_on(json.loads(path.read_text(encoding="utf-8")))
            return
        _, status = os.waitpid(fork, 0)
        print(f"\n{ENDED}{os.waitstatus_to_exitcode(status)}", flush=True)  # its last line may have no end


def take_on(order: dict) -> None:
    """Become the process that was ordered, by its environment, folder, arguments and name."""
    import setproctitle

    # First: it finds its place beside the environment that the process was started with.
    setproctitle.setproctitle(" ".join(["memlab.vllm_main", *order["arguments"]]))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv[1:] = order["arguments"]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def send(command) -> None:
    """Run the command and end at once: taking all the modules apart takes seconds, and says things of its own."""
    code = 1
    try:
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it waits, and ends without a word
    vllm_main.answer_for_the_cpu_distribution()
    import vllm.benchmarks.serve
    import vllm.entrypoints.cli.benchmark.main
    import vllm.entrypoints.cli.main

    gc.freeze()  # a fork that collects would copy all that was imported
    serve_orders(Path(sys.argv[1]))
    send(vllm.entrypoints.cli.main.main)
