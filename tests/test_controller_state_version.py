"""The format of what is stored: an older one is taken over, a newer one refused and left alone."""

from __future__ import annotations

import pytest

from prefetcher.controller.learner import Learner
from prefetcher.controller.records import pack_arrays, unpack_arrays
from prefetcher.controller.state_version import VERSION, check_version
from prefetcher.errors import SettingsError
from prefetcher.ports import Partition, Topic
from prefetcher_connectors.memory import MemoryState

KEY = "prefetcher:{installation}:version"


@pytest.mark.parametrize("stored", [None, b"1", str(VERSION).encode()])
def test_an_older_one_or_none_becomes_ours(stored: bytes | None) -> None:
    state = MemoryState()
    if stored is not None:
        state.write({KEY: stored})
    check_version(state, "redis://host")
    assert state.read(KEY) == str(VERSION).encode()


def test_a_newer_one_is_refused_and_left_alone() -> None:
    state = MemoryState()
    state.write({KEY: str(VERSION + 1).encode()})
    with pytest.raises(SettingsError, match=r"redis://\*\*\*@host has format") as caught:
        check_version(state, "redis://me:s3cret@host")
    assert "s3cret" not in str(caught.value)
    assert state.read(KEY) == str(VERSION + 1).encode()


def test_what_the_first_version_learned_is_read() -> None:
    learner = Learner(lambda: None)
    arrays, meta = unpack_arrays(learner.snapshot())
    del meta["v"], meta["positions"]
    again = Learner(lambda: None)
    again.restore(pack_arrays(arrays, meta | {"position": 4711}))
    assert again.positions == {Partition(Topic.REQUESTS, 0): 4711}
