"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "takes the largest size": ("min(large_enough)", "max(large_enough)"),
    "takes a size that is too small": ("size >= len(step.token_ids)", "size > 0"),
    "pads a step that fits": ("size >= len(step.token_ids)", "size > len(step.token_ids)"),
    "writes over a request's K and V": ("[spare * block_size] * num_added", "step.slots[:1] * num_added"),
    "takes a block for a slot": ("spare * block_size", "spare"),
    "reads what nobody wrote": ("[1] * num_added", "[2] * num_added"),
    "reads nothing at all": ("[1] * num_added", "[0] * num_added"),
    "reads a request's past": ("[[spare]] * num_added", "step.tables[:1] * num_added"),
    "lets a table's width follow from its request": (
        "tables=[table + [spare] * (max_blocks - len(table)) for table in tables]",
        "tables=tables",
    ),
    "changes the step that it was given": (
        "step.lengths + [1] * num_added",
        "[*step.lengths, *(step.lengths.append(1) or 1 for _ in range(num_added))]",
    ),
}
