"""One S3 bucket: its client, and its failures in a line with a cure.

The client is made once a process, after any fork, and anew when the credentials expired, which
reads the credentials file again. Checksums are sent only when an operation requires them, so that
R2, MinIO, Ceph and the like work. Reads are common/s3_reads.py's.
"""

import contextlib
import datetime
import email.utils
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import boto3
import boto3.exceptions
import botocore.exceptions
import botocore.parsers
import urllib3
from botocore.config import Config

from common.run import UserError
from common.s3_uploads import UploadJournal, read_upload_journal

ATTEMPTS = 5  # of an answer that breaks off
# botocore's own retries are over in seconds, and at once when many threads fail together: its quota
# of 500 pays for 35 retries (1.44.8). A store that restarts takes longer.
PATIENCE_S = 60.0
EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
WRONG_PLACE = (
    "PermanentRedirect",
    "TemporaryRedirect",
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "IllegalLocationConstraint",
)
NO_CHECKSUMS = ("InvalidArgument", "NotImplemented", "501", "XAmzContentChecksumMismatch")
PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "GetObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
FAILURES = (
    botocore.exceptions.ClientError,
    botocore.exceptions.BotoCoreError,
    boto3.exceptions.S3UploadFailedError,
)

Result = TypeVar("Result")


class ObjectMissing(UserError):
    """There is no object of that key."""


class CredentialsExpired(UserError):
    """The credentials ran out, and reading them again gave no better ones."""


class CutAnswer(Exception):
    """An answer ended before its time; asking again may help."""


# The last: botocore lets an error's body that breaks off through as it is (1.44.8).
CUT = (CutAnswer, botocore.parsers.ResponseParserError, urllib3.exceptions.HTTPError)


class RangePastEnd(UserError):
    """The object has no bytes in the range asked for."""


