"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "a prompt that fits into a step": ("random_tokens(300, 99)", "random_tokens(20, 99)"),
    "nobody is there to be disturbed": ("range(4)", "range(0)"),
    "longer than the rules allow": ("random_tokens(300, 99)", "random_tokens(500, 99)"),
    "prompts that begin alike": ("random_tokens(8, i)", "random_tokens(40, 1)"),
    "the chats have ended before": ("arrives=5", "arrives=60"),
}
