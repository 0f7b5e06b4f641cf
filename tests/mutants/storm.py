"""Faults of the store and of threads that only orders of threads are asked to find: `python -m tests.mutants storm`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STORE = "offload.swapper.store.store"
_WORKER = "offload.engine.update"
_TESTS = "tests/harness/test_storm_mutants.py"


def _mutant(name: str, module: str, old: str, new: str) -> Mutant:
    return Mutant(f"{name}, in a storm", module, old, new, _TESTS)


MUTANTS = (
    _mutant("write over the slot of the last commit", _STORE, "if slot not in (named, newest))", "if slot != newest)"),
    _mutant(
        "commit data that is not synced",
        _STORE,
        '        self._files.sync()\n        self._doing = "write',
        '        self._doing = "write',
    ),
    _mutant("resume from slots that no commit names", _STORE, "self.newest = list(record.slots)", "pass"),
    _mutant(
        "write each record over the one before",
        _STORE,
        "        which = 0 if self.durable is None else 1 - self.durable.blob\n",
        "        which = 0\n",
    ),
    _mutant(
        "commit before all updates of a step are written",
        _WORKER,
        "        if self._pipeline.writing:\n            self._retire(wait=True)\n            return True\n",
        "        if not self._jobs and self._commit():\n            return True\n"
        "        if self._pipeline.writing:\n            self._retire(wait=True)\n            return True\n",
    ),
    _mutant(
        "call a unit written when its update is computed",
        "offload.swapper.pager",
        "                entry.unwritten = unwritten\n",
        "                entry.unwritten = unwritten = False\n",
    ),
    _mutant(
        "adopt weights of an early update beside the old ones",
        "offload.swapper.pager",
        "                self._host_cache.finish_read(entry)\n            self._host_cache.forget(entry)\n",
        "                self._host_cache.finish_read(entry)\n",
    ),
    _mutant(
        "write weights where an upload still reads",
        "offload.swapper.pager",
        "        assert entry.size.tier is not Tier.DEVICE\n"
        "        # update thread: it is about to write where an upload may still read. It waits without the lock, "
        "since no\n        # further upload of a unit that is `updating` begins.\n        entry.copied.wait()\n",
        "        assert entry.size.tier is not Tier.DEVICE\n",
    ),
    _mutant(
        "begin an early update where an upload still reads",
        "offload.swapper.pager",
        "        # update thread: it is about to write where an upload may still read.\n        entry.copied.wait()\n"
        "        entry.host_buffer, entry.fresh, entry.fresh_stays = None, fresh, True\n",
        "        entry.host_buffer, entry.fresh, entry.fresh_stays = None, fresh, True\n",
    ),
    _mutant(
        "give weights to a use while their update, which has no host buffer, is written",
        _WORKER,
        "        delivered = host_buffer is not None or self._shards.sizes[update.unit].tier is Tier.DEVICE\n",
        "        delivered = True\n",
    ),
)
