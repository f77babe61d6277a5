"""What all tests share: one broker and one object store for the whole session, for those that ask for them."""

from broker_kit import broker, own_kafka, sasl_kafka
from object_store_kit import bucket, object_store

__all__ = ["broker", "bucket", "object_store", "own_kafka", "sasl_kafka"]
