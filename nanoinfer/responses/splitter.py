"""Splits an answer into its parts, as it comes: thought, content, tool calls, and the marks between them.

The parts tile the text, so nothing is lost: whatever cannot be read as a tool call stays content, or in the thought.
"""

import re
from typing import Literal, NamedTuple

from nanoinfer.responses.call_formats import Call, CallFormat
from nanoinfer.responses.families import Family
from nanoinfer.responses.typed_arguments import json_end, skip_space

Part = Literal["reasoning", "content", "tool_calls"]
MAX_ENDS = 16  # that a call may have within a text, to be read before all has come
MAX_BROKEN = 32  # calls in a row that cannot be read: a model that repeats one for ever, whose text stays content


class Span(NamedTuple):
    """A piece of the text, from `start` to before `end`. part: None for marks. calls: what tool calls it holds."""

    part: Part | None
    start: int
    end: int
    calls: tuple[Call, ...] = ()


class Splitter:
    """Splits what is fed in any pieces into `spans`. Until `close`, the end of the text may belong to no span yet.

    family: says what the marks are. is_open: whether the text begins within a thought.
    """

    def __init__(self, family: Family, is_open: bool = False) -> None:
        self.text = ""
        self.spans: list[Span] = []
        self.part: Part | None = "reasoning" if is_open else "content"  # of what comes next
        self._family = family
        self._pos = 0  # the spans reach up to here
        self._has_text: set[Part] = set()  # parts with more than white space; of the thought, since the last mark
        self.end = 0  # where the answer ends, and marks follow that end a turn; known once closed

    def feed(self, text: str) -> None:
        """Add the next text."""
        self.text += text
        self._scan(is_final=False)

    def close(self) -> None:
        """Settle the end of the text, after which nothing comes. Marks that end a turn are no part of an answer."""
        self._scan(is_final=True)
        end = len(self.text)
        while mark := next(filter(self.text[:end].rstrip().endswith, self._family.turn_ends), None):
            end = self.text.rindex(mark, 0, end)
        if end < len(self.text):
            while self.spans and self.spans[-1].start >= end:
                self.spans.pop()
            if self.spans and self.spans[-1].end > end:
                self.spans[-1] = self.spans[-1]._replace(end=end)
            self.spans.append(Span(None, end, len(self.text)))
        self.end = end

    def part_of(self, start: int, end: int) -> Part | None:
        """Return the part that a piece of the text ends in; None if it has marks alone."""
        if end > self._pos:
            return self.part
        for span in reversed(self.spans):
            if span.end <= start:
                break
            if span.start < end and span.part is not None:
                return span.part
        return None

    def _scan(self, is_final: bool) -> None:
        """Settle as much of the text as can be settled."""
        while self._settle(is_final):
            pass

    def _settle(self, is_final: bool) -> bool:
        """Settle a piece of the text; return False if more of it has to come first."""
        raise NotImplementedError

    def _add(self, end: int) -> None:
        """Add the text up to `end` to the part that is open."""
        if end <= self._pos:
            return
        if self.part is not None and not self.text[self._pos : end].isspace():
            self._has_text.add(self.part)
        if self.spans and self.spans[-1].part == self.part and not self.spans[-1].calls:
            self.spans[-1] = self.spans[-1]._replace(end=end)
        else:
            self.spans.append(Span(self.part, self._pos, end))
        self._pos = end

    def _mark(self, end: int) -> None:
        """Add the text up to `end` as a mark."""
        self._has_text.discard("reasoning")
        self.spans.append(Span(None, self._pos, end))
        self._pos = end

    def _take(self, calls: list[Call], end: int) -> None:
        """Add the tool calls whose text ends at `end`."""
        self.spans.append(Span("tool_calls", self._pos, end, tuple(calls)))
        self._pos = end


