"""A record is checked when it is written and read; every committed one satisfies the schema and its own ledger."""

import ast
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from fixtures_record import all_records, cuda_record
from memlab import flags, lab, record, vllm_main
from memlab.errors import RecordError
from memlab.flags import ServeFlags
from memlab.ledger import MemoryLedger
from memlab.record import Traffic

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = sorted(path for path in record.RECORDS.rglob("*.json") if not path.name.endswith(".schema.json"))


@pytest.mark.parametrize("made", all_records(), ids=lambda made: made.id)
def test_what_is_written_is_what_is_read(made, tmp_path):
    assert record.read(record.write(made, tmp_path)) == made


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_record_holds(path):
    """The schema (as other programs see it), the identities, the size, the privacy, and its place."""
    data = json.loads(path.read_text())
    jsonschema.validate(data, record.json_schema())
    found = record.read(path)
    assert path.stat().st_size <= record.MAX_BYTES
    assert record.privacy_problems(path.read_text()) == []
    assert path.relative_to(record.RECORDS).parts == (found.machine.name, found.lab, f"{found.id}.json")
    identities = [identity for rank in found.ranks for view in (rank.stated, rank.seen) if view for identity in
                  view.identities()]  # fmt: skip
    known = identities or found.outcome != "ok" or found.engine.backend == "cpu"
    assert known, "a served run on a GPU whose ledger nothing can be said of"
    assert all(identity.holds for identity in identities)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_our_rule_for_vllms_defaults_is_what_vllm_resolved(path):
    found = record.read(path)
    context = (found.machine, found.engine.backend, found.engine.vllm, record.model_max_len(found), found.card)
    ours = record.memory_flags(found.served_flags, *context)
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill"):
        if name in found.flags.resolved:
            assert ours[name] == found.flags.resolved[name], name


def test_the_published_schema_is_the_one_of_the_code():
    published = json.loads((record.RECORDS / "record.schema.json").read_text())
    assert published == record.json_schema(), "run: memlab records schema > labs/records/record.schema.json"


def change(data: dict, path: str, value):
    *parents, last = path.split(".")
    for name in parents:
        data = data[int(name)] if isinstance(data, list) else data[name]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("schema", 99, "schema is 99"),
        ("outcome", "fine", "none of ok"),
        ("surprise", 1, "unknown surprise"),
        ("engine", {"backend": "cuda"}, "vllm missing"),
        ("machine.gpu_count", "one", "int is needed"),
        ("machine.gpu_count", True, "int is needed"),
        ("machine.total_gib", math.nan, "no number"),
        ("ranks.0.stated.kv_cache_gib", 99.0, "fill the budget"),
        ("ranks.0.seen.headroom_gib", 0.0, "fill the card"),
        ("ranks.0.seen.view", "stated", "under seen"),
        ("ranks.0.timeline.time_s", [1.0, 0.5], "differ in length"),
        ("recorded_at", "yesterday", "ISO 8601"),
        ("id", "../../etc/passwd", "file name"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_at_the_place(path, value, word):
    data = record.to_dict(cuda_record())
    change(data, path, value)
    with pytest.raises(RecordError, match=word):
        record.from_dict(data)


def test_a_term_that_a_view_cannot_know_is_absent_and_not_zero():
    data = record.to_dict(cuda_record())
    assert "unprofiled_gib" not in data["ranks"][0]["stated"], "vLLM's log cannot know it"
    assert record.from_dict(data).stated.unprofiled_gib is None


def test_a_peak_that_the_timeline_does_not_show_is_refused():
    made = cuda_record()
    rank = made.ranks[0]
    line = replace(rank.timeline, used_gib=[value * 0.9 for value in rank.timeline.used_gib])
    with pytest.raises(RecordError, match="the peak is"):
        record.validate(replace(made, ranks=[replace(rank, timeline=line)]))


def test_a_line_of_the_log_is_written_as_it_was():
    made = cuda_record(log=["Using FLASH_ATTN out of ['FLASH_ATTN', 'TRITON_ATTN'] [1, 2]"])
    assert record.from_dict(json.loads(record.dumps(made))).log == made.log


def test_a_record_larger_than_a_page_of_git_is_refused():
    with pytest.raises(RecordError, match="make its series coarser"):
        record.dumps(cuda_record(log=["a line of the log"] * 5000))


def test_a_disk_that_is_full_loses_neither_the_record_nor_an_older_file(tmp_path, monkeypatch):
    made = cuda_record()
    path = record.write(made, tmp_path)
    before = path.read_text()

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RecordError, match="No space left on device.*not lost"):
        record.write(replace(made, repeat=2), tmp_path)
    assert path.read_text() == before
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize(
    "text",
    ["/home/maria/model", "/root/.cache/x", "C:\\Users\\maria", "http://10.1.2.3:8000", "hf_" + "a" * 30],
)
def test_what_may_name_a_person_or_a_machine_is_found(text):
    assert record.privacy_problems(f"vLLM said {text} today")


