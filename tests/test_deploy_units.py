"""Units of systemd: every role's is one that systemd takes whole, and starts a command that there is."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import prefetcher
from prefetcher.cli import app
from prefetcher.config import setting_names

UNIT = Path(prefetcher.__file__).parent.parent / "deploy" / "systemd" / "prefetcher@.service"
ROLES = ("up", "agent", "controller", "ingest", "api", "scheduler")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: `apt-get install systemd`")
def test_systemd_takes_every_line(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/prefetcher/bin/prefetcher", str(Path(sys.executable).parent / "prefetcher"))
    unit = tmp_path / UNIT.name
    for broken in ("", "NoSuchKey=yes\n[Install]"):
        changed = text.replace("User=prefetcher", f"User={getpass.getuser()}")
        unit.write_text(changed.replace("[Install]", broken or "[Install]"))
        done = subprocess.run(
            ["systemd-analyze", "verify", str(tmp_path / "prefetcher@agent.service")], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode == 0 and not done.stderr) == (not broken), done.stderr


def test_roles_and_settings_that_it_names_are_there() -> None:
    text = UNIT.read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"prefetcher@(\w+)", text)) == set(ROLES)
    assert set(ROLES) <= set(commands)
    named = set(re.findall(r"^Environment=(PREFETCHER_\w+)=", text, re.MULTILINE))
    assert named - {"PREFETCHER_CONFIG"} <= set(setting_names())
