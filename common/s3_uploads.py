"""The journal of multipart uploads, by which the next run aborts what a killed one left.

A JSON line {event, bucket, key, upload_id, endpoint} for every upload begun and ended.
"""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from common.run import UserError

UPLOAD_OPERATIONS = ("CreateMultipartUpload", "CompleteMultipartUpload", "AbortMultipartUpload")


class UploadJournal:
    """The multipart uploads of this process, in a file too where one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock, self._endpoint = path, threading.Lock(), ""
        self._open: set[tuple[str, str, str]] = set()

    def listen(self, client: Any) -> None:
        """Note every upload of a client, before its first part is sent (botocore's hooks)."""
        self._endpoint = client.meta.endpoint_url
        for operation in UPLOAD_OPERATIONS:
            client.meta.events.register(f"before-parameter-build.s3.{operation}", self._asked)
            client.meta.events.register(f"after-call.s3.{operation}", self._answered)

    def open_for(self, bucket: str, key: str) -> list[str]:
        with self._lock:
            return [found[2] for found in sorted(self._open) if found[:2] == (bucket, key)]

    def _asked(self, params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context["upload"] = params["Bucket"], params["Key"], params.get("UploadId", "")

    def _answered(
        self, http_response: Any, parsed: dict[str, Any], model: Any, context: Any, **_: Any
    ) -> None:
        bucket, key, upload_id = context["upload"]
        worked = http_response.status_code < 300
        if model.name == "CreateMultipartUpload":
            if worked and "UploadId" in parsed:
                self._note("begun", bucket, key, parsed["UploadId"])
        elif worked or parsed.get("Error", {}).get("Code") == "NoSuchUpload":
            self._note("ended", bucket, key, upload_id)

    def _note(self, event: str, bucket: str, key: str, upload_id: str) -> None:
        facts = {"event": event, "bucket": bucket, "key": key, "upload_id": upload_id}
        line = json.dumps({**facts, "endpoint": self._endpoint})
        with self._lock:
            change = self._open.add if event == "begun" else self._open.discard
            change((bucket, key, upload_id))
            if self._path is not None:
                # Opened each time: no file crosses a fork, and one write is one whole line.
                try:
                    with self._path.open("ab", buffering=0) as file:
                        file.write(f"{line}\n".encode())
                except OSError as error:
                    raise UserError(f"{self._path}: cannot write it ({error.strerror})") from error


def read_upload_journal(path: Path) -> list[tuple[str, str, str, str]]:
    """(bucket, key, upload id, endpoint) of uploads begun and not ended; none without a file."""
    left: dict[tuple[str, str, str], str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the last line of a machine that lost power
                entry = json.loads(line)
                upload = entry["bucket"], entry["key"], entry["upload_id"]
                if entry["event"] == "begun":
                    left[upload] = entry["endpoint"]
                else:
                    left.pop(upload, None)
    return [(*upload, endpoint) for upload, endpoint in left.items()]
