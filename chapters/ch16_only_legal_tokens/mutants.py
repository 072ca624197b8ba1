"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "looks at a token's first byte alone": ("for byte in data:", "for byte in data[:1]:"),
    "goes where no text ends": ("after in useful", "after is not None"),
    "looks back one step from the end": ("    while more := ", "    if more := "),
    "lets a text end anywhere": ("state in automaton.accepting if token == eos", "True if token == eos"),
    "admits special tokens": ("bool(data) and after", "after"),
    "counts bits from the other end": ("1 << token % 32", "1 << 31 - token % 32"),
    "drops the last word": ("-(-len(vocabulary) // 32)", "(len(vocabulary) // 32)"),
}
