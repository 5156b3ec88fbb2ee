"""Text that grows token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Gives the text of each token as soon as it is certain.

    A token can end inside a character; then its text waits for the next token.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = self._start = 0

    def push(self, token: int) -> str:
        """The text that the token completes."""
        self._tokens.append(token)
        before, now = self._last_two()
        if len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        # What comes before can change how a token reads, so the last piece is decoded again with the next.
        self._start, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def end(self) -> str:
        """The rest of the text, after the last token."""
        before, now = self._last_two()
        return now[len(before) :]

    def _last_two(self) -> tuple[str, str]:
        return self._decode(self._tokens[self._start : self._shown]), self._decode(self._tokens[self._start :])


class StopStrings:
    """Cuts a text before the first of some strings. Text that may be the beginning of one is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [s for s in strings if s]
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that is certain now; nothing after one of the strings was found."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:  # of several, the one that is complete first, however the text is cut into pieces
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((n for s in self._strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back, after the last piece."""
        held, self._held = self._held, ""
        return held
