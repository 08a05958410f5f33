"""The block table of chapter 3: its rules are vLLM's own, and it is there without eyes, colours, a mouse or scripts.

``python tests/test_block_table.py`` writes assets/figures/block-table.html, the picture of a page without scripts.
"""

import contextlib
import random
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from memlab import models, shapes
from test_book import CHROMIUM, axe_findings, build_page, contrast, faults, in_scheme, open_one, tab_to

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "assets" / "block-pool.js"
STILL = ROOT / "assets" / "figures" / "block-table.html"
PAGE = "book/reference/recorded-runs.html"

MAX_MODEL_LEN = 256

# Replays a story on the page's own rules, and notes the state after each action.
REPLAY = """({pool, story}) => {
    const scheduler = new memlabBlockPool.Scheduler(pool);
    return story.map(([what, given]) => {
        const done = what === "step" ? scheduler.step() : (scheduler[what](given), null);
        const {blocks, free} = scheduler.pool;
        return {
            usage: scheduler.pool.usage,
            free: free.map((block) => block.id),
            cached: blocks.filter((block) => block.hash !== null).map((block) => block.id),
            references: blocks.slice(1).map((block) => block.references),
            running: scheduler.running.map((one) => [one.name, one.computed, one.blocks.map((block) => block.id)]),
            waiting: scheduler.waiting.map((one) => one.name),
            preempted: (done?.preempted ?? []).map((one) => one.request.name),
            finished: (done?.finished ?? []).map((one) => one.name),
            blocked: done?.blocked?.request.name ?? null,
            preemptions: scheduler.preemptions,
            queries: scheduler.queries,
            hits: scheduler.hits,
            wasted: scheduler.wasted,
        };
    });
}"""


@contextlib.contextmanager
def a_browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium: install the system's package chromium")
    with a_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def rules(chromium):
    """An empty tab that knows the rules of the page, without the page."""
    tab = chromium.new_page()
    tab.add_script_tag(path=RULES)
    yield tab
    tab.close()


# ---- the rules, beside vLLM's ----


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Makes vLLM's scheduler over a pool, as an engine of a tiny dense model has it; no model is loaded."""
    pytest.importorskip("vllm")
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    name = "tiny-llama"
    folder = str(models.write(name, shapes.LAB_MODELS[name], tmp_path_factory.mktemp("model")))
    model = ModelConfig(model=folder, dtype="float32", max_model_len=MAX_MODEL_LEN)

    def make(blocks: int, block_size: int, prefix_caching: bool) -> "Engine":
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_MODEL_LEN,
                max_num_batched_tokens=64 * MAX_MODEL_LEN,
                max_num_seqs=64,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        )
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        return Engine(scheduler, block_size)

    return make


