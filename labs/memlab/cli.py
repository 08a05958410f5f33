"""The command ``memlab``. Each subcommand imports what it needs, so that one without vLLM or NumPy still runs."""

import argparse
import contextlib
import json
import os
import sys
from datetime import datetime
from pathlib import Path

from memlab.errors import MemlabError


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="memlab", description="GPU memory in vLLM: run labs, read records.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    preflight = commands.add_parser("preflight", help="what this machine is and what it can run")
    preflight.add_argument("--json", action="store_true")

    run = commands.add_parser("run", help="run a lab headless, from top to bottom")
    run.add_argument("lab", help="its number or name: 01, 01-ledger")
    run.add_argument("--mode", choices=("auto", "live", "replay"), help="default: live where vLLM can run")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    run.add_argument("--keep", action="store_true", help="put the records into labs/records")
    run.add_argument("--json", action="store_true")

    sweep = commands.add_parser("sweep", help="run the settings of a grid file on all idle GPUs; it can be resumed")
    sweep.add_argument("grids", type=Path, nargs="+", metavar="GRID", help="JSON lists of settings, by priority")
    sweep.add_argument("--seconds", type=float, help="begin nothing that would end later")
    sweep.add_argument("--keep", action="store_true", help="put the records into labs/records")

    watch = commands.add_parser("watch", help="look at a vLLM server that is running, read-only; keeps a record")
    watch.add_argument("--url", default="http://127.0.0.1:8000", help="where it answers (default: %(default)s)")
    watch.add_argument(
        "--pid", type=int, help="its process, also while it starts (default: the one that listens there)"
    )
    watch.add_argument("--log", type=Path, help="the file of its output (default: where its process writes, if a file)")
    watch.add_argument("--seconds", type=float, help="end after so long (default: Ctrl-C, or the server's end)")
    watch.add_argument("--json", action="store_true", help="a line of JSON each second, and the record at the end")

    plan = commands.add_parser(
        "plan",
        help="what vLLM will say of a start, before it is tried",
        epilog="Flags of vllm serve follow, under vLLM's own names: --max-model-len, --tensor-parallel-size, ...",
    )
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", type=Path, help="the model's config.json")
    model.add_argument("--model", help="or a model that memlab knows: meta-llama/Llama-3.1-8B-Instruct")
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument("--card", help="the GPU by name: 3090, H200")
    size.add_argument("--card-gib", type=float, help="or its memory in GiB, as CUDA reports it")
    plan.add_argument("--compute-capability", help="of a card given in GiB, such as 8.6")
    plan.add_argument("--vllm-version", default="0.33.0", help="default: %(default)s")
    plan.add_argument("--json", action="store_true")
    plan.add_argument("--explain", action="store_true", help="the rule behind each number")

    doctor = commands.add_parser("doctor", help="a log of vLLM: what ran out, when, and what to change")
    doctor.add_argument("log", nargs="?", default="-", metavar="FILE", help="the log (default: -, the standard input)")
    doctor.add_argument("--command", dest="served", help="the command line, for what the log does not state")
    doctor.add_argument("--config", type=Path, help="the model's config.json, so that gains are computed")
    doctor.add_argument("--card", help="the smaller card that the GPU plays: utilizations are then shares of it")
    doctor.add_argument("--json", action="store_true")

    records = commands.add_parser("records", help="list, check, keep recorded runs")
    which = records.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = which.add_parser("list", help="the records of the project")
    listing.add_argument("--json", action="store_true")
    checking = which.add_parser("check", help="hold files, or all records, to the schema and the ledger's identities")
    checking.add_argument("files", nargs="*", type=Path)
    keeping = which.add_parser("keep", help="promote live runs to labs/records, after a look for anything private")
    keeping.add_argument("ids", nargs="+", help="ids under runs/, or files")
    again = which.add_parser("diagnose", help="put what today's doctor finds in a run's whole log into its record")
    again.add_argument("file", type=Path, help="the record")
    again.add_argument("log", type=Path, help="vLLM's whole output of that run")
    which.add_parser("schema", help="the schema as JSON Schema")

    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "plan":
        arguments.serve = rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        commands_ = {"preflight": _preflight, "run": _run, "sweep": _sweep, "watch": _watch, "doctor": _doctor}
        return (commands_ | {"records": _records, "plan": _plan})[arguments.command](arguments)
    except MemlabError as error:
        print(f"memlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("memlab: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read this, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes once more, and says so
        return 0


def _preflight(arguments) -> int:
    from memlab import preflight

    survey = preflight.survey()
    if arguments.json:
        print(json.dumps(survey.to_dict(), indent=1))
        return 0 if survey.ready else 1
    for check in survey.checks:
        print(f"{check.level.upper() if check.level == 'stop' else check.level:4}  {check.name}: {check.detail}")
        if check.fix:
            print(f"      {check.fix}")
    print()
    for verdict in survey.labs:
        print(f"{verdict.lab:28} {preflight.RUNS[verdict.runs]}: {verdict.reason}")
    return 0 if survey.ready else 1


def _value(text: str):
    """A parameter's value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _run(arguments) -> int:
    from memlab import lab, notebook, plots, record

    source = notebook.find(arguments.lab)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = lab.runs_folder() / f"{source.stem}-{stamp}"
    output = folder / source.name
    environment = {"MEMLAB_RUNS": str(folder)}
    if arguments.mode:
        environment["MEMLAB_MODE"] = arguments.mode
    parameters = {name: _value(value) for name, value in arguments.parameter}
    print(f"Running {source.stem}. Stop with Ctrl-C.", flush=True)
    seconds = notebook.execute(source, output, parameters, environment)
    paths = sorted(folder.rglob("run-*/*-r*.json"), key=lambda path: path.stat().st_mtime)
    found = [record.read(path) for path in paths]
    if arguments.keep:
        paths = [lab.keep(path) for path in paths]
    if arguments.json:
        runs = [{"id": r.id, "outcome": r.outcome, "record": str(p)} for r, p in zip(found, paths, strict=True)]
        print(json.dumps({"notebook": str(output), "seconds": round(seconds, 1), "runs": runs}, indent=1))
        return 0
    print()
    if found:
        print(plots.ledger_table(*found))
    for one, path in zip(found, paths, strict=True):
        print(f"\n{one.id}: {lab.summary(one)}\n  record    {_short(path)}")
    print(f"\nnotebook    {_short(output)}\n{source.stem} took {seconds / 60:.1f} min")
    return 0


def _sweep(arguments) -> int:
    from memlab import lab, record, sweep

    entries = [entry for grid in arguments.grids for entry in _grid(grid)]

    def keep(found: record.RunRecord) -> None:
        if arguments.keep and found.outcome != "stopped":
            lab.keep(next(lab.runs_folder().rglob(f"run-*/{found.id}.json")))

    def say(line: str) -> None:
        print(line, flush=True)

    settings = [sweep.from_dict(entry) for entry in entries]
    found = sweep.sweep(settings, "live", arguments.seconds, say, keep, kept=arguments.keep)
    for one in found:
        print(f"{one.id:60s} {lab.summary(one)}")
    return 0


def _grid(path: Path) -> list[dict]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MemlabError(f"{path} is no grid file ({error}): give a JSON list of settings") from error


def _watch(arguments) -> int:
    from memlab import watch

    return watch.run(arguments.url, arguments.pid, arguments.log, arguments.seconds, arguments.json)


def _config(path: Path) -> dict:
    """A model's ``config.json``."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MemlabError(f"{path} cannot be read ({error.strerror}): give the model's config.json") from error
    except (ValueError, RecursionError) as error:
        raise MemlabError(f"{path} is no JSON ({error}): give the model's config.json") from error
    if not isinstance(config, dict):
        raise MemlabError(f"{path} is no config.json: it holds no object")
    return config


def _plan(arguments) -> int:
    from memlab import cards, configs, flags, ledger, plan_report, planner, shapes

    config = _config(arguments.config) if arguments.config else configs.preset(arguments.model)
    card = cards.find(arguments.card) if arguments.card else planner.card_of(arguments.card_gib)
    if arguments.compute_capability:
        card = planner.with_capability(card, _numbers(arguments.compute_capability, "compute capability", "8.6"))
    version = _numbers(arguments.vllm_version, "version of vLLM", "0.33.0")
    given = flags.from_args(arguments.serve)
    strange = [word for word in given.extra if word not in (ledger.HYBRID_OFF, ledger.ASYNC_OFF)]
    if strange:
        raise MemlabError(f"memlab does not count {', '.join(strange)}: leave it out of the plan")
    shape = shapes.from_config(config).partitioned(os.environ.get("VLLM_PP_LAYER_PARTITION"))
    found = planner.plan(shape, card, given, version)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        sys.stdout.reconfigure(errors="replace")  # the bar, where the terminal has no such characters
        print(plan_report.text(found, explained=arguments.explain))
    return 0


def _numbers(text: str, what: str, example: str) -> tuple[int, int]:
    """The first two numbers of a version or a compute capability."""
    first, _, second = text.partition(".")
    second = second.partition(".")[0]
    if not (first.isdigit() and second.isdigit()):
        raise MemlabError(f"{text!r} is no {what}: write it as {example}")
    return int(first), int(second)


def _doctor(arguments) -> int:
    from memlab import doctor, vllm_log

    config = _config(arguments.config) if arguments.config else None
    place = sys.stdin.fileno() if arguments.log == "-" else arguments.log
    if arguments.log == "-" and sys.stdin.isatty():
        print("Paste the log, then a line of its own with Ctrl-D.", file=sys.stderr)
    with _readable(), vllm_log.open_log(place, closefd=arguments.log != "-") as file:
        found = doctor.diagnose(vllm_log.parse_stream(file), arguments.served, config, arguments.card)
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else doctor.report(found))
    return 0


