"""HashPrefix: vLLM V1's prefix cache. A full block is known by a hash that is chained over all blocks before it.

    key(0) = H(root, tokens 0..15, adapter, salt)      key(i) = H(key(i-1), tokens of block i)

and what else a block holds beside tokens follows them (kv/block_extras.py).

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

from minivllm.kv.block_extras import block_extras
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
        for first in range(len(keys) * block_size, num_blocks * block_size, block_size):
            end = first + block_size
            parent = keys[-1] if keys else self._root
            keys.append(self._hash((parent, req.token_ids[first:end], *block_extras(req, first, end))))
        return keys

    def match(self, keys: Sequence[bytes], first: int = 0) -> list[int]:
        blocks = []
        for key in keys[first:] if first else keys:
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