def test_loopback_versions_and_urls_are_no_secrets():
    assert record.privacy_problems("http://127.0.0.1:8000/metrics, vLLM 0.33.0, https://docs.vllm.ai/en/usage") == []
    assert record.privacy_problems("host gpu-17 said so", ("gpu-17",))


# ---- what a replay finds ----


def test_a_default_that_is_spelled_out_finds_the_same_run():
    made = cuda_record()
    asked = made.served_flags
    spelled = asked.with_(kv_cache_dtype="auto", max_num_seqs=256, gpu_memory_utilization=0.92, seed=7)
    for flags_ in (asked, spelled):
        assert record.find([made], "01-ledger", "llama-3.1-8b", flags_, made.traffic) == [made]


def test_repeats_come_back_as_a_set_in_order():
    second, first = cuda_record("synthetic-r2", repeat=2), cuda_record("synthetic-r1")
    found = record.find([second, first], "01-ledger", "llama-3.1-8b", first.served_flags, first.traffic)
    assert [one.repeat for one in found] == [1, 2]


def test_a_miss_names_the_nearest_and_the_difference():
    made = cuda_record()
    with pytest.raises(RecordError, match=r"nearest is synthetic-eager: max_num_batched_tokens 2048 instead of 4096"):
        asked = made.served_flags.with_(max_num_batched_tokens=4096)
        record.find([made], "01-ledger", "llama-3.1-8b", asked, made.traffic)
    with pytest.raises(RecordError, match="traffic"):
        record.find([made], "01-ledger", "llama-3.1-8b", made.served_flags, Traffic(1, 1, 1))
    with pytest.raises(RecordError, match="no run is recorded on moon"):
        record.find([made], "01-ledger", "llama-3.1-8b", made.served_flags, machine="moon")


def test_ids_tell_settings_apart_and_are_fit_for_files():
    made = cuda_record()
    ids = {
        record.make_id(made.machine, made.engine, model, asked, traffic, None, repeat)
        for model in ("llama-3.1-8b", "org/Model With Spaces")
        for asked in (ServeFlags(), ServeFlags(max_num_seqs=64))
        for traffic in (None, Traffic(8, 8, 1))
        for repeat in (1, 2)
    }
    assert len(ids) == 16
    for one in ids:
        record.validate(replace(made, id=one))


# ---- the ledger's own arithmetic ----


def test_the_terms_of_each_form_fill_the_budget():
    consumed = MemoryLedger("stated", budget_gib=34.95, consumed_gib=15.68, activation_gib=0.81, kv_cache_gib=18.45)
    parts = MemoryLedger("stated", budget_gib=34.95, weights_gib=15.0, non_torch_gib=0.22, activation_gib=0.16,
                         kv_cache_gib=19.56)  # fmt: skip
    for view in (consumed, parts):
        (identity,) = view.identities()
        assert identity.holds
        assert not replace(view, kv_cache_gib=view.kv_cache_gib + 0.1).identities()[0].holds


def test_graphs_count_only_where_they_were_subtracted():
    view = MemoryLedger("stated", budget_gib=34.95, consumed_gib=15.68, activation_gib=1.04, kv_cache_gib=17.31,
                        cuda_graphs_estimated_gib=0.92, graphs_subtracted=True)  # fmt: skip
    assert view.identities()[0].holds
    assert not replace(view, graphs_subtracted=False).identities()[0].holds


