"""A folder outside this machine: S3, GCS, Azure, NFS, a disk, all that fsspec reaches.

Source of the interface: fsspec (https://filesystem-spec.readthedocs.io). An object is there whole or not at all: object stores show it when its
upload is closed; elsewhere it is written beside its name and renamed.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError

from infra.settings import main_python

T = TypeVar("T")

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory")
"""Protocols where an object appears when it is complete."""
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 20, "retries": {"max_attempts": 2}}},
}
"""Limits on one request, by protocol; addresses and keys come from each library's own variables, such as AWS_ENDPOINT_URL."""
PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "oss": "ossfs"}
"""Packages of protocols that are not installed with Ratchet."""
RIGHT = "give s3://BUCKET/FOLDER, gs://, az:// or a folder"
LOCAL = ("file", "local")
ABSENT = (FileNotFoundError, NotADirectoryError)
"""The second: a folder has a file where a name has a folder."""
NO_KEYS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "UnauthorizedSSOTokenError",
)
"""Errors of S3's library that has no keys to ask with."""
NO_REQUEST = ("ParamValidationError", "NotImplementedError")
"""Errors of libraries that cannot even ask, such as of a bucket's name that no bucket may have."""
PROBE = ".ratchet"
"""An empty object, written to see whether a store takes any."""
NUM_ATTEMPTS = 2
FIRST_PAUSE_S = 0.5
"""Before the second attempt at a request; each later pause is twice as long."""
CHECK_S = 5.0
"""Seconds that a check of the store takes at most, with all attempts of ours and of the library."""
ANSWER_S = 30.0
"""Longest time of one call to a store, in seconds, with the library's own attempts. Data adds to it by SLOW_BYTES_PER_S."""
SLOW_BYTES_PER_S = 1_000_000
"""The slowest connection that data may have."""


class HttpStatus(NamedTuple):
    codes: frozenset[str]
    word: str


NO_RIGHTS, NOT_FOUND = HttpStatus(frozenset(("401", "403")), "Forbidden"), HttpStatus(frozenset(("404",)), "Not Found")


class RemoteError(OSError):
    """The store cannot be reached, or does not take or give what was asked for.

    is_refusal: It answered, and trying again will not help: wrong keys, no such bucket.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class Unreadable(RemoteError):
    """An index is there, and this version cannot read it."""


class AddressRefused(ValueError):
    """No store can be reached by an address. The message is one line."""


def checked_address(url: str) -> str:
    """Return a store's address without slashes at its end. Raises AddressRefused for one that would mean another place than it seems to."""
    if urlsplit(url).password is not None:
        # the value itself stays out of the message
        raise AddressRefused(
            "the store's address holds a password, and it is written to logs: take it out and set the library's own variables, "
            "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if not url or url != url.strip():
        raise AddressRefused(f"store {url!r} is empty or has spaces around it: {RIGHT}")
    protocol, separator, place = url.partition("://")
    if not separator:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):
            raise AddressRefused(f"store {url!r} has a colon and no slashes after it: {RIGHT}")
        return url.rstrip("/") or "/"
    if not place.strip("/") or (protocol not in LOCAL and place.startswith("/")):
        raise AddressRefused(f"store {url!r} names no {'folder' if protocol in LOCAL else 'bucket'}: {RIGHT}")
    if protocol in LOCAL and not place.startswith("/"):
        raise AddressRefused(f"store {url!r} has no absolute path: give {protocol}:///{place}, or a folder")
    return url.rstrip("/")


