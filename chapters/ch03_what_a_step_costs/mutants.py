"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "a multiplication without its addition": ("2 * tokens * layers", "tokens * layers"),
    "scores for every token": ("2 * len(requests) * head", "2 * tokens * head"),
    "weights are read for each request": (
        "weight_bytes * (layers + head)",
        "weight_bytes * len(requests) * (layers + head)",
    ),
    "K and V for every query head": (
        "spec.num_kv_heads * spec.head_size * kept",
        "spec.num_heads * spec.head_size * kept",
    ),
    "a query sees what comes after it": ("now * before + now * (now + 1) // 2", "now * (before + now)"),
    "a query does not see its own token": ("now * (now + 1) // 2", "now * (now - 1) // 2"),
    "new tokens are not kept": ("sum(now + before for", "sum(before for"),
    "the LM head is not read": ("weight_bytes * (layers + head)", "weight_bytes * layers"),
}
