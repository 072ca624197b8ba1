"""RadixPrefix: SGLang's prefix cache (Zheng et al. 2023, RadixAttention), at block granularity.

A tree whose edges are the tokens of one block; a path from the root is a prefix, and each node names the blocks that
hold its last piece. Nothing is hashed but a block's own tokens, nothing can collide, and the shape of what is shared
can be seen. It costs a walk from the root where the chained hash costs a look-up.

Eviction is leaf-first LRU by construction: see kv/pool.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.kv.block_extras import block_extras
from minivllm.request import Request


class Node:
    __slots__ = ("blocks", "children", "edge", "parent")

    def __init__(self, parent: Node | None, edge: Any):
        self.parent = parent
        self.edge = edge  # what tells one block apart (kv/block_extras.py), and its tokens
        self.children: dict[Any, Node] = {}
        self.blocks: dict[int, None] = {}  # equal blocks, oldest first


class RadixPrefix:
    def __init__(self, **_: Any):  # takes the options of its siblings
        self.root = Node(None, None)
        self._node_of: dict[int, Node] = {}

    def keys(self, req: Request, num_blocks: int, block_size: int) -> Sequence[Any]:
        keys = req.block_keys
        for first in range(len(keys) * block_size, num_blocks * block_size, block_size):
            end = first + block_size
            keys.append((*block_extras(req, first, end), *req.token_ids[first:end]))
        return keys

    def match(self, keys: Sequence[Any], first: int = 0) -> list[int]:
        blocks, node = [], self.root
        for i, key in enumerate(keys):
            node = node.children.get(key)
            if node is None or (i >= first and not node.blocks):
                break
            if i >= first:
                blocks.append(next(iter(node.blocks)))
        return blocks

    def publish(self, keys: Sequence[Any], first: int, blocks: Sequence[int]) -> None:
        node = self.root
        for i, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key)
            node = child
            if i >= first:
                block = blocks[i - first]
                assert block not in self._node_of, f"block {block} is published already"
                node.blocks[block] = None
                self._node_of[block] = node

    def drop(self, block: int) -> bool:
        node = self._node_of.pop(block, None)
        if node is None:
            return False
        del node.blocks[block]
        while node.parent is not None and not node.blocks and not node.children:
            del node.parent.children[node.edge]
            node = node.parent
        return True

    def __contains__(self, block: int) -> bool:
        return block in self._node_of
