"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "drops the token that crosses the line": ("ordered.cumsum(-1) - ordered", "ordered.cumsum(-1)"),
    "keeps one token too many": (
        "kept.sum(-1, keepdim=True) - 1",
        "kept.sum(-1, keepdim=True).clamp(max=probs.shape[1] - 1)",
    ),
    "gives every row the first one's top_p": ("top_p[:, None]", "top_p[0]"),
    "believes that rows sum to one": (" * ordered.sum(-1, keepdim=True)", ""),
    "breaks a tie": ("probs >= cut", "probs > cut"),
    "picks the slowest": (".argmin(-1)", ".argmax(-1)"),
    "picks evenly among those kept": ("noise / left", "torch.where(left > 0, noise, torch.inf)"),
    "picks the likeliest": ("(noise / left).argmin(-1)", "left.argmax(-1)"),
}
