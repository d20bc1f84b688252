"""The faults of the drill: what goes wrong, where, and what everybody must say about it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from support.failing import MESSAGE

LIMIT_S = 20.0
"""How soon after a fault everything has ended."""

PATIENCE_S, SCRIPT_PATIENCE_S = 8.0, 25.0
"""The strategy's timeout where a rank can only be waited for."""

MOMENTS = 20


@dataclass(frozen=True)
class Fault:
    """One fault and what is expected of it.

    Attributes:
        name: unique.
        place: where `drill_program.Drill` goes wrong.
        rank: on whom.
        says: a regular expression for the last lines that are printed; `{rank}` and `{stage}` are put in.
        names: regular expressions for what is printed at any place.
        sharded: how the program saves.
        moment: of what happens during a save, from 0 to 1.
        damage: what is done to the checkpoint that the program goes on from, if it does.
        patience_s: the strategy's timeout, 0 for its default.
        limit_s: how soon all ends.
        start: how: two bare processes, as under a launcher that does not watch them, or a script that starts its
            second rank itself.
        saves: whether the program has saved a checkpoint before.
        ends: status of the rank that fails; None where it is not known.
    """

    name: str
    place: str
    rank: int
    says: str
    names: tuple[str, ...] = ()
    sharded: bool = False
    moment: float = 0.0
    damage: str = ""
    patience_s: float = 0.0
    limit_s: float = LIMIT_S
    start: Literal["processes", "script"] = "processes"
    saves: bool = True
    ends: int | None = 1

    def expected(self, pattern: str) -> str:
        """A pattern with the faulty rank put in; on two ranks a rank is a stage."""
        return pattern.replace("{rank}", str(self.rank)).replace("{stage}", str(self.rank))


_WHO = r"rank {rank} \(stage {stage} of replica 0, "
_FORWARD = _WHO + r"in the forward of microbatch 0, chunk 0\)"
_BACKWARD = _WHO + r"in the backward of microbatch 0, chunk 2\)"
_LOADING = _WHO + r"in the data loader\) failed first"
_CALLBACK = _WHO + r"in FailingCallback.on_train_batch_end\) failed first"
_GONE = r"rank {rank} \(stage {stage}\b.* gone without a word: it was killed"
_SILENT = r"rank {rank} \(stage {stage}\b.*does not answer.*stopped"
_STALLED = r"rank {rank} \(stage {stage}\b.*in the forward of microbatch 0, chunk 0"
_NO_ROOM = "(No space left on device|File too large|disk is full)"
_USERS = MESSAGE


def faults() -> list[Fault]:
    """All of them, those first that take long."""
    waited = {"patience_s": PATIENCE_S, "limit_s": PATIENCE_S + LIMIT_S}
    # A script's second rank has all to import before it meets the first one, for which that must wait as well.
    started = {"patience_s": SCRIPT_PATIENCE_S, "limit_s": SCRIPT_PATIENCE_S + LIMIT_S, "start": "script"}
    return [
        Fault("stopped, child", "stopped", 1, _SILENT, ends=None, **started),
        Fault("stopped, parent", "stopped", 0, _SILENT, ends=None, **started),
        Fault("stalled in forward", "stalled", 1, _STALLED, **waited),
        Fault("killed, rank 0", "killed", 0, _GONE, ends=-9),
        Fault("killed, rank 1", "killed", 1, _GONE, ends=-9),
        Fault("exception in forward", "forward", 1, _USERS, (_FORWARD + " failed first",)),
        Fault("exception in backward", "backward", 0, _USERS, (_BACKWARD + " failed first",)),
        Fault("exception in the loader", "loader", 1, _USERS, (_LOADING,)),
        Fault("exception in the loader's worker", "loader's worker", 0, _USERS, (_LOADING,)),
        Fault("worker of the loader killed", "loader's worker killed", 1, r"DataLoader worker .*(killed|exited)"),
        Fault("exception in a callback", "callback", 1, _USERS, (_CALLBACK,)),
        Fault("NaN on the first stage", "nan", 0, _FORWARD + " is NaN or infinite"),
        Fault("NaN on the last stage", "nan", 1, _FORWARD + " is NaN or infinite"),
        Fault("different data", "other data", 1, "hold different batches"),
        Fault("fewer batches", "fewer batches", 1, r"rank 0 has 8 batches; rank 1 has 3 batches", saves=False),
        Fault("a stream that ends early", "stream ends", 1, r"rank 0 goes on after 3 batches; rank 1 ended after 3"),
        Fault("disk full, full", "disk full", 0, _NO_ROOM, moment=0.5),
        Fault("disk full, sharded", "disk full", 1, _NO_ROOM, moment=0.5, sharded=True),
        *_damaged(),
        *_killed_while_saving(),
    ]


def _damaged() -> list[Fault]:
    names = {
        "truncated": r"state\.ckpt.*(is cut off|is damaged)",
        "flipped": r"state\.ckpt.*damaged",
        "foreign": r"state\.ckpt is no (sharded )?checkpoint",
    }
    return [
        Fault(
            f"{damage} checkpoint, {kind}",
            "",
            0,
            says,
            sharded=kind == "sharded",
            moment=0.6,
            damage=damage,
            saves=False,
        )
        for kind in ("full", "sharded")
        for damage, says in names.items()
    ]


def _killed_while_saving() -> list[Fault]:
    """At moments that are random within equal parts of a save, so that none is left out."""
    chance = random.Random(4)
    order = list(range(MOMENTS))
    chance.shuffle(order)
    found = []
    for index, part in enumerate(order):
        sharded, rank = index % 2 == 1, (index // 2) % 2
        kind = "sharded" if sharded else "full"
        name = f"killed while saving, {kind}, rank {rank}, {index + 1} of {MOMENTS}"
        moment = (part + chance.random()) / MOMENTS
        found.append(Fault(name, "killed while saving", rank, _GONE, sharded=sharded, moment=moment, ends=-9))
    return found