@contextlib.contextmanager
def _readable():
    """A log that cannot be read says what to do."""
    try:
        yield
    except OSError as error:
        raise MemlabError(
            f"{error.filename} cannot be read ({error.strerror}): give the file of vLLM's output"
        ) from error


def _short(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _records(arguments) -> int:
    from memlab import record

    if arguments.action == "schema":
        print(json.dumps(record.json_schema(), indent=1))
    elif arguments.action == "list":
        found = record.read_all()
        if arguments.json:
            print(json.dumps([record.to_dict(one) for one in found]))
        else:
            for one in found:
                print(f"{one.id}  {one.lab}  {one.outcome}  {one.where()}")
    elif arguments.action == "check":
        paths = arguments.files or [p for p in record.RECORDS.rglob("*.json") if not p.name.endswith(".schema.json")]
        for path in paths:
            record.read(path)
        print(f"{len(paths)} records hold")
    elif arguments.action == "diagnose":
        from memlab import lab, vllm_log

        run = record.read(arguments.file)
        with _readable(), vllm_log.open_log(arguments.log) as file:
            found = lab.diagnosed(run, vllm_log.parse_stream(file))
        record.write(found, arguments.file.parent)
        print(f"{found.id}: {found.finding['phase']}")
    else:
        from memlab import lab

        for name in arguments.ids:
            print(f"kept as {_short(lab.keep(_live(name, lab.runs_folder())))}")
    return 0


def _live(name: str, runs: Path) -> Path:
    """A live run's file by its id or path."""
    if Path(name).is_file():
        return Path(name)
    matches = sorted(runs.rglob(f"{name}.json"))
    if not matches:
        raise MemlabError(f"no live run {name} under {runs}: `ls runs/*/run-*/*.json` shows what there is")
    return matches[-1]


if __name__ == "__main__":
    sys.exit(main())
