"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "leaves the tokens behind": (
        "            self.tokens[new, :num_tokens] = self.tokens[old, :num_tokens]\n",
        "",
    ),
    "leaves the blocks behind": ("            self.blocks[new] = self.blocks[old]\n", ""),
    "keeps old blocks behind the new ones": (
        "self.blocks[new] = self.blocks[old]",
        "self.blocks[new, : self.num_blocks[old]] = self.blocks[old, : self.num_blocks[old]]",
    ),
    "looks for the moved one where it was": (
        "self.req_ids[new], self.row_of[req_id] = req_id, new",
        "self.req_ids[new] = req_id",
    ),
    "still knows those who left": ("self.row_of.pop(req_id)", "self.row_of[req_id]"),
    "moves one who leaves": (
        "[row for row in range(num_left, num_before) if row not in gone]",
        "list(range(num_before - len(holes), num_before))",
    ),
    "counts the moved one's tokens wrongly": ("            self.num_tokens[new] = num_tokens\n", ""),
    "says nothing of its moves": ("        return moves\n", "        return []\n"),
    "says its moves backwards": ("        return moves\n", "        return [(new, old) for old, new in moves]\n"),
}
