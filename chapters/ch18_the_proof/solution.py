"""The solution of chapter 18's exercise."""

from __future__ import annotations

from chapters.crowd import Guest, random_tokens


def losing_workload() -> list[Guest]:
    """Four chats, and a long prompt whose owner would rather have it computed at once."""
    chats = [Guest(f"chat {i}", random_tokens(8, i), num_new=30) for i in range(4)]
    return [*chats, Guest("long", random_tokens(300, 99), num_new=4, arrives=5)]
