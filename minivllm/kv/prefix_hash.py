"""HashPrefix: vLLM V1's prefix cache. A full block is known by a hash that is chained over all blocks before it.

    key(0) = H(root, tokens 0..15, adapter, salt)      key(i) = H(key(i-1), tokens of block i)

So one dictionary look-up a block finds the longest cached beginning, with no tree. Two requests that compute the same
prefix side by side hold equal blocks: both stay (a table is only ever appended to), and either may be evicted.

A collision would serve another prompt's KV (vLLM #12621), hence a strong hash, and a root that an attacker cannot know:
sha256 is collision-proof by itself, xxh3-128 is faster but needs the secret root. Payloads are CBOR, which is the same
in every process and language (vLLM's `sha256_cbor`, `xxhash_cbor`), unlike Python's `hash()`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

from minivllm.request import Request

KeyHash = Callable[[object], bytes]


def sha256_cbor(payload: object) -> bytes:
    """32 bytes. Collision-resistant."""
    import cbor2

    return hashlib.sha256(cbor2.dumps(payload, canonical=True)).digest()


def xxhash_cbor(payload: object) -> bytes:
    """16 bytes. About as strong as its root key is secret; not for tenants who may aim collisions at each other."""
    import cbor2
    import xxhash

    return xxhash.xxh3_128_digest(cbor2.dumps(payload, canonical=True))


class HashPrefix:
    def __init__(self, key_hash: KeyHash = sha256_cbor, seed: str | None = None):
        self._hash = key_hash
        self._root = key_hash(os.urandom(32) if seed is None else seed)
        self._blocks: dict[bytes, dict[int, None]] = {}  # equal blocks, oldest first
        self._key_of: dict[int, bytes] = {}

    def keys(self, req: Request, num_blocks: int, block_size: int) -> Sequence[bytes]:
        keys = req.block_keys
        for i in range(len(keys), num_blocks):
            tokens = req.token_ids[i * block_size : (i + 1) * block_size]
            # Adapter and salt divide the whole space, so they need to enter the chain only at its beginning.
            payload = (keys[-1], tokens) if i else (self._root, tokens, req.adapter, req.cache_salt)
            keys.append(self._hash(payload))
        return keys

    def match(self, keys: Sequence[bytes]) -> list[int]:
        blocks = []
        for key in keys:
            known = self._blocks.get(key)
            if known is None:
                break
            blocks.append(next(iter(known)))
        return blocks

    def publish(self, keys: Sequence[bytes], first: int, blocks: Sequence[int]) -> None:
        for key, block in zip(keys[first:], blocks, strict=True):
            assert block not in self._key_of, f"block {block} is published already"
            self._blocks.setdefault(key, {})[block] = None
            self._key_of[block] = key

    def drop(self, block: int) -> bool:
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        known = self._blocks[key]
        del known[block]
        if not known:
            del self._blocks[key]
        return True

    def __contains__(self, block: int) -> bool:
        return block in self._key_of
