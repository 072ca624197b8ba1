"""A throttle that notes what a proposer tells it, and cuts as it is told."""


class Throttle:
    def __init__(self, counts):
        self.counts, self.told = counts, []

    def reset(self, row):
        self.told.append(("reset", row))

    def learn(self, *args):
        self.told.append(("learn", *args))

    def cut(self, *args):
        self.told.append(("cut", *args))
        return self.counts
