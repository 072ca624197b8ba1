"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "frees a block that another table names": (
        "            if self.names[block] == 0:\n                self.free",
        "            if True:\n                self.free",
    ),
    "takes some and then gives up": (
        "        if n > len(self.free):\n",
        "        while n > len(self.free) and self.free:\n            self.free.popitem()\n"
        "        if n > len(self.free):\n",
    ),
    "takes the block that was freed last": ("popitem(last=False)", "popitem(last=True)"),
    "leaves a touched block on the free list": ("            del self.free[block]\n", "            pass\n"),
    "forgets who named a block": ("        self.names[block] += 1\n", "        self.names[block] = 1\n"),
    "searches": (
        "            del self.free[block]\n",
        "            free = list(self.free)\n            free.remove(block)\n"
        "            self.free = OrderedDict.fromkeys(free)\n",
    ),
}
