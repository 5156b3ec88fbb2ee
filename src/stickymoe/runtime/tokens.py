"""One token through compiled layers: between two layers, its experts are brought into slots.

d width, k experts per token, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

from stickymoe.runtime.experts import ExpertLayers, Placed

ALIGNMENT = 16  # numbers: a matrix begins at a multiple of 64 bytes
_NO_SLOTS = np.empty((0, 0), np.uint8)
_NO_ROWS = np.empty((0, 0), np.int64)
_NO_EXPERTS = np.empty(0, np.int64)

Routed = tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]


class TokenDecoder(ABC):
    """A model for one text that runs one token layer by layer.

    Its arrays `_x` (the residual stream), `_h` (what the experts read) and `_routed` (the chosen experts, heaviest
    first, and their weights) are overwritten by the next call, and so are those that methods return.
    """

    n_layers: int
    _x: Float[np.ndarray, " d"]
    _h: Float[np.ndarray, " d"]
    _routed: Routed

    @abstractmethod
    def for_new_text(self) -> TokenDecoder:
        """A decoder with a state of its own. It shares the weights, so several texts of a model can take turns."""

    @abstractmethod
    def start(self) -> None:
        """Begin a new text."""

    @abstractmethod
    def begin(self, token: int) -> None:
        """The next token of the text."""

    @abstractmethod
    def _run_layer(self, layer: int, slots: Any, spec_rows: Any, which: Any) -> bool:
        """Add the experts of the layer before, if any, and run a layer up to its experts; whether it has experts."""

    @abstractmethod
    def _run_head(self, slots: Any, spec_rows: Any, which: Any) -> Float[np.ndarray, " V"]:
        """The same for the head."""

    def _expect(self, layer: int) -> None:
        """Wait for a layer: 0 after a token has begun, beyond the head if none has."""
        self._next, self._waits = layer, False

    def step(
        self,
        layer: int,
        slots: UInt8[np.ndarray, "C bytes"] = _NO_SLOTS,
        spec_rows: Int[np.ndarray, "before fields"] = _NO_ROWS,
        which: Int[np.ndarray, " before"] = _NO_EXPERTS,
    ) -> Routed | None:
        """Add the experts of the layer before, which lie in slots `which`, then run a layer up to its experts.

        Returns the chosen experts, heaviest first, and their weights; None for a dense layer.
        An expert of weight 0 is skipped: it needs no slot, and its place in `which` is −1.
        """
        self._require_next(layer, which)
        waits = self._run_layer(layer, slots, spec_rows, which)
        self._expect(layer + 1)
        self._waits = waits
        return self._routed if waits else None

    def logits(
        self,
        slots: UInt8[np.ndarray, "C bytes"] = _NO_SLOTS,
        spec_rows: Int[np.ndarray, "before fields"] = _NO_ROWS,
        which: Int[np.ndarray, " before"] = _NO_EXPERTS,
    ) -> Float[np.ndarray, " V"]:
        """The logits of the next token, after the last layer; its experts are added as in `step`."""
        self._require_next(self.n_layers, which)
        logits = self._run_head(slots, spec_rows, which)
        self._expect(self.n_layers + 1)
        return logits

    def add(self, layer: int, y: Float[np.ndarray, " d"]) -> None:
        """Add the output Σ w·expert(h) of the experts of a layer, which was routed last."""
        self._require_routed(layer)
        self._x += y
        self._waits = False

    def h(self, layer: int) -> Float[np.ndarray, " d"]:
        """What the experts of a layer read, which was routed last."""
        self._require_routed(layer)
        return self._h

    def residents(self, layer: int) -> list[int]:
        """The experts that the router of a layer keeps resident, after it was routed; empty if it keeps none."""
        return []

    def warm_up(self) -> None:
        """Compile the loops, or load them from the disk, before a text is timed."""
        self.start()
        self.begin(0)
        for layer in range(self.n_layers):
            if self.step(layer) is not None:
                self.add(layer, np.zeros_like(self._x))
        self.logits()
        self.start()

    def _require_next(self, layer: int, which: Any) -> None:
        if layer != self._next:
            raise ValueError(f"layer: got {layer}, expected {self._next} of this token; call begin for the next token.")
        if self._waits != (len(which) > 0):
            given = "no experts" if self._waits else "experts of a layer that needs none"
            raise ValueError(f"which: got {given} before layer {layer}; add the output of a layer's experts once.")

    def _require_routed(self, layer: int) -> None:
        if not self._waits or layer != self._next - 1:
            waiting = f"layer {self._next - 1}" if self._waits else "no layer"
            raise ValueError(f"layer: got {layer}, but {waiting} waits for its experts; call step first.")


def decode_token(decoder: TokenDecoder, layers: ExpertLayers | None, token: int) -> Float[np.ndarray, " V"]:
    """The logits after one more token. `layers` counts only the layers that have experts."""
    if layers is not None:
        layers.begin()
    decoder.begin(token)
    before: tuple[Any, ...] = ()  # the experts of the layer before, which the next call computes
    expert_layer = 0
    for layer in range(decoder.n_layers):
        routed = decoder.step(layer, *before)
        before = ()
        if routed is not None:
            assert layers is not None
            placed = layers.place(expert_layer, *routed, decoder.h(layer), decoder.residents(layer))
            expert_layer += 1
            if isinstance(placed, Placed):
                before = placed
            else:
                decoder.add(layer, placed)
    return decoder.logits(*before)


def aligned(size: int) -> Float[np.ndarray, " size"]:
    """An array that begins at a multiple of 64 bytes."""
    raw = np.empty(size + ALIGNMENT, np.float32)
    first = (-raw.ctypes.data // 4) % ALIGNMENT
    return raw[first : first + size]
