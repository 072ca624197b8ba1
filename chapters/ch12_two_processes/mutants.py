"""Wrong solutions that the exercise's tests must catch: (what the solution says, what this one says)."""

MUTANTS = {
    "gives blocks back under a step that still writes": (
        "if request is not None and not request.num_in_flight:",
        "if request is not None:",
    ),
    "gives blocks back at the first landing, and again at the second": (
        "            elif not request.num_in_flight:\n",
        "            else:\n",
    ),
    "never gives back what was aborted in flight": (
        "            elif not request.num_in_flight:\n                self.free += request.blocks\n",
        "",
    ),
    "goes by the name": ("if self.live.get(request.id) is request:", "if request.id in self.live:"),
    "hands out what came late": (
        "wanted: dict[str, int] = {}",
        "wanted = {request.id: token for request, token in zip(self.in_flight[0], tokens)}",
    ),
    "forgets that who has ended may be in the next step": (
        "                    self.abort(request.id)\n",
        "                    self.free += self.live.pop(request.id).blocks\n",
    ),
    "keeps who has ended": ("if token == END:", "if False:"),
    "takes an abort that came too late for an error": ("self.live.pop(req_id, None)", "self.live.pop(req_id)"),
}
