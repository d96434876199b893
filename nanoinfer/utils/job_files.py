"""The files of a batch job: lines to read, and an output that says by itself which of them are done.

A record begins with the number of its line and a hash of the line and of the job's settings. So a job that was killed
needs nothing but its output to go on, and notices when input or settings have changed. In memory a line that is done
takes 8 bytes.
"""

import fcntl
import gzip
import json
import re
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from nanoinfer.errors import JobError

MAX_LINE_BYTES = 16 * 2**20
RECORD_START = b'{"id": "line-'
RECORD_ID = re.compile(rb'\{"id": "line-(\d{1,12})-([0-9a-f]{16})"')
NO_ERROR = b'"error": null}\n'  # how the record of an answer ends


class Line(NamedTuple):
    """A line of the input that is not blank."""

    number: int  # from 1; blank ones count
    content: bytes | None  # None for one of more than MAX_LINE_BYTES
    digest: int  # of the content (or of its beginning) and of the settings; never 0


class BatchInput:
    """The lines of a JSONL file, which may be gzipped.

    settings: what else the answers depend on. Reading raises JobError where the file cannot be read.
    """

    def __init__(self, path: Path, settings: str) -> None:
        self.path = path
        self._seed = xxhash.xxh64_intdigest(settings.encode(errors="backslashreplace"))

    def __iter__(self) -> Iterator[Line]:
        try:
            opened: Any = gzip.open if self.path.suffix == ".gz" else open
            with opened(self.path, "rb") as file:
                number = 0
                while content := file.readline(MAX_LINE_BYTES):
                    number += 1
                    is_whole = content.endswith(b"\n") or len(content) < MAX_LINE_BYTES
                    stripped = content.strip()
                    if stripped or not is_whole:
                        digest = xxhash.xxh64_intdigest(stripped, self._seed) or 1
                        yield Line(number, stripped if is_whole else None, digest)
                    while not is_whole and (content := file.readline(MAX_LINE_BYTES)):
                        is_whole = content.endswith(b"\n")
        except (OSError, EOFError, zlib.error) as error:
            raise JobError(f"the input {self.path} cannot be read ({error}); check the file") from error


class BatchOutput:
    """The records of a job, one for each line that is done; locked while it is open.

    A last line that was torn when a job was killed is dropped. Raises JobError for a file that cannot be written, that
    another job writes, or that holds anything but records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_errors = 0
        self._digests = array("Q")  # of the line with number `index + 1`; 0 if that is not done
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise JobError(f"the output {path} cannot be written ({error}); choose another") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system unlocks what a killed job had locked
            self._read()
        except BlockingIOError:
            self._file.close()
            raise JobError(f"another job is writing to {path}; wait for its end, or choose another output") from None
        except BaseException:
            self._file.close()
            raise

    def has(self, line: Line) -> bool:
        """Whether a line is done. Raises JobError where that was another line, or had other settings."""
        done = self._digests[line.number - 1] if line.number <= len(self._digests) else 0
        if done not in (0, line.digest):
            raise JobError(
                f"{self.path} has the result of another line {line.number}, or it was made with another model, "
                "max_tokens or temperature; go on with what was used before, or choose another output"
            )
        return bool(done)

    def check(self, lines: BatchInput) -> tuple[int, int]:
        """How many lines there are, and how many are done. Raises JobError where the output is not of this input."""
        if lines.path.exists() and lines.path.samefile(self.path):
            raise JobError(f"input and output are the same file, {self.path}; choose another output")
        num_lines = num_done = 0
        for line in lines:
            num_lines += 1
            num_done += self.has(line)
        num_known = sum(digest != 0 for digest in self._digests)
        if num_known > num_done:
            raise JobError(
                f"{self.path} has results of {num_known - num_done} lines that {lines.path} has no more; give the "
                "input as it was, or choose another output"
            )
        return num_lines, num_done

    def write(self, line: Line, record: dict[str, Any]) -> None:
        """Add the record of a line; `flush` sends it."""
        self.num_errors += record["error"] is not None
        self._file.write(json.dumps({"id": record_id(line), **record}).encode() + b"\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        """Learn what is done."""
        self._file.seek(0)
        start = self._file.read(len(RECORD_START))
        end, number = 0, 0
        if start != RECORD_START[: len(start)]:  # before a line of it is read: it may be of any size
            raise self._foreign(1)
        self._file.seek(0)
        for number, content in enumerate(self._file, start=1):
            if not content.endswith(b"\n"):
                break
            match = RECORD_ID.match(content)
            if match is None:
                raise self._foreign(number)
            index, digest = int(match[1]) - 1, int(match[2], 16)
            self._digests.extend([0] * (index + 1 - len(self._digests)))
            self._digests[index] = digest
            self.num_errors += not content.endswith(NO_ERROR)
            end += len(content)
        self._file.truncate(end)

    def _foreign(self, number: int) -> JobError:
        return JobError(f"line {number} of {self.path} is no result of a batch job; choose another output")


def record_id(line: Line) -> str:
    return f"line-{line.number}-{line.digest:016x}"
