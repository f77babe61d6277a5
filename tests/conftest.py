"""What all tests share: one broker for the whole session, for those that ask for it."""

from broker_kit import broker, own_kafka, sasl_kafka

__all__ = ["broker", "own_kafka", "sasl_kafka"]
