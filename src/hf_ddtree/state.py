"""Where decoding stands: the one owner of its lengths, its root, and the features that the drafter has not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

_ENDLESS = 2**62  # tokens: a limit that no text reaches


class Count:
    """A number a text: on the device, where rounds change it, and the host's mirror of it.

    The mirror is written where a round's result is fetched, so that reading it waits for nothing.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device=device)  # (B,)
        self.host = 0

    def set(self, number: int) -> None:
        self.host = number
        self.tensor.fill_(number)


class Path(NamedTuple):
    """What a round commits: the root's choice, and that of each node which was chosen itself.

    Attributes:
        rows: `(B, P)` int64, the rows that chose the tokens: root (0), then accepted nodes + 1; -1 behind the end.
        token_ids: `(B, P)` int64, their choices.
        length: `(B,)` int64, how many.
        on_host: The rows, where the host knows them, since it has committed their tokens; for one text.
        stop: Whether generation ends with them; likewise.
        packed: `(B, 1 + 2P)`, length, rows and tokens in one piece.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    length: torch.Tensor
    on_host: Sequence[int] | None = None
    stop: bool = False
    packed: torch.Tensor | None = None

    @classmethod
    def of_packed(cls, packed: torch.Tensor, on_host: Sequence[int] | None = None, stop: bool = False) -> Path:
        """The path of such a piece, whose other tensors are parts of it."""
        most = packed.shape[1] // 2
        return cls(packed[:, 1 : most + 1], packed[:, most + 1 :], packed[:, 0], on_host, stop, packed)

    def fetch(self) -> list[int]:
        """The packed path on the host: a round's one wait for the device."""
        assert self.packed is not None
        fetched: list[list[int]] = self.packed.tolist()
        return fetched[0]

    def first(self, count: int) -> Path:
        """The first `count` rows."""
        return Path(self.rows[:, :count], self.token_ids[:, :count], self.length.clamp(max=count))


class DecodingState:
    """
    Where the decoding of a batch of texts stands. The tensors stay where they are, since graphs read and write them.

    Attributes:
        length: Committed rows of the target's cache.
        context_length: Rows of the drafter's context.
        new: Rows of `features` that are not context yet.
        features: `(B, most, taps * H)`, of the last round's path.
        text: `(B, 4)`, the last committed tokens; -1 where there are fewer.
        root: `(B, 1)`, the last of them: the bonus token, root of the next tree.
        position: `(B,)`, the root's.
        room: `(B,)`, tokens that may still be committed.
        finished: `(B,)` bool, whether the text has ended.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        with torch.inference_mode(False):  # ordinary tensors, for calls outside of it too
            self.length, self.context_length, self.new = (Count(device) for _ in range(3))
            self.position, self.room = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
            self.finished = torch.zeros(1, dtype=torch.bool, device=device)
            self._last = torch.arange(4, device=device)
            self.text = torch.full((1, 4), -1, dtype=torch.int64, device=device)
        self.root = self.text[:, -1:]
        self.features = torch.zeros(1, 0, 0)

    def begin(self, input_ids: torch.Tensor, position: torch.Tensor, room: int) -> None:
        """Stand behind a prompt, whose rows have been counted.

        Args:
            input_ids: `(B, L)`, the prompt and the first bonus token.
            position: `(B, 1)`, that token's.
            room: Tokens that may still be committed.
        """
        self.ends_with(input_ids)
        self.position.copy_(position[:, 0])
        self.room.fill_(min(room, _ENDLESS))
        self.finished.fill_(False)
        self.new.set(0)

    def keep(self, path: Path, features: torch.Tensor) -> None:
        """Move behind a path, on the device; `moved` tells the host.

        Args:
            path: What the round commits.
            features: `(B, N + 1, taps * H)` of the root and the nodes.
        """
        most = path.rows.shape[1]
        rows = path.rows.clamp(min=0).to(features.device)[..., None]
        self.features[:, :most].copy_(features.gather(1, rows.expand(-1, -1, features.shape[-1])))
        self.new.tensor.copy_(path.length)
        text = torch.cat([self.text, path.token_ids.to(self.device)], dim=1)
        self.text.copy_(text.gather(1, path.length[:, None] + self._last))
        self.length.tensor.add_(path.length)
        self.position.add_(path.length)
        self.room.sub_(path.length)

    def drafted(self) -> None:
        """Note on the host that the last round's features have become context."""
        self.context_length.host += self.new.host
        self.new.host = 0

    def ends_with(self, input_ids: torch.Tensor) -> None:
        """Note the last tokens of the text `(B, L)`."""
        last = input_ids[:, -self.text.shape[1] :]
        self.text.fill_(-1)
        self.text[:, self.text.shape[1] - last.shape[1] :] = last

    def moved(self, count: int) -> None:
        """Note on the host that a round has committed `count` tokens."""
        self.length.host += count
        self.new.host = count

    def take_back(self, path: Path, count: int, input_ids: torch.Tensor) -> None:
        """Stand behind the first `count` tokens of the path that was kept last, with which the text `(B, L)` ends."""
        more = path.length - count
        for tensor in (self.new.tensor, self.length.tensor, self.position):
            tensor.sub_(more)
        self.room.add_(more)
        self.ends_with(input_ids)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave the state on the device as it was before."""
        counts = (self.length.tensor, self.context_length.tensor, self.new.tensor)
        with unchanged([*counts, self.position, self.room, self.finished, self.text, self.features]):
            yield


@contextmanager
def unchanged(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Give tensors the values back that they had before."""
    saved = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in saved:
            tensor.copy_(before)
