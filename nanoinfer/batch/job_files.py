"""Reads and writes the files of a batch job: lines, and an output that says by itself which of them are done.

A record begins with the number of its line and a hash of the line and of the job's settings. So a job that was killed
needs nothing but its output to go on, and notices when input or settings have changed. A hidden file beside the output
has the settings themselves, so that an error can name the one that differs. In memory a line that is done takes 16
bytes: two hashes.
"""

import fcntl
import gzip
import json
import os
import re
import shutil
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from nanoinfer.config import EngineConfig
from nanoinfer.errors import JobError

MAX_LINE_BYTES = 16 * 2**20
GZIPPED = b"\x1f\x8b"  # how such a file begins
RECORD_START = b'{"id": "line-'
RECORD_ID = re.compile(rb'\{"id": "line-([1-9]\d{0,8})-([0-9a-f]{16})"(?:, "custom_id": ("(?:[^"\\]|\\.)*"))?')
NO_ERROR = b'"error": null}\n'  # how the record of an answer ends
MAX_ERRORS_KEPT = 1000  # kinds of errors that are counted
CUT = b'"finish_reason": "length"'  # no text in a record can look like it, since its quotes are escaped

# What the answers of a job depend on beside its lines, by name; what is left out has its default.
Settings = Mapping[str, Any]
DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}


class Line(NamedTuple):
    """Holds a line of the input that is not blank."""

    number: int  # from 1; blank ones count
    content: bytes | None  # None for one of more than MAX_LINE_BYTES
    digest: int  # of the content (or of its beginning) and of the settings; never 0

    @property
    def id(self) -> str:
        return f"line-{self.number}-{self.digest:016x}"


def read_lines(path: Path, settings: Settings) -> Iterator[Line]:
    """Yield the lines of a file, which may be gzipped. settings: what else the answers depend on. Raises JobError."""
    seed = xxhash.xxh64_intdigest(json.dumps(settings, sort_keys=True).encode())
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

    settings: of this job. retry_errors: lines with errors do not count as done; `drop_errors` removes their records.
    """

    def __init__(self, path: Path, settings: Settings | None = None, retry_errors: bool = False) -> None:
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
        self._settings = dict(settings or {})
        # Hidden, so that whoever reads all files of the folder does not take it for an output.
        self._settings_path = path.with_name(f".{path.name}.settings")
        self._settings_are_written = False
        self._retries_errors, self._num_retried = retry_errors, 0  # records of errors that `drop_errors` removes
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
                f"{self.path} {self._explain(line)}; go on with what was used then, or choose another output"
            )
        return bool(done)

    def _explain(self, line: Line) -> str:
        """Say why the record of a line is not of this job."""
        before: Any = None
        with suppress(OSError, ValueError):
            before = json.loads(self._settings_path.read_bytes())
        of_another = f"has the result of another line {line.number}"
        if not isinstance(before, dict):
            return f"{of_another}, or was made with other settings than {self._settings}"
        now = json.loads(json.dumps(self._settings))
        names = sorted(name for name in {*before, *now} if before.get(name, MISSING) != now.get(name, MISSING))
        changes = [f"{name} was {_shown(before, name)} and is {_shown(now, name)}" for name in names]
        return f"was made with other settings: {', '.join(changes)}" if changes else of_another

    def count(self, lines: Iterable[Line], limit: int | None = None) -> tuple[int, int]:
        """Return how many lines there are, at most `limit`, and how many of these are done.

        Raises JobError where the output is not of this input.
        """
        num_lines = num_done = num_found = 0
        for line in lines:
            if limit is not None and num_lines == limit and num_found == self.num_records:
                break
            num_found += self.has(line)
            if limit is None or num_lines < limit:
                num_lines, num_done = num_lines + 1, num_found
        if self.num_records > num_found:
            raise JobError(
                f"{self.path} has {self.num_records} results, and the input has {num_found} of their lines; go on with "
                "the input that was used before, or choose another output"
            )
        return num_lines, num_done

    def drop_errors(self) -> None:
        """Remove the records of errors, where they are to be retried; answers stay, in their order.

        The file is replaced by a new one at once, so a job that is killed leaves either behind. Raises JobError where
        that fails; the output is then as it was.
        """
        if self._num_retried == 0:
            return
        path = Path(os.path.realpath(self.path))
        copy = path.with_name(f".{path.name}.retry")
        with ExitStack() as stack:
            stack.callback(copy.unlink, missing_ok=True)
            try:
                file = stack.enter_context(copy.open("w+b"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no other job can open it before it is locked
                self._file.seek(0)
                file.writelines(content for content in self._file if content.endswith(NO_ERROR))
                file.flush()
                os.fsync(file.fileno())
                shutil.copymode(path, copy)
                copy.replace(path)
            except OSError as error:
                raise JobError(
                    f"{self.path} cannot be rewritten without its errors ({error}), and is as it was; make room for a "
                    "copy of it, or leave out --retry-errors"
                ) from error
            stack.pop_all()
        self._file.close()
        self._file, self._num_retried = file, 0

    def write(self, line: Line, record: dict[str, Any]) -> None:
        """Add the record of a line. Raises JobError where that fails."""
        content = json.dumps({"id": line.id, **record}, default=asdict).encode() + b"\n"
        if not self._settings_are_written:
            self._settings_are_written = True
            with suppress(OSError):  # they are only for messages
                self._settings_path.write_text(json.dumps(self._settings) + "\n")
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
            end += len(content)
            if self._retries_errors and not content.endswith(NO_ERROR):
                self._num_retried += 1
                continue
            index, digest = int(match[1]) - 1, int(match[2], 16)
            self._digests.extend([0] * (index + 1 - len(self._digests)))
            self.num_records += self._digests[index] == 0
            self._digests[index] = digest
            self._count(content)
        self._file.truncate(end)


def _shown(settings: Settings, name: str) -> str:
    """Return a setting's value for a message."""
    value = settings.get(name, DEFAULTS.get(name))
    return "not given" if value is None else f"{value!r:.200}"