class Bucket:
    """A bucket, or a prefix in one. `call` runs requests; keys are relative to the prefix."""

    def __init__(
        self,
        uri: str,
        *,
        endpoint_url: str | None = None,
        max_connections: int = 32,
        upload_journal: Path | None = None,
    ) -> None:
        self.name, _, prefix = uri.removeprefix("s3://").partition("/")
        if not self.name:
            raise UserError(f"{uri}: must be s3://bucket/prefix")
        self.prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self.uri, self._endpoint_url, self._max_connections = uri, endpoint_url, max_connections
        self._uploads = UploadJournal(upload_journal)
        self._lock, self._client_pid, self._made = threading.Lock(), -1, None
        self._has_answered = False

    @property
    def client(self) -> Any:
        with self._lock:
            if self._client_pid != os.getpid():
                self._made, self._client_pid = self._make_client(), os.getpid()
            return self._made

    def at(self, key: str) -> dict[str, str]:
        """The two parameters that name an object."""
        return {"Bucket": self.name, "Key": self.prefix + key}

    def call(self, call: Callable[[Any], Result], key: str = "") -> Result:
        """Run one S3 call, which gets the client; its failures become one line with a cure."""
        try:
            return self._call_again(call)
        except FAILURES as error:
            raise self._explained(error, key) from error
        except CUT as error:
            raise UserError(
                f"{self.uri}: the answer broke off {ATTEMPTS} times; check the network and rerun"
            ) from error

    def abort_own_uploads(self, key: str) -> None:
        """Abort the multipart uploads to this key that this process began and did not end."""
        for upload_id in self._uploads.open_for(self.name, self.prefix + key):
            with contextlib.suppress(UserError):  # the journal keeps it for the next run
                self.abort_upload(key, upload_id)

    def abort_upload(self, key: str, upload_id: str) -> bool:
        """True when the upload was still there."""

        def abort(client: Any) -> bool:
            try:
                client.abort_multipart_upload(**self.at(key), UploadId=upload_id)
            except botocore.exceptions.ClientError as error:
                if error_code(error) not in ("NoSuchUpload", "NoSuchBucket"):
                    raise
                return False
            return True

        return self.call(abort, key)

    def _make_client(self) -> Any:
        session = boto3.session.Session()
        # boto3 itself does not know AWS_REGION, which the other SDKs prefer (1.44.8).
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        config = Config(
            # Not adaptive: one answer of SlowDown in five made reads 14 times slower (1.44.8).
            retries={"mode": "standard", "max_attempts": 8},
            max_pool_connections=self._max_connections,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=10,
            read_timeout=60,
        )
        try:
            client = session.client(
                "s3", endpoint_url=self._endpoint_url, region_name=region, config=config
            )
        except ValueError as error:
            raise UserError(
                f"{self.uri}: {error}; --endpoint-url (or AWS_ENDPOINT_URL) must be such as "
                "http://host:port"
            ) from error
        # Where HEAD of the bucket is a redirect without a region too, botocore asks again inside
        # its own answer until the stack is full (1.44.8).
        client.meta.events.register("before-call.s3.HeadBucket", _follow_no_redirect)
        self._uploads.listen(client)
        return client

    def _renew(self, expired: Any) -> Any:
        """A client that read the credentials anew; threads that fail together share one."""
        with self._lock:
            if self._made is expired:
                self._made = self._make_client()
            return self._made

    def _call_again(self, call: Callable[[Any], Result]) -> Result:
        client, is_renewed, failures, patient_until = self.client, False, 0, 0.0
        while True:
            try:
                result = call(client)
                self._has_answered = True
                return result
            except (*CUT, *FAILURES) as error:
                if error_code(error) in EXPIRED and not is_renewed:
                    client, is_renewed = self._renew(client), True
                    continue
                failures += 1
                patient_until = patient_until or time.monotonic() + PATIENCE_S
                if not self._may_pass(error, failures, patient_until):
                    raise
            time.sleep(min(8.0, 0.1 * 2**failures))

    def _may_pass(self, error: Exception, failures: int, patient_until: float) -> bool:
        # NoSuchUpload: the completion worked, its answer got lost, and botocore asked again.
        if isinstance(error, CUT) or error_code(error) == "NoSuchUpload":
            return failures < ATTEMPTS
        # An endpoint that never answered is a mistake, to be told at once.
        return self._has_answered and _is_outage(error) and time.monotonic() < patient_until

    # ---- failures

    def _explained(self, error: Exception, key: str) -> UserError:
        response = getattr(client_error(error), "response", None)
        if response is None:
            return self._explained_without_answer(error)
        code, endpoint = error_code(error), self.client.meta.endpoint_url
        where = f"s3://{self.name}/{self.prefix}{key}"
        if code == "NoSuchBucket":
            return UserError(f"{self.uri}: no such bucket at {endpoint}; check the name")
        if code in ("NoSuchKey", "404"):
            return ObjectMissing(f"{where}: no such object at {endpoint}")
        if code in ("PreconditionFailed", "412"):
            return UserError(changed(self.uri, key))
        if code in ("InvalidRange", "416"):
            return RangePastEnd(f"{where}: has no bytes in the range asked for")
        if code in EXPIRED:
            return CredentialsExpired(
                f"credentials expired ({code} from {endpoint}); refresh them (the profile, file or "
                "variables they come from) and rerun the same command"
            )
        if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
            return UserError(
                f"{self.uri}: {endpoint} does not take the credentials ({code}); check "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or refresh them"
            )
        if code == "RequestTimeTooSkewed":
            return UserError(f"{self.uri}: {_clock_error(response)}; set the clock and rerun")
        if code in ("AccessDenied", "403"):
            return UserError(f"{where}: {self._denied(client_error(error))}")
        if code in WRONG_PLACE:
            return UserError(self._wrong_place(code, response))
        hint = "; store without checksum support?" if code in NO_CHECKSUMS else ""
        return UserError(f"{where}: {_one_line(error)}{hint} (endpoint {endpoint})")

    def _explained_without_answer(self, error: Exception) -> UserError:
        if isinstance(error, botocore.exceptions.NoCredentialsError):
            return UserError(
                f"{self.uri}: no credentials found; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or a profile"
            )
        if isinstance(
            error,
            (
                botocore.exceptions.SSOError,
                botocore.exceptions.TokenRetrievalError,
                botocore.exceptions.CredentialRetrievalError,
            ),
        ):
            return CredentialsExpired(
                f"credentials expired or not to be had ({_one_line(error)}); refresh them and "
                "rerun the same command"
            )
        if isinstance(
            error,
            (
                botocore.exceptions.EndpointConnectionError,
                botocore.exceptions.ConnectTimeoutError,
            ),
        ):
            return UserError(
                f"{self.uri}: no answer from {self.client.meta.endpoint_url}; check the network "
                "and --endpoint-url"
            )
        return UserError(f"{self.uri}: {_one_line(error)}")

    def _denied(self, error: Any) -> str:
        endpoint = self.client.meta.endpoint_url
        permission = PERMISSIONS.get(error.operation_name, "s3:PutObject")
        text = f"access denied by {endpoint}; the credentials lack {permission}"
        if permission == "s3:PutObject":
            return f"{text}, or the bucket demands --sse or a KMS key (--sse-kms-key)"
        if permission == "s3:GetObject":
            return f"{text} (or the KMS key's use), or the object is missing and s3:ListBucket too"
        return text

    def _wrong_place(self, code: str, response: dict[str, Any]) -> str:
        client, details = self.client, response["Error"]
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        region = details.get("Region") or headers.get("x-amz-bucket-region")
        cure = f"set AWS_REGION={region}" if region else "set AWS_REGION to the bucket's region"
        if details.get("Endpoint"):
            cure += f" or --endpoint-url to {details['Endpoint']}'s"
        elif self._endpoint_url or _endpoint_source(client, None) != "AWS's default":
            cure += " or change the endpoint"
        return (
            f"{self.uri}: {code}: bucket {self.name} is not served by endpoint "
            f"{client.meta.endpoint_url} (from {_endpoint_source(client, self._endpoint_url)}) in "
            f"region {client.meta.region_name} (from {_region_source()}); {cure}"
        )


