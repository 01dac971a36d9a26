"""What every script does around its work: flags, log lines, progress, tables, run.json, exit codes.

Standard library and tqdm only, so that the tokenizing machine never needs torch. Log lines go to
stderr as `2026-01-02T03:04:05Z INFO tokenize: key=value ...` (UTC); stdout is for results.
"""

import argparse
import importlib.metadata
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_TERMINATED = 143  # 128 + SIGTERM

RECORDED_PACKAGES = (
    "boto3",
    "datasets",
    "fastokens",
    "jinja2",
    "numpy",
    "orjson",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "tqdm",
    "transformers",
)


class UserError(Exception):
    """A failure a person can cure; its text is one or two lines naming cause and cure. Exit 1."""

    exit_code = EXIT_FAILED


class UsageError(UserError):
    """A command line that cannot work as given; exit code 2."""

    exit_code = EXIT_USAGE


class Terminated(BaseException):
    """SIGTERM arrived: raised in the main thread so that `finally` blocks clean up. Exit 143."""


# ---- flags


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1; underscores allowed."""
    return _bounded(int, text, low=1, what="a whole number of at least 1")


def non_negative_int(text: str) -> int:
    """Parse a whole number of at least 0; underscores allowed."""
    return _bounded(int, text, low=0, what="a whole number of at least 0")


def positive_float(text: str) -> float:
    """Parse a number above 0."""
    value = _bounded(float, text, low=0.0, what="a number above 0")
    if value == 0 or math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0")
    return value


def non_negative_float(text: str) -> float:
    """Parse a number of at least 0."""
    return _bounded(float, text, low=0.0, what="a number of at least 0")


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    return _bounded(float, text, low=0.0, high=1.0, what="a number from 0 to 1")


def int_list(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers of at least 0, such as 1,16,31."""
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers like 1,16,31")
    return values


def _bounded(
    kind: type, text: str, *, low: float, high: float = float("inf"), what: str
) -> Any:  # int or float, as `kind` says
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: must be {what}")
    return value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The header docstring as it stands, and each default once, from the parser itself."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help  # "(default: None)" tells nobody anything
        return super()._get_help_string(action)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows the header docstring, refuses abbreviated flags and has --debug."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [flags]; --help lists them",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug lines")
    return parser


# ---- log lines and numbers for people


class _UtcFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)


def setup_logging(
    name: str, *, debug: bool = False, log_file: Path | None = None
) -> logging.Logger:
    """Send this script's log lines, and the package's warnings, to stderr and `log_file`."""
    formatter = _UtcFormatter(
        "%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ"
    )
    log = logging.getLogger(name)
    log.setLevel(logging.DEBUG if debug else logging.INFO)
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_TqdmSafeHandler()]
    if log_file is not None:
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(formatter)
        log.addHandler(handler)
    logging.getLogger("common").handlers = handlers
    return log


class _TqdmSafeHandler(logging.StreamHandler):
    """Writes above a live progress bar instead of through it.

    A terminal that is gone, or a full disk behind stderr, is no reason to end a run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            sys.stderr.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass


def format_count(value: float) -> str:
    """12,345 up to six digits, then 1.87M, 1.87B."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if abs(value) >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:,.0f}"


def format_bytes(value: float) -> str:
    """Bytes in powers of 1,000, as disks and networks count: 512B, 3.4MB, 1.2GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}B"


def format_duration(seconds: float) -> str:
    """Seconds as 8.2s, 4m10s or 3h05m."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def format_fields(fields: Mapping[str, Any]) -> str:
    """key=value pairs for one greppable log line."""
    return " ".join(f"{key}={value}" for key, value in fields.items())


def print_settings(log: logging.Logger, settings: Mapping[str, Any]) -> None:
    """Log the resolved settings as one block before any work starts."""
    width = max(len(key) for key in settings)
    lines = [f"  {key:<{width}}  {value}" for key, value in settings.items()]
    log.info("settings\n%s", "\n".join(lines))


def print_table(title: str, rows: Iterable[tuple[str, Any]], *, file: Any = None) -> None:
    """Print a two-column summary table; stdout unless `file` is given."""
    pairs = [(key, str(value)) for key, value in rows]
    left = max((len(key) for key, _ in pairs), default=0)
    right = max([len(value) for _, value in pairs] + [len(title) - left - 2])
    rule = "-" * (left + 2 + right)
    body = [f"{key:<{left}}  {value}" for key, value in pairs]
    print("\n".join(["", title, rule, *body, rule]), file=file or sys.stdout, flush=True)