class Remote:
    """Names are relative to the address and have slashes between folders.

    An object store that does not answer is given up after ANSWER_S. A folder has no limit: how long a disk that is mounted over a network
    is waited for is decided by its mount.
    """

    def __init__(self, url: str, answer_s: float | None = None) -> None:
        """answer_s: Longest time of a call, in seconds; None: ANSWER_S, and more for data.

        Raises:
            AddressRefused: for an address that no library here can reach, or that holds a password.
        """
        self.url = checked_address(url)
        protocol = self.url.partition("://")[0] if "://" in self.url else "file"
        try:
            # another process writes there too: what a listing said is not kept
            self.files, self.root = url_to_fs(self.url, use_listings_cache=False, **OPTIONS.get(protocol, {}))
        except ImportError as error:
            package = PACKAGES.get(protocol)
            if package is None:
                raise AddressRefused(f"store {url} needs a library that is not installed: {error}") from error
            cure = f"`{main_python()} -m pip install {package}` installs it"
            raise AddressRefused(f"store {url} needs the package {package}, which is not installed: {cure}") from error
        except (
            OSError,
            ValueError,
            TypeError,
        ) as error:  # of a library that loads others, such as that of hdfs://, or lacks arguments
            raise AddressRefused(f"store {url} cannot be used: {_said(error)}; {RIGHT}") from error
        self.renames = protocol not in OBJECT_STORES
        self.has_limits, self.protocol, self.answer_s = bool(self.files.async_impl), protocol, answer_s

    def check(self) -> None:
        """Raises RemoteError where the address cannot be reached and written to with the keys at hand, or does not answer within CHECK_S.
        A folder has to be there: one that is not made here may be a disk that is not mounted."""

        def write() -> None:
            if self.protocol in ("s3", "s3a"):
                # Loads the library's own data, which takes seconds on a busy machine and says nothing about the store.
                self.files.connect(**self._within())
            self._write(PROBE, b"", CHECK_S)

        self._asked(f"take {PROBE}", write, num_attempts=1)

    def check_outside(self, folder: Path) -> None:
        """Raises AddressRefused for a place in this folder, with which it would be lost."""
        if self.protocol in LOCAL and Path(self.root).resolve().is_relative_to(folder.resolve()):
            raise AddressRefused(
                f"store {self.url} lies in the workspace {folder} and would be lost with it: give a place outside of it"
            )

    def is_missing(self) -> bool:
        """Whether it is a folder that is not there; an object store has no empty folders that could be missing."""
        return self.protocol in LOCAL and not self.files.isdir(self.root)

    def put(self, local: Path, name: str) -> None:
        """Copy a file there, unless an object of that name and size is there."""
        num_bytes = local.stat().st_size
        if self.num_bytes(name) == num_bytes:
            return

        def upload() -> None:
            try:
                with self._whole(name) as place:
                    self.files.put_file(str(local), place, **self._within(_limit_of(num_bytes)))
            except FileNotFoundError:  # also of an upload in parts that was completed, and whose answer was lost
                if self.is_missing() or self.num_bytes(name) != num_bytes:
                    raise
            if (stored := self.num_bytes(name)) != num_bytes:
                raise OSError(f"{stored} bytes have arrived of {num_bytes}")

        self._asked(f"take {name}", upload)

    def remove(self, name: str) -> None:
        self._asked(f"remove {name}", lambda: self.files.rm_file(self._at(name), **self._within()))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there yet; says whether this call made it. Of several writers one makes it."""

        def write() -> bool:
            try:
                with self._whole(name, replaces=False) as place:
                    self.files.pipe_file(place, data, mode="create", **self._within(_limit_of(len(data))))
            except FileExistsError:
                return False
            return True

        return self._asked(f"take {name}", write)

    def replace(self, name: str, data: bytes) -> None:
        self._asked(f"take {name}", lambda: self._write(name, data, _limit_of(len(data))))

    def _write(self, name: str, data: bytes, limit_s: float) -> None:
        with self._whole(name) as place:
            self.files.pipe_file(place, data, **self._within(limit_s))

    def read(self, name: str, num_bytes: int = 0) -> bytes | None:
        """None where there is no such object. num_bytes: Its size, where that is known; a large one may take longer."""

        def content() -> bytes | None:
            try:
                return bytes(self.files.cat_file(self._at(name), **self._within(_limit_of(num_bytes))))
            except FileNotFoundError:
                return None

        return self._asked(f"give {name}", content)

    def get(self, name: str, local: Path, num_bytes: int) -> None:
        local.parent.mkdir(parents=True, exist_ok=True)
        self._asked(f"give {name}", lambda: self.files.get_file(self._at(name), str(local), **self._within(_limit_of(num_bytes))))

    def names(self, folder: str) -> list[str]:
        """Names of what lies directly in a folder, without those of parts of files; none where there is no such folder."""

        def found() -> list[str]:
            try:
                listed = self.files.ls(self._at(folder), detail=False, **self._within())
            except ABSENT:
                return []
            return sorted(name for path in listed if not (name := path.rstrip("/").rpartition("/")[2]).endswith(".partial"))

        return self._asked(f"list {folder or 'its runs'}", found)

    def num_bytes(self, name: str) -> int | None:
        """Size of an object; None where there is none."""

        def size() -> int | None:
            try:
                return int(self.files.info(self._at(name), **self._within())["size"])
            except FileNotFoundError:
                return None

        return self._asked(f"say the size of {name}", size)

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _within(self, limit_s: float | None = None) -> dict[str, float]:
        """Return the library's argument that limits a call, in seconds, by default to ANSWER_S; none for a folder."""
        limit_s = ANSWER_S if limit_s is None else limit_s
        return {"timeout": min(limit_s, self.answer_s or limit_s)} if self.has_limits else {}

    @contextmanager
    def _whole(self, name: str, *, replaces: bool = True) -> Iterator[str]:
        """Gives the path to write to. What was written has its name when the block ends, whole."""
        target = self._at(name)
        if not self.renames:
            yield target
            return
        if self.is_missing():
            raise FileNotFoundError(f"there is no folder {self.root}: make it, or mount the disk that has it")
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        partial = f"{target}.{time.time_ns()}.partial"
        try:
            yield partial
            if not replaces and self.files.exists(target):
                raise FileExistsError(target)
            self.files.mv(partial, target)
        finally:
            if self.files.exists(partial):
                self.files.rm_file(partial)

    def _asked(self, what: str, ask: Callable[[], T], num_attempts: int | None = None) -> T:
        """Ask up to num_attempts times, by default NUM_ATTEMPTS. What gives no answer in time is not asked again here.

        Raises:
            RemoteError: one line, with what the library said last.
        """
        num_attempts = num_attempts or NUM_ATTEMPTS
        for attempt in range(1, num_attempts + 1):
            begin = time.monotonic()
            try:
                return ask()
            except FSTimeoutError as error:
                waited_s = time.monotonic() - begin
                raise RemoteError(f"{self.url} does not answer in time: it did not {what} within {waited_s:.0f} s") from error
            except RemoteError:
                raise
            except Exception as error:  # each library has errors of its own
                if isinstance(error, PermissionError) or _has_status(error, NO_RIGHTS) or type(error).__name__ in NO_KEYS:
                    raise RemoteError(f"{self.url} does not {what} with these keys: {_said(error)}", is_refusal=True) from error
                if isinstance(error, FileNotFoundError) or _has_status(error, NOT_FOUND):
                    raise RemoteError(f"{self.url} does not exist, or cannot {what}: {_said(error)}", is_refusal=True) from error
                is_useless = type(error).__name__ in NO_REQUEST
                if attempt == num_attempts or is_useless:
                    raise RemoteError(f"{self.url} cannot {what}: {_said(error)}", is_refusal=is_useless) from error
            time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("not reached")


def _has_status(error: Exception, status: HttpStatus) -> bool:
    """Whether a library's error stands for an HTTP status: adlfs has it as `status_code`, gcsfs as `code` or as the first word of an OSError."""
    found = {str(getattr(error, name, "")) for name in ("status_code", "code")}
    return bool(found & status.codes) or str(error).startswith(f"{status.word}:")


def _limit_of(num_bytes: int) -> float:
    """Return the limit of a call that moves num_bytes, in seconds."""
    return ANSWER_S + num_bytes / SLOW_BYTES_PER_S


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
