"""How fast the program is there, what it imports, and what it says when it can't."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import REAL

import prefetcher
from prefetcher.cli_help import SECTIONS

HEAVY = {"torch", "prophet", "pandas", "sklearn", "lightgbm", "numba", "numpy", "scipy", "pyarrow", "fastapi", "redis"}


def imports_of(code: str) -> tuple[set[str], float]:
    """Top-level modules after `code`, and the seconds that it took of the process's own time."""
    script = (
        "import json, sys, time; start = time.process_time()\n"
        f"{code}\n"
        "print(json.dumps([sorted({m.split('.')[0] for m in sys.modules}), time.process_time() - start]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    names, took_s = json.loads(done.stdout)
    return set(names), took_s


def test_importing_the_package_is_quick_and_light() -> None:
    names, took_s = imports_of("import prefetcher")
    assert names & HEAVY == set()
    # Processor time of that process alone, so that a busy machine does not matter.
    assert took_s < 0.3


def test_the_command_line_imports_nothing_heavy_for_its_help() -> None:
    names, _ = imports_of("import prefetcher.cli")
    assert names & HEAVY == set()


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefetcher", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=os.environ | environment)


@pytest.mark.parametrize(
    ("arguments", "code", "hint"),
    [
        (("nonsense",), 2, "nonsense"),
        (("replay", "log.csv", "--out", "o"), 2, "--capacity-ratio"),
        (("replay", "log.csv", "--out", "o", "--capacity-ratio", "0.5", "--host-bytes", "1GB"), 2, "not both"),
        (("replay", "none.csv", "--out", "o"), 1, "none.csv: there is no such log"),
        (("replay", "log.csv", "--out", "o", "--default-bytes", "1", "--capacity-ratio", "1", "--policy", "lruu"), 2, "lhd-smith-bypass"),
        (("replay", "log.csv", "--out", "o", "--host-bytes", "many"), 2, "not a size"),
        (("replay", "log.csv", "--out", "o", "--host-bytes", "1e400"), 2, "not a size"),
        (("replay", "log.csv", "--out", "o", "--host-bytes", "1e300"), 2, "petabyte"),
        (("replay", "log.csv", "--out", "o", "--host-bytes", "1", "--seed", "-1"), 2, "--seed"),
        (("replay", "log.csv", "--out", "/dev/null/o", "--host-bytes", "1"), 2, "--out"),
        (("replay", "log.csv", "--out", "/dev/null", "--host-bytes", "1"), 2, "--out"),
        (("up", "--models", ".", "--host-bytes", "1", "--port", "0", "--state-dir", "/dev/null"), 2, "--state-dir"),
        *(
            (("replay", "log.csv", "--out", "o", "--default-bytes", "1", *capacity, option, value), 2, option)
            for capacity, option, values in (
                ((), "--capacity-ratio", ("nan", "inf", "-1", "0", "1e300")),
                (("--capacity-ratio", "1"), "--warmup-ratio", ("nan", "-1", "1", "1e300")),
                (("--capacity-ratio", "1"), "--price", ("nan", "inf", "-1", "1e300")),
                (("--capacity-ratio", "1"), "--link-bytes-per-s", ("0", "1e300")),
                (("--capacity-ratio", "1"), "--nodes", ("0", "100000")),
            )
            for value in values
        ),
        (("up", "--models", ".", "--tz", "Europe/Berlin"), 2, "--follow"),
        (("up", "--models", ".", "--map", "litellm"), 2, "--follow"),
        (("bench", "nothing", "--json", "x.json"), 2, "nothing"),
        (("bench", "../load", "--json", "x.json"), 2, "load"),
        (("pin", "m", "--url", "nonsense"), 2, "http://"),
        (("manifest", "/nonexistent"), 1, "/nonexistent"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, hint: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("ts,model\n1,a\n")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr


def test_a_start_as_ever_says_what_a_quick_one_says(tmp_path: Path) -> None:
    """What `launching` starts is what `python -m prefetcher` is."""
    for arguments in (("config", "check"), ("up", "--models", "none", "--port", "0")):
        quick, real = (run(*arguments, cwd=tmp_path, **{REAL: how}) for how in ("quick", "real"))
        assert (quick.returncode, quick.stdout, quick.stderr) == (real.returncode, real.stdout, real.stderr)


def test_the_version_is_said() -> None:
    done = run("--version", **{REAL: "real"})
    assert (done.returncode, done.stdout) == (0, f"prefetcher {prefetcher.__version__}\n")


def test_help_names_every_command(tmp_path: Path) -> None:
    done = run("--help", **{REAL: "real"})
    assert done.returncode == 0
    for names in SECTIONS.values():
        for name in names:
            assert f"\n  {name} " in done.stdout
    assert "\nMore:" not in done.stdout, "a command that no section names"


def test_commands_and_options_are_completed() -> None:
    def completed(words: str) -> list[str]:
        # As the function does that `--show-completion bash` prints.
        script = "import sys; from prefetcher.cli import main; sys.argv = ['prefetcher']; main()"
        environment = os.environ | {"_PREFETCHER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment)
        return done.stdout.split()

    assert completed("prefetcher st") == ["status"]
    assert completed("prefetcher hint --s") == ["--surface", "--session", "--source"]
    shown = subprocess.run([sys.executable, "-m", "prefetcher", "--help"], capture_output=True, text=True, timeout=60).stdout
    assert "--install-completion" in shown


@pytest.mark.parametrize(
    "wrong", [("--models", "AT/none"), ("--follow", "AT/log", "--map", "nonsense"), ("--host-dir", "AT/none"), ("--port", "PORT")]
)
def test_a_start_that_fails_leaves_no_state_folder(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    (tmp_path / "models").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = {"--models": str(tmp_path / "models"), "--host-bytes": "1MB", "--port": "0", "--state-dir": str(tmp_path / "st")}
        options |= {"--socket": str(tmp_path / "agent.sock")}
        given = (part.replace("PORT", port).replace("AT", str(tmp_path)) for part in wrong[1::2])
        options |= dict(zip(wrong[::2], given, strict=True))
        done = run("up", *(part for option in options.items() for part in option))
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "st").exists()
