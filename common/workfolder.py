"""A run's local folder, and cleaning up after runs that were killed."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.lifetime import file_lock
from common.run import UserError
from common.s3 import abort_left_uploads

LOCK_FILE, UPLOAD_JOURNAL = ".lock", "uploads"


@contextlib.contextmanager
def work_folder(parent: Path | None, *, prefix: str = "tokenize-") -> Iterator[Path]:
    """A folder of this run's own for files being written; removed whatever happens.

    The run and its workers hold a lock in it, so that the next run removes what a killed one left,
    the uploads that it left half done included.
    """
    place = parent or Path(tempfile.gettempdir())
    try:
        remove_left_folders(place, prefix)
        hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=place))
    except OSError as error:
        raise UserError(f"--work-dir {place}: {error.strerror}") from error
    (hidden / LOCK_FILE).touch()
    with file_lock(hidden / LOCK_FILE):  # before other runs can find it
        folder = hidden.rename(place / hidden.name.lstrip("."))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            # again: workers may outlive their killed run by a moment, and hold its folder
            remove_left_folders(place, prefix)


def remove_left_folders(place: Path, prefix: str = "tokenize-") -> None:
    """Clean up after runs that were killed here; what cannot be cleaned stays for the next run."""
    for left in place.glob(f"{prefix}*/{LOCK_FILE}"):
        # BlockingIOError, an OSError: its run lives. UserError: the run will say what S3 refuses.
        with contextlib.suppress(OSError, UserError), file_lock(left):
            abort_left_uploads(left.with_name(UPLOAD_JOURNAL))
            shutil.rmtree(left.parent)