@dataclass
class Engine:
    """vLLM's scheduler, with answers that are given in place of a model."""

    scheduler: object
    block_size: int
    answers: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, object] = field(default_factory=dict)
    queries: int = 0
    hits: int = 0

    def add(self, name: str, prompt: list[int], answer: list[int]) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        sampling = SamplingParams(max_tokens=len(answer), ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=1)
        hasher = get_request_block_hasher(self.block_size, sha256)
        request = Request(name, prompt, sampling, None, block_hasher=hasher)
        self.answers[name], self.requests[name] = answer, request
        self.scheduler.add_request(request)

    def step(self) -> tuple[list[str], list[str]]:
        """Who is preempted and who finishes in this step."""
        from vllm.v1.outputs import ModelRunnerOutput

        before = {name: request.num_preemptions for name, request in self.requests.items()}
        scheduled = self.scheduler.schedule()
        looked_up = self.scheduler.kv_cache_manager.make_prefix_cache_stats()
        self.queries += looked_up.queries
        self.hits += looked_up.hits
        names = list(scheduled.num_scheduled_tokens)
        queue = [request.request_id for request in self.scheduler.waiting]
        preempted = [name for name in reversed(queue) if self.requests[name].num_preemptions > before[name]]
        tokens = [[self.answers[name][self.requests[name].num_output_tokens]] for name in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, tokens)
        self.scheduler.update_from_output(scheduled, output)
        return preempted, [name for name in names if self.requests[name].is_finished()]

    def finish(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def state(self, preempted: list[str], finished: list[str], blocked: str | None) -> dict:
        manager, running = self.scheduler.kv_cache_manager, self.scheduler.running
        pool = manager.block_pool
        tables = {request.request_id: manager.get_block_ids(request.request_id)[0] for request in running}
        computed = {request.request_id: request.num_computed_tokens for request in running}
        return {
            "usage": pytest.approx(manager.usage),
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "cached": [block.block_id for block in pool.blocks if block.block_hash is not None],
            "references": [block.ref_cnt for block in pool.blocks[1:]],
            "running": [[name, computed[name], blocks] for name, blocks in tables.items()],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "preempted": preempted,
            "finished": finished,
            "blocked": blocked,
            "preemptions": sum(request.num_preemptions for request in self.requests.values()),
            "queries": self.queries,
            "hits": self.hits,
            "wasted": sum(len(blocks) * self.block_size - computed[name] for name, blocks in tables.items()),
        }

    def play(self, story: list[tuple]) -> list[dict]:
        """The state after each action."""
        states = []
        for what, given in story:
            preempted, finished, blocked = [], [], None
            if what == "step":
                preempted, finished = self.step()
                if self.scheduler.waiting and not preempted:
                    blocked = self.scheduler.waiting.peek_request().request_id
            elif what == "add":
                self.add(**given)
            else:
                self.finish(given)
            states.append(self.state(preempted, finished, blocked))
        return states


def a_story(chance: random.Random, room: int, block_size: int) -> list[tuple]:
    """Requests come, go and grow. Few different tokens, so that prompts and answers often share their beginning."""

    def tokens(low: int, high: int) -> list[int]:
        return [chance.choice((7, 7, 7, 8)) for _ in range(chance.randint(low, high))]

    story, names = [], []
    for number in range(120):
        what = chance.choices(("add", "step", "finish"), (3, 8, 1))[0]
        if what == "add":
            names.append(f"request {number}")
            shared = [9] * chance.choice((0, block_size, 2 * block_size, 2 * block_size + 1))
            prompt = [*shared, *tokens(1, 3 * block_size)][: room - 1]
            story.append(("add", {"name": names[-1], "prompt": prompt, "answer": tokens(1, room - len(prompt))}))
        elif what == "step":
            story.append(("step", None))
        elif names:
            story.append(("finish", names.pop(chance.randrange(len(names)))))
    return story


@pytest.mark.browser
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_each_step_leaves_the_pool_as_vllm_leaves_it(rules, engine, block_size, prefix_caching):
    seen = {"preempted": 0, "blocked": 0, "finished": 0, "hits": 0, "shared": 0}
    for seed in range(12):
        chance = random.Random(f"{block_size} {prefix_caching} {seed}")
        blocks = chance.randint(6, 12)
        story = a_story(chance, (blocks - 1) * block_size, block_size)
        pool = {"blocks": blocks, "blockSize": block_size, "prefixCaching": prefix_caching}
        ours = rules.evaluate(REPLAY, {"pool": pool, "story": story})
        theirs = engine(blocks, block_size, prefix_caching).play(story)
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert our == their, f"seed {seed}, after action {number}: {story[number]}"
        for each in ours:
            seen["preempted"] += len(each["preempted"])
            seen["finished"] += len(each["finished"])
            seen["blocked"] += each["blocked"] is not None
            seen["shared"] += max(each["references"]) > 1
        seen["hits"] += ours[-1]["hits"]
    assert seen["preempted"] and seen["blocked"] and seen["finished"]
    assert bool(seen["hits"]) == bool(seen["shared"]) == prefix_caching


# ---- the page ----


def built(folder: Path) -> str:
    """The address of a page with a block table, opened from disk."""
    done, out = build_page(folder, "```{block-table}\n```")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return (out / "html" / PAGE).as_uri()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return built(tmp_path_factory.mktemp("book"))


@pytest.fixture
def open_table(chromium, url):
    opened = []
    yield lambda **options: opened.append(open_one(chromium, url, **options)) or opened[-1]
    for tab in opened:
        assert faults(tab) == []
        tab.close()


def press(tab, name: str, times: int = 1) -> None:
    for _ in range(times):
        tab.get_by_role("button", name=name, exact=True).click()


def add(tab, kind: str, times: int = 1) -> None:
    tab.get_by_role("combobox", name="prompt").select_option(kind)
    press(tab, "Add request", times)


def said(tab) -> str:
    return tab.locator(".memlab-status").inner_text()


def counter(tab, name: str) -> str:
    return tab.locator(".memlab-block-state dl > div").filter(has_text=name).locator("dd").inner_text()


ROWS = """[...document.querySelectorAll(".memlab-block-state tbody tr:has(th)")].map((row) =>
    [row.querySelector("th").textContent.trim(), [...row.querySelectorAll(".chip")].map((chip) => chip.textContent)])"""


def block_tables(tab) -> dict[str, list[int]]:
    """Of each running request: its physical blocks, in logical order, as the page shows them."""
    tables = {}
    for name, chips in tab.evaluate(ROWS):
        entries = [re.match(r"(\d+)→(\d+)", chip).groups() for chip in chips]
        assert [int(logical) for logical, _ in entries] == list(range(len(entries)))
        tables[name] = [int(physical) for _, physical in entries]
    return tables


def on_paper(tab) -> str:
    """What is drawn of the pool for print."""
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    drawn = tab.evaluate("document.querySelector('.memlab-block-state').innerHTML")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    return re.sub("><(?!/)", ">\n<", drawn) + "\n"


@pytest.mark.browser
def test_the_picture_without_scripts_is_the_one_that_the_script_draws_first(open_table):
    assert STILL.read_text(encoding="utf-8") == on_paper(open_table()), "python tests/test_block_table.py draws it anew"


@pytest.mark.browser
def test_without_scripts_the_first_state_is_there_and_the_sentence_on_it_is_true(open_table):
    tab = open_table(java_script_enabled=False)
    text = tab.locator(".memlab-still").inner_text()
    tables = block_tables(tab)
    assert tab.get_by_role("button", name="Step").count() == 0
    assert "20 blocks" in text and tab.locator(".memlab-block-state g.null, g.held, g.free, g.cached").count() == 20
    assert "A has finished" in text and "A" not in tables and tab.locator("g.cached").count() == 1
    assert "C and D share" in text and tables["C"][:2] == tables["D"][:2]
    assert "not neighbours" in text and tables["D"] != list(range(tables["D"][0], tables["D"][0] + len(tables["D"])))


@pytest.mark.browser
def test_the_keyboard_alone_adds_steps_and_finishes(open_table):
    tab = open_table()
    before = block_tables(tab)
    tab_to(tab, ".memlab-block-table select")
    tab.keyboard.press("ArrowDown")
    for button in ("add", "step"):
        tab_to(tab, f".memlab-block-table button[name={button}]")
        tab.keyboard.press("Enter")
    after = block_tables(tab)
    assert set(after) - set(before) == {"E"} and len(after["E"]) == 6
    tab_to(tab, ".memlab-block-table button[name=finish]")
    tab.keyboard.press("Enter")
    assert set(after) - set(block_tables(tab)) == {"B"}
    assert tab.evaluate("document.activeElement.textContent") == "Finish"
    tab_to(tab, ".memlab-block-table input[type=checkbox]")
    tab.keyboard.press("Space")
    assert "prefix caching off" in said(tab) and tab.locator("g.cached").count() == 0


@pytest.mark.browser
def test_a_full_pool_makes_requests_wait_and_then_preempts_but_takes_no_more_memory(open_table):
    tab = open_table()
    device = "[...document.querySelectorAll('.taken, .untaken')].map((part) => part.outerHTML)"
    at_first = tab.evaluate(device)
    add(tab, "long", 2)
    press(tab, "Step")
    assert "Request F waits: 6 blocks needed, 1 free." in said(tab)
    while "preempted" not in said(tab):
        press(tab, "Step")
    assert "request E, admitted last, is preempted" in said(tab) and "E" not in block_tables(tab)
    assert counter(tab, "waiting") == "2" and counter(tab, "preemptions") == "1"
    queue = tab.locator("p", has_text="Waiting, first in front").locator(".chip").all_inner_texts()
    assert [entry[0] for entry in queue] == ["E", "F"]
    assert tab.evaluate(device) == at_first


@pytest.mark.browser
@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_what_is_drawn_of_the_pool_is_what_the_tables_and_counters_say(open_table, block_size):
    tab = open_table()
    tab.get_by_role("combobox", name="block size").select_option(str(block_size))
    add(tab, "short", 2)
    add(tab, "system", 2)
    for _ in range(40):
        press(tab, "Step")
        held = {block for blocks in block_tables(tab).values() for block in blocks}
        drawn = tab.locator("g.held .number").all_text_contents()
        assert sorted(map(int, drawn)) == sorted(held)
        usable = 160 // block_size - 1
        assert counter(tab, "usage") == f"{100 * len(held) / usable:.1f} % ({len(held)} of {usable} blocks)"
        waste = int(counter(tab, "empty slots").split()[0])
        assert waste < block_size * max(len(block_tables(tab)), 1)


@pytest.mark.browser
def test_a_run_goes_on_until_it_is_paused_and_is_heard_only_then(open_table):
    tab = open_table()
    tab.clock.install()
    add(tab, "short")
    press(tab, "Run")
    tab.clock.run_for(5200)
    assert said(tab).startswith("Step 14.") and tab.get_by_role("status").inner_text() == ""
    press(tab, "Pause")
    tab.clock.run_for(5000)
    assert said(tab).startswith("Step 14.") and tab.get_by_role("status").inner_text() == said(tab)
    press(tab, "Run")
    tab.clock.run_for(60_000)
    assert tab.get_by_role("button", name="Run").count() == 1 and counter(tab, "usage").startswith("0.0 %")


@pytest.mark.browser
def test_who_asks_for_less_motion_steps_and_is_offered_no_run(open_table):
    tab = open_table(reduced_motion="reduce")
    assert not tab.get_by_role("button", name="Run").is_visible()
    press(tab, "Step")
    assert said(tab).startswith("Step 5.")
    tab.emulate_media(reduced_motion="no-preference")
    press(tab, "Run")
    tab.emulate_media(reduced_motion="reduce")
    tab.locator(".memlab-block-table button[hidden]", has_text="Run").wait_for(state="hidden")


@pytest.mark.browser
def test_paper_gets_the_first_state_whatever_was_played(open_table):
    tab = open_table()
    add(tab, "long")
    press(tab, "Step", 3)
    played = block_tables(tab)
    assert on_paper(tab) == STILL.read_text(encoding="utf-8") and block_tables(tab) == played
    tab.emulate_media(media="print")
    assert not tab.get_by_role("button", name="Step").is_visible() and tab.locator(".memlab-still").is_visible()


@pytest.mark.browser
def test_requests_differ_in_colour_or_mark_and_stand_out_in_both_modes(open_table):
    tab = open_table()
    add(tab, "short", 16)
    looks = "[...document.querySelectorAll('pattern:not([id$=cached])')].map((pattern) => pattern.innerHTML)"
    assert len(set(tab.evaluate(looks))) == 19
    for scheme in ("light", "dark"):
        in_scheme(tab, scheme)
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        fills = "[...document.querySelectorAll('pattern rect')].map((each) => getComputedStyle(each).fill)"
        assert min(contrast(fill, ground) for fill in tab.evaluate(fills)) >= 3


@pytest.mark.browser
def test_a_busy_pool_has_no_barrier_that_axe_finds_and_fits_a_phone(open_table):
    tab = open_table()
    tab.get_by_role("combobox", name="block size").select_option("4")
    add(tab, "system", 9)
    add(tab, "long", 2)
    press(tab, "Step", 8)
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 640), ("light", 320)):
        in_scheme(tab, scheme)
        tab.set_viewport_size({"width": width, "height": 800})
        assert axe_findings(tab) == [], f"{scheme}, {width} px"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.faults.clear()  # axe tries to read the styles, which a page from disk may not


@pytest.mark.browser
def test_only_a_page_with_a_block_table_loads_what_draws_it(open_table, chromium, url):
    asked = {Path(part.path).name for part in open_table().asked}
    assert {"block-pool.js", "block-table.js", "block-table.css"} <= asked
    other = open_one(chromium, url.replace(PAGE, "search.html"))
    assert not [part.path for part in other.asked if "block-" in part.path]
    other.close()


def test_a_builder_without_scripts_or_svg_gets_the_sentence(tmp_path):
    done, out = build_page(tmp_path, "```{block-table}\n```", "--builder", "custom", "--custom-builder", "latex")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Request A has finished" in next((out / "latex").glob("*.tex")).read_text(encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, a_browser() as browser:
        STILL.write_text(on_paper(open_one(browser, built(Path(folder)))), encoding="utf-8")
