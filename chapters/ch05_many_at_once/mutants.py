"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "is static: nobody enters until all have left": (
        "        while self.waiting and len",
        "        empty = not self.running\n        while empty and self.waiting and len",
    ),
    "lets in one a step": ("        while self.waiting and len", "        if self.waiting and len"),
    "has one seat too many": ("len(self.running) < self.seats", "len(self.running) <= self.seats"),
    "serves the last who came": ("self.waiting.popleft()", "self.waiting.pop()"),
    "gives a token too many": ("if request.num_left > 0", "if request.num_left >= 0"),
    "fills the seats when the step is over": (
        "        while self.waiting and len(self.running) < self.seats:\n"
        "            self.running.append(self.waiting.popleft())\n"
        "        served = [request.name for request in self.running]\n",
        "        served = [request.name for request in self.running]\n"
        "        while self.waiting and len(self.running) < self.seats:\n"
        "            self.running.append(self.waiting.popleft())\n",
    ),
}
