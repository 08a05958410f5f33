"""What a page of the book calls, where these modules run in the browser: the doctor and the planner, over JSON.

>>> json.loads(call("plan", json.dumps({"config": config, "card": "3090"})))["answer"]["kv_tokens"]
"""

import json
from collections.abc import Callable

from memlab import cards, doctor, finding_view, launch, shapes, vllm_log
from memlab.errors import MemlabError

Told = Callable[[int], None]


class _Counted:
    """A text file that tells after each block how many characters were read of it."""

    def __init__(self, file, told: Told):
        self._file, self._told, self._read = file, told, 0

    def read(self, size: int) -> str:
        block = self._file.read(size)
        self._read += len(block)
        self._told(self._read)
        return block


def diagnose(log: str, command: str = "", card: str = "", told: Told = lambda characters: None) -> dict:
    """What the doctor finds in the file ``log``: as data, as an element for the page, as text, and in a sentence.

    ``entries`` are the phases that the page "OOM now" has an entry of, each in words.

    Args:
        log: the path of vLLM's output.
        command: the command line, for what the log does not state.
        card: the smaller card that the GPU plays.
        told: is told the number of characters read, after each block.

    Raises:
        MemlabError: for a command line that vLLM would refuse, and for a card that is not known.
    """
    with vllm_log.open_log(log) as file:
        events = vllm_log.parse_stream(_Counted(file, told))
        found = doctor.diagnose(events, command.strip() or None, card=card.strip() or None)
    view = finding_view.View(finding_view.without_none(found.to_dict()))
    phases = (one.phase for one in found.failures)
    return {
        "finding": found.to_dict(),
        "html": view.html(whole=True),
        "text": doctor.report(found),
        "summary": view.summary(),
        "entries": {phase: finding_view.words(phase) for phase in phases if phase in doctor.RULES},
    }


def plan(
    config: dict,
    card: str | None = None,
    card_gib: float | None = None,
    compute_capability: tuple[int, int] | None = None,
    vllm_version: tuple[int, int] = (0, 33),
    served: str = "",
) -> dict:
    """What vLLM will say of a start, as ``planner.Plan.to_dict`` has it.

    Args:
        config: the model's ``config.json``, parsed.
        card: the GPU by name; or ``card_gib``, its memory in GiB as CUDA reports it.
        compute_capability: of a card that is given in GiB.
        vllm_version: its first two numbers.
        served: the flags of ``vllm serve``, or the whole command.

    Raises:
        MemlabError: for what vLLM would refuse, and for what is not known.
    """
    from memlab import planner

    if not card and not card_gib:
        raise MemlabError("No GPU is given: name a card, or its memory in GiB")
    given = cards.find(card) if card else planner.card_of(card_gib)
    if compute_capability:
        given = planner.with_capability(given, tuple(compute_capability))
    bare = not served.strip() or served.lstrip().startswith("-")
    wanted = launch.read(f"vllm serve model {served}" if bare else served).flags
    return planner.plan(shapes.from_config(config), given, wanted, tuple(vllm_version)).to_dict()


def plan_page(settings: dict, changes: bool = True, link: bool = False) -> dict:
    """What the page "Plan your memory" shows for its settings: see ``plan_view.answer``."""
    from memlab import plan_view

    return plan_view.answer(settings, changes, link)


CALLS = {"diagnose": diagnose, "plan": plan, "plan_page": plan_page}


def call(name: str, arguments: str, told: Told | None = None) -> str:
    """A call by name. Returns JSON: ``{"answer": ...}``, or ``{"error": what to do}`` where the input is refused."""
    given = json.loads(arguments)
    if told is not None:
        given["told"] = told
    try:
        return json.dumps({"answer": CALLS[name](**given)})
    except MemlabError as error:
        return json.dumps({"error": str(error)})
