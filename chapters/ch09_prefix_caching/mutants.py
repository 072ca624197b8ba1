"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "finds a prompt whole": ("self.keys(tokens[:-1])", "self.keys(tokens)"),
    "finds the last block alone": (
        "            blocks.append(self.block_of[key])",
        "            blocks = [self.block_of[key]]",
    ),
    "leaves found blocks on the free list": ("                del self.free[block]\n", "                pass\n"),
    "names nobody": ("            self.names[block] += 1\n        return", "        return"),
    "takes found blocks for free ones": ("len(self.free) - num_found_free", "len(self.free)"),
    "takes before it touches": (
        "        for block in found:\n            if self.names[block] == 0:\n                del self.free[block]\n"
        "            self.names[block] += 1\n        return found + [self.take() for _ in range(num_missing)]",
        "        taken = [self.take() for _ in range(num_missing)]\n        for block in found:\n"
        "            self.free.pop(block, None)\n            self.names[block] += 1\n        return found + taken",
    ),
}