class TagSplitter(Splitter):
    """Splits what a model writes between tags.

    A thought begins only where nothing but white space precedes it, and ends with the first end of it, or with a tool
    call if no end comes at all. An end without a beginning closes a thought that began with the text.
    """

    def __init__(self, family: Family, calls: CallFormat, is_open: bool = False) -> None:
        super().__init__(family, is_open)
        marks = (family.reasoning_start, family.reasoning_end, calls.start, *filter(None, [calls.bare_start]))
        self._marks, self._longest = re.compile("|".join(map(re.escape, marks))), max(map(len, marks))
        self._calls = calls
        self._has_thought = False  # whether one has ended
        self._around: Part | None = None  # the part in which the tool call stands that is being read
        self._mark_end, self._start = 0, 0  # where the mark of this call ends, and what is to be read begins
        self._next_end, self._num_ends = 0, 0  # where to look for the end of it; how many ends it did not have
        self._num_broken = 0  # calls that could not be read since the last that could

    def _settle(self, is_final: bool) -> bool:
        if self.part == "tool_calls":
            return self._read_calls(is_final)
        found = self._marks.search(self.text, self._pos)
        if found is None:
            # The end of the text may be the beginning of a mark.
            self._add(len(self.text) if is_final else len(self.text) - self._longest + 1)
            return False
        self._add(found.start())
        if found[0] not in (self._calls.start, self._calls.bare_start):
            is_mark = self._switch(found[0], found.end())
        else:
            is_mark = self._begin_calls(found[0] != self._calls.start, found.start(), found.end())
        if not is_mark:
            self._add(found.end())
        return True

    def _begin_calls(self, is_bare: bool, start: int, end: int) -> bool:
        """Begin to read tool calls after a mark; return False for a mark that is text there."""
        if self._num_broken >= MAX_BROKEN or (is_bare and self.part != "content"):
            return False
        # However many marks a thought has, its end is looked for once.
        searched = self._next_end if self.part == "reasoning" else 0
        self._around, self.part, self._num_ends = self.part, "tool_calls", 0
        self._start, self._mark_end, self._next_end = start if is_bare else end, end, max(end, searched)
        return True

    def _switch(self, mark: str, end: int) -> bool:
        """Begin or end a thought with a mark that ends at `end`; return False for a mark that is text there."""
        if mark == self._family.reasoning_start:
            if self.part in self._has_text:
                return False
            self._mark(end)
            self.part, self._next_end = "reasoning", end
            return True
        if self.part == "content":
            if self._has_thought or any(span.calls for span in self.spans):
                return False
            self.spans = [span._replace(part=span.part and "reasoning") for span in self.spans]
            self._has_text.discard("content")
        self._mark(end)
        self.part, self._has_thought = "content", True
        return True

    def _read_calls(self, is_final: bool) -> bool:
        """Read the tool calls that begin here; return False if more of the text has to come first."""
        calls, has_new_end = self._calls, False
        end_mark = self._family.reasoning_end if self._around == "reasoning" else calls.end
        while end_mark and self._num_ends < MAX_ENDS and (end := self.text.find(end_mark, self._next_end)) >= 0:
            if self._around == "reasoning":  # the thought goes on
                self._next_end = end
                return self._give_up()
            self._next_end, self._num_ends, has_new_end = end + 1, self._num_ends + 1, True
        self._next_end = max(self._next_end, len(self.text) - len(end_mark) + 1)
        if has_new_end or is_final:
            found, read_to = calls.read(self.text, self._start)
            closing = skip_space(self.text, read_to)
            is_closed = calls.end and self.text.startswith(calls.end, closing)
            if found and (is_closed or is_final):
                return self._end_calls(found, closing + len(calls.end) if is_closed else read_to)
            if is_final:
                return self._give_up()
        return False

    def _give_up(self) -> bool:
        """Leave a mark that no tool call follows to the part that it stands in."""
        self.part = self._around
        self._num_broken += self.part == "content"
        self._add(self._mark_end)
        return True

    def _end_calls(self, calls: list[Call], end: int) -> bool:
        self._take(calls, end)
        self._has_thought |= self._around == "reasoning"
        self.part, self._num_broken = "content", 0
        return True


MESSAGE = "<|message|>"  # ends a header
MESSAGE_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|(?:start|channel)\|>)")
RECIPIENT = r"(?:to=([^\s<]+)(?=[\s<])\s*)?"  # before the channel or after it
# No two parts may share white space or letters: the search would then take far more than linear time.
HEADER = re.compile(
    rf"(?<!\s)\s*(?:<\|start\|>(?:assistant\b)?\s*|assistant\b\s*)?{RECIPIENT}"
    rf"(?:<\|channel\|>\s*(\w+)\b\s*{RECIPIENT}(?:<\|constrain\|>\s*)?(?:[\w.+-]+(?=[\s<])\s*)?)?{re.escape(MESSAGE)}"
)
MAX_HEADER = 1000  # characters


class HarmonySplitter(Splitter):
    """Splits the messages of gpt-oss, each with a header that says its channel, and its recipient if it calls a tool.

    The text begins within a header. What has none is content.
    """

    def __init__(self, family: Family) -> None:
        super().__init__(family)
        self.part: Part | None = None  # while a header comes
        self._recipient = ""
        self._body = 0  # where the message begins
        self._next_end = 0  # where to look for the end of the header or message

    def _settle(self, is_final: bool) -> bool:
        return self._read_header(is_final) if self.part is None else self._read_message(is_final)

    def _read_header(self, is_final: bool) -> bool:
        """Read what precedes a message; return False if more of the text has to come first."""
        end = self.text.find(MESSAGE, max(self._pos, self._next_end))
        start = max(self._pos, end - MAX_HEADER)
        header = None if end < 0 else HEADER.search(self.text, start, end + len(MESSAGE))
        if header is None:
            self._next_end = max(self._pos, len(self.text) - len(MESSAGE) + 1)
            if is_final:
                self.part = "content" if self.text[self._pos :].strip() not in ("", "<|start|>assistant") else None
                self._add(len(self.text))
            return False
        self.part = "content"  # of what precedes the header
        self._add(header.start())
        before, channel, after = header.groups()
        self._recipient = (before or after or "").removeprefix("functions.")
        self._body = self._next_end = header.end()
        self.part = "tool_calls" if self._recipient else "reasoning" if channel == "analysis" else "content"
        if not self._recipient:
            self._mark(header.end())
        return True

    def _read_message(self, is_final: bool) -> bool:
        """Read a message up to its end; return False if more of the text has to come first."""
        found = MESSAGE_ENDS.search(self.text, self._next_end)
        if found is None and not is_final:
            self._next_end = max(self._body, len(self.text) - len(MESSAGE) + 1)
            if self.part != "tool_calls":
                self._add(self._next_end)
            return False
        start, end = found.span() if found else (len(self.text), len(self.text))
        if self.part == "tool_calls":
            arguments = self.text[self._body : start].strip() or "{}"
            if json_end(arguments, 0) == len(arguments):
                self._take([Call(self._recipient, arguments)], end)
            else:  # its header says what it was to be
                self.part = "content"
                self._add(end)
        else:
            self._add(start)
            if end > start:
                self._mark(end)
        self.part = None
        return found is not None
