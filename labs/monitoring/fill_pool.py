"""Fill the KV cache of a small vLLM server on 127.0.0.1, for the alerts beside this file to see. Ctrl-C ends it.

.venv/bin/python labs/monitoring/fill_pool.py
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from memlab import lab, models, traffic
from memlab.errors import MemlabError, ServerError
from memlab.flags import ServeFlags
from memlab.record import Traffic
from memlab.server import Server
from memlab.shapes import LAB_MODELS

POOL_TOKENS = 8192
# Long answers, of different lengths: the pool is full of requests that run, not of prompts that come and go in waves.
LOAD = Traffic(input_tokens=100, output_tokens=500, requests=5000, concurrency=60, range_ratio=0.5)


@contextlib.contextmanager
def small_server(folder: Path, port: int | None = None):
    """A server whose pool holds ``POOL_TOKENS``, once it answers; its log goes to ``folder``.

    Raises:
        MemlabError: where vLLM cannot run here, the port is taken, or the server ends before it answers.
    """
    place = lab.here("live")
    shape = LAB_MODELS[place.default_model]
    model = models.write(place.default_model, shape, folder)
    pool = POOL_TOKENS * shape.kv_bytes_per_token()
    flags = ServeFlags(kv_cache_memory_bytes=pool, max_model_len=4096, enforce_eager=True, load_format="dummy")
    with contextlib.ExitStack() as stack:
        devices = stack.enter_context(lab.claim_gpus(1)) if place.backend == "cuda" else []
        uuids = [device.uuid for device in devices]
        server = stack.enter_context(
            Server(str(model), flags, folder, uuids, lab.LOCAL_ENV, port, on_phase=lab.progress_line)
        )
        if not server.wait_until_ready():
            last = "\n".join((folder / "vllm.log").read_text(errors="replace").splitlines()[-15:])
            raise ServerError(f"vLLM ended before it was ready; its last lines:\n{last}")
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000, help="what prometheus.yml scrapes (default: %(default)s)")
    port = parser.parse_args().port
    try:
        with tempfile.TemporaryDirectory() as folder, small_server(Path(folder), port) as server:
            print(f"{server.url}/metrics tells of a pool of {POOL_TOKENS:,} tokens. Load comes now; Ctrl-C ends it.")
            traffic.send(server, LOAD, server.model, Path(folder))
    except KeyboardInterrupt:
        return 0
    except MemlabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
