"""A vocabulary as a tree of bytes, laid out level by level, so that numpy can walk it for all tokens at once.

    tokens  a, ab, ac, b          level 1   a  b
                                  level 2   ab ac       (children of a)

Tokens that share a beginning share its nodes: walking an automaton down the tree visits each beginning once. A level is
one indexing operation, `next[state of parent, byte]`, so a walk costs as many as the longest token has bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenTrie:
    def __init__(self, tokens: Sequence[bytes]):
        """Tokens of no bytes are in no node."""
        node_of = {b"": 0}  # node 0 is the root
        parents, bytes_, self.levels = [0], [0], []
        texts = sorted({token[:n] for token in tokens for n in range(1, len(token) + 1)}, key=lambda t: (len(t), t))
        for text in texts:
            if len(text) > len(self.levels):
                self.levels.append([len(node_of), 0])
            parents.append(node_of[text[:-1]])
            bytes_.append(text[-1])
            node_of[text] = len(node_of)
            self.levels[-1][1] = len(node_of)
        self.parents = np.array(parents, np.int32)  # [nodes]
        self.bytes = np.array(bytes_, np.uint8)  # [nodes]: the last byte of a node's text
        self.token_ids = np.array([i for i, token in enumerate(tokens) if token], np.int64)
        self.token_nodes = np.array([node_of[token] for token in tokens if token], np.int64)  # of each of token_ids

    def walk(self, table: np.ndarray, classes: np.ndarray, state: int) -> np.ndarray:
        """The state after each token of `token_ids`, from `state`.

        table [states, classes]: the next state; classes [256]: the class of a byte. A dead state must lead to itself.
        """
        states = np.empty(len(self.parents), table.dtype)
        states[0] = state
        columns = classes[self.bytes]
        for begin, end in self.levels:
            states[begin:end] = table[states[self.parents[begin:end]], columns[begin:end]]
        return states[self.token_nodes]
