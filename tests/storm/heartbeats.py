"""Ranks that send heartbeats, in one process, whose threads meet in the order of a seed.

Each rank has the thread of its user, its pulse and the thread of its store. A call of the store takes up to a minute of
simulated time. In some seeds a rank's cable is cut: its calls end no more. The others name this rank and no other, it
learns of the cut itself, and each ends. In some all ranks are stopped for a while, as by SIGSTOP, and go on.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from offload import testing
from offload.distributed.process_group import LONGEST, PULSE, SILENT, Heartbeat
from offload.errors import RankError
from tests.storm.scheduler import Listed, Scheduler, Seeded

RANKS = 3
MINUTES, STOPPED = 20, 30
"""Simulated minutes in which ranks look at each other, and in which they may be stopped. A cable is cut in the first
quarter of them."""
_SILENCE = SILENT + LONGEST
"""Seconds after which a rank is silent here, where a look at it may take minutes itself."""


class _Store:
    """A rank's connection to the key-value store of all ranks."""

    def __init__(self, scheduler: Scheduler, values: dict[str, bytes], chance: random.Random) -> None:
        self.cut = False
        self._scheduler, self._values, self._chance = scheduler, values, chance

    def _travel(self) -> None:
        if self._chance.random() < 0.1:
            self._scheduler.clock.sleep(self._chance.uniform(0, 60))
        self._scheduler.point("the store", lambda: not self.cut)

    def get(self, key: str) -> bytes:
        self._travel()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._travel()
        return all(key in self._values for key in keys)

    def set(self, key: str, value: str) -> None:
        self._travel()
        self._values[key] = value.encode()


def run(chooser: Listed | Seeded, seed: int) -> tuple[list[str], list[str]]:
    """Runs the ranks of a seed; returns what was wrong, and the trace."""
    chance, scheduler, faults = random.Random(f"ranks {seed}"), Scheduler(chooser), list[str]()
    values: dict[str, bytes] = {}
    stores = [_Store(scheduler, values, chance) for _ in range(RANKS)]
    lost = chance.choice([None, None, *range(RANKS)])
    cut_at = scheduler.time + chance.uniform(0, 60 * MINUTES / 4)
    stop_at = chance.choice([None, scheduler.time + chance.uniform(0, 60 * MINUTES)])
    end = scheduler.time + 60 * MINUTES
    ended: set[int] = set()

    def live(rank: int) -> None:
        pulse, seen, met = Heartbeat(stores[rank], rank, RANKS), set[int](), False
        try:
            pulse.meet()
            met = scheduler.time < cut_at
            while scheduler.time < end and pulse.cut_off is None:
                for peer in pulse.others:
                    # The look itself may take minutes, in which the other rank ends or this one is cut off.
                    is_gone = peer not in ended and pulse.gone(_SILENCE, [peer])
                    if is_gone and peer not in ended and pulse.cut_off is None:
                        seen.add(peer)
                scheduler.clock.sleep(chance.uniform(0, 20))
                scheduler.progress()
        except RankError as error:
            if rank != lost:
                faults.append(f"rank {rank}: {error}")
        finally:
            if rank != lost:  # which tells nobody that it ends
                ended.add(rank)
            pulse.close("it has ended")
        if rank == lost and met and pulse.cut_off is None:
            faults.append(f"rank {rank} does not know that it is cut off")
        if rank != lost and seen - {lost}:
            faults.append(f"rank {rank} takes {sorted(seen - {lost})} for lost")
        if rank != lost and lost is not None and met and lost not in seen:
            faults.append(f"rank {rank} does not know that rank {lost} is lost")

    def stop() -> None:
        nonlocal end
        assert stop_at is not None
        scheduler.clock.sleep(stop_at - scheduler.time)
        scheduler.time += 60 * STOPPED  # and no thread runs
        end += 60 * STOPPED

    def cut() -> None:
        scheduler.clock.sleep(cut_at - scheduler.time)
        assert lost is not None
        stores[lost].cut = True
        while (left := end - scheduler.time + SILENT + 3 * LONGEST) > 0:  # which a stop makes longer
            scheduler.clock.sleep(left)
        stores[lost].cut = False  # threads that wait in the store end

    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "threads.module", scheduler.threads)
        testing.replace(patch, "threads.thread", scheduler.threads.Thread)
        testing.replace(patch, "threads.queue", scheduler.queues)
        testing.replace(patch, "threads.clock", scheduler.clock)
        works: list[Any] = [(live, (rank,)) for rank in range(RANKS)] + ([(cut, ())] if lost is not None else [])
        works += [(stop, ())] if stop_at is not None else []
        threads = [
            scheduler.threads.Thread(target=work, args=arguments, name=f"{work.__name__} {number}")
            for number, (work, arguments) in enumerate(works)
        ]
        try:
            for thread in threads:
                thread.start()
            scheduler.close()
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
        scheduler.join()
    return faults, scheduler.trace


assert PULSE < 60 < SILENT < LONGEST
