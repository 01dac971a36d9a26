"""A pytest plugin: a line of JSON as each test ends, so that a run cut short leaves them."""

import json
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--findings", type=Path, help="where name and finding of each test go")


def pytest_configure(config: Any) -> None:
    path = config.getoption("--findings")
    if path is not None and not hasattr(config, "workerinput"):  # not in xdist's workers
        config.pluginmanager.register(Findings(path))


class Findings:
    """Appends [name, finding]: passed, failed and why, or left out; and the figure recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
            text = f"FAILED: {said[0][:160]}"
        elif report.skipped:
            text = f"left out: {report.longrepr[2].removeprefix('Skipped: ')}"
        else:
            text = f"passed in {report.duration:.0f} s"
        figures = [value for name, value in report.user_properties if name == "figure"]
        name = report.nodeid.partition("::")[2].removeprefix("test_")
        with self._path.open("a") as file:
            file.write(json.dumps([name, "; ".join([text, *figures])]) + "\n")
