"""The files of a batch job: lines to read, and an output that says by itself which of them are done.

A record begins with the number of its line and a hash of the line and of the job's settings. So a job that was killed
needs nothing but its output to go on, and notices when input or settings have changed. In memory a line that is done
takes 16 bytes: two hashes.
"""

import fcntl
import gzip
import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from nanoinfer.errors import JobError

MAX_LINE_BYTES = 16 * 2**20
GZIPPED = b"\x1f\x8b"  # how such a file begins
RECORD_START = b'{"id": "line-'
RECORD_ID = re.compile(rb'\{"id": "line-([1-9]\d{0,8})-([0-9a-f]{16})"(?:, "custom_id": ("(?:[^"\\]|\\.)*"))?')
NO_ERROR = b'"error": null}\n'  # how the record of an answer ends
MAX_ERRORS_KEPT = 1000  # kinds of errors that are counted
CUT = b'"finish_reason": "length"'  # no text in a record can look like it, since its quotes are escaped


class Line(NamedTuple):
    """Holds a line of the input that is not blank."""

    number: int  # from 1; blank ones count
    content: bytes | None  # None for one of more than MAX_LINE_BYTES
    digest: int  # of the content (or of its beginning) and of the settings; never 0

    @property
    def id(self) -> str:
        return f"line-{self.number}-{self.digest:016x}"


def read_lines(path: Path, settings: str) -> Iterator[Line]:
    """Yield the lines of a file, which may be gzipped. settings: what else the answers depend on. Raises JobError."""
    seed = xxhash.xxh64_intdigest(settings.encode(errors="backslashreplace"))
    number = 0
    try:
        with path.open("rb") as file:
            opened: Any = gzip.open if file.read(2) == GZIPPED else open
        with opened(path, "rb") as file:
            while content := file.readline(MAX_LINE_BYTES):
                number += 1
                is_whole = content.endswith(b"\n") or len(content) < MAX_LINE_BYTES
                if (stripped := content.strip()) or not is_whole:
                    digest = xxhash.xxh64_intdigest(stripped, seed) or 1
                    yield Line(number, stripped if is_whole else None, digest)
                while not is_whole and (content := file.readline(MAX_LINE_BYTES)):
                    is_whole = content.endswith(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise JobError(f"the input {path} cannot be read ({error}); check the file") from error


class BatchOutput:
    """Holds the records of a job, one for each line that is done; the file is locked while it is open.

    A last line that was torn when a job was killed is dropped. A `with` that fails before anything is written leaves
    no new file behind. Raises JobError for a file that cannot be written, that another job writes, or that holds
    anything but records.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise JobError(f"the output {path} is no file; choose another")
        self.path = path
        self.num_records = 0
        self.num_errors = 0
        self.num_cut = 0  # records of answers that a length limit ended
        self._errors: dict[str, list[Any]] = {}  # by message, digits replaced: count, first line, its message
        self._custom_ids = array("Q")  # a hash of each
        self._is_new = not path.exists()
        self._digests = array("Q")  # of the line with number `index + 1`; 0 if that is not done
        with ExitStack() as stack:
            try:
                self._file = stack.enter_context(path.open("a+b"))
                # The system unlocks what a killed job had locked.
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists() or not os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                    raise BlockingIOError  # a job that failed has just removed it
            except BlockingIOError:
                raise JobError(f"another job is writing to {path}; wait for its end, or choose another") from None
            except OSError as error:
                raise JobError(f"the output {path} cannot be written ({error}); choose another") from error
            self._read()
            stack.pop_all()

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None and self._is_new and os.fstat(self._file.fileno()).st_size == 0:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close and unlock the file."""
        with suppress(OSError):  # what cannot be written was an error of `write`
            self._file.close()

    def has(self, line: Line) -> bool:
        """Return whether a line is done. Raises JobError where that was another line, or had other settings."""
        done = self._digests[line.number - 1] if line.number <= len(self._digests) else 0
        if done not in (0, line.digest):
            raise JobError(
                f"{self.path} has the result of another line {line.number}, or it was made with another model, "
                "load_format, seed, system message or sampling option; go on with what was used then, or choose "
                "another output"
            )
        return bool(done)

    def count(self, lines: Iterator[Line]) -> int:
        """Return how many lines there are. Raises JobError where the output is not of this input."""
        num_lines = num_done = 0
        for line in lines:
            num_lines += 1
            num_done += self.has(line)
        if self.num_records > num_done:
            raise JobError(
                f"{self.path} has {self.num_records} results, and the input has {num_done} of their lines; go on with "
                "the input that was used before, or choose another output"
            )
        return num_lines

    def write(self, line: Line, record: dict[str, Any]) -> None:
        """Add the record of a line. Raises JobError where that fails."""
        content = json.dumps({"id": line.id, **record}, default=asdict).encode() + b"\n"
        try:
            self._file.write(content)
            self._file.flush()
        except OSError as error:
            raise JobError(
                f"{self.path} cannot be written any more ({error}); {self.num_records} lines are done: make room, and "
                "the same command goes on"
            ) from error
        self.num_records += 1
        self._count(content)

    def commonest_error(self) -> str | None:
        """Describe the most frequent error by the first line that has it; None if no line has an error."""
        if not self._errors:
            return None
        count, line, message = max(self._errors.values(), key=lambda kept: kept[0])
        return f"line {line}: {message}" if count == 1 else f"{count} lines, the first is line {line}: {message}"

    def count_duplicates(self) -> int:
        """Return how many results have the custom_id of an earlier one."""
        return len(self._custom_ids) - len(np.unique(np.frombuffer(self._custom_ids, np.uint64)))

    def _count(self, content: bytes) -> None:
        """Count what a record adds to the summary: an error, a cut answer, a custom_id."""
        self.num_cut += CUT in content
        if (match := RECORD_ID.match(content)) and match[3]:
            self._custom_ids.append(xxhash.xxh64_intdigest(match[3]))
        if content.endswith(NO_ERROR):
            return
        self.num_errors += 1
        with suppress(ValueError, KeyError, TypeError):  # a record that somebody has changed
            error = json.loads(content)["error"]
            kind = re.sub(r"\d+", "0", error["message"])
            if kind in self._errors or len(self._errors) < MAX_ERRORS_KEPT:
                self._errors.setdefault(kind, [0, error["line"], error["message"]])[0] += 1

    def _read(self) -> None:
        """Read which lines are done. Raises JobError where the file is no output of a job."""
        self._file.seek(0)
        # Before a line is read, which may be of any size in another file.
        if not RECORD_START.startswith(self._file.peek()[: len(RECORD_START)]):
            raise JobError(f"{self.path} is no output of a batch job; choose another output")
        end = 0
        for content in self._file:
            if not content.endswith(b"\n"):
                break
            if not (match := RECORD_ID.match(content)):
                place = f"a line at byte {end}"
                raise JobError(f"{self.path} has {place} that is no result of a job; choose another output")
            index, digest = int(match[1]) - 1, int(match[2], 16)
            self._digests.extend([0] * (index + 1 - len(self._digests)))
            self.num_records += self._digests[index] == 0
            self._digests[index] = digest
            self._count(content)
            end += len(content)
        self._file.truncate(end)