def test_a_pool_given_in_bytes_owes_the_budget_nothing():
    view = MemoryLedger("stated", budget_gib=30.0, consumed_gib=15.0, activation_gib=1.0, kv_cache_gib=2.0)
    assert not view.identities()[0].holds
    assert replace(view, pool_given=True).identities() == []


def test_a_watch_of_somebodys_server_is_not_kept_among_the_runs_of_labs(tmp_path):
    path = record.write(cuda_record("watch-h200-0.33.0-model-20261202", lab=record.WATCHED), tmp_path)
    with pytest.raises(RecordError, match="no lab can replay it"):
        lab.keep(path, tmp_path / "records")


# ---- the library's first rule: the plain half needs nothing installed ----

PLAIN = ("units", "errors", "flags", "launch", "pasted", "configs", "quantization", "vision", "shapes", "weights",
         "cards", "versions", "kv_layout", "estimates", "ledger", "planner", "plan_report", "vllm_log", "findings",
         "facts", "remedies", "doctor_rules", "episodes", "failing_step", "failures", "doctor_report", "doctor",
         "record", "tables", "plan_view", "finding_view", "page")  # fmt: skip
ORDER = (*PLAIN, "gpu", "host", "supervisor", "ballast", "worker_extension", "vllm_main", "bench_main", "models",
         "process", "warm", "server", "metrics", "traffic", "repeats", "goodput", "checks", "lab", "sweep", "pruning",
         "screen", "attach", "watch", "notebook", "plots", "rank_plots", "comparisons", "traffic_plots", "token_plots",
         "recommend", "clinic", "preflight", "panel", "schedule_plots", "widgets", "cli", "__main__")  # fmt: skip


def test_the_plain_modules_import_with_the_standard_library_alone():
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'labs')!r})\nfrom memlab import {', '.join(PLAIN)}\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def imports_of(module: str) -> set[str]:
    tree = ast.parse((ROOT / "labs" / "memlab" / f"{module}.py").read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "memlab":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memlab."):
            found.add(node.module.split(".")[1])
    return found


def test_a_module_imports_only_from_those_before_it():
    for number, module in enumerate(ORDER):
        later = imports_of(module) - set(ORDER[:number])
        assert not later, f"{module} imports {later}"


def test_every_module_has_its_place_in_the_order():
    here = {path.stem for path in (ROOT / "labs" / "memlab").glob("*.py")} - {"__init__"}
    assert here == set(ORDER)
    assert imports_of("__init__") == set()


def programs() -> list[Path]:
    """Every file of Python outside the tests: the package, the book's extensions, the commands."""
    commands = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    commands = [path for path in commands if path.suffix == ".py" or "python" in path.read_text().split("\n")[0]]
    return [*(ROOT / "labs" / "memlab").glob("*.py"), *(ROOT / "book" / "_ext").glob("*.py"), *commands]


def private_names_used(path: Path, ours: set[str]) -> set[str]:
    """Names with an underscore that a file takes from a module of this project, as ``module._name``."""
    modules, used = {}, set()
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for node in nodes:
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module == "memlab"):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] in ours:
            used |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = modules.get(ast.unparse(node.value), "").split(".")[-1]
            used |= {f"{owner}.{node.attr}"} if owner in ours else set()
    return used


def test_a_name_with_an_underscore_stays_in_its_module():
    ours = {path.stem for path in programs()}
    assert {"plots", "record_pages", "environment", "bench"} <= ours
    assert {path.name: used for path in programs() if (used := private_names_used(path, ours))} == {}


def test_the_flags_that_a_server_states_are_ones_we_model():
    assert set(vllm_main._PLACES) <= {field.name for field in flags.MODELLED}


def test_a_run_on_a_played_card_says_so_wherever_it_is_shown():
    made = cuda_record(card="NVIDIA GeForce RTX 3090")
    assert f"{made.machine.gpu} playing NVIDIA GeForce RTX 3090" in made.where()
