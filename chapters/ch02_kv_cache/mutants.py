"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "writes over the past": ("self.keys[self.length : end] = k", "self.keys[: len(k)] = k"),
    "returns the new tokens alone": (
        "return self.keys[:end], self.values[:end]",
        "return self.keys[end - len(k) : end], self.values[end - len(v) : end]",
    ),
    "returns the whole room": ("return self.keys[:end], self.values[:end]", "return self.keys, self.values"),
    "counts before it refuses": (
        "        if end > len(self.keys):",
        "        self.length, begin = end, self.length\n        if end > len(self.keys):",
    ),
    "grows by copying": (
        "return self.keys[:end], self.values[:end]",
        "return self.keys[:end].clone(), self.values[:end].clone()",
    ),
}
