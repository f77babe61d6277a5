"""Users as they are stored: hashes with a key of the installation, which tell no name and match those of no other installation."""

from __future__ import annotations

import base64
import hashlib

__all__ = ["UserHasher"]

#: 72 bits: among a hundred million users the odds that any two share one are one in a million.
_DIGEST_BYTES = 9
_MOST_CACHED = 50_000


#: What a hash begins with: one that comes in again, since an endpoint hashed it before it wrote it, is itself.
_MARK = "u~"
_LENGTH = len(_MARK) + len(base64.urlsafe_b64encode(bytes(_DIGEST_BYTES)))


class UserHasher:
    """`u~` and twelve characters for a user, always the same under the same `key`; of a hash, the hash."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._cache: dict[str, str] = {}

    def __call__(self, user: str) -> str:
        if user.startswith(_MARK) and len(user) == _LENGTH:
            return user
        found = self._cache.get(user)
        if found is None:
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            digest = hashlib.blake2b(user.encode("utf-8", "surrogatepass"), key=self.key, digest_size=_DIGEST_BYTES).digest()
            found = self._cache[user] = _MARK + base64.urlsafe_b64encode(digest).decode()
        return found
