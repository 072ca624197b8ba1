"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "reads past the end": ("(x[:length] for x in read(block))", "read(block)"),
    "does not fade what it has": ("total = total * fade + weights @ values", "total = total + weights @ values"),
    "does not fade the norm": ("norm = norm * fade + weights.sum()", "norm = norm + weights.sum()"),
    "subtracts nothing": ("new_peak = torch.maximum(peak, scores.max())", "new_peak = torch.tensor(0.0)"),
    "reads blocks that it does not need": ("            break\n", "            read(block)\n            continue\n"),
    "takes the pool's order for the request's": ("for block in table:", "for block in sorted(table):"),
}
