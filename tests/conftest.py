"""What all tests share: one broker and one object store for the whole session, and a browser, for those that ask for them."""

import pytest
from broker_kit import broker, own_kafka, sasl_kafka
from browser_kit import browser
from hypothesis import settings
from launching import install
from object_store_kit import bucket, object_store
from progress_kit import no_progress

__all__ = ["broker", "browser", "bucket", "no_progress", "object_store", "own_kafka", "sasl_kafka"]

#: Files that take longest, each on one worker: they begin first, so that none is left over at the end.
_LONGEST = (
    "test_notebooks", "test_tuning", "test_live_up", "test_dashboard_states", "test_live_roles", "test_backtest", "test_replay_hints",
    "test_dashboard_live", "test_connectors_kafka", "test_batch_live", "test_hint_page", "test_core_cluster", "test_weights_bad_input",
    "test_doctor", "test_agent_weights", "test_models_seasonal", "test_cli_start", "test_core_shadow_caches", "test_connectors_streams",
)  # fmt: skip

install()
# How long an example takes says how busy the machine is.
settings.register_profile("prefetcher", deadline=None)
settings.load_profile("prefetcher")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