def abort_left_uploads(journal: Path, *, endpoint_url: str | None = None) -> int:
    """Abort the uploads that a killed run left and remove its journal; how many were still there.

    They are looked for where they were begun, or at `endpoint_url`. Each run needs a journal of its
    own, and this comes before it opens its store. Not known to any journal is an upload whose
    creation was answered while the run died.
    """
    aborted = 0
    for bucket, key, upload_id, begun_at in read_upload_journal(journal):
        where = endpoint_url or begun_at
        opened = Bucket(f"s3://{bucket}", endpoint_url=where, upload_journal=journal)
        aborted += opened.abort_upload(key, upload_id)
    journal.unlink(missing_ok=True)
    return aborted


def _follow_no_redirect(context: dict[str, Any], **_: Any) -> None:
    context["s3_redirect"]["redirected"] = True


# ---- texts


def client_error(error: BaseException | None) -> botocore.exceptions.ClientError | None:
    """The store's own answer in a failure; boto3's upload_file hides it behind another error."""
    if isinstance(error, boto3.exceptions.S3UploadFailedError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, botocore.exceptions.ClientError) else None


def error_code(error: BaseException) -> str:
    """The code in the store's own answer, or an empty text."""
    answered = client_error(error)
    return str(answered.response.get("Error", {}).get("Code", "")) if answered else ""


def _is_outage(error: Exception) -> bool:
    answered = client_error(error)
    if answered is None:
        outages = botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError
        return isinstance(error, outages)
    status = answered.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status in (429, 500, 502, 503, 504) or error_code(error) == "SlowDown"


def changed(uri: str, key: str) -> str:
    """The line for an input that is not the one that was planned."""
    return f"{uri}: {key} changed since the plan was made; rerun with --overwrite"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _clock_error(response: dict[str, Any]) -> str:
    text = "the clock of this machine is off"
    told = response["Error"].get("ServerTime")
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    try:
        if told:
            server = datetime.datetime.fromisoformat(told)
        else:
            server = email.utils.parsedate_to_datetime(date)
        seconds = (datetime.datetime.now(datetime.UTC) - server).total_seconds()
    except (TypeError, ValueError):
        return f"{text} (RequestTimeTooSkewed)"
    direction = "ahead" if seconds > 0 else "behind"
    return f"{text}: about {abs(seconds) / 60:.0f} minutes {direction} of the store's"


def _endpoint_source(client: Any, endpoint_url: str | None) -> str:
    if endpoint_url:
        return "--endpoint-url"
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if os.environ.get(name):
                return name
    return "AWS's default" if ".amazonaws.com" in client.meta.endpoint_url else "the profile"


def _region_source() -> str:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        if os.environ.get(name):
            return name
    return "the profile" if boto3.session.Session().region_name else "the default"