class Progress:
    """A bar with rate and ETA on a terminal; elsewhere a log line at most every `every_s`."""

    def __init__(
        self, log: logging.Logger, *, total: float | None, unit: str, every_s: float = 10.0
    ) -> None:
        self._log, self._total, self._unit, self._every_s = log, total, unit, every_s
        self._start = self._last_line = time.monotonic()
        self._initial = self._done = 0.0
        self._bar = tqdm(total=total, unit=unit, unit_scale=True, disable=None, file=sys.stderr)

    def start_at(self, done: float) -> None:
        """Count `done` as finished earlier, so that it does not flatter the rate."""
        self._initial = self._done = done
        self._bar.initial = done
        self._bar.n = done

    def update(self, amount: float, **fields: Any) -> None:
        """Add finished work; `fields` are shown beside the bar or in the next line."""
        self._done += amount
        self._bar.update(amount)
        if fields and not self._bar.disable:
            self._bar.set_postfix_str(format_fields(fields), refresh=False)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= self._every_s:
            self._last_line = now
            self._log.info(format_fields({**self._counts(now), **fields}))

    def _counts(self, now: float) -> dict[str, str]:
        rate = (self._done - self._initial) / max(now - self._start, 1e-9)
        counts = {self._unit: format_count(self._done)}
        if self._total is not None:
            counts[self._unit] += f"/{format_count(self._total)}"
        counts[f"{self._unit}/s"] = f"{rate:,.1f}"
        if self._total is not None and rate > 0:
            counts["eta"] = format_duration((self._total - self._done) / rate)
        return counts

    def close(self) -> None:
        """Take the bar off the terminal's last line."""
        self._bar.close()


# ---- files


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all: temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_bytes(value: Any) -> bytes:
    """Canonical JSON for files: sorted keys, UTF-8, two-space indent, newline at the end."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()


def utc_now() -> str:
    """The time as 2026-01-02T03:04:05Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def run_facts(
    *, settings: Mapping[str, Any], started: str, counts: Mapping[str, Any]
) -> dict[str, Any]:
    """What run.json holds: argv, git sha, versions, machine, settings, times and counts."""
    return {
        "argv": sys.argv,
        "counts": dict(counts),
        "finished": utc_now(),
        "git_sha": git_sha(),
        "machine": {"cpus": os.cpu_count(), "host": platform.node(), "system": platform.platform()},
        "packages": _package_versions(),
        "python": platform.python_version(),
        "settings": {key: _plain(value) for key, value in settings.items()},
        "started": started,
    }


def _plain(value: Any) -> Any:
    return (
        list(value)
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, Path)
        else value
    )


def _package_versions() -> dict[str, str]:
    versions = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the tokenizing machine has no torch
    return versions


def git_sha() -> str | None:
    """The checkout's commit, with "+changes" when files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent.parent
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        return sha + "+changes" if _git(folder, "status", "--porcelain", "-uno") else sha
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return result.stdout.strip()


# ---- ends


def one_line(error: BaseException) -> str:
    """A library's error in a line of 200 characters at most."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def raise_on_signals() -> None:
    """Turn SIGTERM into `Terminated` in the main thread, as Ctrl-C is KeyboardInterrupt.

    A second signal, while the first one is cleaned up after, ends the process at once.
    """

    def stop(signum: int, frame: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated

    def end(signum: int, frame: Any) -> None:
        os._exit(EXIT_INTERRUPTED if signum == signal.SIGINT else EXIT_TERMINATED)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def exit_with(
    main: Callable[[Sequence[str] | None], int], *, skip_teardown: bool = False
) -> NoReturn:
    """Run `main` and exit with its code; a UserError becomes its text on stderr, no traceback.

    `skip_teardown` leaves the interpreter's own end out: it aborts a process whose background
    threads are inside C++ code just then (Arrow, torch).
    """
    debug = "--debug" in sys.argv[1:]
    try:
        code = main(None)
    except UserError as error:
        if debug:
            raise
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except Terminated:
        print(f"{Path(sys.argv[0]).name}: terminated", file=sys.stderr)
        code = EXIT_TERMINATED
    except BrokenPipeError:
        # The reader of stdout left (| head); point it elsewhere so that the exit stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.stdout.flush()
    if skip_teardown:
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
