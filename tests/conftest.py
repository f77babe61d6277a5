"""What all tests share: one broker and one object store for the whole session, and a browser, for those that ask for them."""

from broker_kit import broker, own_kafka, sasl_kafka
from browser_kit import browser
from hypothesis import settings
from object_store_kit import bucket, object_store
from progress_kit import no_progress

__all__ = ["broker", "browser", "bucket", "no_progress", "object_store", "own_kafka", "sasl_kafka"]

# How long an example takes says how busy the machine is.
settings.register_profile("prefetcher", deadline=None)
settings.load_profile("prefetcher")
